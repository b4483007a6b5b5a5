"""Checks that must hold for a run in which every process was killed at some point."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from fedcams import Layout, RowStore, decode
from fedcams.downlink import HeldStore
from fedcams.downlink.message import Message
from fedcams.experiment import Built
from fedcams.flower.checkpoint import RUN, FlowerCheckpoint
from fedcams.rounds import Server, ServerState
from fedcams.rounds import server as server_side
from fedcams.rounds.durable import MODELS, ROWS
from fedcams.runs.checkpoint import REPLICAS

Ledger = list[dict[str, Any]]


def sites(ledger: Ledger) -> list[int]:
    """Who was asked and took part; a node that fails its greeting is asked under its own id, and fails again."""
    return sorted({int(site) for line in ledger for site in line["accepted"]})


def check(folder: Path, ledger: Ledger, layout: Layout) -> None:
    """Nobody is forgotten, nothing counts twice, and accepted + residual = all updates of accepted rounds."""
    for line in ledger:
        told = [*line["accepted"], *line["refused"], *line["absent"]]
        assert sorted(told) == sorted(str(site) for site in line["cohort"]), line
    named = [digest for line in ledger for digest in line["accepted"].values()]
    assert len(set(named)) == len(named)
    for site in sites(ledger):
        taken = {line["round"]: line["accepted"][str(site)] for line in ledger if str(site) in line["accepted"]}
        payloads = [
            decode((folder / "payloads" / name).read_bytes(), layout).double().numpy() for name in taken.values()
        ]
        updates = [np.fromfile(folder / "updates" / f"{site}-{round}", np.float32) for round in taken]
        total = np.sum(payloads, axis=0) + residual(folder, layout, site, max(taken))
        assert np.isfinite(total).all()
        assert np.allclose(total, np.sum(updates, axis=0, dtype=np.float64), atol=1e-4), f"site {site}"


def check_in_step(folder: Path, ledger: Ledger, built: Built) -> None:
    """Nobody was ever out of step, and what the server would send next fits what every site holds."""
    server, downlink = built.simulation.server, built.simulation.server.method.downlink
    assert not any("OutOfStep" in str(line) or "out of step" in str(line) for line in ledger)
    if not downlink.client_keeps_model:
        return
    if downlink.server_keeps_rows:
        held = server_side.replica_layouts(server.method, server.layout, server.buffer_layout)
        rows = RowStore.on_disk(held, folder / "server" / REPLICAS)
        server = dataclasses.replace(server, replicas=rows)
    instructions, _ = server_side.instruct(server, saved(folder / "server", server, built.state), sites(ledger))
    (run,) = (folder / "sites").iterdir()
    for site, instruction in instructions.items():
        assert Message.from_bytes(instruction.streams["model"]).base is not None, (
            f"site {site} would get the dense model"
        )
        layouts = server.method.delivered(server.layout, server.buffer_layout)
        store = HeldStore.on_disk(server.layout, run / str(site) / MODELS, layouts.get("buffers"))
        downlink.receive(
            {name: instruction.streams[name] for name in layouts}, layouts, store, site
        )  # raises OutOfStep


def saved(folder: Path, server: Server, start: ServerState) -> ServerState:
    """The state in a server's folder."""
    told = json.loads((folder / RUN).read_bytes())
    identity = {key: value for key, value in told.items() if key not in ("fedcams_flower", "name", "run", "digest")}
    with contextlib.closing(FlowerCheckpoint(folder, told["run"], identity, server)) as checkpoint:
        return checkpoint.load(start)


def residual(folder: Path, layout: Layout, site: int, last: int) -> np.ndarray:
    """What the site owes after its last accepted round; the word on that one may not have reached it."""
    (run,) = (folder / "sites").iterdir()
    store = RowStore.on_disk({"residual": layout}, run / str(site) / ROWS)
    if store.round_of(site) != last:
        store.rollback(store.snapshot_round or 0)
    assert store.round_of(site) == last
    return store.gather("residual", [site])[0].double().numpy()


def canonical(ledger: Ledger) -> list[str]:
    """What does not depend on the clock: how Flower worded that a node is gone does, and who repeated a reply."""
    return [json.dumps({**line, "absent": sorted(line["absent"]), "notes": None}, sort_keys=True) for line in ledger]


def show(ledger: Ledger) -> None:
    for line in ledger:
        fates = {site: f"accepted {digest[:8]}" for site, digest in line["accepted"].items()}
        fates |= {site: f"refused ({reason})" for site, reason in line["refused"].items()}
        fates |= {site: f"absent ({reason})" for site, reason in line["absent"].items()}
        text = ", ".join(f"{site}: {fates[site]}" for site in sorted(fates))
        print(f"round {line['round']:3}  {text}  {line['notes'] or ''}")
