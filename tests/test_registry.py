"""Spec strings: exact numbers, canonical spelling, and errors that say what to write instead."""

from __future__ import annotations

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
    text,
)


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


leaves = st.builds(
    Leaf,
    rate=st.fractions(0, 1).filter(lambda r: r < 1),
    count=st.integers(1, 9),
    fast=st.booleans(),
    label=st.text(max_size=20),
    mode=st.sampled_from(["plain", "fancy"]),
)
trees = st.recursive(
    leaves, lambda inner: st.builds(Tree, inner=inner, weight=st.none() | st.fractions(-(10**38), 10**38)), max_leaves=4
)


@given(trees)
def test_parse_is_the_reverse_of_str(piece: Toy) -> None:
    assert resolve("toy", str(piece)) == piece
    assert str(resolve("toy", str(piece))) == str(piece)


@given(st.fractions())
def test_numbers_are_exact(value: Fraction) -> None:
    assert exact(format_number(value)) == value


@pytest.mark.parametrize(
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


@pytest.mark.parametrize(
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
    ],
)
def test_canonical_form(spec: str, canonical: str) -> None:
    assert str(resolve("toy", spec)) == canonical


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("laef", r"no toy is named 'laef' \(did you mean 'leaf'\?\); known: leaf, tree"),
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


def test_a_name_belongs_to_one_class() -> None:
    with pytest.raises(SpecError, match="toy 'leaf' is registered already"):
        register("leaf")(Tree)


PACKAGE = [(kind, cls) for kind in kinds() if kind != "toy" for cls in registered(kind).values()]


@pytest.mark.parametrize(("kind", "cls"), PACKAGE, ids=lambda value: getattr(value, "name", value))
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
