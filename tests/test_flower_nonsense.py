"""Apps that answer nonsense, with the mod or without it: refused and recorded, and the round continues."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from chaos_app.hostile import HEADS, with_head
from fedcams.errors import UpdateError
from fedcams.flower import FedCAMS, uplink
from fedcams.flower.checkpoint import read_ledger
from fedcams.flower.records import NUMPY, REPLY, _head, from_array, message_record
from fedcams.rounds import answer_from_parts
from flower_apps import quick
from flower_grid import LocalGrid
from test_flower import adding_app, two_by_three

__all__ = ["quick"]  # a fixture for these tests too


def saying(metrics: dict[str, Any], value: float = 1.0, **shapes: tuple[int, ...]) -> Callable[..., Message]:
    """Training that returns a model of one value and these metrics."""

    def train(message: Message, context: Context) -> Message:
        names = message.content.array_records["arrays"]
        assert names, "nothing to train"
        arrays = {name: torch.full(shapes.get(name, array.shape), value) for name, array in names.items()}
        made = ArrayRecord({name: tensor for name, tensor in arrays.items() if tensor.dim()})
        return Message(RecordDict({"arrays": made, "m": MetricRecord(metrics)}), reply_to=message)

    return train


NONSENSE: list[tuple[str, Callable[..., Message]]] = [
    ("num-examples=inf; expected a finite number", saying({"num-examples": float("inf")})),
    ("num-examples=nan; expected a finite number", saying({"num-examples": float("nan")})),
    ("num-examples=-3; expected a finite number from 0 to", saying({"num-examples": -3})),
    (r"num-examples=\[1, 2\]; expected a finite number", saying({"num-examples": [1, 2]})),
    (
        "the training reports the loss nan; lower the learning rate",
        saying({"num-examples": 5, "train_loss": float("nan")}),
    ),
    ("the update is not finite: 'w' has 6 of 6 values NaN", saying({}, float("nan"))),
    ("the array 'w' is float32", saying({}, w=(3, 2))),
    ("the array 'b' is missing", saying({}, b=())),
]


@pytest.mark.parametrize("mods", [True, False], ids=["with the mod", "without"])
@pytest.mark.parametrize(("reason", "train"), NONSENSE, ids=[reason for reason, _ in NONSENSE])
def test_an_app_that_answers_nonsense_is_refused_and_takes_part_when_it_is_well_again(
    tmp_path: Path, reason: str, train: Callable[..., Message], mods: bool
) -> None:
    """For both kinds of clients; a site keeps nothing of it that would be in the way later."""

    def app(training: Callable[..., Message]) -> ClientApp:
        made = ClientApp(mods=[uplink("sign", state_dir=tmp_path)] if mods else [])
        made.train()(training)
        return made

    for rounds, training in {1: train, 2: saying({"num-examples": 5})}.items():
        grid = LocalGrid({5: adding_app(tmp_path, 1.0), 6: app(training)}, {5: {"site-id": 0}, 6: {"site-id": 6}})
        FedCAMS(server="fedavg", checkpoint=tmp_path / "server", min_available=2).start(
            grid, two_by_three(), rounds, 5.0
        )
    first, second = read_ledger(tmp_path / "server")
    assert re.search(reason, first["refused"]["6"]), first
    assert list(first["accepted"]) == ["0"]
    assert sorted(second["accepted"]) == ["0", "6"]


@pytest.mark.parametrize(
    "metrics",
    [
        [{"num-examples": 0}, {"num-examples": 0}],
        [{"num-examples": 5, "x": 1.0}, {"num-examples": 5, "x": [1.0, 2.0]}],
        [{"num-examples": 5, "x": [1.0]}, {"num-examples": 5, "x": [1.0, 2.0]}],
    ],
)
def test_metrics_that_have_no_mean_do_not_end_a_run(tmp_path: Path, metrics: list[dict[str, Any]]) -> None:
    apps = {}
    for node, told in zip((5, 6), metrics, strict=True):
        apps[node] = ClientApp(mods=[uplink("identity", state_dir=tmp_path)])
        apps[node].train()(saying(told))
    grid = LocalGrid(apps, {5: {"site-id": 0}, 6: {"site-id": 1}})
    result = FedCAMS(server="fedavg", checkpoint=tmp_path / "server", min_available=2).start(
        grid, two_by_three(), 2, 5.0
    )
    assert [len(line["accepted"]) for line in read_ledger(tmp_path / "server")] == [2, 2]
    assert np.array_equal(result.arrays["w"].numpy(), np.ones((2, 3)))


def test_losses_whose_sum_overflows_are_not_recorded(tmp_path: Path) -> None:
    """Each is a number, but their mean is none, and neither JSON nor a chart can have it."""
    apps = {}
    for node in (5, 6):
        apps[node] = ClientApp(mods=[uplink("identity", state_dir=tmp_path)])
        apps[node].train()(saying({"num-examples": 5, "train_loss": 1.7e308}))
    grid = LocalGrid(apps, {5: {"site-id": 0}, 6: {"site-id": 1}})
    FedCAMS(server="fedavg", checkpoint=tmp_path / "server", min_available=2).start(grid, two_by_three(), 1, 5.0)
    (line,) = read_ledger(tmp_path / "server")
    assert len(line["accepted"]) == 2
    assert line["train_loss"] is None


BOMB = b"\x93NUMPY\x02\x00" + (118).to_bytes(4, "little")
BOMB += b"{'descr': '<f4', 'fortran_order': False, 'shape': (100000000000,), }".ljust(117) + b"\n"


@pytest.mark.parametrize(
    "array",
    [
        Array("float32", (10**11,), "numpy.ndarray", BOMB),
        Array("float32", (10**11,), "numpy.ndarray", BOMB.replace(b"\x02\x00", b"\x01\x00", 1)),
        Array("float32", (2, 3), "numpy.ndarray", b"PK\x03\x04 not an archive"),
        Array("object", (2, 3), "numpy.ndarray", b""),
        Array("float32", (2, 3), "other", b""),
    ],
)
def test_an_array_that_claims_more_than_came_is_refused_before_memory_is_asked_for(array: Array) -> None:
    with pytest.raises(UpdateError, match=r"an array (that cannot be read|of type)"):
        from_array(array)


@pytest.mark.parametrize("array", [Array("float32", (1,) * 65, NUMPY, b""), Array("f4," * 1000, (1,), NUMPY, b"")])
def test_headers_of_absurd_arrays_are_not_cached(array: Array) -> None:
    """The cache lasts as long as the server: thousands of long headers would fill its memory."""
    before = _head.cache_info().currsize
    with pytest.raises(UpdateError, match=r"an array that cannot be read \(ValueError: \d+ axes of"):
        from_array(array)
    assert _head.cache_info().currsize == before


def sending(array: Array) -> Callable[..., Message]:
    """Training that returns this array for every one of the model."""

    def train(message: Message, context: Context) -> Message:
        assert message.content.array_records["arrays"], "nothing to train"
        arrays = ArrayRecord(dict.fromkeys(message.content.array_records["arrays"], array))
        return Message(RecordDict({"arrays": arrays, "m": MetricRecord({"num-examples": 1})}), reply_to=message)

    return train


@pytest.mark.parametrize(
    ("error", "head"), [*HEADS.items(), ("ValueError", "{'descr': '|O', 'fortran_order': False, 'shape': (2, 3), }")]
)
def test_a_head_that_numpy_chokes_on_is_refused_and_the_round_goes_on(tmp_path: Path, error: str, head: str) -> None:
    """With the mod, where it is the site that reads it, and without, where it is the server."""
    apps = {5: adding_app(tmp_path, 1.0)}
    for node, mods in {6: [uplink(state_dir=tmp_path)], 7: []}.items():
        apps[node] = ClientApp(mods=mods)
        apps[node].train()(sending(with_head(head)))
    grid = LocalGrid(apps, {node: {"site-id": node} for node in apps})
    FedCAMS(server="fedavg", checkpoint=tmp_path / "server", min_available=3).start(grid, two_by_three(), 2, 5.0)
    for line in read_ledger(tmp_path / "server"):
        assert list(line["accepted"]) == ["5"]
        assert sorted(line["refused"]) == ["6", "7"]
        cannot = rf"an array that cannot be read \(({error})"
        assert all(re.search(cannot, reason) for reason in line["refused"].values()), line["refused"]


@pytest.mark.parametrize("error", [MemoryError, OverflowError, KeyError])
def test_whatever_reading_a_reply_raises_the_round_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def failing(parts: list[bytes]) -> Any:
        if b"evil" in b"".join(parts):
            raise error("no")
        return answer_from_parts(parts)

    def fault(node: int, message: Message, reply: Message | None) -> Message | None:
        if node == 6 and reply is not None and REPLY in reply.content.array_records:
            reply.content.array_records[REPLY] = message_record([b"evil"])
        return reply

    monkeypatch.setattr("fedcams.flower.inbox.answer_from_parts", failing)
    apps = {5: adding_app(tmp_path, 1.0), 6: adding_app(tmp_path, 1.0)}
    grid = LocalGrid(apps, {5: {"site-id": 0}, 6: {"site-id": 1}}, fault)
    FedCAMS(server="fedavg", checkpoint=tmp_path / "server", min_available=2).start(grid, two_by_three(), 1, 5.0)
    (line,) = read_ledger(tmp_path / "server")
    assert list(line["accepted"]) == ["0"]
    assert line["refused"]["1"].startswith(error.__name__)
    assert line["wire_up"] > 4  # what was refused was sent all the same


def test_arrays_in_columns_are_read_too() -> None:
    values = np.asfortranarray(np.arange(6.0, dtype=np.float32).reshape(2, 3))
    assert np.array_equal(from_array(Array(values)), values)
