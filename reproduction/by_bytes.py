"""The sections on accuracy against all bytes, for images and for text: all methods averaged, as means over seeds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

from fedcams.report import summarize
from fedcams.report.networks import network_markdown
from reproduction.runs import NEAR, Done, Results, collection, spread, with_common_seeds
from reproduction.tables import GB, MB, missing, named, table, where

PRESETS = {
    "bytes-resnet18": "ResNet-18",
    "bytes-convmixer": "ConvMixer-256-8",
    "bytes-noniid-resnet18": "ResNet-18, different labels (Dirichlet 0.3)",
}
PLAYS = {"shakespeare-lstm": "LSTM", "shakespeare-transformer": "Transformer"}
TEXT = """\
## Accuracy against all bytes

[Recipes](methods.md#recipes) compress both directions or only updates. All methods here average the server's models in
the same way. *Last 100* is the mean test accuracy over the last 100 rounds, of which every tenth was tested;
*averaged* is the accuracy of the averaged model after the last round, with the lowest and the highest seed. *Fewer*
compares with the first row. Bytes include first contacts and buffers, but not [delivering the final
model](#delivering-the-final-model).

The ratios and schedules of the two-way recipes were tuned in earlier runs with seed 1, and their server's rate in runs
of 60 rounds with seed 11. That server uses less momentum and a lower rate that falls at the end. The rows *lower
falling rate* use this server without compression, and with compressed updates only. With compressed updates it helps.
Without compression, training breaks down around round 30 and recovers slowly, and the averaged model ends lower than
with the paper's rate. Where clients have different labels, the row *recipes' rate* uses it without compression.
"""
PLAYS_TEXT = """\
## Shakespeare's plays

The models predict the next character of a role's lines. Each of {clients} roles is one client; 10 of them train per
round, for one local epoch, over {rounds} rounds. Clients, rounds, the LSTM's local training, and its rates for FedAvg
and FedAdam are those of [Adaptive Federated Optimization](https://arxiv.org/abs/2003.00295). The transformer's clients
train with AdamW, and its server rates are not tuned. The columns are the same as in the section on
[all bytes](#accuracy-against-all-bytes); models were evaluated every {tested} rounds. The longest role has 88 times as
much text as the shortest, so the [guard](methods.md#the-guard) accepts 10 times the usual norm here.
"""
DELIVERY = """\
### Delivering the final model

`python benchmarks/delivery.py bytes-resnet18 "{label}" --data DIR --device cuda --save`

When a run ends, each of the {clients} clients holds an older model. To give all of them the averaged model, the server
sends each client the difference once. The table shows the cost for each compressor and the accuracy of the delivered
models. *Fewer* compares a run and its delivery with dense FedAMS and a dense delivery. Batch-norm buffers travel dense
and are not counted: they add 0.04 MB per client. Accuracies are means over {tested} clients of one run (seed {seed}),
whose averaged model reaches {accuracy:.2f}%.
"""
NETWORKS = """\
### Time on a network

The table shows how long ResNet-18 takes to reach {target:.2f}% on each network, with the last and with the averaged
model, as means over seeds. The time of a round is the network's latency, plus one client's transfers, plus the seconds
measured on the GPU, which some runs shared with others. *Latency* is the share of latency in the time on the network,
not counting the GPU. Every tenth round was tested.
"""
PICTURE = "Accuracy of averaged models against rounds and against all bytes"
RECORD = Path(__file__).resolve().parents[1] / "benchmarks" / "records" / "delivery.json"


def by_bytes(results: Results) -> Iterator[str]:
    """Yield the section on images, with a table for each preset that has runs; nothing without any."""
    found = {preset: runs for preset in PRESETS if (runs := results.of(preset))}
    if found:
        yield TEXT
    for preset, runs in found.items():
        yield from _preset(preset, PRESETS[preset], runs)
    if "bytes-resnet18" in found:
        yield from networks(found["bytes-resnet18"])
        yield from delivery(found["bytes-resnet18"], json.loads(RECORD.read_text()))


def plays(results: Results) -> Iterator[str]:
    """Yield the section on text, with a table for each preset that has runs; nothing without any."""
    found = {preset: runs for preset in PLAYS if (runs := results.of(preset))}
    every = sorted({run.experiment.evaluate_every for runs in found.values() for done in runs for run in done.runs})
    for runs in list(found.values())[:1]:
        about = runs[0].run.experiment
        tested = " or ".join(map(str, every))
        yield PLAYS_TEXT.format(clients=about.clients, rounds=about.rounds, tested=tested)
    for preset, runs in found.items():
        yield from _preset(preset, PLAYS[preset], runs)
        yield from missing(results, preset)
        yield from compared(runs)


def compared(runs: list[Done]) -> Iterator[str]:
    """Yield by how many points averaged models lie above or below that of FedAMS; nothing without it."""
    known = {done.label: done.averaged for done in with_common_seeds(runs) if done.averaged is not None}
    base = known.pop("FedAMS", None)
    if base is None or not known:
        return
    apart = {label: score - base for label, score in known.items()}
    near = [label for label, points in apart.items() if abs(points) <= NEAR]
    each = ", ".join(f"{label} {points:+.2f}" for label, points in apart.items())
    yield f"Averaged models compared with that of FedAMS, in points: {each}."
    yield f"Within {NEAR} points, which counts as equal: {', '.join(near) or 'none'}."
    yield _off_floor(next(done for done in runs if done.label == "FedAMS"))


def _off_floor(fedams: Done) -> str:
    """Return where FedAMS ended: on its floor, or off it."""
    share = fmean(run.records[-1].probes.get("off_floor") or 0.0 for run in fedams.runs)
    return f"At the end of FedAMS, {100 * share:.1f}% of coordinates were [off the floor](theory.md#regimes).\n"


def _preset(preset: str, title: str, runs: list[Done]) -> Iterator[str]:
    yield f"### {title}\n\n`fedcams run {preset} --data DIR --device cuda`\n"
    yield from _table(runs)
    yield f"![{PICTURE}](reproduction/{preset}.png)\n"
    if any(len(done.runs) > 1 for done in runs):
        yield "*Lines: means over seeds; bands: from the lowest seed to the highest.*\n"
    yield where(runs)


def in_short(results: Results) -> Iterator[str]:
    """Yield the section's main numbers, as a list: FedAMS, the best run that compresses updates, and two-way runs."""
    runs = [done for done in results.of("bytes-resnet18") if done.averaged is not None]
    dense = next((done for done in runs if done.label == "FedAMS"), None)
    both = [done for done in runs if str(done.run.experiment.downlink) != "none"]
    up = [done for done in runs if done not in both and done.up < done.down]
    if dense is None or not both:
        return
    yield "Beyond the paper, with averaged models and recipes, ResNet-18 reaches"
    yield "([all runs](#accuracy-against-all-bytes)):\n"
    yield f"- {dense.averaged:.2f}% with FedAMS, uncompressed"
    for best in sorted(up, key=_averaged)[-1:]:
        yield f"- {best.averaged:.2f}% with {best.label}, and {dense.up / best.up:.1f} times fewer bytes up"
    for done in both:
        fewer = f"{dense.total / done.total:.1f} times fewer bytes in both directions"
        yield f"- {done.averaged:.2f}% with {done.label}, and {fewer}"
    yield ""


def _averaged(done: Done) -> float:
    return done.averaged or 0.0


def _table(runs: list[Done]) -> Iterator[str]:
    rows = []
    for done in runs:
        sizes = [f"{size / GB:.2f} GB" for size in (done.up, done.down, done.total)]
        fewer = [f"{runs[0].up / done.up:.1f}x", f"{runs[0].total / done.total:.1f}x"]
        averaged = spread(done.averages) if done.averages else ""
        rows.append([done.label, f"{done.accuracy:.2f}", averaged, *sizes, *fewer, named(done.seeds)])
    heads = "run | last 100 | averaged | up | down | up + down | fewer up | fewer up + down | seeds"
    yield from table(heads, "lrrrrrrrr", rows)


def networks(runs: list[Done]) -> Iterator[str]:
    """Yield the time to a common accuracy on each network, and where latency decides; nothing without accuracies."""
    shown = collection(runs)
    summary = summarize(shown)
    if summary.target is None:
        return
    yield NETWORKS.format(target=100 * summary.target)
    _, _, times = network_markdown(shown, summary).partition("\n\n")
    yield f"{times}\n"


def delivery(runs: list[Done], record: dict[str, Any]) -> Iterator[str]:
    """Yield what delivering the final model costs, in addition to the bytes of the run; nothing if it was not run."""
    about = record["experiment"]
    known = {done.label: done for done in runs}
    if not {"FedAMS", about["label"]} <= known.keys():
        return
    yield DELIVERY.format(**about, **{key: record[key] for key in ("tested", "accuracy")})
    clients = about["clients"]
    whole = known["FedAMS"].total + clients * record["dense_bytes"]
    rows = []
    for spec, found in record["delivered"].items():
        fewer = whole / (known[about["label"]].total + clients * found["bytes"])
        sizes = [f"{found['bytes'] / MB:.2f} MB", f"{clients * found['bytes'] / GB:.2f} GB"]
        rows.append([f"`{spec}`", *sizes, f"{fewer:.1f}x", f"{found['accuracy']:.2f}"])
    yield from table("compressor | per client | all clients | fewer in all | accuracy", "lrrrr", rows)
