"""The kernels, each against a slow version that reads like its definition."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from fedcams.bits import packing, positions, rice, select, select_torch, signs, vectors
from fedcams.bits.parallel import BLOCK, map_ranges, map_threads
from fedcams.errors import BadPadding, BadPosition, NonCanonical, Truncated
from forks import Forks
from together import together

SIZES = [1, 2, 7, 8, 9, 63, 64, 65, 1000, 4097, 3 * BLOCK + 5]


def vector(d: int, seed: int = 0) -> torch.Tensor:
    """Gaussian with zeros of both signs and ties."""
    x = torch.randn(d, generator=torch.Generator().manual_seed(seed))
    x[::5] = x[::5].round()
    x[::11] = -0.0
    return x


# -- signs -----------------------------------------------------------------------------------------------------------


@together("d", SIZES)
def test_signs_are_packed_as_numpy_packs_bits(d: int) -> None:
    x = torch.stack([vector(d, seed) for seed in range(3)])
    packed, sums = signs.pack_signs(x)
    assert np.allclose(sums, [math.fsum(row.abs().tolist()) for row in x], rtol=1e-13, atol=0)
    assert np.array_equal(packed.numpy(), np.packbits((x >= 0).numpy(), axis=-1, bitorder="little"))
    assert torch.equal(packed, packing.pack_bools(x >= 0))
    assert torch.equal(packing.unpack_bools(packed, d), x >= 0)


@together("d", SIZES)
def test_signs_are_added_segment_by_segment(d: int) -> None:
    x = torch.stack([vector(d, seed) for seed in range(2)])
    cuts = sorted({0, d // 3, d // 3 + 1, d // 2, d} & set(range(d + 1)))
    segments = [(a, b) for a, b in zip(cuts, cuts[1:], strict=False) if b > a]
    size = torch.rand(2, len(segments))
    fast, slow = x.clone(), x.clone()
    packed, _ = signs.pack_signs(x)
    signs.add_signs_(fast, packed, segments, size)
    signs._add_signs_torch_(slow, packed, segments, size)
    assert torch.equal(fast, slow)
    for number, (a, b) in enumerate(segments):
        expected = x[:, a:b] + torch.where(x[:, a:b] >= 0, 1.0, -1.0) * size[:, number, None]
        assert torch.equal(fast[:, a:b], expected)


def test_absolute_sums_are_exact_to_double_precision() -> None:
    x = torch.stack([vector(3 * BLOCK + 5, seed) for seed in range(2)])
    segments = [(0, 10), (10, 2 * BLOCK), (2 * BLOCK, x.shape[1])]
    sums = signs.abs_sums(x, segments)
    for number, (a, b) in enumerate(segments):
        expected = [math.fsum(row[a:b].abs().tolist()) for row in x]
        assert np.allclose(sums[:, number], expected, rtol=1e-13, atol=0)


# -- selection -------------------------------------------------------------------------------------------------------


def slow_top(x: torch.Tensor, k: int) -> list[int]:
    """By magnitude, then by index."""
    order = sorted(range(len(x)), key=lambda i: (-abs(float(x[i])), i))
    return sorted(order[:k])


def top(x: torch.Tensor, k: int) -> torch.Tensor:
    positions, values = select.top_values(x, [(0, x.shape[1])], [k])
    assert torch.equal(values.view(torch.int32), x.gather(-1, positions).view(torch.int32))
    return positions


special = st.sampled_from([0.0, -0.0, 1e-45, -1e-45, 1.0, -1.0, 3.4e38, 1.1754944e-38])


@given(
    st.lists(special | st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=60), st.data()
)
def test_selection_equals_sorting(values: list[float], data: st.DataObject) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    k = data.draw(st.integers(1, len(values)))
    assert top(x[None], k)[0].tolist() == slow_top(x, k)
    assert select_torch.top_positions_torch(x[None], k)[0].tolist() == slow_top(x, k)


@pytest.mark.parametrize("d", [4095, 4096, 4097, 3 * BLOCK + 5])
def test_selection_of_long_vectors_equals_the_torch_version(d: int) -> None:
    rows = torch.stack([vector(d), torch.zeros(d), vector(d).round(), vector(d, 1) * 1e-40])
    for k in (1, 2, d // 64, d // 2, d - 1, d):
        assert torch.equal(top(rows, k), select_torch.top_positions_torch(rows, k))


def test_selection_survives_a_sample_that_misleads() -> None:
    """Large values only where the sample looks: it expects far more of them than there are."""
    d = 40 * BLOCK
    x = vector(d) * 1e-3
    for start in range(0, d, d // select.SAMPLED_CHUNKS):
        x[start : start + 1000] += 10
    for k in (1000, 60_000, d // 2):
        assert torch.equal(top(x[None], k), select_torch.top_positions_torch(x[None], k))


def test_batched_selection_survives_samples_that_mislead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that hide their large values from the sample, show it nothing else, or are all ties, among sound ones."""
    monkeypatch.setattr(select_torch, "SAMPLE", 512)
    d = select_torch.SHORT + 77
    sampled = torch.arange(select_torch.SAMPLE) * select_torch.STRIDE % d
    hidden, shown = vector(d) * 1e-3, vector(d) * 1e-3
    hidden[torch.ones(d, dtype=torch.bool).index_fill_(0, sampled, False)] += 1
    shown[sampled] += 10
    rows = torch.stack([vector(d), hidden, vector(d, 1), shown, vector(d).sign(), torch.zeros(d), vector(d).round()])
    for k in (1, 3000, d // 2, d - 1):
        assert torch.equal(select_torch.top_positions_torch(rows, k), top(rows, k))
    for row in rows:
        assert torch.equal(select_torch.top_positions_torch(row[None], 3000), top(row[None], 3000))


# -- positions as gaps -------------------------------------------------------------------------------------------------


def slow_rice(positions: list[int], d: int) -> str:
    """The code of docs/wire-format.md as a string of bits, in the order in which they are written."""
    total, count = 16 * (d - len(positions)) // max(len(positions), 1), 16
    bits, before = "", -1
    for position in positions:
        gap, before = position - before - 1, position
        r = 0
        while 27 * count * 2**r < 13 * (total + count):
            r += 1
        if gap >> r < 32:
            low = format(gap & (2**r - 1), f"0{r}b")[::-1] if r else ""
            bits += "1" * (gap >> r) + "0" + low
        else:
            bits += "1" * 32 + format(gap, "040b")[::-1]
        total, count = total + gap, count + 1
        if count == 32:
            total, count = total // 2, 16
    return bits


def to_bytes(bits: str) -> bytes:
    bits += "0" * (-len(bits) % 8)
    return bytes(int(bits[i : i + 8][::-1], 2) for i in range(0, len(bits), 8))


@st.composite
def sparse_sets(draw: st.DrawFn) -> tuple[list[int], int]:
    d = draw(st.sampled_from([1, 2, 9, 300, 5000, 10**6, 2**40]))
    positions = draw(st.sets(st.integers(0, d - 1), min_size=0, max_size=80))
    cluster = draw(st.integers(0, d - 1))
    return sorted(positions | set(range(cluster, min(d, cluster + draw(st.integers(0, 60)))))), d


@given(sparse_sets())
@example(([0, 1, 2, 3, 4, 2**33 + 5], 2**40))
@example((sorted({(7**n) % 2**40 for n in range(12)}), 2**40))
def test_gaps_are_coded_as_the_specification_says(case: tuple[list[int], int]) -> None:
    positions, d = case
    array = np.array(positions, np.int64)
    expected = slow_rice(positions, d)
    coded = rice.rice_encode(array, d)
    assert coded.tobytes() == to_bytes(expected)
    assert rice.rice_bits(array, d) == len(expected)
    assert rice.rice_size(array, d) == len(coded)
    decoded, used = rice.rice_decode(np.concatenate([coded, np.array([0xAB], np.uint8)]), len(positions), d)
    assert used == len(coded)
    assert decoded.tolist() == positions


@pytest.mark.parametrize("ratio", [16, 64, 128, 256])
def test_uniform_positions_cost_at_most_three_percent_above_the_limit(ratio: int) -> None:
    d = 1_000_003
    k = d // ratio
    positions = np.sort(np.random.default_rng(0).choice(d, k, replace=False)).astype(np.int64)
    limit = (math.lgamma(d + 1) - math.lgamma(k + 1) - math.lgamma(d - k + 1)) / math.log(2)
    assert limit < rice.rice_bits(positions, d) < 1.03 * limit


def test_clustered_positions_cost_less_than_uniform_ones() -> None:
    d, k = 1_000_003, 15_000
    uniform = np.sort(np.random.default_rng(0).choice(d, k, replace=False)).astype(np.int64)
    clustered = np.sort(np.random.default_rng(0).choice(d // 10, k, replace=False)).astype(np.int64)
    assert rice.rice_bits(clustered, d) < 0.65 * rice.rice_bits(uniform, d)


def test_long_positions_lie_in_pages_of_their_own_and_outlive_their_parts() -> None:
    """They are read into memory that is mapped for them alone; a slice keeps all of it."""
    wanted = np.arange(0, 6 * 300_000, 6)
    assert wanted.nbytes > rice.HUGE_PAGE
    coded = rice.rice_encode(wanted, 2_000_000)
    decoded, used = rice.rice_decode(coded, wanted.size, 2_000_000)
    tail = torch.from_numpy(decoded)[-1000:]
    assert used == coded.size
    assert np.array_equal(decoded, wanted)
    del decoded
    assert np.array_equal(tail.numpy(), wanted[-1000:])


def test_damaged_gaps_are_refused() -> None:
    def decode(data: bytes, k: int, d: int) -> None:
        rice.rice_decode(np.frombuffer(data, np.uint8), k, d)

    with pytest.raises(Truncated, match="9 positions do not fit into 1 bytes"):
        decode(b"\0", 9, 100)
    with pytest.raises(Truncated, match="ends within"):
        decode(b"\0", 3, 1000)
    with pytest.raises(BadPosition, match=r"not in \[0, 10\)"):
        decode(b"\xff\x00\x00", 2, 10)
    with pytest.raises(BadPadding):
        decode(b"\x80", 1, 2)
    with pytest.raises(NonCanonical):
        decode(b"\xff" * 4 + b"\0" * 8, 1, 1000)


# -- integers, samples, scatter ----------------------------------------------------------------------------------------


@given(st.integers(1, 32), st.data())
def test_integers_are_packed_lowest_bit_first(bits: int, data: st.DataObject) -> None:
    values = data.draw(st.lists(st.integers(0, 2**bits - 1), max_size=40))
    packed = packing.pack_uints(np.array(values, np.int64), bits)
    whole = sum(value << (i * bits) for i, value in enumerate(values))
    assert packed.tobytes() == whole.to_bytes(-(-len(values) * bits // 8), "little")
    assert packing.unpack_uints(packed, bits, len(values)).tolist() == values


def test_padding_behind_integers_must_be_zero() -> None:
    with pytest.raises(BadPadding, match="3-bit integers"):
        packing.unpack_uints(np.array([0x80], np.uint8), 3, 2)


@together("d", [1, 2, 3, 7, 64, 65, 1000, 100_003])
def test_samples_are_distinct_and_the_same_in_torch(d: int) -> None:
    seeds = torch.tensor([0, 1, 2**32 - 1])
    k = max(1, d // 3)
    drawn = positions.sample_positions(seeds, k, d)
    constants = torch.tensor([positions._constants(seed) for seed in seeds.tolist()])
    assert torch.equal(drawn, positions._positions_torch(constants, k, d, max(1, (d - 1).bit_length())))
    for row in drawn:
        assert len(set(row.tolist())) == k
        assert 0 <= int(row.min()) <= int(row.max()) < d


@pytest.mark.parametrize(("d", "k"), [(7, 1), (7, 3), (64, 5), (100, 50)])
def test_samples_are_uniform_in_singles_and_pairs(d: int, k: int) -> None:
    trials = 20_000
    chosen = torch.zeros(trials, d).scatter_(1, positions.sample_positions(torch.arange(trials), k, d), 1.0)
    p = k / d
    assert (chosen.mean(0) - p).abs().max() < 5 * math.sqrt(p * (1 - p) / trials)
    together = (chosen.T @ chosen / trials)[~torch.eye(d, dtype=torch.bool)]
    pair = p * (k - 1) / (d - 1)
    assert (together - pair).abs().max() < 6 * math.sqrt(max(pair, 1 / d**2) / trials)


def test_values_are_added_at_their_positions() -> None:
    out, at = torch.ones(2, 10), torch.tensor([[1, 3], [9, 0]])
    positions.add_at_(out, at, torch.tensor([[1.0, 2.0], [3.0, 4.0]]), weight=-2.0)
    expected = torch.ones(2, 10)
    expected[0, 1], expected[0, 3], expected[1, 9], expected[1, 0] = -1, -3, -5, -7
    assert torch.equal(out, expected)


@together("d", SIZES)
def test_vectors_are_added_divided_and_summed_as_torch_does(d: int) -> None:
    x, y = vector(d), vector(d, 1)
    total = x.clone()
    vectors.add_(total, y)
    assert torch.equal(total, x + y)
    vectors.divide_(total, 3.0)
    assert torch.equal(total, (x + y) / 3.0)
    assert vectors.abs_sum(x) == pytest.approx(math.fsum(x.abs().tolist()), rel=1e-13)
    assert vectors.abs_sum(x.double()[::2]) == pytest.approx(math.fsum(x[::2].abs().tolist()), rel=1e-13)


# -- threads and processes ---------------------------------------------------------------------------------------------


def everything(x: torch.Tensor) -> list[bytes]:
    """One call of each parallel kernel."""
    k = x.shape[1] // 64
    packed, total = signs.pack_signs(x)
    out = torch.from_numpy(x.numpy().copy())  # torch's own threads do not survive a fork
    signs.add_signs_(out, packed, [(0, x.shape[1])], torch.ones(len(x), 1))
    sums = signs.abs_sums(x, [(0, x.shape[1])])
    results = [
        packed,
        total,
        out,
        sums,
        top(x, k),
        positions.sample_positions(torch.tensor([5]), k, x.shape[1]),
    ]
    return [result.numpy().tobytes() for result in results]


@together("size", [1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 3])
@together("threads", [1, 2, 3, 8])
def test_ranges_cover_everything_once(size: int, threads: int) -> None:
    ranges = map_ranges(size, lambda a, b: (a, b), threads)
    assert ranges[0][0] == 0
    assert ranges[-1][1] == size
    assert all(end == start and start % BLOCK == 0 for (_, end), (start, _) in zip(ranges, ranges[1:], strict=False))
    assert len(ranges) <= max(1, 4 * threads)


@pytest.fixture
def _threads_restored() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_nobody_is_still_at_work_when_the_caller_has_failed() -> None:
    """What the others work on, a file or a block of memory, is the caller's to give back then."""
    caller, begun, done = threading.current_thread(), threading.Event(), threading.Event()

    def work(item: int) -> None:
        if threading.current_thread() is caller:
            assert begun.wait(60)
            raise OSError("cannot")
        begun.set()
        time.sleep(0.2)
        done.set()

    with pytest.raises(OSError, match="cannot"):
        map_threads(range(2), work, threads=2)
    assert done.is_set()


@pytest.mark.usefixtures("_threads_restored")
def test_results_do_not_depend_on_the_number_of_threads() -> None:
    x = vector(9 * BLOCK + 77)[None]
    results = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        results.append(everything(x))
    assert results[0] == results[1] == results[2]


@pytest.mark.usefixtures("_threads_restored")
def test_kernels_run_from_many_threads_at_once() -> None:
    torch.set_num_threads(2)
    xs = [vector(3 * BLOCK + i, seed=i)[None] for i in range(8)]
    expected = [everything(x) for x in xs]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(3):
            assert list(pool.map(everything, xs)) == expected


FORK = """
import os
import torch
import fedcams
from test_bits import everything, vector, BLOCK

def in_child(check):
    child = os.fork()
    if child == 0:
        os._exit(0 if check() else 1)
    assert os.waitpid(child, 0)[1] == 0

x = vector(3 * BLOCK + 1)
torch.set_num_threads(2)
expected, payload = everything(x[None]), fedcams.encode("topk(ratio=1/64)", x)
for _ in range(3):
    in_child(lambda: everything(x[None]) == expected)
torch.set_num_threads(1)  # a forked child may use torch itself with one thread only
in_child(lambda: fedcams.encode("topk(ratio=1/64)", x) == payload)
assert everything(x[None]) == expected
"""


def test_kernels_run_after_a_fork(forks: Forks) -> None:
    done = forks.run(FORK)
    assert done.code == 0, done.errors


@pytest.mark.parametrize("d", [1, 7, 4097, 200_003])
def test_norms_and_inner_products_of_rows(d: int) -> None:
    draw = torch.Generator().manual_seed(d)
    rows, other = torch.randn(5, d, generator=draw), torch.randn(d, generator=draw)
    rows[3] *= 1e38 / rows[3].abs().max()
    norms, dots = vectors.row_norms(rows), vectors.row_dots(rows, other)
    for row, norm, dot in zip(rows.double(), norms.tolist(), dots.tolist(), strict=True):
        assert norm == pytest.approx(math.sqrt(math.fsum((row * row).tolist())), rel=1e-13)
        exact = math.fsum((row * other.double()).tolist())
        assert dot == pytest.approx(exact, rel=1e-13, abs=1e-13 * norm * float(other.norm()))
    assert torch.equal(norms[1:4], vectors.row_norms(rows[1:4])), "in another cohort"
    assert torch.equal(norms, torch.cat([vectors.row_norms(row[None].clone()) for row in rows]))
    assert torch.equal(norms, vectors.row_norms(torch.randn(d, 9, generator=draw).T[:5].copy_(rows))), "not contiguous"
    assert torch.equal(dots, torch.cat([vectors.row_dots(row[None].clone(), other) for row in rows]))
    assert vectors.row_norms(rows[:0]).shape == (0,)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_norms_of_rows_on_a_gpu_do_not_depend_on_the_other_rows() -> None:
    rows = torch.randn(9, 100_003).cuda()
    norms = vectors.row_norms(rows)
    assert norms.is_cuda
    assert torch.equal(norms, torch.cat([vectors.row_norms(row[None].clone()) for row in rows]))
    torch.testing.assert_close(norms.cpu(), vectors.row_norms(rows.cpu()), rtol=1e-13, atol=0)
