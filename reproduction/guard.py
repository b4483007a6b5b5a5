"""The part of docs/methods.md that says what the guard did in the runs in results/."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Sequence

from fedcams.runs import Run
from reproduction.runs import Results

BLOCK = re.compile(r"(?<=<!-- the guard, by make reproduction -->\n).*(?=<!-- end -->)", re.DOTALL)
"""The part of docs/methods.md that is written here."""
IMAGES = """\
- **Honest clients on CIFAR-10** ([results](../results), on an H200): {iid} with IID data that used the guard, and
{uneven} of ResNet-18 with Dirichlet 0.3. In the latter, the longest row of any round reached {use} of its bound, so no
update exceeded {times:.1f} times the usual norm. The probe `guard` records this share for every run.
"""
PLAYS = """\
- **Honest clients of very different sizes**: Shakespeare's longest role has {ratio:.0f} times as much text as the
shortest. With `guard="adaptive(factor=10)"`, {plays}, and the longest accepted one had {times:.1f} times the usual
norm. The default would have refused a client in {rounds} of the {all:,} rounds. Set a larger `factor` if your
clients' sizes differ as much.
"""


def guarded(results: Results, partition: str) -> list[Run]:
    """Return the runs with data split in this way that used the guard; the first runs had none."""
    alike = [run for run in results.runs if str(run.experiment.partition) == partition]
    return [run for run in alike if "guard =" in (run.path / "experiment.toml").read_text("utf-8")]


def block(results: Results) -> str:
    """Return the two items on images and on plays, each if there are runs."""
    return "".join(_wrapped(text) for text in (_images(results), _plays(results)) if text)


def _wrapped(text: str) -> str:
    words = " ".join(text.split())
    return f"{textwrap.fill(words, 125, subsequent_indent='  ', break_on_hyphens=False, break_long_words=False)}\n"


def _images(results: Results) -> str:
    iid, uneven = guarded(results, "iid"), guarded(results, "dirichlet")
    if not iid or not uneven:
        return ""
    most = max(uses(uneven))
    return IMAGES.format(iid=_refused(iid), uneven=_refused(uneven), use=f"{100 * most:.0f}%", times=5 * most)


def _plays(results: Results) -> str:
    runs = guarded(results, "natural")
    known = [run for run in runs if (run.path / "partition.json").exists()]
    if not known:
        return ""
    records = [record for run in runs for record in run.records]
    strict = sum((record.probes.get("guard_use") or 0) > 0.5 or bool(record.refused) for record in records)
    sizes = [sum(row) for row in json.loads((known[0].path / "partition.json").read_text("utf-8"))["histogram"]]
    return PLAYS.format(
        ratio=max(sizes) / min(sizes),
        plays=_refused(runs),
        times=10 * max(uses(runs)),
        rounds=strict,
        all=len(records),
    )


def uses(runs: Sequence[Run]) -> list[float]:
    """Return the longest accepted row of every round, as a share of the guard's bound."""
    return [record.probes.get("guard_use") or 0.0 for run in runs for record in run.records]


def _refused(runs: Sequence[Run]) -> str:
    records = [record for run in runs for record in run.records]
    refused, sent = sum(len(record.refused) for record in records), sum(len(record.cohort) for record in records)
    count = "none" if not refused else f"{refused:,}"
    return f"{count} of {sent:,} updates {'was' if refused < 2 else 'were'} refused in {len(runs)} runs"
