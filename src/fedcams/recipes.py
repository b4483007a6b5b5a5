"""Recipes: names for a complete set of compression settings, with the average that goes with them.

`recipe="light"` sets several fields of a method wherever you give settings: in presets and experiments, after `-s`, in
`simulate` and in the Flower strategy. A method, and the files of a run, store the fields, not the name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from fedcams.errors import SpecError
from fedcams.registry.fields import nearest

KEY = "recipe"
"""The setting that names a recipe."""


@dataclass(frozen=True)
class Measured:
    """What a recipe cost and lost in the runs in `results/`, compared with dense FedAMS, averaged in the same way."""

    setting: str
    fewer_bytes: float
    """How many times fewer bytes, up and down together, first contacts and buffers included."""
    accuracy: float
    """Accuracy of the averaged model at the end, in percent; mean over seeds."""
    dense_accuracy: float
    """The same for dense FedAMS."""
    seeds: int
    server: str = ""
    """The server optimizer, if it is not that of dense FedAMS: a recipe does not set it."""

    def __str__(self) -> str:
        """Return the measurement as one sentence."""
        kind = f"mean of {self.seeds} seeds" if self.seeds > 1 else "one seed"
        server = f"; server = {self.server}" if self.server else ""
        return (
            f"{self.fewer_bytes:.3g}x fewer bytes, {self.accuracy:.2f}% averaged, compared with "
            f"{self.dense_accuracy:.2f}% for dense FedAMS ({self.setting}; {kind}{server})"
        )


@dataclass(frozen=True)
class Recipe:
    """A named set of compression settings: fields of a method, what they are for, and what was measured.

    Examples:
        >>> from fedcams.recipes import recipe
        >>> recipe("light").fields["uplink"]
        'ternary(ratio=1/8)'
    """

    name: str
    doc: str
    fields: Mapping[str, str]
    measured: tuple[Measured, ...] = ()

    @property
    def two_way(self) -> bool:
        """Whether it compresses the model on its way down too."""
        return self.fields.get("downlink", "none") != "none"

    @property
    def cost(self) -> str:
        """What was measured, in words."""
        return "; ".join(map(str, self.measured)) or "not measured yet"


AVERAGE = "ema(decay=0.985)"
BUFFERS = "blockq(block=32)"
RESNET18 = "CIFAR-10, ResNet-18"
DENSE = 92.59
"""The accuracy of dense FedAMS, averaged, on CIFAR-10 with ResNet-18: three seeds, the better of two servers."""
SLOWER = "fedams(lr=hold(part=0.8, then=cosine(start=0.4, end=0)), beta1=0.5, bias_correction=true)"
"""The server of the runs: compressed updates arrive late, so a faster server would leave clients behind."""


def _both_ways(up: str, down: str) -> Mapping[str, str]:
    return MappingProxyType(
        {
            "uplink": f"ternary(ratio={up})",
            "downlink": f"replica(ternary(ratio={down}), warm=true)",
            "buffers": BUFFERS,
            "average": AVERAGE,
        }
    )


_ALL = (
    Recipe(
        "one-way",
        "Compresses only updates: for servers that cannot keep a model per client, or clients that take part once.",
        MappingProxyType({"uplink": "ternary(ratio=1/16)", "buffers": BUFFERS, "average": AVERAGE}),
        (Measured(RESNET18, fewer_bytes=1.98, accuracy=92.71, dense_accuracy=DENSE, seeds=3, server=SLOWER),),
    ),
    Recipe(
        "light",
        "Compresses both ways, but the model only lightly: for clients that take part only a few times.",
        _both_ways("1/8", "1/2"),
        (Measured(RESNET18, fewer_bytes=30.5, accuracy=92.16, dense_accuracy=DENSE, seeds=3, server=SLOWER),),
    ),
    Recipe(
        "lighter",
        "Compresses both ways equally: a balance of bytes and accuracy.",
        _both_ways("1/13", "1/13"),
        (Measured(RESNET18, fewer_bytes=75.1, accuracy=92.24, dense_accuracy=DENSE, seeds=3, server=SLOWER),),
    ),
    Recipe(
        "lightest",
        "Compresses both ways as far as possible: for the slowest links.",
        _both_ways("1/22", "1/22"),
        (Measured(RESNET18, fewer_bytes=111, accuracy=91.84, dense_accuracy=DENSE, seeds=3, server=SLOWER),),
    ),
)
RECIPES: Mapping[str, Recipe] = MappingProxyType({recipe.name: recipe for recipe in _ALL})
"""All recipes by name, from the most bytes to the fewest."""


def recipe(name: object) -> Recipe:
    """Return the recipe with this name.

    Arguments:
        name: such as `lighter`.

    Returns:
        The recipe, whose `fields` are settings of a method.

    Raises:
        SpecError: for an unknown name; it suggests the nearest one.

    Examples:
        >>> from fedcams.recipes import recipe
        >>> sorted(recipe("lighter").fields)
        ['average', 'buffers', 'downlink', 'uplink']
    """
    if not isinstance(name, str) or name not in RECIPES:
        known = ", ".join(RECIPES)
        raise SpecError(f"{KEY}={name!r}: no recipe has this name{nearest(str(name), RECIPES)}; known: {known}")
    return RECIPES[name]


def merged(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of all layers as one; those of a later layer win.

    A layer that names a recipe sets the recipe's fields, which the layer's other settings override.

    Arguments:
        layers: settings by name, from the weakest to the strongest.

    Returns:
        The settings, without a recipe.

    Raises:
        SpecError: for an unknown recipe.

    Examples:
        >>> from fedcams.recipes import merged
        >>> merged({"uplink": "sign", "rounds": 5}, {"uplink": "topk(ratio=1/64)"})
        {'uplink': 'topk(ratio=1/64)', 'rounds': 5}
    """
    settings: dict[str, Any] = {}
    for layer in layers:
        given = dict(layer)
        name = given.pop(KEY, None)
        settings |= {**({} if name is None else recipe(name).fields), **given}
    return settings
