"""Which recipe to use: by the server's memory, how often clients take part, and what dominates a round's time."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

from fedcams.method import Method
from fedcams.plan.planner import Plan, Setting, plan
from fedcams.recipes import RECIPES, Recipe
from fedcams.report.numbers import human_bytes, human_seconds
from fedcams.report.profiles import Profile
from fedcams.sampler import Contacts

WORTH = 1.5
"""How many times shorter a round must become for the next lighter recipe, which loses more, to be recommended."""
CATCH_UPS = 3
"""How many times per run a client must catch up with the server, so that what compression loses still arrives."""


@dataclass(frozen=True)
class Option:
    """A recipe and what it costs; `recipe` is None for dense messages both ways."""

    recipe: Recipe | None
    plan: Plan
    contacts_needed: float = 0.0
    """How often a client must take part, on average, for its model to follow the server's."""

    @property
    def name(self) -> str:
        """The recipe's name, or `none`."""
        return self.recipe.name if self.recipe else "none"


@dataclass(frozen=True)
class Advice:
    """The option to take, and why, as one sentence."""

    option: Option
    reason: str


def plan_recipes(setting: Setting, contacts: Contacts) -> list[Option]:
    """Return what dense messages and every recipe cost, from the most bytes to the fewest.

    Arguments:
        setting: the model's size and the rounds; recipes replace its codecs.
        contacts: how often clients take part.

    Returns:
        One option without a recipe, then one for each recipe.

    Examples:
        >>> import fedcams
        >>> from fedcams.plan import Setting, expected_contacts, plan_recipes
        >>> setting = Setting(d=1_000_000, buffers=0, uplink=fedcams.compressor("sign"), rounds=100)
        >>> [option.name for option in plan_recipes(setting, expected_contacts(100, 10, 100))]
        ['none', 'one-way', 'light', 'lighter', 'lightest']
    """
    dense = dataclasses.replace(setting, uplink=Method().uplink, buffer_codec=Method().buffers)
    return [Option(None, plan(dense, "none", contacts)), *(_option(setting, one, contacts) for one in RECIPES.values())]


def _option(setting: Setting, recipe: Recipe, contacts: Contacts) -> Option:
    method = Method(**recipe.fields)
    chosen = dataclasses.replace(setting, uplink=method.uplink, buffer_codec=method.buffers)
    codec = getattr(method.downlink, "codec", None)
    needed = CATCH_UPS / arriving(float(codec.ratio)) if codec is not None else 0.0
    return Option(recipe, plan(chosen, method.downlink, contacts), needed)


def arriving(ratio: float) -> float:
    """Return the part of ‖x‖² that `ternary(ratio)` carries if coordinates are Gaussian.

    It is `4 φ(t)²/ratio` with `P(|z| > t) = ratio`. A client whose model covers this part of the way at every contact
    needs about one over that many contacts to follow the server's.
    """
    normal = NormalDist()
    return 4 * normal.pdf(normal.inv_cdf(1 - ratio / 2)) ** 2 / ratio


def advise(options: Sequence[Option], contacts: Contacts, memory: float, profile: Profile) -> Advice:
    """Return the option to take on a network.

    Starting from dense messages, the next lighter option is taken as long as it makes a round `WORTH` times shorter.
    Options that need more memory, or more frequent clients, are left out.

    Arguments:
        options: those of `plan_recipes`.
        contacts: how often clients take part.
        memory: the bytes that the server can keep for its clients.
        profile: the network of a client.

    Returns:
        The option and the reason in one sentence.

    Examples:
        >>> import fedcams
        >>> from fedcams.plan import Setting, advise, expected_contacts, plan_recipes
        >>> from fedcams.report import PROFILES
        >>> contacts = expected_contacts(population=100, cohort=10, rounds=500)
        >>> options = plan_recipes(Setting(11_173_962, 9_600, fedcams.compressor("sign"), 500), contacts)
        >>> advise(options, contacts, memory=1e10, profile=PROFILES[0]).option.name
        'lighter'
    """
    per_client = contacts.total / max(contacts.seen, 1e-9)
    possible = [one for one in options if one.plan.memory <= memory and per_client >= one.contacts_needed]
    chosen = possible[0]
    for option in possible[1:]:
        if option.plan.seconds(profile) * WORTH <= chosen.plan.seconds(profile):
            chosen = option
        elif option.recipe is not None and option.recipe.two_way:
            break  # after one way the search goes on: it may gain too little where both ways gain enough
    lighter = options[options.index(chosen) + 1 :]
    gain, stop = _gain(chosen, options[0], profile), _stop(chosen, lighter, per_client, memory, profile)
    return Advice(chosen, f"{gain}; {stop}.")


def _gain(chosen: Option, dense: Option, profile: Profile) -> str:
    taken, before = (human_seconds(option.plan.seconds(profile)) for option in (chosen, dense))
    if chosen is dense:
        return f"a round of dense messages takes {before} on {profile.name}"
    fewer = dense.plan.total / chosen.plan.total
    return (
        f"{fewer:.3g}x fewer bytes than dense messages, and a round on {profile.name} takes {taken} instead of {before}"
    )


def _stop(chosen: Option, lighter: Sequence[Option], per_client: float, memory: float, profile: Profile) -> str:
    """Why nothing lighter: it does not fit, clients take part too rarely, latency dominates, or it gains too little."""
    if not lighter:
        return "nothing is lighter"
    following = lighter[0]
    if following.plan.memory > memory:
        kept = f"{human_bytes(following.plan.memory)} of models at the server, which has {human_bytes(memory)}"
        return f"{following.name} would keep {kept}"
    if per_client < following.contacts_needed:
        return (
            f"{following.name} needs clients that take part about {following.contacts_needed:.0f} times, to hold a "
            f"recent model, and yours take part {per_client:.2g} times"
        )
    share = profile.latency / 1e3 / chosen.plan.seconds(profile)
    if share > 1 / WORTH:
        return f"{100 * share:.0f}% of that is latency, which compression cannot shorten"
    shorter = chosen.plan.seconds(profile) / following.plan.seconds(profile)
    return f"{following.name} would make it {shorter:.2g}x shorter, but lose more accuracy"
