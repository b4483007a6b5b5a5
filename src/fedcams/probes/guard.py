"""How close accepted clients come to the guard's bound."""

from __future__ import annotations

from dataclasses import dataclass

from fedcams.probes.base import Leftovers, Probe
from fedcams.registry import register


@register("guard")
@dataclass(frozen=True)
class GuardUse(Probe):
    """Records `guard_use`: the longest row of an accepted client, in any stream, as a share of the guard's bound.

    Close to 1 means that honest clients are about to be refused: raise `factor`. Missing if the guard has no bound.
    """

    examples = ("guard",)

    def measure(self, left: Leftovers) -> dict[str, float]:
        shares = [
            norm / left.bounds[stream]
            for client in left.facts.ids
            for stream, norm in left.norms.get(client, {}).items()
            if left.bounds.get(stream)
        ]
        return {"guard_use": max(shares)} if shares else {}
