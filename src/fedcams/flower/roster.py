"""The connected nodes, and which client each of them is.

A node is greeted when it connects. Its mod answers with its site number, which is the client id of the simulator. A
node whose app fails on the greeting, as an app without the mod does, takes part with the dense model under its node id.
A node that does not answer an instruction is forgotten and greeted again. As long as it answers, no other node can take
its site.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from fedcams.errors import UnknownVersion
from fedcams.flower.records import ABOUT, about, about_of
from fedcams.rounds.messages import PROTOCOL, check_protocol

APP_RAISED = (0, 2)
"""Flower's error codes for an app that raised, in simulations and deployments; others mean that a node is gone."""
PAUSE = 0.5
"""Seconds between two polls of the SuperLink."""
logger = logging.getLogger("flwr.fedcams")


@dataclass
class Roster:
    """The nodes of one run; kept in memory only, because nodes can be greeted again."""

    config_key: str
    arrays_key: str
    patience: float
    """Seconds to wait for the answer to a greeting before the node is greeted again."""
    sites: dict[int, int] = field(default_factory=dict)
    """Client id -> node id."""
    plain: set[int] = field(default_factory=set)
    """Nodes without the mod."""
    broken: dict[int, str] = field(default_factory=dict)
    """Node id -> why the node cannot take part."""
    rivals: dict[int, int] = field(default_factory=dict)
    """Node id -> the site it claims, which another node already has; greeted again when that node is gone."""
    greeted: dict[int, tuple[str, float]] = field(default_factory=dict)
    """Node id -> the id of an unanswered greeting, and when to stop waiting for the answer."""

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
        self.refresh(grid)
        while len(self.clients) < least and time.monotonic() < end:
            time.sleep(PAUSE)
            self.refresh(grid)

    def refresh(self, grid: Grid) -> None:
        """Greet new nodes, take the answers to greetings, and remove nodes that are gone."""
        online = set(grid.get_node_ids())
        self._keep(lambda node: node in online)
        for message in grid.pull_messages([name for name, _ in self.greeted.values()]) if self.greeted else []:
            self._hear(message)
        now = time.monotonic()
        self.greeted = {node: (name, end) for node, (name, end) in self.greeted.items() if end > now}
        self.rivals = {node: site for node, site in self.rivals.items() if site in self.sites}
        known = {*self.sites.values(), *self.plain, *self.broken, *self.rivals, *self.greeted}
        self._greet(grid, sorted(online - known))

    def forget(self, clients: Iterable[int]) -> None:
        """Forget clients that did not answer, so that their nodes are greeted again."""
        gone = {self.node_of(client) for client in clients}
        self._keep(lambda node: node not in gone)

    def _keep(self, good: Callable[[int], bool]) -> None:
        self.sites = {client: node for client, node in self.sites.items() if good(node)}
        self.plain = {node for node in self.plain if good(node)}
        self.broken = {node: why for node, why in self.broken.items() if good(node)}
        self.rivals = {node: site for node, site in self.rivals.items() if good(node)}
        self.greeted = {node: greeting for node, greeting in self.greeted.items() if good(node)}

    def _greet(self, grid: Grid, nodes: list[int]) -> None:
        content = RecordDict(
            {
                ABOUT: about(kind="greeting", protocol=PROTOCOL),
                self.arrays_key: ArrayRecord(),
                self.config_key: ConfigRecord(),
            }
        )
        for node in nodes:
            message = Message(content, node, MessageType.TRAIN, ttl=self.patience)
            for name in grid.push_messages([message]):
                self.greeted[node] = (name, time.monotonic() + self.patience)

    def _hear(self, message: Message) -> None:
        waiting = {name: node for node, (name, _) in self.greeted.items()}
        node = waiting.get(message.metadata.reply_to_message_id)
        if node is None:
            return
        del self.greeted[node]
        if message.has_error():
            if message.error.code in APP_RAISED:
                self.plain.add(node)
            return  # any other error means that the node is gone; it is greeted again when it comes back
        told = about_of(message.content)
        if told is None:
            self.plain.add(node)
        elif "refused" in told:
            self._break(node, str(told["refused"]))
        else:
            try:
                check_protocol(told.get("protocol"), f"node {node}")
            except UnknownVersion as error:
                self._break(node, str(error))
                return
            self._bind(node, told.get("site"))

    def _bind(self, node: int, site: object) -> None:
        if isinstance(site, bool) or not isinstance(site, int) or not 0 <= site < 2**63:
            self._break(node, f"it says it is site {site!r}")
        elif site in self.sites:
            logger.warning("node %s says it is site %s, but node %s already is", node, site, self.sites[site])
            self.rivals[node] = site
        else:
            self.sites[site] = node

    def _break(self, node: int, reason: str) -> None:
        logger.warning("node %s cannot take part: %s", node, reason)
        self.broken[node] = reason
