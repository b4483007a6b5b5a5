"""What must be true of a run in which everything died at some time."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
from fedcams.flower.book import REPLICAS, Book
from fedcams.rounds.site import MODELS

from fedcams import Layout, ResidualStore, decode
from fedcams.downlink import HeldStore
from fedcams.downlink.message import Message
from fedcams.experiment import Built
from fedcams.rounds import server as half

Ledger = list[dict[str, Any]]


def sites(ledger: Ledger) -> list[int]:
    """Who was asked."""
    return sorted({site for line in ledger for site in line["cohort"]})


def check(folder: Path, ledger: Ledger, layout: Layout) -> None:
    """Nobody is forgotten, nothing counts twice, and accepted + residual = all updates of accepted rounds."""
    for line in ledger:
        told = [*line["accepted"], *line["refused"], *line["absent"]]
        assert sorted(told) == [str(site) for site in line["cohort"]], line
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
    server, start = built.simulation.server, built.state
    assert not any("OutOfStep" in str(line) or "out of step" in str(line) for line in ledger)
    if not server.downlink.client_keeps_model:
        return
    if server.downlink.server_keeps_rows:
        rows = ResidualStore.on_disk(server.layout, folder / "server" / REPLICAS)
        server = dataclasses.replace(server, replicas=rows)
    with contextlib.closing(Book(folder / "server", "demo", {}, server)) as book:
        state = book.load(half.start(server, start.x))
    instructions, _ = half.open(server, state, sites(ledger))
    (run,) = (folder / "sites").iterdir()
    for site, instruction in instructions.items():
        model = instruction.streams["model"]
        assert Message.from_bytes(model).base is not None, f"site {site} would get the dense model"
        held = HeldStore.on_disk(server.layout, run / str(site) / MODELS)
        server.downlink.receive(model, server.layout, held, site)  # raises OutOfStep


def residual(folder: Path, layout: Layout, site: int, last: int) -> np.ndarray:
    """What the site owes after its last accepted round; the word on that one may not have reached it."""
    (run,) = (folder / "sites").iterdir()
    store = ResidualStore.on_disk(layout, run / str(site) / "residuals")
    if store.round_of(site) != last:
        store.rollback(store.snapshot_round or 0)
    assert store.round_of(site) == last
    return store.gather([site])[0].double().numpy()


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
