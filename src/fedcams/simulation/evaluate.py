"""The evaluation of a model on the test set: its loss, and any number of metrics by name."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from fedcams.engines import Engine, Examples, Problem, engine
from fedcams.engines.trees import Tree, concatenate, described, map_tensors, size, take
from fedcams.errors import FedcamsError, SpecError, first_line

if TYPE_CHECKING:
    from torch import Tensor

Metric = Callable[[Any, Any], Any]
"""(outputs, targets) -> one score per example `[B]`, or their mean; several numbers each `[B, ...]` are averaged."""
Metrics = Mapping[str, Metric]
"""Metrics by name. The first one is the score of the run, which records call `accuracy`."""
SCORE = "accuracy"
BATCH, STRUCTURED_BATCH = 1000, 64
"""How many examples are evaluated at once. Those that are not pairs of tensors are mostly text, with large outputs."""
logger = logging.getLogger("fedcams")


def over_test_set(metric: Metric) -> Metric:
    """Mark a metric that is not a mean over examples, such as F1 or AUC: it sees all outputs and targets at once.

    Arguments:
        metric: a function of all outputs and all targets, on the CPU, that returns one number.

    Returns:
        A function for `simulate(metric=...)`.

    Examples:
        >>> import fedcams, torch
        >>> def positives(outputs, y):
        ...     return outputs.argmax(1).sum()
        >>> metric = fedcams.over_test_set(positives)
        >>> metric(torch.eye(2), torch.tensor([0, 1]))
        tensor(1)
    """
    return _OverTestSet(metric)


class _OverTestSet:
    """A metric of the whole test set, under the name of its function."""

    def __init__(self, metric: Metric) -> None:
        functools.update_wrapper(self, metric)
        self.metric = metric

    def __call__(self, outputs: Any, targets: Any) -> Any:
        return self.metric(outputs, targets)


class OverCounted:
    """A score per target that is averaged over those that count, however they are spread over batches."""

    def __init__(self, metric: Metric, counts: Callable[[Tensor], Tensor]) -> None:
        """Average `metric` over the targets for which `counts` returns 1; for the others, both return 0."""
        functools.update_wrapper(self, metric)  # its name is that of the metric in the run's folder
        self.metric, self.counts = metric, counts

    def __call__(self, outputs: Tensor, targets: Tensor) -> Any:
        """Return the scores of a batch, which are 0 for targets that do not count."""
        return self.metric(outputs, targets)

    def weight(self, targets: Tensor) -> Tensor:
        """Return the weight of a batch in units of examples: the sum of the examples' parts that count."""
        return _total(self.counts(targets), size(targets))


def evaluate(
    problem: Problem,
    x: Tensor,
    buffers: Tensor | None,
    test: Examples,
    metrics: Metrics,
    by: str | Engine = "loop",
    not_means: set[str] | None = None,
) -> dict[str, float | None]:
    """Return the mean loss and all metrics by name, of the model `x [d]` with these buffers on `test`.

    An engine computes the outputs. A metric that is not finite, such as the AUC of one class, becomes None. Refuses a
    metric that does not return one number, or one per example. The log names each metric that turns out not to be
    a mean over examples, but only once: `not_means` collects those already named.
    """
    with torch.no_grad():
        known = set() if not_means is None else not_means
        return _evaluate(problem, engine(by).predictor(problem, x, buffers), test, metrics, known)


def _evaluate(
    problem: Problem, predict: Callable[[Tree], Any], test: Examples, metrics: Metrics, not_means: set[str]
) -> dict[str, float | None]:
    means = {name: metric for name, metric in metrics.items() if not isinstance(metric, _OverTestSet)}
    wholes = {name: metric for name, metric in metrics.items() if name not in means}
    totals = torch.zeros(2, 1 + len(means), dtype=torch.float64, device=problem.device)  # of values and of weights
    seen = []
    for number, (inputs, targets) in enumerate(_batches(problem, test)):
        outputs, count = predict(inputs), size(targets)
        scores = [_scores(name, metric, outputs, targets) for name, metric in means.items()]
        if not number and count < size(test):  # a single batch is the whole test set
            _check_means(means, scores, outputs, targets, not_means)
        sums = [_total(values, count) for values in (problem.losses(outputs, targets), *scores)]
        weights = [m.weight(targets) if isinstance(m, OverCounted) else count for m in (None, *means.values())]
        totals = totals + torch.stack([torch.as_tensor(value).to(totals) for value in (*sums, *weights)]).view(2, -1)
        if wholes:
            seen.append(map_tensors(torch.Tensor.cpu, (outputs, targets)))
    found = dict(zip(["loss", *means], (totals[0] / totals[1]).tolist(), strict=True))
    everything = concatenate(seen) if wholes else ()
    found |= {name: _one_number(name, _called(name, metric, *everything)) for name, metric in wholes.items()}
    return {name: found[name] if name == "loss" else _finite(found[name]) for name in ["loss", *metrics]}


def _batches(problem: Problem, test: Examples) -> Iterator[tuple[Tree, Tree]]:
    """Yield copies of parts of the test set, on the model's device: a model may change its inputs in place."""
    step = BATCH if all(isinstance(part, torch.Tensor) for part in test) else STRUCTURED_BATCH
    for first in range(0, size(test), step):
        yield map_tensors(lambda part: part.to(problem.device, copy=True), take(test, slice(first, first + step)))


def is_paired(values: Tensor, count: int) -> bool:
    """Return whether a function seems to have compared each of `count` outputs with every target, by broadcasting."""
    return values.shape[:2] == (count, count)


def _scores(name: str, metric: Metric, outputs: Any, targets: Tree) -> Tensor:
    """Return one score, or one per example; refuses another number of them, and those of all pairs of examples."""
    values, count = _as_numbers(name, _called(name, metric, outputs, targets)), size(targets)
    if values.dim() > 0 and len(values) != count:
        fix = "return one number, or one per example; for one number of the whole test set, see fedcams.over_test_set"
        raise SpecError(f"metric {name} returns the shape {list(values.shape)} for {count} examples; {fix}")
    if is_paired(values, count) and isinstance(outputs, torch.Tensor):
        alone = _as_numbers(name, metric(*take((outputs, targets), slice(1))))
        if count > 1 and is_paired(alone, 1):
            fix = "give outputs and targets one shape"
            raise SpecError(f"metric {name} returns the shape {list(values.shape)}: it compares all pairs; {fix}")
    return values


@contextlib.contextmanager
def naming_failure(what: str, outputs: Any, targets: Any, fix: str) -> Iterator[None]:
    """Turn an error of a user's function into one that says which outputs and targets it got, and the fix."""
    try:
        yield
    except FedcamsError:
        raise
    except Exception as error:
        got = f"outputs {described(outputs)} and targets {described(targets)}"
        raise SpecError(f"{what} fails with {got}: {first_line(error)}; {fix}") from error


def _called(name: str, metric: Metric, outputs: Any, targets: Tree) -> Any:
    """Return what a metric returns; its error also says which outputs and targets it got."""
    fix = "give a function that accepts these; if it expects class numbers, pass it outputs.argmax(1)"
    with naming_failure(f"metric {name}", outputs, targets, fix):
        return metric(outputs, targets)


def _check_means(means: Metrics, scores: list[Tensor], outputs: Any, targets: Tree, not_means: set[str]) -> None:
    """Warn about metrics whose value for a batch is not the mean of the values for its halves, such as F1."""
    for (name, metric), value in zip(means.items(), scores, strict=True):
        if value.dim() == 0 and name not in not_means:
            whole, mean = float(value), _mean_of_halves(name, metric, outputs, targets)
            if not math.isclose(whole, mean, rel_tol=1e-3, abs_tol=1e-6) and not math.isnan(whole):
                not_means.add(name)
                logger.warning(
                    "metric %s is not a mean over examples: it is %.4g for %s of them, but %.4g on average for their "
                    "halves, so its mean over batches is not its value on the test set; use "
                    "fedcams.over_test_set(%s), or return one number per example",
                    *(name, whole, size(targets), mean, getattr(metric, "__name__", "...")),
                )


def _mean_of_halves(name: str, metric: Metric, outputs: Any, targets: Tree) -> float:
    """Return the mean of a metric over the halves of a batch, weighted by their sizes; NaN if it fails on one."""
    count = size(targets)
    middle = count // 2

    def score(which: slice) -> float:
        some = map_tensors(lambda part: part[which] if part.dim() else part, (outputs, targets))
        return float(_scores(name, metric, *some))

    try:
        return (middle * score(slice(middle)) + (count - middle) * score(slice(middle, count))) / count
    except Exception:  # such as an AUC's, if a half has only one class
        return math.nan


def _one_number(name: str, value: Any) -> float:
    values = _as_numbers(name, value)
    if values.numel() != 1:
        fix = "return one number, and give the others names of their own: metric={name: function}"
        raise SpecError(f"metric {name} returns the shape {list(values.shape)} for the whole test set; {fix}")
    return float(values)


def _as_numbers(name: str, value: Any) -> Tensor:
    """Return what a metric gave as a tensor; refuses what is not numbers."""
    if isinstance(value, Mapping):
        keys = ", ".join(map(str, value))
        raise SpecError(f"metric {name} returns a dict ({keys}); return one number, and give metric={{name: function}}")
    try:
        return value if isinstance(value, torch.Tensor) else torch.as_tensor(value, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        kind = type(value).__name__
        raise SpecError(f"metric {name} returns a {kind}; return one number, or one per example") from None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _total(values: Tensor, examples: int) -> Tensor:
    """Return the sum over this many examples of values that are one per example, several per example, or their mean."""
    return values.sum(dtype=torch.float64) if values.dim() == 1 else values.double().mean() * examples
