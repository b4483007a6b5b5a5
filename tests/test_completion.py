"""Shell completion: how a shell requests it, and what it offers."""

from __future__ import annotations

from pathlib import Path

import pytest

from command_line import fedcams
from fedcams.cli.tables import known_kinds
from fedcams.experiment.preset import load_preset, presets
from fedcams.registry import registered


def offered(*words: str) -> list[str]:
    """What bash is told for the last word, which is not complete."""
    typed = " ".join(("fedcams", *(word.replace(" ", "\\ ") for word in words)))
    environment = {"_FEDCAMS_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(len(words))}
    result = fedcams(prog_name="fedcams", env=environment)
    return [line for line in str(result.stdout).splitlines() if line]


def test_commands_presets_and_files_are_offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "default.toml").write_text("")
    assert offered("swe") == ["sweep"]
    assert offered("ne") == ["new"]
    assert offered("run", "") == [*presets(), "default.toml"]
    assert offered("run", "de") == ["demo", "default.toml"]


def test_labels_are_those_of_the_preset_or_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in presets():
        assert offered("run", name, "--only", "") == list(
            dict.fromkeys(each.label for each in load_preset(name).experiments)
        )
    (tmp_path / "mine.toml").write_text("rounds = 3\n[[run]]\n[[run]]\nlabel = 'fast'\ngrid = { rounds = [1] }")
    assert offered("sweep", "mine.toml", "--only", "") == ["run", "fast"]
    (tmp_path / "garbled.toml").write_text("= =")
    assert offered("run", "mine.toml", "garbled.toml", "demo", "--only", "")[:3] == ["run", "fast", "FedAvg"]
    assert offered("run", "garbled.toml", "--only", "") == []


def test_kinds_and_pieces_are_those_that_are_registered() -> None:
    assert offered("list", "") == known_kinds()
    assert offered("list", "pre") == ["presets"]
    assert offered("run", "demo", "--track", "") == list(registered("tracker"))
    assert offered("plan", "--uplink", "to") == ["topk"]
    assert offered("plan", "--downlink", "") == list(registered("downlink"))
    assert offered("theory", "steps", "--task", "") == list(registered("task"))
