"""Layout: the trainable parameters of a model as one flat float32 vector, and back."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fedcams.bits.cells import Cells
from fedcams.bits.vectors import abs_sum
from fedcams.errors import LayoutError, UpdateError
from fedcams.registry.fields import nearest

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True)
class Layout:
    """The names and shapes of tensors that are laid end to end in one vector, in this order, row-major and unpadded.

    Two parties may exchange vectors if their layouts have the same `id`.

    Arguments:
        names: the name of each tensor.
        shapes: the shape of each tensor.

    Raises:
        LayoutError: if a name repeats, or the numbers of names and shapes differ.

    Examples:
        >>> import fedcams, torch
        >>> model = torch.nn.Linear(3, 2)
        >>> layout = fedcams.Layout.of(model)
        >>> layout.d, layout.names
        (8, ('weight', 'bias'))
        >>> layout.write(torch.ones(layout.d), model)
        >>> model.bias.tolist()
        [1.0, 1.0]
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if len(self.names) != len(self.shapes):
            raise LayoutError(f"{len(self.names)} names but {len(self.shapes)} shapes; give one shape per name")
        if len(set(self.names)) != len(self.names):
            twice = next(name for name in self.names if self.names.count(name) > 1)
            raise LayoutError(f"the name {twice!r} appears twice; names must be unique")

    # -- where a layout comes from -------------------------------------------------------------------------------

    @classmethod
    def flat(cls, d: int) -> Layout:
        """Return the layout of a bare vector of d coordinates; refuses a d below 1."""
        if d < 1:
            raise LayoutError(f"d={d}: a vector needs at least one coordinate")
        return cls(("",), ((d,),))

    @classmethod
    def of(cls, model: nn.Module) -> Layout:
        """Return the layout of a model's trainable parameters, in `named_parameters` order.

        Tied parameters appear once, frozen ones not at all. Refuses a model without trainable parameters.
        """
        parameters = _trainable(model)
        if not any(parameter.numel() for parameter in parameters.values()):
            raise LayoutError(f"{type(model).__name__} has no trainable parameter; set requires_grad on some")
        for name, parameter in parameters.items():
            if parameter.is_complex():
                raise LayoutError(f"the parameter {name!r} is {parameter.dtype}; give its real and imaginary parts")
        return cls._of_tensors(parameters)

    @classmethod
    def of_buffers(cls, model: nn.Module) -> Layout | None:
        """Return the layout of a model's floating-point buffers, such as batch-norm statistics; None if all are empty.

        Buffers are averaged, never stepped. Those that are not part of the model's `state_dict` are left out.
        """
        buffers = _float_buffers(model)
        return cls._of_tensors(buffers) if any(buffer.numel() for buffer in buffers.values()) else None

    @classmethod
    def _of_tensors(cls, tensors: Mapping[str, Tensor]) -> Layout:
        return cls(tuple(tensors), tuple(tuple(tensor.shape) for tensor in tensors.values()))

    def __add__(self, other: Layout) -> Layout:
        """Return the layout of both, one after the other; refuses a name that is in both."""
        return Layout(self.names + other.names, self.shapes + other.shapes)

    # -- what it says --------------------------------------------------------------------------------------------

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        """The number of coordinates in each tensor."""
        return tuple(math.prod(shape) for shape in self.shapes)

    @functools.cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each tensor starts in the vector; the last entry is d."""
        return (0, *itertools.accumulate(self.sizes))

    @property
    def d(self) -> int:
        """The length of the flat vector."""
        return self.offsets[-1]

    @functools.cached_property
    def cells(self) -> Cells:
        """The coordinates that belong together in each tensor, such as the 3x3 weights between two channels."""
        return Cells.of(self.shapes)

    @functools.cached_property
    def id(self) -> bytes:
        """An eight-byte digest of names, shapes and their order."""
        text = json.dumps([self.names, self.shapes], ensure_ascii=True, separators=(",", ":"))
        return hashlib.blake2b(text.encode(), digest_size=8, person=b"fedcams.layout").digest()

    # -- vectors -------------------------------------------------------------------------------------------------

    def split(self, flat: Tensor) -> dict[str, Tensor]:
        """Return views of `flat [..., d]` as name -> `[..., *shape]`; copies nothing, and refuses other shapes."""
        self.check(flat)
        lead = flat.shape[:-1]
        parts = flat.split(self.sizes, dim=-1)
        return {
            name: part.view((*lead, *shape)) for name, shape, part in zip(self.names, self.shapes, parts, strict=True)
        }

    def join(self, tensors: Mapping[str, Tensor], out: Tensor | None = None) -> Tensor:
        """Return a vector `[..., d]` made from name -> `[..., *shape]`, in new memory or in `out`.

        Refuses a mapping that lacks a tensor of this layout, and a tensor of another shape.
        """
        parts = [self._part(tensors, name, shape) for name, shape in zip(self.names, self.shapes, strict=True)]
        if out is None:
            return torch.cat([part.to(torch.float32) for part in parts], dim=-1)
        for part, target in zip(parts, out.split(self.sizes, dim=-1), strict=True):
            target.copy_(part)
        return out

    def _part(self, tensors: Mapping[str, Tensor], name: str, shape: tuple[int, ...], leading: bool = True) -> Tensor:
        """Return a tensor as `[..., size]`; refuses a missing one, and other shapes than `[..., *shape]`.

        Unless `leading` axes are allowed, it refuses all but `[*shape]`.
        """
        if name not in tensors:
            raise LayoutError(f"tensor {name!r} is missing{nearest(name, tensors)}; the layout needs it as {shape}")
        tensor = tensors[name]
        lead = tensor.shape[: tensor.dim() - len(shape)] if leading else ()
        if tuple(tensor.shape[len(lead) :]) != shape:
            raise LayoutError(f"tensor {name!r} has shape {tuple(tensor.shape)}; the layout needs it as {shape}")
        return tensor.detach().reshape(*lead, math.prod(shape))

    def check(self, flat: Tensor) -> None:
        """Refuse a tensor that is not a float vector `[..., d]`."""
        if not flat.is_floating_point() or flat.dim() == 0 or flat.shape[-1] != self.d:
            raise LayoutError(f"got {flat.dtype} {tuple(flat.shape)}; this layout needs float vectors [..., {self.d}]")

    def check_finite(self, flat: Tensor, what: str = "update") -> None:
        """Refuse NaN and infinity in `flat [..., d]`; the error counts them per tensor, and calls the vector `what`."""
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
        """Return the model's tensors of this layout as one vector `[d]`, in new memory or in `out`.

        Refuses a model without them, or of other shapes.
        """
        return self.join(self._tensors(model), out)

    def write(self, flat: Tensor, model: nn.Module) -> None:
        """Copy `flat [d]` into the model's tensors of this layout; refuses a model without them, or of other shapes."""
        tensors = self._tensors(model)  # all are checked before one is written
        with torch.no_grad():
            for name, part in self.split(flat).items():
                tensors[name].copy_(part)

    def _tensors(self, model: nn.Module) -> dict[str, Tensor]:
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        for name, shape in zip(self.names, self.shapes, strict=True):
            self._part(tensors, name, shape, leading=False)
        return tensors


def _trainable(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def _float_buffers(model: nn.Module) -> dict[str, Tensor]:
    kept = model.state_dict().keys()  # non-persistent buffers are not part of a model's state
    return {name: b for name, b in model.named_buffers() if b.is_floating_point() and name in kept}


def segments(layout: Layout, scope: str) -> Sequence[tuple[int, int]]:
    """Return the ranges [start, stop) that a compressor treats separately.

    Arguments:
        layout: the layout of the vector.
        scope: `global` for the whole vector, `tensor` for every tensor that is not empty.

    Returns:
        The ranges, in order.

    Examples:
        >>> import fedcams
        >>> from fedcams.layout import segments
        >>> layout = fedcams.Layout(("weight", "bias"), ((2, 3), (2,)))
        >>> segments(layout, "tensor")
        [(0, 6), (6, 8)]
        >>> segments(layout, "global")
        [(0, 8)]
    """
    if scope == "global":
        return [(0, layout.d)]
    return [(a, b) for a, b in itertools.pairwise(layout.offsets) if b > a]
