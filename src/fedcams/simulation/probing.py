"""What the probes of a run measure in a simulated round."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fedcams.bits.vectors import row_norms
from fedcams.engines import CohortUpdate
from fedcams.errors import SpecError
from fedcams.method import RESIDUAL
from fedcams.probes import Leftovers, Probe, inner_products, mean_before
from fedcams.rounds.client import Client
from fedcams.rounds.cohort import Outgoing, code_rows, some_rows
from fedcams.rounds.intake import Intake
from fedcams.rounds.messages import UPDATE
from fedcams.rounds.server import Concluded, ServerState
from fedcams.simulation.record import RoundRecord
from fedcams.transforms import Facts

if TYPE_CHECKING:
    from torch import Tensor


class Measurement:
    """What probes need of one round: it is kept before the round overwrites it, and measured at the end.

    What no probe needs is not computed.
    """

    def __init__(self, probes: Sequence[Probe], x: Tensor, cohort: Sequence[int], trained: CohortUpdate) -> None:
        """Keep what the probes need of the model before the round `x [d]`, and of the cohort's training."""
        self.probes = probes
        self.needs = frozenset(need for probe in probes for need in probe.needs)
        self._counts = dict(zip(cohort, zip(trained.examples, trained.steps, strict=True), strict=True))
        self._before = x.clone() if "step" in self.needs else None
        self._gram = inner_products(trained.delta) if "gram" in self.needs else None

    def numbers(
        self, client: Client, outgoing: Outgoing, intake: Intake, state: ServerState, concluded: Concluded
    ) -> dict[str, float]:
        """Return what the probes measure, by name, before rows are committed; nothing if no update was accepted.

        `state` is that after the round.
        """
        if not concluded.accepted or concluded.mean is None or not self.probes:
            return {}
        method, layout, facts = intake.method, client.layout, self._with_counts(concluded.facts)
        ids, (codec, code) = outgoing.arrival.facts.ids, outgoing.arrival.codes[UPDATE]
        places = [ids.index(who) for who in facts.ids]
        mean_h, norm = _without_compression(client, outgoing, places, intake, facts)
        left = Leftovers(
            method=method,
            layout=layout,
            facts=facts,
            mean=concluded.mean,
            decoded=lambda: codec.decode(code_rows(code, places), layout),
            error=_rows(outgoing.errors, places),
            mean_h=mean_h,
            mean_delta_norm=norm,
            gram=self._gram_of(facts.ids),
            residual=_rows(outgoing.rows.get(RESIDUAL), places),
            state=state.optimizer,
            step_norm=None if self._before is None else float(row_norms((state.x - self._before)[None])),
            norms=intake.norms,
            bounds=intake.bounds,
        )
        return {name: value for probe in self.probes for name, value in _numbers(probe, left).items()}

    def _with_counts(self, facts: Facts) -> Facts:
        """Return the facts with what clients may not tell the server, but a simulation knows for its probes."""
        examples, steps = zip(*(self._counts[client] for client in facts.ids), strict=True)
        return dataclasses.replace(facts, examples=examples, steps=steps)

    def _gram_of(self, ids: Sequence[int]) -> Tensor | None:
        """Return the inner products of these clients' updates."""
        places = [place for place, client in enumerate(self._counts) if client in set(ids)]
        return None if self._gram is None else self._gram[places][:, places]


def _without_compression(
    client: Client, outgoing: Outgoing, places: Sequence[int], intake: Intake, facts: Facts
) -> tuple[Tensor | None, float]:
    """Return the mean that the server would have had without compression, and the norm of the mean update."""
    updates, messages = _rows(outgoing.updates, places), _rows(outgoing.messages, places)
    if updates is None:
        return None, 0.0
    if messages is None:
        kept = client.rows if client.keeps(RESIDUAL) else None
        return mean_before(updates, None if kept is None else kept.gather(RESIDUAL, facts.ids), facts.weights)
    mean_h, mean_delta = (mean_before(rows, None, facts.weights)[0] for rows in (messages, updates))
    for transform in intake.method.transforms:
        transform.mean_(mean_h, facts, client.layout)
        transform.mean_(mean_delta, facts, client.layout)
    return mean_h, float(mean_delta.norm())


def _rows(rows: Tensor | None, places: Sequence[int]) -> Tensor | None:
    return None if rows is None else some_rows(rows, places)


def _numbers(probe: Probe, left: Leftovers) -> dict[str, float]:
    """Return what a probe measures as plain numbers; refuses a name that the record uses for something else."""
    found = probe.measure(left)
    if taken := sorted(found.keys() & RoundRecord.__dataclass_fields__.keys()):
        raise SpecError(f"the probe {probe.name} measures {taken[0]!r}, which every record has already; rename it")
    return {name: float(value) for name, value in found.items()}
