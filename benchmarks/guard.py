"""What the default guard refuses, on digits: nothing of honest clients, and what hostile ones send.

The first table says how long rows of honest clients are, as a multiple of what the guard takes as usual; it refuses
updates above its factor, and buffers and control variates above 4 times that. The second compares runs with one hostile
client of 20 to the run without it, and the third runs with 4 of 20 that send flipped updates of honest length. The
fourth repeats the worst of both with eight seeds, and says what it costs if the four send nothing at all, which is the
best that any aggregate can do. In the fifth, one of 10 knows the guard and the others' updates, and opposes them. In
the sixth, it raises a small variance of batch norm. Nothing here depends on time, so any machine will do.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from recording import environment, save
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from fedcams.experiment import Experiment, build
from fedcams.guards import Adaptive, Norms, Past
from fedcams.simulation import RoundRecord, Simulation
from hostile_clients import ATTACKS, Attack, attacked, opposed_, small_variance_, turned_

RECORD = Path(__file__).parent / "records" / "guard.json"
BASE: dict[str, Any] = {"task": "digits", "model": "mlp", "partition": "dirichlet(alpha=0.1)", "seed": 1}
FEW = {"clients": 20, "sampler": "full", "local": "sgd(lr=0.1, epochs=1, batch=16)"}
MANY = {"clients": 40, "sampler": "uniform(n=10)", "local": "sgd(lr=0.1, epochs=3, batch=16)"}
BATCH_NORM = {"model": "convmixer(dim=8, depth=1)", "local": "sgd(lr=0.05, epochs=1, batch=16, drop_last=true)"}
HONEST: dict[str, dict[str, Any]] = {
    "dense, 20 of 20": FEW,
    "dense, 10 of 40": MANY,
    "sign": {**MANY, "uplink": "sign"},
    "top-k 1/64": {**MANY, "uplink": "topk(ratio=1/64)"},
    "top-k 1/256": {**MANY, "uplink": "topk(ratio=1/256)"},
    "ternary 1/16": {**MANY, "uplink": "ternary(ratio=1/16)"},
    "scaffold": {**MANY, "control": "scaffold"},
    "batch norm": {**FEW, **BATCH_NORM},
    "batch norm, blockq": {**FEW, **BATCH_NORM, "buffers": "blockq", "uplink": "sign"},
    "warm-up": {**MANY, "local": "sgd(lr=warmup(10, then=0.1), epochs=3, batch=16)"},
}
SEEDS = (1, 2, 3, 4)
"""Of the runs with honest clients; the others have the first."""
MORE_SEEDS = (*SEEDS, 5, 6, 7, 8)
"""Of the runs that count points by seed."""
FOUR = [0, 5, 10, 15]
TEN = {**FEW, "clients": 10}
AGAINST = ("mean", "clipped_mean(factor=2)", "trimmed(fraction=0.2)", "krum")
FLIPPED = "flipped times 10"
SERVERS = {"FedAMS": "fedams(lr=0.1, eps=1e-3)", "FedAdam": "fedadam(lr=0.03, eps=1e-3)", "FedAvg": "fedavg"}


@dataclass(frozen=True)
class Watching(Adaptive):
    """The default guard, which also keeps the largest multiple of the usual norm of each stream."""

    name = "watching"
    largest: ClassVar[dict[str, float]] = {}

    def observe(self, past: Past, round: int, norms: Norms) -> Past:
        """Compare the norms of the round with the bounds that they were held to."""
        for name, bound in self.bounds(past, norms).items():
            ratio = max(known[name] for known in norms.values() if name in known) * float(self.factor) / bound
            self.largest[name] = max(self.largest.get(name, 0.0), ratio)
        return super().observe(past, round, norms)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=100)
    options.add_argument("--save", action="store_true", help=f"write {RECORD.name}")
    options.add_argument("--only", choices=PARTS, help="run one table, and keep the others of the record")
    chosen = options.parse_args()
    console = Console()
    names = [chosen.only] if chosen.only else [*PARTS]
    found = {name: dict(PARTS[name](chosen.rounds)) for name in names}
    for title, rows in found.items():
        console.print(table(title, rows))
    if chosen.save:
        known = json.loads(RECORD.read_text("utf-8")) if chosen.only else {}
        save(RECORD, {**known, "rounds": chosen.rounds, "environment": environment(), **found})


def all_honest(rounds: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a case -> what `honest` returns for it."""
    yield from ((what, honest(keys, rounds)) for what, keys in HONEST.items())


def honest(keys: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Return the largest multiple of the usual norm of each stream over all seeds, and how many were refused."""
    Watching.largest.clear()
    refused = 0
    for seed in SEEDS:
        simulation = simulation_of({**keys, "seed": seed}, rounds)
        method = dataclasses.replace(simulation.server.method, guard=Watching())
        server = dataclasses.replace(simulation.server, method=method)
        records = run(dataclasses.replace(simulation, server=server), rounds)
        refused += sum(len(record.refused) for record in records)
    return {**Watching.largest, "refused": refused}


def one_hostile(rounds: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield server -> final accuracy of the clean run, and with each attack, guarded and not."""
    for label, server in SERVERS.items():
        guards = ["adaptive", "none"] if label == "FedAMS" else ["adaptive"]
        for partition in ("iid", "dirichlet(alpha=0.1)"):
            keys = {**FEW, "server": server, "partition": partition}
            yield f"{label}, {partition}", dict(scores(keys, rounds, [0], ATTACKS, guards))
        keys = {**FEW, **BATCH_NORM, "server": server, "partition": "iid"}
        yield f"{label}, batch norm", dict(scores(keys, rounds, [0], ATTACKS, ["adaptive"]))


def four_flipped(rounds: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield aggregate -> final accuracy of FedAMS without attack and with four clients that send flipped updates."""
    for aggregate in ("mean", "trimmed(fraction=0.2)", "median", "geometric_median", "clipped_mean", "krum"):
        keys = {**FEW, "server": SERVERS["FedAMS"], "aggregate": aggregate, "partition": "iid"}
        yield aggregate, dict(scores(keys, rounds, FOUR, {"flipped": turned_}, ["adaptive"]))


def lost_by_seed(rounds: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a case of FedAMS -> seed -> how many points the attack costs."""
    aggregates = ("mean", "trimmed(fraction=0.2)", "trimmed(fraction=0.4)", "krum")
    cases: dict[str, tuple[dict[str, Any], list[int], Attack]] = {
        f"4 of 20, {aggregate}, iid": ({"aggregate": aggregate, "partition": "iid"}, FOUR, turned_)
        for aggregate in aggregates
    }
    cases["4 of 20 send nothing, mean, iid"] = ({"partition": "iid"}, FOUR, ATTACKS["NaN"])
    for aggregate in ("mean", "clipped_mean(factor=2)"):
        case = f"one of 20, {FLIPPED}, {aggregate}, dirichlet(alpha=0.1)"
        cases[case] = ({"aggregate": aggregate}, [0], ATTACKS[FLIPPED])
    for what, (changes, clients, attack) in cases.items():
        lost = {}
        for seed in MORE_SEEDS:
            keys = {**FEW, "server": SERVERS["FedAMS"], **changes, "seed": seed}
            clean, hostile = (score for _, score in scores(keys, rounds, clients, {"": attack}, ["adaptive"]))
            lost[str(seed)] = round(clean - hostile, 2)
        yield what, lost


def opposed_by_seed(rounds: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a case with one client of 10 that opposes the others -> seed -> the accuracy, without and with it."""
    for server, aggregates in {"FedAMS": AGAINST, "FedAvg": AGAINST[:1]}.items():
        for partition in ("iid", "dirichlet(alpha=0.3)", "dirichlet(alpha=0.1)"):
            for aggregate in aggregates:
                keys = {**TEN, "server": SERVERS[server], "partition": partition, "aggregate": aggregate}
                pairs = {
                    seed: [score for _, score in scores({**keys, "seed": seed}, rounds, [0], OPPOSED, ["adaptive"])]
                    for seed in SEEDS
                }
                named = {"clean": 0, "attacked": 1}
                yield (
                    f"{server}, {partition}, {aggregate}",
                    {f"{what}, {seed}": pair[at] for what, at in named.items() for seed, pair in pairs.items()},
                )


def small_variance(rounds: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield aggregate -> final accuracy of FedAMS without attack, and with one client of 10 that raises a variance."""
    for aggregate in ("mean", "krum"):
        keys = {**TEN, **BATCH_NORM, "server": SERVERS["FedAMS"], "aggregate": aggregate, "partition": "iid"}
        yield aggregate, dict(scores(keys, rounds, [0], {"small variance": small_variance_}, ["adaptive"]))


def scores(
    keys: dict[str, Any], rounds: int, clients: Sequence[int], attacks: dict[str, Attack], guards: Sequence[str]
) -> Iterator[tuple[str, Any]]:
    """Yield what was done -> the accuracy after the last rounds, or what ended the run."""
    yield "clean", final(simulation_of(keys, rounds), rounds)
    for guard in guards:
        for what, attack in attacks.items():
            if what.startswith("buffers") and "convmixer" not in keys.get("model", ""):
                continue
            hostile = attacked(simulation_of({**keys, "guard": guard}, rounds), attack, clients)
            yield what if guard != "none" else f"{what}, no guard", final(hostile, rounds)


def simulation_of(keys: dict[str, Any], rounds: int) -> Simulation:
    return build(Experiment.from_dict({**BASE, "rounds": rounds, "evaluate_every": 5, **keys})).simulation


def run(simulation: Simulation, rounds: int) -> Iterator[RoundRecord]:
    state = simulation.start()
    for _ in range(rounds):
        state, record = simulation.advance_(state)
        yield record


def final(simulation: Simulation, rounds: int) -> float:
    """Return the mean accuracy of the evaluations in the last fifth of the rounds, in percent."""
    found = [record.test_accuracy for record in run(simulation, rounds) if record.round > 0.8 * rounds]
    known = [score for score in found if score is not None]
    return round(100 * sum(known) / len(known), 2)


def table(title: str, rows: dict[str, dict[str, Any]]) -> Table:
    shown = Table(title=title)
    columns = list(dict.fromkeys(key for row in rows.values() for key in row))
    for column in ("", *columns):
        shown.add_column(column, justify="right" if column else "left")
    for what, row in rows.items():
        shown.add_row(what, *(f"{row[key]:.4g}" if key in row else "" for key in columns))
    return shown


OPPOSED: dict[str, Attack] = {"opposed": opposed_}
PARTS = {
    "honest": all_honest,
    "one of 20": one_hostile,
    "4 of 20": four_flipped,
    "points lost, by seed": lost_by_seed,
    "one of 10, opposed": opposed_by_seed,
    "one of 10, a variance": small_variance,
}


if __name__ == "__main__":
    main()
