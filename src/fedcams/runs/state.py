"""The server's state as JSON and named tensors, and back, and the files that hold the tensors."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fedcams.bits.checksum import crc32_of
from fedcams.durable import write_whole
from fedcams.rounds import Server, ServerState
from fedcams.rounds.messages import Accepted
from fedcams.runs.folder import RunError

if TYPE_CHECKING:
    from torch import Tensor

KINDS = {
    "torch.float32": "F32",
    "torch.float64": "F64",
    "torch.bfloat16": "BF16",
    "torch.int64": "I64",
    "torch.int32": "I32",
    "torch.uint8": "U8",
}
PIECE = 2**24
BY_FIELD = ("optimizer", "downlink", "control", "guard", "secret", "spent")
"""Fields of the state that are saved under their own names; models are saved under those of their tensors."""


def pack(state: ServerState, server: Server) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return small values for JSON, and the tensors: `model.<name>`, `averaged.<name>`, `optimizer.<name>`, ….

    Models are stored under the names of their own tensors, so that they can be used without fedcams.
    """
    tensors = _model("model", server, state.x, state.buffers)
    if state.average is not None:
        tensors |= _model("averaged", server, state.average.x, state.average.buffers)
    saved = {name: _pack_(getattr(state, name), name, tensors) for name in BY_FIELD}
    accepted = [[client, last.round, last.digest.hex()] for client, last in sorted(state.accepted.items())]
    return {**saved, "accepted": accepted}, tensors


def restore_(
    round: int,
    saved: Mapping[str, Any],
    names: Iterable[str],
    read: Callable[[str], Tensor],
    server: Server,
    like: ServerState,
) -> ServerState:
    """Return the state that `pack` took apart, in the memory of `like`, the state before the first round.

    Tensors are read one by one, so the extra memory is at most that of the largest one.
    """
    _, memory = pack(like, server)
    tensors: dict[str, Tensor] = {}
    for name in names:
        found, target = read(name), memory.get(name)
        fits = target is not None and (target.shape, target.dtype) == (found.shape, found.dtype)
        tensors[name] = target.copy_(found) if target is not None and fits else found.to(like.x.device, copy=True)
    if missing := sorted(name for name in memory if name not in tensors):
        raise KeyError(missing[0])
    parts = {name: _unpack(saved[name], tensors, getattr(like, name)) for name in BY_FIELD if name in saved}
    accepted = {client: Accepted(last, bytes.fromhex(name)) for client, last, name in saved["accepted"]}
    return like._replace(round=round, accepted=accepted, **parts)


def _model(prefix: str, server: Server, x: Tensor, buffers: Tensor | None) -> dict[str, Tensor]:
    tensors = {f"{prefix}.{name}": part for name, part in server.layout.split(x).items()}
    if server.buffer_layout is not None and buffers is not None:
        tensors |= {f"{prefix}.{name}": part for name, part in server.buffer_layout.split(buffers).items()}
    return tensors


def _pack_(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Return JSON for a tree of named tuples, dataclasses and mappings; its tensors are added to `tensors`."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.Tensor):
        tensors[name] = value
        return {"tensor": name}
    if isinstance(value, Mapping):
        return {"items": [[key, _pack_(part, f"{name}.{key}", tensors)] for key, part in value.items()]}
    return {"fields": {key: _pack_(part, f"{name}.{key}", tensors) for key, part in _fields(value, name).items()}}


def _unpack(saved: Any, tensors: Mapping[str, Tensor], like: Any) -> Any:
    """Reverse `_pack_`; the types are not saved, so they come from `like`."""
    if not isinstance(saved, dict):
        return saved
    if "tensor" in saved:
        return tensors[saved["tensor"]]
    if "items" in saved:
        return {key: _unpack(part, tensors, None) for key, part in saved["items"]}
    parts = {key: _unpack(part, tensors, getattr(like, key)) for key, part in saved["fields"].items()}
    return type(like)(**parts)


def _fields(value: Any, name: str) -> dict[str, Any]:
    if hasattr(value, "_asdict"):
        return dict(value._asdict())
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    raise RunError(
        f"{name} is a {type(value).__name__}, which a checkpoint cannot hold; "
        "build the state from tensors, numbers, text, mappings, named tuples and dataclasses"
    )


# -- files -------------------------------------------------------------------------------------------------------------


def write_tensors(path: Path, tensors: Mapping[str, Tensor], over: Path | None = None) -> int:
    """Write a safetensors file without copying the tensors, as the library would, and return its CRC-32.

    `over` is as in `write_whole`.
    """
    header, at = {}, 0
    for name, tensor in tensors.items():
        end = at + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": KINDS[str(tensor.dtype)], "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    parts: list[bytes | memoryview] = [len(text).to_bytes(8, "little"), text, *map(_bytes, tensors.values())]
    write_whole(path, *parts, over=over)
    return crc32_of(parts)


def file_checksum(path: Path) -> int:
    """Return the CRC-32 of a file, which is read piece by piece."""
    return crc32_of(_pieces(path))


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(PIECE):
            yield piece
