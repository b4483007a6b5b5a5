"""Build a simulation from an experiment: load and split the data, make the model, put the pieces together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fedcams import models
from fedcams.engines import Problem, Shards
from fedcams.errors import SpecError
from fedcams.experiment.experiment import Experiment
from fedcams.keys import generator
from fedcams.partition import label_histogram, take_fraction
from fedcams.rounds import ServerState
from fedcams.simulation import Simulation
from fedcams.simulation.evaluate import SCORE
from fedcams.tasks import TaskData

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Built:
    """A simulation, its initial state, and the distribution of labels over clients."""

    simulation: Simulation
    state: ServerState
    histogram: NDArray[np.int64]
    """`[clients, classes]`, the number of examples that each client trains on."""


def build(experiment: Experiment, data: Path | None = None, device: str | torch.device = "cpu") -> Built:
    """Load an experiment's data and return its simulation.

    Arguments:
        experiment: everything that defines the run.
        data: the folder of downloaded files; None means the default one.
        device: where to train.

    Returns:
        The simulation, its initial state, and the examples of each class per client.

    Raises:
        DataError: if data is missing or damaged.
        SpecError: if the pieces do not fit together, such as a model and its task.

    Examples:
        >>> from fedcams.experiment import Experiment, build
        >>> built = build(Experiment(task="quadratic", model="point", clients=2, sampler="full"))
        >>> built.histogram.shape[0]
        2
    """
    return assemble(experiment, experiment.task.load(data), device)


def assemble(experiment: Experiment, loaded: TaskData, device: str | torch.device = "cpu") -> Built:
    """Return the simulation of an experiment on data that is already loaded, whatever the experiment's task."""
    loaded = loaded.to(device)
    _check_fit(experiment, loaded)
    labels = loaded.labels.cpu().numpy()
    groups = None if loaded.groups is None else loaded.groups.cpu().numpy()
    parts = experiment.partition.split(labels, experiment.clients, generator(experiment.seed, "partition"), groups)
    parts = take_fraction(parts, experiment.train_fraction)
    model = models.build(experiment.model, loaded.shape, loaded.classes, experiment.seed).to(device)
    clients = Shards(loaded.train_x, loaded.train_y, parts)
    simulation = Simulation.of(
        Problem(model, loaded.loss, clients, experiment.local, loaded.prepare, loaded.augment),
        experiment.method,
        sampler=experiment.sampler,
        rounds=experiment.rounds,
        seed=experiment.seed,
        engine=experiment.engine,
        test=(loaded.test_x, loaded.test_y),
        metrics={SCORE: loaded.metric},
        sampling_weights=clients.sizes() if experiment.sampler.needs_weights else None,
        evaluate_every=experiment.evaluate_every,
        probes=experiment.probes,
    )
    return Built(simulation, simulation.start(), _histogram(loaded, parts))


def _histogram(loaded: TaskData, parts: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Count each client's examples by target; targets of a regression by their groups, if they have some."""
    if loaded.train_y.is_floating_point():
        return label_histogram(parts, loaded.labels.cpu().numpy())
    return label_histogram(parts, loaded.train_y.cpu().numpy(), loaded.classes)


def _check_fit(experiment: Experiment, loaded: TaskData) -> None:
    """Refuse a model that takes tokens if the data are not, and the other way round."""
    if experiment.model.takes_tokens != loaded.has_tokens:
        has, takes = ("tokens", "numbers") if loaded.has_tokens else ("numbers", "tokens")
        raise SpecError(
            f"model={experiment.model} takes {takes}, but task={experiment.task} has {has}; "
            f"use model={experiment.task.model}"
        )
