"""The text and the tables of the page, as HTML; every label and spec is escaped."""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape
from typing import Any

import numpy as np

from fedcams.registry import Spec
from fedcams.report.collection import Collection, Look
from fedcams.report.numbers import human_bytes, score
from fedcams.report.profiles import PROFILES
from fedcams.report.series import AXES
from fedcams.report.summary import NO_FEEDBACK, Row, Spread, Summary
from fedcams.report.tables import METHOD, PIECES, WORDS, Cell, cells, columns

FACTS = {
    "Task": "task", "Model": "model", "Partition": "partition", "Clients": "clients", "Cohort": "sampler",
    "Local training": "local", "Server": "server", "Uplink": "uplink", "Downlink": "downlink", "Rounds": "rounds",
    "Seeds": "seed",
}  # fmt: skip


def facts(collection: Collection, summary: Summary) -> str:
    """Return what was run, without what the table shows per method; if runs differ, all values."""
    described = [run.experiment for run in collection.runs]
    named = {name: key for name, key in FACTS.items() if key not in PIECES or not summary.shows(key)}
    shown = {name: _distinct(getattr(e, key) for e in described) for name, key in named.items()}
    whole = {name: _distinct(_spelled_out(getattr(e, key)) for e in described) for name, key in named.items()}
    if "Uplink" in shown and not all(e.feedback for e in described):
        shown["Uplink"] += NO_FEEDBACK
    shown["Seeds"] = whole["Seeds"] = _distinct(sorted(e.seed for e in described))
    shown["Partition"] = whole["Partition"]  # in full, because how uneven the data is matters most
    sizes = _distinct(f"{run.cohort_sizes.mean():.4g}" for run in collection.runs)
    shown["Cohort"] += f", {sizes} clients"
    return "".join(
        f'<div><dt>{name}</dt><dd title="{escape(whole[name])}">{escape(value)}</dd></div>'
        for name, value in shown.items()
    )


def versions(collection: Collection) -> str:
    """Return the versions and devices from the environments of the runs."""
    found: dict[str, list[Any]] = {}
    for run in collection.runs:
        for sitting in (run.environment, *run.environment.get("resumed", [])):
            for key, value in sitting.items():
                if key not in ("resumed", "round", "why_engine") and value is not None:
                    found.setdefault(key, []).append(value)
    return " · ".join(escape(f"{key} {_distinct(values)}") for key, values in found.items())


def notes(collection: Collection) -> str:
    """Return warnings about the numbers, such as unfinished runs, exploding ones and refused updates."""
    methods = collection.methods
    tasks = sorted({str(run.experiment.task) for run in collection.runs})
    kinds = (
        [f"Different tasks: {', '.join(tasks)}; compare accuracies only within one task"] if len(tasks) > 1 else [],
        *collection.cautions,
        [f"Left out, no round recorded yet: {path}" for path in collection.empty],
        [
            f"No timings: {method.label}; its times on networks count transfers only"
            for method in methods
            if any(np.isnan(run.seconds).all() for run in method.runs)
        ],
        [note for method in methods if (note := method.on_floor)],
    )
    listed = "".join(map(_listed, kinds))
    return f'<ul class="notes">{listed}</ul>' if listed else ""


SHOWN = 3
"""How many notes of one kind are shown unfolded; more would push the charts below the first screen."""


def _listed(notes: list[str]) -> str:
    items = [f"<li>{escape(note)}</li>" for note in notes]
    shown, rest = "".join(items[:SHOWN]), "".join(items[SHOWN:])
    more = f"<details><summary>{len(items) - SHOWN} more like this</summary><ul>{rest}</ul></details>"
    return shown + (f"<li>{more}</li>" if rest else "")


def tiles(summary: Summary) -> str:
    """Return the numbers that readers look for first."""
    if summary.target is None:
        return ""
    finals = [(each.mean, row, what) for row in summary.rows for each, what in _finals(row) if each]
    accuracy, best, what = max(finals, key=lambda found: found[0])
    shown = [
        ("Best final accuracy", score(accuracy, summary.percent), f"{best.label}{what}"),
        ("Target accuracy", score(summary.target, summary.percent), "as given" if summary.given else "95% of the best"),
    ]
    prefix, model = ("averaged_", ", averaged") if summary.averages else ("", "")
    for name, key in (
        (f"Fewest bytes to target{model}", f"{prefix}bytes_to_target"),
        (f"Fewest uplink bytes to target{model}", f"{prefix}bytes_up_to_target"),
    ):
        if there := [row for row in summary.rows if getattr(row, key) is not None]:
            least = min(there, key=lambda row: getattr(row, key))
            shown.append((name, human_bytes(getattr(least, key)), least.label))
    return "".join(
        f'<div class="card"><div class="name">{name}</div><div class="value">{escape(value)}</div>'
        f'<div class="name">{escape(note)}</div></div>'
        for name, value, note in shown
    )


def _finals(row: Row) -> tuple[tuple[Spread | None, str], ...]:
    return (row.final, ""), (row.averaged, ", averaged")


def summary_table(collection: Collection, summary: Summary) -> str:
    """Return the table's headings and body; each cell carries the value to sort by."""
    named = columns(summary)
    heads = "".join(
        f'<th scope="col" class="{_kind(name)}" title="{escape(doc)}">'
        f'<button type="button">{escape(name)}</button></th>'
        for name, doc in named.items()
    )
    rows = "".join(
        f"<tr>{''.join(_cell(*pair, look) for pair in zip(cells(row, summary), named, strict=True))}</tr>"
        for row, look in zip(summary.rows, collection.looks, strict=True)
    )
    return f"<thead><tr>{heads}</tr></thead><tbody>{rows}</tbody>"


def segments() -> str:
    """Return the buttons that choose the horizontal axis."""
    return "".join(
        f'<button type="button" data-axis="{axis.key}" aria-pressed="{str(not i).lower()}">{axis.short}</button>'
        for i, axis in enumerate(AXES)
    )


def network(collection: Collection, summary: Summary) -> str:
    """Return the rates to edit and the places that the script fills with a chart and a table."""
    if summary.target is None:
        return ""
    heads = "".join(f'<th scope="col">{profile.name}</th>' for profile in PROFILES)
    rows = "".join(
        f'<tr><th scope="row" class="text method">{_named(look, method.label)}</th>{"<td></td>" * len(PROFILES)}</tr>'
        for method, look in zip(collection.methods, collection.looks, strict=True)
    )
    shown = 100 * summary.target if summary.percent else summary.target
    return NETWORK.format(
        rates="".join(_rates(i) for i in range(len(PROFILES))),
        target=_input("target", shown, None),
        unit=", %" if summary.percent else "",
        factor=_input("factor", 1, 0),
        averaged=_averaged(summary),
        table=f'<thead><tr><th scope="col" class="text method">Method</th>{heads}</tr></thead><tbody>{rows}</tbody>',
    )


NETWORK = """<section class="live"><h2 id="network-head">Time to accuracy on your network</h2>
<div class="network">
<div class="card"><h3>Links</h3>
<table class="rates"><thead><tr><td></td><th scope="col">Down<br>Mbit/s</th><th scope="col">Up<br>Mbit/s</th>
<th scope="col">Latency<br>ms</th></tr></thead><tbody>{rates}</tbody></table>
<label class="row">Target accuracy{unit}{target}</label>
<label class="row">Computation ×{factor}</label>{averaged}</div>
<div class="card"><h3 id="title-network">Time to the target</h3>
<div class="chart" id="chart-network" role="figure" aria-labelledby="title-network"></div>
<div class="legend"></div></div>
<div class="card scroll wide" role="region" aria-labelledby="network-head" tabindex="0">
<table id="times">{table}</table></div>
</div>
<p class="small">The clients of a cohort work in parallel, so a round takes the time of one client’s bytes over its link
(model down, update up, one round trip) plus the seconds measured for the whole cohort without evaluation, times a
factor; 0 leaves computation out. Mean over seeds, if all of them reach the target. Small print: which part of the time
on the network, computation left out, is latency. Where it is more than half, a network is bound by latency, and fewer
bytes hardly shorten a round. You can edit every number.</p>
</section>
"""


def _averaged(summary: Summary) -> str:
    """The choice between last and averaged models; averaged ones at first, if all methods have them."""
    if not summary.averages:
        return ""
    checked = " checked" if all(row.averaged is not None for row in summary.rows) else ""
    return f'<label class="row">Averaged models<input id="averaged" type="checkbox"{checked}></label>'


def _rates(index: int) -> str:
    profile = PROFILES[index]
    given = {"down": profile.down, "up": profile.up, "latency": profile.latency}
    inputs = "".join(
        f"<td>{_input(f'{key}-{index}', value, 0 if key == 'latency' else 0.001, f'{profile.name}: {key}')}</td>"
        for key, value in given.items()
    )
    return f'<tr><th scope="row" class="text">{profile.name}</th>{inputs}</tr>'


def _input(key: str, value: float, least: float | None, name: str = "") -> str:
    low = "" if least is None else f' min="{least}"'
    named = f' aria-label="{name}"' if name else ""
    return f'<input id="{key}" type="number" step="any" required value="{value:.10g}"{low}{named}>'


def _cell(cell: Cell, column: str, look: Look) -> str:
    order = "" if cell.order is None else f' data-order="{escape(str(cell.order))}"'
    note = f"<small>{escape(cell.note)}</small>" if cell.note else ""
    text = escape(cell.text)
    if column == METHOD:
        text = _named(look, cell.text)
    elif column in WORDS:
        # In a narrow table a spec breaks after its name and between its parameters.
        text = f"<code>{'<wbr>'.join(f'<span>{part}</span>' for part in re.findall(r'[^(,]+[(,]? ?', text))}</code>"
    hint = f' title="{escape(cell.hint)}"' if cell.hint else ""
    tag, scope = ("th", ' scope="row"') if column == METHOD else ("td", "")
    return f'<{tag}{scope} class="{_kind(column)}"{order}{hint}>{text}{note}</{tag}>'


def _kind(column: str) -> str:
    return "text method" if column == METHOD else "text" if column in WORDS else ""


def _named(look: Look, label: str) -> str:
    """Return how a method is drawn, and its label, which breaks before the parameters of a spec if it must."""
    dot = f'<span class="dot" data-dash="{look.dash}" style="--c:{look.colour}"></span>'
    return dot + re.sub(r"(?<=\w)\((?=\w)", r"\g<0><wbr>", escape(label))


def _spelled_out(value: Any) -> str:
    return value.spelled_out() if isinstance(value, Spec) else str(value)


def _distinct(values: Iterable[Any]) -> str:
    """Return each value once, in order of appearance."""
    return ", ".join(dict.fromkeys(map(str, values)))
