"""The notebook in examples: its cells run from top to bottom and give the outputs that it shows."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

PATH = Path(__file__).resolve().parents[2] / "examples" / "from_zero_to_a_comparison.ipynb"
AGAIN = f"the notebook is stale: jupyter nbconvert --to notebook --execute --inplace examples/{PATH.name}"
NUMBER = re.compile(r"\d[\d.,]*")


class Shown(NamedTuple):
    """What a cell shows; numbers differ between machines, and so do the spaces that align them."""

    printed: list[str]
    value: list[str]
    tables: int
    pictures: int

    @classmethod
    def of(cls, printed: str, value: str, tables: int, pictures: int) -> Shown:
        return cls(*(NUMBER.sub("#", text).split() for text in (printed, value)), tables, pictures)


def stored(outputs: list[dict[str, Any]]) -> Shown:
    """What the file says that a cell shows."""
    found = [output.get("data", {}) for output in outputs]
    printed = "".join(line for output in outputs for line in output.get("text", []))
    values = "".join(
        line for output in outputs if output["output_type"] == "execute_result" for line in output["data"]["text/plain"]
    )
    return Shown.of(printed, values, *(sum(kind in data for data in found) for kind in ("text/html", "image/png")))


def run_cell(source: str, names: dict[str, Any], pyplot: Any) -> Shown:
    """Run a cell as a notebook does, which also shows the value of its last line."""
    *lines, last = ast.parse(source).body
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(ast.Module(lines, []), PATH.name, "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), PATH.name, "eval"), names)
        else:
            exec(compile(ast.Module([last], []), PATH.name, "exec"), names)
    pictures = len(pyplot.get_fignums())
    pyplot.close("all")
    tables = getattr(value, "_repr_html_", lambda: None)() is not None
    return Shown.of(printed.getvalue(), "" if value is None else repr(value), tables, pictures)


@pytest.mark.filterwarnings("ignore:FigureCanvasAgg is non-interactive")
def test_its_cells_give_what_it_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what it says: fifty times fewer bytes, and more accurate than FedAvg."""
    matplotlib, _, _ = map(pytest.importorskip, ("matplotlib", "pandas", "sklearn"))
    matplotlib.use("Agg")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    cells = [cell for cell in json.loads(PATH.read_text("utf-8"))["cells"] if cell["cell_type"] == "code"]
    with torch.random.fork_rng():
        for place, cell in enumerate(cells, 1):
            given = run_cell("".join(cell["source"]), names, pytest.importorskip("matplotlib.pyplot"))
            assert (cell["execution_count"], stored(cell["outputs"])) == (place, given), AGAIN
    found = {label: names["summary"](each) for label, each in names["histories"].items()}
    dense, lean = found["FedAvg"], found["FedCAMS, both ways"]
    assert dense["MB up"] + dense["MB down"] > 50 * (lean["MB up"] + lean["MB down"])
    assert lean["accuracy, %"] > dense["accuracy, %"] + 2


def test_a_notebook_shows_a_plot_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its backend draws what is open at the end of a cell, besides the value of the last line."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    from fedcams.own.display import plot_records
    from fedcams.simulation import RoundRecord

    pyplot.close("all")
    monkeypatch.setattr(pyplot, "get_backend", lambda: "module://matplotlib_inline.backend_inline")
    figure = plot_records([RoundRecord(1, [0], train_loss=1.0)], [])
    assert len(figure.axes) == 1
    assert pyplot.get_fignums() == []
