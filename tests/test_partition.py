"""Splitting a training set: the contract of every partition, then the mathematics of each."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from fedcams.errors import SpecError
from fedcams.partition import Partition, label_histogram, partition, take_fraction
from fedcams.registry import registered
from together import together

Ints = NDArray[np.int64]

PARTITIONS = [partition(spec) for cls in registered("partition").values() for spec in cls.examples]
everyone = pytest.mark.parametrize("method", PARTITIONS, ids=str)

LABELS = np.arange(600) * 7 % 10  # ten classes of 60, mixed
KEYS = np.arange(600) * 11 % 25 - 5  # 25 groups of 24
LABEL_SETS = st.integers(1, 8).flatmap(
    lambda classes: hnp.arrays(np.int64, st.integers(1, 80), elements=st.integers(0, classes - 1))
)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def sizes(parts: list[Ints]) -> list[int]:
    return [len(part) for part in parts]


@everyone
@pytest.mark.parametrize("clients", [1, 2, 7, 10])
def test_every_example_has_one_owner_and_every_client_an_example(method: Partition, clients: int) -> None:
    parts = method.split(LABELS, clients, rng(), KEYS)
    assert len(parts) == clients
    assert min(sizes(parts)) > 0
    assert all(part.dtype == np.int64 and part.ndim == 1 for part in parts)
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(LABELS)))


@given(data=st.data(), labels=LABEL_SETS, seed=st.integers(0, 2**32))
def test_odd_data_are_split_or_refused(data: st.DataObject, labels: Ints, seed: int) -> None:
    clients = data.draw(st.integers(1, len(labels)))
    keys = data.draw(hnp.arrays(np.int64, len(labels), elements=st.integers(-(2**63), 2**63 - 1)))
    for method in PARTITIONS:
        try:
            parts = method.split(labels, clients, rng(seed), keys)
        except SpecError:
            continue  # too few examples or groups for this method
        assert len(parts) == clients, method
        assert min(sizes(parts)) > 0, method
        assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(labels))), method


@everyone
def test_the_generator_decides(method: Partition) -> None:
    first, again, other = (method.split(LABELS, 10, rng(seed), KEYS) for seed in (1, 1, 2))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert any(not np.array_equal(a, b) for a, b in zip(first, other, strict=True))


@everyone
def test_arguments_are_left_as_they_were(method: Partition) -> None:
    labels, keys = LABELS.copy(), KEYS.copy()
    method.split(labels, 10, rng(), keys)
    assert np.array_equal(labels, LABELS)
    assert np.array_equal(keys, KEYS)


@everyone
def test_any_integer_type_will_do(method: Partition) -> None:
    wide, narrow = (method.split(LABELS.astype(kind), 10, rng(), KEYS) for kind in (np.int64, np.uint8))
    assert all(np.array_equal(a, b) for a, b in zip(wide, narrow, strict=True))


@everyone
def test_the_order_within_a_client_is_random(method: Partition) -> None:
    """A prefix must be a fair sample: over many draws, each sixth of the set comes first equally often."""
    labels, draws = np.repeat([0, 1, 2], 20), 600
    firsts = [int(method.split(labels, 1, rng(seed), labels)[0][0]) for seed in range(draws)]
    counts = np.bincount(np.array(firsts) // 10, minlength=6)
    assert np.abs(counts - draws / 6).max() <= 5 * (draws * 5 / 36) ** 0.5


@everyone
def test_histogram_counts_everything(method: Partition) -> None:
    parts = method.split(LABELS, 10, rng(), KEYS)
    table = label_histogram(parts, LABELS)
    assert table.dtype == np.int64
    assert table.shape == (10, 10)
    assert table.sum(1).tolist() == sizes(parts)
    assert table.sum(0).tolist() == np.bincount(LABELS).tolist()


@everyone
@together(
    ("labels", "clients", "keys", "message"),
    [
        (LABELS, 0, KEYS, "clients=0; give at least 1"),
        (LABELS[:3], 4, KEYS[:3], "clients=4 for 3 examples; give every client at least one"),
        (LABELS[:0], 1, None, "clients=1 for 0 examples"),
        (LABELS, 10, KEYS[:-1], "599 keys for 600 labels; give one for each example"),
        (LABELS, 10, KEYS / 2, r"keys is float64 \[600\]; give one integer for each example"),
        (LABELS / 2, 10, KEYS, r"labels is float64 \[600\]; give one integer for each example"),
        (LABELS.reshape(2, 300), 10, KEYS, r"labels is int64 \[2, 300\]"),
        (LABELS - 1, 10, KEYS, "labels has -1; number the classes from 0"),
    ],
)
def test_bad_data_are_refused(method: Partition, labels: Ints, clients: int, keys: Ints | None, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        method.split(labels, clients, rng(), keys)


@dataclass(frozen=True)
class Stubborn(Partition):
    """Takes labels for owners, to see what the template refuses."""

    name = "stubborn"

    def owners(self, labels: Ints, clients: int, rng: np.random.Generator, keys: Ints | None) -> Ints:
        return labels


@pytest.mark.parametrize(
    ("owners", "message"),
    [
        ([0, 0, 2, 2], "stubborn: client 1 of 3 has no example; lower clients"),
        ([0, 1, 2, 3], r"owners must name a client in \[0, 3\) for each of 4 examples"),
    ],
)
def test_a_bad_method_is_found_out(owners: list[int], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        Stubborn().split(np.array(owners), 3, rng())


# --- histograms and prefixes


def test_histogram_of_given_classes() -> None:
    parts = [np.array([0, 1]), np.array([2])]
    assert label_histogram(parts, np.array([0, 2, 2]), classes=4).tolist() == [[1, 0, 1, 0], [0, 0, 1, 0]]
    assert label_histogram([], LABELS).shape == (0, 10)
    of_sequences = label_histogram(parts, np.array([[0, 2], [2, 2], [1, 0]]))
    assert of_sequences.tolist() == [[1, 0, 3], [1, 1, 0]], "each target of a sequence counts"
    with pytest.raises(SpecError, match="classes=2, but there is a label 2; give at least 3"):
        label_histogram(parts, np.array([0, 2, 2]), classes=2)


@together(
    ("fraction", "size", "taken"),
    [(0.8, 500, 400), (0.8, 4, 3), (0.1, 3, 1), (1, 7, 7), (Fraction(1, 3), 9, 3), (0.29, 100, 29)],
)
def test_a_fraction_is_an_exact_prefix(fraction: float, size: int, taken: int) -> None:
    """0.29 * 100 is 28.999... in floating point."""
    part = rng().permutation(size)
    (prefix,) = take_fraction([part], fraction)
    assert np.array_equal(prefix, part[:taken])


@pytest.mark.parametrize("fraction", [0, -0.1, 1.5])
def test_fractions_outside_are_refused(fraction: float) -> None:
    with pytest.raises(SpecError, match=r"fraction=.*: out of range; allowed: a number in \(0, 1\]"):
        take_fraction([LABELS], fraction)


# --- iid


def test_iid_is_the_papers_split() -> None:
    assert set(sizes(partition("iid").split(np.zeros(50_000, np.int64), 100, rng()))) == {500}


@given(LABEL_SETS, st.data())
def test_iid_sizes_differ_by_at_most_one(labels: Ints, data: st.DataObject) -> None:
    found = sizes(partition("iid").split(labels, data.draw(st.integers(1, len(labels))), rng()))
    assert max(found) - min(found) <= 1


def test_iid_is_blind_to_labels() -> None:
    """Every cell of the histogram is hypergeometric around its mean."""
    table = label_histogram(partition("iid").split(np.arange(10_000) % 10, 10, rng()), np.arange(10_000) % 10)
    assert np.abs(table - 100).max() <= 5 * (1000 * 0.1 * 0.9 * 9000 / 9999) ** 0.5


# --- shards


@pytest.mark.parametrize("per_client", [1, 2, 5])
def test_shards_within_classes_have_one_label_each(per_client: int) -> None:
    labels = rng().permutation(np.arange(10_000) % 10)
    table = label_histogram(partition(f"shards({per_client})").split(labels, 20, rng()), labels)
    assert set(table.sum(1)) == {500}
    assert (table > 0).sum(1).max() <= per_client


@given(LABEL_SETS, st.integers(1, 3), st.data())
def test_shards_meet_few_labels(labels: Ints, per_client: int, data: st.DataObject) -> None:
    """Cuts and class boundaries together bound how many pairs of client and label there are."""
    if len(labels) < per_client:
        return
    clients = data.draw(st.integers(1, len(labels) // per_client))
    parts = partition(f"shards({per_client})").split(labels, clients, rng())
    pairs = int((label_histogram(parts, labels) > 0).sum())
    assert pairs <= clients * per_client + len(np.unique(labels)) - 1
    assert max(sizes(parts)) - min(sizes(parts)) <= per_client


def test_more_shards_than_examples_are_refused() -> None:
    with pytest.raises(SpecError, match="per_client=2 and clients=6 make 12 shards of 10 examples; lower one of them"):
        partition("shards").split(LABELS[:10], 6, rng())


# --- dirichlet


@pytest.mark.parametrize("alpha", [0.03, 0.3, 1, 10])
def test_dirichlet_shares_have_the_right_second_moment(alpha: float) -> None:
    """E Σ p² = (alpha + 1) / (clients·alpha + 1): from 1 (one client has the class) down to 1/clients (all equal)."""
    labels, clients = np.repeat(np.arange(400), 500), 5
    table = label_histogram(partition(f"dirichlet(alpha={alpha})").split(labels, clients, rng()), labels)
    moments = np.square(table / 500).sum(0)
    assert abs(moments.mean() - (alpha + 1) / (clients * alpha + 1)) <= 5 * moments.std() / 20 + 1e-3


def test_dirichlet_goes_from_one_owner_to_equal_shares() -> None:
    labels = np.repeat(np.arange(100), 100)
    lonely, equal = (
        label_histogram(partition(f"dirichlet(alpha={alpha})").split(labels, 4, rng()), labels)
        for alpha in ("1e-9", "1e9")
    )
    assert (lonely.max(0) == 100).all()
    assert np.abs(equal - 25).max() <= 1


def test_dirichlet_favours_no_client_when_it_rounds() -> None:
    """Classes of one example: with cuts rounded down, all of them would go to the last client."""
    n, clients = 10_000, 10
    found = np.array(sizes(partition("dirichlet").split(np.arange(n), clients, rng())))
    assert np.abs(found - n / clients).max() <= 5 * (n * 0.1 * 0.9) ** 0.5


@together("seed", range(20))
def test_dirichlet_honours_the_minimum(seed: int) -> None:
    parts = partition("dirichlet(alpha=0.2, minimum=15)").split(LABELS, 10, rng(seed))
    assert min(sizes(parts)) >= 15


def test_dirichlet_gives_up_with_advice() -> None:
    with pytest.raises(SpecError, match=r"alpha=1e-3 some of 50 .* below minimum=2 .* raise alpha, or lower clients"):
        partition("dirichlet(alpha=1e-3)").split(LABELS, 50, rng())
    with pytest.raises(SpecError, match="minimum=7 for 100 clients needs 700 examples, there are 600; lower minimum"):
        partition("dirichlet(minimum=7)").split(LABELS, 100, rng())


# --- natural


def test_natural_is_one_client_a_group_in_order_of_key() -> None:
    parts = partition("natural").split(LABELS, 25, rng(), KEYS)
    assert [set(KEYS[part]) for part in parts] == [{key} for key in range(-5, 20)]


def test_natural_deals_whole_groups_in_turn() -> None:
    parts = partition("natural").split(LABELS, 10, rng(), KEYS)
    assert [set(KEYS[part]) for part in parts] == [set(range(first, 20, 10)) for first in range(-5, 5)]


def test_natural_needs_groups() -> None:
    with pytest.raises(SpecError, match=r"keys=None, .*; give the group of each example, or use another partition"):
        partition("natural").split(LABELS, 10, rng())
    with pytest.raises(SpecError, match="clients=26, but keys has 25 groups; give at most that many"):
        partition("natural").split(LABELS, 26, rng(), KEYS)
