"""Layout: the trainable parameters of a model as one flat float32 vector, and back."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedcams.bits.vectors import abs_sum
from fedcams.errors import LayoutError, UpdateError
from fedcams.registry.fields import nearest


@dataclass(frozen=True)
class Layout:
    """Names and shapes of tensors laid end to end, row-major and unpadded, in this order.

    Two parties may exchange vectors exactly when their layouts have the same `id`.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if len(self.names) != len(self.shapes):
            raise LayoutError(f"{len(self.names)} names but {len(self.shapes)} shapes; give one shape for each name")
        if len(set(self.names)) != len(self.names):
            twice = next(name for name in self.names if self.names.count(name) > 1)
            raise LayoutError(f"the name {twice!r} stands twice; names must be unique")

    # -- where a layout comes from -------------------------------------------------------------------------------

    @classmethod
    def flat(cls, d: int) -> Layout:
        """The layout of a bare vector of d coordinates."""
        if d < 1:
            raise LayoutError(f"d={d}: a vector needs at least one coordinate")
        return cls(("",), ((d,),))

    @classmethod
    def of(cls, model: nn.Module) -> Layout:
        """The trainable parameters of a model in `named_parameters` order: tied ones once, frozen ones left out."""
        parameters = _trainable(model)
        if not any(parameter.numel() for parameter in parameters.values()):
            raise LayoutError(f"{type(model).__name__} has no trainable parameter; set requires_grad on some")
        return cls._of_tensors(parameters)

    @classmethod
    def of_buffers(cls, model: nn.Module) -> Layout | None:
        """The floating-point buffers (batch-norm statistics), which are averaged and never stepped; None if none."""
        buffers = _float_buffers(model)
        return cls._of_tensors(buffers) if buffers else None

    @classmethod
    def _of_tensors(cls, tensors: Mapping[str, Tensor]) -> Layout:
        return cls(tuple(tensors), tuple(tuple(tensor.shape) for tensor in tensors.values()))

    # -- what it says --------------------------------------------------------------------------------------------

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        """The number of coordinates of each tensor."""
        return tuple(math.prod(shape) for shape in self.shapes)

    @functools.cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each tensor starts, and at the end d."""
        return (0, *itertools.accumulate(self.sizes))

    @property
    def d(self) -> int:
        """The length of the flat vector."""
        return self.offsets[-1]

    @functools.cached_property
    def id(self) -> bytes:
        """Eight bytes that stand for names, shapes and order."""
        text = json.dumps([self.names, self.shapes], ensure_ascii=True, separators=(",", ":"))
        return hashlib.blake2b(text.encode(), digest_size=8, person=b"fedcams.layout").digest()

    # -- vectors -------------------------------------------------------------------------------------------------

    def split(self, flat: Tensor) -> dict[str, Tensor]:
        """Views of `flat [..., d]` as name -> `[..., *shape]`; nothing is copied."""
        self.check(flat)
        lead = flat.shape[:-1]
        parts = flat.split(self.sizes, dim=-1)
        return {
            name: part.view((*lead, *shape)) for name, shape, part in zip(self.names, self.shapes, parts, strict=True)
        }

    def join(self, tensors: Mapping[str, Tensor], out: Tensor | None = None) -> Tensor:
        """`[..., d]` from name -> `[..., *shape]`, copied (into `out` where given)."""
        parts = [self._part(tensors, name, shape) for name, shape in zip(self.names, self.shapes, strict=True)]
        if out is None:
            return torch.cat([part.to(torch.float32) for part in parts], dim=-1)
        for part, target in zip(parts, out.split(self.sizes, dim=-1), strict=True):
            target.copy_(part)
        return out

    def _part(self, tensors: Mapping[str, Tensor], name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in tensors:
            raise LayoutError(f"tensor {name!r} is missing{nearest(name, tensors)}; the layout needs it as {shape}")
        tensor = tensors[name]
        lead = tensor.shape[: tensor.dim() - len(shape)]
        if tuple(tensor.shape[len(lead) :]) != shape:
            raise LayoutError(f"tensor {name!r} has shape {tuple(tensor.shape)}; the layout needs it as {shape}")
        return tensor.detach().reshape(*lead, math.prod(shape))

    def check(self, flat: Tensor) -> None:
        """Refuses a tensor that is not a float vector `[..., d]`."""
        if not flat.is_floating_point() or flat.dim() == 0 or flat.shape[-1] != self.d:
            raise LayoutError(f"got {flat.dtype} {tuple(flat.shape)}; this layout has float vectors [..., {self.d}]")

    def check_finite(self, flat: Tensor, what: str = "update") -> None:
        """Refuses NaN and infinity, naming the tensors and the counts."""
        self.check(flat)
        if not math.isfinite(abs_sum(flat.detach().flatten())):  # one read: neither NaN nor infinity hides in it
            bad = self._bad_tensors(flat)
            raise UpdateError(f"the {what} is not finite: {', '.join(bad)}; lower the learning rate or clip")

    def _bad_tensors(self, flat: Tensor) -> Iterator[str]:
        for name, part in self.split(flat).items():
            bad = part.numel() - int(torch.isfinite(part).sum())
            if bad:
                yield f"{name or 'vector'!r} has {bad} of {part.numel()} values NaN or infinite"

    # -- models --------------------------------------------------------------------------------------------------

    def read(self, model: nn.Module, out: Tensor | None = None) -> Tensor:
        """The model's tensors of this layout, copied into a flat `[d]`."""
        return self.join(_named(model), out)

    def write(self, flat: Tensor, model: nn.Module) -> None:
        """Copies `flat [d]` into the model's tensors of this layout."""
        tensors = _named(model)
        with torch.no_grad():
            for (name, part), shape in zip(self.split(flat).items(), self.shapes, strict=True):
                self._part(tensors, name, shape)
                tensors[name].copy_(part)


def _trainable(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def _float_buffers(model: nn.Module) -> dict[str, Tensor]:
    kept = model.state_dict().keys()  # non-persistent buffers are not part of a model's state
    return {name: b for name, b in model.named_buffers() if b.is_floating_point() and name in kept}


def _named(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def segments(layout: Layout, scope: str) -> Sequence[tuple[int, int]]:
    """The ranges [start, stop) that a compressor treats apart: the whole vector, or each non-empty tensor."""
    if scope == "global":
        return [(0, layout.d)]
    return [(a, b) for a, b in itertools.pairwise(layout.offsets) if b > a]
