"""Compiled steps: equal to those of `loop` for all rates, rules and cohorts, and resumed bit for bit.

They are in their own file, so that only one test process loads torch's compiler.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import nn

from fedcams.engines import Problem, engine
from fedcams.engines.compiled import has_compiler
from fedcams.errors import SpecError
from fedcams.local import local
from fedcams.runs import resume, run
from test_engines import assert_close, per_example, problem, train
from test_runs import (
    _digits_once,  # noqa: F401  (a fixture)
    _quick_sync,  # noqa: F401  (a fixture)
    lasting,
    small,
    stopped,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # torch's compiler uses what torch deprecates
    pytest.mark.skipif(not has_compiler(), reason="needs a C++ compiler"),
]


def test_a_compiled_step_is_the_same_and_serves_every_rate() -> None:
    """In one shape for all steps: clients of uneven size, some done before the others.

    The rate is an input; a shift takes code of its own, and so do another rule and another loss.
    """
    spec = "adamw(lr=0.01, epochs=2, batch=8)"
    task = problem("mlp", spec)
    shift = torch.randn(5, task.layout.d, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for rate, added in ((None, None), (0.05, None), (0.02, shift), (0.01, shift)):
        truth = train("loop", problem("mlp", spec), rate=rate, shift=added)
        assert_close(train("stacked(compile=true)", task, rate=rate, shift=added), truth, 1e-9)
    assert len(task.compiled) == 2
    assert not dataclasses.replace(task, local=local("sgd(lr=0.1)"), loss=lambda out, y: out.sum(-1)).compiled
    with pytest.raises(SpecError, match="compiling needs a model without buffers"):
        train("stacked(compile=true)", problem("batch-norm"))


def test_a_compiled_step_serves_cohorts_of_any_length() -> None:
    """More lengths than a compiler would make a step of its own for."""
    x, y = torch.randn(100, 12, generator=torch.Generator().manual_seed(0)).double(), torch.arange(100) % 3
    clients = {client: (x[: 5 * client + 5], y[: 5 * client + 5]) for client in range(20)}
    model = nn.Linear(12, 3).double()  # each layer takes seconds to compile, and float32 one more header
    given = Problem(model, per_example, clients, local("sgd(lr=0.1, momentum=0.9, weight_decay=0.01, batch=4)"))
    start = given.read()
    for cohort in ([first, first + 1] for first in range(0, 20, 2)):
        ours, truth = (
            engine(by).train(given, *start, cohort, round=1, seed=0) for by in ("stacked(compile=true)", "loop")
        )
        assert_close(ours, truth, 1e-5)
    assert len(given.compiled) == 1


def test_resumed_in_compiled_code_is_never_stopped(tmp_path: Path) -> None:
    experiment = small(model="linear", uplink="sign", engine="stacked(compile=true)")
    run(experiment, tmp_path / "whole")
    folder = stopped(tmp_path / "5", 5, experiment)
    resume(folder)
    assert lasting(folder) == lasting(tmp_path / "whole")
