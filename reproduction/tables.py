"""The tables of docs/reproduction.md, and the sentences that follow from their numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from statistics import fmean
from typing import Any

from fedcams.plan.paper import ROUNDS
from reproduction import words
from reproduction.runs import LAST, Done, Results, ahead, spread

MB, GB = 1e6, 1e9


def table(heads: str, align: str, rows: list[list[str]]) -> Iterator[str]:
    """Yield a Markdown table: headings in one line, alignment as `l` and `r`."""
    yield f"| {heads} |"
    yield f"|{'|'.join({'l': '---', 'r': '--:'}[a] for a in align)}|"
    yield from (f"| {' | '.join(row)} |" for row in rows)
    yield ""


# -- main results --------------------------------------------------------------------------------------------------

MAIN = ("FedAMS", "FedCAMS sign", "FedCAMS top-k 1/64")
LOSS = 0.7
"""Points below FedCAMS sign that compressing both ways may cost to be among the main results."""
BUFFERS = 0.2
"""Buffers are mentioned if they are a larger share of the bytes up than this."""


def headline(results: Results) -> Iterator[str]:
    """Yield the main results of each model."""
    rows = [row for model in words.MODELS for row in _main(results, model)]
    yield "## Main results\n"
    heads = "model | method | accuracy | paper | fewer bytes | seconds per round | seeds"
    yield from table(heads, "llrrrrr", rows)
    yield words.HEADLINE.format(loss=LOSS)
    for model in words.MODELS:
        yield from _buffers(model, {done.label: done for done in results.of(f"compression-{model}")})
    if results.runs:
        timed = [run for run in results.runs if run.timings]
        minutes = sum(timing["seconds"] for run in timed for timing in run.timings) / 60
        rest = "" if len(timed) == len(results.runs) else f" for the {len(timed)} that were timed"
        yield f"Finished runs: {len(results.runs)}; {minutes:.0f} minutes of computing{rest}.\n"


def _main(results: Results, model: str) -> Iterator[list[str]]:
    name, preset = words.MODELS[model], f"compression-{model}"
    runs = {done.label: done for done in results.of(preset)}
    for label in MAIN:
        if done := runs.get(label):
            fewer = f"{done.down / done.up:.1f}x" if label != "FedAMS" else ""
            paper = words.PUBLISHED.get((preset, label), "")
            yield [name, label, spread(done.accuracies), paper, fewer, _times(done)[0], named(done.seeds)]
        else:
            yield [name, label, "not run yet", "", "", "", ""]
    pairs, sign = two_way(results, f"two-way-{model}"), runs.get("FedCAMS sign")
    if pairs and sign:
        good = [done for done in pairs if fmean(ahead(done, sign)) >= -LOSS]
        best = min(good, key=lambda d: d.total) if good else max(pairs, key=lambda d: d.accuracy)
        fewer = f"{sign.total / best.total:.1f}x"
        yield [name, best.label, spread(best.accuracies), "", fewer, "", named(best.seeds)]


def named(seeds: list[int]) -> str:
    """Return seeds as a table shows them."""
    return ", ".join(map(str, seeds))


def _buffers(model: str, runs: dict[str, Done]) -> Iterator[str]:
    """Yield why sign saves less on a small model."""
    sign = runs.get("FedCAMS sign")
    if sign and (buffers := sign.sum("wire_up_buffers")) > BUFFERS * sign.up:
        rest = (sign.down - sign.sum("wire_down_buffers")) / (sign.up - buffers)
        share = f"{100 * buffers / sign.up:.0f}%"
        yield (
            f"Batch-norm buffers travel uncompressed. They are {share} of what {words.MODELS[model]} sends up with\n"
            f"sign; everything else is {rest:.1f}x smaller.\n"
        )


# -- one section ---------------------------------------------------------------------------------------------------


def accuracies(preset: str, runs: list[Done]) -> Iterator[str]:
    """Yield a table with one line per run; columns without any entry are left out."""
    compressed = any(str(done.run.experiment.uplink) != "identity" for done in runs)
    published = [words.PUBLISHED.get((preset, done.label), "") for done in runs]
    rows = [
        [
            done.label,
            spread(done.accuracies),
            f"{done.last:.2f}",
            f"{done.best:.2f}",
            paper,
            *(_sizes(done) if compressed else ("", "")),
            *_times(done),
            named(done.seeds),
        ]
        for done, paper in zip(runs, published, strict=True)
    ]
    heads = ["run", "accuracy", "last", "best", "paper", "up", "smaller", "seconds per round", "minutes", "seeds"]
    shown = [place for place in range(len(heads)) if any(row[place] for row in rows)]
    cells = [[row[place] for place in shown] for row in rows]
    yield from table(" | ".join(heads[place] for place in shown), "l" + "r" * (len(shown) - 1), cells)


def _sizes(done: Done) -> list[str]:
    """Bytes up, and how many times fewer than dense updates, which are as large as the dense models that go down."""
    smaller = f"{done.down / done.up:.1f}x" if str(done.run.experiment.downlink) == "none" else ""
    return [f"{done.up / GB:.1f} GB" if done.up >= GB else f"{done.up / 1e6:.0f} MB", smaller]


def _times(done: Done) -> list[str]:
    if done.second is None:
        return ["", ""]
    return [f"{done.second:.3f}", f"{sum(done.seconds) / 60:.1f}"]


def lost(runs: list[Done], base: Done) -> Iterator[str]:
    """Yield the points of accuracy that compression costs, over the seeds that both methods have."""
    others = [f"{done.label} {spread(ahead(base, done))}" for done in runs if done is not base]
    if others:
        yield f"Points lost against {base.label}: {', '.join(others)}.\n"


def where(runs: list[Done]) -> str:
    """Return devices and versions, engines if they were recorded, each once, the seeds, and how often was tested."""
    places = dict.fromkeys(place for done in runs for place in done.environments)
    made = [run.environment for done in runs for run in done.runs]
    found = [(name, {str(about[name]) for about in made if about.get(name)}) for name in ("fedcams", "engine")]
    named = "".join(f", {name} {listed(values)}" for name, values in found if values)
    return f"{'; '.join(places)}{named}. {_seeds_of(runs)}.\n"


def listed(values: Iterable[int] | Iterable[str], word: str = "and") -> str:
    """Return values in ascending order, as in `1, 2 and 4`."""
    *first, last = map(str, sorted(values))
    return f"{', '.join(first)} {word} {last}" if first else last


def _seeds_of(runs: list[Done]) -> str:
    """Return the seeds in words, with a note if some methods lack some of them."""
    seeds = {seed for done in runs for seed in done.seeds}
    named = f"Seed{'s' * (len(seeds) > 1)} {listed(seeds)}"
    differ = len({tuple(done.seeds) for done in runs}) > 1
    every = {run.experiment.evaluate_every for done in runs for run in done.runs}
    often = "" if every == {1} else f"; tested every {listed(every, 'or')} rounds"
    return f"{named}, one run each{often}" + ("; not every method has all seeds" if differ else "")


def missing(results: Results, preset: str) -> Iterator[str]:
    """Yield the labels of a preset that have no run."""
    if labels := results.missing(preset):
        yield f"Not run yet: {'; '.join(labels)}.\n"


# -- γ, communication, both ways ---------------------------------------------------------------------------------------


def measured(results: Results, model: str) -> list[Done]:
    """Return the runs of a model that recorded γ, over a cohort or over all clients."""
    full = [Done(f"{done.label}, all 10 clients", done.runs) for done in results.of(f"full-{model}")]
    return [done for done in (*results.of(f"gamma-{model}"), *full) if done.gamma]


def gammas(groups: dict[str, list[Done]]) -> Iterator[str]:
    """Yield a table of γ at the start, at the end and at its highest."""
    rows = [
        [words.MODELS[model], done.label, f"{done.early_gamma:.2f}", f"{done.late_gamma:.2f}",
         f"{max(done.gamma.values()):.2f}"]
        for model, runs in groups.items() for done in runs
    ]  # fmt: skip
    heads = f"model | run | mean of the first {LAST} rounds | mean of the last {LAST} | highest"
    yield from table(heads, "llrrr", rows)
    measured = [done for runs in groups.values() for done in runs]
    grown = [done.label for done in measured if done.late_gamma > done.early_gamma]
    if grown:
        shown = "every row" if len(grown) == len(measured) else f"{len(grown)} of {len(measured)} rows"
        yield (
            f"In {shown}, γ is higher in the last rounds than in the first. Whether\n"
            "it stays bounded in longer runs remains open; on quadratics it grows as the\n"
            "[gradient falls](theory.md#measured).\n"
        )


def communication(results: Results) -> Iterator[str]:
    """Yield a table of the paper's bits, ours by its rule, and those on the wire."""
    rows = []
    for done in results.of("compression-resnet18"):
        cohort = len(done.run.records[0].cohort)
        bits = done.sum("paper_bits_up", "paper_bits_down")
        rows.append(
            [
                done.label,
                words.BITS[done.label],
                f"{bits:.2e}".replace("e+", "e"),
                f"{8 * done.total / cohort:.2e}".replace("e+", "e"),
            ]
        )
    if rows:
        yield from table(f"run | paper | bits in {ROUNDS} rounds by its rule | on the wire", "lrrr", rows)
    yield from missing(results, "compression-resnet18")


def two_way(results: Results, preset: str) -> list[Done]:
    """Return the runs of a preset that also compress the model."""
    return [done for done in results.of(preset) if str(done.run.experiment.downlink) != "none"]


def tradeoff(results: Results, preset: str) -> Iterator[str]:
    """Yield a table of all bytes against accuracy, with what is saved and what is lost."""
    runs = results.of(preset)
    dense = next((done for done in runs if done.label == "FedAMS"), None)
    base = next((done for done in runs if done.label == "FedCAMS sign"), None)
    rows = []
    for done in runs:
        sizes = [f"{size / GB:.1f} GB" for size in (done.up, done.down, done.total)]
        fewer = [f"{other.total / done.total:.1f}x" if other else "" for other in (base, dense)]
        gone = f"{fmean(ahead(base, done)):.2f}" if base and done is not base else ""
        held = "" if done.held is None else f"{done.held:.2f}"
        about = [done.label, f"`{done.run.experiment.downlink}`", spread(done.accuracies), gone, held]
        rows.append([*about, *sizes, *fewer])
    heads = "run | downlink | accuracy | lost | held | up | down | up + down | fewer than sign | fewer than dense"
    yield from table(heads, "llrrrrrrrr", rows)


def repeatability(results: Results) -> Iterator[str]:
    """Yield what repeats, and the runs that show it."""
    yield words.REPEATABILITY
    for first, *others in results.repeats():
        for other in others:
            yield _compared(*(Done(run.experiment.label, [run]) for run in (first, other)))
    yield ""


def _same(one: dict[str, Any], two: dict[str, Any]) -> bool:
    """Return whether two records agree in all that both measured."""
    return all(one[key] == two[key] for key in one.keys() & two.keys() if None not in (one[key], two[key]))


def _compared(one: Done, two: Done) -> str:
    pairs = zip(one.run.records, two.run.records, strict=True)
    differing = [a.round for a, b in pairs if not _same(a.to_dict(), b.to_dict())]
    model = words.NAMES.get(str(one.run.experiment.model), str(one.run.experiment.model))
    seed, rounds = one.run.experiment.seed, len(one.run.records)
    name = f"Two runs of {model} with *{one.label}* and seed {seed}, {rounds} rounds each: "
    if not differing:
        return f"{name}all records are equal."
    where = [done.run.environment for done in (one, two)]
    apart = [
        name for name in ("fedcams", "commit", "device", "engine", "torch") if len({e.get(name) for e in where}) > 1
    ]
    why = f", with another {' and '.join(apart)}" if apart else ""
    scores = f"accuracies are {one.accuracy:.2f} and {two.accuracy:.2f}"
    return f"{name}records differ from round {differing[0]}{why}; {scores}."
