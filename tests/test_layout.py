"""Layout: a model's trainable parameters as one vector, and back, without surprises."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedcams import Layout, LayoutError
from fedcams.errors import UpdateError


class Net(nn.Module):
    """A frozen parameter, a tied pair, batch-norm buffers, a scalar and an empty tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 3, bias=False)
        self.frozen = nn.Linear(3, 3)
        self.frozen.requires_grad_(False)
        self.norm = nn.BatchNorm1d(3)
        self.tied = nn.Linear(4, 3)
        self.tied.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.empty = nn.Parameter(torch.empty(0, 5))
        self.register_buffer("scratch", torch.zeros(7), persistent=False)


def test_trainable_parameters_in_order_tied_once_frozen_left_out() -> None:
    layout = Layout.of(Net())
    assert layout.names == ("scale", "empty", "embed.weight", "norm.weight", "norm.bias", "tied.bias")
    assert layout.shapes == ((), (0, 5), (3, 4), (3,), (3,), (3,))
    assert layout.offsets == (0, 1, 1, 13, 16, 19, 22)
    assert layout.d == 22


def test_float_buffers_apart_integers_and_scratch_stay_home() -> None:
    layout = Layout.of_buffers(Net())
    assert layout is not None
    assert layout.names == ("norm.running_mean", "norm.running_var")
    assert Layout.of_buffers(nn.Linear(2, 2)) is None
    assert Layout.of_buffers(nn.BatchNorm1d(0)) is None, "nothing would travel"


def test_read_write_round_trip_is_exact() -> None:
    torch.manual_seed(0)
    source, target = Net(), Net()
    layout = Layout.of(source)
    layout.write(layout.read(source), target)
    for name, parameter in source.named_parameters():
        if parameter.requires_grad:
            assert torch.equal(parameter, dict(target.named_parameters())[name])
    assert target.tied.weight is target.embed.weight
    buffers = Layout.of_buffers(source)
    assert buffers is not None
    flat = torch.arange(6.0)
    buffers.write(flat, target)
    assert torch.equal(target.norm.running_var, flat[3:])
    assert torch.equal(buffers.read(target), flat)


def test_a_model_of_other_shapes_is_refused_and_stays_as_it_is() -> None:
    """A tensor with one axis more would otherwise take the vector once per row."""
    layout = Layout(("bias", "weight"), ((2,), (3,)))
    model = nn.Linear(3, 2)
    before = model.bias.detach().clone()
    with pytest.raises(LayoutError, match=r"tensor 'weight' has shape \(2, 3\); the layout needs it as \(3,\)"):
        layout.write(torch.ones(5), model)
    assert torch.equal(model.bias, before)
    with pytest.raises(LayoutError, match=r"tensor 'weight' has shape \(2, 3\)"):
        layout.read(model)


def test_split_gives_views_with_a_cohort_axis() -> None:
    layout = Layout(("a", "b"), ((2, 3), (4,)))
    flat = torch.zeros(5, layout.d)
    parts = layout.split(flat)
    assert parts["a"].shape == (5, 2, 3)
    parts["a"][1, 0, 2] = 7
    assert flat[1, 2] == 7
    assert torch.equal(layout.join(parts), flat)


def test_id_depends_on_names_shapes_and_order() -> None:
    base = Layout(("a", "b"), ((2,), (3,)))
    others = [
        Layout(("a", "c"), ((2,), (3,))),
        Layout(("a", "b"), ((3,), (2,))),
        Layout(("b", "a"), ((3,), (2,))),
        Layout(("a", "b"), ((2, 1), (3,))),
        Layout.flat(5),
    ]
    assert len({base.id, *(other.id for other in others)}) == 6
    assert Layout(("a", "b"), ((2,), (3,))).id == base.id
    assert len(base.id) == 8


def test_id_is_stable_across_versions() -> None:
    assert Layout(("a", "b"), ((2,), (3,))).id.hex() == "ba66c604dc67c96c"


def test_half_precision_and_double_models_travel_as_float32() -> None:
    model = nn.Linear(3, 2).bfloat16()
    layout = Layout.of(model)
    flat = layout.read(model)
    assert flat.dtype == torch.float32
    layout.write(flat + 1, model)
    assert model.weight.dtype == torch.bfloat16


def test_refusals_name_the_tensor_and_the_fix() -> None:
    layout = Layout(("w", "b"), ((2, 2), (2,)))
    frozen = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(LayoutError, match="Linear has no trainable parameter"):
        Layout.of(frozen)
    with pytest.raises(LayoutError, match="ParameterList has no trainable parameter"):
        Layout.of(nn.ParameterList([torch.empty(0, 3)]))
    with pytest.raises(LayoutError, match=r"tensor 'b' is missing; the layout needs it as \(2,\)"):
        layout.join({"w": torch.ones(2, 2)})
    with pytest.raises(LayoutError, match=r"tensor 'w' has shape \(3, 2\)"):
        layout.join({"w": torch.ones(3, 2), "b": torch.ones(2)})
    with pytest.raises(LayoutError, match=r"got torch.float32 \(5,\); this layout needs float vectors \[..., 6\]"):
        layout.split(torch.ones(5))
    with pytest.raises(LayoutError, match=r"torch\.int64"):
        layout.check(torch.ones(6, dtype=torch.int64))
    with pytest.raises(LayoutError, match="'a' appears twice"):
        Layout(("a", "a"), ((1,), (1,)))
    with pytest.raises(LayoutError, match="2 names but 1 shapes"):
        Layout(("a", "b"), ((1,),))
    with pytest.raises(LayoutError, match="d=0"):
        Layout.flat(0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_values_are_counted_by_tensor(bad: float) -> None:
    layout = Layout(("w", "b"), ((2, 2), (2,)))
    flat = torch.ones(3, 6)
    flat[0, 1] = flat[2, 3] = flat[1, 5] = bad
    with pytest.raises(UpdateError, match="'w' has 2 of 12 values NaN or infinite, 'b' has 1 of 6"):
        layout.check_finite(flat)


def test_a_sum_that_overflows_is_not_mistaken_for_a_bad_value() -> None:
    layout = Layout.flat(4)
    layout.check_finite(torch.full((4,), 3e38))
    both = torch.tensor([float("inf"), -float("inf"), 0.0, 0.0])
    with pytest.raises(UpdateError, match="2 of 4"):
        layout.check_finite(both)
