"""The tile sizes of the kernels by precision and shape: those that were fastest on an H200."""

from __future__ import annotations

from typing import NamedTuple


class Tiles(NamedTuple):
    """Rows, columns and depth of a tile of a matrix product; warps and pipeline stages."""

    BM: int
    BN: int
    BK: int
    num_warps: int
    num_stages: int


def power(n: int, low: int, high: int) -> int:
    """Return the smallest power of two that is at least n, limited to [low, high]."""
    return min(high, max(low, 1 << (n - 1).bit_length()))


def depth(channels: int, most: int) -> int:
    """Return the largest power of two that divides the channels; 0 if it is below 16."""
    size = most
    while size >= 16 and channels % size:
        size //= 2
    return size if size >= 16 else 0


def product(rows: int, columns: int, channels: int, taps: int, precision: str) -> Tiles:
    """Return tiles for `forward` and `backward_input`: rows are pixels, columns output channels, BK may be 0."""
    if precision != "bf16":
        return Tiles(64, power(columns, 16, 64), depth(channels, 32), 4, 2)
    wide = power(columns, 16, 128)
    if rows <= 512:  # few pixels: smaller tiles, so that there are enough of them
        return Tiles(power(rows, 16, 64), wide, depth(channels, 64), 4, 4)
    # short sums: what follows them costs most, and fills small tiles better
    high = 64 if taps * channels <= 512 else 128
    return Tiles(high, wide, depth(channels, 64), 4, 3)


def weights(outputs: int, columns: int, channels: int, precision: str) -> Tiles:
    """Return tiles for `backward_weight`: rows are output channels, columns are taps times input channels."""
    if precision != "bf16":
        return Tiles(power(outputs, 16, 64), power(columns, 16, 64), 32, 4, 2)
    if channels % 64 or columns < 128:
        return Tiles(power(outputs, 16, 128), power(columns, 16, 64), 64, 4, 3)
    if channels == 128:
        return Tiles(power(outputs, 16, 128), 64, 64, 4, 4)
    return Tiles(power(outputs, 16, 128), 128, 64, 4, 4 if outputs <= 64 else 3)


def splits(tiles: int, rows: int, precision: str, programs: int = 264, least: int = 1024) -> int:
    """Return how many chunks to split the rows of `backward_weight` into, so that all processors have work.

    In float32 no chunk is longer than 512 rows: sums of sums round less than one long sum.
    """
    filling = min(-(-programs // tiles), rows // least)
    return max(1, filling, 0 if precision == "bf16" else -(-rows // 512))


def rolls(kernel: tuple[int, int], width: int, precision: str) -> bool:
    """Return whether a depthwise kernel is small enough to stay in registers, with sums that are exact enough."""
    return precision == "bf16" and kernel[0] * kernel[1] <= 25 and width <= 64


def rolling(width: int, channels: int) -> tuple[int, int]:
    """Return the columns and channels of the rows that a program of `rolling` takes: 512 pixels, four per thread."""
    across = power(width, 8, 64)
    return across, power(channels, 8, 512 // across)


AT_A_TIME = 396
"""How many programs of `rolling.backward_weight` an H200 runs at a time."""


def together(images: int, others: int) -> int:
    """Return how many images a program of `rolling.backward_weight` takes, given the number of programs per image.

    Chosen so that the last programs do not start late: 800 programs of two images take as long as three rounds of them.
    """
    return min(range(images, 0, -1), key=lambda group: -(-(-(-images // group) * others) // AT_A_TIME) * group)
