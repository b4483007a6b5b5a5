"""The server's state as JSON and named tensors, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor

from fedcams.rounds import Server, ServerState
from fedcams.rounds.messages import Accepted
from fedcams.runs.folder import RunError


def pack(state: ServerState, server: Server) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The small things as JSON; `model.<name>` for parameters and buffers, `optimizer.<name>`, `downlink.<name>`.

    The model stands under the names of its own tensors, so that it can be used without fedcams.
    """
    tensors = {f"model.{name}": part for name, part in server.layout.split(state.x).items()}
    if server.buffer_layout is not None and state.buffers is not None:
        tensors |= {f"model.{name}": part for name, part in server.buffer_layout.split(state.buffers).items()}
    saved = {
        "optimizer": _pack(state.optimizer, "optimizer", tensors),
        "downlink": _pack(state.downlink, "downlink", tensors),
        "accepted": [[client, last.round, last.digest.hex()] for client, last in sorted(state.accepted.items())],
    }
    return saved, tensors


def unpack(
    round: int, saved: Mapping[str, Any], tensors: Mapping[str, Tensor], server: Server, like: ServerState
) -> ServerState:
    """The state that `pack` took apart. `like` is the state before the first round: it gives types and the device.

    Tensors are copied into memory of their own: sums may depend on how it is aligned, and in a file it is otherwise.
    """
    device = like.x.device
    tensors = {name: tensor.to(device, copy=True) for name, tensor in tensors.items()}
    model = {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name.startswith("model.")}
    return ServerState(
        round,
        server.layout.join(model),
        None if server.buffer_layout is None else server.buffer_layout.join(model),
        _unpack(saved["optimizer"], tensors, like.optimizer),
        _unpack(saved["downlink"], tensors, like.downlink),
        _accepted(saved),
    )


def restore(
    round: int,
    saved: Mapping[str, Any],
    names: Iterable[str],
    read: Callable[[str], Tensor],
    server: Server,
    like: ServerState,
) -> ServerState:
    """The same, tensor by tensor into the memory of `like`: takes no more than the largest tensor beside it."""
    _, memory = pack(like, server)
    tensors: dict[str, Tensor] = {}
    for name in names:
        found, target = read(name), memory.get(name)
        fits = target is not None and (target.shape, target.dtype) == (found.shape, found.dtype)
        tensors[name] = target.copy_(found) if target is not None and fits else found.clone()
    return like._replace(
        round=round,
        optimizer=_unpack(saved["optimizer"], tensors, like.optimizer),
        downlink=_unpack(saved["downlink"], tensors, like.downlink),
        accepted=_accepted(saved),
    )


def _accepted(saved: Mapping[str, Any]) -> dict[int, Accepted]:
    return {client: Accepted(last, bytes.fromhex(name)) for client, last, name in saved["accepted"]}


def _pack(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """JSON for a tree of named tuples, dataclasses and mappings; the tensors in it go to `tensors`."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        tensors[name] = value
        return {"tensor": name}
    if isinstance(value, Mapping):
        return {"items": [[key, _pack(part, f"{name}.{key}", tensors)] for key, part in value.items()]}
    return {"fields": {key: _pack(part, f"{name}.{key}", tensors) for key, part in _fields(value, name).items()}}


def _unpack(saved: Any, tensors: Mapping[str, Tensor], like: Any) -> Any:
    """The reverse; `like` knows the types, which are not saved."""
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
        "make state of tensors, numbers, text, mappings, named tuples and dataclasses"
    )
