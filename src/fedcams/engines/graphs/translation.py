"""Translate a module into its program: trace it once, and refuse layers that no operation supports, by name."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import fx, nn
from torch.fx.passes.shape_prop import ShapeProp
from torch.nn import functional as F
from torch.nn.utils.parametrize import is_parametrized

from fedcams.engines.graphs.program import Conv, ConvNorm, Norm, Parameterless, Program, Unfused
from fedcams.engines.modules import hooked_parameter
from fedcams.errors import SpecError, first_sentence

if TYPE_CHECKING:
    from torch import Tensor

ACTIVATIONS: dict[Any, str] = {
    torch.relu: "relu",
    F.relu: "relu",
    F.gelu: "gelu",
    nn.ReLU: "relu",
    nn.GELU: "gelu",
}
ADDS = (operator.add, torch.add)
IMAGES = (nn.Conv2d, nn.BatchNorm2d, nn.MaxPool2d)
SPATIAL = ({-2, -1}, {2, 3})


def translate(model: nn.Module) -> Program:
    """Return the model as a program; refuses layers that no operation supports, by name."""
    traced = _traced(model)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not parameter.requires_grad:
            raise SpecError(f"engine=graphs: parameter {name!r} is frozen; use engine=stacked")
    if len(list(model.named_parameters(remove_duplicate=False))) != len(list(model.parameters())):
        raise SpecError("engine=graphs: two layers share a parameter; use engine=stacked")
    _check_calls(model, traced)
    return _Translation(traced).program()


def _traced(model: nn.Module) -> fx.GraphModule:
    """Return the model's calls; refuses a model that makes others in evaluation, or evaluates a batch-norm in training.

    The same program trains and predicts.
    """
    mode = model.training
    try:
        evaluated, traced = (fx.symbolic_trace(model.train(training)) for training in (False, True))
        still = [name for name, m in model.named_modules() if isinstance(m, nn.BatchNorm2d) and not m.training]
    except Exception as error:
        why = first_sentence(error)  # advice on tracing follows
        raise SpecError(f"engine=graphs cannot follow {type(model).__name__} ({why}); use engine=stacked") from None
    finally:
        model.train(mode)
    if still or str(evaluated.graph) != str(traced.graph):
        what = f"layer {still[0]!r} evaluates in training" if still else "the model branches on its mode"
        raise SpecError(f"engine=graphs: {what}; use engine=stacked")
    return traced


def check_shapes(model: nn.Module, x: Tensor) -> None:
    """Refuse values that are no images or vectors where operations take them as such, and sums that broadcast."""
    traced = fx.symbolic_trace(model)
    ShapeProp(traced).propagate(x)
    for node in traced.graph.nodes:
        shapes = [each.meta["tensor_meta"].shape for each in node.all_input_nodes]
        module = traced.get_submodule(str(node.target)) if node.op == "call_module" else None
        axes = 2 if node.op == "output" or isinstance(module, nn.Linear) else 4 if isinstance(module, IMAGES) else 0
        broadcasts = node.target in ADDS and len(set(shapes)) > 1
        if broadcasts or (axes and len(shapes[0]) != axes):
            given = " and ".join(str(list(shape)) for shape in shapes)
            raise SpecError(
                f"engine=graphs: {node.name!r} gets {given}, for which it has no kernel; use engine=stacked"
            )


def _check_calls(model: nn.Module, traced: fx.GraphModule) -> None:
    """Refuse what tracing does not see, hooks and computed parameters, and a layer whose gradients would need a sum."""
    if traced.graph.eliminate_dead_code():  # whose kernels would wait for a gradient, but whose statistics change
        raise SpecError("engine=graphs: the model computes something that its outputs do not use; use engine=stacked")
    if name := hooked_parameter(model):
        raise SpecError(f"engine=graphs: parameter {name!r} has a hook on its gradient; use engine=loop")
    for name, module in model.named_modules():
        hooks = module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks
        if any(hooks) or is_parametrized(module):
            raise SpecError(f"engine=graphs: layer {name!r} has a hook or a parametrization; use engine=stacked")
    calls = Counter(str(node.target) for node in traced.graph.nodes if node.op == "call_module")
    for name, count in calls.items():
        if count > 1 and any(True for _ in traced.get_submodule(name).parameters()):
            raise SpecError(f"engine=graphs: layer {name!r} is used {count} times; use engine=stacked")


class _Translation:
    """Goes through the traced graph once; a batch-norm waits for the sum and the activation that may follow it."""

    def __init__(self, traced: fx.GraphModule) -> None:
        self.traced = traced
        self.modules = dict(traced.named_modules())
        self.done = Program()
        self.convs: dict[fx.Node, Unfused] = {}  # whose only use is a batch-norm
        self.acts: dict[fx.Node, tuple[fx.Node, str]] = {}  # activations between a convolution and its batch-norm
        self.waiting: dict[fx.Node, ConvNorm] = {}

    def program(self) -> Program:
        for node in self.traced.graph.nodes:
            if node.op == "placeholder":
                if self.done.entry:
                    raise SpecError("engine=graphs takes models with one input; use engine=stacked")
                self.done.entry = node.name
            elif node.op == "output":
                self.done.result = _node(node.args[0]).name
            else:
                self._visit(node)
        return self.done

    def _visit(self, node: fx.Node) -> None:
        module = self.modules.get(str(node.target)) if node.op == "call_module" else None
        act = ACTIVATIONS.get(type(module) if module is not None else node.target)
        if not node.args:
            self._refuse(node, "a separate tensor, or a call with keyword arguments")
        if isinstance(module, nn.Conv2d | nn.Linear):
            self._layer(node, module)
        elif isinstance(module, nn.BatchNorm2d):
            self._norm(node, module)
        elif act is not None:
            self._check_activation(node, module)
            self._activation(node, act)
        elif node.target in ADDS and len(node.args) == 2 and not node.kwargs:
            self._add(node)
        else:
            self.done.operations[node.name] = Parameterless((_node(node.args[0]).name,), self._function(node, module))

    def _layer(self, node: fx.Node, module: nn.Conv2d | nn.Linear) -> None:
        name = str(node.target)
        if isinstance(module, nn.Linear) and self._is_image(_node(node.args[0])):
            self._refuse(node, "a linear layer of images, which works on their last axis")
        layer = Unfused(_node(node.args[0]).name, conv_of(name, module))
        user = _only_user(node)
        after = None if user is None else (_only_user(user) if self._act(user) else user)
        if after is not None and self._is_norm(after):
            self.convs[node] = layer
        else:
            self.done.operations[node.name] = layer

    def _norm(self, node: fx.Node, module: nn.BatchNorm2d) -> None:
        if not module.affine or not module.track_running_stats or module.momentum is None:
            self._refuse(node, "a batch-norm without weights, statistics or momentum")
        source, pre = self.acts.get(_node(node.args[0]), (_node(node.args[0]), "none"))
        if source not in self.convs:
            self._refuse(node, "a batch-norm that follows no convolution")
        conv = self.convs[source]
        norm = Norm(str(node.target), module.eps, float(module.momentum or 0))
        self._wait_or_emit(node, ConvNorm(conv.source, conv.conv, norm, pre))

    def _check_activation(self, node: fx.Node, module: nn.Module | None) -> None:
        """Refuse activations that compute something else, or overwrite values that are used again."""
        settings = node.kwargs if module is None else vars(module)
        if settings.get("approximate", "none") != "none":
            self._refuse(node, "an approximate GELU")
        if (settings.get("inplace") or len(node.args) > 1) and _only_user(_node(node.args[0])) is None:
            self._refuse(node, "an in-place activation of values that are used again")

    def _activation(self, node: fx.Node, act: str) -> None:
        source = _node(node.args[0])
        if source in self.convs:
            self.acts[node] = (source, act)
        elif source in self.waiting and act == "relu":
            self.done.operations[node.name] = replace(self.waiting.pop(source), post=act)
        else:
            function = {"relu": torch.relu, "gelu": F.gelu}[act]
            self.done.operations[node.name] = Parameterless((self._emitted(source),), function)

    def _add(self, node: fx.Node) -> None:
        first, second = _node(node.args[0]), _node(node.args[1])
        if first not in self.waiting and second in self.waiting:
            first, second = second, first
        if first not in self.waiting or first is second:
            self.done.operations[node.name] = Parameterless((self._emitted(first), self._emitted(second)), torch.add)
            return
        draft = self.waiting.pop(first)
        other: str | ConvNorm = self.waiting.pop(second) if second in self.waiting else second.name
        self._wait_or_emit(node, replace(draft, residual=other))

    def _wait_or_emit(self, node: fx.Node, draft: ConvNorm) -> None:
        """Wait if the only use is an activation or a sum that can be fused; otherwise emit the operation."""
        user = _only_user(node)
        sum_follows = user is not None and user.target in ADDS and draft.residual is None
        if user is not None and (sum_follows or self._act(user) == "relu"):
            self.waiting[node] = draft
        else:
            self.done.operations[node.name] = draft

    def _emitted(self, node: fx.Node) -> str:
        if node in self.waiting:
            self.done.operations[node.name] = self.waiting.pop(node)
        return node.name

    def _act(self, node: fx.Node) -> str | None:
        if node.op == "call_module":
            return ACTIVATIONS.get(type(self.modules[str(node.target)]))
        return ACTIVATIONS.get(node.target) if node.op == "call_function" else None

    def _is_image(self, node: fx.Node) -> bool:
        """Return whether a value has height and width, judging by the layers before it."""
        module = self.modules.get(str(node.target)) if node.op == "call_module" else None
        if isinstance(module, IMAGES):
            return True
        keeps = self._act(node) is not None or isinstance(module, nn.Identity) or node.target in ADDS
        return keeps and self._is_image(_node(node.args[0]))

    def _is_norm(self, node: fx.Node) -> bool:
        return node.op == "call_module" and isinstance(self.modules[str(node.target)], nn.BatchNorm2d)

    def _function(self, node: fx.Node, module: nn.Module | None) -> Callable[..., Tensor]:
        self._emitted(_node(node.args[0]))
        if isinstance(module, nn.Flatten) and (module.start_dim, module.end_dim) == (1, -1):
            return flat
        if isinstance(module, nn.Identity):
            return _same
        if isinstance(module, nn.MaxPool2d) and not module.return_indices:
            return _Pool(module)
        if node.target in ("flatten", torch.flatten) and tuple(node.args[1:]) == (1,) and not node.kwargs:
            return flat
        dims = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", ())
        usual = len(node.args) <= 2 and not set(node.kwargs) - {"dim"}
        if node.target in ("mean", torch.mean) and usual and isinstance(dims, tuple | list) and set(dims) in SPATIAL:
            return average
        self._refuse(node, "not supported")

    def _refuse(self, node: fx.Node, what: str) -> NoReturn:
        raise SpecError(f"engine=graphs: {node.op} {node.target!s} is {what}; use engine=stacked")


def conv_of(name: str, module: nn.Conv2d | nn.Linear) -> Conv:
    """Return the geometry of a layer; refuses layers that the kernels do not support."""
    bias = f"{name}.bias" if module.bias is not None else None
    if isinstance(module, nn.Linear):
        return Conv(f"{name}.weight", bias, (1, 1), 1, 0, depthwise=False)
    padding, kernel = module.padding, module.kernel_size
    same_size = tuple(k // 2 for k in kernel)
    pads = same_size if padding == "same" else (0, 0) if isinstance(padding, str) else padding
    depthwise = module.groups > 1
    whole = not depthwise or (module.groups == module.in_channels == module.out_channels)
    same = pads[0] == pads[1] and module.stride[0] == module.stride[1] and set(module.dilation) == {1}
    keeps = module.stride[0] == 1 and all(2 * pads[0] + 1 == k for k in kernel)
    if not (whole and same and module.padding_mode == "zeros" and (keeps or not depthwise)):
        raise SpecError(f"engine=graphs: layer {name!r} is {module}, which has no kernel here; use engine=stacked")
    return Conv(f"{name}.weight", bias, (kernel[0], kernel[1]), module.stride[0], pads[0], depthwise)


def _node(argument: Any) -> fx.Node:
    if not isinstance(argument, fx.Node):
        raise SpecError(f"engine=graphs: the model computes with the constant {argument!r}; use engine=stacked")
    return argument


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _same(x: Tensor) -> Tensor:
    return x


def flat(x: Tensor) -> Tensor:
    """Return `x [C, B, h, w, k]` as `[C, B, k·h·w]`, in the order of the model's own flatten."""
    return x.permute(0, 1, 4, 2, 3).flatten(2) if x.dim() == 5 else x.flatten(2)


def average(x: Tensor) -> Tensor:
    """Return the mean `[C, B, k]` over the pixels of `x [C, B, h, w, k]`."""
    return x.mean((2, 3))


class _Pool:
    """Max-pooling of all clients' images at once."""

    def __init__(self, module: nn.MaxPool2d) -> None:
        self.module = module

    def __call__(self, x: Tensor) -> Tensor:
        pooled: Tensor = self.module(x.flatten(0, 1).permute(0, 3, 1, 2))
        result: Tensor = pooled.permute(0, 2, 3, 1).unflatten(0, x.shape[:2])
        return result
