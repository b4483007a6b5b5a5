"""The fastest engine that can train a model."""

from __future__ import annotations

import contextlib

from torch import nn

from fedcams.engines import graphs
from fedcams.engines.base import Engine, engine
from fedcams.engines.stacked import check_supported
from fedcams.errors import SpecError


def choose(spec: str | Engine, model: nn.Module) -> Engine:
    """The engine asked for; with `auto`, on a CUDA device `graphs`, elsewhere or where it has no kernel for a layer
    `stacked`, and `loop` for layers that only it can train."""
    if spec != "auto":
        return engine(spec)
    with contextlib.suppress(SpecError):
        graphs.check_supported(model)
        return engine("graphs")
    try:
        check_supported(model)
    except SpecError:
        return engine("loop")
    return engine("stacked")
