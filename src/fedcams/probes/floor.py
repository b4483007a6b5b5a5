"""Whether an adaptive server adapts: how many coordinates left the floor, and the rate of its steps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fedcams.bits.vectors import row_norms
from fedcams.optimizers import ServerOptimizer
from fedcams.probes.base import Leftovers, Probe
from fedcams.registry import register

RARELY = 0.01
"""A server adapts too little to matter if fewer coordinates than this leave the floor."""


@register("floor")
@dataclass(frozen=True)
class Floor(Probe):
    """Records `off_floor`, the share of coordinates off the floor, and `rate`, ‖step‖/‖m‖.

    A coordinate is off the floor if v̂ exceeds `eps` with fedams, or √v or √v̂ exceeds it with other servers. While
    `off_floor` is 0, fedams is `fedavgm`, and the steps of the others are 0.5 to 1 times those of a `fedavgm`. Servers
    without a second moment have no `off_floor`; those without momentum have `m = Δ`. Costs one pass over the server's
    state.
    """

    needs = frozenset({"step"})
    examples = ("floor",)

    def measure(self, left: Leftovers) -> dict[str, float]:
        if left.state is None or left.step_norm is None:
            return {}
        found = {}
        if (off := left.method.server.off_floor(left.state)) is not None:
            found["off_floor"] = float(off.double().mean())
        moment = left.state._asdict().get("m", left.mean)
        if length := float(row_norms(moment[None])):
            found["rate"] = left.step_norm / length
        return found


def floor_note(shares: Iterable[float | None], server: ServerOptimizer) -> str | None:
    """Return a sentence for a run whose adaptive server never adapted; None if it did, or if that is not known.

    `shares` are the `off_floor` of its rounds. The sentence names the `fedavgm` with the same steps, or says that it
    has a schedule, if the server has one. Where ε is added to the root, a root as large as ε still halves the step, so
    that these steps are only near those of `fedavgm`.
    """
    known, twin = [share for share in shares if share is not None], _twin(server)
    if not known or twin is None or max(known) >= RARELY:
        return None
    share = f"{100 * (1 - max(known)):.6g}% of coordinates"
    if server.name != "fedams":
        return f"√v stayed below ε in {share}: there, steps are 0.5 to 1 times those of {twin}"
    return f"v̂ stayed on its floor in {share}: this run is {twin}"


def _twin(server: ServerOptimizer) -> str | None:
    """Return the `fedavgm` of a server on its floor with all its keys, also those that have their defaults."""
    if server.schedules():
        return "a fedavgm whose rate follows the server's schedule"
    twin = server.twin(digits=3)
    return None if twin is None else twin.spelled_out()
