"""Many small cases in one test, which runs them all and names every one that fails."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest

Test = Callable[..., None]


def together(
    names: str | tuple[str, ...],
    cases: Iterable[Any] | Callable[[], Iterable[Any]],
    ids: Callable[[Any], str] = str,
) -> Callable[[Test], Test]:
    """Give a test each of the cases in turn, as `pytest.mark.parametrize` does, but in one test.

    For checks of a moment, which pytest takes longer to start and report than they take to run. `names` and `cases` are
    as there, but a function may make the cases when the test runs; `ids` turns a value into the name that a failure
    shows. Fixtures are made once for all cases. `-k` selects the test by any text among the cases that are known.
    """
    keys = (names,) if isinstance(names, str) else names
    known = cases if callable(cases) else listed(keys, cases)

    def one_test(check: Test) -> Test:
        @functools.wraps(check)
        def test(**fixtures: Any) -> None:
            given = listed(keys, known()) if callable(known) else known
            failed, errors = [], []
            for case in given:
                try:
                    check(**fixtures, **case)
                except (Exception, pytest.fail.Exception, BaseExceptionGroup) as error:
                    failed.append(", ".join(f"{key}={ids(value)}" for key, value in case.items()))
                    error.add_note(f"with {failed[-1]}")
                    errors.append(error)
            if errors:
                raise BaseExceptionGroup(f"{len(failed)} of {len(given)} cases fail: {'; '.join(failed)}", errors)

        signature = inspect.signature(check)
        left = [parameter for name, parameter in signature.parameters.items() if name not in keys]
        test.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
        values = [] if callable(known) else [value for case in known for value in case.values()]
        texts = [ids(value) for value in values if isinstance(value, str) or ids is not str]
        test.__dict__.update(dict.fromkeys(texts, True))  # read by -k
        return test

    return one_test


def listed(keys: tuple[str, ...], cases: Iterable[Any]) -> list[dict[str, Any]]:
    """The arguments of every case; an empty list would be a test that cannot fail."""
    found = [dict(zip(keys, case if len(keys) > 1 else (case,), strict=True)) for case in cases]
    assert found, f"no {' and '.join(keys)} to test"
    return found
