"""An experiment as the theorems see it, and which of their assumptions it does not meet."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from fedcams.engines import Problem
from fedcams.experiment import Experiment
from fedcams.layout import Layout
from fedcams.local import step_count
from fedcams.optimizers.base import Adaptive, ServerOptimizer
from fedcams.optimizers.fedavgm import FedAvgM
from fedcams.theory.setting import Setting


def setting_of(experiment: Experiment, sizes: Sequence[int], layout: Layout, gamma: float = 0.0) -> Setting:
    """Return the setting of an experiment whose clients have these numbers of examples.

    Where an assumption fails, it uses the closest case: the smallest number of steps, the expected cohort, the rates
    of the first round. `failures` says so.
    """
    first = experiment.in_round(1, experiment.rounds)
    server, bound = first.server, first.uplink.squared_error_bound(layout)
    common: dict[str, Any] = {
        "m": len(sizes),
        "n": max(1, round(experiment.sampler.expected(len(sizes)))),
        "K": min(step_count(first.local, size) for size in sizes),
        "T": experiment.rounds,
        "eta_l": float(first.local.lr),
        "q": math.sqrt(bound) if bound is not None and first.feedback else 0.0,
        "gamma": gamma,
        "shrinks": first.uplink.never_lengthens,
    }
    if isinstance(server, Adaptive):
        inside = server.name == "fedams"
        common |= {"beta1": float(server.beta1), "beta2": float(server.beta2), "inside": inside}
        eps = float(server.eps)
        return Setting(eta=float(server.lr), eps=eps if inside else eps**2, **common)
    beta1 = float(server.momentum) if isinstance(server, FedAvgM) else float(getattr(server, "beta1", 0))
    floor = float(getattr(server, "eps", 1)) ** 2
    rate = float(getattr(server, "lr", 1)) / ((1 - beta1) if isinstance(server, FedAvgM) else 1.0)
    return Setting(eta=rate, eps=floor, beta1=beta1, adapts=server.name == "fedadagrad", inside=False, **common)


def server_lr(server: ServerOptimizer, eta: float) -> float:
    """Return the `lr` of a server whose rate is η; FedAvgM's is smaller, because its momentum adds up updates."""
    return eta * (1 - float(server.momentum)) if isinstance(server, FedAvgM) else eta


def failures(experiment: Experiment, problem: Problem, sizes: Sequence[int]) -> list[str]:
    """Return the assumptions of the theorems that the experiment does not meet, one sentence each."""
    return [
        *_of_clients(experiment, problem, sizes),
        *_of_the_server(experiment),
        *_of_messages(experiment, problem.layout),
    ]


def _of_clients(experiment: Experiment, problem: Problem, sizes: Sequence[int]) -> Iterator[str]:
    local, sampler = experiment.local, experiment.sampler
    steps = sorted({step_count(local, size) for size in sizes})
    if len(steps) > 1:
        yield f"equal K: clients take {steps[0]} to {steps[-1]} local steps; the bound uses K = {steps[0]}"
    if sampler.size_varies:
        yield f"fixed n: cohorts of {sampler} vary in size, so residuals do not telescope; the bound uses their mean"
    if len(set(sizes)) > 1:  # otherwise all have the same weight
        yield from _of_weights(experiment)
    if not local.is_plain:
        yield f"plain SGD at clients: local={local}"
    elif not local.replace and steps[-1] > 1:
        yield (
            "fresh examples in every step: batches are drawn without replacement, and after a whole epoch the noise of "
            "a round vanishes to first order; sgd(replace=true) draws with replacement"
        )
    if problem.buffer_layout is not None:
        yield "a loss per example: batch normalisation makes it depend on the rest of the batch"


def _of_weights(experiment: Experiment) -> Iterator[str]:
    sampler = experiment.sampler
    if sampler.needs_weights:
        yield f"uniform cohorts: {sampler} draws clients by their examples, so the mean update is not that of f"
    if experiment.weighting != "uniform":
        yield f"uniform mean: weighting={experiment.weighting}; the theorems are about the mean over clients"


def _of_the_server(experiment: Experiment) -> Iterator[str]:
    server = experiment.server
    if experiment.schedules():
        paths = ", ".join(path for path, _ in experiment.schedules())
        yield f"constant rates: a schedule sets {paths}; the bound uses the values of round 1"
    if getattr(server, "bias_correction", False):
        yield "constant rates: bias_correction=true changes them in the first rounds"
    if server.name in ("fedadam", "fedyogi"):
        yield f"a second moment that never falls: that of {server.name} does; the bound is FedAMSGrad's"
    elif server.name == "fedadagrad":
        yield "a bounded second moment: that of fedadagrad grows with every round; the bound uses one update's"
    elif server.name not in ("fedams", "fedamsgrad", "fedavg", "fedavgm"):
        yield f"the server of the theorems: server={server}; the bound is that of FedAvg with its rate"
    if experiment.aggregate.name != "mean":
        yield f"the mean of the updates: aggregate={experiment.aggregate}"


def _of_messages(experiment: Experiment, layout: Layout) -> Iterator[str]:
    bound = experiment.in_round(1, experiment.rounds).uplink.squared_error_bound(layout)
    if bound is None or (bound and not experiment.feedback):
        sent = f"uplink={experiment.uplink}, feedback={str(experiment.feedback).lower()}"
        yield f"error feedback with q < 1: {sent}; the bound uses q = 0"
    elif experiment.uplink.in_expectation:
        yield f"a certain q < 1: that of {experiment.uplink} holds in expectation only, and one message may lose more"
    if experiment.downlink.name != "none":
        yield f"clients that start from x: downlink={experiment.downlink} sends something else"
    if experiment.control.active:
        yield f"no control variates: control={experiment.control}"
    if experiment.privacy.name != "none":
        yield f"updates as trained: privacy={experiment.privacy} clips them and adds noise"
    if experiment.transforms:
        yield f"updates as trained: transforms={' + '.join(map(str, experiment.transforms))}"
