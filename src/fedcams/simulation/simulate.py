"""`simulate`: a federation of one's own model and data in one call."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedcams.compress import Compressor
from fedcams.downlink import Downlink
from fedcams.downlink import downlink as resolve_downlink
from fedcams.engines import Engine, Examples, Loss, Problem, choose
from fedcams.errors import SpecError
from fedcams.feedback import ErrorFeedback
from fedcams.layout import Layout
from fedcams.local import SGD
from fedcams.local import local as resolve_local
from fedcams.optimizers import ServerOptimizer
from fedcams.optimizers import server as resolve_server
from fedcams.residuals import ResidualStore
from fedcams.rounds import Server
from fedcams.rounds.server import start
from fedcams.sampler import Sampler
from fedcams.sampler import sampler as resolve_sampler
from fedcams.simulation.clients import Clients, as_examples
from fedcams.simulation.evaluate import Metric
from fedcams.simulation.history import History
from fedcams.simulation.simulation import Simulation
from fedcams.tasks import Augmentation, accuracy, cross_entropy


@torch.inference_mode(False)
def simulate(
    model: nn.Module,
    clients: Sequence[Any] | Mapping[int, Any],
    test: Any = None,
    *,
    server: str | ServerOptimizer = "fedams",
    uplink: str | Compressor = "identity",
    rounds: int = 100,
    cohort: int | str | Sampler = 10,
    local: str | SGD = "sgd",
    loss: Loss = cross_entropy,
    metric: Metric = accuracy,
    seed: int = 0,
    engine: str | Engine = "auto",
    downlink: str | Downlink = "none",
    feedback: bool = True,
    residuals: ResidualStore | None = None,
    weighting: str = "uniform",
    prepare: Callable[[Tensor], Tensor] = lambda x: x,
    augment: Augmentation | None = None,
    evaluate_every: int = 1,
    measure_gamma: bool = False,
) -> History:
    """Simulates a federation; rounds run while the history is iterated, or when its model or frame is asked for.

    `clients` is a list of `(x, y)` tensors or of map-style datasets, or a mapping id -> dataset, loaded when a client
    takes part; `test` is one more. `cohort` is a number of clients or a sampler such as `bernoulli(p=0.1)`. `loss`
    gives the loss of each example (or their mean, slower for clients of uneven size), `metric` a score of each.
    The model is copied; it trains where its parameters are.
    """
    rounds, evaluate_every = _whole("rounds", rounds, low=1), _whole("evaluate_every", evaluate_every, low=1)
    seed = _whole("seed", seed)
    problem = _problem(copy.deepcopy(model), clients, loss, resolve_local(local), prepare, augment)
    layout, buffer_layout = problem.layout, problem.buffer_layout
    store = (residuals or ResidualStore.in_memory(layout, problem.device)) if feedback else None
    chosen = _sampler(cohort)
    down = resolve_downlink(downlink)
    replicas = ResidualStore.in_memory(layout, problem.device) if down.server_keeps_rows else None
    config = Server(layout, resolve_server(server), seed, buffer_layout, down, weighting, replicas)
    simulation = Simulation(
        problem,
        config,
        ErrorFeedback(uplink, store, layout),
        chosen,
        choose(engine, problem, rounds, chosen.size_varies),
        _examples_to_test(test, problem.clients),
        metric,
        _sampling_weights(chosen, problem),
        evaluate_every,
        measure_gamma,
    )
    return History(simulation, start(config, *problem.read()), rounds)


def _whole(name: str, value: Any, low: int | None = None) -> int:
    """The integer, Python's or NumPy's."""
    if not isinstance(value, int | np.integer):
        raise SpecError(f"{name}={value!r}; give a whole number")
    if low is not None and value < low:
        raise SpecError(f"{name}={value}; allowed: {low} or more")
    return int(value)


def _sampler(cohort: Any) -> Sampler:
    if isinstance(cohort, str | Sampler):
        return resolve_sampler(cohort)
    if not isinstance(cohort, int | np.integer):
        raise SpecError(f"cohort={cohort!r}; give a whole number, or a sampler such as 'bernoulli(p=0.1)'")
    return resolve_sampler(f"uniform(n={cohort})")


def _problem(
    model: nn.Module,
    clients: Sequence[Any] | Mapping[int, Any],
    loss: Loss,
    local: SGD,
    prepare: Callable[[Tensor], Tensor],
    augment: Augmentation | None,
) -> Problem:
    if not isinstance(model, nn.Module):
        raise SpecError(f"model={model!r}; give a torch.nn.Module")
    Layout.of(model)  # refuses a model that cannot be trained, before anything else is looked at
    known = Clients(clients)
    if loss is cross_entropy:
        known = Clients(clients, classes=_outputs(model, prepare, known))
    return Problem(model, loss, known, local, prepare, augment)


@torch.no_grad()
def _outputs(model: nn.Module, prepare: Callable[[Tensor], Tensor], clients: Clients) -> int:
    """The number of classes that the model tells apart."""
    x, _ = clients[next(iter(clients))]
    device = next(model.parameters()).device
    outputs = model.eval()(prepare(x[:1].to(device)))
    if not isinstance(outputs, Tensor) or outputs.dim() < 2:
        found = f"shape {list(outputs.shape)}" if isinstance(outputs, Tensor) else f"a {type(outputs).__name__}"
        raise SpecError(f"the model gives {found} for one example; [1, classes] is needed, or a loss of your own")
    return outputs.shape[1]


def _examples_to_test(test: Any, clients: Mapping[int, Any]) -> Examples | None:
    """Checked like those to train on."""
    if test is None:
        return None
    return as_examples(test, "test", clients.classes if isinstance(clients, Clients) else None)


def _sampling_weights(sampler: Sampler, problem: Problem) -> list[float] | None:
    """The numbers of examples, where the sampler asks for them: looks at every client once."""
    if not sampler.needs_weights:
        return None
    return [float(len(x)) for x, _ in problem.clients.values()]
