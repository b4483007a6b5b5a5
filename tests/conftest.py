"""Settings and fixtures for all tests."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator

import pytest
from hypothesis import settings

from forks import Forks

# Several processes at once must not each take all cores: their threads would spin against each other.
if "PYTEST_XDIST_WORKER" in os.environ:
    import torch

    torch.set_num_threads(1)

# Tests start dozens of processes, and each would compile the whole package for itself.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# The first call of a kernel compiles it, so a deadline would measure that; in CI the same examples every time, and
# elsewhere half as many, which are others in every run.
IN_CI = "CI" in os.environ
settings.register_profile("fedcams", deadline=None, derandomize=IN_CI, max_examples=100 if IN_CI else 50)
settings.load_profile("fedcams")


LONG_FIRST = (
    "test_flower_deployment.py",
    "test_graph_kernels.py",
    "test_compiled.py",
    "test_report_browser.py",
    "test_jobs_at_once.py",
    "test_memory.py",
    "test_read_only.py",
    "test_notebook.py",
    "test_extension_kills.py",
    "test_deaths.py",
    "test_methods.py",
    "test_runs_kills.py",
    "test_report_figures.py",
    "test_report.py",
    "test_cli.py",
)
"""Files with tests of many seconds: they start first, so that no process ends alone with one of them."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long tests first, then those that fork, so that of several processes one alone loads what is forked."""
    ranks = {name: rank for rank, name in enumerate(LONG_FIRST)}
    items.sort(key=lambda item: (ranks.get(item.path.name, len(ranks)), not forks_in(item)))


def forks_in(item: pytest.Item) -> bool:
    """Whether a test makes processes by the fixture `forks`."""
    return "forks" in getattr(item, "fixturenames", ())


gc.disable()  # until all is loaded and collected, which stays to the end: no use in searching it for garbage


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_sessionstart() -> None:
    """Of several processes, each compiles its share of the kernels and finds the others' in the cache."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        number, count = os.environ["PYTEST_XDIST_WORKER"], os.environ["PYTEST_XDIST_WORKER_COUNT"]
        compile_kernels(int(number.removeprefix("gw")), int(count))


def compile_kernels(number: int, count: int) -> None:
    """Encode and decode by one of `count` shares of the compressors, in their order, which has the slow ones apart."""
    from fedcams import decode, encode
    from fedcams.registry import registered

    classes = [*registered("compressor").values()]
    for cls in classes[number * len(classes) // count : (number + 1) * len(classes) // count]:
        for spec in cls.examples:
            decode(encode(spec, torch.arange(64.0)))


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    """For tests of kills, of ends and of what must stay out of this process: others that need not import torch."""
    made = Forks()
    yield made
    made.close()
