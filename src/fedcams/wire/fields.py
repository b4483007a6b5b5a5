"""Fields as bytes: how each kind of field is stored in a payload, little-endian, starting at a whole byte."""

from __future__ import annotations

import math
import sys

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcams.bits.packing import pack_uints, packed_size, unpack_uints
from fedcams.bits.parallel import map_threads
from fedcams.bits.rice import rice_decode, rice_encode, rice_size
from fedcams.bits.vectors import abs_sum, read_floats
from fedcams.compress.base import Field
from fedcams.errors import BadPadding, NonFinite, Truncated

assert sys.byteorder == "little", "payloads are little-endian and are read and written without swapping"

Bytes = NDArray[np.uint8]


def pack_field(field: Field, row: Tensor, d: int) -> memoryview:
    """Return one row `[columns]` of a field as bytes; `d` is the number of coordinates of the vector."""
    row = row.detach().cpu().contiguous()
    if field.kind == "index":
        return rice_encode(row.numpy(), d).data
    if field.kind == "uint":
        return pack_uints(row.to(torch.int64).numpy(), field.bits).data
    return row.view(torch.uint8).numpy().data


def field_size(field: Field, row: Tensor, d: int) -> int:
    """Return the exact length of `pack_field` with these arguments, without packing."""
    if field.kind == "index":
        return rice_size(row.detach().cpu().contiguous().numpy(), d)
    return fixed_size(field)


def index_sizes(rows: Tensor, d: int) -> list[int]:
    """Return the exact packed length of each row `[C, k]` of positions below d, computed on several threads."""
    host = rows.detach().to("cpu", non_blocking=True)  # from a GPU: into pinned memory
    if rows.is_cuda:
        torch.cuda.current_stream(rows.device).synchronize()
    return map_threads(list(host.contiguous().numpy()), lambda row: rice_size(row, d))


def fixed_size(field: Field) -> int:
    """Return the bytes of a field whose length does not depend on its contents; for positions, the minimum."""
    bits = {"f32": 32, "bf16": 16, "uint": field.bits, "packed": field.bits, "sign": 1, "index": 1}[field.kind]
    return packed_size(field.count * bits)


def unpack_field(name: str, field: Field, data: Bytes, d: int) -> tuple[Tensor, int]:
    """Read a field from the start of `data`; return a tensor `[columns]` and the number of bytes read.

    Raises a WireError for data that is too short, not finite or not canonical; it names the field.
    """
    size = fixed_size(field)
    if size > data.size:  # before anything is allocated
        raise Truncated(f"field {name!r} needs at least {size} bytes, {data.size} are left")
    if field.kind == "index":
        positions, size = rice_decode(data, field.count, d)
        return torch.from_numpy(positions), size
    if field.kind == "uint":
        values = torch.from_numpy(unpack_uints(data[:size], field.bits, field.count))
        return values.to(field.dtype), size
    if field.kind == "f32":
        vector, total = read_floats(data[:size])
        return _finite(name, torch.from_numpy(vector), total), size
    body = torch.from_numpy(data[:size].copy())
    if field.kind == "bf16":
        values = body.view(field.dtype)
        return _finite(name, values, abs_sum(values.float())), size
    _check_padding(name, field, body)
    return body, size


def _check_padding(name: str, field: Field, body: Tensor) -> None:
    used = field.count * max(1, field.bits) % 8
    if used and int(body[-1]) >> used:
        what = "signs" if field.kind == "sign" else f"{field.bits}-bit integers"
        raise BadPadding(f"field {name!r}: the bits after the last of {field.count} {what} are not zero")


def _finite(name: str, values: Tensor, total: float) -> Tensor:
    """Return the values; refuse them if their absolute sum `total` is not finite."""
    if not math.isfinite(total):
        bad = int((~torch.isfinite(values)).sum())
        raise NonFinite(f"field {name!r}: {bad} of {values.numel()} numbers are NaN or infinite")
    return values
