"""Golden payloads: this version reads what older versions sent, and writes the same bytes."""

from __future__ import annotations

import hashlib
import json

from fedcams import decode
from fedcams.wire import unpack
from make_golden import FOLDER, LAYOUT, golden_payloads
from together import together

MANIFEST = json.loads((FOLDER / "manifest.json").read_text())


@together("spec", MANIFEST)
def test_golden_payloads_are_read_and_written_alike(spec: str) -> None:
    entry = MANIFEST[spec]
    data = (FOLDER / entry["file"]).read_bytes()
    assert len(data) == entry["bytes"]
    assert golden_payloads()[spec] == data
    payload = unpack(data, LAYOUT)
    assert str(payload.compressor) == spec
    assert payload.pack() == data
    assert hashlib.sha256(decode(data, LAYOUT).numpy().tobytes()).hexdigest() == entry["decoded_sha256"]


def test_every_example_has_a_golden_payload() -> None:
    assert set(golden_payloads()) == set(MANIFEST), "run `make golden` after adding a compressor"
