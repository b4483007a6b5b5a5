"""What compression loses: in each update, and between the mean of the codes and the code of the mean."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fedcams.keys import derive
from fedcams.probes.base import Leftovers, Probe
from fedcams.registry import register


@register("q")
@dataclass(frozen=True)
class CompressionError(Probe):
    """Records the relative compression error ‖C(h)-h‖/‖h‖ of the accepted clients: `q`, its mean, and `q_max`.

    Neither is squared. Convergence theorems need the largest; a compressor's `squared_error_bound` bounds its square.
    Missing if the squares of a row overflow.
    """

    needs = frozenset({"error"})
    examples = ("q",)

    def measure(self, left: Leftovers) -> dict[str, float]:
        if left.error is None or not bool(left.error.isfinite().all()):  # rows of 1e19 and more overflow
            return {}
        return {"q": float(left.error.double().mean()), "q_max": float(left.error.max())}


@register("gamma")
@dataclass(frozen=True)
class Dissimilarity(Probe):
    """Records `gamma`, ‖C(mean h) - mean C(h)‖/‖mean Δ‖: how far the clients' codes are from one code of their mean.

    It is 0 if the mean update is zero, and missing if its square overflows. It encodes one more vector per round.
    """

    reference = "Wang, Lin, Chen: Communication-Efficient Adaptive Federated Learning, ICML 2022"
    needs = frozenset({"mean_h"})
    examples = ("gamma",)

    def measure(self, left: Leftovers) -> dict[str, float]:
        if left.mean_h is None or not math.isfinite(left.mean_delta_norm):  # means of 1e19 and more overflow
            return {}
        if not left.mean_delta_norm:
            return {"gamma": 0.0}
        codec = left.method.uplink
        code = codec.encode(left.mean_h, left.layout, derive(left.facts.seed, "gamma", left.facts.round))
        apart = float((codec.decode(code, left.layout) - left.mean).norm())
        return {"gamma": apart / left.mean_delta_norm} if math.isfinite(apart) else {}
