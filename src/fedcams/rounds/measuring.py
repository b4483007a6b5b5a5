"""What a server checks in arrivals before it adds them: the norms of their rows, and that buffers make sense."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from fedcams.bits.vectors import row_norms
from fedcams.buffers import below_zero
from fedcams.compress import Compressor
from fedcams.compress.identity import IDENTITY
from fedcams.guards import ENOUGH, Norms
from fedcams.layout import Layout
from fedcams.method import BUFFERS, CONTROL, Method
from fedcams.rounds.cohort import Arrival, Stream
from fedcams.rounds.messages import UPDATE

if TYPE_CHECKING:
    from torch import Tensor

ROWS = {UPDATE: "an update", BUFFERS: "a change of buffers", CONTROL: "a change of the control variate"}
WIDER = 4.0
"""Where norms scatter, a bound is this many times as wide, for each of the reasons that `scatter` names."""


def scatter(name: str, codec: Compressor, clients: int) -> float:
    """Return how many times further than elsewhere the norms of this stream may lie from what is usual.

    A codec that draws a few coordinates at random may hit the large ones in one row and the small ones in others. Small
    cohorts cannot show what is usual. Buffers and control variates change most for clients that are new or were away
    for long.
    """
    reasons = codec.in_expectation, clients < ENOUGH, name != UPDATE
    return WIDER ** sum(reasons)


def measures(method: Method) -> bool:
    """Return whether something in this method needs the norms of rows."""
    return method.guard.active or any(transform.reads_norm for transform in method.transforms)


def norms_of(arrival: Arrival, streams: Mapping[str, Stream], before: Tensor | None) -> dict[int, dict[str, float]]:
    """Return client -> stream -> the norm of its decoded row.

    Compressed buffers arrive as changes already; of others, the norm is that of their change from `before [b]`.
    """
    found: dict[str, list[float]] = {}
    for name, stream in streams.items():
        codec, code = arrival.codes[name]
        if name == BUFFERS and codec == IDENTITY and before is not None:
            found[name] = row_norms(code["values"] - before).tolist()
        else:
            found[name] = codec.norms(code, stream.layout).tolist()
    return {client: {name: norms[i] for name, norms in found.items()} for i, client in enumerate(arrival.facts.ids)}


def refusals(
    method: Method, arrival: Arrival, norms: Norms, bounds: Mapping[str, float], buffer_layout: Layout | None
) -> dict[int, str]:
    """Return the clients of an arrival that must be refused, and why.

    `norms` are those of its rows, and `bounds` the guard's, by stream.
    """
    found: dict[int, str] = {}
    for place, client in enumerate(arrival.facts.ids):
        reason = (
            _weightless(method, arrival, place)
            or _by_transforms(method, arrival, place, norms.get(client, {}))
            or (_too_long(method, norms[client], bounds) if method.guard.active else "")
        )
        if reason:
            found[client] = reason
    if method.guard.active and buffer_layout is not None and method.buffers == IDENTITY:  # others are never below zero
        found = {**_meaningless(arrival, buffer_layout), **found}
    return found


def _too_long(method: Method, norms: Mapping[str, float], bounds: Mapping[str, float]) -> str:
    """Return which row of a client is longer than the guard's bounds allow, or an empty string."""
    for name, norm in norms.items():
        if name in bounds and not norm <= bounds[name]:
            most = f"guard={method.guard} accepts at most {bounds[name]:.6g} in this round"
            return f"{ROWS[name]} of norm {norm:.6g}; {most}"
    return ""


def _by_transforms(method: Method, arrival: Arrival, place: int, norms: Mapping[str, float]) -> str:
    """Return why the first of the transforms that refuses a client's update does so, or an empty string."""
    guards = [transform for transform in method.transforms if "guard" in transform.points]
    facts = arrival.facts.take([place]) if guards else arrival.facts
    reasons = (guard.refuses(norms.get(UPDATE, math.nan), facts) for guard in guards)
    return next(filter(None, reasons), "")


def _weightless(method: Method, arrival: Arrival, place: int) -> str:
    facts = arrival.facts
    if math.isfinite(weight := facts.weights[place]) and weight > 0:
        return ""
    source = f"weighting={method.weighting}, examples={facts.examples[place]}"
    return f"client {facts.ids[place]}: weight={weight} by {source}; allowed: a finite number above 0"


def _meaningless(arrival: Arrival, layout: Layout) -> dict[int, str]:
    """Return the clients whose buffers make no sense: a variance below zero."""
    codec, code = arrival.codes[BUFFERS]
    wrong = below_zero(codec.decode(code, layout), layout)
    says = "the variance {!r} is below zero; send the buffers of the trained model"
    return {arrival.facts.ids[place]: says.format(name) for place, name in wrong.items()}
