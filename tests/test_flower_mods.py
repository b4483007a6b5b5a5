"""Flower's own mods and strategies next to ours: what works, and that everything else is refused."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod, adaptiveclipping_mod, arrays_size_mod, fixedclipping_mod, message_size_mod
from flwr.common import Code, FitRes, Status, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.common.secure_aggregation.quantization import dequantize, quantize
from flwr.compat.common import recorddict_compat as compat
from flwr.server import ServerConfig, SimpleClientManager
from flwr.server.compat.grid_client_proxy import GridClientProxy
from flwr.server.compat.legacy_context import LegacyContext
from flwr.server.strategy import FedAvg as LegacyFedAvg
from flwr.server.workflow import SecAggPlusWorkflow
from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD, Key
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
)

from fedcams import Layout, SpecError, compressor
from fedcams.flower import FedCAMS, uplink
from fedcams.flower.checkpoint import read_ledger
from flower_apps import quick
from flower_grid import LocalGrid
from test_flower import plain_app, two_by_three

__all__ = ["quick"]  # a fixture for these tests
TRAIN = plain_app(1.0)._registered_funcs["train.default"]
NOISE = 1e-3
LOCAL_DP = LocalDpMod(clipping_norm=0.5, sensitivity=NOISE / np.sqrt(2 * np.log(1.25 / 1e-5)), epsilon=1.0, delta=1e-5)
CLIPPING = {"fixed": fixedclipping_mod, "adaptive": adaptiveclipping_mod}


def federated(folder: Path, mods: list[Any], timeout: float = 0.2) -> dict[str, Any]:
    """The line of one round of two sites, whose app adds 1 to each of 9 parameters, with these mods in this order."""
    app = ClientApp(
        mods=[uplink("topk(ratio=1/2)", state_dir=folder / "sites") if mod is None else mod for mod in mods]
    )
    app.train()(TRAIN)
    grid = LocalGrid({5: app, 6: app}, {5: {"site-id": 0}, 6: {"site-id": 1}})
    strategy = FedCAMS(server="fedavg", checkpoint=folder / "server", min_available=2)
    config = ConfigRecord({"clipping_norm": 0.5})
    strategy.start(grid, two_by_three(), 1, timeout=timeout, train_config=config)
    (line,) = read_ledger(folder / "server")
    return line


@pytest.mark.parametrize("mod", CLIPPING.values(), ids=CLIPPING)
def test_clipping_after_ours_clips_the_update_before_it_is_compressed(tmp_path: Path, mod: Any) -> None:
    line = federated(tmp_path, [None, mod], timeout=5.0)
    assert list(line["accepted"]) == ["0", "1"]
    assert line["delta_norm"] == pytest.approx(0.5 * (4 / 9) ** 0.5)  # 4 of 9 equal coordinates are sent


def test_local_noise_after_ours_is_in_what_is_compressed(tmp_path: Path) -> None:
    norms = [federated(tmp_path / name, [None, LOCAL_DP], timeout=5.0)["delta_norm"] for name in ("one", "two")]
    assert norms[0] != norms[1], "the noise is new each time"
    assert all(0.2 < norm < 0.36 for norm in norms), "clipped; the noise decides which coordinates each site sends"


@pytest.mark.parametrize("mod", [message_size_mod, arrays_size_mod])
@pytest.mark.parametrize("first", [True, False])
def test_counting_works_on_both_sides_of_ours(tmp_path: Path, mod: Any, first: bool) -> None:
    line = federated(tmp_path, [mod, None] if first else [None, mod], timeout=5.0)
    assert list(line["accepted"]) == ["0", "1"]


@pytest.mark.parametrize("mod", [*CLIPPING.values(), LOCAL_DP])
def test_dp_mods_before_ours_are_refused_and_the_log_says_what_to_do(
    tmp_path: Path, mod: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """They would clip, or add noise to, what is compressed already; Flower's mods do not know our messages."""
    with caplog.at_level(logging.WARNING, "flwr.fedcams"):
        line = federated(tmp_path, [mod, None])
    assert not line["accepted"]
    assert line["skipped"] == "0 clients connected, min_available=2"
    said = [record.getMessage() for record in caplog.records if "cannot take part" in record.getMessage()]
    assert said
    assert all("list uplink as the first mod" in text for text in said)


@pytest.mark.parametrize("mods", [[None, secaggplus_mod], [secaggplus_mod, None]])
def test_secure_aggregation_beside_ours_is_refused(tmp_path: Path, mods: list[Any]) -> None:
    line = federated(tmp_path, mods, timeout=5.0)
    assert not line["accepted"]
    assert len(line["refused"]) == 2
    assert all("secaggplus_configs" in reason for reason in line["refused"].values())


WRAPPERS: dict[Any, dict[str, float]] = {
    DifferentialPrivacyServerSideFixedClipping: {"clipping_norm": 0.5},
    DifferentialPrivacyClientSideFixedClipping: {"clipping_norm": 0.5},
    DifferentialPrivacyServerSideAdaptiveClipping: {"clipped_count_stddev": 2.0},
    DifferentialPrivacyClientSideAdaptiveClipping: {"clipped_count_stddev": 2.0},
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_strategies_around_ours_are_refused(tmp_path: Path, wrapper: Any) -> None:
    """They replace the loop, in which updates are decoded and rounds become durable."""
    ours = FedCAMS(server="fedavg", checkpoint=tmp_path / "server")
    around = wrapper(ours, noise_multiplier=1.0, num_sampled_clients=2, **WRAPPERS[wrapper])
    with pytest.raises(SpecError, match=r"do not wrap it in another strategy.*give privacy="):
        around.start(LocalGrid({5: ClientApp()}, {5: {}}), two_by_three(), 1, timeout=0.1)


def legacy_train(message: Message, context: Context) -> Message:
    """An app for Flower's older strategies, which alone know SecAgg+: it adds its node's id to each parameter."""
    parameters = compat.recorddict_to_fitins(message.content, keep_input=True).parameters
    arrays = ndarrays_to_parameters([values + context.node_id for values in parameters_to_ndarrays(parameters)])
    answer = FitRes(Status(Code.OK, ""), arrays, 1, {})
    return Message(compat.fitres_to_recorddict(answer, keep_input=False), reply_to=message)


class LastingGrid(LocalGrid):
    """Nodes keep their context between messages: a masked sum takes four of them."""

    def received(self, message: Message) -> tuple[Message, Context]:
        content, context = super().received(message)
        self.contexts = {context.node_id: context, **getattr(self, "contexts", {})}
        return content, self.contexts[context.node_id]


def test_in_a_run_of_secure_aggregation_ours_does_nothing(tmp_path: Path) -> None:
    """Flower's own strategy gets the mean of dense models; the mod passes on what is not for it."""
    app = ClientApp(mods=[secaggplus_mod, uplink("sign", state_dir=tmp_path / "sites")])
    app.train()(legacy_train)
    nodes = (1, 2, 3)
    grid, manager = (
        LastingGrid(dict.fromkeys(nodes, app), {node: {"site-id": node} for node in nodes}),
        SimpleClientManager(),
    )
    for node in nodes:
        manager.register(GridClientProxy(node, grid, 1))
    strategy = LegacyFedAvg(min_fit_clients=3, min_available_clients=3)
    context = LegacyContext(Context(1, 0, {}, RecordDict(), {}), ServerConfig(1), strategy, manager)
    context.state.config_records[MAIN_CONFIGS_RECORD] = ConfigRecord({Key.CURRENT_ROUND: 1})
    start = compat.parameters_to_arrayrecord(ndarrays_to_parameters([np.zeros(5)]), False)
    context.state.array_records[MAIN_PARAMS_RECORD] = start
    SecAggPlusWorkflow(3, 2)(grid, context)
    arrays = compat.arrayrecord_to_parameters(context.state.array_records[MAIN_PARAMS_RECORD], True)
    assert parameters_to_ndarrays(arrays)[0] == pytest.approx(2, abs=0.01)
    assert not (tmp_path / "sites").exists()


# -- why masked sums and our messages do not meet ----------------------------------------------------------------------


def test_sums_of_levels_are_no_levels_of_sums() -> None:
    """Modular sums of integers are exact, but every client's levels have their own steps."""
    codec, layout = compressor("blockq(bits=8)"), Layout.flat(64)
    draw = torch.Generator().manual_seed(0)
    codes = [codec.encode(scale * torch.randn(64, generator=draw), layout, 0) for scale in (1.0, 3.0)]
    exact = sum(codec.decode(code, layout) for code in codes)
    assert isinstance(exact, torch.Tensor)
    steps = [float(code["step"].float().mean()) for code in codes]
    levels = [codec.decode(code, layout) / step for code, step in zip(codes, steps, strict=True)]
    summed = sum(np.rint(level.numpy()) for level in levels) % 256  # what a masked sum would give
    signed = np.where(summed > 127, summed - 256, summed)
    error = min(float(np.abs(signed * step - exact.numpy()).max()) for step in (*steps, float(np.mean(steps))))
    assert error > 10 * max(steps), "no common step makes it right"


def test_what_secure_aggregation_adds_is_not_what_the_residual_was_made_from() -> None:
    """It rounds at random after the mod, so what the server decodes and what is owed do not add up to the update."""
    codec, layout = compressor("topk(ratio=1/4)"), Layout.flat(64)
    h = torch.randn(64, generator=torch.Generator().manual_seed(0))
    sent = codec.decode(codec.encode(h, layout, 0), layout)
    residual = h - sent
    (arrived,) = dequantize(quantize([sent.numpy().astype(np.float64)], 3.0, 1 << 10), 3.0, 1 << 10)
    assert float(np.abs(arrived + residual.numpy() - h.numpy()).max()) > 1e-4
