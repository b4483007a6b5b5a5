"""Time rounds of the paper's experiments on a CUDA device, by phase, next to the eager loop over clients."""

from __future__ import annotations

import contextlib
import dataclasses
import platform
import time
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from fedcams.engines import engine
from fedcams.errors import SpecError
from fedcams.experiment import Built, Experiment
from fedcams.experiment.assembly import assemble
from fedcams.simulation import Phases
from fedcams.simulation.evaluate import evaluate
from fedcams.tasks import CropFlip, TaskData, accuracy, cross_entropy
from fedcams.tasks.cifar import MEAN, SHAPE, STD

SETTINGS: dict[str, Any] = {
    "clients": 100,
    "train_fraction": "0.8",
    "sampler": "uniform(n=10)",
    "local": "sgd(lr=0.01, epochs=3, batch=20)",
    "server": "fedams(lr=1, eps=1e-3, bias_correction=true)",
}
"""The paper's settings: 10 of 100 clients, 60 steps of 20 images each."""


@dataclass(frozen=True)
class Measured:
    """Medians over rounds, in seconds."""

    model: str
    uplink: str
    engine: str
    rounds: int
    first_round: float
    """With everything compiled and captured."""
    seconds: float
    phases: dict[str, float]
    images_per_second: float
    tflops: float
    """Achieved while training: three times the forward pass's operations."""
    memory: int
    """Largest number of bytes allocated on the device."""
    loop_train: float | None
    """The eager loop's training of the same cohort, from one client timed and multiplied by their number."""
    loop_evaluate: float | None

    @property
    def loop_seconds(self) -> float | None:
        """Seconds of a round with the loop: its own training and evaluation, the other phases as measured."""
        if self.loop_train is None or self.loop_evaluate is None:
            return None
        rest = self.seconds - self.phases["train"] - self.phases.get("evaluate", 0.0)
        return rest + self.loop_train + self.loop_evaluate

    @property
    def ratio(self) -> float | None:
        """The speedup of a round over the loop."""
        return None if self.loop_seconds is None else self.loop_seconds / self.seconds

    @property
    def compression(self) -> float:
        """The part of a round that encoding, residuals and aggregation take."""
        return (self.phases["encode"] + self.phases["aggregate"]) / self.seconds

    def to_dict(self) -> dict[str, Any]:
        """Return all numbers, including those that follow from others."""
        derived = {"loop_seconds": self.loop_seconds, "ratio": self.ratio, "compression": self.compression}
        return dataclasses.asdict(self) | derived


class DevicePhases(Phases):
    """Phases that end when the device has finished, not when the work is queued."""

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time the work inside."""
        with super().__call__(name):
            yield
            torch.cuda.synchronize()


def measure(model: str, uplink: str, by: str = "graphs", rounds: int = 10, loop: bool = True) -> Measured:
    """Time rounds on noise images of CIFAR's shape, because only their number and size matter."""
    if not torch.cuda.is_available():
        raise SpecError("bench gpu: there is no CUDA device; run it where torch.cuda.is_available()")
    experiment = Experiment.from_dict({**SETTINGS, "model": model, "uplink": uplink, "engine": by, "rounds": rounds})
    built = assemble(experiment, noise_images(), "cuda")
    torch.cuda.reset_peak_memory_stats()
    state, times, phases = built.state, [], []
    for _ in range(rounds + 1):
        part, started = DevicePhases(), time.perf_counter()
        state, _ = built.simulation.advance_(state, part)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
        phases.append(part.seconds)
    warm = {name: median(each.get(name, 0.0) for each in phases[1:]) for name in phases[1]}
    images = 10 * 60 * 20
    flops = 3 * _forward_flops(built) * images
    memory = torch.cuda.max_memory_allocated()
    train, test = _loop_seconds(built) if loop else (None, None)
    return Measured(
        model, uplink, by, rounds, times[0], median(times[1:]), warm, images / warm["train"],
        flops / warm["train"] / 1e12, memory, train, test,
    )  # fmt: skip


def noise_images(train: int = 50_000, test: int = 10_000) -> TaskData:
    """Return random images in ten classes."""
    draw = torch.Generator().manual_seed(0)
    images = (torch.randint(0, 256, (n, *SHAPE), dtype=torch.uint8, generator=draw) for n in (train, test))
    labels = (torch.randint(0, 10, (n,), generator=draw) for n in (train, test))
    (train_x, test_x), (train_y, test_y) = images, labels
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    return TaskData(train_x, train_y, test_x, test_y, 10, cross_entropy, accuracy, mean, std, CropFlip())


def _forward_flops(built: Built) -> int:
    problem = built.simulation.problem
    x, _ = problem.examples_of(0)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        problem.model.eval()(problem.prepare(x[:1]))
    return int(counter.get_total_flops())


def _loop_seconds(built: Built) -> tuple[float, float]:
    """Return `loop`'s seconds for training ten clients, of which one is timed, and for an evaluation."""
    simulation, loop = built.simulation, engine("loop")
    problem = simulation.problem
    x, buffers = problem.read()
    loop.train(problem, x, buffers, [0], 1, 0)
    train = 10 * _seconds(lambda: loop.train(problem, x, buffers, [1], 1, 0))
    assert simulation.test is not None
    test = simulation.test
    evaluate(problem, x, buffers, test, simulation.metrics)
    return train, _seconds(lambda: evaluate(problem, x, buffers, test, simulation.metrics))


def _seconds(work: Any) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def where() -> dict[str, str]:
    """Return the device and the versions that the numbers belong to."""
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "loop": "float32 as torch has it by default (convolutions may use TF32), one client timed, times ten",
    }
