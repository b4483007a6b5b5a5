"""The connected nodes, and which client each of them is.

A node is greeted when it connects. Its mod answers with its site number, which is the client id of the simulator. A
node whose app fails on the greeting, as an app without the mod does, takes part with the dense model under its node id.
Such nodes, and those that report that they cannot take part or claim the site of another, are greeted again after a
while, in case the problem has been fixed.

A node that does not answer an instruction, or says that it is another site by now, is forgotten and greeted again: at
once the first time, and after 1, 3, 7, … rounds if it stays silent. So it cannot make every round wait for its
deadline. As long as a node answers, no other node can take its site, and no node can take the id of another as its
site.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from fedcams.errors import UnknownVersion, UpdateError
from fedcams.flower.records import ABOUT, about, about_of, readable
from fedcams.flower.replies import PAUSE, pull
from fedcams.rounds.messages import PROTOCOL, check_protocol

APP_RAISED = (0, 2)
"""Flower's error codes for an app that raised, in simulations and deployments; others mean that a node is gone."""
MOD_REFUSED = 6
"""Flower's error code for a mod that did not accept a message."""
LONGEST_PAUSE = 31
"""The most rounds for which a silent node is left out before it is greeted again."""
RETRIES = 6
"""After how many failed greetings in a row the wait for the next one stops doubling."""
logger = logging.getLogger("flwr.fedcams")


@dataclass
class Roster:
    """The nodes of one run; kept in memory only, because nodes can be greeted again."""

    config_key: str
    arrays_key: str
    patience: float
    """Seconds to wait for the answer to a first greeting before the node is greeted again."""
    longest: float = 0.0
    """The most seconds to wait for an answer; each unanswered greeting doubles them, for nodes that start slowly."""
    highest: int = 2**63 - 1
    """The highest number that a site may have."""
    sites: dict[int, int] = field(default_factory=dict)
    """Client id -> node id."""
    plain: set[int] = field(default_factory=set)
    """Nodes without the mod."""
    broken: dict[int, str] = field(default_factory=dict)
    """Node id -> why the node cannot take part."""
    rivals: dict[int, int] = field(default_factory=dict)
    """Node id -> the site it claims, which another node already has; greeted at once when that node is gone."""
    greeted: dict[int, tuple[str, float]] = field(default_factory=dict)
    """Node id -> the id of an unanswered greeting, and when to stop waiting for the answer."""
    failed: dict[int, tuple[int, float]] = field(default_factory=dict)
    """Node that is plain, broken or a rival -> how often it said so in a row, and when to ask again."""
    unheard: dict[int, int] = field(default_factory=dict)
    """Node id -> how many greetings in a row it did not answer in time."""
    silent: dict[int, int] = field(default_factory=dict)
    """Node id -> how many instructions in a row it did not answer."""
    paused: dict[int, int] = field(default_factory=dict)
    """Silent node -> the rounds until it is greeted again."""

    def node_of(self, client: int) -> int | None:
        """Return the node of a client; None if it is not connected."""
        return self.sites.get(client, client if client in self.plain else None)

    @property
    def clients(self) -> list[int]:
        """The clients that are connected now, ascending."""
        return sorted([*self.sites, *self.plain])

    def wait(self, grid: Grid, least: int, seconds: float) -> None:
        """Wait until at least `least` clients are connected, for at most `seconds`."""
        end = time.monotonic() + seconds
        self.paused = {node: left - 1 for node, left in self.paused.items() if left > 1}
        self.refresh(grid)
        if len(self.clients) < least:
            self.paused.clear()  # every node is needed
        while len(self.clients) < least and time.monotonic() < end:
            time.sleep(PAUSE)
            self.refresh(grid)

    def refresh(self, grid: Grid) -> None:
        """Greet new nodes, take the answers to greetings, and remove nodes that are gone."""
        online = set(grid.get_node_ids())
        self._keep(lambda node: node in online)
        self.listen(grid)
        now = time.monotonic()
        for node in [node for node, (_, end) in self.greeted.items() if end <= now]:
            del self.greeted[node]
            self.unheard[node] = self.unheard.get(node, 0) + 1
        self.rivals = {node: site for node, site in self.rivals.items() if site in self.sites}
        resting = {node for node, (_, when) in self.failed.items() if when > now}
        settled = {*self.sites.values(), *((self.plain | self.broken.keys() | self.rivals.keys()) & resting)}
        self._greet(grid, sorted(online - settled - {*self.greeted, *self.paused}))

    def listen(self, grid: Grid) -> None:
        """Take the answers to greetings; Flower keeps them for `patience` only, which a round may outlast."""
        for node, (name, _) in list(self.greeted.items()):
            try:
                answer = pull(grid, name)
            except UpdateError as error:
                del self.greeted[node]
                self.unheard.pop(node, None)
                self._break(node, readable(error))
            else:
                if answer is not None:
                    del self.greeted[node]
                    self._hear(node, answer)

    def answered(self, clients: Iterable[int]) -> None:
        """Note that these clients answered an instruction."""
        for client in clients:
            self.silent.pop(self.node_of(client) or 0, None)

    def forget(self, clients: Iterable[int]) -> None:
        """Forget clients that did not answer, so that their nodes are greeted again."""
        gone = {node for client in clients if (node := self.node_of(client)) is not None}
        for node in gone:
            self.silent[node] = times = self.silent.get(node, 0) + 1
            if times > 1:
                self.paused[node] = min(2 ** (times - 1) - 1, LONGEST_PAUSE)
        self._keep(lambda node: node not in gone)

    def _keep(self, good: Callable[[int], bool]) -> None:
        self.sites = {client: node for client, node in self.sites.items() if good(node)}
        self.plain = {node for node in self.plain if good(node)}
        self.broken = {node: why for node, why in self.broken.items() if good(node)}
        self.rivals = {node: site for node, site in self.rivals.items() if good(node)}
        self.greeted = {node: greeting for node, greeting in self.greeted.items() if good(node)}
        self.failed = {node: retry for node, retry in self.failed.items() if good(node)}

    def _greet(self, grid: Grid, nodes: list[int]) -> None:
        content = RecordDict(
            {
                ABOUT: about(kind="greeting", protocol=PROTOCOL),
                self.arrays_key: ArrayRecord(),
                self.config_key: ConfigRecord(),
            }
        )
        for node in nodes:
            seconds = min(self.patience * 2 ** self.unheard.get(node, 0), max(self.patience, self.longest))
            message = Message(content, node, MessageType.TRAIN, ttl=seconds)
            for name in filter(None, grid.push_messages([message])):  # none for a node that is gone
                self.greeted[node] = (name, time.monotonic() + seconds)

    def _hear(self, node: int, message: Message) -> None:
        unheard = self.unheard.pop(node, 0)
        if message.has_error():
            self._hear_error(node, message.error, unheard)
        elif (told := about_of(message.content)) is None:
            self._take_plain(node)
        elif "refused" in told:
            self._break(node, readable(told["refused"]))
        else:
            self._hear_mod(node, told)

    def _hear_error(self, node: int, error: Error, unheard: int) -> None:
        if error.code in APP_RAISED:
            self._take_plain(node)
        elif error.code == MOD_REFUSED:
            self._break(node, f"list uplink as the first mod: {readable(error.reason)}")
        else:  # the node is gone, or was too slow; it is greeted again when it is there
            self.unheard[node] = unheard + 1

    def _hear_mod(self, node: int, told: Mapping[str, Any]) -> None:
        try:
            check_protocol(told.get("protocol"), f"node {node}")
        except UnknownVersion as error:
            self._break(node, readable(error))
        else:
            self._bind(node, told.get("site"))

    def _bind(self, node: int, site: object) -> None:
        if isinstance(site, bool) or not isinstance(site, int) or not 0 <= site <= self.highest:
            self._break(node, f"it claims to be site {readable(site)}; allowed: an integer from 0 to {self.highest}")
        elif site in self.plain - {node}:
            self._break(node, f"it claims to be site {site}, which is the id of another node")
        elif self.sites.get(site, node) != node:
            logger.warning(
                "node %s claims to be site %s, but node %s already has that site", node, site, self.sites[site]
            )
            self.rivals[node] = site
            self._ask_later(node)
        else:
            self._keep(lambda other: other != node)  # it may have been without the mod, or another site
            self.sites[site] = node

    def _take_plain(self, node: int) -> None:
        """Let a node without the mod take part under its own id, which no site may have."""
        if (thief := self.sites.pop(node, None)) not in (None, node):
            self._break(thief, f"it claims to be site {node}, which is the id of another node")
        self.broken.pop(node, None)
        self.plain.add(node)
        self._ask_later(node)

    def _break(self, node: int, reason: str) -> None:
        logger.warning("node %s cannot take part: %s", node, reason)
        self.plain.discard(node)
        self.broken[node] = reason
        self._ask_later(node)

    def _ask_later(self, node: int) -> None:
        times = self.failed.get(node, (0, 0.0))[0]
        self.failed[node] = (times + 1, time.monotonic() + self.patience * 2 ** min(times, RETRIES))
