"""The aggregator: what it refuses, and that errors name the client."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from fedcams import Aggregator, Layout, encode
from fedcams.compress import Compressor
from fedcams.compress.identity import IDENTITY
from fedcams.errors import ChecksumMismatch, LayoutError, LayoutMismatch, NonFinite, UpdateError
from fedcams.registry import registered
from fedcams.wire import pack, unpack
from memory import peak_memory
from together import together

LAYOUT = Layout.flat(6)


def payload(value: float = 1.0, layout: Layout = LAYOUT) -> bytes:
    return encode("identity", torch.full((layout.d,), value), layout)


def test_weighted_mean_divides_once() -> None:
    aggregator = Aggregator(LAYOUT)
    aggregator.add(3, payload(1.0), weight=1.0)
    aggregator.add(1, payload(4.0), weight=2.0)
    assert aggregator.ids == [1, 3]
    assert len(aggregator) == 2
    assert torch.equal(aggregator.mean(), torch.full((6,), 3.0))
    buffer = torch.full((6,), 9.0)
    assert aggregator.mean(out=buffer) is buffer
    assert torch.equal(buffer, torch.full((6,), 3.0))


def test_dense_and_compressed_updates_meet() -> None:
    aggregator = Aggregator(LAYOUT)
    aggregator.add(1, encode("sign", torch.full((6,), -2.0)))
    aggregator.add(2, encode("topk(k=1)", torch.tensor([0.0, 0, 8, 0, 0, 0])))
    aggregator.add(3, payload(2.0))
    assert torch.equal(aggregator.mean() * 3, torch.tensor([0.0, 0, 8, 0, 0, 0]))


@pytest.mark.parametrize("weight", [0.0, -1.0, math.nan, math.inf])
def test_weights_must_be_positive_and_finite(weight: float) -> None:
    with pytest.raises(UpdateError, match=f"client 7: weight={weight}; allowed: a finite number above 0"):
        Aggregator(LAYOUT).add(7, payload(), weight)


def test_refusals_name_the_client_and_leave_the_sum_alone() -> None:
    aggregator = Aggregator(LAYOUT)
    aggregator.add(1, payload(5.0))
    with pytest.raises(UpdateError, match="client 1 already has an update in this round"):
        aggregator.add(1, payload(7.0))
    with pytest.raises(LayoutMismatch, match="client 2: the payload has layout"):
        aggregator.add(2, payload(7.0, Layout(("w",), ((6,),))))
    with pytest.raises(LayoutMismatch, match=r"client 3: .* with d=7"):
        aggregator.add(3, payload(7.0, Layout.flat(7)))
    with pytest.raises(ChecksumMismatch, match="client 4"):
        aggregator.add(4, payload()[:-1] + b"x")
    damaged = unpack(payload())
    bad = pack(damaged.compressor, {"values": torch.full((6,), math.nan)}, LAYOUT)
    with pytest.raises(NonFinite, match="client 5: field 'values': 6 of 6"):
        aggregator.add(5, bad)
    assert aggregator.ids == [1]
    assert torch.equal(aggregator.mean(), torch.full((6,), 5.0))


def test_a_mean_that_overflows_is_refused() -> None:
    aggregator = Aggregator(LAYOUT)
    for client in range(3):
        aggregator.add(client, payload(3e38))
    with pytest.raises(UpdateError, match="mean of the updates is not finite: 'vector' has 6 of 6"):
        aggregator.mean()


def test_nothing_has_no_mean() -> None:
    with pytest.raises(UpdateError, match="no update was added"):
        Aggregator(LAYOUT).mean()


def test_a_read_payload_of_another_layout_is_refused_too() -> None:
    other = Layout(("w",), ((6,),))
    with pytest.raises(LayoutMismatch, match="client 1"):
        Aggregator(LAYOUT).add(1, unpack(payload(1.0, other), other))


def test_holding_many_compressed_updates_takes_no_dense_copies() -> None:
    d = 100_000
    data = encode("topk(ratio=1/64)", torch.randn(d))

    def collect() -> Aggregator:
        aggregator = Aggregator(Layout.flat(d))
        for client in range(50):
            aggregator.add(client, data)
        return aggregator

    assert peak_memory(collect) < 50 * 4 * d / 10  # a tenth of fifty dense vectors


@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0), (3.0, 1.0, 0.5)])
def test_updates_that_come_in_order_give_the_same_mean_and_are_not_kept(weights: tuple[float, ...]) -> None:
    layout = Layout.flat(1000)
    payloads = [encode(codec, torch.randn(1000), layout) for codec in ("sign", "identity", "topk(k=9)")]
    held, running = Aggregator(layout), Aggregator(layout, in_order=True)
    for i in (2, 0, 1):
        held.add(i, payloads[i], weights[i])
    for i in (0, 1, 2):
        running.add(i, payloads[i], weights[i])
    assert running.ids == [0, 1, 2]
    assert torch.equal(running.mean(), held.mean())
    assert not running._codes


def test_what_comes_out_of_order_is_refused() -> None:
    aggregator = Aggregator(Layout.flat(8), in_order=True)
    aggregator.add(5, encode("sign", torch.ones(8)))
    with pytest.raises(UpdateError, match="client 4 came after client 5"):
        aggregator.add(4, encode("sign", torch.ones(8)))
    assert torch.equal(aggregator.mean(), torch.ones(8))


@together("in_order", [False, True])
def test_a_client_that_comes_twice_in_one_call_is_refused(in_order: bool) -> None:
    aggregator = Aggregator(Layout.flat(2), in_order=in_order)
    code = {"values": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}
    with pytest.raises(UpdateError, match="client 3 already has an update in this round"):
        aggregator.add_rows([3, 3], IDENTITY, code, [1.0, 1.0])
    aggregator.add_rows([3, 4], IDENTITY, code, [1.0, 1.0])
    assert torch.equal(aggregator.mean(), torch.tensor([2.0, 3.0]))


def test_a_mean_in_order_gives_its_sum_away() -> None:
    aggregator = Aggregator(Layout.flat(4), in_order=True)
    for value in (2.0, 6.0):  # a second round by the same one
        aggregator.add(0, encode("identity", torch.full((4,), value)))
        assert torch.equal(aggregator.mean(), torch.full((4,), value))
        with pytest.raises(UpdateError, match="no update was added"):
            aggregator.mean()


CODECS = [str(spec) for cls in registered("compressor").values() for spec in cls.examples]


@together("in_order", [False, True])
@together("spec", CODECS)
def test_a_short_payload_with_the_id_of_a_long_layout_is_refused_whole(spec: str, in_order: bool) -> None:
    """Its id is the sender's bytes: kernels must not read or write as much as the server's layout says."""
    codec, short, long = Compressor.parse(spec).at(1, 1), Layout.flat(8), Layout(("w",), ((1_000_000,),))
    code = codec.encode(torch.arange(1.0, 9.0), short, 0)
    aggregator = Aggregator(long, in_order=in_order)
    forged = replace(unpack(encode("identity", torch.ones(8))), compressor=codec, code=code, layout_id=long.id)
    with pytest.raises(LayoutMismatch, match=f"client 3: .* and d=8, not {long.id.hex()} and d=1000000"):
        aggregator.add(3, forged)
    for rows in (code, {name: tensor[None].repeat(2, 1) for name, tensor in code.items()}):
        with pytest.raises(LayoutError, match=r"has shape .*; expected .* for d=1000000"):
            aggregator.add_rows([3], codec, rows, [7.0])
    assert len(aggregator) == 0
    aggregator.add(4, encode("identity", torch.full((1_000_000,), 2.0), long))
    assert float(aggregator.mean()[-1]) == 2.0, "nothing of the refused weight is left"


def test_positions_outside_of_the_vector_are_refused() -> None:
    codec = Compressor.parse("topk(k=2)")
    for positions in ([3, 6], [-1, 2]):
        code = {"position": torch.tensor([positions]), "value": torch.ones(1, 2)}
        with pytest.raises(LayoutError, match=r"position has a position outside of \[0, 6\)"):
            Aggregator(LAYOUT).add_rows([1], codec, code, [1.0])
