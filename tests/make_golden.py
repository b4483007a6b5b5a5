"""Writes the golden payloads: one for each example of each registered compressor. Run by `make golden`."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch
from torch import Tensor

from fedcams import Layout, compressor
from fedcams.registry import registered
from fedcams.wire import pack

FOLDER = Path(__file__).parent / "golden"
LAYOUT = Layout(("conv.weight", "conv.bias", "head.weight"), ((8, 3, 3, 3), (8,), (10, 8)))
KEY = 2022


def golden_vector() -> Tensor:
    """Exact in float32 on every machine: multiples of 2^-20 with ties and zeros among them."""
    i = torch.arange(LAYOUT.d, dtype=torch.int64)
    numbers = (i * 40503 + (i * i * 977)) % 2048 - 1024
    return (numbers * (1 + i % 7)).float() / 2**20


def golden_payloads() -> dict[str, bytes]:
    """Spec -> payload, as the present code writes it."""
    specs = [spec for cls in registered("compressor").values() for spec in cls.examples]
    codes = {spec: compressor(spec).encode(golden_vector(), LAYOUT, KEY) for spec in specs}
    return {spec: pack(compressor(spec), code, LAYOUT) for spec, code in codes.items()}


def file_name(spec: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in spec).strip("-") + ".bin"


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    manifest = {}
    for spec, payload in golden_payloads().items():
        (FOLDER / file_name(spec)).write_bytes(payload)
        decoded = compressor(spec).decode(compressor(spec).encode(golden_vector(), LAYOUT, KEY), LAYOUT)
        digest = hashlib.sha256(decoded.numpy().tobytes()).hexdigest()
        manifest[spec] = {"file": file_name(spec), "bytes": len(payload), "decoded_sha256": digest}
    (FOLDER / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
    print(f"{len(manifest)} golden payloads in {FOLDER.name}/")


if __name__ == "__main__":
    main()
