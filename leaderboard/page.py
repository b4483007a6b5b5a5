"""docs/leaderboard.md: a table and a picture for each setting, and how to add an entry."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter, PercentFormatter
from PIL import Image

from fedcams.escaping import plain
from fedcams.report.collection import look
from fedcams.report.figures import MARKERS, STYLE
from fedcams.report.numbers import human_bytes
from leaderboard.entry import ROOT, Entry, read_entries

DOCS = ROOT / "docs"
PAGE, FOLDER = "leaderboard.md", "leaderboard"
DIGEST = "fedcams:input"
TASKS = {"cifar10": "CIFAR-10", "digits": "Digits"}
MODELS = {"resnet18": "ResNet-18", "convmixer": "ConvMixer-256-8"}
INTRO = """\
# Leaderboard

This page compares methods in the same setting by accuracy and by all bytes, up and down. *Accuracy* is the percentage
of test examples that the server's last models classify correctly, averaged over the last fifth of the rounds and over
seeds. *Averaged* is that of the averaged model at the end, if the method keeps one; averaging costs no bytes. *Fewer*
compares all bytes with dense messages both ways. Each row is a small file in
[leaderboard/entries](../leaderboard/entries); `make leaderboard` writes this page from these files. With one seed,
differences of a few tenths of a point may be chance.
"""
CAPTION = "*Filled marks: averaged models; hollow marks: last models.*\n"
ADDING = """\
## Adding your own

A compressor is [one file](adding-a-compressor.md). Measuring it on digits takes a minute on a CPU, with the demo's
setting and seeds:

```sh
fedcams --import mine run demo --only FedAMS -s uplink='mine(k=8)' \\
    --out runs/mine
python -m leaderboard add runs/mine --label 'FedCAMS mine' --import mine \\
    --source 'a link to your runs'
```

On CIFAR-10, with the paper's setting, each run takes a few minutes on a GPU:

```sh
fedcams --import mine run bytes-resnet18 --only FedAMS -s uplink='mine(k=8)' \\
    --data DIR --device cuda --out runs/mine
```

`add` writes the entry from the finished runs, then updates this page. Tune the server optimizer on different seeds from
1, 2 and 3, as the demo's [sweep](../sweeps/demo/sweep.toml) does. Bytes are the lengths of real messages, as the
simulator counts them. Measure your own downlink or average in the same way.
"""


def page(entries: Sequence[Entry]) -> str:
    """Return the whole page."""
    parts = [INTRO]
    for name, group in groups(entries).items():
        parts += [f"## {title(group[0])}\n", _setting(group[0]), *_table(group)]
        parts += [f"![Accuracy against all bytes, {title(group[0])}]({FOLDER}/{name}.png)\n", CAPTION]
    return "\n".join([*parts, ADDING])


def groups(entries: Sequence[Entry]) -> dict[str, list[Entry]]:
    """Return the entries of each setting, by its name, from the most bytes to the fewest; large settings come first."""
    ordered = sorted(entries, key=lambda entry: str(entry.setting))
    found = [list(group) for _, group in groupby(ordered, key=lambda entry: str(entry.setting))]
    ranked = [sorted(group, key=lambda entry: (-entry.total, entry.label)) for group in found]
    return _named(sorted(ranked, key=len, reverse=True))


def title(entry: Entry) -> str:
    """Return a setting in a few words, such as `CIFAR-10, ResNet-18, dirichlet`."""
    task, model, partition = (str(entry.setting[key]) for key in ("task", "model", "partition"))
    return ", ".join([TASKS.get(task, plain(task)), MODELS.get(model, _code(model)), _code(partition)])


def _named(ranked: Sequence[list[Entry]]) -> dict[str, list[Entry]]:
    """Return the groups by name; those whose settings look alike in short are numbered."""
    found: dict[str, list[Entry]] = {}
    for group in ranked:
        name = group[0].group
        again = sum(other[0].group == name for other in found.values())
        found[f"{name}-{again + 1}" if again else name] = group
    return found


def _setting(entry: Entry) -> str:
    said = {key: plain(str(value)) for key, value in entry.setting.items()}
    part = "" if said["train_fraction"] == "1" else f" that each train on {said['train_fraction']} of their data"
    sampler, local = _code(entry.setting["sampler"]), _code(entry.setting["local"])
    return f"{said['rounds']} rounds, {said['clients']} clients{part}, cohorts {sampler}, {local}.\n"


def _table(group: Sequence[Entry]) -> Iterator[str]:
    yield "| method | accuracy | averaged | fewer | up + down | up | down | seeds | server | uplink | downlink | runs |"
    yield "|---|--:|--:|--:|--:|--:|--:|--:|---|---|---|---|"
    dense = max((entry.total for entry in group if entry.dense), default=None)
    for entry in group:
        specs = [_code(entry.method.get(key, default)) for key, default in DEFAULTS.items()]
        averaged = "" if entry.averaged is None else f"{entry.averaged:.2f}"
        sizes = [human_bytes(size) for size in (entry.total, entry.bytes_up, entry.bytes_down)]
        fewer = "" if dense is None else f"{dense / entry.total:.1f}x"
        cells = [
            plain(entry.label),
            f"{entry.accuracy:.2f}",
            averaged,
            fewer,
            *sizes,
            str(len(entry.seeds)),
            *specs,
        ]
        yield f"| {' | '.join([*cells, _source(entry.source)])} |"
    yield ""
    yield f"Measured on: {'; '.join(dict.fromkeys(chain.from_iterable(map(_made_with, group))))}.\n"


def _made_with(entry: Entry) -> list[str]:
    """Return the device with each of the versions, which may differ between seeds."""
    device = "CPU" if entry.device == "cpu" else plain(entry.device)
    return [f"{device}, {plain(versions).replace('python', 'Python')}" for versions in entry.versions.split("; ")]


DEFAULTS = {"server": "fedams", "uplink": "identity", "downlink": "none"}


def _source(source: str) -> str:
    return f"[{source}](../{source})" if (ROOT / source).is_dir() else _code(source)


def _code(value: object) -> str:
    """Return a value as code in one cell of a table, which nothing in it can end."""
    text = " ".join(str(value).split()).replace("`", "'").replace("|", r"\|")
    return f"`{text}`"


# -- pictures ----------------------------------------------------------------------------------------------------------


def picture(path: Path, group: Sequence[Entry]) -> None:
    """Draw accuracy against all bytes: full marks for averaged models, hollow ones for the last models."""
    if is_current(path, group):
        return
    with mpl.rc_context(STYLE):
        figure = Figure((7.2, 3.6), layout="constrained")
        axes = figure.subplots()
        for index, entry in enumerate(group):
            _mark(axes, index, entry)
        axes.set(xscale="log", xlabel="All bytes, up + down, all clients", ylabel="Test accuracy")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(EngFormatter(unit="B"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.yaxis.set_major_formatter(PercentFormatter(100.0))
        figure.legend(loc="outside right upper")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, bbox_inches="tight", metadata={"Software": None, DIGEST: digest(group)})


def _mark(axes: Any, index: int, entry: Entry) -> None:
    shown = look(index)
    style = {"color": shown.colour, "marker": MARKERS[shown.dash], "ls": "", "ms": 7}
    if entry.averaged is None:
        axes.plot(entry.total, entry.accuracy, markerfacecolor="white", label=entry.label, **style)
        return
    axes.plot([entry.total] * 2, [entry.accuracy, entry.averaged], color=shown.colour, lw=0.8)
    axes.plot(entry.total, entry.accuracy, markerfacecolor="white", **style)
    axes.plot(entry.total, entry.averaged, label=entry.label, **style)


def digest(group: Sequence[Entry]) -> str:
    """Return a hash of everything that a picture shows and of how it is drawn."""
    drawn = "".join(entry.to_toml() for entry in group)
    return hashlib.sha256(Path(__file__).read_bytes() + drawn.encode()).hexdigest()


def is_current(path: Path, group: Sequence[Entry]) -> bool:
    """Return whether the picture exists and shows these entries."""
    if not path.exists():
        return False
    with Image.open(path) as image:
        return image.info.get(DIGEST) == digest(group)


def write(entries: Path, docs: Path) -> None:
    """Write the page and its pictures; remove those that are no longer shown."""
    found = read_entries(entries)
    for name, group in groups(found).items():
        picture(docs / FOLDER / f"{name}.png", group)
    for path in (docs / FOLDER).glob("*.png"):
        if path.stem not in groups(found):
            path.unlink()
    (docs / PAGE).write_text(page(found), "utf-8")
