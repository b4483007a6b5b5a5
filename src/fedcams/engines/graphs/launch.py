"""The kernels as functions of tensors: geometry, grids and tile sizes are worked out here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from fedcams.engines.graphs import tiles
from fedcams.engines.graphs.kernels import convolution, depthwise, descent, normalization, rolling
from fedcams.engines.graphs.program import Conv

ACT = {"none": 0, "relu": 1, "gelu": 2}
FAST_GELU = 3  # its error of 1e-7 is far below the rounding of bfloat16
DOT = {"bf16": "tf32", "tf32": "tf32", "float32": "ieee"}  # for bfloat16 operands it says nothing


@dataclass(frozen=True)
class Epilogue:
    """What is done with the result of a convolution where the statistics are known."""

    scale: Tensor
    shift: Tensor
    pre: str
    post: str
    residual: Tensor | None


@dataclass(frozen=True)
class Statistics:
    """Means and squared deviations of tiles of `rows` rows, `[C, tiles, 2, K]`."""

    parts: Tensor
    rows: int


def act(name: str, x: Tensor) -> int:
    """The number that kernels know an activation by."""
    return FAST_GELU if name == "gelu" and x.dtype == torch.bfloat16 else ACT[name]


def geometry(conv: Conv, x: Tensor, outputs: int) -> dict[str, int]:
    """The constants of a dense convolution of `x [C, B, H, W, CI]`."""
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
    """`[C, B, H, W, CI] -> [C, B, P, Q, CO]`; with `sizes [C]` also the statistics of the activated result."""
    clients, images = x.shape[:2]
    if conv.depthwise:
        return _convolve_depthwise(conv, x, weight, bias, precision, sizes, pre, epilogue)
    shape = geometry(conv, x, weight.shape[1])
    rows = images * shape["P"] * shape["Q"]
    tile = tiles.product(rows, shape["CO"], shape["CI"], precision)
    flat = tile.BK == 0
    tile = tile._replace(BK=32) if flat else tile
    y = x.new_empty(clients, images, shape["P"], shape["Q"], shape["CO"])
    count = triton.cdiv(rows, tile.BM)
    stats = _statistics(y, count, sizes)
    grid = (count * triton.cdiv(shape["CO"], tile.BN), clients)
    convolution.forward[grid](
        x, weight, _or(bias, x), y, _or(stats, x), _or(sizes, x), *_scales(epilogue, x), rows, count,
        x.stride(0), weight.stride(0), **shape, **_flags(x, bias, stats, pre, epilogue),
        FLAT=flat, PRECISION=DOT[precision], **tile._asdict(),
    )  # fmt: skip
    return y, None if stats is None else Statistics(stats, tile.BM)


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
            x, weight, _or(bias, x), y, _or(stats, x), _or(sizes, x), *_scales(epilogue, x), images, weight.stride(0),
            H=height, W=width, K=channels, R=conv.kernel[0], S=conv.kernel[1],
            **_flags(x, bias, stats, pre, epilogue), FLIP=flip, BW=across, BN=block, num_warps=4,
        )  # fmt: skip
        return y, None if stats is None else Statistics(stats, height * width)
    BM, BN = 64, tiles.power(channels, 16, 64)
    count = triton.cdiv(rows, BM)
    stats = _statistics(y, count, sizes)
    depthwise.forward[(count, triton.cdiv(channels, BN), clients)](
        x, weight, _or(bias, x), y, _or(stats, x), _or(sizes, x), *_scales(epilogue, x), rows, count, weight.stride(0),
        H=height, W=width, K=channels, R=conv.kernel[0], S=conv.kernel[1], **_flags(x, bias, stats, pre, epilogue),
        FLIP=flip, BM=BM, BN=BN, num_warps=4,
    )  # fmt: skip
    return y, None if stats is None else Statistics(stats, BM)


def _statistics(y: Tensor, count: int, sizes: Tensor | None) -> Tensor | None:
    if sizes is None:
        return None
    return torch.empty(y.shape[0], count, 2, y.shape[-1], device=y.device, dtype=torch.float32)


def _or(tensor: Tensor | None, x: Tensor) -> Tensor:
    """A pointer that is not read has to point somewhere."""
    return x if tensor is None else tensor


def _scales(epilogue: Epilogue | None, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return (x, x, x) if epilogue is None else (epilogue.scale, epilogue.shift, _or(epilogue.residual, x))


def _flags(x: Tensor, bias: Tensor | None, stats: Tensor | None, pre: str, epilogue: Epilogue | None) -> dict[str, Any]:
    return {
        "BIAS": bias is not None,
        "STATS": stats is not None,
        "AFFINE": epilogue is not None,
        "RES": epilogue is not None and epilogue.residual is not None,
        "PRE": act(pre if epilogue is None else epilogue.pre, x),
        "POST": 0 if epilogue is None else act(epilogue.post, x),
    }


def gradient_input(conv: Conv, dy: Tensor, x: Tensor, weight: Tensor, precision: str) -> Tensor:
    """The gradient of x `[C, B, H, W, CI]` from that of the result."""
    if conv.depthwise:
        return _convolve_depthwise(conv, dy, weight, None, precision, None, "none", None, flip=True)[0]
    shape, dx = geometry(conv, x, weight.shape[1]), torch.empty_like(x)
    clients, images = x.shape[:2]
    phases = conv.stride**2
    rows = images * triton.cdiv(shape["H"], conv.stride) * triton.cdiv(shape["W"], conv.stride)
    tile = tiles.product(rows, shape["CI"], shape["CO"], precision)
    tile = tile._replace(BK=16) if tile.BK == 0 else tile
    grid = (triton.cdiv(rows, tile.BM) * triton.cdiv(shape["CI"], tile.BN), clients, phases)
    convolution.backward_input[grid](
        dy, weight, dx, images, dy.stride(0), weight.stride(0), dx.stride(0), **shape, PRECISION=DOT[precision],
        **tile._asdict(),
    )  # fmt: skip
    return dx


def gradient_weight(conv: Conv, dy: Tensor, x: Tensor, out: Tensor, precision: str) -> None:
    """The gradient of the weights, written into `out [C, ...]`, rows of a larger block."""
    if conv.depthwise:
        return _gradient_weight_depthwise(conv, dy, x, out, precision)
    shape = geometry(conv, x, dy.shape[-1])
    clients, images = x.shape[:2]
    rows, columns = images * shape["P"] * shape["Q"], shape["R"] * shape["S"] * shape["CI"]
    tile = tiles.weights(shape["CO"], columns, shape["CI"], precision)
    blocks = triton.cdiv(shape["CO"], tile.BM) * triton.cdiv(columns, tile.BN)
    count = tiles.splits(blocks * clients, rows, precision)
    chunk = triton.cdiv(triton.cdiv(rows, count), tile.BK) * tile.BK
    count = triton.cdiv(rows, chunk)
    parts = out if count == 1 else torch.empty(count, clients, shape["CO"] * columns, device=x.device)
    convolution.backward_weight[(blocks, clients, count)](
        x, dy, parts, rows, chunk, x.stride(0), dy.stride(0), parts.stride(0 if count == 1 else 1),
        0 if count == 1 else parts.stride(0), **shape, PRECISION=DOT[precision], **tile._asdict(),
    )  # fmt: skip
    if count > 1:
        add_parts(parts.transpose(0, 1), out)


def _gradient_weight_depthwise(conv: Conv, dy: Tensor, x: Tensor, out: Tensor, precision: str) -> None:
    clients, images, height, width, channels = x.shape
    if tiles.rolls(conv.kernel, width, precision):
        across, block = tiles.rolling(width, channels)
        group = 2
        parts = torch.empty(clients, triton.cdiv(images, group), conv.kernel[0] * conv.kernel[1] * channels, device=x.device)
        rolling.backward_weight[(parts.shape[1], triton.cdiv(channels, block), clients)](
            x, dy, parts, images, group, parts.stride(0), parts.stride(1), H=height, W=width, K=channels,
            R=conv.kernel[0], S=conv.kernel[1], BW=across, BN=block, num_warps=4,
        )  # fmt: skip
        return add_parts(parts, out)
    rows, taps, BM, BN = images * height * width, conv.kernel[0] * conv.kernel[1], 128, tiles.power(channels, 16, 64)
    count = tiles.splits(clients * triton.cdiv(channels, BN), rows, precision, programs=1056, least=BM)
    chunk = triton.cdiv(triton.cdiv(rows, count), BM) * BM
    count = triton.cdiv(rows, chunk)
    parts = torch.empty(clients, count, taps * channels, device=x.device)
    depthwise.backward_weight[(count, triton.cdiv(channels, BN), clients)](
        x, dy, parts, rows, chunk, parts.stride(0), parts.stride(1), H=height, W=width, K=channels,
        R=conv.kernel[0], S=conv.kernel[1], TAPS=tiles.power(taps, 1, 1 << 20), BM=BM, BN=BN, num_warps=4,
    )  # fmt: skip
    add_parts(parts, out)


def add_parts(parts: Tensor, out: Tensor) -> None:
    """`out [C, ...] = parts [C, count, length].sum(1)`, in a fixed order."""
    clients, count, length = parts.shape
    BLOCK, BT = (32, 64) if count > 16 else (512, 4)
    descent.sum_parts[(triton.cdiv(length, BLOCK), clients)](
        parts, out, count, length, parts.stride(0), parts.stride(1), out.stride(0), BLOCK=BLOCK, BT=BT, num_warps=4
    )


def finalize(
    stats: Statistics, sizes: Tensor, weights: tuple[Tensor, Tensor], running: tuple[Tensor, Tensor],
    momentum: float, eps: float, pixels: int,
) -> Tensor:  # fmt: skip
    """`[C, 4, K]`: mean, 1/std, scale, shift of a batch; the running statistics move on."""
    clients, count, _, channels = stats.parts.shape
    moments = torch.empty(clients, 4, channels, device=stats.parts.device)
    BN = 16
    normalization.finalize[(triton.cdiv(channels, BN), clients)](
        stats.parts, sizes, *weights, *running, moments, count, weights[0].stride(0), running[0].stride(0),
        momentum, eps, PIXELS=pixels, K=channels, BM=stats.rows, BT=tiles.power(count, 16, 256), BN=BN, num_warps=4,
    )  # fmt: skip
    return moments


@dataclass(frozen=True)
class Normalized:
    """What a normalisation read, kept for its gradient; `residual` with its moments where it is normalised too."""

    x: Tensor
    moments: Tensor
    residual: Tensor | None
    residual_moments: Tensor | None
    pre: str
    post: str

    def flags(self) -> dict[str, int]:
        """PRE, POST and RES."""
        kind = 0 if self.residual is None else 1 if self.residual_moments is None else 2
        return {"K": self.x.shape[-1], "PRE": act(self.pre, self.x), "POST": act(self.post, self.x), "RES": kind}

    @property
    def rows(self) -> int:
        """Rows of one client."""
        return self.x.shape[1] * self.x.shape[2] * self.x.shape[3]


def normalize(it: Normalized) -> Tensor:
    """`post(pre(x) scale + shift + residual)`."""
    y, channels = torch.empty_like(it.x), it.x.shape[-1]
    BN = tiles.power(channels, 16, 128)
    BM = max(1, 4096 // BN)
    normalization.apply[(triton.cdiv(it.rows, BM), triton.cdiv(channels, BN), len(y))](
        it.x, it.moments, _or(it.residual, y), _or(it.residual_moments, y), y, it.rows, **it.flags(), BM=BM, BN=BN,
        num_warps=4,
    )  # fmt: skip
    return y


def normalize_backward(
    it: Normalized, dy: Tensor, y: Tensor, sizes: Tensor, gradients: tuple[Tensor, ...], bias: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Gradients of x and of the residual; those of scale and shift (and bias) are written where they belong."""
    flags, channels, clients = it.flags(), it.x.shape[-1], len(y)
    BN = tiles.power(channels, 16, 64)
    BM = 2048 // BN
    chunk = BM * max(1, min(8, it.rows * triton.cdiv(channels, BN) * clients // (BM * 2112)))
    chunks = triton.cdiv(it.rows, chunk)
    shared = (_or(it.residual, y), _or(it.residual_moments, y))
    parts = torch.empty(clients, chunks, 3, channels, device=y.device)
    normalization.backward_sums[(chunks, triton.cdiv(channels, BN), clients)](
        dy, it.x, y, it.moments, *shared, parts, it.rows, chunk, **flags, BM=BM, BN=BN, num_warps=4
    )
    sums = torch.empty(clients, 3, channels, device=y.device)
    narrow = 16
    gamma, beta, *other = gradients
    normalization.backward_finalize[(triton.cdiv(channels, narrow), clients)](
        parts, sums, gamma, beta, *(other or (gamma, beta)), chunks, gamma.stride(0), K=channels, RES=flags["RES"],
        BT=tiles.power(chunks, 16, 128), BN=narrow, num_warps=4,
    )  # fmt: skip
    dx, dresidual = torch.empty_like(it.x), None if it.residual is None else torch.empty_like(it.residual)
    count = triton.cdiv(it.rows, BM)
    bias_parts = torch.empty(clients, count, channels, device=y.device) if bias is not None else None
    normalization.backward_apply[(count, triton.cdiv(channels, BN), clients)](
        dy, it.x, y, it.moments, sums, *shared, dx, _or(dresidual, y), _or(bias_parts, y), sizes, it.rows, **flags,
        PIXELS=it.x.shape[2] * it.x.shape[3], BIAS=bias is not None, BM=BM, BN=BN, num_warps=4,
    )  # fmt: skip
    if bias is not None and bias_parts is not None:
        add_parts(bias_parts, bias)
    return dx, dresidual


def descend(values: Tensor, gradient: Tensor, copy: Tensor | None, sizes: Tensor, lr: float) -> None:
    """`values [C, width] -= lr gradient` for clients with examples, and the copy that the kernels read."""
    clients, width = values.shape
    descent.descend[(triton.cdiv(width, 2048), clients)](
        values, gradient, _or(copy, values), sizes, lr, width, COPY=copy is not None, BLOCK=2048, num_warps=8
    )
