"""The kernels as functions of tensors: this module computes geometry, grids and tile sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton

from fedcams.engines.graphs import tiles
from fedcams.engines.graphs.kernels import convolution, depthwise, descent, rolling
from fedcams.engines.graphs.program import Conv
from fedcams.errors import SpecError

if TYPE_CHECKING:
    from torch import Tensor

ACT = {"none": 0, "relu": 1, "gelu": 2}
FAST_GELU = 3  # its error of 1e-7 is far below the rounding of bfloat16
NUMBERED = 2**31
"""Kernels count the numbers that a tensor has for one client in 32 bits."""
DOT = {"bf16": "tf32", "tf32": "tf32", "float32": "ieee"}  # it has no effect on bfloat16 operands


@dataclass(frozen=True)
class Epilogue:
    """What is done with the result of a convolution: normalise it if the statistics are known, add a residual."""

    residual: Tensor | None
    scale: Tensor | None = None
    shift: Tensor | None = None
    pre: str = "none"
    post: str = "none"


@dataclass(frozen=True)
class Statistics:
    """Means and squared deviations of tiles of `rows` rows, `[C, tiles, 2, K]`."""

    parts: Tensor
    rows: int


@dataclass(frozen=True)
class Slot:
    """Where the gradient of a tensor goes: into `out [C, ...]`, or, with rates, straight into a step of `out`."""

    out: Tensor
    copy: Tensor | None = None
    """The copy of the weights after the step, in the precision of the kernels."""
    sizes: Tensor | None = None
    rates: Tensor | None = None
    """`[C]`, on the device, so that captured kernels read each round's rates."""

    def arguments(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the kernels' arguments besides `out`."""
        return pointer_or(self.copy, self.out), pointer_or(self.sizes, self.out), pointer_or(self.rates, self.out)

    def flags(self) -> dict[str, bool]:
        """Return the flags DESCEND and COPY."""
        return {"DESCEND": self.rates is not None, "COPY": self.copy is not None}


def act(name: str, x: Tensor) -> int:
    """Return the number by which kernels know an activation."""
    return FAST_GELU if name == "gelu" and x.dtype == torch.bfloat16 else ACT[name]


def geometry(conv: Conv, x: Tensor, outputs: int) -> dict[str, int]:
    """Return the constants of a dense convolution of `x [C, B, H, W, CI]`."""
    height, width, channels = x.shape[2:]
    p, q = conv.size(height, width)
    sizes = {"H": height, "W": width, "CI": channels, "P": p, "Q": q, "CO": outputs}
    return sizes | {"R": conv.kernel[0], "S": conv.kernel[1], "STEP": conv.stride, "PAD": conv.padding}


def convolve(
    conv: Conv,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    precision: str,
    sizes: Tensor | None = None,
    pre: str = "none",
    epilogue: Epilogue | None = None,
) -> tuple[Tensor, Statistics | None]:
    """Return the convolution `[C, B, P, Q, CO]` of `x [C, B, H, W, CI]`; with `sizes [C]` also its statistics."""
    clients, images = x.shape[:2]
    _refuse_long(conv, x, weight)
    if conv.depthwise:
        return _convolve_depthwise(conv, x, weight, bias, precision, sizes, pre, epilogue)
    shape = geometry(conv, x, weight.shape[1])
    rows = images * shape["P"] * shape["Q"]
    tile = tiles.product(rows, shape["CO"], shape["CI"], shape["R"] * shape["S"], precision)
    flat = tile.BK == 0
    tile = tile._replace(BK=32) if flat else tile
    y = x.new_empty(clients, images, shape["P"], shape["Q"], shape["CO"])
    count = triton.cdiv(rows, tile.BM)
    stats = _statistics(y, count, sizes)
    grid = (count * triton.cdiv(shape["CO"], tile.BN), clients)
    convolution.forward[grid](
        x, weight, pointer_or(bias, x), y, pointer_or(stats, x), pointer_or(sizes, x), *_scales(epilogue, x), rows,
        count, x.stride(0), weight.stride(0), **shape, **_flags(x, bias, stats, pre, epilogue),
        FLAT=flat, PRECISION=DOT[precision], **tile._asdict(),
    )  # fmt: skip
    return y, None if stats is None else Statistics(stats, tile.BM)


def _refuse_long(conv: Conv, x: Tensor, weight: Tensor) -> None:
    """Refuse a convolution if kernels cannot count its inputs, weights or outputs."""
    p, q = conv.size(*x.shape[2:4])
    outputs = x.shape[-1] if conv.depthwise else weight.shape[1]
    longest = max(x[0].numel(), weight[0].numel(), x.shape[1] * p * q * outputs)
    if longest >= NUMBERED:
        raise SpecError(
            f"engine=graphs: a layer has {longest:,} numbers for one batch of a client, or of the test set; kernels "
            "take fewer than 2**31; give smaller images or batches, or use engine=loop"
        )


def _convolve_depthwise(
    conv: Conv,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    precision: str,
    sizes: Tensor | None,
    pre: str,
    epilogue: Epilogue | None,
    flip: bool = False,
) -> tuple[Tensor, Statistics | None]:
    clients, images, height, width, channels = x.shape
    rows, y = images * height * width, torch.empty_like(x)
    if tiles.rolls(conv.kernel, width, precision):
        stats = _statistics(y, images, sizes)
        across, block = tiles.rolling(width, channels)
        rolling.forward[(images, triton.cdiv(channels, block), clients)](
            x, weight, pointer_or(bias, x), y, pointer_or(stats, x), pointer_or(sizes, x), *_scales(epilogue, x),
            images, weight.stride(0), H=height, W=width, K=channels, R=conv.kernel[0], S=conv.kernel[1],
            **_flags(x, bias, stats, pre, epilogue), FLIP=flip, BW=across, BN=block, num_warps=4,
        )  # fmt: skip
        return y, None if stats is None else Statistics(stats, height * width)
    BM, BN = 64, tiles.power(channels, 16, 64)
    count = triton.cdiv(rows, BM)
    stats = _statistics(y, count, sizes)
    depthwise.forward[(count, triton.cdiv(channels, BN), clients)](
        x, weight, pointer_or(bias, x), y, pointer_or(stats, x), pointer_or(sizes, x), *_scales(epilogue, x), rows,
        count, weight.stride(0), H=height, W=width, K=channels, R=conv.kernel[0], S=conv.kernel[1],
        **_flags(x, bias, stats, pre, epilogue),
        FLIP=flip, BM=BM, BN=BN, num_warps=4,
    )  # fmt: skip
    return y, None if stats is None else Statistics(stats, BM)


def _statistics(y: Tensor, count: int, sizes: Tensor | None) -> Tensor | None:
    if sizes is None:
        return None
    return torch.empty(y.shape[0], count, 2, y.shape[-1], device=y.device, dtype=torch.float32)


def pointer_or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """Return the tensor, or `other` if it is None: kernels that do not read a pointer still need a valid one."""
    return other if tensor is None else tensor


def _scales(epilogue: Epilogue | None, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    given = (None, None, None) if epilogue is None else (epilogue.scale, epilogue.shift, epilogue.residual)
    scale, shift, residual = (pointer_or(tensor, x) for tensor in given)
    return scale, shift, residual


def _flags(x: Tensor, bias: Tensor | None, stats: Tensor | None, pre: str, epilogue: Epilogue | None) -> dict[str, Any]:
    return {
        "BIAS": bias is not None,
        "STATS": stats is not None,
        "AFFINE": epilogue is not None and epilogue.scale is not None,
        "RES": epilogue is not None and epilogue.residual is not None,
        "PRE": act(pre if epilogue is None else epilogue.pre, x),
        "POST": 0 if epilogue is None else act(epilogue.post, x),
    }


def gradient_input(
    conv: Conv, dy: Tensor, x: Tensor, weight: Tensor, precision: str, added: Tensor | None = None
) -> Tensor:
    """Return the gradient of x `[C, B, H, W, CI]` from that of the result, plus the part from other uses of x."""
    if conv.depthwise:
        epilogue = None if added is None else Epilogue(added)
        return _convolve_depthwise(conv, dy, weight, None, precision, None, "none", epilogue, flip=True)[0]
    shape, dx = geometry(conv, x, weight.shape[1]), x.new_empty(x.shape)
    clients, images = x.shape[:2]
    phases = conv.stride**2
    rows = images * triton.cdiv(shape["H"], conv.stride) * triton.cdiv(shape["W"], conv.stride)
    tile = tiles.product(rows, shape["CI"], shape["CO"], shape["R"] * shape["S"], precision)
    tile = tile._replace(BK=16) if tile.BK == 0 else tile
    grid = (triton.cdiv(rows, tile.BM) * triton.cdiv(shape["CI"], tile.BN), clients, phases)
    convolution.backward_input[grid](
        dy, weight, dx, pointer_or(added, dx), images, dy.stride(0), weight.stride(0), dx.stride(0), **shape,
        PRECISION=DOT[precision], ADD=added is not None, **tile._asdict(),
    )  # fmt: skip
    return dx


def gradient_weight(conv: Conv, dy: Tensor, x: Tensor, slot: Slot, precision: str) -> None:
    """Compute the gradient of the weights, and write it or step with it, as the slot says."""
    if conv.depthwise:
        return _gradient_weight_depthwise(conv, dy, x, slot, precision)
    shape = geometry(conv, x, dy.shape[-1])
    clients, images = x.shape[:2]
    rows, columns = images * shape["P"] * shape["Q"], shape["R"] * shape["S"] * shape["CI"]
    tile = tiles.weights(shape["CO"], columns, shape["CI"], precision)
    blocks = triton.cdiv(shape["CO"], tile.BM) * triton.cdiv(columns, tile.BN)
    count = tiles.splits(blocks * clients, rows, precision)
    chunk = triton.cdiv(triton.cdiv(rows, count), tile.BK) * tile.BK
    count = triton.cdiv(rows, chunk)
    parts = (
        None if count == 1 else torch.empty(clients, count, shape["CO"] * columns, device=x.device, dtype=torch.float32)
    )
    target = slot if parts is None else Slot(parts)
    convolution.backward_weight[(blocks, clients, count)](
        x, dy, target.out, *target.arguments(), rows, chunk, x.stride(0), dy.stride(0), target.out.stride(0),
        0 if parts is None else parts.stride(1), **shape, PRECISION=DOT[precision], **target.flags(), **tile._asdict(),
    )  # fmt: skip
    if parts is not None:
        add_parts(parts, slot)


def _gradient_weight_depthwise(conv: Conv, dy: Tensor, x: Tensor, slot: Slot, precision: str) -> None:
    clients, images, height, width, channels = x.shape
    if tiles.rolls(conv.kernel, width, precision):
        across, block = tiles.rolling(width, channels)
        group = tiles.together(images, clients * triton.cdiv(channels, block))
        count, taps = triton.cdiv(images, group), conv.kernel[0] * conv.kernel[1]
        parts = torch.empty(clients, count, taps * channels, device=x.device, dtype=torch.float32)
        rolling.backward_weight[(parts.shape[1], triton.cdiv(channels, block), clients)](
            x, dy, parts, images, group, parts.stride(0), parts.stride(1), H=height, W=width, K=channels,
            R=conv.kernel[0], S=conv.kernel[1], BW=across, BN=block, num_warps=4,
        )  # fmt: skip
        return add_parts(parts, slot)
    rows, taps, BM, BN = images * height * width, conv.kernel[0] * conv.kernel[1], 128, tiles.power(channels, 16, 64)
    count = tiles.splits(clients * triton.cdiv(channels, BN), rows, precision, programs=1056, least=BM)
    chunk = triton.cdiv(triton.cdiv(rows, count), BM) * BM
    count = triton.cdiv(rows, chunk)
    parts = torch.empty(clients, count, taps * channels, device=x.device, dtype=torch.float32)
    depthwise.backward_weight[(count, triton.cdiv(channels, BN), clients)](
        x, dy, parts, rows, chunk, parts.stride(0), parts.stride(1), H=height, W=width, K=channels,
        R=conv.kernel[0], S=conv.kernel[1], TAPS=tiles.power(taps, 1, 1 << 20), BM=BM, BN=BN, num_warps=4,
    )  # fmt: skip
    add_parts(parts, slot)


def add_parts(parts: Tensor, slot: Slot) -> None:
    """Write `parts [C, count, length].sum(1)`, summed in a fixed order, to where the slot says."""
    clients, count, length = parts.shape
    BLOCK, BT = (32, 64) if count > 16 else (512, 4)
    descent.sum_parts[(triton.cdiv(length, BLOCK), clients)](
        parts, slot.out, *slot.arguments(), count, length, parts.stride(0), parts.stride(1), slot.out.stride(0),
        **slot.flags(), BLOCK=BLOCK, BT=BT, num_warps=4,
    )  # fmt: skip


def descend_(values: Tensor, gradient: Tensor, copy: Tensor | None, sizes: Tensor, rates: Tensor) -> None:
    """Compute `values [C, width] -= rates gradient` for clients with examples, and the copy that the kernels read."""
    clients, width = values.shape
    descent.descend[(triton.cdiv(width, 2048), clients)](
        values, gradient, pointer_or(copy, values), sizes, rates, width, values.stride(0), COPY=copy is not None,
        BLOCK=2048, num_warps=8,
    )  # fmt: skip
