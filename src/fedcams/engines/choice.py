"""The fastest engine that can train a model."""

from __future__ import annotations

from torch import nn

from fedcams.engines.base import Engine, engine
from fedcams.engines.stacked import check_supported
from fedcams.errors import SpecError


def choose(spec: str | Engine, model: nn.Module) -> Engine:
    """The engine asked for; with `auto`, `stacked` unless the model has layers that only `loop` can train."""
    if spec != "auto":
        return engine(spec)
    try:
        check_supported(model)
    except SpecError:
        return engine("loop")
    return engine("stacked")
