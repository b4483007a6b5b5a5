"""The first table of docs/reproduction.md: what was asked for before anything was run, and whether it came."""

from __future__ import annotations

from collections.abc import Iterator

import reproduction_words as words
from reproduction_runs import Done, Results
from reproduction_tables import table, two_way


def headline(results: Results) -> Iterator[str]:
    """The results that were asked for before anything was run, and whether they came."""
    rows = [row for model in words.MODELS for row in _asked(results, model)]
    yield "## Main results\n"
    yield from table("model | method | accuracy | asked for | paper | fewer bytes | seconds a round", "llrrrrr", rows)
    yield words.HEADLINE
    for model in words.MODELS:
        yield from _buffers(model, {done.label: done for done in results.of(f"compression-{model}")})
    if results.runs:
        minutes = sum(sum(Done("", run).seconds) for run in results.runs) / 60
        yield f"Finished runs: {len(results.runs)}, {minutes:.0f} minutes of computing in all.\n"


ASKED = {("resnet18", "FedAMS"): 90.2, ("resnet18", "FedCAMS sign"): 89.4, ("resnet18", "FedCAMS top-k 1/64"): 89.0}
SECONDS = {"resnet18": 0.40, "convmixer": 0.45}
MIXER_LOSS, TWO_WAY_LOSS, TWO_WAY_FEWER, SIGN_SMALLER = 1.2, 0.7, 5, 31


def _asked(results: Results, model: str) -> Iterator[list[str]]:
    runs = {done.label: done for done in results.of(f"compression-{model}")}
    for label in ("FedAMS", "FedCAMS sign", "FedCAMS top-k 1/64"):
        if label not in runs:
            yield [words.MODELS[model], label, "not run yet", "", "", "", ""]
            continue
        done, paper = runs[label], words.PUBLISHED.get((f"compression-{model}", label), "")
        smaller = done.down / done.up
        fewer = f"{smaller:.1f}x" if label != "FedAMS" else ""
        fewer += _verdict(label != "FedCAMS sign" or smaller >= SIGN_SMALLER)
        yield [
            words.MODELS[model],
            label,
            f"{done.accuracy:.2f}",
            _wish(model, done, runs),
            paper,
            fewer,
            _speed(model, done),
        ]
    yield from _two_way_asked(results, model, runs)


def _buffers(model: str, runs: dict[str, Done]) -> Iterator[str]:
    """Why the sign of a small model is not 31 times smaller."""
    sign = runs.get("FedCAMS sign")
    if sign and sign.down / sign.up < SIGN_SMALLER:
        buffers = sign.sum("wire_up_buffers")
        alone = (sign.down - sign.sum("wire_down_buffers")) / max(1, sign.up - buffers)
        share = f"{100 * buffers / sign.up:.0f} %"
        yield (
            f"Of what {words.MODELS[model]} sends up with sign, {share} are batch-norm buffers,\n"
            f"which travel uncompressed; all else is {alone:.1f}x smaller.\n"
        )


def _wish(model: str, done: Done, runs: dict[str, Done]) -> str:
    if least := ASKED.get((model, done.label)):
        return f"at least {least}" + _verdict(done.accuracy >= least)
    if model == "convmixer" and done.label == "FedCAMS sign" and "FedAMS" in runs:
        away = abs(runs["FedAMS"].accuracy - done.accuracy)
        return f"within {MIXER_LOSS} of FedAMS" + _verdict(away <= MIXER_LOSS)
    return ""


def _speed(model: str, done: Done) -> str:
    return "" if done.second is None else f"{done.second:.3f}" + _verdict(done.second <= SECONDS[model])


def _verdict(met: bool) -> str:
    return "" if met else " (missed)"


def _two_way_asked(results: Results, model: str, runs: dict[str, Done]) -> Iterator[list[str]]:
    """The pair with the fewest bytes that loses no more than was asked for; if all do, the most accurate."""
    pairs, sign = two_way(results, f"two-way-{model}"), runs.get("FedCAMS sign")
    if not pairs or sign is None:
        return
    least = sign.accuracy - TWO_WAY_LOSS
    good = [done for done in pairs if done.accuracy >= least]
    best = min(good, key=lambda d: d.total) if good else max(pairs, key=lambda d: d.accuracy)
    times = sign.total / best.total
    wish = f"at least {least:.2f}, {TWO_WAY_FEWER}x" + _verdict(bool(good) and times >= TWO_WAY_FEWER)
    yield [words.MODELS[model], best.label, f"{best.accuracy:.2f}", wish, "", f"{times:.1f}x", _speed(model, best)]
