"""One round over Flower's grid: ask, wait no longer than the deadline, close, and make it count."""

from __future__ import annotations

import functools
import itertools
import json
import logging
import time
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from fedcams.flower.arrays import ArrayNames
from fedcams.flower.checkpoint import REPLIES, FlowerCheckpoint
from fedcams.flower.inbox import Inbox, dense_size
from fedcams.flower.records import ABOUT, INSTRUCTION, REST, about, message_record, share
from fedcams.flower.roster import PAUSE, Roster
from fedcams.method import Method
from fedcams.rounds import server as server_side
from fedcams.rounds.messages import PROTOCOL, Instruction, Refusal, Reply
from fedcams.rounds.server import Concluded, Server, ServerState

if TYPE_CHECKING:
    from fedcams.flower.strategy import FedCAMS

GREETING = 60.0
"""Seconds within which a node that is there answers a greeting."""
NO_ANSWER, NOT_THERE = "no reply before the deadline", "not connected"
logger = logging.getLogger("flwr.fedcams")


class GridRound:
    """Runs the rounds of one run over a grid: asks clients, waits for their answers, and saves what came of them."""

    def __init__(
        self,
        strategy: FedCAMS,
        server: Server,
        names: ArrayNames,
        rest: ArrayRecord,
        checkpoint: FlowerCheckpoint,
        deadline: float,
        config: ConfigRecord,
    ) -> None:
        self.strategy, self.server, self.names, self.rest, self.checkpoint = strategy, server, names, rest, checkpoint
        self.deadline, self.config = deadline, config
        self.roster = Roster(strategy.configrecord_key, strategy.arrayrecord_key, min(deadline, GREETING))

    def advance(self, grid: Grid, state: ServerState) -> tuple[ServerState, dict[str, Any], Mapping[int, RecordDict]]:
        """Run the next round; return the state, which is on disk by then, the ledger's line and the metrics."""
        self.roster.wait(grid, max(self._needed().values()), self.deadline)
        skipped = self._too_few("clients connected", len(self.roster.clients), self._needed())
        cohort = self._cohort(state.round + 1)
        asked = {client: node for client in cohort if (node := self.roster.node_of(client)) is not None}
        keeping = [client for client in asked if client not in self.roster.plain] if not skipped else []
        instructions, state = server_side.instruct(self.server, state, keeping)
        folder, key = self.checkpoint.folder / REPLIES, self.strategy.arrayrecord_key
        inbox = Inbox(folder, self.names, key, self.server, state)
        inbox.absent |= dict.fromkeys(cohort - asked.keys(), NOT_THERE)
        down = 0
        if not skipped:
            state, down = self._exchange(grid, state, instructions, asked, inbox)
            skipped = self._too_few("sound replies", len(inbox.came), {"min_replies": self.strategy.min_replies})
        # who is out of step is heard also in a round that is skipped: the next one brings it the dense model
        answers: list[Iterable[Reply | Refusal]] = [inbox.refusals.values(), () if skipped else inbox.replies()]
        intake = server_side.take_answers(self.server, state, asked, itertools.chain(*answers), in_order=True)
        state, concluded = server_side.conclude(self.server, state, intake)
        line = self._line(state, concluded, sorted(cohort), inbox, skipped, down)
        self.checkpoint.save(state, line)
        return state, line, inbox.metrics

    def _needed(self) -> dict[str, int]:
        """How many clients must be connected, by the option that says so."""
        strategy = self.strategy
        population = {"sampler": strategy.sampler.min_population} if strategy.clients is None else {}
        return {"min_available": strategy.min_available, **population}

    def _too_few(self, what: str, found: int, needed: Mapping[str, int]) -> str:
        """The first option that asks for more than there are; nothing where none does."""
        short = (f"{found} {what}, {name}={getattr(self.strategy, name)}" for name, n in needed.items() if found < n)
        return next(short, "")

    def _cohort(self, round: int) -> set[int]:
        strategy, known = self.strategy, set(self.roster.clients)
        population = known if strategy.clients is None else {*range(strategy.clients), *self.roster.plain}
        if len(population) < strategy.sampler.min_population:
            return set()
        return set(strategy.sampler.sample(sorted(population), round, strategy.seed))

    # -- asking and hearing --------------------------------------------------------------------------------------

    def _exchange(
        self,
        grid: Grid,
        state: ServerState,
        instructions: dict[int, Instruction],
        asked: Mapping[int, int],
        inbox: Inbox,
    ) -> tuple[ServerState, int]:
        """Takes replies one at a time until all are there or time is up; who did not answer must show up again.

        Who is out of step is told again at once. Consumes the instructions, which hold a copy of the model; returns the
        state and the bytes of all that went out.
        """
        end, down = time.monotonic() + self.deadline, self._size(instructions, asked)
        sent = self._send_plain(grid, state, asked) | self._send(grid, instructions, asked, self.deadline)
        instructions.clear()
        while sent and (left := end - time.monotonic()) > 0:
            for name in list(sent):
                for message in grid.pull_messages([name]):
                    client = sent.pop(name)
                    inbox.take(client, client in self.roster.plain, message)
                    if (refusal := inbox.first_refusal(client)) is not None:
                        instruction, state = server_side.resend(self.server, state, refusal)
                        down += instruction.size
                        sent |= self._send(grid, {client: instruction}, asked, left)
            if sent:
                time.sleep(PAUSE)
        inbox.absent |= dict.fromkeys(sent.values(), NO_ANSWER)
        self.roster.forget(inbox.absent)
        return state, down

    def _size(self, instructions: Mapping[int, Instruction], asked: Collection[int]) -> int:
        """Bytes of what goes out; nodes without the mod get the model in full."""
        dense = dense_size(self.names.layout) + dense_size(self.names.buffer_layout)
        plain = self.roster.plain.intersection(asked)
        return len(plain) * dense + sum(instruction.size for instruction in instructions.values())

    def _send(
        self, grid: Grid, instructions: Mapping[int, Instruction], asked: Mapping[int, int], seconds: float
    ) -> dict[str, int]:
        """Message id -> client. What all clients get alike is one array in Flower's store, sent there once."""
        parts = {client: instruction.to_parts() for client, instruction in instructions.items()}
        shared, sent = share(parts.values()), dict[str, int]()
        for client, instruction in instructions.items():
            content = self._content(parts[client], shared)
            sent |= self._push(grid, content, instruction.round, client, asked[client], seconds)
        return sent

    def _send_plain(self, grid: Grid, state: ServerState, asked: Mapping[int, int]) -> dict[str, int]:
        """The same for nodes without the mod: the server's own model as arrays, whatever the downlink."""
        plain, sent = sorted(self.roster.plain.intersection(asked)), dict[str, int]()
        content = self._plain_content(state) if plain else RecordDict()
        for client in plain:
            sent |= self._push(grid, content, state.round + 1, client, asked[client], self.deadline)
        return sent

    def _push(
        self, grid: Grid, content: RecordDict, round: int, client: int, node: int, seconds: float
    ) -> dict[str, int]:
        message = Message(content, node, MessageType.TRAIN, ttl=seconds, group_id=str(round))
        return dict.fromkeys(grid.push_messages([message]), client)

    def _content(self, parts: list[bytes], shared: dict[int, Array]) -> RecordDict:
        told, key = self._told, self.strategy.configrecord_key
        return RecordDict({INSTRUCTION: message_record(parts, shared), REST: self.rest, ABOUT: told, key: self.config})

    @functools.cached_property
    def _told(self) -> ConfigRecord:
        server = self.server
        return instruction_about(self.checkpoint.run, server.method, self.names, server.rounds, server.population)

    def _plain_content(self, state: ServerState) -> RecordDict:
        rate = float(self.server.method.in_round(state.round + 1, self.server.rounds).local.lr)
        config = ConfigRecord({**self.config, "server-round": state.round + 1, "local-rate": rate})
        arrays = self.names.join(state.x, state.buffers, self.rest)
        return RecordDict({self.strategy.arrayrecord_key: arrays, self.strategy.configrecord_key: config})

    def _line(
        self, state: ServerState, concluded: Concluded, cohort: list[int], inbox: Inbox, skipped: str, down: int
    ) -> dict[str, Any]:
        refused = {**inbox.refused, **concluded.refused}
        for client, reason in refused.items():
            logger.warning("round %s: client %s refused: %s", state.round, client, reason)
        return {
            "round": state.round,
            "cohort": cohort,
            "accepted": {str(client): state.accepted[client].digest.hex() for client in concluded.accepted},
            "refused": _sorted(refused),
            "absent": _sorted(inbox.absent),
            "notes": _sorted(inbox.notes),
            "skipped": skipped,
            "delta_norm": concluded.delta_norm,
            "wire_up": sum(map(sum, inbox.came.values())) + inbox.other_bytes,
            "wire_down": down,
        }


def instruction_about(
    run: str, method: Method, names: ArrayNames, rounds: int | None = None, clients: int = 0
) -> ConfigRecord:
    """Return what an instruction says beside its streams: the run, the whole method and the model's arrays.

    `rounds` is how many rounds the run has, for schedules that depend on it, and `clients` how many clients there are;
    0 if that is not known.
    """
    return about(
        kind="instruction",
        protocol=PROTOCOL,
        run=run,
        method=json.dumps(method.to_dict()),
        rounds=rounds or 0,
        clients=clients,
        model=names.to_json(),
    )


def _sorted(reasons: Mapping[int, str]) -> dict[str, str]:
    return {str(client): reasons[client] for client in sorted(reasons)}
