"""How long methods take on each network, and where latency rather than bytes dominates, in words and numbers."""

from __future__ import annotations

from fedcams.escaping import plain
from fedcams.report.collection import Collection, Method
from fedcams.report.numbers import human_seconds, score
from fedcams.report.profiles import BOUND, PROFILES, Profile, latency_share, time_to
from fedcams.report.series import ACCURACY, AVERAGED
from fedcams.report.summary import Row, Summary


def network_markdown(collection: Collection, summary: Summary) -> str:
    """Return a table of times to the target of last and averaged models, with latency's part, and what it means."""
    if summary.target is None:
        return ""
    models = "last / averaged models" if summary.averages else "last models"
    heads = ["Method", *(f"{p.name}, {p.down:g}/{p.up:g} Mbit/s, {p.latency:g} ms" for p in PROFILES)]
    lines = [heads, ["---", *["---:"] * len(PROFILES)]]
    for method, row in zip(collection.methods, summary.rows, strict=True):
        lines.append([plain(row.label), *(_cell(method, row, summary.target, profile) for profile in PROFILES)])
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    title = f"## Time to {score(summary.target, summary.percent)} on a network ({models})"
    return f"{title}\n\n{table}\n\n{bound_by_latency(collection)}"


def _cell(method: Method, row: Row, target: float, profile: Profile) -> str:
    metrics = (ACCURACY, AVERAGED) if row.averaged is not None else (ACCURACY,)
    times = [time_to(method, profile, target, metric) for metric in metrics]
    shown = " / ".join("not reached" if seconds is None else human_seconds(seconds) for seconds in times)
    return f"{shown} (latency {100 * latency_share(method, profile):.0f}%)"


def bound_by_latency(collection: Collection) -> str:
    """Return which networks are bound by latency for which methods, as a sentence or two."""
    told, count = [], 0
    for profile in PROFILES:
        bound = [m.label for m in collection.methods if latency_share(m, profile) > BOUND]
        count += len(bound)
        if bound:
            everyone = len(bound) == len(collection.methods)
            told.append(f"{profile.name} ({'all methods' if everyone else ', '.join(map(plain, bound))})")
    if not told:
        return "Bytes dominate on all these networks: latency is less than half of the time on each."
    if count == len(PROFILES) * len(collection.methods):
        return "Latency is more than half of the time on all these networks, so fewer bytes hardly shorten a round."
    return (
        f"Latency is more than half of the time, so fewer bytes hardly shorten a round, on "
        f"{'; '.join(told)}. Bytes dominate elsewhere."
    )
