"""Flower's own options for training and the hooks of its strategies, as FedCAMS supports them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg

from fedcams.errors import SpecError
from fedcams.flower.records import EXAMPLES
from fedcams.sampler import Sampler

MIN_TRAIN_NODES = 2
"""Flower's default."""
MANY = 10**6
"""A number of clients from which even a small fraction is a large cohort, where it is not known how many there are."""


class RoundConfig(list[Message]):
    """What `configure_train` returns: no messages yet, but the config of the round."""

    def __init__(self, config: ConfigRecord) -> None:
        super().__init__()
        self.config = config


def overrides(cls: type, base: type, hook: str) -> bool:
    """Return whether a subclass of `base` overrides a hook."""
    return getattr(cls, hook) is not getattr(base, hook)


def refuse_hooks(cls: type, base: type) -> None:
    """Refuse a subclass of `base` that overrides a hook which is never called."""
    if overrides(cls, base, "aggregate_train"):
        raise SpecError(
            f"{cls.__name__} overrides aggregate_train, which FedCAMS never calls, because it decodes updates as they "
            "arrive; use train_metrics_aggr_fn for metrics, evaluate_fn for the model after each round, and "
            "transforms or aggregate for updates"
        )


def config_of(messages: Iterable[Message], cls: type) -> ConfigRecord:
    """Return the config from what `configure_train` of a class returned; refuses custom messages."""
    if not isinstance(messages, RoundConfig):
        raise SpecError(
            f"{cls.__name__}.configure_train builds its own messages, but models travel compressed; change config, "
            "and return super().configure_train(server_round, arrays, config, grid)"
        )
    return messages.config


def check_arrays(arrays: Any) -> None:
    """Refuse what is not the arrays of a model, such as the model itself."""
    if not isinstance(arrays, ArrayRecord):
        raise SpecError(f"initial_arrays is a {type(arrays).__name__}; give ArrayRecord(model.state_dict())")


def too_few_to_evaluate(strategy: FedAvg, grid: Grid) -> str:
    """Return in words the first option that needs more nodes to evaluate than are connected; else an empty string."""
    found = len(list(grid.get_node_ids()))
    least = {name: getattr(strategy, name) for name in ("min_available_nodes", "min_evaluate_nodes")}
    return next((f"{found} connected, {name}={count}" for name, count in least.items() if found < count), "")


# -- options ---------------------------------------------------------------------------------------------------------


def sampler_of(options: dict[str, Any], sampler: Sampler | str) -> Sampler:
    """Return the sampler that `fraction_train` and `min_train_nodes` describe, or the one given.

    Refuses both at once, and a fraction of zero.
    """
    part, least = options.get("fraction_train", 1.0), options.get("min_train_nodes", MIN_TRAIN_NODES)
    if part == 1.0:
        return Sampler.parse(sampler)
    if not 0 < part <= 1:
        raise SpecError(f"fraction_train={part}; allowed: a number in (0, 1]")
    if str(Sampler.parse(sampler)) != "full":
        raise SpecError(f"fraction_train={part} and sampler={sampler}: give only one of them")
    return Sampler.parse(f"fraction(part={part}, least={least})")


def nodes_of(options: dict[str, Any], min_available: int) -> int:
    """Return how many nodes must be connected: the largest number that any of the options requires."""
    asked = (options[key] for key in ("min_available_nodes", "min_train_nodes") if key in options)
    return max(min_available, *map(int, asked), 0)


def weighting_of(options: dict[str, Any], fields: dict[str, Any]) -> dict[str, str]:
    """Return the method's weighting if `weighted_by_key` sets one; refuses a key that updates do not carry."""
    key = options.get("weighted_by_key")
    if key is None or "weighting" in fields:
        return {}
    if key != EXAMPLES:
        raise SpecError(
            f"weighted_by_key={key!r}: updates carry only {EXAMPLES!r}; report that and name it here, or also give "
            "weighting='uniform' to weight only metrics"
        )
    return {"weighting": "examples"}
