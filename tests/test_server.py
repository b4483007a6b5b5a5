"""Server optimizers: equal to the paper's formulas in float64, in one pass over memory, resumable bit for bit."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import oracle
from fedcams.errors import LayoutError, SpecError
from fedcams.optimizers import ServerOptimizer, State, server
from fedcams.optimizers.base import PIECE
from fedcams.registry import params, registered
from together import together

NAMES = list(registered("server"))
ELEMENTWISE = [
    name for name, cls in registered("server").items() if issubclass(cls, ServerOptimizer) and cls.elementwise
]
CHANGES: list[dict[str, Any]] = [
    {},
    {"lr": 0.03, "momentum": 0},
    {"beta1": 0, "beta2": 0.5, "momentum": 0.5},
    {"beta1": 0.5, "beta2": 0.999, "eps": 1e-8},
    {"beta1": 0.99, "eps": 1, "momentum": 0.99},
]
PIECES = PIECE["cpu"]


def specs() -> Iterator[str]:
    """Every optimizer with every change that concerns it, with and without bias correction."""
    for cls in registered("server").values():
        for change in CHANGES:
            for bias_correction in (False, True):
                wanted = {**change, "bias_correction": bias_correction}
                yield str(cls(**{key: value for key, value in wanted.items() if key in params(cls)}))


SPECS = sorted(set(specs()))
OURS = [spec for spec in SPECS if type(server(spec)).__module__.startswith("fedcams.")]
"""Those that the oracle must know; it does not know those that `pytest -p MODULE` brings."""


def updates(d: int, steps: int, seed: int = 0) -> Iterator[Tensor]:
    """Random float32 updates over five orders of magnitude, with coordinates that never or seldom move."""
    return (update.clone() for update in _updates(d, steps, seed))


@functools.cache
def _updates(d: int, steps: int, seed: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    scale, drift = 10 ** (4 * torch.rand(d, generator=g) - 4), torch.randn(d, generator=g)
    scale[::10] = 0
    made = []
    for _ in range(steps):
        seldom = (torch.rand(d, generator=g) < 0.9) | (torch.arange(d) % 10 > 3)
        made.append((drift + torch.randn(d, generator=g)) * scale * seldom)
    return made


def start(optimizer: ServerOptimizer, d: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, State]:
    x = torch.randn(d, generator=torch.Generator().manual_seed(1)).to(dtype)
    return x, optimizer.init(x)


def run(optimizer: ServerOptimizer, x: Tensor, state: State, deltas: Iterator[Tensor]) -> tuple[Tensor, State]:
    for delta in deltas:
        x, state = optimizer.step_(state, x, delta.to(x.device, x.dtype))
    return x, state


def run_oracle(optimizer: ServerOptimizer, x: Tensor, deltas: Iterator[Tensor]) -> tuple[np.ndarray, oracle.Memory]:
    values = {key: getattr(optimizer, key) for key in params(type(optimizer))}
    floats = {key: value if isinstance(value, bool) else float(value) for key, value in values.items()}
    step = functools.partial(getattr(oracle, optimizer.name), **floats)
    memory, x64 = oracle.Memory(), x.double().numpy().copy()
    for delta in deltas:
        x64 = step(memory, x64, delta.double().numpy())
    return x64, memory


def distance(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def bits(x: Tensor, state: State) -> list[Any]:
    """Everything, in a form whose equality is equality of bits.

    Only the sign of a zero is left out (-0.0 + 0.0 is 0.0): where beta1 <= 0.5, torch's `lerp_` of -0.0 gives 0.0 or
    -0.0, depending on where a thread's share ends.
    """
    return [(v + 0.0).numpy().tobytes() if isinstance(v, Tensor) else v for v in (x, *state._asdict().values())]


# -- the formulas ------------------------------------------------------------------------------------------------------


@together(("dtype", "bound"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
@together("spec", OURS)
def test_equals_the_float64_oracle_over_200_steps(spec: str, dtype: torch.dtype, bound: float) -> None:
    optimizer = server(spec)
    x, state = start(optimizer, 1000, dtype)
    x64, memory = run_oracle(optimizer, x, updates(1000, 200))
    x, state = run(optimizer, x, state, updates(1000, 200))
    assert distance(x.numpy(), x64) <= bound
    assert state.t == memory.t == 200
    for name, vector in state._asdict().items():
        if name != "t":
            assert distance(vector.numpy(), getattr(memory, name)) <= 2 * bound


@together("name", sorted({server(spec).name for spec in OURS}))
def test_defaults_are_the_oracles(name: str) -> None:
    x, state = start(server(name), 50)
    x64 = x.double().numpy().copy()
    memory = oracle.Memory()
    for delta in updates(50, 3):
        x64 = getattr(oracle, name)(memory, x64, delta.double().numpy())
    assert distance(run(server(name), x, state, updates(50, 3))[0].numpy(), x64) < 1e-6


@together(
    ("spec", "twin"),
    [
        ("fedavg(lr=0.1)", functools.partial(torch.optim.SGD, lr=0.1)),
        ("fedavgm(lr=0.1, momentum=0.8)", functools.partial(torch.optim.SGD, lr=0.1, momentum=0.8)),
        ("fedadagrad(lr=0.1, eps=0.01)", functools.partial(torch.optim.Adagrad, lr=0.1, eps=0.01)),
        (
            "fedadam(lr=0.1, beta1=0.8, beta2=0.95, eps=0.01, bias_correction=true)",
            functools.partial(torch.optim.Adam, lr=0.1, betas=(0.8, 0.95), eps=0.01),
        ),
        (
            "fedamsgrad(lr=0.1, beta1=0.8, beta2=0.95, eps=0.01, bias_correction=true)",
            functools.partial(torch.optim.Adam, lr=0.1, betas=(0.8, 0.95), eps=0.01, amsgrad=True),
        ),
    ],
)
def test_equals_torch_optim_on_the_negative_update(spec: str, twin: Any) -> None:
    optimizer = server(spec)
    x, state = start(optimizer, 300, torch.float64)
    parameter = torch.nn.Parameter(x.clone())
    reference = twin([parameter])
    for delta in updates(300, 100):
        parameter.grad = -delta.double()
        reference.step()
    x, _ = run(optimizer, x, state, updates(300, 100))
    assert distance(x.numpy(), parameter.detach().numpy()) < 1e-13


@together("spec", [spec for spec in OURS if server(spec).twin() is not None])
def test_on_its_floor_an_adaptive_server_is_its_twin(spec: str) -> None:
    """With updates that leave no coordinate off the floor; float64, so that only the twin's nine digits count."""
    optimizer, twin = server(spec), server(spec).twin()
    assert twin is not None
    x, state = start(optimizer, 200, torch.float64)
    y, other = x.clone(), twin.at(1, 60).init(x)
    for t, delta in enumerate(updates(200, 60), start=1):
        small = 1e-9 * float(getattr(optimizer, "eps", 1)) * delta.double()
        x, state = optimizer.step_(state, x, small)
        y, other = twin.at(t, 60).step_(other, y, small)
        off = optimizer.off_floor(state)
        assert off is not None
        assert not off.any()
    start_x, _ = start(optimizer, 200, torch.float64)
    assert distance((x - start_x).numpy(), (y - start_x).numpy()) < 1e-6


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("spec", ["fedadagrad", "fedadam(bias_correction=true)", "fedamsgrad(bias_correction=true)"])
def test_a_root_above_eps_is_off_the_floor(spec: str, steps: int) -> None:
    """The root of v as step t uses it: of the mean of Δ² if it is corrected, of their sum with FedAdagrad."""
    optimizer = server(spec)
    root = 0.1 / math.sqrt(steps) if spec == "fedadagrad" else 0.1  # of updates that are all the same
    x, state = start(optimizer, 4)
    for _ in range(steps):
        x, state = optimizer.step_(state, x, root * torch.tensor([0.99, 1.01, -0.99, -1.01]))
    off = optimizer.off_floor(state)
    assert off is not None
    assert off.tolist() == [False, True, False, True]


@together("spec", [spec for spec in OURS if server(spec).twin() is not None])
def test_large_updates_leave_the_floor(spec: str) -> None:
    optimizer = server(spec)
    x, state = start(optimizer, 4)
    x, state = optimizer.step_(state, x, torch.tensor([1e3, 0, 1e-20, 1e4]))
    off = optimizer.off_floor(state)
    assert off is not None
    assert off.tolist() == [True, False, False, True]


def test_only_servers_with_a_floor_and_without_schedules_have_a_twin() -> None:
    assert server("fedavg").twin() is server("fedavgm").twin() is server("fedams(lr=cosine(1, 0))").twin() is None
    assert str(server("fedams").twin(digits=3)) == "fedavgm(lr=3.16)"
    assert str(server("fedyogi(bias_correction=true)").twin()) == "fedavgm(lr=bias_correction(level=1))"


def test_yogis_bias_correction_is_the_published_one() -> None:
    """`lr √(1-β2^t)/(1-β1^t) m/(√v + ε)`, ε as it is: with a constant Δ and large ε, lr √(1-β2^t) Δ/ε."""
    x, state = start(server("fedyogi"), 1, torch.float64)
    delta, lr, eps = torch.tensor([1e-6], dtype=torch.float64), 0.5, 0.1
    optimizer = server(f"fedyogi(lr={lr}, eps={eps}, bias_correction=true)")
    for t in range(1, 101):
        before = float(x)
        x, state = optimizer.step_(state, x, delta)
        expected = lr * math.sqrt(1 - 0.99**t) * 1e-6 / eps
        assert float(x) - before == pytest.approx(expected, rel=1e-4)


@together("spec", [spec for spec in SPECS if "vhat" in server(spec).state_type._fields])
def test_the_largest_second_moment_never_falls(spec: str) -> None:
    optimizer = server(spec)
    x, state = start(optimizer, 1000)
    before = torch.zeros(1000)
    for delta in updates(1000, 50):
        x, state = optimizer.step_(state, x, delta)
        vhat, v = state._asdict()["vhat"], state._asdict()["v"]
        assert bool((vhat >= before).all())
        assert bool((vhat >= v).all())
        before = vhat.clone()


@together("eps", [1e-8, 1e-3, 0.1])
def test_fedams_keeps_its_largest_second_moment_above_eps(eps: float) -> None:
    optimizer = server(f"fedams(eps={eps})")
    _, state = run(optimizer, *start(optimizer, 1000), updates(1000, 5))
    vhat = state._asdict()["vhat"]
    assert vhat.min() == torch.tensor(eps)  # coordinates that never moved stay on the floor
    assert vhat.max() > eps


@together("spec", SPECS)
def test_a_coordinate_without_updates_does_not_move(spec: str) -> None:
    optimizer = server(spec)
    x, state = start(optimizer, 100)
    before = x.clone()
    x, _ = run(optimizer, x, state, updates(100, 10))
    assert torch.equal(x[::10], before[::10])
    assert bool((x[9::10] != before[9::10]).all())


# -- one pass over memory ----------------------------------------------------------------------------------------------


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets the number of threads until the test ends."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@together("d", [1, PIECES - 1, PIECES, PIECES + 1, 2 * PIECES + 37])
@together("name", ELEMENTWISE)
def test_pieces_and_threads_leave_no_seam(name: str, d: int, threads: Callable[[int], None]) -> None:
    optimizer = server(name)
    deltas = list(updates(d, 2))
    x, state = start(optimizer, d)
    whole, (_, *vectors) = x.clone(), optimizer.init(x)._asdict().values()
    threads(1)
    for t, delta in enumerate(deltas, start=1):
        optimizer.update_(t, whole, delta, *vectors)
    threads(3)
    assert bits(*run(optimizer, x, state, iter(deltas))) == bits(whole, optimizer.state_type(2, *vectors))


class Watch(TorchDispatchMode):
    """Notes the largest tensor that any operation returns, and the operations."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.seen.add(str(func))
        self.largest = max([self.largest, *(leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, Tensor))])
        return out


class Total(NamedTuple):
    t: int
    v: Tensor


@dataclass(frozen=True)
class WholeNorm(ServerOptimizer):
    """`v += ‖Δ‖²`, `x += Δ/√v`."""

    state_type = Total
    elementwise = False

    def update_(self, t: int, x: Tensor, delta: Tensor, v: Tensor) -> None:
        v.add_(delta.square().sum())
        x.add_(delta / v.sqrt())


def test_a_formula_that_needs_whole_vectors_gets_them() -> None:
    optimizer = WholeNorm()
    x, state = start(optimizer, PIECES + 7)
    _, state = optimizer.step_(state, x, torch.ones(PIECES + 7))
    assert bool((state._asdict()["v"] == PIECES + 7).all())


@together("name", ELEMENTWISE)
def test_no_operation_makes_a_tensor_larger_than_a_piece(name: str) -> None:
    optimizer = server(name)
    d = 3 * PIECES + 5
    x, state = start(optimizer, d)
    delta = next(updates(d, 1))
    with Watch() as step:
        optimizer.step_(state, x, delta)
    with Watch() as unpieced:  # the same formula without pieces, so that we know that the watch sees it
        optimizer.update_(1, x, delta, *list(state._asdict().values())[1:])
    assert step.largest == PIECES
    assert unpieced.largest == d
    assert step.seen > unpieced.seen


@together("name", NAMES)
def test_step_overwrites_the_model_and_the_state_and_only_reads_the_update(name: str) -> None:
    optimizer = server(name)
    x, state = start(optimizer, 1000)
    delta = next(updates(1000, 1))
    before = delta.clone()
    new_x, new_state = optimizer.step_(state, x, delta)
    assert new_x is x
    for old, new in zip(list(state._asdict().values())[1:], list(new_state._asdict().values())[1:], strict=True):
        assert new is old
    assert type(new_state) is type(state)
    assert (state.t, new_state.t) == (0, 1)
    assert torch.equal(delta, before)


def test_parameters_may_require_grad() -> None:
    x = torch.nn.Parameter(torch.ones(4))
    optimizer = server("fedams")
    state = optimizer.init(x)
    new_x, new_state = optimizer.step_(state, x, torch.ones(4, requires_grad=True))
    assert new_x.is_leaf
    assert not any(v.requires_grad for v in new_state._asdict().values() if isinstance(v, Tensor))


@together("spec", SPECS)
def test_a_restored_state_continues_bit_for_bit(spec: str) -> None:
    optimizer = server(spec)
    deltas = list(updates(100, 20))
    x, state = run(optimizer, *start(optimizer, 100), iter(deltas[:10]))
    saved = {key: v.clone() if isinstance(v, Tensor) else v for key, v in state._asdict().items()}
    copy = x.clone()
    through = bits(*run(optimizer, x, state, iter(deltas[10:])))
    assert bits(*run(server(str(optimizer)), copy, optimizer.state_type(**saved), iter(deltas[10:]))) == through


# -- what is refused ---------------------------------------------------------------------------------------------------


@together("name", NAMES)
def test_vectors_that_do_not_belong_together_are_refused(name: str) -> None:
    optimizer = server(name)
    x, state = start(optimizer, 10)
    with pytest.raises(LayoutError, match=r"delta is torch.float32 \[11\] on cpu but x is torch.float32 \[10\] on cpu"):
        optimizer.step_(state, x, torch.zeros(11))
    with pytest.raises(
        LayoutError, match=r"delta is torch.float64 \[10\] .* x is torch.float32 \[10\].*; give delta like x"
    ):
        optimizer.step_(state, x, torch.zeros(10, dtype=torch.float64))
    with pytest.raises(LayoutError, match=r"delta is torch.float32 \[10\] on meta but x is .* on cpu"):
        optimizer.step_(state, x, torch.zeros(10, device="meta"))
    for field in optimizer.state_type._fields[1:]:
        wrong = optimizer.state_type(**{**state._asdict(), field: torch.zeros(9)})
        with pytest.raises(LayoutError, match=rf"{field} is torch.float32 \[9\] on cpu but x is torch.float32 \[10\]"):
            optimizer.step_(wrong, x, torch.zeros(10))
    assert torch.equal(x, start(optimizer, 10)[0])  # refused before anything was touched


@together("x", [torch.zeros(2, 3), torch.zeros(3, dtype=torch.int64), torch.zeros(3).half()])
def test_only_float_vectors_have_a_state(x: Tensor) -> None:
    with pytest.raises(LayoutError, match=r"x is torch\.\w+ \[.*\] on cpu; give a vector \[d\] of float32 or float64"):
        server("fedavg").init(x)


def test_the_state_of_another_optimizer_is_refused() -> None:
    x, state = start(server("fedadam"), 3)
    with pytest.raises(LayoutError, match="the state holds t, m, v; fedams needs t, m, v, vhat: start with its init"):
        server("fedams").step_(state, x, torch.zeros(3))


BAD = {
    "lr": ["0", "-1"],
    "momentum": ["1", "-0.1"],
    "beta1": ["1", "-0.1"],
    "beta2": ["1", "1.5"],
    "eps": ["0", "-1e-3"],
    "bias_correction": ["1", "yes"],
}


@together("name", NAMES)
def test_hyperparameters_out_of_range_are_refused(name: str) -> None:
    cls = registered("server")[name]
    for key, (param, _) in params(cls).items():
        assert param.doc
        for value in BAD[key] if cls.__module__.startswith("fedcams.") else BAD.get(key, []):
            with pytest.raises(SpecError, match=rf"{name}: {key}={value}: .*allowed: "):
                server(f"{name}({key}={value})")
        for not_finite in (float("nan"), float("inf")):
            with pytest.raises(SpecError, match=f"{name}: {key}"):
                cls(**{key: not_finite})


@together("name", sorted({name for spec in OURS if "eps" in params(type(server(name := spec.split("(")[0])))}))
def test_an_eps_that_float32_may_lose_is_refused(name: str) -> None:
    with pytest.raises(SpecError, match=f"{name}: eps=1e-40: .*allowed: "):
        server(f"{name}(eps=1e-40)")


@together("spec", SPECS)
def test_the_spec_string_is_canonical(spec: str) -> None:
    optimizer = server(spec)
    assert str(optimizer) == spec
    assert server(str(optimizer)) == optimizer
    assert server(optimizer) is optimizer


@together("name", NAMES)
def test_documented(name: str) -> None:
    cls = registered("server")[name]
    assert issubclass(cls, ServerOptimizer)
    assert ("x += lr" if cls.__module__.startswith("fedcams.") else "x += ") in (cls.__doc__ or "")
    assert cls.reference


# -- the oracle itself -------------------------------------------------------------------------------------------------


def test_the_oracle_by_hand() -> None:
    s = oracle.Memory()
    x = oracle.fedams(s, np.zeros(2), np.array([3.0, 0.0]), lr=2.0, beta1=0.5, beta2=0.75, eps=1.0)
    assert (s.m.tolist(), s.v.tolist(), s.vhat.tolist()) == ([1.5, 0.0], [2.25, 0.0], [2.25, 1.0])
    assert x.tolist() == [2.0, 0.0]
    x = oracle.fedams(s, x, np.zeros(2), lr=2.0, beta1=0.5, beta2=0.75, eps=1.0)
    assert x.tolist() == [3.0, 0.0]  # m halves, v̂ stays
    assert oracle.scaled_sign(np.array([3.0, -0.0, -1.0, 0.0])).tolist() == [1.0, 1.0, -1.0, 1.0]
    assert oracle.topk(np.array([1.0, -2.0, 2.0, 2.0]), 0.5).tolist() == [0.0, -2.0, 2.0, 0.0]
    assert oracle.topk(np.array([1.0, -2.0, 2.0, 2.0]), "1/64").tolist() == [0.0, -2.0, 0.0, 0.0]
    h = np.array([1.0, -4.0, 2.0, 3.0, 0.0, -0.0])
    assert oracle.ternary(h, 0.5).tolist() == [0.0, -3.0, 3.0, 3.0, 0.0, 0.0]
    assert oracle.ternary(h, 0.5, [2, 4]).tolist() == [0.0, -4.0, 2.5, 2.5, 0.0, 0.0]
    assert oracle.ternary(h, 0.5, [2, 4], "tensor").tolist() == [0.0, -4.0, 2.5, 2.5, 0.0, 0.0]
    assert oracle.ternary(h, 0.5, [4, 2], "tensor", "global").tolist() == [0.0, -7 / 3, 0.0, 7 / 3, 7 / 3, 0.0]


def test_the_oracle_keeps_the_error_of_a_client_that_is_away() -> None:
    given = {(1, 0): [4.0, 1.0], (1, 1): [1.0, 2.0], (2, 1): [0.0, 0.0], (3, 0): [0.0, 0.5]}
    xs = oracle.fedcams(
        np.zeros(2),
        lambda t, i, x: np.array(given[t, i]),
        cohorts=[[1, 0], [1], [0]],
        server_step=oracle.fedavg,
        compress=functools.partial(oracle.topk, ratio=0.5),
    )
    assert [x.tolist() for x in xs] == [[2.0, 1.0], [3.0, 1.0], [3.0, 2.5]]  # client 0 sends 1 + 0.5 in round 3


@together("compress", [None, oracle.scaled_sign, functools.partial(oracle.topk, ratio=1 / 8)])
def test_the_oracle_solves_a_quadratic(compress: oracle.Compress | None) -> None:
    grad, rng = oracle.quadratic(clients=10, d=16), np.random.default_rng(0)
    cohorts = [rng.choice(10, size=5, replace=False) for _ in range(300)]
    step = functools.partial(oracle.fedams, lr=0.05)
    x = oracle.run(np.zeros(16), grad, cohorts, local_steps=5, local_lr=0.05, server_step=step, compress=compress)[-1]

    def slope(at: np.ndarray) -> float:
        return float(np.linalg.norm(np.mean([grad(i, at) for i in range(10)], axis=0)))

    assert slope(x) < slope(np.zeros(16)) / 5


# -- on the GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@together("spec", SPECS)
def test_cuda_agrees_with_the_cpu(spec: str) -> None:
    optimizer = server(spec)
    x, _ = start(optimizer, 10_000)
    on_gpu = x.cuda()
    gpu, state = run(optimizer, on_gpu, optimizer.init(on_gpu), updates(10_000, 100))
    cpu, _ = run(optimizer, x, optimizer.init(x), updates(10_000, 100))
    assert all(v.device.type == "cuda" for v in state._asdict().values() if isinstance(v, Tensor))
    assert distance(gpu.cpu().numpy(), cpu.numpy()) <= 1e-6


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@together("spec", OURS)
def test_the_fused_kernel_is_the_formula_and_allocates_nothing(spec: str) -> None:
    """One step from a common state, by the kernel and by `update` on the same device."""
    optimizer = server(spec)
    d = 1_000_003
    x = torch.randn(d, device="cuda")
    state = optimizer.init(x)
    for _ in range(2):
        x, state = optimizer.step_(state, x, torch.randn(d, device="cuda"))
    delta = torch.randn(d, device="cuda")
    vectors = {name: value.clone() for name, value in state._asdict().items() if name != "t"}
    expected = x.clone()
    optimizer.update_(state.t + 1, expected, delta, *vectors.values())
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    x, state = optimizer.step_(state, x, delta)
    assert torch.cuda.max_memory_allocated() - before < 4 * d
    for ours, theirs in [(x, expected), *((state._asdict()[name], value) for name, value in vectors.items())]:
        assert distance(ours.cpu().numpy(), theirs.cpu().numpy()) <= 1e-6
