"""The agreement of clients: the cosine between their updates and the mean."""

from __future__ import annotations

from dataclasses import dataclass

from fedcams.bits.vectors import row_dots, row_norms
from fedcams.probes.base import Leftovers, Probe
from fedcams.registry import register


@register("cosine")
@dataclass(frozen=True)
class Cosine(Probe):
    """Records the mean and the minimum cosine between accepted updates and their mean: `cosine_mean`, `cosine_min`.

    The cosine with a zero vector counts as 0.
    """

    examples = ("cosine",)

    def measure(self, left: Leftovers) -> dict[str, float]:
        rows = left.decoded()
        lengths = row_norms(rows) * row_norms(left.mean[None])
        cosines = (row_dots(rows, left.mean) / lengths.clamp(min=1e-300)).clamp(-1, 1)
        return {"cosine_mean": float(cosines.mean()), "cosine_min": float(cosines.min())}
