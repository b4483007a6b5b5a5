"""The base class of compressors: declared fields, encoding, decoding, and a proven bound on what is lost."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, ClassVar, Literal

import torch

from fedcams.bits.packing import packed_size
from fedcams.bits.vectors import abs_sum, row_norms
from fedcams.errors import LayoutError, SpecError
from fedcams.layout import Layout
from fedcams.registry import Spec
from fedcams.schedules import Constant  # noqa: F401  (registers what numbers may follow)

if TYPE_CHECKING:
    from torch import Tensor

FieldKind = Literal["f32", "bf16", "uint", "sign", "packed", "index"]


@dataclass(frozen=True)
class Field:
    """One array that a compressor sends: `count` symbols of one kind.

    `f32` and `bf16` are finite reals, `uint` integers of 1 to 32 `bits`, `index` strictly ascending positions in
    [0, d). Two kinds hold packed tensors of `ceil(count·bits/8)` bytes: `sign`, one bit each (`fedcams.bits.signs`),
    and `packed`, integers of 1 to 8 `bits` (`fedcams.bits.levels`). Other numbers of bits raise a SpecError.

    A `sign` field whose signs belong to kept coordinates names their `index` field in `at`. They then take fewer bytes
    where signs of one convolution filter agree (`fedcams.bits.cells`). The index field comes first.

    Examples:
        >>> import fedcams
        >>> fedcams.compressor("sign").fields(fedcams.Layout.flat(1000))["sign"].count
        1000
    """

    kind: FieldKind
    count: int
    bits: int = 0
    at: str = ""

    def __post_init__(self) -> None:
        if self.kind == "uint" and not 1 <= self.bits <= 32:
            raise SpecError(f"a uint field with bits={self.bits}; allowed: 1 to 32")
        if self.kind == "packed" and not 1 <= self.bits <= 8:
            raise SpecError(f"a packed field with bits={self.bits}; allowed: 1 to 8")
        if self.at and self.kind != "sign":
            raise SpecError(f"a {self.kind} field with at={self.at!r}; only sign fields have it, leave it out")

    @property
    def size_varies(self) -> bool:
        """Whether its length in bytes depends on its contents."""
        return self.kind == "index" or bool(self.at)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the tensor that holds this field."""
        if self.kind == "uint":
            return torch.uint8 if self.bits <= 8 else torch.int64
        reals = {"f32": torch.float32, "bf16": torch.bfloat16}
        return reals.get(self.kind, torch.int64 if self.kind == "index" else torch.uint8)

    @property
    def columns(self) -> int:
        """The last dimension of the tensor that holds this field."""
        packed = {"sign": 1, "packed": self.bits}.get(self.kind)
        return self.count if packed is None else packed_size(self.count * packed)

    @property
    def paper_bits(self) -> int:
        """The bits by the paper's rule: 32 per real or index, 1 per sign, b per b-bit integer."""
        return self.count * {"sign": 1, "uint": self.bits, "packed": self.bits}.get(self.kind, 32)


Code = Mapping[str, "Tensor"]
"""Field name -> tensor `[..., columns]`; leading axes, such as the cohort's, are always allowed."""


class Compressor(Spec, ABC):
    """The base class of all compressors. A subclass writes `fields`, `compress`, `accumulate_` and its error bound.

    Every method takes a leading cohort axis and gives the same codes on CPU and CUDA: integers are equal, reals agree
    to 1e-6 relative, because sums are taken in a different order.

    Examples:
        >>> import fedcams, torch
        >>> topk, layout = fedcams.compressor("topk(k=1)"), fedcams.Layout.flat(3)
        >>> topk.decode(topk.encode(torch.tensor([0.5, -2.0, 0.0]), layout), layout)
        tensor([ 0., -2.,  0.])
    """

    kind = "compressor"
    schedulable = True
    reference: ClassVar[str] = ""
    """The publication that describes it."""
    in_expectation: ClassVar[bool] = False
    """Whether `squared_error_bound` holds only in expectation over the key."""
    reveals_nonfinite: ClassVar[bool] = False
    """Whether NaN or infinity in x always gives a non-finite real in the code; if not, x is read again to check."""

    def encode(self, x: Tensor, layout: Layout, key: int | Sequence[int] = 0) -> Code:
        """Return the code of `x [..., d]`.

        `key` seeds compressors that draw at random: one integer, or one per row. Refuses an x that is not float32, does
        not fit the layout or is not finite, and a wrong number of keys.
        """
        layout.check(x)
        if x.dtype != torch.float32:
            raise LayoutError(f"x is {x.dtype}; compressors take float32, convert it with x.float()")
        rows = x.detach().reshape(-1, layout.d).contiguous()
        keys = [int(key)] * len(rows) if isinstance(key, int | Integral) else list(key)
        if len(keys) != len(rows):
            raise SpecError(f"{len(keys)} keys for {len(rows)} rows; give one integer or one for each row")
        if not self.reveals_nonfinite:
            layout.check_finite(rows)
        code = self.compress(rows, layout, keys)
        _check_declared(self, code, layout, len(rows))
        if self.reveals_nonfinite and not _all_finite(code):
            layout.check_finite(rows)
        return {name: tensor.reshape(*x.shape[:-1], tensor.shape[-1]) for name, tensor in code.items()}

    def decode(self, code: Code, layout: Layout) -> Tensor:
        """Return the float32 vectors `[..., d]` that a code stands for."""
        first = next(iter(code.values()))
        out = torch.zeros(*first.shape[:-1], layout.d, dtype=torch.float32, device=first.device)
        return self.add_to_(out, code, layout)

    def add_to_(self, out: Tensor, code: Code, layout: Layout, weight: float = 1.0) -> Tensor:
        """Add `weight * decode(code)` to `out [..., d]` in place and return it; weight -1 turns h into its residual.

        Refuses an `out` that does not fit the layout, is not contiguous or requires gradients, and a code of another
        length.
        """
        layout.check(out)
        self.check_lengths(code, layout)
        if not out.is_contiguous() or out.requires_grad:
            raise LayoutError("out is not contiguous, or requires gradients; give out.detach().contiguous()")
        rows = {name: tensor.reshape(out.shape[:-1].numel(), tensor.shape[-1]) for name, tensor in code.items()}
        self.accumulate_(out.view(-1, layout.d), rows, layout, weight)
        return out

    def add_rows_to_(self, out: Tensor, code: Code, layout: Layout, weights: Sequence[float]) -> Tensor:
        """Add every row of a code `[C, columns]` to `out [d]` in place, row i times `weights[i]`, and return `out`.

        Rows are added in order, one after the other. Refuses an `out` or a code of another length.
        """
        layout.check(out)
        self.check_lengths(code, layout)
        self.accumulate_rows_(out.view(1, layout.d), code, layout, weights)
        return out

    def add_codes_to_(self, out: Tensor, codes: Sequence[Code], layout: Layout, weights: Sequence[float]) -> Tensor:
        """Add several codes, tensors `[columns]`, to `out [d]` in place, code i times `weights[i]`, and return `out`.

        Each coordinate gets them in this order, one after the other. Refuses an `out` or a code of another length.
        """
        layout.check(out)
        for code in codes:
            self.check_lengths(code, layout)
        rows = [{name: tensor[None] for name, tensor in code.items()} for code in codes]
        self.accumulate_codes_(out.view(1, layout.d), rows, layout, weights)
        return out

    def check_lengths(self, code: Code, layout: Layout, rows: int | None = None) -> None:
        """Refuse a code of another layout, or with another number of `rows` if that is given.

        Kernels rely on it: they read as much as the layout says, and write where positions say.
        """
        for name, field in self.fields(layout).items():
            shape = tuple(code[name].shape) if name in code else ()
            if shape[-1:] != (field.columns,) or (rows is not None and shape[:-1] != (rows,)):
                wanted = f"[{'...' if rows is None else rows}, {field.columns}]"
                raise LayoutError(
                    f"{self}: {name} has shape {list(shape)}; expected {wanted} for d={layout.d}: "
                    "decode with the layout that it was encoded with"
                )
            if field.kind == "index" and code[name].device.type == "cpu":  # a GPU refuses wrong positions itself
                _check_positions(name, code[name], layout.d)

    @abstractmethod
    def fields(self, layout: Layout) -> dict[str, Field]:
        """Return what is sent, by name and in order; the spec and the layout fix all counts, so counts never travel."""

    def squared_error_bound(self, layout: Layout) -> float | None:
        """Return the proven bound on ‖C(x)-x‖²/‖x‖², which is below 1; None if there is none."""
        return None

    @abstractmethod
    def compress(self, x: Tensor, layout: Layout, keys: Sequence[int]) -> Code:
        """Return the code of contiguous float32 rows `x [C, d]` as tensors `[C, columns]`; `keys` has one key per row.

        Do not change `x`, and do not return views of it.
        """

    @abstractmethod
    def accumulate_(self, out: Tensor, code: Code, layout: Layout, weight: float) -> None:
        """Add `weight * C(x)` to `out [C, d]` in place, if possible without a dense copy."""

    def accumulate_rows_(self, out: Tensor, code: Code, layout: Layout, weights: Sequence[float]) -> None:
        """Add every row of the code to the same `out [1, d]` in place, in order, row i times `weights[i]`."""
        rows = [{name: tensor[i : i + 1] for name, tensor in code.items()} for i in range(len(weights))]
        self.accumulate_codes_(out, rows, layout, weights)

    def accumulate_codes_(self, out: Tensor, codes: Sequence[Code], layout: Layout, weights: Sequence[float]) -> None:
        """Add codes, tensors `[1, columns]`, to `out [1, d]` in order, in place; override it if one pass is enough."""
        for code, weight in zip(codes, weights, strict=True):
            self.accumulate_(out, code, layout, weight)

    def norms(self, code: Code, layout: Layout) -> Tensor:
        """Return the L2 norm of what each row of a code `[C, columns]` decodes to, as float64 `[C]`.

        The bits of a row's norm do not depend on the other rows. This version decodes one row at a time; override it if
        the norm can be read from the code.
        """
        rows = range(len(next(iter(code.values()))))
        return torch.cat([row_norms(self.decode({k: v[i : i + 1] for k, v in code.items()}, layout)) for i in rows])

    def check_code(self, code: Code, layout: Layout) -> None:
        """Refuse one row of a code, tensors `[columns]` as read from bytes, that no `compress` returns.

        Each field is already valid on its own. Override this if values of several fields can contradict each other, and
        raise a WireError that names the field.
        """

    @property
    def unbiased(self) -> bool:
        """Whether the expectation of C(x) over the key is x."""
        return False

    @property
    def never_lengthens(self) -> bool:
        """Whether ‖C(x)‖ <= ‖x‖ for every x, up to the rounding of float32; privacy's clipping needs it."""
        return False

    @property
    def per_tensor(self) -> bool:
        """Whether decoding needs the layout's tensor boundaries."""
        return False

    def paper_bits(self, layout: Layout) -> int:
        """Return the bits of one update by the paper's rule."""
        return sum(field.paper_bits for field in self.fields(layout).values())


def _all_finite(code: Code) -> bool:
    reals = (tensor for tensor in code.values() if tensor.is_floating_point())
    return all(math.isfinite(abs_sum(tensor.float().flatten())) for tensor in reals)


def _check_declared(codec: Compressor, code: Code, layout: Layout, rows: int) -> None:
    """Refuse what `compress` returned unless `fields` declares it: bytes would be counted for something else."""
    fields = codec.fields(layout)
    declared = {name: f"{field.dtype} {[rows, field.columns]}" for name, field in fields.items()}
    returned = {name: f"{tensor.dtype} {list(tensor.shape)}" for name, tensor in code.items()}
    if returned != declared:
        raise SpecError(f"{codec}: compress returns {returned}, but fields declares {declared}; make them agree")
    for name, field in fields.items():
        values = code[name]
        if not values.numel() or values.device.type != "cpu":  # checking them would stall a GPU
            continue
        if field.kind == "index" and not bool((values.diff() > 0).all()):
            raise SpecError(f"{codec}: compress returns a {name} that does not ascend; sort it, without duplicates")
        if field.kind == "uint" and not 0 <= int(values.min()) <= int(values.max()) < 2**field.bits:
            raise SpecError(f"{codec}: compress returns a {name} outside of [0, {2**field.bits}); give it more bits")


def _check_positions(name: str, positions: Tensor, d: int) -> None:
    """Refuse positions `[..., k]`, which ascend, that start below 0 or end at d or above."""
    if positions.numel() and (int(positions[..., 0].min()) < 0 or int(positions[..., -1].max()) >= d):
        raise LayoutError(f"{name} has a position outside of [0, {d}); give ascending positions of this layout")


def compressor(spec: str | Compressor) -> Compressor:
    """Return the compressor that a spec string names.

    Arguments:
        spec: such as `topk(ratio=1/64)`; a compressor is returned unchanged.

    Returns:
        The compressor, a frozen dataclass.

    Raises:
        SpecError: for an unknown name or key, or a value out of range; it suggests the nearest name.

    Examples:
        >>> import fedcams
        >>> str(fedcams.compressor("topk(ratio=1/64, values=f32)"))  # defaults are left out
        'topk(ratio=1/64)'
    """
    return Compressor.parse(spec)
