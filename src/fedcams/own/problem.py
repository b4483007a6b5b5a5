"""Turn a user's model, data and functions into a problem for an engine; refuse early what would fail in a round."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedcams.engines import Examples, Loss, Problem
from fedcams.engines.modules import copied, hooked_parameter
from fedcams.engines.problem import with_two_examples
from fedcams.engines.trees import Tree, call, described, dtype_name, map_tensors, size, take
from fedcams.errors import SpecError, first_line, first_sentence
from fedcams.keys import torch_generator
from fedcams.layout import Layout
from fedcams.local import Local
from fedcams.simulation.clients import Clients
from fedcams.simulation.evaluate import SCORE, Metric, Metrics, OverCounted, is_paired, naming_failure
from fedcams.simulation.examples import Collate, Reader, check_targets, shapes
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
    """Return the problem of these parts, with a copy of the model on `device`, and try it with two examples.

    Without a `loss`, it is the cross entropy, or for examples that are dicts the loss that the model returns.
    """
    model = _placed(model, device).eval()
    dtype = torch.promote_types(next(p.dtype for p in model.parameters() if p.requires_grad), torch.float32)
    known = Clients(clients, Reader(None, collate, _keywords(model), dtype))
    first, examples = with_two_examples(known)  # which show a sum or a mean over pairs
    name = f"client {known.given[first]}"
    known.reader = replace(known.reader, like=(name, shapes(*examples)))
    some: Examples = map_tensors(lambda part: part.to(_device(model)), take(examples, slice(2)))
    loss = loss or (model_loss if isinstance(some[1], Mapping) else cross_entropy)
    with torch.enable_grad(), torch_generator():
        outputs = _try_model(model, prepare, some[0], name)
        if loss is cross_entropy:
            classes = _classes(outputs, some[1])
            check_targets(examples[1], name, classes)
            known.reader = replace(known.reader, classes=classes)
        else:
            _try_loss(loss, model, prepare, outputs, some)
    return Problem(model, loss, known, local, prepare, augment)


def _placed(model: Any, device: str | torch.device | None) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise SpecError(f"model={model!r}; give a torch.nn.Module")
    if lazy := [name for name, p in model.named_parameters() if isinstance(p, nn.parameter.UninitializedParameter)]:
        raise SpecError(f"model: the parameter {lazy[0]!r} has no shape yet; call the model once with some inputs")
    if hooked := hooked_parameter(model):
        fix = "change its gradient in a local rule of your own"
        raise SpecError(f"model: the parameter {hooked!r} has a hook, which copies of the model lose; {fix}")
    Layout.of(model)  # refuses a model that cannot be trained, before anything else
    if "meta" in (str(device), _device(model).type):
        raise SpecError("model: parameters on the device meta have no values; give a model on cpu, or model.to_empty()")
    try:
        own = copied(model)
    except Exception as error:
        raise SpecError(f"model: {first_line(error)}; give one that copy.deepcopy can copy") from error
    if device is None:
        return own
    try:
        return own.to(device)
    except (RuntimeError, AssertionError) as error:  # a CPU-only torch asserts that there is CUDA
        raise SpecError(f"device={str(device)!r}: {first_sentence(error)}; cpu always works") from None


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _keywords(model: nn.Module) -> Collection[str] | None:
    """Return the names of the model's inputs; None if it takes any."""
    inputs = inspect.signature(model.forward).parameters.values()
    takes_any = any(each.kind is each.VAR_KEYWORD for each in inputs)
    return None if takes_any else [each.name for each in inputs if each.kind is not each.VAR_POSITIONAL]


# -- the model and the loss on two examples --------------------------------------------------------------------------


def _try_model(model: nn.Module, prepare: Callable[[Any], Any], inputs: Tree, name: str) -> Any:
    """Return the outputs; an error of the model also says which inputs it got."""
    try:
        return _outputs(model, prepare, inputs)
    except Exception as error:
        dtype = dtype_name(next(model.parameters()))
        raise SpecError(
            f"the model fails with the inputs of {name}, {described(inputs)}: {first_line(error)}; give inputs that "
            f"the model takes (its parameters are {dtype}), or convert them in prepare="
        ) from error


def _outputs(model: nn.Module, prepare: Callable[[Any], Any], inputs: Tree) -> Any:
    """Return what the model makes of a copy of the inputs: it may change them in place."""
    return call(model, prepare(map_tensors(torch.clone, inputs)))


def _try_loss(loss: Loss, model: nn.Module, prepare: Callable[[Any], Any], outputs: Any, examples: Examples) -> None:
    """Compute the loss of some examples together, and of each alone; refuses what it must not be."""
    fix = "give targets that fit the outputs, or another loss"
    with naming_failure("loss", outputs, examples[1], fix), warnings.catch_warnings():
        warnings.filterwarnings("error", "Using a target size")  # by which torch warns of what it then broadcasts
        value = loss(outputs, examples[1])
    _check_loss(value, size(examples))
    try:
        singles = (take(examples, slice(i, i + 1)) for i in range(size(examples)))
        alone = [loss(_outputs(model, prepare, x), y) for x, y in singles]
    except Exception:  # training may never have a batch of one example
        return
    _check_parts(value, alone, outputs, examples[1])
    _check_mean(value, alone, loss, outputs, examples[1])


def _check_loss(value: Any, count: int) -> None:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        kind = f"{value.dtype}" if isinstance(value, Tensor) else type(value).__name__
        raise SpecError(f"loss returns a {kind}; return a float tensor: one number per example, or their mean")
    if value.dim() > 0 and len(value) != count:
        raise SpecError(
            f"loss returns the shape {list(value.shape)} for {count} examples; return one number per example, "
            f"[{count}], or their mean"
        )
    if not value.requires_grad:
        raise SpecError(
            "loss does not depend on the trainable parameters; compute it from the outputs without detach(), item() "
            "or numpy(), and train a part that the outputs depend on"
        )


def _check_parts(value: Tensor, alone: list[Tensor], outputs: Any, targets: Any) -> None:
    """Refuse a loss that pairs each output with every target, and one that is a sum, knowing those of each example."""
    count = len(alone)
    if is_paired(value, count) and all(is_paired(each, 1) for each in alone):
        got = f"outputs {described(outputs)} and targets {described(targets)}"
        what = f"loss returns the shape {list(value.shape)} for {count} examples"
        raise SpecError(f"{what}: {got} broadcast; give both the same shape")
    parts = torch.stack([each.detach().mean() for each in alone])
    if count > 1 and value.dim() == 0 and (parts > 0).all() and torch.isclose(value.detach(), parts.sum(), rtol=1e-4):
        raise SpecError(
            f"loss returns the sum over {count} examples, {float(value.detach()):.4g}; return one number per example, "
            "as with reduction='none', or their mean"
        )


def _check_mean(value: Tensor, alone: list[Tensor], loss: Loss, outputs: Any, targets: Any) -> None:
    """Refuse a mean over all pairs of outputs and targets, as of `(outputs - y).square().mean()` for [n, 1] and [n]."""
    both = isinstance(outputs, Tensor) and isinstance(targets, Tensor)
    if value.dim() or not both or outputs.shape == targets.shape or outputs.numel() != targets.numel():
        return
    pairs = torch.stack([loss(output[None], target[None]).detach() for output in outputs for target in targets])
    of_pairs = any(torch.isclose(value.detach(), each, rtol=1e-4) for each in (pairs.mean(), pairs.sum()))
    own = torch.stack([each.detach() for each in alone]).mean()
    if of_pairs and not torch.isclose(value.detach(), own, rtol=1e-4):
        got = f"outputs {described(outputs)} and targets {described(targets)}"
        raise SpecError(f"loss compares every output with every target: {got} broadcast; give both the same shape")


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
    if not isinstance(outputs, Tensor) or outputs.dim() < 2 or len(outputs) != size(targets):
        found = f"shape {list(outputs.shape)}" if isinstance(outputs, Tensor) else f"a {type(outputs).__name__}"
        count = size(targets)
        raise SpecError(f"the model returns {found} for {count} examples; make it [{count}, classes], or give a loss")
    if not isinstance(targets, Tensor):
        raise SpecError("the targets are several tensors; give your own loss, a function (outputs, targets)")
    if outputs.shape[1:] == (1,):
        fix = "give loss=torch.nn.BCEWithLogitsLoss() for two classes, or torch.nn.MSELoss() for a regression"
        raise SpecError(
            f"the model has one output, but the default loss, the cross entropy, needs one per class; {fix}"
        )
    shapes = f"outputs {list(outputs.shape)} and targets {list(targets.shape)}"
    second, last = outputs.shape[:1] + outputs.shape[2:], outputs.shape[:-1]
    if targets.shape not in (second, last) and not targets.is_floating_point():  # floats are refused as such
        wanted = list(last) if second == last else f"{list(second)} or {list(last)}"
        raise SpecError(f"{shapes} do not fit; give targets {wanted}, one class number each, or your own loss")
    if second == last == targets.shape and outputs.dim() > 2:
        raise SpecError(f"{shapes}: the classes may be on the second or the last axis; give your own loss")
    return outputs.shape[class_axis(outputs, targets)]


def named_metrics(metric: Any, loss: Loss) -> Metrics:
    """Return a metric, or several in a dict, by name.

    None means the accuracy if the loss is a cross entropy, and otherwise no metric.
    """
    if metric is None:
        if loss is functional.cross_entropy or isinstance(loss, nn.CrossEntropyLoss):
            return {SCORE: _accuracy_of_counted(getattr(loss, "ignore_index", -100))}
        return {SCORE: accuracy} if loss is cross_entropy else {}
    for each in metric.values() if isinstance(metric, Mapping) else [metric]:
        refuse_class("metric", each)
    if callable(metric):
        return {SCORE: metric}
    if not isinstance(metric, Mapping) or not all(map(callable, metric.values())):
        raise SpecError(f"metric={metric!r}; give a function, or a dict of functions by name")
    for number, name in enumerate(metric):
        if not isinstance(name, str) or not name.isidentifier() or name == "loss" or (number and name == SCORE):
            why = "records call the first metric accuracy" if name == SCORE else "give it a name, such as f1"
            raise SpecError(f"metric: the name {name!r} at position {number + 1} is not allowed; {why}")
    return dict(metric)


def _accuracy_of_counted(ignored: int) -> Metric:
    """Return the accuracy over the targets that torch's cross entropy counts: all but `ignored`, such as padding.

    Of targets that are probabilities, the most probable class is the right one.
    """

    def counts(targets: Tensor) -> Tensor:
        if targets.is_floating_point():
            return torch.ones(len(targets), device=targets.device)
        return (targets != ignored).float()

    @functools.wraps(accuracy)
    def score(outputs: Tensor, targets: Tensor) -> Tensor:
        if targets.is_floating_point():
            return accuracy(outputs, targets.argmax(1))
        return accuracy(outputs, targets) * counts(targets)

    return OverCounted(score, counts)


def refuse_class(name: str, function: Any) -> None:
    """Refuse a class where a function is needed: calling it would make an object."""
    if isinstance(function, type):
        raise SpecError(f"{name}={function.__name__} is a class; give an instance, such as {function.__name__}()")


def test_examples(test: Any, problem: Problem, name: str) -> Examples:
    """Return the test examples, checked like the clients' examples."""
    assert isinstance(problem.clients, Clients)
    examples = problem.clients.reader.read(test, name)
    with torch.no_grad(), torch_generator():
        some = map_tensors(lambda part: part.to(problem.device), take(examples[0], slice(2)))
        _try_model(problem.model, problem.prepare, some, name)
    return examples
