"""docs/reproduction.md with its pictures and its reports, and the parts of other pages that show these runs."""

from __future__ import annotations

import base64
import gzip
import re
from collections.abc import Iterator
from pathlib import Path

from fedcams.report import summarize
from fedcams.report.page import page as report_page
from reproduction import guard, tables, words
from reproduction import pictures as draw
from reproduction import small as in_small
from reproduction.by_bytes import PLAYS, by_bytes, in_short, plays
from reproduction.by_bytes import PRESETS as BY_BYTES
from reproduction.claims import claims, summary
from reproduction.costs import costs
from reproduction.runs import Done, Results, collection
from reproduction.scales import scales
from reproduction.seeds import seeds

ROOT = Path(__file__).resolve().parents[1]
DOCS, RESULTS, SMALL = ROOT / "docs", ROOT / "results", ROOT / "small_results"
FOLDER = "reproduction"
"""The folder of pictures and reports, next to the page."""


def page(results: Results, small: Results) -> str:
    """Return the whole page."""
    parts = [
        words.INTRO,
        *summary(results, in_small.verdicts(small)),
        *in_short(results),
        *tables.headline(results),
        *claims(results),
        words.SETTING,
        *tables.repeatability(results),
        *_reports(results),
    ]
    parts += [words.OPTIMIZERS, *(line for model in words.MODELS for line in _figure(results, "fig1", model))]
    parts += scales(results)
    parts += [words.COMPRESSORS, *(line for model in words.MODELS for line in _figure(results, "compression", model))]
    parts += [words.GAMMA, *_gamma(results)]
    parts += [words.COMMUNICATION, *tables.communication(results)]
    parts += [words.TWO_WAY, *_two_way(results, "two-way-resnet18")]
    parts += by_bytes(results)
    parts += plays(results)
    parts += [line for preset in further(results) for line in _further(results, preset)]
    parts += seeds(results)
    parts += costs(results)
    return "\n".join(parts).rstrip() + "\n"


def pictures(results: Results, small: Results) -> dict[str, list[draw.Panel]]:
    """Return the panels of every picture that has runs, by name."""
    found = in_small.pictures(small)
    for model in words.MODELS:
        found[f"fig1-{model}"] = _panels(results.of(f"fig1-{model}"), draw.accuracy_by_rounds, draw.loss_by_rounds)
        runs = results.of(f"compression-{model}")
        found[f"compression-{model}"] = _panels(runs, draw.accuracy_by_rounds, draw.accuracy_by_bytes_up)
    groups = {name: tables.measured(results, model) for model, name in words.MODELS.items()}
    found["gamma"] = [(draw.gamma_by_rounds(name), runs) for name, runs in groups.items() if runs]
    for preset in (*BY_BYTES, *PLAYS):
        found[preset] = _panels(results.of(preset), draw.averaged_by_rounds, draw.averaged_by_bytes)
    for preset in ("two-way-resnet18", *further(results)):
        found[preset] = _panels(results.of(preset), *_drawn(preset)) if _shown(results, preset) else []
    return {name: panels for name, panels in found.items() if panels}


def _panels(runs: list[Done], *draws: draw.Draw) -> list[draw.Panel]:
    return [(each, runs) for each in draws] if runs else []


def _drawn(preset: str) -> tuple[draw.Draw, ...]:
    if preset.startswith("two-way"):
        return draw.tradeoff, draw.accuracy_by_bytes
    if preset == "epsilon":
        return (draw.against_paper(words.EPSILON, words.EPSILON_RULES, words.BOTH_RULES),)
    return draw.accuracy_by_rounds, draw.loss_by_rounds


def _shown(results: Results, preset: str) -> bool:
    """Return whether a preset has a picture; a trade-off needs a run that compresses the model."""
    return not preset.startswith("two-way") or bool(tables.two_way(results, preset))


def reports(results: Results) -> dict[str, list[Done]]:
    """Return the runs of every HTML report, by name."""
    found = {}
    for model in words.MODELS:
        runs = [*results.of(f"fig1-{model}"), *results.of(f"compression-{model}")]
        found[model] = list({done.label: done for done in runs}.values())
        found[f"two-way-{model}"] = (
            results.of(f"two-way-{model}") if tables.two_way(results, f"two-way-{model}") else []
        )
    return {name: runs for name, runs in found.items() if runs}


def further(results: Results) -> list[str]:
    """Return the presets that get their own section: they have a run that no other section shows."""
    main = [f"{figure}-{model}" for figure in ("fig1", "compression") for model in words.MODELS]
    shown = {path for preset in (*main, "two-way-resnet18") for path in _paths(results, preset)}
    found = []
    for preset in words.FURTHER:
        if own := _paths(results, preset) - shown:
            found.append(preset)
            shown |= own
    return found


def _paths(results: Results, preset: str) -> set[Path]:
    return {run.path for done in results.of(preset) for run in done.runs}


def _reports(results: Results) -> Iterator[str]:
    names = {**words.MODELS, **{f"two-way-{model}": f"{name}, two-way" for model, name in words.MODELS.items()}}
    links = [f"[{names[name]}]({FOLDER}/{name}.html)" for name in reports(results)]
    if links:
        yield (f"**Interactive reports**, one HTML file each, to download and open in a browser: {', '.join(links)}.\n")


def _figure(results: Results, figure: str, model: str) -> Iterator[str]:
    preset = f"{figure}-{model}"
    runs = results.of(preset)
    yield f"### {words.MODELS[model]}\n\n`fedcams run {preset} --data DIR --device cuda`\n"
    if runs:
        yield from tables.accuracies(preset, runs)
        base = next((done for done in runs if done.label == "FedAMS"), None)
        yield from tables.lost(runs, base) if figure == "compression" and base else ()
        yield from _picture(preset, PANELS[figure], runs)
        yield tables.where(runs)
    yield from tables.missing(results, preset)


def _gamma(results: Results) -> Iterator[str]:
    groups = {model: tables.measured(results, model) for model in words.MODELS}
    if any(groups.values()):
        yield from tables.gammas(groups)
        yield from _picture("gamma", "γ of every round", [done for runs in groups.values() for done in runs])
    for model, runs in groups.items():
        wanted = [e for e in ("FedCAMS sign", "FedCAMS top-k 1/64") if e not in {done.label for done in runs}]
        if wanted:
            yield f"Not run yet, {words.MODELS[model]}: {', '.join(wanted)}.\n"


def _two_way(results: Results, preset: str) -> Iterator[str]:
    yield f"`fedcams run {preset} --data DIR --device cuda`\n"
    if tables.two_way(results, preset):
        yield from tables.tradeoff(results, preset)
        yield from _picture(preset, PANELS["two-way"], results.of(preset))
        yield tables.where(results.of(preset))
    yield from tables.missing(results, preset)


def _further(results: Results, preset: str) -> Iterator[str]:
    yield f"## {words.FURTHER[preset]}\n"
    if preset.startswith("two-way"):
        yield from _two_way(results, preset)
        return
    runs = results.of(preset)
    yield f"`fedcams run {preset} --data DIR --device cuda`\n"
    if preset in words.NOTES:
        yield words.NOTES[preset]
    yield from tables.accuracies(preset, runs)
    yield from _picture(preset, PANELS.get(preset, PANELS["fig1"]), runs)
    yield tables.where(runs)
    yield from tables.missing(results, preset)


PANELS = {
    "fig1": "Test accuracy and training loss against rounds",
    "compression": "Test accuracy against rounds and against bytes sent up",
    "two-way": "Accuracy against all bytes, at the end and during training",
    "epsilon": "Accuracy for each ε, next to the paper's",
}


def _picture(name: str, text: str, runs: list[Done]) -> Iterator[str]:
    yield f"![{text}]({FOLDER}/{name}.png)\n"
    several = any(len(done.runs) > 1 for done in runs)
    if name != "epsilon":
        rarely = any(run.experiment.evaluate_every > 1 for done in runs for run in done.runs)
        tested = ", counting only those that were tested with every seed" if rarely else ""
        bands = "; bands: from the lowest seed to the highest" if several else ""
        yield f"*Lines: moving mean over {2 * draw.AROUND + 1} rounds{tested}; faint: single rounds{bands}.*\n"
    elif several:
        yield "*Bars: from the lowest seed to the highest.*\n"


BLOCK = re.compile(r"(?<=<!-- CIFAR-10, by make reproduction -->\n).*(?=<!-- end -->)", re.DOTALL)
"""The part of docs/two-way.md that is written here."""


def two_way_block(results: Results) -> str:
    """Return what docs/two-way.md shows of CIFAR-10."""
    preset = "two-way-resnet18"
    if not tables.two_way(results, preset):
        return "Not run at full length yet.\n"
    runs = results.of(preset)
    lines = [*tables.tradeoff(results, preset), *_picture(preset, PANELS["two-way"], runs), tables.where(runs)]
    return "\n".join(lines)


BLOCKS = {"two-way.md": (BLOCK, two_way_block), "methods.md": (guard.BLOCK, guard.block)}
"""Parts of other pages, and how they are written."""


def write(results: Results, small: Results, docs: Path) -> None:
    """Write pages, pictures and reports; remove those that are no longer shown."""
    folder = docs / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    drawn = pictures(results, small)
    for name, panels in drawn.items():
        draw.picture(folder / f"{name}.png", panels)
    for name, runs in reports(results).items():
        write_report(folder / f"{name}.html", runs)
    kept = {f"{name}.png" for name in drawn} | {f"{name}.html" for name in reports(results)}
    for path in folder.iterdir():
        if path.name not in kept:
            path.unlink()
    (docs / "reproduction.md").write_text(page(results, small), "utf-8")
    (docs / "small.md").write_text(in_small.page(small, results), "utf-8")
    for name, (block, text) in BLOCKS.items():
        if (path := docs / name).exists():
            path.write_text(_with(block, text(results), path.read_text("utf-8")), "utf-8")


def _with(block: re.Pattern[str], text: str, page: str) -> str:
    """Return a page with this text as its block; backslashes in it stand for themselves."""
    return block.sub(lambda _: text, page)


# -- reports -------------------------------------------------------------------------------------------------------


def html(runs: list[Done]) -> str:
    """Return the HTML report on these runs."""
    shown = collection(runs)
    return report_page(shown, summarize(shown), alone=True)


def write_report(path: Path, runs: list[Done]) -> None:
    """Write the report, unless the file already has the same content."""
    text = html(runs)
    if not path.exists() or inflated(path.read_text("utf-8")) != inflated(text):
        path.write_text(text, "utf-8")


def inflated(text: str) -> str:
    """Return a report with its compressed data in clear, since versions of zlib compress differently."""
    return re.sub(r'(?<=<script type="text/plain" id="data">)[^<]*', _clear, text)


def _clear(packed: re.Match[str]) -> str:
    return gzip.decompress(base64.b64decode(packed[0])).decode()
