"""Cases that share a test: all run, and those that fail are named."""

from __future__ import annotations

import inspect

import pytest

from together import together

SEEN: list[tuple[int, str]] = []


@together("number", range(4))
@together("letter", ["a", "b"])
def check(number: int, letter: str, fixture: str) -> None:
    SEEN.append((number, letter))
    assert number != 2 or letter == "a", fixture
    if number == 3:
        pytest.fail("told so")


def test_every_case_is_run_and_all_that_fail_are_named() -> None:
    assert list(inspect.signature(check).parameters) == ["fixture"]
    with pytest.raises(BaseExceptionGroup, match="2 of 4 cases fail: number=2; number=3") as caught:
        check(fixture="given")
    assert [(number, letter) for number in range(4) for letter in "ab"] == SEEN
    second, third = caught.value.exceptions
    assert "1 of 2 cases fail: letter=b" in str(second)
    assert second.__notes__ == ["with number=2"]
    assert "given" in str(second.exceptions[0])
    assert "2 of 2 cases fail" in str(third)


def test_no_cases_are_refused() -> None:
    with pytest.raises(AssertionError, match="no number to test"):
        together("number", [])


def test_the_names_of_cases_select_the_test() -> None:
    """`-k` searches the names of a test function's attributes too."""
    assert {"a", "b"} <= set(vars(check))
