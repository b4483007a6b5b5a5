"""The app of the tutorial on Flower, made from its page and run in this process."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

pytest.importorskip("flwr")
from flwr.app import Context, RecordDict
from test_snippets import blocks

from fedcams.flower.checkpoint import read_ledger
from flower_apps import quick  # noqa: F401  (a fixture)
from flower_grid import LocalGrid

SITES = 2


def test_the_app_trains_and_its_sites_are_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for language, text in blocks("docs/tutorials/flower.md"):
        if language in ("python", "toml"):
            path = tmp_path / text.splitlines()[0].removeprefix("# ")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path / "federation")
    monkeypatch.setenv("HOME", str(tmp_path))
    client, server = (importlib.import_module(f"my_app.{side}") for side in ("client", "server"))
    grid = LocalGrid(dict.fromkeys(range(SITES), client.app), {site: {"site-id": site} for site in range(SITES)})
    server.app(grid, Context(1, 0, {}, RecordDict(), {"rounds": 3}))
    ledger = read_ledger(tmp_path / "federation-server")
    assert [sorted(line["accepted"]) for line in ledger] == [["0", "1"]] * 3
