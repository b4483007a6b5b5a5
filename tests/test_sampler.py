"""Samplers: the contract of every sampler, then the probabilities of each."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, permutations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedcams import simulate
from fedcams.errors import SpecError
from fedcams.registry import registered
from fedcams.sampler import Sampler, sampler
from fedcams.sampler.full import Full
from together import together

SAMPLERS = [sampler(spec) for cls in registered("sampler").values() for spec in cls.examples]
everyone = pytest.mark.parametrize("method", SAMPLERS, ids=str)

CLIENTS = [3 * client - 50 for client in range(40)]
WEIGHTS = [1.0 + client % 7 for client in range(40)]
ROUNDS = 1000


@pytest.fixture(scope="module", autouse=True, params=[ROUNDS, pytest.param(2 * ROUNDS, marks=pytest.mark.slow)])
def _rounds(request: pytest.FixtureRequest) -> Iterator[None]:
    """The slow tests draw twice as many cohorts, so that all bounds on frequencies are closer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "ROUNDS", request.param)
        yield


def inclusion(method: Sampler, population: int, weights: list[float] | None = None) -> NDArray[np.int64]:
    """How often each of the clients 0, 1, ... was drawn in ROUNDS rounds."""
    cohorts = [method.sample(range(population), t, seed=0, weights=weights) for t in range(ROUNDS)]
    return np.bincount(list(chain(*cohorts)), minlength=population)


def spread(p: NDArray[np.float64] | float) -> NDArray[np.float64]:
    """The standard deviation of a count over ROUNDS rounds."""
    p = np.asarray(p)
    return np.sqrt(ROUNDS * p * (1 - p))


@everyone
@together("round", [0, 1, 500, 10**9])
def test_a_cohort_is_distinct_clients_in_ascending_order(method: Sampler, round: int) -> None:
    cohort = method.sample(CLIENTS, round, seed=7, weights=WEIGHTS)
    assert cohort == sorted(set(cohort))
    assert set(cohort) <= set(CLIENTS)
    assert all(type(client) is int for client in cohort)


@together("drawn", [[1, 1], [0, 5], [0, -1], [0.0, 1.0], [True, False]])
def test_a_draw_of_other_places_is_refused(drawn: list[float]) -> None:
    class Wrong(Full):
        def draw(self, *args: object) -> NDArray[np.int64]:
            return np.array(drawn)

    with pytest.raises(SpecError, match=r"full: draw returns .*; return distinct integers from 0 to 4"):
        Wrong().sample(range(5), 1, seed=0)


@everyone
@given(order=st.permutations(range(40)), seed=st.integers(-(2**63), 2**63))
def test_the_order_of_the_clients_does_not_matter(method: Sampler, order: list[int], seed: int) -> None:
    clients, weights = [CLIENTS[i] for i in order], [WEIGHTS[i] for i in order]
    assert method.sample(clients, 3, seed, weights) == method.sample(CLIENTS, 3, seed, WEIGHTS)


@everyone
def test_a_restarted_run_goes_on_as_if_it_had_not_stopped(method: Sampler) -> None:
    """Asked for in any order, after any others, and by another instance: the same cohorts."""
    whole = [method.sample(CLIENTS, t, seed=1, weights=WEIGHTS) for t in range(30)]
    fresh = sampler(str(method))
    assert [fresh.sample(CLIENTS, t, seed=1, weights=WEIGHTS) for t in reversed(range(20, 30))] == whole[:19:-1]


@everyone
def test_rounds_and_seeds_differ_unless_everybody_takes_part(method: Sampler) -> None:
    if method.expected(len(CLIENTS)) == len(CLIENTS):
        assert method.sample(CLIENTS, 1, seed=1, weights=WEIGHTS) == CLIENTS
        return
    rounds = {tuple(method.sample(CLIENTS, t, seed=1, weights=WEIGHTS)) for t in range(20)}
    seeds = {tuple(method.sample(CLIENTS, 1, seed, weights=WEIGHTS)) for seed in range(20)}
    assert min(len(rounds), len(seeds)) > 10


@everyone
def test_the_mean_size_is_the_expected_one(method: Sampler) -> None:
    sizes = np.array([len(method.sample(CLIENTS, t, seed=2, weights=WEIGHTS)) for t in range(ROUNDS)])
    assert abs(sizes.mean() - method.expected(len(CLIENTS))) <= 5 * sizes.std() / ROUNDS**0.5


@everyone
def test_ids_may_be_larger_than_any_machine_integer(method: Sampler) -> None:
    clients = [2**64 + client for client in CLIENTS]
    expected = [2**64 + client for client in method.sample(CLIENTS, 0, seed=0, weights=WEIGHTS)]
    assert method.sample(clients, 0, seed=0, weights=WEIGHTS) == expected


@everyone
def test_weights_stay_with_their_clients_if_ids_are_not_all_machine_integers(method: Sampler) -> None:
    """NumPy makes floats of such a mixture, which cannot tell neighbours apart."""
    clients = [0, *(2**63 + client for client in reversed(range(1, len(WEIGHTS))))]
    order = [0, *reversed(range(1, len(WEIGHTS)))]
    expected = method.sample(order, 0, seed=0, weights=WEIGHTS)
    assert method.sample(clients, 0, seed=0, weights=WEIGHTS) == [c and 2**63 + c for c in expected]


@everyone
def test_clients_and_weights_may_be_arrays(method: Sampler) -> None:
    cohort = method.sample(np.array(CLIENTS), 0, seed=0, weights=np.array(WEIGHTS))  # type: ignore[arg-type]
    assert cohort == method.sample(CLIENTS, 0, seed=0, weights=WEIGHTS)
    assert all(type(client) is int for client in cohort)


@everyone
@together(
    ("clients", "weights", "message"),
    [
        ([], None, "clients is empty; give at least one client"),
        ([*range(40), 5], None, "clients has 5 2 times; give each client once"),
        (range(40), WEIGHTS[1:], "39 weights for 40 clients; give one for each client"),
    ],
)
def test_bad_populations_are_refused(
    method: Sampler, clients: list[int], weights: list[float] | None, message: str
) -> None:
    with pytest.raises(SpecError, match=f"{method.name}: {message}"):
        method.sample(clients, 0, 0, weights)


@everyone
def test_the_largest_cohort_is_no_smaller_than_any(method: Sampler) -> None:
    sizes = [len(method.sample(CLIENTS, t, seed=3, weights=WEIGHTS)) for t in range(200)]
    assert max(sizes) <= method.largest(len(CLIENTS)) <= len(CLIENTS)
    assert method.largest(len(CLIENTS)) == (len(CLIENTS) if method.size_varies else sizes[0])


@together(("spec", "size"), [("fraction(part=0.25)", 2), ("fraction(part=0.29)", 2), ("fraction(part=0.05)", 1)])
def test_a_fraction_of_ten_clients_is_rounded_down_but_not_to_none(spec: str, size: int) -> None:
    assert len(sampler(spec).sample(range(10), 1, seed=1)) == size == sampler(spec).expected(10)


def test_a_fraction_is_exact() -> None:
    """As a float, 0.29 times 100 is just below 29."""
    assert len(sampler("fraction(part=0.29)").sample(range(100), 1, seed=1)) == 29


# --- uniform


@pytest.mark.parametrize(("n", "population"), [(1, 5), (10, 100), (5, 5)])
def test_uniform_includes_everybody_with_probability_n_over_m(n: int, population: int) -> None:
    counts = inclusion(sampler(f"uniform({n})"), population)
    assert counts.sum() == n * ROUNDS
    assert np.abs(counts - ROUNDS * n / population).max() <= 5 * spread(n / population)


def test_uniform_makes_all_pairs_equally_likely() -> None:
    pairs = [tuple(sampler("uniform(2)").sample(range(4), t, seed=3)) for t in range(ROUNDS)]
    counts = np.unique(pairs, axis=0, return_counts=True)[1]
    assert len(counts) == 6
    assert np.abs(counts - ROUNDS / 6).max() <= 5 * spread(1 / 6)


WEIGHING = [name for name, cls in registered("sampler").items() if cls.needs_weights]  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["uniform", *WEIGHING])
def test_more_than_there_are_is_refused(name: str) -> None:
    method = sampler(f"{name}(n=11)")
    with pytest.raises(SpecError, match=f"{name}: n=11 of only 10 clients; give n=10 or less"):
        method.sample(range(10), 0, 0, [1.0] * 10)
    with pytest.raises(SpecError, match=f"{name}: n=11 of only 10 clients"):
        method.expected(10)


# --- weighted


def test_weighted_draws_one_in_proportion() -> None:
    weights = [1.0, 2, 3, 4, 90]
    p = np.array(weights) / sum(weights)
    assert (np.abs(inclusion(sampler("weighted(1)"), 5, weights) - ROUNDS * p) <= 5 * spread(p)).all()


def test_weighted_draws_the_next_in_proportion_among_those_left() -> None:
    """Inclusion probabilities for n = 2 by enumeration of all ordered pairs."""
    weights = [1.0, 2, 3, 4]
    p = np.zeros(4)
    for first, second in permutations(range(4), 2):
        p[[first, second]] += weights[first] / 10 * weights[second] / (10 - weights[first])
    assert (np.abs(inclusion(sampler("weighted(2)"), 4, weights) - ROUNDS * p) <= 5 * spread(p)).all()


def test_weighted_does_not_include_in_proportion_as_its_page_says() -> None:
    """The numbers in its docstring, by enumeration: not the 0.2, 0.8 and 1 that the weights ask for."""
    weights = [0.2, 0.8, 1.0]
    p = np.zeros(3)
    for first, second in permutations(range(3), 2):
        p[[first, second]] += weights[first] / 2 * weights[second] / (2 - weights[first])
    np.testing.assert_allclose(p, [0.27, 0.84, 0.89], atol=0.005)
    assert (np.abs(inclusion(sampler("weighted(2)"), 3, weights) - ROUNDS * p) <= 5 * spread(p)).all()


@pytest.mark.parametrize("name", WEIGHING)
def test_only_the_ratio_of_weights_matters(name: str) -> None:
    """Also at the ends of float64, where sums of weights would overflow or vanish."""
    cohorts = [
        sampler(f"{name}(5)").sample(CLIENTS, 1, 1, [w * scale for w in WEIGHTS])
        for scale in (1, 2.0**-1040, 2.0**1020)
    ]
    assert cohorts[0] == cohorts[1] == cohorts[2]


@together("name", WEIGHING)
@together("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_bad_weights_are_refused(name: str, bad: float) -> None:
    with pytest.raises(SpecError, match=f"{name}: weights has {bad}; give positive finite numbers"):
        sampler(f"{name}(1)").sample(range(3), 0, 0, [1.0, bad, 1.0])


@pytest.mark.parametrize("name", WEIGHING)
def test_weights_are_required(name: str) -> None:
    with pytest.raises(SpecError, match=f"{name}: weights=None; give one for each client, such as its number of"):
        sampler(f"{name}(1)").sample(range(3), 0, 0)


# --- systematic


@pytest.mark.parametrize(
    ("n", "weights", "p"),
    [
        (2, [0.2, 0.8, 1.0], [0.2, 0.8, 1]),
        (2, [1.0, 2, 3, 4], [0.2, 0.4, 0.6, 0.8]),
        (3, [1.0, 2, 3, 4, 90], [0.2, 0.4, 0.6, 0.8, 1]),
        (3, [1.0, 1, 50, 100], [0.5, 0.5, 1, 1]),
        (3, [1.0, 7, 2], [1, 1, 1]),
    ],
)
def test_systematic_includes_in_proportion_to_the_weights(n: int, weights: list[float], p: list[float]) -> None:
    counts = inclusion(sampler(f"systematic({n})"), len(weights), weights)
    assert counts.sum() == n * ROUNDS
    assert (np.abs(counts - ROUNDS * np.array(p)) <= 5 * spread(np.array(p))).all()


@pytest.mark.parametrize("weights", [[1.0, 2, 3, 4], [1.0, 2, 3, 4, 90], [5.0, 5, 1, 100, 60]])
def test_systematic_means_are_unbiased(weights: list[float]) -> None:
    """The mean of a cohort, with its weights, estimates the mean over all clients weighted by examples."""
    method, values = sampler("systematic(3)"), np.arange(len(weights)) ** 2.0
    known = dict(enumerate(weights))
    means = []
    for t in range(ROUNDS):
        cohort = method.sample(range(len(weights)), t, seed=4, weights=weights)
        found = method.mean_weights(cohort, t, known)
        assert sum(found) == pytest.approx(sum(weights))
        means.append(np.average(values[cohort], weights=found))
    truth = np.average(values, weights=weights)
    assert abs(np.mean(means) - truth) <= 5 * np.std(means) / ROUNDS**0.5


def test_the_samplers_weights_reach_the_mean() -> None:
    """Clients that all take part count by their examples, as with `weighting=examples`."""
    draw = torch.Generator().manual_seed(0)
    clients = [(torch.randn(size, 3, generator=draw), torch.randint(2, (size,), generator=draw)) for size in (2, 9, 40)]

    def trained(weighting: str) -> list[torch.Tensor]:
        model = torch.nn.Linear(3, 2)
        torch.nn.init.zeros_(model.weight)
        history = simulate(
            model, clients, rounds=3, cohort="systematic(n=3)", local="sgd(epochs=1)", weighting=weighting
        )
        return [parameter.detach() for parameter in history.run().model.parameters()]

    torch.manual_seed(0)
    by_sampler = trained("sampler")
    torch.manual_seed(0)
    by_examples = trained("examples")
    torch.manual_seed(0)
    uniform = trained("uniform")
    for mine, theirs in zip(by_sampler, by_examples, strict=True):
        torch.testing.assert_close(mine, theirs)
    assert not torch.allclose(by_sampler[0], uniform[0])


def test_systematic_draws_any_pair_of_clients_together() -> None:
    pairs = {tuple(sampler("systematic(2)").sample(range(5), t, 1, [1.0] * 5)) for t in range(200)}
    assert len(pairs) == 10


# --- bernoulli


@pytest.mark.parametrize("p", [0.05, 0.5, 1])
def test_bernoulli_includes_everybody_with_probability_p(p: float) -> None:
    assert np.abs(inclusion(sampler(f"bernoulli({p})"), 30) - ROUNDS * p).max() <= 5 * spread(p)


def test_bernoulli_clients_are_independent() -> None:
    """The size of a cohort is binomial, in its variance and in how often it is empty."""
    sizes = np.array([len(sampler("bernoulli(1/4)").sample(range(8), t, seed=5)) for t in range(ROUNDS)])
    empty = 0.75**8
    assert abs(np.square(sizes - 2).mean() - 1.5) <= 5 * np.square(sizes - 2).std() / ROUNDS**0.5
    assert abs((sizes == 0).sum() - ROUNDS * empty) <= 5 * spread(empty)
