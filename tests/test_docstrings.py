"""The docstrings of what users call: arguments, what comes back, what is refused, and an example that runs.

They cover everything in `fedcams.__all__`, and every function that one of the public packages exports. Classes that
only such functions make, such as `Run` or `Plan`, are shown in the examples of these functions.
"""

from __future__ import annotations

import doctest
import importlib.util
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fedcams
from fedcams.own import History
from fedcams.registry import table
from together import together

INTERNAL = {"bench", "bits", "buffers", "cli", "durable", "escaping", "extras", "parts"}
"""Modules that users have no reason to import: the commands, and what the other modules are made of."""
PACKAGE = Path(fedcams.__file__).parent
SAFE = {"over_test_set"}
"""Those of `fedcams.__all__` that refuse nothing."""


def exported(module: str) -> Iterator[tuple[str, Any]]:
    """Yield the public names of a module with their values: those in `__all__`, or those that it defines."""
    found = importlib.import_module(f"fedcams.{module}")
    own = [name for name, value in vars(found).items() if getattr(value, "__module__", "") == found.__name__]
    for name in getattr(found, "__all__", own):
        if not name.startswith("_"):
            yield f"{module}.{name}", getattr(found, name)


def public_modules() -> list[str]:
    inside = (path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists())
    without = {*INTERNAL} if importlib.util.find_spec("flwr") else {*INTERNAL, "flower"}
    return sorted(name for name in inside if not name.startswith("_") and name not in without)


def functions(names: dict[str, Any]) -> dict[str, Callable[..., Any]]:
    return {name: value for name, value in names.items() if inspect.isfunction(inspect.unwrap(value))}


TOP = {name: getattr(fedcams, name) for name in fedcams.__all__ if name != "__version__"}
CLASSES: dict[str, Any] = {"own.History": History}
if importlib.util.find_spec("flwr"):
    CLASSES["flower.FedCAMS"] = importlib.import_module("fedcams.flower").FedCAMS
DEEPER = functions(dict(pair for module in public_modules() for pair in exported(module)))
FUNCTIONS = functions(TOP) | {name: value for name, value in DEEPER.items() if value not in TOP.values()}


def section(value: Any, title: str) -> str:
    """The indented text under `title:` in a docstring."""
    found = re.search(rf"^{title}:\n((?:    .*\n|\n)+)", inspect.getdoc(value) + "\n", re.MULTILINE)
    return found[1] if found else ""


@together("name", TOP | CLASSES | FUNCTIONS)
def test_every_public_name_has_an_example_that_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    value = (TOP | CLASSES | FUNCTIONS)[name]
    assert ">>>" in section(value, "Examples"), f"give fedcams.{name} an example in its docstring"
    text = inspect.getdoc(value)
    assert text
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(table, "_REGISTRY", {kind: dict(pieces) for kind, pieces in table._REGISTRY.items()})
    with torch.random.fork_rng():
        example = doctest.DocTestParser().get_doctest(text, {}, name, None, None)
        failed = doctest.DocTestRunner().run(example).failed
    assert failed == 0, "the difference is in the captured output"


@together("name", FUNCTIONS)
def test_functions_describe_their_arguments_and_what_comes_back(name: str) -> None:
    described = re.findall(r"^    (\w+): ", section(FUNCTIONS[name], "Arguments"), re.MULTILINE)
    assert described == list(inspect.signature(FUNCTIONS[name]).parameters)
    assert section(FUNCTIONS[name], "Returns")


@together("name", sorted({*functions(TOP)} - SAFE))
def test_functions_of_the_package_say_what_they_refuse(name: str) -> None:
    assert section(TOP[name], "Raises")
