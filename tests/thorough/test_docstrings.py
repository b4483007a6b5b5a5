"""The docstrings of what users call: arguments, return values, errors, and an example that runs.

Examples are required of everything in `fedcams.__all__`, and of every function and every base class of pieces that a
public package exports. Other classes are mostly what these functions return; the examples that they have run too.
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
from fedcams.registry import Spec, table
from together import together

INTERNAL = {"bench", "bits", "buffers", "cli", "durable", "escaping", "extras", "parts"}
"""Modules that users have no reason to import: the commands, and what the other modules are made of."""
PACKAGE = Path(fedcams.__file__).parent
SAFE = {"over_test_set"}
"""Those of `fedcams.__all__` that refuse nothing."""
FIRST = {"experiment.Experiment", "flower.FedCAMS", "own.History"}
"""Classes that users meet first."""


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


def classes(names: dict[str, Any]) -> dict[str, Any]:
    """Those that need an example, and others that have one."""
    found = {name: value for name, value in names.items() if inspect.isclass(value)}
    return {
        name: value for name, value in found.items() if name in FIRST or is_base(value) or section(value, "Examples")
    }


def is_base(cls: type) -> bool:
    return issubclass(cls, Spec) and cls is not Spec and not cls.name


def section(value: Any, title: str) -> str:
    """The indented text under `title:` in a docstring of its own."""
    found = re.search(rf"^{title}:\n((?:    .*\n|\n)+)", inspect.cleandoc(value.__doc__ or "") + "\n", re.MULTILINE)
    return found[1] if found else ""


TOP = {name: getattr(fedcams, name) for name in fedcams.__all__ if name != "__version__"}
DEEPER = {name: value for module in public_modules() for name, value in exported(module) if value not in TOP.values()}
FUNCTIONS = functions(TOP) | functions(DEEPER)
SHOWN = TOP | FUNCTIONS | classes(DEEPER)


@together("name", SHOWN)
def test_every_public_name_has_an_example_that_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    value = SHOWN[name]
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
