"""Many small cases in one test, which runs them all and names every one that fails."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest

Test = Callable[..., None]


def together(
    names: str | tuple[str, ...], cases: Iterable[Any], ids: Callable[[Any], str] = str
) -> Callable[[Test], Test]:
    """Give a test each of the cases in turn, as `pytest.mark.parametrize` does, but in one test.

    For checks of a moment, which pytest takes longer to start and report than they take to run. `names` and `cases` are
    as there, and `ids` turns a value into the name that a failure shows. Fixtures are made once for all cases.
    """
    keys = (names,) if isinstance(names, str) else names
    values = [(case,) if isinstance(names, str) else tuple(case) for case in cases]
    assert values, f"no {' and '.join(keys)} to test"

    def one_test(check: Test) -> Test:
        @functools.wraps(check)
        def test(**fixtures: Any) -> None:
            failed, errors = [], []
            for case in values:
                given = dict(zip(keys, case, strict=True))
                try:
                    check(**fixtures, **given)
                except (Exception, pytest.fail.Exception, BaseExceptionGroup) as error:
                    failed.append(", ".join(f"{key}={ids(value)}" for key, value in given.items()))
                    error.add_note(f"with {failed[-1]}")
                    errors.append(error)
            if errors:
                raise BaseExceptionGroup(f"{len(failed)} of {len(values)} cases fail: {'; '.join(failed)}", errors)

        signature = inspect.signature(check)
        left = [parameter for name, parameter in signature.parameters.items() if name not in keys]
        test.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
        return test

    return one_test
