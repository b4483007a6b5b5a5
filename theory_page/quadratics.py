"""What docs/theory.md says about the rate experiment and the other runs on quadratics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from fedcams.theory import Bound, Constants, Setting, rates, sound
from theory_page import grid
from theory_page.experiments import GAMMA, Package
from theory_page.grid import Case, Fit, Found, Row
from theory_page.markdown import paragraph, picture, table
from theory_page.measured import Measurements

SAME = grid.ROWS[-1]
"""The problem that both the oracle and the package ran."""
DENSE = grid.compressed("identity")


def sections(measured: Measurements) -> Iterator[str]:
    """Yield the parts of the page in their order."""
    yield from _slopes(measured)
    yield from _partial(measured.oracle)
    yield from _compression(measured.oracle)
    yield from _gamma(measured.package)
    yield from _epsilon(measured.oracle)


def bound_of(case: Case) -> Bound:
    """Return the proved bound of a case in which v̂ never left its floor: that of the FedAvgM that the run equals."""
    assert case.uplink == "identity"
    known = Constants(L=1.0, G=0.0, s_l=case.s_l, s_g=case.s_g, F=case.gap, d=case.d)  # on the floor, G does not count
    eta, eta_l, beta1 = case.eta, case.eta_l, case.beta1
    run = Setting(case.m, case.cohort, case.K, case.T, eta, eta_l, case.eps, beta1=beta1, adapts=False)
    return sound(known, run)


def average(found: Found, case: Case) -> float:
    """Return the mean over seeds of a case's average over all rounds."""
    return fmean(each.average for each in found[case])


# -- slopes ------------------------------------------------------------------------------------------------------------


def _slopes(measured: Measurements) -> Iterator[str]:
    yield "### Slopes\n"
    yield paragraph(
        "The table shows the exponent p of mean ‖∇f‖² ~ x^p, where x is the number of rounds T, of local steps K, or",
        f"of clients m (or n of them per round), as mean ± standard deviation over {len(grid.SEEDS)} seeds. Theory",
        "predicts -0.5 unless the cell says otherwise. *Second half* uses only the second half of the rounds.",
    )
    heads = [f"{axis}{half}" for half in ("", ", second half") for axis in ("T", "K", "m or n")]
    yield table(["problem", *heads], list(_lines(measured)))
    yield from _about_slopes(measured)
    yield picture("rates", "Mean squared gradient against rounds, local steps and clients, with the bound above")
    yield paragraph(
        "*Small dots are seeds; lines are their means. Top: the first row of the table. Bottom: the package and the",
        "oracle on the same problem. Values are multiplied by √x, which makes the slope -1/2 horizontal, and each",
        f"curve is divided by its mean. The package's averages are {_level(measured):.2f} times the oracle's, because",
        "its start and its noise are spread differently over the coordinates.*",
    )
    yield picture("collapse", "The same against T K m: all points on one line")


def _lines(measured: Measurements) -> Iterator[list[str]]:
    """Yield the rows of the table of slopes; the last one is the package's, next to the oracle on its problem."""
    for row in grid.ROWS:
        name = f"{row.name}, oracle" if row is SAME else row.name
        yield _line(name, *(_cells(measured.oracle, row, late) for late in (False, True)))
    ours = (package_slopes(measured.package, late) for late in (False, True))
    shown = ({axis: _shown(fit) for axis, fit in fits.items()} for fits in ours)
    yield _line(f"{SAME.name}, **package**", *shown)


def package_slopes(package: Package, late: bool = False) -> dict[str, Fit]:
    """Return the exponents of the package's rounds for each axis."""
    return {axis: Fit(tuple(fits)) for axis, fits in rates.slopes(package.rates, late).items()}


def _cells(found: Found, row: Row, late: bool) -> dict[str, str]:
    if late and not row.base.s_l:
        return {}  # without noise, the second half falls faster than any power
    return {axis: _shown(grid.fit(found, row, axis, late), row.theory.get(axis)) for axis in row.axes}


def _shown(fit: Fit, theory: float | None = None) -> str:
    expected = "" if theory is None else f" (theory {theory:+g})" if theory else " (theory 0)"
    return f"{fit.mean:+.3f} ± {fit.deviation:.3f}{expected}"


def _line(name: str, *halves: Mapping[str, str]) -> list[str]:
    return [name, *(half.get(axis, half.get("n", "") if axis == "m" else "") for half in halves for axis in "TKm")]


def _about_slopes(measured: Measurements) -> Iterator[str]:
    plain, momentum = grid.ROWS[0], grid.ROWS[2]
    ours = package_slopes(measured.package)
    apart = max(abs(ours[axis].mean - grid.fit(measured.oracle, SAME, axis).mean) for axis in SAME.axes)
    yield paragraph(
        "The oracle implements FedAMS and FedCAMS in float64 NumPy, without any code of fedcams",
        "(`theory_page/oracle.py`). Without noise, the package's models agree with the oracle's in every round; tests",
        "check this without compression, with sign and with top-k, on the floor and off it. With noise, the two draw",
        f"different values, but on the same problem their slopes differ by at most {apart:.3f}.",
    )
    yield paragraph(
        "v̂ never left its floor in these runs, so the proved bound is that of their FedAvgM twin. It is",
        f"{_times(measured.oracle, plain)} the measurement for the quadratic, {_times(measured.oracle, momentum)} with",
        f"β1 = 0.9, and {_times(measured.oracle, SAME)} on the package's problem. {_violated(plain, SAME)}",
    )
    yield paragraph(
        "As the bound says, momentum and compression cost O(1/T), which bends the lines through averages over all",
        "rounds. In the second half, the slopes are closer to -1/2 with momentum and sign, but not with top-k 1/16.",
        "With σ_g = 4, the sampling noise falls like (m-n)/n, which is faster than 1/n.",
    )


def _level(measured: Measurements) -> float:
    """Return how many times larger the package's averages are than the oracle's on the same problem."""
    cases = [case for axis in SAME.axes for case in SAME.cases(axis)]
    ours = fmean(each.average for _, each in measured.package.rates)
    return ours / fmean(average(measured.oracle, case) for case in cases)


def _times(found: Found, row: Row) -> str:
    ratios = [bound_of(case).value / average(found, case) for axis in row.axes for case in row.cases(axis)]
    low, high = f"{min(ratios):.0f}", f"{max(ratios):.0f}"
    return f"{low} times" if low == high else f"{low} to {high} times"


def _violated(*rows: Row) -> str:
    """Say for how many cases the conditions of the bound do not hold."""
    cases = dict.fromkeys(case for row in rows for axis in row.axes for case in row.cases(axis))
    known = [bound_of(case).admissible for case in cases]
    return (
        f"In {known.count(False)} of these {len(known)} cases with β1 = 0, the step is longer than the bound's "
        "condition allows; there too, the measurements lie below the bound."
    )


# -- local steps and compression ---------------------------------------------------------------------------------------


def _partial(found: Found) -> Iterator[str]:
    by_steps, alone = (_shown(grid.fit(found, row, "K", late=True)) for row in grid.STEP_RULES)
    base = grid.STEP_RULES[0].base
    yield "### More local steps under partial participation\n"
    yield paragraph(
        f"If clients differ, {base.n} of {base.m} take part in each round, and η ~ √(Kn) as in the corollary, mean",
        f"‖∇f‖² over the second half grows with K: the slope is {by_steps} (theory +1/2). With η ~ √n the slope is",
        f"{alone}. So the step causes the slowdown, not the local work.",
    )
    yield picture("partial", "Second half of the run against local steps, for two step rules")


def ratios(found: Found, cases: Sequence[Case], dense: Sequence[Case]) -> list[list[float]]:
    """Return averages divided by those without compression, for each seed of each case; the noise is the same."""
    pairs = [zip(found[case], found[plain], strict=True) for case, plain in zip(cases, dense, strict=True)]
    return [[own.average / other.average for own, other in pair] for pair in pairs]


def excesses(over: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return by how much these ratios exceed 1; an empty list if some do not."""
    return [[ratio - 1 for ratio in seeds] for seeds in over] if min(map(min, over)) > 1 else []


def _compression(found: Found) -> Iterator[str]:
    yield "### What compression costs\n"
    yield paragraph(
        "The table shows mean ‖∇f‖² over all rounds, divided by that of the run without compression and with the same",
        f"noise, as mean ± standard deviation over {len(grid.SEEDS)} seeds. All clients take part in every round.",
    )
    others = [uplink for uplink in grid.COMPRESSORS if uplink != "identity"]
    every = {uplink: ratios(found, grid.compressed(uplink), DENSE) for uplink in others}
    yield _ratios("uplink", [f"T = {rounds}" for rounds in grid.LENGTHS], every)
    left = {uplink: excess for uplink in others if (excess := excesses(every[uplink]))}
    powers = {name: rates.slope(grid.LENGTHS, list(map(fmean, each))) for name, each in left.items()}
    shown = ", ".join(f"{power:+.2f} ({name})" for name, power in powers.items())
    gone = next(rounds for rounds, seeds in zip(grid.LENGTHS, every["top-k 1/4"], strict=True) if fmean(seeds) < 1)
    yield paragraph(
        f"The excess over 1 falls like T to the power {shown}. The bound predicts -0.5, because it puts compression",
        "into a term in 1/T, next to the leading 1/√T. A factor 1/(1-q) would not fall at all. With top-k 1/4 there is",
        f"no excess from T = {gone} on.",
    )
    yield picture("compression", "Excess of compression against rounds")
    yield from _sampled(found)


def _sampled(found: Found) -> Iterator[str]:
    base, (_, sparse) = grid.sampled("identity", 0.0)[0], grid.HALVED
    some = {
        f"{uplink}, σ_g = {s_g:g}": ratios(found, grid.sampled(uplink, s_g), grid.sampled("identity", s_g))
        for s_g in (0.0, 4.0)
        for uplink in grid.SAMPLED
        if uplink != "identity"
    }
    some[f"{sparse}, σ_g = 4, half the step"] = sampled_ratios(found, by_steps=False)
    whole, half = (excess_of_sampled(found, by_steps) for by_steps in (True, False))
    left = [100 * after / before for before, after in zip(whole, half, strict=True)]
    alike, differ = (map(fmean, some[f"{sparse}, σ_g = {s_g:g}"]) for s_g in (0.0, 4.0))
    dearer = [after / before for before, after in zip(alike, differ, strict=True)]
    yield paragraph(f"The same ratios with some of {base.m} clients per round, K = {base.K} and T = {base.T}:")
    yield _ratios("uplink, difference between clients", [f"{n} per round" for n in grid.COHORTS], some)
    yield paragraph(
        "What is sent late costs most where clients differ: with",
        f"{sparse}, σ_g = 4 gives {min(dearer):.0f} to {max(dearer):.0f} times the ratios of σ_g = 0.",
        "The cost also grows with the step",
        f"α = ½√(Kn/T): halving it (last row) leaves {min(left):.0f} to {max(left):.0f}% of the excess over 1, so",
        "other K and T give other ratios.",
    )


def sampled_ratios(found: Found, by_steps: bool) -> list[list[float]]:
    """Return the ratios of the sparsest uplink with few clients, which differ, for the whole or half the step."""
    dense, sparse = (grid.sampled(uplink, 4.0, by_steps) for uplink in grid.HALVED)
    return ratios(found, sparse, dense)


def excess_of_sampled(found: Found, by_steps: bool) -> list[float]:
    """Return by how much these ratios exceed 1, as means over seeds."""
    return [fmean(seeds) - 1 for seeds in sampled_ratios(found, by_steps)]


def _ratios(head: str, columns: Sequence[str], lines: Mapping[str, list[list[float]]]) -> str:
    shown = {name: [f"{fmean(seeds):.3f} ± {stdev(seeds):.3f}" for seeds in each] for name, each in lines.items()}
    return table([head, *columns], [[name, *cells] for name, cells in shown.items()])


# -- γ and ε -----------------------------------------------------------------------------------------------------------


def _gamma(package: Package) -> Iterator[str]:
    yield "### γ grows as the gradient falls\n"
    yield paragraph(
        f"With {GAMMA.m} clients that differ, exact gradients and sign compression, γ is about σ_g/‖∇f‖ once ‖∇f‖ is",
        "below σ_g. The table shows means over 20 of the package's rounds, with one seed.",
    )
    yield table(["σ_g", "rounds", "‖∇f‖", "γ", "γ ‖∇f‖/σ_g"], [line for run in package.gamma for line in _windows(run)])
    yield paragraph(
        "‖∇f‖ and γ level off at the end, because the server's step is constant. If ‖∇f‖ went to zero, no constant",
        "would bound γ, unless all clients agreed at the minimum.",
    )
    yield picture("gamma", "γ against the norm of the gradient: a hyperbola")


def _windows(run: Mapping[str, Any]) -> Iterator[list[str]]:
    products = [norm * gamma / run["sigma_g"] for norm, gamma in zip(run["norm"], run["gamma"], strict=True)]
    for end in (80, 120, len(products)):
        means = [f"{fmean(values[end - 20 : end]):.3g}" for values in (run["norm"], run["gamma"], products)]
        yield [f"{run['sigma_g']:.2f}", f"{end - 19} to {end}", *means]


def _epsilon(found: Found) -> Iterator[str]:
    yield "### Two regimes of ε\n"
    yield paragraph(
        "On the nonconvex problem with σ_l = 1 and both rates fixed, a smaller ε makes the step longer until v̂ leaves",
        "its floor; below that, ε no longer matters. If clients travel farther in a round and η is smaller to match, v̂",
        "leaves its floor at a larger ε, and mean ‖∇f‖² settles at another level. This level may be worse than with",
        "the best ε on the floor, or as good:",
    )
    lines = [[f"{travel:g}", *(_regime(found, case) for case in grid.floors(travel))] for travel in grid.TRAVELS]
    yield table(["η_l K", *(f"ε = {eps:g}" for eps in grid.FLOORS)], lines)
    yield paragraph(
        f"*Mean ‖∇f‖² over all rounds and {len(grid.SEEDS)} seeds, and the share of coordinates off the floor at the",
        "end.*",
    )
    yield picture("epsilon", "Average and share of coordinates off the floor against ε")


def _regime(found: Found, case: Case) -> str:
    return f"{average(found, case):.2g} ({100 * fmean(each.off_floor for each in found[case]):.0f}%)"
