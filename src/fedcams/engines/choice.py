"""The fastest engine that can train a model."""

from __future__ import annotations

import contextlib
import os
import shutil
import sysconfig
from pathlib import Path

from fedcams.engines import graphs
from fedcams.engines.base import Engine, engine
from fedcams.engines.problem import Problem
from fedcams.engines.stacked import can_compile
from fedcams.engines.trial import agrees
from fedcams.errors import SpecError
from fedcams.local import step_count

PAYS = 10_000
"""Steps of a run from which on the seconds of compiling are won back."""


def choose(spec: str | Engine, problem: Problem, rounds: int = 1, varies: bool = False) -> Engine:
    """The engine asked for; with `auto`, the fastest for so many rounds of cohorts whose size varies or does not.

    That is `graphs` on a CUDA device, elsewhere or where it has no kernel for a layer `stacked`, compiled where that
    pays, and `loop` for models that only it trains right. The choice depends on the machine and the arguments alone, so
    a resumed run goes on with the same engine.
    """
    if spec != "auto":
        chosen = engine(spec)
        if chosen.needs_cuda:
            graphs.check_problem(problem)  # now: in the first round it would leave a run behind that cannot go on
        return chosen
    with contextlib.suppress(SpecError):
        graphs.check_problem(problem)
        return engine("graphs")
    if not agrees(engine("stacked"), problem):
        return engine("loop")
    compiled = not varies and _pays(problem, rounds) and has_compiler() and can_compile(problem)
    return engine("stacked(compile=true)" if compiled else "stacked")


def has_compiler() -> bool:
    """Whether torch can compile for the CPU here."""
    found = shutil.which(os.environ.get("CXX", "c++"))
    return found is not None and (Path(sysconfig.get_path("include")) / "Python.h").exists()


def _pays(problem: Problem, rounds: int) -> bool:
    some = len(problem.clients[next(iter(problem.clients))][0])
    return problem.device.type == "cpu" and rounds * step_count(problem.local, some) >= PAYS
