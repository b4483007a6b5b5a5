"""The paper's two tables of communication: bits of one client's link over 500 rounds of ResNet-18."""

from __future__ import annotations

from typing import NamedTuple

from fedcams.compress import compressor
from fedcams.layout import Layout

D, ROUNDS = 11_173_962, 500
DENSE = "identity"


class PaperRow(NamedTuple):
    """One row of a table: the codecs of updates and models, the bits by the paper's rule, and the printed number."""

    uplink: str
    downlink: str
    bits: int
    printed: str


PRINTED = {
    (DENSE, DENSE): "3.58e11",
    ("sign", DENSE): "1.84e11",
    ("topk(ratio=1/64)", DENSE): "1.84e11",
    ("topk(ratio=1/128)", DENSE): "1.82e11",
    ("topk(ratio=1/256)", DENSE): "1.80e11",
    ("sign", "sign"): "1.12e10",
    ("topk(ratio=1/64)", "topk(ratio=1/64)"): "1.12e10",
    ("topk(ratio=1/128)", "topk(ratio=1/128)"): "5.59e9",
    ("topk(ratio=1/256)", "topk(ratio=1/256)"): "2.79e9",
}


def paper_tables() -> tuple[list[PaperRow], list[PaperRow]]:
    """Return the tables of one-way and of two-way compression; both start with the uncompressed row."""
    rows = [PaperRow(up, down, _bits(up) + _bits(down), text) for (up, down), text in PRINTED.items()]
    one, two = [row for row in rows if row.downlink == DENSE], [row for row in rows if row.downlink != DENSE]
    return one, [rows[0], *two]


def _bits(codec: str) -> int:
    return ROUNDS * compressor(codec).paper_bits(Layout.flat(D))
