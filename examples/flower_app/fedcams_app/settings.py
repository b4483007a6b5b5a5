"""What both sides read from the run's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedcams.experiment import Built, Experiment, build
from fedcams.registry import params


def experiment(config: Mapping[str, Any]) -> Experiment:
    """Return the experiment that `fedcams run` would simulate; `loop` trains one client at a time."""
    return Experiment.from_dict({**{key: config[key] for key in params(Experiment) if key in config}, "engine": "loop"})


def built(config: Mapping[str, Any]) -> Built:
    """Return data, model and everything else. A real site would load its own examples here."""
    return build(experiment(config), Path(config["data"]) if config["data"] else None)
