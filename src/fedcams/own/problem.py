"""Turn a user's model, data and functions into a problem for an engine; refuse early what would fail in a round."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedcams.engines import Examples, Loss, Problem
from fedcams.engines.trees import call, map_tensors, size, take
from fedcams.errors import SpecError
from fedcams.keys import torch_generator
from fedcams.layout import Layout
from fedcams.local import Local
from fedcams.simulation.clients import Clients
from fedcams.simulation.evaluate import SCORE, Metrics
from fedcams.simulation.examples import Collate, as_examples
from fedcams.tasks import Augmentation, accuracy, class_axis, cross_entropy


def make_problem(
    model: nn.Module,
    clients: Sequence[Any] | Mapping[Any, Any],
    loss: Loss | None,
    local: Local,
    prepare: Callable[[Any], Any],
    augment: Augmentation | None,
    collate: Collate | None,
    device: str | torch.device | None,
) -> Problem:
    """Return the problem of these parts, with the model on `device`, and try it with two examples of a client.

    Without a `loss`, it is the cross entropy, or for examples that are dicts the loss that the model returns.
    """
    model = _placed(model, device)
    keys = _keywords(model)
    known = Clients(clients, None, collate, keys)
    some: Examples = map_tensors(lambda part: part.to(_device(model)), take(known[next(iter(known))], slice(2)))
    loss = loss or (model_loss if isinstance(some[1], Mapping) else cross_entropy)
    with torch.enable_grad(), torch_generator():
        outputs = call(model.eval(), prepare(some[0]))
        if loss is cross_entropy:
            known = Clients(clients, _classes(outputs, some[1]), collate, keys)
        else:
            _check_loss(loss(outputs, some[1]), size(some))
    return Problem(model, loss, known, local, prepare, augment)


def _placed(model: Any, device: str | torch.device | None) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise SpecError(f"model={model!r}; give a torch.nn.Module")
    Layout.of(model)  # refuses a model that cannot be trained, before anything else
    if device is None:
        return model
    try:
        return model.to(device)
    except (RuntimeError, AssertionError) as error:  # a CPU-only torch asserts that there is CUDA
        reason = str(error).partition("\n")[0].partition(". ")[0]
        raise SpecError(f"device={str(device)!r}: {reason}; cpu always works") from None


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _keywords(model: nn.Module) -> Collection[str] | None:
    """Return the names of the model's inputs; None if it takes any."""
    inputs = inspect.signature(model.forward).parameters.values()
    takes_any = any(each.kind is each.VAR_KEYWORD for each in inputs)
    return None if takes_any else [each.name for each in inputs if each.kind is not each.VAR_POSITIONAL]


# -- losses and metrics ----------------------------------------------------------------------------------------------


def model_loss(outputs: Any, batch: Any) -> Tensor:
    """Return the loss that a model itself returns as `loss`, as models of `transformers` do if they get labels."""
    found = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if not isinstance(found, Tensor):
        keys = ", ".join(map(str, batch))
        raise SpecError(f"the model returns no loss for examples with {keys}; give loss=, a function (outputs, batch)")
    return found


def _classes(outputs: Any, targets: Any) -> int:
    """Return the number of classes that the model distinguishes."""
    if not isinstance(outputs, Tensor) or outputs.dim() < 2:
        found = f"shape {list(outputs.shape)}" if isinstance(outputs, Tensor) else f"a {type(outputs).__name__}"
        count = size(targets)
        raise SpecError(f"the model returns {found} for {count} examples; make it [{count}, classes], or give a loss")
    if not isinstance(targets, Tensor):
        raise SpecError("the targets are several tensors; give your own loss, a function (outputs, targets)")
    fits_both = outputs.dim() > 2 and outputs.shape[:-1] == targets.shape and outputs.shape[2:] == targets.shape[1:]
    if fits_both:
        shapes = f"{list(outputs.shape)} and targets {list(targets.shape)}"
        raise SpecError(f"outputs {shapes}: the classes may be on the second or the last axis; give your own loss")
    return outputs.shape[class_axis(outputs, targets)]


def _check_loss(value: Any, count: int) -> None:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        kind = f"{value.dtype}" if isinstance(value, Tensor) else type(value).__name__
        raise SpecError(f"loss returns a {kind}; return a float tensor: one number per example, or their mean")
    if value.dim() > 0 and len(value) != count:
        raise SpecError(
            f"loss returns the shape {list(value.shape)} for {count} examples; return one number per example, "
            f"[{count}], or their mean"
        )


def named_metrics(metric: Any, loss: Loss) -> Metrics:
    """Return a metric, or several in a dict, by name.

    None stands for the accuracy if the loss is a cross entropy, and otherwise for none.
    """
    if metric is None:
        classifies = loss in (cross_entropy, functional.cross_entropy) or isinstance(loss, nn.CrossEntropyLoss)
        return {SCORE: accuracy} if classifies else {}
    if callable(metric):
        return {SCORE: metric}
    if not isinstance(metric, Mapping) or not all(map(callable, metric.values())):
        raise SpecError(f"metric={metric!r}; give a function, or a dict of functions by name")
    for number, name in enumerate(metric):
        if not isinstance(name, str) or not name.isidentifier() or name == "loss" or (number and name == SCORE):
            why = "records call the first metric accuracy" if name == SCORE else "give it a name, such as f1"
            raise SpecError(f"metric: the name {name!r} at position {number + 1} is not allowed; {why}")
    return dict(metric)


def test_examples(test: Any, problem: Problem) -> Examples | None:
    """Return the test examples, checked like the clients' examples; None if there are none."""
    clients = problem.clients
    if test is None or not isinstance(clients, Clients):
        return None
    return as_examples(test, "test", clients.classes, clients.collate, clients.keys_of_inputs)
