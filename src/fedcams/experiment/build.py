"""From an experiment to a simulation that can run: data loaded and split, model made, pieces put together."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fedcams import models
from fedcams.engines import Problem, Shards, choose
from fedcams.experiment.experiment import Experiment
from fedcams.feedback import ErrorFeedback
from fedcams.keys import generator
from fedcams.partition import label_histogram, take_fraction
from fedcams.residuals import ResidualStore
from fedcams.rounds import Server, ServerState
from fedcams.rounds.server import start
from fedcams.simulation import Simulation
from fedcams.tasks import TaskData


@dataclass(frozen=True)
class Built:
    """A simulation, where it starts, and how the labels lie over the clients."""

    simulation: Simulation
    state: ServerState
    histogram: NDArray[np.int64]
    """`[clients, classes]`, the examples that each client trains on."""


def build(experiment: Experiment, data: Path | None = None, device: str | torch.device = "cpu") -> Built:
    """Loads, splits and puts together; `data` is the folder of downloaded files."""
    return assemble(experiment, experiment.task.load(data), device)


def assemble(experiment: Experiment, loaded: TaskData, device: str | torch.device = "cpu") -> Built:
    """The same with data that are loaded already, whatever the experiment's task."""
    loaded = loaded.to(device)
    labels = loaded.train_y.cpu().numpy()
    groups = None if loaded.groups is None else loaded.groups.cpu().numpy()
    parts = experiment.partition.split(labels, experiment.clients, generator(experiment.seed, "partition"), groups)
    parts = take_fraction(parts, experiment.train_fraction)
    model = models.build(experiment.model, loaded.shape, loaded.classes, experiment.seed).to(device)
    clients = Shards(loaded.train_x, loaded.train_y, parts)
    problem = Problem(model, loaded.loss, clients, experiment.local, loaded.prepare, loaded.augment)
    layout, downlink = problem.layout, experiment.downlink
    replicas = ResidualStore.in_memory(layout, device) if downlink.server_keeps_rows else None
    server = Server(
        layout, experiment.server, experiment.seed, problem.buffer_layout, downlink, experiment.weighting, replicas
    )
    store = ResidualStore.in_memory(layout, device) if experiment.feedback else None
    simulation = Simulation(
        problem=problem,
        server=server,
        uplink=ErrorFeedback(experiment.uplink, store, layout),
        sampler=experiment.sampler,
        engine=choose(experiment.engine, problem, experiment.rounds, experiment.sampler.size_varies),
        test=(loaded.test_x, loaded.test_y),
        metric=loaded.metric,
        sampling_weights=clients.sizes() if experiment.sampler.needs_weights else None,
        evaluate_every=experiment.evaluate_every,
        measure_gamma=experiment.measure_gamma,
    )
    return Built(simulation, start(server, *problem.read()), label_histogram(parts, labels, loaded.classes))
