"""Golden payloads: this version reads what older versions sent, and writes the same bytes."""

from __future__ import annotations

import hashlib
import json
import re
import zlib

import numpy as np
import pytest
import torch

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


# -- decoded as docs/wire-format.md says, by other code ----------------------------------------------------------------


@pytest.mark.parametrize("spec", [spec for spec in MANIFEST if spec.startswith(("blockq", "randk"))])
def test_what_the_page_says_is_enough_to_read_a_payload(spec: str) -> None:
    data = (FOLDER / MANIFEST[spec]["file"]).read_bytes()
    given, body = dict(re.findall(r"(\w+)=([\w./]+)", spec)), data[22 + len(spec) : -4]
    found = np.array(levels(body, given) if spec.startswith("blockq") else drawn(body), np.float32)
    assert torch.equal(torch.from_numpy(found), decode(data, LAYOUT))


@together("spec", [spec for spec in MANIFEST if spec.startswith("blockq")])
@together("step", [b"\x7f\x7f", b"\x7f\xff"])
def test_a_step_with_which_levels_would_overflow_counts_as_the_largest(spec: str, step: bytes) -> None:
    """Plus and minus the largest bfloat16, which no writer sends."""
    start, body = (data := (FOLDER / MANIFEST[spec]["file"]).read_bytes())[: 22 + len(spec)], data[22 + len(spec) : -4]
    changed = start + step + body[2:]
    found = decode(changed + zlib.crc32(changed).to_bytes(4, "little"), LAYOUT)
    given = dict(re.findall(r"(\w+)=([\w./]+)", spec))
    assert bool(torch.isfinite(found).all())
    assert torch.equal(found, torch.tensor(levels(step + body[2:], given), dtype=torch.float64).float())


def levels(body: bytes, given: dict[str, str]) -> list[float]:
    """The coordinates of a `blockq` payload."""
    bits, block, d = int(given.get("bits", 4)), int(given.get("block", 128)), LAYOUT.d
    blocks = -(-d // block)
    largest = (2 - 2.0**-7) * 2.0**127 / 2 ** (bits - 1)
    steps = (np.frombuffer(body, "<u2", blocks).astype("<u4") << 16).view("<f4").clip(-largest, largest).tolist()
    number = int.from_bytes(body[2 * blocks :], "little")
    level = [number >> i * bits & 2**bits - 1 for i in range(d)]
    return [(level[i] - 2 ** (bits - 1) + 1) * steps[i // block] for i in range(d)]


def drawn(body: bytes) -> list[float]:
    """The coordinates of a `randk` payload."""
    found, seed, bits = [0.0] * LAYOUT.d, int.from_bytes(body[:4], "little"), (LAYOUT.d - 1).bit_length()
    for i, value in enumerate(np.frombuffer(body, "<f4", offset=4).tolist()):
        place = image(i, seed, bits)
        while place >= LAYOUT.d:
            place = image(place, seed, bits)
        found[place] = value
    return found


def image(i: int, seed: int, bits: int) -> int:
    for j in range(4):
        i = (i * (mixed(8 * seed + 2 * j + 1) | 1) + mixed(8 * seed + 2 * j + 2)) % 2**bits
        i ^= i >> (bits + 1) // 2
    return i


def mixed(v: int) -> int:
    v = ((v >> 32) * 0x9E3779B9 ^ v) % 2**32
    v = ((v ^ v >> 16) * 0x7FEB352D) % 2**32
    v = ((v ^ v >> 15) * 0x846CA68B) % 2**32
    return v ^ v >> 16
