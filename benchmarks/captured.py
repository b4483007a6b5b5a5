"""Checks and times engine `captured` on a CUDA device in one go, in about three minutes.

    python benchmarks/captured.py --save captured.json

Every part is a separate process, so that a failure does not stop the others. Timed parts run alone: first the round
of ResNet-18 (`graphs`, `captured` on several streams, `loop`) and a small transformer with AdamW
(`captured`, `loop`), both with the paper's ten clients; then deviations from `loop` for several models and rules.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedcams import models
from fedcams.bench.gpu import SETTINGS, noise_images, where
from fedcams.engines import CohortUpdate, Problem, choose_with_reason, engine
from fedcams.experiment import Experiment
from fedcams.experiment.assembly import assemble
from fedcams.local import local
from fedcams.simulation import Simulation
from fedcams.simulation.evaluate import evaluate
from fedcams.tasks.shakespeare import character_loss

COHORT = list(range(10))
STREAMS = (1, 3, 5, 10)
RULES = [
    "sgd(lr=0.05, epochs=2, batch=4)",
    "sgd(lr=0.05, momentum=0.9, nesterov=true, epochs=2, batch=4)",
    "adam(lr=0.01, eps=1e-3, epochs=2, batch=4)",
    "adamw(lr=0.01, eps=1e-3, epochs=2, batch=4)",
]
CHECKED = ("resnet18(width=16)", "transformer(dim=32, depth=2)", "lstm(hidden=16)", "adapted", "dropping")
DEVICE = "cuda"


class Findings(dict[str, Any]):
    """What a part found, by name; shown and written as soon as it is known, because a part may be stopped."""

    def __init__(self, part: str, path: Path) -> None:
        super().__init__()
        self.part, self.path = part, path

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        shown = value if isinstance(value, str | bool) else f"{value:.3f}"
        print(f"{self.part:28s} {name:62s} {shown}", flush=True)
        self.path.write_text(json.dumps(self, indent=1))


# -- timing -----------------------------------------------------------------------------------------------------------


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def seconds(work: Callable[[], Any], repeats: int = 3) -> float:
    """The median time of some runs, after one that does not count; work must be warm already."""
    return queued_and_done(work, repeats)[1]


def queued_and_done(work: Callable[[], Any], repeats: int = 3) -> tuple[float, float]:
    """The median seconds until the work is queued on the device, and until it is done: equal if the CPU is too slow."""
    times = []
    for _ in range(repeats + 1):
        synchronize()
        started = time.perf_counter()
        work()
        queued = time.perf_counter() - started
        synchronize()
        times.append((queued, time.perf_counter() - started))
    return median(queued for queued, _ in times[1:]), median(done for _, done in times[1:])


def training(problem: Problem, by: str, cohort: list[int] = COHORT) -> Callable[[], CohortUpdate]:
    x, buffers = problem.read()
    return lambda: engine(by).train(problem, x, buffers, cohort, 1, 0)


def time_engines(problem: Problem, names: list[str], found: Findings) -> None:
    """Milliseconds of the cohort's training by each engine; the first run of each compiles and captures."""
    for by in names:
        with guarded(found, by):
            started = time.perf_counter()
            training(problem, by)()
            synchronize()
            found[f"first {by}, s"] = time.perf_counter() - started
            queued, done = queued_and_done(training(problem, by))
            found[f"queue {by}, ms"], found[f"train {by}, ms"] = 1e3 * queued, 1e3 * done


def time_loop(problem: Problem, clients: int, found: Findings) -> None:
    """Milliseconds of the eager loop for ten clients, from a few of them."""
    with guarded(found, "loop"):
        training(problem, "loop", COHORT[:1])()
        few = seconds(training(problem, "loop", COHORT[:clients]), repeats=1)
        found["train loop, ms"] = 1e3 * few * len(COHORT) / clients


def list_kernels(problem: Problem, by: str, found: Findings, most: int = 12) -> None:
    """Milliseconds that the device's kernels take in one training by an engine, in all and for the longest of them."""
    with guarded(found, f"kernels {by}"):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            training(problem, by)()
            synchronize()
        kernels = {event.key: event.self_device_time_total / 1e3 for event in profile.key_averages()}
        found[f"kernels {by}, ms"] = sum(kernels.values())
        for name in sorted(kernels, key=kernels.__getitem__, reverse=True)[:most]:
            found[f"kernel {by}, ms: {name[:90]}"] = kernels[name]


@contextlib.contextmanager
def guarded(found: Findings, name: str) -> Iterator[None]:
    """Continue after a failure, and keep its traceback."""
    try:
        yield
    except Exception:
        found[f"failed {name}"] = traceback.format_exc()


def time_resnet(found: Findings) -> None:
    """Time the paper's round of ResNet-18: 60 steps of ten clients, and an evaluation."""
    settings = {**SETTINGS, "model": "resnet18", "uplink": "sign", "engine": "loop", "rounds": 2}
    simulation = assemble(Experiment.from_dict(settings), noise_images(), DEVICE).simulation
    problem = simulation.problem
    time_engines(problem, ["captured", "graphs"], found)
    ratio(found, "captured", "graphs")
    time_loop(problem, 1, found)
    ratio(found, "loop", "captured")
    list_kernels(problem, "captured", found)
    list_kernels(problem, "graphs", found)
    time_engines(problem, [f"captured(streams={n})" for n in STREAMS], found)
    for by in ("captured", "graphs", "loop"):
        with guarded(found, f"evaluate {by}"):
            time_evaluation(simulation, by, found)
    with guarded(found, "repeats"):
        found["memory of all, GB"] = torch.cuda.max_memory_allocated() / 1e9
        first, again = (training(problem, "captured")() for _ in range(2))
        found["captured repeats bit for bit"] = torch.equal(first.delta, again.delta)


def time_evaluation(simulation: Simulation, by: str, found: Findings) -> None:
    """Time an evaluation on 10,000 images."""
    problem, test = simulation.problem, simulation.test
    assert test is not None
    x, buffers = problem.read()

    def work() -> object:
        return evaluate(problem, x, buffers, test, simulation.metrics, by)

    work()
    found[f"evaluate {by}, ms"] = 1e3 * seconds(work, repeats=2)


def time_transformer(found: Findings) -> None:
    """Time 4 layers, 256 wide, 128 tokens, AdamW: ten clients with ten batches of 16 each."""
    problem = text_problem("transformer(dim=256, depth=4)", "adamw(lr=1e-3, batch=16)", [160] * 10, 128, 90)
    with guarded(found, "choice"):
        chosen = choose_with_reason("auto", problem)
        found["auto"] = f"{chosen.engine} because {chosen.reason}"
    time_engines(problem, ["captured"], found)
    time_loop(problem, 10, found)
    ratio(found, "loop", "captured")
    time_engines(problem, ["captured(streams=2)", "captured(streams=10)", "captured(compile=false)"], found)
    time_engines(problem, ["captured(precision=float32)"], found)
    ratio(found, "loop", "captured(precision=float32)")


def ratio(found: Findings, slow: str, fast: str) -> None:
    if {f"train {slow}, ms", f"train {fast}, ms"} <= found.keys():
        found[f"train {slow} / {fast}"] = found[f"train {slow}, ms"] / found[f"train {fast}, ms"]


# -- deviations -------------------------------------------------------------------------------------------------------


class Adapted(nn.Module):
    """A frozen layer with a small trained one next to it."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, 4, bias=False), nn.Linear(4, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.base(x) + self.up(self.down(x)))


def text_problem(name: str, spec: str, sizes: list[int], length: int, tokens: int) -> Problem:
    draw = torch.Generator().manual_seed(0)
    clients = {
        i: tuple(torch.randint(0, tokens, (n, length), generator=draw).to(DEVICE) for _ in "xy")
        for i, n in enumerate(sizes)
    }
    net = models.build(name, (length,), tokens, seed=0).to(DEVICE)
    return Problem(net, character_loss, clients, local(spec))  # type: ignore[arg-type]


def small_problem(name: str, spec: str, dtype: torch.dtype) -> Problem:
    """Clients of uneven size, with partial batches."""
    torch.manual_seed(0)
    if name.startswith(("transformer", "lstm")):
        problem = text_problem(name, spec, [9, 4, 13], 12, 7)
        problem.model.to(dtype)
        return problem
    if name.startswith("resnet18"):
        net = models.build(name, (3, 16, 16), 4, seed=0)
    else:
        middle = Adapted() if name == "adapted" else nn.Dropout(0.5)
        net = nn.Sequential(nn.Flatten(), nn.Linear(768, 64), nn.ReLU(), middle, nn.Linear(64, 4))
    sizes = enumerate((9, 4, 13))
    pairs = {i: (torch.randn(n, 3, 16, 16, dtype=dtype), torch.randint(0, 4, (n,))) for i, n in sizes}
    clients = {i: (x.to(DEVICE), y.to(DEVICE)) for i, (x, y) in pairs.items()}
    loss = lambda outputs, targets: F.cross_entropy(outputs, targets, reduction="none")  # noqa: E731
    return Problem(net.to(DEVICE, dtype), loss, clients, local(spec))


def deviation(name: str, spec: str, dtype: torch.dtype, by: str) -> str:
    """Relative differences from `loop` in updates and buffers; random layers: whether an engine repeats itself."""
    tasks = [small_problem(name, spec, dtype) for _ in range(2)]
    ours = training(tasks[0], by, [0, 1, 2])()
    if name == "dropping":
        again, alone = training(tasks[0], by, [0, 1, 2])(), training(tasks[0], by, [1])()
        apart = float((alone.delta[0] - ours.delta[1]).norm() / ours.delta[1].norm())
        return f"repeats {torch.equal(ours.delta, again.delta)}, alone {apart:.1e}"
    truth = training(tasks[1], "loop", [0, 1, 2])()
    far = [float((a - b).norm() / b.norm()) for a, b in ((ours.delta, truth.delta), (ours.loss, truth.loss))]
    if ours.buffers is not None and truth.buffers is not None:
        far.append(float((ours.buffers - truth.buffers).norm() / truth.buffers.norm()))
    return " ".join(f"{value:.1e}" for value in far)


def check(name: str, found: Findings) -> None:
    """Captured rounds in float64 with every rule; compiled: a step in float32 and bf16, a round in float64."""
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    one, exact, half = "sgd(lr=0.05, steps=1, batch=4)", "captured(precision=float32)", "captured"
    plain = "captured(compile=false, streams=2)"
    cases = [("captured", rule, torch.float64, plain) for rule in RULES]
    cases += [("compiled", one, torch.float32, exact), ("compiled bf16", one, torch.float32, half)]
    cases += [("compiled", RULES[3], torch.float64, exact)]
    for title, spec, dtype, by in cases:
        key = f"{title} {str(dtype)[6:]} {spec}"
        with guarded(found, key):
            found[key] = deviation(name, spec, dtype, by)
    with guarded(found, "choice"):
        chosen = choose_with_reason("auto", small_problem(name, one, torch.float32))
        found["auto"] = f"{chosen.engine} because {chosen.reason}"


# -- parts ------------------------------------------------------------------------------------------------------------

TIMED = {"resnet18": time_resnet, "transformer": time_transformer}


def run_part(name: str, path: Path) -> None:
    """Run one part in this process."""
    found = Findings(name, path)
    with guarded(found, name):
        TIMED[name](found) if name in TIMED else check(name, found)


def start(name: str, folder: Path) -> tuple[str, Path, subprocess.Popen[bytes]]:
    path = folder / f"{len(list(folder.iterdir()))}-{name.partition('(')[0]}.json"
    path.touch()
    return name, path, subprocess.Popen([sys.executable, __file__, "--part", name, "--save", str(path)])


def wait(running: list[tuple[str, Path, subprocess.Popen[bytes]]], until: float) -> dict[str, Any]:
    """What the parts found by name; those that take longer are stopped."""
    found: dict[str, Any] = {}
    for name, path, process in running:
        try:
            process.wait(max(1.0, until - time.perf_counter()))
        except subprocess.TimeoutExpired:
            process.kill()
            print(f"{name:28s} stopped: out of time", flush=True)
        text = path.read_text()
        found[name] = json.loads(text) if text else {"failed": "the process died"}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--save", type=Path, required=True, help="where to write the results, as JSON")
    parser.add_argument("--part", help="run only this part, in this process")
    parser.add_argument("--limit", type=float, default=195.0, help="seconds for everything")
    options = parser.parse_args()
    if options.part is not None:
        run_part(options.part, options.save)
        return
    started = time.perf_counter()
    until = started + options.limit
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        timed: dict[str, Any] = {}
        for part in TIMED:
            timed |= wait([start(part, folder)], until - 45)
        checks = wait([start(part, folder) for part in CHECKED], until)
    options.save.parent.mkdir(parents=True, exist_ok=True)
    result = {"where": where(), "seconds": time.perf_counter() - started, "timed": timed, "checks": checks}
    options.save.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{result['seconds']:.0f} s in all")


if __name__ == "__main__":
    main()
