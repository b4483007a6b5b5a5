"""The docstrings of what users call first: arguments, what comes back, what is refused, and an example that runs."""

from __future__ import annotations

import doctest
import importlib.util
import inspect
import re
from typing import Any

import pytest

import fedcams
from fedcams.own import History

EXPORTED = {name: getattr(fedcams, name) for name in fedcams.__all__ if name != "__version__"} | {"History": History}
if importlib.util.find_spec("flwr"):
    flower = importlib.import_module("fedcams.flower")
    EXPORTED |= {"flower.FedCAMS": flower.FedCAMS, "flower.uplink": flower.uplink}
FUNCTIONS = {name: value for name, value in EXPORTED.items() if inspect.isfunction(inspect.unwrap(value))}
MAY_FAIL = {name for name in FUNCTIONS if name != "over_test_set"}


def section(value: Any, title: str) -> str:
    """The indented text under `title:` in a docstring."""
    found = re.search(rf"^{title}:\n((?:    .*\n|\n)+)", inspect.getdoc(value) + "\n", re.MULTILINE)
    return found[1] if found else ""


@pytest.mark.parametrize("name", EXPORTED)
def test_every_exported_name_has_an_example_that_runs(name: str) -> None:
    assert ">>>" in section(EXPORTED[name], "Examples"), f"give fedcams.{name} an example in its docstring"
    text = inspect.getdoc(EXPORTED[name])
    assert text
    example = doctest.DocTestParser().get_doctest(text, {}, name, None, None)
    failed = doctest.DocTestRunner().run(example).failed
    assert failed == 0, "the difference is in the captured output"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_describe_their_arguments_and_what_comes_back(name: str) -> None:
    described = re.findall(r"^    (\w+): ", section(FUNCTIONS[name], "Arguments"), re.MULTILINE)
    assert described == list(inspect.signature(FUNCTIONS[name]).parameters)
    assert section(FUNCTIONS[name], "Returns")
    assert section(FUNCTIONS[name], "Raises") or name not in MAY_FAIL
