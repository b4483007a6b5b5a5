"""Pieces that are not in the package: one short file each, and the method that uses it.

`loaded(folder)` writes the files, imports them and forgets them afterwards, so that whoever tests a way to run a method
(a simulation, the command line, Flower) can take `METHODS[name]` for each of them.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedcams.registry import table

LOCAL = '''
"""Local training that follows the signs of the gradients."""

from dataclasses import dataclass

from fedcams.local.base import Local, batch_field, descend_, drop_last_field, epochs_field, only_active, steps_field
from fedcams.registry import Number, number, register


@register("signsgd")
@dataclass(frozen=True)
class SignSGD(Local):
    """`w -= lr sign(g)`."""

    lr: Number = number(0.01, low=0, open="low", doc="local learning rate")
    epochs: int | None = epochs_field()
    steps: int | None = steps_field()
    batch: int = batch_field()
    drop_last: bool = drop_last_field()

    def init(self, x):
        return {}

    def step_(self, x, gradient, slots, rate, active=None):
        with only_active(active, x):
            descend_(x, gradient.sign_(), rate)
'''

CONTROL = '''
"""Control variates that correct only a part of the drift."""

from dataclasses import dataclass

from fedcams.control.base import Control
from fedcams.registry import Number, number, register


@register("damped")
@dataclass(frozen=True)
class Damped(Control):
    """Steps follow `g + part (c - c_i)`; c_i becomes the round's mean gradient, and c stays the mean of all c_i."""

    part: Number = number(0.5, low=0, high=1, doc="how much of the drift is corrected")

    def shift(self, c, rows):
        return float(self.part) * (c - rows)

    def change(self, c, rows, delta, rate_sum):
        return -delta / rate_sum.to(delta.dtype)[:, None] - self.shift(c, rows) - rows

    def step_(self, c, mean_change, accepted, population):
        c.add_(mean_change, alpha=accepted / population)
'''

TRANSFORM = '''
"""Noise on every update, which the client draws."""

from dataclasses import dataclass

import numpy as np
import torch

from fedcams.registry import Number, number, register
from fedcams.transforms.base import Transform


@register("noise")
@dataclass(frozen=True)
class Noise(Transform):
    """`Δ += scale z` with z normal."""

    scale: Number = number(0.01, low=0, doc="standard deviation")

    def update_(self, rows, facts, layout):
        for row, client in zip(rows, facts.ids, strict=True):
            rng = np.random.Generator(np.random.Philox(key=facts.key("noise", client)))
            row.add_(torch.from_numpy(rng.standard_normal(layout.d, np.float32)), alpha=float(self.scale))
'''

PROBE = '''
"""How much the clients' updates differ in size."""

from dataclasses import dataclass

from fedcams.bits.vectors import row_norms
from fedcams.probes.base import Probe
from fedcams.registry import register


@register("spread")
@dataclass(frozen=True)
class Spread(Probe):
    """`smallest` and `largest` norm of the decoded updates."""

    def measure(self, left):
        norms = row_norms(left.decoded())
        return {"smallest": float(norms.min()), "largest": float(norms.max())}
'''

COMPRESSOR = '''
"""The leading half of every number."""

from dataclasses import dataclass

import torch

from fedcams.compress.base import Compressor, Field
from fedcams.registry import register


@register("half")
@dataclass(frozen=True)
class Half(Compressor):
    """All coordinates as bfloat16, which keeps eight bits: an error of at most 2**-9 of each."""

    reveals_nonfinite = True

    def fields(self, layout):
        return {"values": Field("bf16", layout.d)}

    def squared_error_bound(self, layout):
        return 2.0**-16

    def compress(self, x, layout, keys):
        return {"values": x.to(torch.bfloat16)}

    def accumulate_(self, out, code, layout, weight):
        out.add_(code["values"].float(), alpha=weight)
'''

DOWNLINK = '''
"""The model in few bits, rounded to the nearest, the same for all clients."""

from dataclasses import dataclass

from fedcams.compress import Compressor
from fedcams.downlink.base import Delivery, Downlink, Sent
from fedcams.registry import nested, register
from fedcams.wire import encode, sizes


@register("rounded")
@dataclass(frozen=True)
class Rounded(Downlink):
    """C(x); neither side keeps anything."""

    codec: Compressor = nested("compressor", "blockq(bits=8)", doc="how the model travels")

    def send(self, state, broadcast, clients):
        data = encode(self.codec, broadcast.x, broadcast.layout, broadcast.key())
        return {client: {"model": data} for client in clients}, state

    def deliver(self, state, broadcast, clients):
        code = self.codec.encode(broadcast.x[None], broadcast.layout, broadcast.key())
        (size,) = sizes(self.codec, code, broadcast.layout)
        return Delivery(self.codec.decode(code, broadcast.layout)[0], [Sent("delta", size)] * len(clients), state)

    def paper_bits(self, layout):
        return self.codec.paper_bits(layout)
'''

FILES = {
    "own_local": LOCAL,
    "own_control": CONTROL,
    "own_transform": TRANSFORM,
    "own_probe": PROBE,
    "own_compressor": COMPRESSOR,
    "own_downlink": DOWNLINK,
}
"""Module -> what its file says."""

METHODS: dict[str, dict[str, Any]] = {
    "own_local": {"local": "signsgd(lr=0.01, steps=3, batch=8)"},
    "own_control": {"control": "damped(1/4)"},
    "own_transform": {"transforms": "clip(norm=1) + noise(scale=1e-3)"},
    "own_probe": {},
    "own_compressor": {"uplink": "half"},
    "own_downlink": {"downlink": "rounded(half)", "uplink": "half"},
}
"""Module -> the fields of a method that uses its piece; `own_downlink` needs `own_compressor` too."""
PROBES = {"own_probe": "q + spread"}
"""Module -> the probes of its run, if not the default."""


@contextlib.contextmanager
def loaded(folder: Path) -> Iterator[None]:
    """Writes the files into the folder and imports them; what they registered is forgotten at the end."""
    for name, text in FILES.items():
        (folder / f"{name}.py").write_text(text.lstrip())
    with forgotten(*FILES):
        sys.path.insert(0, str(folder))
        for name in FILES:
            importlib.import_module(name)
        yield


@contextlib.contextmanager
def forgotten(*modules: str) -> Iterator[None]:
    """Forgets at the end that these modules were imported, and whatever they registered."""
    known, path = {kind: dict(names) for kind, names in table._REGISTRY.items()}, list(sys.path)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path[:] = path
        for name in modules:
            sys.modules.pop(name, None)
        for kind, names in table._REGISTRY.items():
            names.clear()
            names.update(known.get(kind, {}))
