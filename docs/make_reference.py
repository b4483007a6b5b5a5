"""Write docs/reference.md from the registries. Run by `make docs`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import fedcams
import fedcams.experiment
import fedcams.trackers
from fedcams.compress import Compressor
from fedcams.experiment import Experiment
from fedcams.layout import Layout
from fedcams.recipes import RECIPES
from fedcams.registry import Spec, params, registered, resolve
from fedcams.registry.fields import show

PATH = Path(__file__).with_name("reference.md")
KINDS = {
    "server": (
        "Server optimizers",
        "Δ is the mean of the clients' decoded updates; a step turns it into the next model.",
    ),
    "compressor": ("Compressors", "How an update becomes bytes. The bound is on ‖C(x)-x‖²/‖x‖², for d = 1,000,000."),
    "downlink": ("Downlinks", "How the model reaches the clients."),
    "local": ("Local training", "What a client does with the model it received."),
    "control": ("Control", "Control variates, which correct the clients' gradients."),
    "transform": (
        "Transforms",
        "Changes to an update, to the message that is compressed, to an arrival or to the mean; join several with `+`.",
    ),
    "guard": (
        "Guards",
        "What refuses clients whose rows (updates, changes of buffers or control variates) are far too long.",
    ),
    "privacy": ("Privacy", "Noise that hides each client from those who see the models: see [privacy](privacy.md)."),
    "aggregate": ("Aggregates", "How decoded updates become one vector."),
    "average": ("Averages", "The averaged model, which is evaluated and saved in addition to the last one."),
    "probe": ("Probes", "Measurements that are recorded in every round."),
    "engine": ("Engines", "Ways to compute a cohort's local training; all engines give the same updates."),
    "sampler": ("Samplers", "Which clients take part in a round."),
    "partition": ("Partitions", "How a training set is split over clients."),
    "task": ("Tasks", "Data, loss and metric."),
    "schedule": (
        "Schedules",
        "Numbers that depend on the round and replace a piece's number: `fedams(lr=cosine(start=1, end=0))`.",
    ),
    "tracker": ("Trackers", "Where a run is logged, round by round: `--track csv`, `simulate(trackers=[...])`."),
    "model": ("Models", "Networks, made from the shape of an example and the number of classes."),
}
D = 1_000_000


def reference() -> str:
    """Return the whole page."""
    pieces = (line for kind in KINDS for line in _kind(kind))
    return "\n".join([*_head(), *pieces, *_recipes(), *_experiment()]) + "\n"


def _head() -> Iterator[str]:
    yield "# Reference"
    yield ""
    yield "This page lists every registered piece; `make docs` generates it from the code. A spec string such as"
    yield "`topk(ratio=1/64)` names a piece everywhere. Numbers are exact (`1/64`, `0.01`, `1e-3`), and parameters that"
    yield "you leave out have their defaults."


def _kind(kind: str) -> Iterator[str]:
    title, text = KINDS[kind]
    yield from ("", f"## {title}", "", text)
    for name, cls in registered(kind).items():
        yield from ("", f"### `{name}`", "", *_docstring(cls), *_parameters(cls), *_examples(kind, cls))


def _recipes() -> Iterator[str]:
    yield from ("", "## Recipes", "", 'Names that set several fields of a method at once: `recipe = "light"`.')
    for recipe in RECIPES.values():
        fields = ", ".join(f"`{key} = {value}`" for key, value in recipe.fields.items())
        yield from ("", f"### `{recipe.name}`", "", f"{recipe.doc} Sets {fields}. Measured: {recipe.cost}.")


def _experiment() -> Iterator[str]:
    yield from ("", "## Experiment", "", "The keys of an experiment's TOML file, all spec strings or plain values.")
    yield from _parameters(Experiment)


def _docstring(cls: type[Spec]) -> Iterator[str]:
    yield from (line.strip() for line in (cls.__doc__ or "").strip().splitlines())
    source = getattr(cls, "reference", "")
    if source:
        yield from ("", f"*{source}*")


def _parameters(cls: type[Spec]) -> Iterator[str]:
    if not params(cls):
        return
    yield from ("", "| key | default | allowed | meaning |", "|---|---|---|---|")
    for key, (param, default) in params(cls).items():
        given = {dataclasses.MISSING: "required", None: "none"}.get(default) or f"`{show(default)}`"
        yield f"| `{key}` | {given} | {param.allowed} | {param.doc} |"


def _examples(kind: str, cls: type[Spec]) -> Iterator[str]:
    pieces = [resolve(kind, spec) for spec in cls.examples]
    if not issubclass(cls, Compressor):
        yield from ("", "Examples: " + ", ".join(f"`{piece}`" for piece in pieces))
        return
    yield from ("", "| example | fields | bound | paper bits |", "|---|---|---|---|")
    yield from (_compressor_row(piece) for piece in pieces if isinstance(piece, Compressor))


def _compressor_row(piece: Compressor) -> str:
    layout = Layout.flat(D)
    fields = ", ".join(f"{f.count:,} {f.kind}{f.bits or ''} `{name}`" for name, f in piece.fields(layout).items())
    bound = piece.squared_error_bound(layout)
    claim = "unbiased" if bound is None else f"{bound:.6g}" + (" in expectation" if piece.in_expectation else "")
    return f"| `{piece}` | {fields} | {claim} | {piece.paper_bits(layout):,} |"


if __name__ == "__main__":
    PATH.write_text(reference())
    print(f"{PATH.name} written for fedcams {fedcams.__version__}")
