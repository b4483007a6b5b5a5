"""Spec strings: exact numbers, canonical spelling, and errors that say what to write instead."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fedcams.experiment  # noqa: F401  (registers everything)
from fedcams.errors import SpecError
from fedcams.registry import (
    Number,
    Schedule,
    Spec,
    exact,
    flag,
    format_number,
    integer,
    kinds,
    nested,
    number,
    params,
    register,
    registered,
    resolve,
    resolve_several,
    several,
    text,
)
from fedcams.schedules import Constant, Linear, Warmup
from together import together


class Toy(Spec):
    kind = "toy"


@register("leaf")
@dataclass(frozen=True)
class Leaf(Toy):
    rate: Number = number(Fraction(1, 2), low=0, high=1, open="high")
    count: int = integer(3, low=1, high=9)
    fast: bool = flag(False)
    label: str = text("")
    mode: str = text("plain", choices=("plain", "fancy"))


@register("tree")
@dataclass(frozen=True)
class Tree(Toy):
    inner: Toy = nested("toy")
    weight: Number | None = number(None)


@register("kite")
@dataclass(frozen=True)
class Kite(Toy):
    """A toy whose numbers may follow the round."""

    height: Number = number(1, low=0, high=10, open="low")
    tails: tuple[Toy, ...] = several("toy")
    inner: Toy = nested("toy", "leaf")
    count: int = integer(1)

    schedulable = True


leaves = st.builds(
    Leaf,
    rate=st.fractions(0, 1).filter(lambda r: r < 1),
    count=st.integers(1, 9),
    fast=st.booleans(),
    label=st.text(st.characters(exclude_categories=("Cc", "Cs")), max_size=20),
    mode=st.sampled_from(["plain", "fancy"]),
)
heights = st.fractions(0, 10).filter(lambda h: h > 0)
lines = st.builds(Linear, start=heights, end=heights, rounds=st.none() | st.integers(1, 99))
schedules = lines | st.builds(Constant, heights) | st.builds(Warmup, rounds=st.integers(1, 9), then=heights | lines)
trees = st.recursive(
    leaves,
    lambda inner: (
        st.builds(Tree, inner=inner, weight=st.none() | st.fractions(-(10**38), 10**38))
        | st.builds(Kite, height=heights | schedules, tails=st.lists(inner, max_size=2), inner=inner)
    ),
    max_leaves=4,
)


@given(trees)
def test_parse_is_the_reverse_of_str(piece: Toy) -> None:
    assert resolve("toy", str(piece)) == piece
    assert str(resolve("toy", str(piece))) == str(piece)


@given(st.fractions())
def test_numbers_are_exact(value: Fraction) -> None:
    assert exact(format_number(value)) == value


@together(
    ("value", "spelling"),
    [
        (Fraction(1, 64), "1/64"),
        (0.001, "1e-3"),
        (0.1, "0.1"),
        (1.0, "1"),
        (0.99, "0.99"),
        (1e-8, "1e-8"),
        (1 / 3, "0.3333333333333333"),
        (Fraction(1, 3), "1/3"),
        (-2.5, "-2.5"),
        (10**9, "1e9"),
        (1500, "1500"),
        (0, "0"),
        (np.float64(0.1), "0.1"),
        (np.float32(0.1), "0.1"),
        (np.float32(1e-5), "1e-5"),
        (np.int32(7), "7"),
    ],
)
def test_numbers_are_spelled_as_people_write_them(value: Number, spelling: str) -> None:
    assert format_number(exact(value)) == spelling


@together(
    ("spec", "canonical"),
    [
        ("leaf", "leaf"),
        ("leaf()", "leaf"),
        (" leaf ( count = 4 ) ", "leaf(count=4)"),
        ("leaf(0.25)", "leaf(rate=1/4)"),
        ("leaf(fast=true, count=4)", "leaf(count=4, fast=true)"),
        ("leaf(count=3)", "leaf"),
        ('leaf(label="a b")', 'leaf(label="a b")'),
        ("leaf(label=word)", "leaf(label=word)"),
        ('leaf(label="true")', 'leaf(label="true")'),
        ("tree(leaf)", "tree(leaf)"),
        ("tree(inner=tree(leaf(count=1)), weight=1/3)", "tree(tree(leaf(count=1)), weight=1/3)"),
        ("kite(tails=leaf+leaf( count=4 )  +leaf())", "kite(tails=leaf + leaf(count=4) + leaf)"),
        ("kite(tails=leaf(count=4))", "kite(tails=leaf(count=4))"),
        ('kite(tails="leaf + tree(leaf)")', "kite(tails=leaf + tree(leaf))"),
        ('kite(tails="")', "kite"),
        ("kite(linear(2, 1))", "kite(height=linear(start=2, end=1))"),
        ("kite(height=warmup(5, cosine(1, 0)))", "kite(height=warmup(rounds=5, then=cosine(start=1, end=0)))"),
    ],
)
def test_canonical_form(spec: str, canonical: str) -> None:
    assert str(resolve("toy", spec)) == canonical


@together(
    ("spec", "message"),
    [
        ("laef", r"no toy is named 'laef' \(did you mean 'leaf'\?\); known: kite, leaf, tree"),
        ("leaf(cuont=3)", r"leaf has no key 'cuont' \(did you mean 'count'\?\); known: rate, count"),
        ("leaf(count=10)", r"leaf: count=10: out of range; allowed: an integer in \[1, 9\]"),
        ("leaf(rate=1)", r"leaf: rate=1: out of range; allowed: a number in \[0, 1\)"),
        ("leaf(count=1.5)", "leaf: count=1.5: not a whole number"),
        ("leaf(count=true)", "leaf: count=true: not a number"),
        ("leaf(fast=1)", "leaf: fast=1: not a boolean; allowed: true or false"),
        ("leaf(label=3)", "leaf: label=3: not a string"),
        ("leaf(mode=fncy)", r"mode=fncy: unknown \(did you mean 'fancy'\?\); allowed: plain or fancy"),
        ("leaf(label=leaf(3))", "a spec is not accepted"),
        ("tree", "tree: inner is missing; give inner=..., a toy spec"),
        ("tree(3)", "tree: inner=3: not a spec"),
        ("leaf(count=1, count=1)", "count is given twice"),
        ("leaf(1/2, 3, false, a, plain, 6)", "at most 5 values"),
        ("leaf(count=)", "expected a name at column 12, found '[)]'"),
        ("leaf(count=1", "expected ',' or '[)]' at column 13, found the end"),
        ("leaf) x", "expected nothing more at column 5"),
        ("", "expected a name"),
        ("leaf(rate=1/0)", r"spec 'leaf\(rate=1/0\)': '1/0' divides by zero"),
        ("leaf(rate=1e999)", "exponent of '1e999' is out of range"),
        ("tree(leaf, weight=1e39)", "weight=1e39: beyond what a float32 can hold"),
        ('leaf(label="a\\q")', "not a valid quoted string"),
        ("tree(" * 10 + "leaf" + ")" * 10, "nested deeper than 8"),
        (
            "kite(linear(2, 0, rounds=5))",
            r"kite: height=linear\(start=2, end=0, rounds=5\): reaches 0, out of range; all",
        ),
        ("kite(linear(2, 11))", r"reaches 11, out of range; allowed: a number in \(0, 10\]"),
        ("kite(cosin(2, 1))", r"no schedule is named 'cosin' \(did you mean 'cosine'\?\)"),
        ("kite(height=linear)", "linear: start is missing"),
        ("kite(height=high)", "kite: height=high: not a number"),
        (
            "kite(count=linear(1, 2))",
            r"kite: count=linear\(start=1, end=2\): a schedule is not accepted here; allowed: an in",
        ),
        (
            "leaf(rate=linear(0, 1))",
            r"leaf: rate=linear\(start=0, end=1\): a schedule is not accepted here; allowed: a num",
        ),
        ("leaf(fast=true + false)", "leaf: fast: several specs joined by [+] are not accepted"),
        ("tree(leaf + leaf)", "tree: inner: several specs joined by [+] are not accepted; allowed: a toy spec"),
        ("kite(tails=leaf + 3)", "expected a name at column 19, found '3"),
        ("kite(tails=leaf + twig)", "no toy is named 'twig'"),
        ("kite(tails=3)", "kite: tails=3: not a spec; allowed: toy specs joined by [+], or nothing"),
        ("leaf + leaf", "expected nothing more at column 6"),
        ("leaf(label=" + "a" * 1000 + ")", "allowed: at most 1000"),
    ],
)
def test_bad_specs_are_refused(spec: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        resolve("toy", spec)


def test_python_values_are_checked_like_specs() -> None:
    assert Leaf(rate=0.1).rate == Fraction(1, 10)
    assert Leaf(rate="1/3") == Leaf(rate=Fraction(1, 3))  # type: ignore[arg-type]
    assert Leaf(rate=np.float32(0.1)) == Leaf(rate=np.float64(0.1)) == Leaf(rate=0.1)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="rate=7: out of range"):
        Leaf(rate=7)
    with pytest.raises(SpecError, match="not a finite number"):
        Leaf(rate=float("nan"))
    with pytest.raises(SpecError, match="leaf is a toy, not a compressor"):
        resolve("compressor", Leaf())
    with pytest.raises(SpecError, match=r"sampler=0\.5 is a float; give a spec string, such as 'bernoulli\(p="):
        resolve("sampler", 0.5)  # type: ignore[arg-type]


def test_several_pieces_are_one_text_or_a_list() -> None:
    pieces = (Leaf(count=4), Tree(Leaf()))
    assert resolve_several("toy", "leaf(count=4) + tree(leaf)") == pieces
    assert Kite(tails=["leaf(count=4)", Tree(Leaf())]).tails == pieces  # type: ignore[arg-type]
    assert Kite(tails=Leaf(count=4)).tails == pieces[:1]  # type: ignore[arg-type]
    assert resolve_several("toy", "  ") == Kite().tails == ()
    with pytest.raises(SpecError, match="expected a name at column 8, found the end"):
        resolve_several("toy", "leaf + ")
    with pytest.raises(SpecError, match=r"kite: tails: identity is a compressor, not a toy"):
        Kite(tails=(resolve("compressor", "identity"),))  # type: ignore[arg-type]


def test_a_base_class_parses_its_kind() -> None:
    assert Toy.parse("leaf(count=4)") == Leaf(count=4)
    assert Leaf.parse(Leaf()) == Leaf()
    with pytest.raises(SpecError, match=r"tree\(leaf\) is a Tree, not a Leaf"):
        Leaf.parse("tree(leaf)")


def test_a_piece_at_a_round_has_the_numbers_of_that_round() -> None:
    spec = "kite(linear(1, 3, rounds=4), tails=kite(linear(2, 1)) + leaf, inner=tree(kite(constant(1/3))))"
    kite = Kite.parse(spec)
    assert [place for place, _ in kite.schedules()] == ["height", "tails.kite.height", "inner.inner.height"]
    third = Kite(2, tails=(Kite(Fraction("1.8")), Leaf()), inner=Tree(Kite(Fraction(1, 3))))
    assert kite.at(3, rounds=10) == third
    assert str(kite.at(9, rounds=10)) == "kite(height=3, tails=kite(height=1.2) + leaf, inner=tree(kite(height=1/3)))"
    assert kite.at(3, 10).schedules() == []


def test_a_piece_without_schedules_stays_the_same_object() -> None:
    kite = Kite(2, tails=(Leaf(),), inner=Tree(Leaf()))
    assert kite.at(1, 1) is kite
    mixed = Kite(Constant(2), tails=(Leaf(),), inner=kite)  # type: ignore[arg-type]
    assert mixed.at(1, 1).inner is kite
    assert mixed.at(1, 1).tails[0] is mixed.tails[0]
    with pytest.raises(SpecError, match="round=0 of rounds=5; allowed: both count from 1"):
        mixed.at(0, 5)


@given(schedules, st.integers(1, 200), st.integers(1, 200))
def test_numbers_of_a_round_are_short_and_in_range(schedule: Schedule, round: int, rounds: int) -> None:
    value = Kite(schedule).at(round, rounds).height  # type: ignore[arg-type]
    low, high = schedule.bounds()
    assert low <= value <= high
    assert value in (low, high) or value == Fraction(f"{float(value):.6g}")
    assert float(value) == pytest.approx(schedule.value(round, rounds), rel=1e-5)


def test_a_schedule_is_no_number() -> None:
    with pytest.raises(
        SpecError, match=r"linear\(start=1, end=2\) is a schedule; take the piece that holds it at a round"
    ):
        float(linear(1, 2))


def linear(start: Number, end: Number) -> Linear:
    return Linear(start, end)


def test_a_name_belongs_to_one_class() -> None:
    with pytest.raises(SpecError, match="toy 'leaf' is already registered"):
        register("leaf")(Tree)


def test_a_class_may_be_defined_again_but_not_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cell that runs twice, or a script that is imported too, has the same class; a copy in another file has not."""

    def again(module: str) -> type[Leaf]:
        return dataclass(frozen=True)(type("Leaf", (Toy,), {"__module__": module}))

    monkeypatch.setitem(sys.modules, "script", sys.modules[Leaf.__module__])
    try:
        for module in (Leaf.__module__, "script"):
            register("leaf")(again(module))
        with pytest.raises(SpecError, match="toy 'leaf' is already registered by"):
            register("leaf")(again("notebook"))
    finally:
        register("leaf")(Leaf)


PACKAGE = [(kind, cls) for kind in kinds() if kind != "toy" for cls in registered(kind).values()]


@together(("kind", "cls"), PACKAGE, ids=lambda value: getattr(value, "name", value))
def test_everything_registered_documents_itself(kind: str, cls: type[Spec]) -> None:
    assert cls.__doc__
    assert cls.examples, "give at least one example spec"
    assert all(param.doc for param, _ in params(cls).values()), "every hyperparameter needs a doc"
    for spec in cls.examples:
        assert str(resolve(kind, spec)) == spec, "examples are written in canonical form"
        spelled_out = resolve(kind, spec).spelled_out()
        assert all(f"{key}=" in spelled_out for key in params(cls))
        if "=none" not in spelled_out:
            assert resolve(kind, spelled_out) == resolve(kind, spec)
    for spec, message in cls.refused:
        with pytest.raises(SpecError, match=message):
            resolve(kind, spec)
