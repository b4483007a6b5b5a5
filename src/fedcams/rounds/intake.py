"""The arrivals of one round: valid ones are added to the sums, the others are refused with a reason."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch

from fedcams.aggregate import Aggregator
from fedcams.buffers import add_change
from fedcams.compress.identity import IDENTITY
from fedcams.downlink import Held, OutOfStep
from fedcams.errors import FedcamsError, UpdateError
from fedcams.guards import Norms
from fedcams.method import BUFFERS, CONTROL
from fedcams.rounds.cohort import Arrival, Outgoing, arrival_of, streams_up
from fedcams.rounds.measuring import measures, norms_of, refusals, scatter
from fedcams.rounds.messages import UPDATE, Refusal, Reply
from fedcams.rounds.private import noisy_mean
from fedcams.rounds.robust import RobustMean
from fedcams.rounds.sending import not_finite
from fedcams.transforms import Facts

if TYPE_CHECKING:
    from torch import Tensor

    from fedcams.rounds.server import Server, ServerState


class Means(NamedTuple):
    """The means of a cohort's accepted arrivals."""

    update: Tensor
    """`[d]`, the combined update after the transforms of the mean."""
    norm: float
    buffers: Tensor | None
    """`[b]`, the new buffers; None if the model has none."""
    control: Tensor | None
    """`[d]`, the mean change of the control variates; None without them."""


class _Client(NamedTuple):
    """What is known about an accepted client."""

    examples: int
    steps: int
    weight: float
    loss: float


class Intake:
    """Takes the arrivals of one round, as rows (`take`) or as messages (`offer`), and combines them (`means`).

    Arrivals may be taken one by one, in batches or all at once: the means are the same, bit for bit. With `in_order`
    they must arrive in ascending client id and are added immediately, so memory does not grow with their number.
    """

    def __init__(
        self,
        server: Server,
        state: ServerState,
        cohort: Collection[int],
        in_order: bool = False,
        bounds: Mapping[str, float] | None = None,
    ) -> None:
        """Begin the intake of the round after `state`, for the clients of this cohort.

        `bounds` are the guard's, by stream; unless given, they are those that past rounds alone give.
        """
        self.server, self.state, self.round, self.cohort = server, state, state.round + 1, cohort
        self.method = server.method.in_round(self.round, server.rounds)
        self.streams = streams_up(self.method, server.layout, server.buffer_layout)
        self.sums = {name: self._empty_sum(name, in_order) for name in self.streams}
        self.digests: dict[int, bytes] = {}
        """Accepted client -> the digest of its reply, if it came as bytes."""
        self.acks: dict[int, Held | None] = {}
        """Client -> the model that it says it holds, even if its reply was refused."""
        self.refused: dict[int, str] = {}
        self.bounds = self.bounds_by({}) if bounds is None else bounds
        self.norms: dict[int, dict[str, float]] = {}
        """Client -> stream -> the norm of its decoded row, refused or not; empty if nothing needs it."""
        self.skipped = ""
        """Why the round makes no step although nothing went wrong; set by `means`."""
        self._clipped = self.method.privacy.clipped_sum(server.layout, in_order)
        self._accepted: dict[int, _Client] = {}

    def _empty_sum(self, name: str, in_order: bool) -> Aggregator | RobustMean:
        """Return what combines a stream. Control variates always have a mean: the server's is that of all clients'."""
        layout, device = self.streams[name].layout, self.state.x.device
        aggregate, is_buffers = self.method.aggregate, name == BUFFERS
        if aggregate.streaming or name == CONTROL or (is_buffers and not aggregate.is_mean):
            return Aggregator(layout, device, in_order)
        return RobustMean(aggregate, layout, device, self.state.buffers if is_buffers else None)

    def bounds_by(self, norms: Norms) -> dict[str, float]:
        """Return the guard's bound on the norms of each stream, given those of the cohort as far as they are known."""
        bounds = self.method.guard.bounds(self.state.guard, norms)
        clients = len(self.cohort)
        return {name: bound * scatter(name, self.streams[name].codec, clients) for name, bound in bounds.items()}

    # -- as messages -------------------------------------------------------------------------------------------------

    def offer(self, answer: Reply | Refusal) -> None:
        """Take a client's message, or refuse it and record the reason in `refused`."""
        try:
            self._check(answer)
            self._note_held(answer)
            if isinstance(answer, Refusal):
                raise UpdateError(answer.reason) if self._in_step(answer) else OutOfStep(answer.reason, answer.held)
            if not self._in_step(answer):
                sent = self._expected(answer.client)
                raise UpdateError(
                    f"client {answer.client} trained from {answer.held or 'nothing kept'}, but was sent {sent}"
                )
            facts = self._facts({answer.client: _Client(answer.examples, answer.steps, 1.0, answer.loss)})
            self.take(arrival_of(answer, self.streams, facts))
            if answer.client in self._accepted:
                self.digests[answer.client] = answer.digest
        except FedcamsError as error:
            self.refused[answer.client] = _reason(error)

    def _check(self, answer: Reply | Refusal) -> None:
        if answer.round != self.round:
            raise UpdateError(
                f"an update for round {answer.round} in round {self.round}; it came too late or too early"
            )
        if answer.client not in self.cohort:
            raise UpdateError(f"client {answer.client} was not selected in round {self.round}")

    def _note_held(self, answer: Reply | Refusal) -> None:
        """Record the model that a client says it holds; once it has named the one it was sent, that stays recorded."""
        if self.acks.get(answer.client) != self._expected(answer.client):
            self.acks[answer.client] = answer.held

    def _in_step(self, answer: Reply | Refusal) -> bool:
        return answer.held == self._expected(answer.client)

    def _expected(self, client: int) -> Held | None:
        return self.method.downlink.expected(self.state.downlink, client)

    # -- as rows -----------------------------------------------------------------------------------------------------

    def take_all(self, outgoing: Outgoing) -> None:
        """Take what the clients of a cohort send, including their refusals."""
        self._refuse(outgoing.refused)
        self.take(outgoing.arrival, whole_cohort=True)

    def take(self, arrival: Arrival, whole_cohort: bool = False) -> None:
        """Take the rows of some clients; those refused are left out, with the reason in `refused`.

        Everything is checked before anything is added, so that a client counts completely or not at all. If it is the
        `whole_cohort`, the guard's bounds are those that its norms give.
        """
        if not len(arrival):
            return
        self._refuse_twice(arrival)
        if measures(self.method):
            self.norms |= norms_of(arrival, self.streams, self.state.buffers)
        if whole_cohort:
            self.bounds = self.bounds_by(self.norms)
        arrival = self._weighed(arrival)
        reasons = refusals(self.method, arrival, self.norms, self.bounds, self.server.buffer_layout)
        arrival = self._transformed(self._with_own_buffers(self._without(arrival, reasons)))
        if len(arrival):
            self._add(arrival)

    def _transformed(self, arrival: Arrival) -> Arrival:
        """Return the arrival with its updates after the transforms, without the clients whose rows overflow there."""
        if not len(arrival) or not any("arrival" in transform.points for transform in self.method.transforms):
            return arrival
        (codec, code), layout = arrival.codes[UPDATE], self.server.layout
        rows = codec.decode(code, layout)
        for transform in self.method.transforms:
            transform.arrival_(rows, arrival.facts, layout)
        return self._with_rows(arrival, UPDATE, rows)

    def _with_own_buffers(self, arrival: Arrival) -> Arrival:
        """Return the arrival with the clients' own buffers in place of changes of those that each client was sent.

        Clients whose change overflows are left out.
        """
        own = self.state.buffers
        if BUFFERS not in self.streams or self.method.buffers == IDENTITY or own is None or not len(arrival):
            return arrival
        (codec, code), layout = arrival.codes[BUFFERS], self.streams[BUFFERS].layout
        sent = [self.method.downlink.buffers_of(self.state.downlink, client) for client in arrival.facts.ids]
        before = torch.stack([own if row is None else row for row in sent])
        rows = add_change(before, codec.decode(code, layout).to(own.device), layout)
        return self._with_rows(arrival, BUFFERS, rows)

    def _with_rows(self, arrival: Arrival, name: str, rows: Tensor) -> Arrival:
        """Return the arrival with these rows `[C, d]` as its stream `name`, without clients whose row is not finite."""
        finite = bool(torch.isfinite(rows).all())
        reasons = {} if finite else not_finite(arrival.facts.ids, rows, self.streams[name].layout)
        codes = {**arrival.codes, name: (IDENTITY, {"values": rows})}
        return self._without(dataclasses.replace(arrival, codes=codes), reasons)

    def _without(self, arrival: Arrival, reasons: Mapping[int, str]) -> Arrival:
        """Record why clients are refused, and return the arrival of the others."""
        self._refuse(reasons)
        return arrival.only([place for place, client in enumerate(arrival.facts.ids) if client not in reasons])

    def _refuse(self, reasons: Mapping[int, str]) -> None:
        self.refused |= {client: f"UpdateError: {why}" for client, why in reasons.items()}

    def _weighed(self, arrival: Arrival) -> Arrival:
        """Return the arrival with the weights that its clients have in the mean."""
        facts = arrival.facts
        weights = self.server.weights(facts.ids, facts.examples, self.round)
        return dataclasses.replace(arrival, facts=dataclasses.replace(facts, weights=weights))

    def _refuse_twice(self, arrival: Arrival) -> None:
        for client in arrival.facts.ids:
            if client in self._accepted:
                raise UpdateError(f"client {client} already has an update in this round; send one per client and round")

    def _add(self, arrival: Arrival) -> None:
        facts, codes = arrival.facts, arrival.codes
        if self._clipped is not None:  # privacy refuses all other streams
            self._clipped.add(facts.ids, *codes[UPDATE])
        else:
            for name, total in self.sums.items():  # all clients count equally in the mean of the control variates
                total.add_rows(facts.ids, *codes[name], (1.0,) * len(facts.ids) if name == CONTROL else facts.weights)
        known = zip(facts.examples, facts.steps, facts.weights, arrival.losses, strict=True)
        self._accepted |= dict(zip(facts.ids, itertools.starmap(_Client, known), strict=True))

    # -- results -----------------------------------------------------------------------------------------------------

    def facts(self) -> Facts:
        """Return the facts of the accepted clients, in ascending id."""
        return self._facts(self._accepted)

    def _facts(self, clients: Mapping[int, _Client]) -> Facts:
        ids = tuple(sorted(clients))
        known = [clients[client] for client in ids]
        examples, steps, weights, _ = zip(*known, strict=True) if known else ((), (), (), ())
        rate, population = float(self.method.local.lr), self.server.population
        return Facts(self.round, self.server.seed, ids, examples, steps, weights, rate, population)

    def mean_loss(self) -> float | None:
        """Return the mean of the accepted clients' losses; None if there are none, or if their sum overflows."""
        losses = [self._accepted[client].loss for client in sorted(self._accepted)]
        mean = float(torch.tensor(losses, dtype=torch.float64, device=self.state.x.device).mean())
        return None if self.method.privacy.at_client or not math.isfinite(mean) else mean

    @functools.cached_property
    def means(self) -> Means | None:
        """The means of the accepted arrivals; None if there are none, or fewer than the method's `min_replies`.

        They are computed once, so take all arrivals first. Updates that are finite one by one may overflow in a sum, or
        when an optimizer squares them. It is then unknown which of them is at fault, so all of them are refused. With
        noise at the server, there is a mean in every round, of noise alone if nothing arrived.
        """
        try:
            if self._clipped is None and len(self._accepted) < self.method.min_replies:
                self.skipped = f"{len(self._accepted)} valid replies, min_replies={self.method.min_replies}"
                raise UpdateError(self.skipped)
            return self._means()
        except UpdateError as error:
            self.refused |= dict.fromkeys(self._accepted, _reason(error))
            self._accepted.clear()
            self.digests.clear()
            return None

    def _means(self) -> Means:
        clipped, facts = self._clipped, self.facts()
        update = self.sums[UPDATE].mean() if clipped is None else noisy_mean(self.server, self.state, clipped)
        for transform in self.method.transforms:
            transform.mean_(update, facts, self.server.layout)
        if not math.isfinite(norm := float(update.norm())):
            raise UpdateError(f"the mean of the updates has the norm {norm}; refuse such updates with max_norm")
        control = self.sums[CONTROL].mean() if CONTROL in self.sums else None
        buffers = self.sums[BUFFERS].mean() if BUFFERS in self.sums else None
        return Means(update, norm, buffers, control)


def _reason(error: FedcamsError) -> str:
    return f"{type(error).__name__}: {error}"
