"""One round over Flower's grid: send instructions, take replies until the deadline, step the model, save the round."""

from __future__ import annotations

import functools
import json
import logging
import time
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from fedcams.flower.arrays import ArrayNames
from fedcams.flower.checkpoint import REPLIES, FlowerCheckpoint
from fedcams.flower.inbox import Inbox, dense_size
from fedcams.flower.records import ABOUT, INSTRUCTION, REST, about, message_record, readable, share
from fedcams.flower.replies import PAUSE
from fedcams.flower.roster import Roster
from fedcams.method import Method
from fedcams.rounds import server as server_side
from fedcams.rounds.messages import PROTOCOL, Instruction
from fedcams.rounds.private import draw_cohort, epsilon_after
from fedcams.rounds.server import Concluded, Server, ServerState
from fedcams.runs.files import refuse_linked_folders

if TYPE_CHECKING:
    from fedcams.flower.strategy import FedCAMS

GREETING = 60.0
"""Seconds that a connected node has to answer its first greeting."""
NO_ANSWER, NOT_THERE = "no reply before the deadline", "not connected"
logger = logging.getLogger("flwr.fedcams")


class GridRound:
    """Runs rounds, and holds what does not change from round to round."""

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
        keys, patience = (strategy.configrecord_key, strategy.arrayrecord_key), min(deadline, GREETING)
        self.roster = Roster(*keys, patience, deadline, (strategy.clients or 2**63) - 1)

    def advance_(self, grid: Grid, state: ServerState) -> tuple[ServerState, dict[str, Any], Mapping[int, RecordDict]]:
        """Run one round; return the new state, which is on disk by then, its ledger line and the clients' metrics.

        Overwrites the tensors of the old state.
        """
        self.roster.wait(grid, max(self._needed().values()), self.deadline)
        skipped = self._too_few()
        cohort = self._cohort(state)
        there = {client: node for client in cohort if (node := self.roster.node_of(client)) is not None}
        asked = {} if skipped else there
        keeping = [client for client in asked if client not in self.roster.plain]
        instructions, state = server_side.instruct(self.server, state, keeping)
        folder, key = self.checkpoint.folder / REPLIES, self.strategy.arrayrecord_key
        inbox = Inbox(folder, self.names, key, self.server, state)
        inbox.absent |= dict.fromkeys(cohort - there.keys(), NOT_THERE)
        self.config = self.strategy.round_config(state, self.config, grid, self._arrays)
        state, down = self._exchange(grid, state, instructions, asked, inbox)
        refuse_linked_folders(self.checkpoint.folder)  # replicas are written from here on
        # refusals count even if the round is then skipped: the next one sends the dense model to clients out of step
        intake = server_side.take_answers(self.server, state, asked, inbox, in_order=True)
        state, concluded = server_side.conclude_(self.server, state, intake)
        line = self._line(state, concluded, sorted(cohort), inbox, skipped or concluded.skipped, down)
        self.checkpoint.save(state, line)
        return state, line, inbox.metrics

    def _needed(self) -> dict[str, int]:
        """Return option -> how many clients it requires to be connected."""
        strategy = self.strategy
        population = {"sampler": strategy.sampler.min_population} if strategy.clients is None else {}
        return {"min_available": strategy.min_available, **population}

    def _too_few(self) -> str:
        """Return in words the first option that needs more clients than are connected; an empty string if none does.

        With noise at the server, rounds go on with those that are there: if one client could decide whether the updates
        of all others count, no noise would hide it.
        """
        privacy = self.server.method.privacy
        if privacy.active and not privacy.at_client:
            return ""
        found, needed = len(self.roster.clients), self._needed()
        return next(
            (
                f"{found} clients connected, {name}={getattr(self.strategy, name)}"
                for name, least in needed.items()
                if found < least
            ),
            "",
        )

    def _cohort(self, state: ServerState) -> set[int]:
        strategy, known = self.strategy, set(self.roster.clients)
        # a node without the mod would send its update without noise
        plain = set() if self.server.method.privacy.at_client else self.roster.plain
        population = known if strategy.clients is None else {*range(strategy.clients), *plain}
        if len(population) < strategy.sampler.min_population:
            return set()
        return set(draw_cohort(self.server, state, sorted(population)))

    # -- instructions and replies --------------------------------------------------------------------------------

    def _exchange(
        self,
        grid: Grid,
        state: ServerState,
        instructions: dict[int, Instruction],
        asked: Mapping[int, int],
        inbox: Inbox,
    ) -> tuple[ServerState, int]:
        """Send the instructions and take replies one at a time, until all are there or the deadline has passed.

        A client that is out of step is sent another instruction at once. Nodes that did not answer are greeted again.
        Empties `instructions`, which hold a copy of the model. Returns the state, and the bytes that were sent.
        """
        end, down = time.monotonic() + self.deadline, self._size(instructions, asked)
        sent = self._send_plain(grid, state, asked) | self._send(grid, instructions, asked, self.deadline)
        instructions.clear()
        plain = frozenset(self.roster.plain)  # one of them may turn out to have the mod in the meantime
        while sent and (left := end - time.monotonic()) > 0:
            for name, client in list(sent.items()):
                if not inbox.fetch(grid, name, client, client in plain):
                    continue
                del sent[name]
                if (refusal := inbox.first_refusal(client)) is not None:
                    instruction, state = server_side.resend(self.server, state, refusal)
                    down += instruction.size
                    sent |= self._send(grid, {client: instruction}, asked, left)
            self.roster.listen(grid)
            if sent:
                time.sleep(PAUSE)
        inbox.absent |= dict.fromkeys(asked.keys() - inbox.heard, NO_ANSWER)
        self.roster.answered(asked.keys() - inbox.absent.keys())
        self.roster.forget(asked.keys() & inbox.absent.keys())  # but not nodes that have connected since
        return state, down

    def _size(self, instructions: Mapping[int, Instruction], asked: Collection[int]) -> int:
        """Return the bytes of all instructions; nodes without the mod receive the dense model."""
        dense = dense_size(self.names.layout) + dense_size(self.names.buffer_layout)
        plain = self.roster.plain.intersection(asked)
        return len(plain) * dense + sum(instruction.size for instruction in instructions.values())

    def _send(
        self, grid: Grid, instructions: Mapping[int, Instruction], asked: Mapping[int, int], seconds: float
    ) -> dict[str, int]:
        """Send the instructions; return message id -> client. Parts that clients share are sent to Flower once."""
        parts = {client: instruction.to_parts() for client, instruction in instructions.items()}
        shared, sent = share(parts.values()), dict[str, int]()
        for client, instruction in instructions.items():
            content = self._content(parts[client], shared)
            sent |= self._push(grid, content, instruction.round, client, asked[client], seconds)
        return sent

    def _send_plain(self, grid: Grid, state: ServerState, asked: Mapping[int, int]) -> dict[str, int]:
        """Do the same for nodes without the mod: they receive the server's model as arrays, whatever the downlink."""
        plain, sent = sorted(self.roster.plain.intersection(asked)), dict[str, int]()
        content = self._plain_content(state) if plain else RecordDict()
        for client in plain:
            sent |= self._push(grid, content, state.round + 1, client, asked[client], self.deadline)
        return sent

    def _push(
        self, grid: Grid, content: RecordDict, round: int, client: int, node: int, seconds: float
    ) -> dict[str, int]:
        message = Message(content, node, MessageType.TRAIN, ttl=seconds, group_id=str(round))
        return {name: client for name in grid.push_messages([message]) if name}  # none for a node that is gone

    def _content(self, parts: list[bytes], shared: dict[int, Array]) -> RecordDict:
        told, key = self._told, self.strategy.configrecord_key
        return RecordDict({INSTRUCTION: message_record(parts, shared), REST: self.rest, ABOUT: told, key: self.config})

    @functools.cached_property
    def _told(self) -> ConfigRecord:
        server, strategy = self.server, self.strategy
        told = instruction_about(self.checkpoint.run, server.method, self.names, server.rounds, server.population)
        told["arrays_key"], told["config_key"] = strategy.arrayrecord_key, strategy.configrecord_key
        return told

    def _plain_content(self, state: ServerState) -> RecordDict:
        rate = float(self.server.method.in_round(state.round + 1, self.server.rounds).local.lr)
        config = ConfigRecord({**self.config, "server-round": state.round + 1, "local-rate": rate})
        return RecordDict({self.strategy.arrayrecord_key: self._arrays(state), self.strategy.configrecord_key: config})

    def _arrays(self, state: ServerState) -> ArrayRecord:
        return self.names.join(state.x, state.buffers, self.rest)

    def _line(
        self, state: ServerState, concluded: Concluded, cohort: list[int], inbox: Inbox, skipped: str, down: int
    ) -> dict[str, Any]:
        refused = _sorted({**inbox.refused, **concluded.refused})
        for client, reason in refused.items():
            logger.warning("round %s: client %s refused: %s", state.round, client, reason)
        return {
            "round": state.round,
            "cohort": cohort,
            "accepted": {str(client): state.accepted[client].digest.hex() for client in concluded.accepted},
            "refused": refused,
            "absent": _sorted(inbox.absent),
            "notes": _sorted(inbox.notes),
            "skipped": skipped,
            "train_loss": concluded.train_loss,
            "delta_norm": concluded.delta_norm,
            "wire_up": sum(map(sum, inbox.came.values())) + inbox.other_bytes,
            "wire_down": down,
            **epsilon_after(self.server, state),
        }


def instruction_about(
    run: str, method: Method, names: ArrayNames, rounds: int | None = None, clients: int = 0
) -> ConfigRecord:
    """Return what an instruction contains besides its streams: the run, the whole method and the model's arrays.

    `rounds` is the number of rounds in the run, for schedules that depend on it. `clients` is the number of clients;
    0 if it is not known.
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
    return {str(client): readable(reasons[client]) for client in sorted(reasons)}
