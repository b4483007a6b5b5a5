"""What a compressor is: declared fields, a way there and back, and a proven bound on what gets lost."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedcams.bits.packing import packed_size
from fedcams.bits.vectors import abs_sum, row_norms
from fedcams.errors import LayoutError, SpecError
from fedcams.layout import Layout
from fedcams.registry import Spec
from fedcams.schedules import Constant  # noqa: F401  (registers what numbers may follow)

FieldKind = Literal["f32", "bf16", "uint", "sign", "packed", "index"]


@dataclass(frozen=True)
class Field:
    """One array that a compressor sends: `count` symbols of a kind.

    `f32`, `bf16`: finite reals. `uint`: integers of `bits` bits. `index`: strictly ascending positions in [0, d).
    Already packed, so that their tensors have `ceil(count·bits/8)` bytes: `sign`, one bit each (`fedcams.bits.signs`),
    and `packed`, integers of `bits` <= 8 bits (`fedcams.bits.levels`).
    """

    kind: FieldKind
    count: int
    bits: int = 0

    def __post_init__(self) -> None:
        if self.kind == "uint" and not 1 <= self.bits <= 32:
            raise SpecError(f"a uint field with bits={self.bits}; allowed: 1 to 32")
        if self.kind == "packed" and not 1 <= self.bits <= 8:
            raise SpecError(f"a packed field with bits={self.bits}; allowed: 1 to 8")

    @property
    def dtype(self) -> torch.dtype:
        """The type of the tensor that holds this field."""
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
        """The paper's price: 32 bits a real or an index, one a sign, b a b-bit integer."""
        return self.count * {"sign": 1, "uint": self.bits, "packed": self.bits}.get(self.kind, 32)


Code = Mapping[str, Tensor]
"""Field name -> tensor `[..., columns]`; a leading cohort axis is always allowed."""


class Compressor(Spec, ABC):
    """The root of all compressors; a subclass implements `fields`, `compress`, `accumulate_` and states its bound.

    Everything takes a leading cohort axis and runs on CPU and CUDA with the same codes: integers are equal, reals
    agree to 1e-6 relative (sums are taken in another order).
    """

    kind = "compressor"
    schedulable = True
    reference: ClassVar[str] = ""
    """Where it was published."""
    in_expectation: ClassVar[bool] = False
    """Whether the contraction holds in expectation over the key only."""
    reveals_nonfinite: ClassVar[bool] = False
    """Whether NaN or infinity anywhere in x makes a real of the code not finite; if not, x is read once more for it."""

    def encode(self, x: Tensor, layout: Layout, key: int | Sequence[int] = 0) -> Code:
        """`x [..., d]` -> Code; `key` is one integer, or one for each row, for compressors that draw."""
        layout.check(x)
        if x.dtype != torch.float32:
            raise LayoutError(f"x is {x.dtype}; compressors take float32, convert it with x.float()")
        rows = x.detach().reshape(-1, layout.d).contiguous()
        keys = [key] * len(rows) if isinstance(key, int) else list(key)
        if len(keys) != len(rows):
            raise SpecError(f"{len(keys)} keys for {len(rows)} rows; give one integer or one for each row")
        if not self.reveals_nonfinite:
            layout.check_finite(rows)
        code = self.compress(rows, layout, keys)
        if self.reveals_nonfinite and not _all_finite(code):
            layout.check_finite(rows)
        return {name: tensor.reshape(*x.shape[:-1], tensor.shape[-1]) for name, tensor in code.items()}

    def decode(self, code: Code, layout: Layout) -> Tensor:
        """Code -> float32 `[..., d]`."""
        first = next(iter(code.values()))
        out = torch.zeros(*first.shape[:-1], layout.d, dtype=torch.float32, device=first.device)
        return self.add_to_(out, code, layout)

    def add_to_(self, out: Tensor, code: Code, layout: Layout, weight: float = 1.0) -> Tensor:
        """`out [..., d] += weight * decode(code)`, in place; with weight -1 it turns h into its residual."""
        layout.check(out)
        if not out.is_contiguous() or out.requires_grad:
            raise LayoutError("out is not one block of plain memory; give out.detach().contiguous()")
        rows = {name: tensor.reshape(-1, tensor.shape[-1]) for name, tensor in code.items()}
        self.accumulate_(out.view(-1, layout.d), rows, layout, weight)
        return out

    def add_rows_to_(self, out: Tensor, code: Code, layout: Layout, weights: Sequence[float]) -> Tensor:
        """`out [d] += Σ weights[i] * decode(row i of the code)`, in place, one row after the other."""
        layout.check(out)
        self.accumulate_rows_(out.view(1, layout.d), code, layout, weights)
        return out

    @abstractmethod
    def fields(self, layout: Layout) -> dict[str, Field]:
        """What is sent, in order; counts are fixed by the spec and the layout and never travel."""

    def squared_error_bound(self, layout: Layout) -> float | None:
        """The proven bound on ‖C(x)-x‖²/‖x‖², below 1; None if there is none."""
        return None

    @abstractmethod
    def compress(self, x: Tensor, layout: Layout, keys: Sequence[int]) -> Code:
        """Contiguous float32 `x [C, d]` -> Code with tensors `[C, columns]`."""

    @abstractmethod
    def accumulate_(self, out: Tensor, code: Code, layout: Layout, weight: float) -> None:
        """`out [C, d] += weight * C(x)`, in place, without a dense copy where that can be."""

    def accumulate_rows_(self, out: Tensor, code: Code, layout: Layout, weights: Sequence[float]) -> None:
        """`accumulate_` of one row of the code after the other into the same `out [1, d]`."""
        for i, weight in enumerate(weights):
            self.accumulate_(out, {name: tensor[i : i + 1] for name, tensor in code.items()}, layout, weight)

    def norms(self, code: Code, layout: Layout) -> Tensor:
        """The L2 norm of what each row of a code `[C, ...]` decodes to -> float64 `[C]`.

        A row's norm has the same bits whatever the other rows are. This version decodes one row after the other;
        override it where the code itself tells the norm.
        """
        rows = range(len(next(iter(code.values()))))
        return torch.cat([row_norms(self.decode({k: v[i : i + 1] for k, v in code.items()}, layout)) for i in rows])

    @property
    def unbiased(self) -> bool:
        """Whether the expectation of C(x) over the key is x."""
        return False

    @property
    def per_tensor(self) -> bool:
        """Whether decoding needs the layout's tensor boundaries."""
        return False

    def paper_bits(self, layout: Layout) -> int:
        """Bits of one update by the paper's rule."""
        return sum(field.paper_bits for field in self.fields(layout).values())


def _all_finite(code: Code) -> bool:
    reals = (tensor for tensor in code.values() if tensor.is_floating_point())
    return all(math.isfinite(abs_sum(tensor.float().flatten())) for tensor in reals)


def compressor(spec: str | Compressor) -> Compressor:
    """The compressor that a spec string such as `topk(ratio=1/64)` spells."""
    return Compressor.parse(spec)
