"""docs/small.md: the paper's studies with a small network and fewer rounds, which do not need a GPU."""

from __future__ import annotations

from collections.abc import Iterator

from reproduction import pictures as draw
from reproduction import tables, words
from reproduction.claims import CLAIMS, Claim, emphasized
from reproduction.judges import NOT_RUN, Verdict, best_epsilon, gamma_stays
from reproduction.runs import Done, Results, Settings

SETTINGS: Settings = (("model", "cnn(channels=16)"), ("rounds", "100"), ("evaluate_every", "5"))
"""What these runs change in a preset."""
STUDIES = {
    "fig1-convmixer": "Server optimizers",
    "compression-convmixer": "Compressed updates",
    "cohort-convmixer": "Clients per round",
    "epochs-convmixer": "Local epochs",
    "noniid-convmixer": "Two label shards per client",
    "epsilon": "The ε of FedAMS",
    "fig1-convmixer-cifar100": "Server optimizers on CIFAR-100",
    "compression-convmixer-cifar100": "Compressed updates on CIFAR-100",
    "option-2-convmixer": "FedCAMS with Option 2",
    "full-convmixer": "All 10 clients in every round",
}
"""The presets that were run with these settings, in the order of the page."""
DRAWN = {
    "small-optimizers": (
        "fig1-convmixer", draw.accuracy_by_rounds, draw.loss_by_rounds, "and training loss against rounds"
    ),
    "small-compression": (
        "compression-convmixer", draw.accuracy_by_rounds, draw.accuracy_by_bytes_up, "against rounds and bytes sent up"
    ),
}  # fmt: skip
"""Picture -> the preset that it shows, its two panels, and what they show."""
INTRO = """\
# Small runs

You do not need a GPU to repeat the paper's studies. The presets on CIFAR also run on a CPU, with a smaller network and
fewer rounds:

```text
fedcams run cohort-convmixer --data DIR --jobs 2 \\
    {flags}
```

This network, `cnn(channels=16)`, has two convolutions, 25,578 parameters and no batch-norm. Everything else is as in
[the full runs](reproduction.md): CIFAR-10, 100 clients, 3 local epochs, and the server rates for ConvMixer-256-8.
**These rates are not tuned for the small network**, and after 100 rounds it still improves. Rates that are too high end
near the accuracy of guessing, 10% on CIFAR-10 and 1% on CIFAR-100, as lr = 1 does with ε below 1e-3 in the
[study of ε](#the-ε-of-fedams). A verdict here may therefore be about the rate as much as about the method, and says
little about the paper's networks. Some methods were run with a second seed after the first had been seen.

`make reproduction` writes this page from the runs in [small_results/](../small_results).

## The claims

The claims and the rules for verdicts are those of [the reproduction](reproduction.md#the-papers-claims). Accuracies are
means over the last 20 rounds, of which every fifth was tested. The last two columns repeat the verdicts of the full
runs.
"""


def verdicts(small: Results) -> dict[str, str]:
    """Return claim -> verdict as a table shows it; empty if nothing was run."""
    return {claim.text: emphasized(found.verdict) for claim, found in judged(small)} if small.runs else {}


def judged(small: Results) -> list[tuple[Claim, Verdict]]:
    """Return the claims that runs of one model decide, with the verdicts of these runs."""
    once = [c for c in CLAIMS if c.model == words.MODELS["convmixer"] or c.judge in (best_epsilon, gamma_stays)]
    return [(claim, claim.judge(small)) for claim in once]


def page(small: Results, full: Results) -> str:
    """Return the whole page."""
    flags = " ".join(f'-s "{key}={value}"' if "(" in value else f"-s {key}={value}" for key, value in SETTINGS)
    studies = {preset: runs for preset in STUDIES if len(runs := small.of(preset)) > 1}
    parts = [INTRO.format(flags=flags), *_claims(small, full)]
    for preset, runs in studies.items():
        parts += [*_study(preset, runs), *tables.missing(small, preset)]
    parts += (
        ["## Where it was run\n", tables.where([done for runs in studies.values() for done in runs])] if studies else []
    )
    return "\n".join(parts).rstrip() + "\n"


def _claims(small: Results, full: Results) -> Iterator[str]:
    theirs = {(claim.text, claim.model): emphasized(claim.judge(full).verdict) for claim in CLAIMS}
    rows = []
    for claim, found in judged(small):
        if found.verdict != NOT_RUN:
            there = [theirs.get((claim.text, name), theirs.get((claim.text, ""), "")) for name in words.MODELS.values()]
            rows.append(
                [claim.text, emphasized(found.verdict), found.evidence, tables.named(list(found.seeds)), *there]
            )
    heads = " | ".join(["claim", "small network", "evidence", "seeds", *words.MODELS.values()])
    yield from tables.table(heads, "llllll", rows)


def _study(preset: str, runs: list[Done]) -> Iterator[str]:
    yield f"## {STUDIES[preset]}\n\nPreset: `{preset}`\n"
    yield from tables.accuracies("", runs)
    for name, (shown, *_, what) in DRAWN.items():
        if shown == preset:
            yield f"![Test accuracy {what}](reproduction/{name}.png)\n"


def pictures(small: Results) -> dict[str, list[draw.Panel]]:
    """Return the panels of every picture that has runs, by name."""
    found = {name: (small.of(preset), panels) for name, (preset, *panels, _) in DRAWN.items()}
    return {name: [(each, runs) for each in panels] for name, (runs, panels) in found.items() if runs}
