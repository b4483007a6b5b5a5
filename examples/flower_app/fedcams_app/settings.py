"""What both sides read out of the run's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedcams.experiment import Built, Experiment, build
from fedcams.registry import params


def experiment(config: Mapping[str, Any]) -> Experiment:
    """The same experiment that `fedcams run` would simulate; `loop` trains one client at a time."""
    return Experiment.from_dict({**{key: config[key] for key in params(Experiment) if key in config}, "engine": "loop"})


def built(config: Mapping[str, Any]) -> Built:
    """Data, model and everything else. At a real site this loads the site's own examples."""
    return build(experiment(config), Path(config["data"]) if config["data"] else None)
