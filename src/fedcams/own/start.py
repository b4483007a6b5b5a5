"""The function `simulate`: a federation of your own model and data in one call."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedcams.engines import Engine, Loss, Problem
from fedcams.engines.trees import size
from fedcams.errors import SpecError
from fedcams.method import Method, method_of
from fedcams.own.folder import RunFolder
from fedcams.own.history import Callback, History
from fedcams.own.problem import make_problem, named_metrics, refuse_class, test_examples
from fedcams.probes import DEFAULT, Probe
from fedcams.rows import RowStore
from fedcams.sampler import Sampler
from fedcams.simulation import Simulation
from fedcams.simulation.evaluate import Metric
from fedcams.simulation.examples import Collate
from fedcams.tasks import Augmentation
from fedcams.trackers import Tracker, check_trackers, tracker

if TYPE_CHECKING:
    from torch import nn

COHORT = 10
"""Clients per round, unless a call says otherwise or there are fewer."""


@torch.inference_mode(False)
def simulate(
    model: nn.Module,
    clients: Sequence[Any] | Mapping[int, Any] | Mapping[str, Any],
    test: Any = None,
    *,
    method: Method | None = None,
    rounds: int = 100,
    cohort: int | str | Sampler | None = None,
    seed: int = 0,
    loss: Loss | None = None,
    metric: Metric | Mapping[str, Metric] | None = None,
    collate: Collate | None = None,
    device: str | torch.device | None = None,
    engine: str | Engine = "auto",
    prepare: Callable[[Any], Any] = lambda x: x,
    augment: Augmentation | None = None,
    evaluate_every: int = 1,
    probes: str | Sequence[str | Probe] = DEFAULT,
    theory_every: int = 0,
    rows: RowStore | None = None,
    out: str | os.PathLike[str] | None = None,
    checkpoint_every: int = 25,
    callbacks: Sequence[Callback] = (),
    trackers: Sequence[str | Tracker] = (),
    label: str = "run",
    **settings: Any,
) -> History:
    """Return the history of a simulated federation; iterating over it, or `history.run()`, runs the rounds.

    Arguments:
        model: a torch module; it is copied, and trained on the device of its parameters.
        clients: the data of each client, in a list, or in a mapping whose keys are integers or strings; it is loaded
            when the client takes part. One client's data is a pair `(x, y)` of tensors, arrays, lists or Series, a
            tuple `(a, b, y)` for a model with several inputs, a dict of them for a model with keyword inputs, or a
            map-style dataset of such examples.
        test: data in the same form, to evaluate on; None evaluates nothing.
        method: what to run, a `fedcams.Method`. Its fields may also be given by name, and take precedence:
            `server="fedams(lr=0.1)"`, `uplink="topk(ratio=1/64)"`, `downlink=`, `local=`, `average="ema(0.97)"`, ….
            `recipe="light"` sets several of them; those that you give yourself take precedence.
        rounds: the number of rounds.
        cohort: a number of clients per round, or a sampler such as `bernoulli(p=0.1)`; 10 by default, or all if there
            are fewer.
        seed: the source of all randomness.
        loss: a function `(outputs, targets)`, or `(outputs, batch)` for data in dicts. It returns the loss of each
            example, or their mean, which is slower for clients of different sizes. The default is cross entropy, or
            for data in dicts the model's own `outputs.loss`.
        metric: a function of the same arguments that returns a score for each example, or a dict of such functions by
            name. The first one is recorded as `test_accuracy`, and each as `test_NAME`. The default is accuracy for a
            cross entropy, and none for other losses. For metrics that are not means, see `fedcams.over_test_set`.
        collate: a function that turns a list of examples into a batch, for example by padding; it is called with all
            examples of a client, so examples of different clients may differ in shape.
        device: where to train; by default where the model is.
        engine: how local training is computed; `auto` picks the fastest engine that supports the problem.
        prepare: turns raw inputs into the model's inputs.
        augment: random changes of the training inputs.
        evaluate_every: the number of rounds between evaluations; the last round is always evaluated.
        probes: what to measure in every round; add to the default as in `q + floor + norms + guard + gamma`.
        theory_every: the number of rounds between measurements of the constants that convergence theorems assume; 0
            measures none. They are written to `theory.jsonl` in `out`.
        rows: where clients keep their residuals; in memory unless given.
        out: a folder for records, checkpoints and the report, like those of `fedcams run`. The same call continues an
            unfinished run, and loads a finished one. A run with another method, model, data or seed is refused.
        checkpoint_every: the number of rounds between checkpoints, with `out`.
        callbacks: called after every round with its record; one that returns True stops the run.
        trackers: what follows the run, with `out`: `["csv", "wandb(project=mine)"]`, or objects like
            `fedcams.trackers.Tracker`.
        label: the name of the run in reports, with `out`.
        settings: fields of the method by name, as under `method`.

    Returns:
        A `History`. Nothing has run yet.

    Raises:
        SpecError: for what does not fit together, before anything is written; the message says what to give instead.
        DataError: for a client without examples, or with examples that the model cannot take.

    Examples:
        >>> import fedcams, torch
        >>> x = torch.arange(12.0)[:, None] / 12
        >>> clients = [(x[i : i + 3], 2 * x[i : i + 3]) for i in range(0, 12, 3)]
        >>> history = fedcams.simulate(
        ...     torch.nn.Linear(1, 1),
        ...     clients,
        ...     test=clients[0],
        ...     loss=lambda outputs, y: (outputs - y).square().mean(-1),
        ...     uplink="sign",
        ...     rounds=3,
        ...     cohort=2,
        ... ).run()
        >>> [len(record.cohort) for record in history]
        [2, 2, 2]
    """
    rounds, evaluate_every = _whole("rounds", rounds, low=1), _whole("evaluate_every", evaluate_every, low=1)
    checkpoint_every, seed = _whole("checkpoint_every", checkpoint_every, low=1), _whole("seed", seed)
    theory_every = _whole("theory_every", theory_every, low=0)
    chosen = method_of(method, settings)
    _check_functions({"loss": loss, "prepare": prepare, "collate": collate})
    _check_objects(augment, rows, callbacks)
    _check_folder(out, trackers, label, rows, theory_every)
    check_trackers(trackers, chosen.privacy)
    problem = make_problem(model, clients, loss, chosen.local, prepare, augment, collate, device)
    sampler = _sampler(cohort, len(problem.clients))
    chosen.check_cohort(sampler.largest(len(problem.clients)))
    if engine == "auto" and collate is not None:
        engine = "loop"  # the others need examples of one shape
    simulation = Simulation.of(
        problem,
        chosen,
        sampler=sampler,
        rounds=rounds,
        seed=seed,
        engine=engine,
        test=None if test is None else test_examples(test, problem, "test"),
        metrics=named_metrics(metric, problem.loss),
        sampling_weights=_sampling_weights(sampler, problem),
        evaluate_every=evaluate_every,
        probes=Probe.parse_several(probes),
        rows=rows,
    )
    if out is None:
        return History(simulation, callbacks)
    folder = RunFolder(Path(out), simulation, label, str(engine), checkpoint_every, theory_every)
    return History(simulation, callbacks, folder, [tracker(each) for each in trackers])


def _whole(name: str, value: Any, low: int | None = None) -> int:
    """Return a Python or NumPy integer as an int; refuses other values, `True` among them, and those below `low`."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise SpecError(f"{name}={value!r}; give a whole number")
    if low is not None and value < low:
        raise SpecError(f"{name}={value}; allowed: {low} or more")
    return int(value)


def _check_functions(functions: Mapping[str, Any]) -> None:
    """Refuse early what would fail when it is first called."""
    for name, function in functions.items():
        if function is not None and not callable(function):
            raise SpecError(f"{name}={function!r}; give a function")
        refuse_class(name, function)


def _check_objects(augment: Any, rows: Any, callbacks: Any) -> None:
    """Refuse early what would fail when it is first used."""
    if augment is not None and not (hasattr(augment, "draw") and hasattr(augment, "apply")):
        raise SpecError(f"augment={augment!r}; give something with the methods draw and apply")
    if rows is not None and not isinstance(rows, RowStore):
        raise SpecError(f"rows={rows!r}; give a RowStore, such as RowStore.on_disk(...)")
    if not isinstance(callbacks, Sequence) or not all(map(callable, callbacks)):
        raise SpecError(f"callbacks={callbacks!r}; give a list of functions that take a record")


def _check_folder(out: Any, trackers: Sequence[Any], label: str, rows: RowStore | None, theory_every: int) -> None:
    """Refuse what needs a folder without one, and what a folder keeps itself."""
    if out == "":  # as a path, this is the current folder
        raise SpecError("out='' names no folder; give one such as out='runs/mine', or leave it out")
    if out is not None and not isinstance(out, str | os.PathLike):
        raise SpecError(f"out={out!r}; give a folder such as out='runs/mine'")
    if (trackers or label != "run") and out is None:
        raise SpecError("trackers and label need the run's folder; give out=...")
    if theory_every and out is None:
        raise SpecError(f"theory_every={theory_every} writes to the run's folder; give out=...")
    if rows is not None and out is not None:
        raise SpecError("rows and out: a run with out=... keeps its clients' rows in its folder; give only one of them")


def _sampler(cohort: Any, population: int) -> Sampler:
    cohort = min(COHORT, population) if cohort is None else cohort
    if isinstance(cohort, Sampler) or (isinstance(cohort, str) and cohort[:1].isalpha()):
        return Sampler.parse(cohort)
    if isinstance(cohort, bool) or not isinstance(cohort, int | np.integer) or cohort < 1:
        raise SpecError(f"cohort={cohort!r}; give a whole number from 1, or a sampler such as 'bernoulli(p=0.1)'")
    if cohort > population:
        raise SpecError(f"cohort={cohort}, but there are only {population} clients; give at most {population}")
    return Sampler.parse(f"uniform(n={cohort})")


def _sampling_weights(sampler: Sampler, problem: Problem) -> list[float] | None:
    """Return the clients' numbers of examples if the sampler needs them; this loads every client once."""
    if not sampler.needs_weights:
        return None
    return [float(size(x)) for x, _ in problem.clients.values()]
