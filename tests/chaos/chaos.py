"""Thirty rounds in which every process is killed at some point, planned from a seed; prints the ledger.

    python tests/chaos/chaos.py --seed 1 --set 'downlink=replica(blockq(bits=2))'

Faults fire on events of the protocol, not on the clock, so the same seed gives the same ledger: SuperNodes are killed
with -9 before they settle the last reply, before they train, after the new reply is on disk and after it was sent;
replies are dropped, delayed past the deadline and sent twice; the SuperLink is killed twice, the server app once.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
for _folder in (ROOT / "examples" / "flower_app", ROOT / "examples" / "flower_demo", HERE):
    sys.path.insert(0, str(_folder))

from checks import canonical, check, check_in_step, show  # noqa: E402
from fault_proxy import FaultProxy  # noqa: E402

from fedcams.experiment import build  # noqa: E402
from fedcams.flower.checkpoint import read_ledger  # noqa: E402
from fedcams.keys import generator  # noqa: E402
from fedcams.recipes import merged  # noqa: E402
from fedcams_app.settings import experiment  # noqa: E402
from federation import HOST, Federation, federation  # noqa: E402

SITES, ROUNDS, DEADLINE = 3, 30, 600.0
CONFIG: dict[str, Any] = {
    "task": "quadratic(dim=40)",
    "model": "point",
    "partition": "iid",
    "clients": SITES,
    "sampler": "full",
    "local": "sgd(lr=0.05, steps=3, batch=8)",
    "server": "fedams(lr=0.1, eps=1e-3)",
    "uplink": "topk(k=4)",
    "downlink": "none",
    "seed": 3,
}
KILLS = ("before commit", "before training", "after prepare", "after reply")
REPLIES = ("drop", "delay", "twice")
BIG = ("superlink", "server", "superlink")


class Fault(NamedTuple):
    """What happens when a site comes to an event of a round."""

    round: int
    site: int
    event: str
    what: str


def plan(seed: int, rounds: int) -> list[Fault]:
    """Every kind of fault, at sites and in an order drawn from the seed; one a round, so that each is seen by itself.

    A node that is killed after its reply still counts as connected when the next round begins, and is lost in that one.
    """
    rng = generator(seed, "chaos")
    kills = [(event, "kill") for event in KILLS]
    wanted = [*kills, *[("reply", what) for what in REPLIES], *[(KILLS[int(rng.integers(3))], what) for what in BIG]]
    more = max(0, (rounds - 2) // 2 - len(wanted))
    wanted += [wanted[int(i)] for i in rng.integers(len(kills) + len(REPLIES), size=more)]
    faults, round = [], 2
    for i in rng.permutation(len(wanted)):
        faults.append(Fault(round, int(rng.integers(SITES)), *wanted[i]))
        round += 2 if wanted[i][0] == "after reply" else 1 + int(rng.integers(2))
    assert round <= rounds + 1, f"{rounds} rounds are too few for {len(faults)} faults"
    return faults


class Chaos:
    """The controller: hears of every event, and does what the plan says before it lets the event go on."""

    def __init__(self, fed: Federation, faults: Iterable[Fault], config: Mapping[str, Any]) -> None:
        self.fed, self.config = fed, config
        self.faults = {(fault.round, fault.site, fault.event): fault.what for fault in faults}
        self.round: dict[int, int] = {}
        self.fired: list[str] = []
        self.lock = threading.Lock()
        self.listener = socket.create_server((HOST, 0))
        self.port = int(self.listener.getsockname()[1])
        self.run = ""
        self.proxies = {site: self._proxy(site) for site in range(SITES)}
        threading.Thread(target=self._listen, daemon=True).start()

    # -- what clients say ----------------------------------------------------------------------------------------

    def _listen(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                app, _ = self.listener.accept()
                threading.Thread(target=self._hear, args=(app,), daemon=True).start()

    def _hear(self, app: socket.socket) -> None:
        with contextlib.suppress(OSError), app, app.makefile("rb") as said:
            told = json.loads(said.readline())
            self.round[told["site"]] = told["round"]
            self.at(told["round"], told["site"], told["event"])
            app.sendall(b"!")

    def at(self, round: int, site: int, event: str) -> None:
        with self.lock:
            what = self.faults.pop((round, site, event), None)
            if what is not None:
                self.fired.append(f"round {round}, site {site}, {event}: {what}")
                print(f"  {self.fired[-1]}", flush=True)
                {"kill": self._kill_node, "superlink": self._kill_link, "server": self._kill_server}[what](site)
                if what == "kill":
                    self._end_without(site, round + (event == "after reply"))

    # -- what replies meet ---------------------------------------------------------------------------------------

    def _proxy(self, site: int) -> FaultProxy:
        return FaultProxy(self.fed.port, lambda: self._decide(site), lambda: self._wait(site), lambda: self._sent(site))

    def _decide(self, site: int) -> str:
        round = self.round.get(site, 0)
        what = self.faults.pop((round, site, "reply"), "")
        if what:
            self.fired.append(f"round {round}, site {site}, reply: {what}")
            print(f"  {self.fired[-1]}", flush=True)
        if what in ("drop", "delay"):
            self._end_without(site, round)
        return what

    def _wait(self, site: int) -> None:
        """A delayed reply goes on when the round it is for has been closed."""
        while self.fed.rounds_done() < self.round[site]:
            time.sleep(0.2)

    def _sent(self, site: int) -> None:
        """A reply was sent when the server has it."""
        round = self.round.get(site, 0)
        while self.fed.rounds_done() < round and not (self.fed.folder / "server" / "replies" / str(site)).exists():
            time.sleep(0.05)
        self.at(round, site, "after reply")

    def _end_without(self, site: int, round: int) -> None:
        """Brings the deadline of the round when the others have answered and nothing more can come."""
        threading.Thread(target=self._jump, args=(site, round), daemon=True).start()

    def _jump(self, site: int, round: int) -> None:
        others = [other for other in range(SITES) if other != site]
        replies = self.fed.folder / "server" / "replies"
        while (done := self.fed.rounds_done()) < round:
            begun = done == round - 1 and all(self.round.get(other) == round for other in others)
            if begun and all((replies / str(other)).exists() for other in others):
                (self.fed.folder / f"jump-{round}").touch()
                return
            time.sleep(0.2)

    # -- what dies -----------------------------------------------------------------------------------------------

    def _kill_node(self, site: int) -> None:
        self.fed.stop(f"node{site}", signal.SIGKILL)
        self.fed.start_node(site, via=self.proxies[site].port)

    def _kill_link(self, site: int) -> None:
        self.fed.stop("superlink", signal.SIGKILL)
        time.sleep(1.0)
        self.fed.start_link()

    def _kill_server(self, site: int) -> None:
        os.kill(int((self.fed.folder / "server.pid").read_text()), signal.SIGKILL)
        self.start()

    def start(self) -> None:
        """The run, or another one that continues it."""
        self.run = self.fed.submit(HERE / "app", **self.config, min_available=SITES, min_replies=1, deadline=DEADLINE)

    def close(self) -> None:
        self.listener.close()
        for proxy in self.proxies.values():
            proxy.close()


def chaos(folder: Path, seed: int, rounds: int, settings: Mapping[str, str]) -> list[dict[str, Any]]:
    """The ledger of a run that had all these faults; raises where something does not add up."""
    config = merged(CONFIG, {"rounds": rounds}, settings)
    for name in ("payloads", "updates"):
        (folder / name).mkdir(parents=True)
    faults = plan(seed, rounds)
    path = os.pathsep.join([str(ROOT / "examples" / "flower_app"), os.environ.get("PYTHONPATH", "")])
    env = {"OMP_NUM_THREADS": "1", "CHAOS_FOLDER": str(folder), "PYTHONPATH": path}
    with federation(folder, lasting=True, env=env) as fed:
        controller = Chaos(fed, faults, config)
        fed.env = {**env, "CHAOS_PORT": str(controller.port)}
        try:
            for site in range(SITES):
                fed.start_node(site, via=controller.proxies[site].port)
            controller.start()
            wait(fed, controller, rounds)
        finally:
            controller.close()
    left = controller.faults
    assert not left, f"never fired: {left}"
    ledger = read_ledger(folder / "server")
    built = build(experiment({**config, "data": ""}))
    assert [line["round"] for line in ledger] == list(range(1, rounds + 1))
    check(folder, ledger, built.simulation.problem.layout)
    check_in_step(folder, ledger, built)
    return ledger


def wait(fed: Federation, controller: Chaos, rounds: int, patience: float = 600.0) -> None:
    """Until all rounds are done; no round may take longer than the patience."""
    done, since = -1, time.monotonic()
    while (now := fed.rounds_done()) < rounds:
        if now != done:
            done, since = now, time.monotonic()
            print(f"round {done} done", flush=True)
        if time.monotonic() - since > patience:
            raise TimeoutError(f"round {done + 1} does not end: {fed.flwr('log', controller.run, 'here', '--show')}")
        time.sleep(0.2)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--rounds", type=int, default=ROUNDS)
    options.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="such as recipe=lighter")
    options.add_argument("--out", type=Path, help="write the canonical ledger here")
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="fedcams-chaos-") as folder:
        settings = dict(setting.split("=", 1) for setting in chosen.set)
        ledger = chaos(Path(folder), chosen.seed, chosen.rounds, settings)
    show(ledger)
    if chosen.out:
        chosen.out.write_text("\n".join(canonical(ledger)) + "\n")


if __name__ == "__main__":
    main()
