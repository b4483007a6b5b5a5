"""A federation in which one of four sites attacks in every third round, and a stranger claims another's site.

All of it over TLS, with nodes that are registered by their keys. Another site fails its greetings, as apps without the
mod do, and sends arrays with heads on which NumPy fails in four ways, in its first four rounds.

    python tests/chaos/hostile.py

The attacks, in turn: an update of ±1e3, garbage, the reply of an earlier round, silence past the deadline, and an array
in place of a message. Checks that the server refuses each and that every other update counts once, with what error
feedback owes in place; prints the accuracy on digits beside that of a run in which all sites are honest.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from checks import Ledger, check, saved

from chaos import HERE, ROOT  # its folders are on the path once it is imported
from fedcams.experiment import Built, build
from fedcams.flower.checkpoint import read_ledger
from fedcams.rounds import ServerState
from fedcams.simulation.evaluate import SCORE, evaluate
from fedcams_app.settings import experiment
from federation import Federation, federation

sys.path.insert(0, str(HERE / "app"))
from chaos_app.hostile import ATTACKS, EVERY, HEADS, attack_in

SITES, HOSTILE, ROBBED, SHY = 4, 3, 0, 2
DEADLINE = 600.0
CONFIG: dict[str, Any] = {
    "task": "digits",
    "model": "mlp(hidden=64)",
    "partition": "iid",
    "clients": SITES,
    "sampler": "full",
    "local": "sgd(lr=0.1, epochs=2, batch=20)",
    "server": "fedams(lr=0.03, beta1=0, eps=1e-3)",
    "uplink": "sign(scope=tensor)",
    "downlink": "none",
    "seed": 4,
    "rounds": EVERY * len(ATTACKS) + 3,
}


def hostile(folder: Path) -> Ledger:
    """Return the ledger of a run with a node that attacks and another that claims a site."""
    for name in ("payloads", "updates"):
        (folder / name).mkdir(parents=True)
    path = os.pathsep.join([str(ROOT / "examples" / "flower_app"), os.environ.get("PYTHONPATH", "")])
    env = {"OMP_NUM_THREADS": "1", "CHAOS_FOLDER": str(folder), "PYTHONPATH": path}
    special = {HOSTILE: {"CHAOS_HOSTILE": "1", "CHAOS_OTHERS": str(SITES - 1)}, SHY: {"CHAOS_SHY": "1"}}
    with federation(folder, secure=True, env=env) as fed:
        for site in range(SITES):
            fed.env = {**env, **special.get(site, {})}
            fed.start_node(site)
        fed.env = env
        run = fed.submit(HERE / "app", **CONFIG, min_available=SITES, min_replies=2, deadline=DEADLINE)
        until_accepted(fed, run, folder, ROBBED)
        fed.start_node(ROBBED, name="thief")
        fed.wait(run, CONFIG["rounds"], seconds=1800.0)
        said = fed.flwr("log", run, "here", "--show")
    assert f"claims to be site {ROBBED}, but node" in said, "the thief never came"
    return read_ledger(folder / "server")


def until_accepted(fed: Federation, run: str, folder: Path, site: int) -> None:
    """Wait for the round in which a site first takes part: one that never connected has nothing to rob."""
    rounds = 0
    while not any(str(site) in line["accepted"] for line in read_ledger(folder / "server")):
        rounds += 1
        fed.wait(run, rounds)


def check_refusals(ledger: Ledger) -> None:
    """Every attack is refused or waited for in vain; honest sites take part in every round since they connected."""
    honest: set[str] = set()
    for line in ledger:
        assert honest <= line["accepted"].keys(), line
        honest = line["accepted"].keys() - {str(HOSTILE)}
        if what := attack_in(line["round"]):
            left_out = line["absent"] if what == "mute" else line["refused"]
            assert str(HOSTILE) in map(str, left_out), (what, line)
    assert honest == {str(site) for site in range(SITES) if site != HOSTILE}, "also the one that failed its greetings"
    forged = [why for line in ledger for node, why in line["refused"].items() if int(node) >= SITES]
    unread = [why for why in forged if "an array that cannot be read" in why]
    assert len(unread) == len(HEADS), forged
    assert all(re.search(rf"cannot be read \(({error})", why) for error, why in zip(HEADS, unread, strict=True)), unread


def clean(built: Built) -> ServerState:
    """Return the state after a run without attacks; the simulator computes what a federation does."""
    state = built.state
    while state.round < CONFIG["rounds"]:
        state, _ = built.simulation.advance_(state)
    return state


def accuracy(built: Built, state: ServerState) -> float:
    """Return the test accuracy of the server's model, in percent."""
    simulation = built.simulation
    assert simulation.test is not None
    found = evaluate(simulation.problem, state.x, state.buffers, simulation.test, simulation.metrics)[SCORE]
    assert found is not None
    return 100 * found


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    built = build(experiment({**CONFIG, "data": ""}))
    with tempfile.TemporaryDirectory(prefix="fedcams-hostile-") as name:
        folder = Path(name)
        ledger = hostile(folder)
        for line in ledger:
            refused = "; ".join(f"{site}: {why}" for site, why in line["refused"].items())
            print(f"round {line['round']} {attack_in(line['round']):8} {refused or line['absent'] or ''}")
        check_refusals(ledger)
        check(folder, ledger, built.simulation.problem.layout)
        attacked = accuracy(built, saved(folder / "server", built.simulation.server, built.state))
    peaceful = accuracy(built, clean(built))
    print(f"{attacked:.2f}% with attacks, {peaceful:.2f}% without")
    assert attacked >= peaceful - 1


if __name__ == "__main__":
    main()
