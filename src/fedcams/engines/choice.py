"""Choose the engine of a run: the one that is named, or the fastest one that trains the model as `loop` does."""

from __future__ import annotations

import dataclasses
import warnings
from typing import NamedTuple

import torch

from fedcams.engines.base import CohortUpdate, Engine, engine
from fedcams.engines.modules import copied
from fedcams.engines.padding import is_near, most_apart
from fedcams.engines.problem import Problem, with_two_examples
from fedcams.engines.trees import size, take
from fedcams.errors import SpecError
from fedcams.local import local
from fedcams.registry import registered

SIZES = (3, 2)
"""The numbers of examples of a trial's two clients; they differ, so that errors in padding would show."""
BATCH = 64
"""The size of a trial's full batches. Where engines pad to a few sizes, both clients are padded to four examples."""
TURN = (1, 0)
"""The round and the seed of a trial."""


class Choice(NamedTuple):
    """The engine of a run."""

    engine: Engine
    reason: str
    """Why it is this one: `named`, or why the faster ones were passed over."""


def choose(spec: str | Engine, problem: Problem, rounds: int = 1, size_varies: bool = False) -> Engine:
    """Return the engine that a spec names or, with `auto`, the fastest one that can train the problem.

    Arguments:
        spec: `auto`, an engine, or its spec string.
        problem: the model, the clients and how they train.
        rounds: the length of the run; compiling pays off in long ones only.
        size_varies: whether cohorts differ in size.

    Returns:
        The engine; `choose_with_reason` also says why.

    Raises:
        SpecError: for an engine that cannot train the problem.

    Examples:
        >>> import torch
        >>> from fedcams.engines import Problem, choose
        >>> from fedcams.local import local
        >>> examples = {0: (torch.ones(4, 2), torch.zeros(4, dtype=torch.long))}
        >>> problem = Problem(torch.nn.Linear(2, 3), torch.nn.functional.cross_entropy, examples, local("sgd"))
        >>> str(choose("loop", problem))
        'loop'
    """
    return choose_with_reason(spec, problem, rounds, size_varies).engine


def choose_with_reason(spec: str | Engine, problem: Problem, rounds: int = 1, size_varies: bool = False) -> Choice:
    """Return the engine that a spec names or, with `auto`, the fastest one that can train the problem, and why.

    `auto` asks engines by priority whether they support the problem, and runs a trial with those that cannot tell in
    advance; `loop` can train every model. The choice depends only on the machine and the arguments, so a resumed run
    continues with the same engine.

    Arguments:
        spec: `auto`, an engine, or its spec string.
        problem: the model, the clients and how they train.
        rounds: the length of the run; compiling pays off in long ones only.
        size_varies: whether cohorts differ in size.

    Returns:
        The engine and the reason in words.

    Raises:
        SpecError: for an engine that cannot train the problem.

    Examples:
        >>> import torch
        >>> from fedcams.engines import Problem, choose_with_reason
        >>> from fedcams.local import local
        >>> examples = {0: (torch.ones(4, 2), torch.zeros(4, dtype=torch.long))}
        >>> problem = Problem(torch.nn.Linear(2, 3), torch.nn.functional.cross_entropy, examples, local("sgd"))
        >>> choose_with_reason("loop", problem).reason
        'named'
    """
    if spec != "auto":
        named = engine(spec)
        if reason := named.supports(problem):
            raise SpecError(reason)
        return Choice(named, "named")
    passed_over: list[str] = []
    names = sorted(registered("engine"), key=lambda name: -engine(name).priority)
    for candidate in map(engine, names):
        reason = candidate.supports(problem) or candidate.declines(problem) or _failed_trial(candidate, problem)
        if not reason:
            return Choice(candidate.tuned(problem, rounds, size_varies), "; ".join(passed_over) or "the fastest one")
        passed_over.append(reason.rpartition("; ")[0] or reason)  # without its advice, as `auto` finds an engine
    raise AssertionError("the loop can train every model")


def _failed_trial(candidate: Engine, problem: Problem) -> str:
    """Return why a trial rules an engine out; an empty string if it does not, or if no trial is needed."""
    if not candidate.needs_trial or agrees(candidate, problem):
        return ""
    return f"engine={candidate}: a trial step fails or differs from that of the loop"


def agrees(candidate: Engine, problem: Problem) -> bool:
    """Return whether an engine takes the same step as `loop` with two small clients.

    A user's own code may branch on data, draw random numbers, write in place or depend on the whole batch; only running
    it shows. This costs a copy of the model and training on a few examples.
    """
    small = _small(problem)
    try:
        with warnings.catch_warnings():
            # operations that vmap cannot batch are no faster
            warnings.filterwarnings("error", "There is a performance drop")
            ours = _train(candidate.on_trial(), small, list(small.clients))
        apart = most_apart(small)
        truths = (_truth(candidate, small, client) for client in small.clients)
        return all(_alike(ours, row, truth, apart) for row, truth in enumerate(truths))
    except Exception:  # a model may raise anything; if `loop` raises it too, the run will show the error
        return False


def trains(by: Engine, problem: Problem) -> bool:
    """Return whether an engine takes a step with two small clients, however it rounds."""
    small = _small(problem)
    try:
        _train(by, small, list(small.clients))
    except Exception:  # a model may raise anything
        return False
    return True


def _small(problem: Problem) -> Problem:
    """Return the problem of a trial: two clients of a few examples, and one step of plain SGD."""
    own = problem.examples_of(with_two_examples(problem.clients)[0])  # copies of one would hide how examples mix
    few = [torch.arange(count, device=problem.device) % size(own) for count in SIZES]
    clients = {client: take(own, at) for client, at in enumerate(few)}
    return dataclasses.replace(problem, clients=clients, local=local(f"sgd(lr=1, batch={BATCH})"))


def _truth(candidate: Engine, problem: Problem, client: int) -> CohortUpdate:
    """Return what `loop` computes for a client if its random layers draw like the candidate's."""
    with candidate.drawing(problem, client, *TURN):
        return _train(engine("loop"), problem, [client])


def _train(by: Engine, problem: Problem, cohort: list[int]) -> CohortUpdate:
    frozen = (p for p in problem.model.parameters() if not p.requires_grad)  # may be large, and are not copied
    own = dataclasses.replace(problem, model=copied(problem.model, frozen))
    start = own.read()
    own.load(start[0] / 2, None)  # so that an engine shows if it computes with what the model holds, not with the start
    return by.train(own, *start, cohort, *TURN)


def _alike(ours: CohortUpdate, row: int, truth: CohortUpdate, apart: float) -> bool:
    """Return whether a row of an update equals that of a client trained alone."""
    pairs = [(ours.delta[row], truth.delta[0])]
    if ours.buffers is not None and truth.buffers is not None:
        pairs.append((ours.buffers[row], truth.buffers[0]))
    return all(is_near(found, true, apart) for found, true in pairs)
