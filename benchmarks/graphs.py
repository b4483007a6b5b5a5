"""Checks and times engine `graphs` on a CUDA device in one go, a few minutes: rounds, kernels, then its tests.

    python benchmarks/graphs.py --save folder

Rounds are those of `fedcams bench gpu` without the eager loop: by one, two and three lanes, with sign and top-k. The
table of kernels is of one round of training. Tests run last, side by side, so that they disturb no time.
"""

from __future__ import annotations

import argparse
import collections
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from fedcams.bench.gpu import SETTINGS, Measured, measure, noise_images, where
from fedcams.experiment import Experiment
from fedcams.experiment.assembly import assemble

ROOT = Path(__file__).resolve().parents[1]
TOPK = "topk(ratio=1/64)"
RUNS = [("graphs", "sign"), ("graphs", TOPK), ("graphs(streams=1)", "sign"), ("graphs(streams=3)", "sign")]
TESTS = [
    ["tests/graph_kernels.py", "-k", "convolutions"],
    ["tests/graph_kernels.py", "-k", "not convolutions"],
    ["tests/test_graphs.py"],
]


def rounds(model: str) -> list[Measured]:
    """One row for each engine and uplink."""
    found = []
    for by, uplink in RUNS:
        found.append(measure(model, uplink, by, rounds=6, loop=False))
        print(line(found[-1]), flush=True)
        torch.cuda.empty_cache()
    return found


def line(row: Measured) -> str:
    """Seconds of the whole and of the first round, milliseconds by phase."""
    parts = " ".join(f"{name} {seconds * 1e3:.1f}" for name, seconds in row.phases.items())
    head = f"{row.model:9s} {row.engine:17s} {row.uplink:16s}"
    return f"{head} {row.seconds:.4f} s, first {row.first_round:.1f} s; ms: {parts}"


def kernels(model: str, most: int = 24) -> dict[str, dict[str, float]]:
    """Microseconds per step by kernel and grid, largest first, from a round of training."""
    settings = {**SETTINGS, "model": model, "uplink": "sign", "engine": "graphs(streams=1)", "rounds": 2}
    simulation = assemble(Experiment.from_dict(settings), noise_images(), "cuda").simulation
    problem, cohort = simulation.problem, list(range(10))
    x, buffers = problem.read()
    simulation.engine.train(problem, x, buffers, cohort, 1, 0)
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        simulation.engine.train(problem, x, buffers, cohort, 1, 0)
        torch.cuda.synchronize()
    times: dict[str, list[float]] = collections.defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        seen.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
    for event in events:
        if event.get("cat") == "kernel":
            grid = "x".join(map(str, event["args"]["grid"]))
            times[f"{event['name'][:40]} grid {grid}"].append(event["dur"])
    ranked = sorted(times.items(), key=lambda item: -sum(item[1]))[:most]
    return {name: {"launches": len(part) / 60, "microseconds": sum(part) / 60} for name, part in ranked}


def tests() -> list[str]:
    """The last line of each of them, after all have ended."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--maxfail=8"]
    running = [subprocess.Popen([*command, *each], cwd=ROOT, stdout=subprocess.PIPE, text=True) for each in TESTS]
    outputs = [process.communicate()[0] for process in running]
    for process, output in zip(running, outputs, strict=True):
        if process.returncode:
            print(output[-3000:])
    return [f"{' '.join(each)}: {output.strip().splitlines()[-1]}" for each, output in zip(TESTS, outputs, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--save", type=Path, help="a folder for rounds.json and kernels.json")
    parser.add_argument("--models", nargs="+", default=["resnet18", "convmixer"])
    parser.add_argument("--no-tests", action="store_true")
    options = parser.parse_args()
    started = time.perf_counter()
    timed = [row for model in options.models for row in rounds(model)]
    profiles = {model: kernels(model) for model in options.models}
    for model, table in profiles.items():
        for name, row in table.items():
            print(f"{model:10s} {row['microseconds']:8.1f} us a step, {row['launches']:5.1f} launches  {name}")
    if options.save is not None:
        saved = {"where": where(), "rounds": [row.to_dict() for row in timed]}
        options.save.mkdir(parents=True, exist_ok=True)
        (options.save / "rounds.json").write_text(json.dumps(saved, indent=1) + "\n")
        (options.save / "kernels.json").write_text(json.dumps(profiles, indent=1) + "\n")
    results = [] if options.no_tests else tests()
    print("\n".join([*map(line, timed), *results]))
    print(f"{time.perf_counter() - started:.0f} s in all")


if __name__ == "__main__":
    main()
