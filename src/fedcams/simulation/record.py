"""The record of a round, named numbers in one line of JSON; and, separately, where the time went."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from fedcams.errors import UpdateError


@dataclass(frozen=True)
class RoundRecord:
    """The record of one round. Byte counts are sums over the cohort; paper bits are those of one client.

    Bytes count what was sent, refused or not; losses and probes cover the accepted clients. A value is None if there
    was nothing to measure, or if the version of fedcams that wrote the record did not know it.

    Examples:
        >>> from fedcams.simulation import RoundRecord
        >>> record = RoundRecord(round=1, cohort=[0, 4], wire_up=120)
        >>> RoundRecord.from_json(record.to_json()) == record
        True
    """

    round: int
    cohort: list[int]
    train_loss: float | None = None
    """The mean training loss of the accepted clients; None without them."""
    test_loss: float | None = None
    """The loss on the test set; None in rounds without an evaluation."""
    test_accuracy: float | None = None
    """The metric on the test set: the accuracy, unless another metric was given."""
    wire_up: int = 0
    """Bytes of the encoded replies, headers and buffers included."""
    wire_down: int = 0
    """Bytes of the encoded instructions."""
    wire_up_buffers: int = 0
    """The part of `wire_up` that is floating-point buffers."""
    wire_down_buffers: int = 0
    """The part of `wire_down` that is floating-point buffers."""
    paper_bits_up: int = 0
    paper_bits_down: int = 0
    delta_norm: float = 0.0
    """The norm of the mean decoded update."""
    wire_down_deltas: int | None = None
    """The part of `wire_down` that is deltas or compressed models. What is in neither this part nor the next two is
    buffers, control variates and message headers."""
    wire_down_catchup: int | None = None
    """The part of `wire_down` for clients that missed several deltas."""
    wire_down_dense: int | None = None
    """The part of `wire_down` that is dense models."""
    held_loss: float | None = None
    """The test loss of the model that clients hold, if all hold the same one and it is not the server's."""
    held_accuracy: float | None = None
    averaged_loss: float | None = None
    """The test loss of the averaged model, if the method has one."""
    averaged_accuracy: float | None = None
    refused: Mapping[int, str] = field(default_factory=dict)
    """Client -> why its update was refused."""
    probes: Mapping[str, float | None] = field(default_factory=dict)
    """What the run's probes measured, by name. In JSON they are keys like all the others."""

    def to_dict(self) -> dict[str, Any]:
        """Return all values by name, including those of probes."""
        values = {**vars(self), "refused": dict(self.refused), **self.probes}
        del values["probes"]
        return values

    def get(self, name: str) -> Any:
        """Return the value of a field or probe by its name; None if there is none."""
        return self.probes.get(name, vars(self).get(name))

    def check(self) -> RoundRecord:
        """Return the record itself; refuses values that are not finite, from which no run recovers and JSON lacks."""
        values = self.to_dict().items()
        bad = {key: value for key, value in values if isinstance(value, float) and not math.isfinite(value)}
        if bad:
            found = ", ".join(f"{key} is {value}" for key, value in bad.items())
            raise UpdateError(f"round {self.round}: {found}; lower the learning rates or clip")
        return self

    def to_json(self) -> str:
        """Return one line of JSON; equal records give equal lines."""
        return json.dumps(self.to_dict(), allow_nan=False)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RoundRecord:
        """Return a record of these values; names that are not fields count as probes."""
        probes = _probes(tuple(values))
        own = dict(values) if len(values) - len(probes) == len(FIELDS) else {**DEFAULTS, **values}
        own["probes"] = {name: own.pop(name) for name in probes}
        own["refused"] = {int(client): str(reason) for client, reason in own.get("refused", {}).items()}
        if len(own) <= len(FIELDS):
            return cls(**own)  # refuses: a field without a default is missing
        record = object.__new__(cls)  # half the time of `__init__`, which sets fields one by one: a report makes many
        object.__setattr__(record, "__dict__", own)
        return record

    @classmethod
    def from_json(cls, line: str) -> RoundRecord:
        """Return the record in a line that `to_json` wrote, in this version or an older one."""
        return cls.from_dict(json.loads(line))


FIELDS = frozenset(key.name for key in dataclasses.fields(RoundRecord)) - {"probes"}
"""The names in a line that are fields of a record; all others are probes."""
DEFAULTS = {key.name: key.default for key in dataclasses.fields(RoundRecord) if key.default is not dataclasses.MISSING}
"""The values of fields that an older version did not write."""


@functools.lru_cache
def _probes(names: tuple[str, ...]) -> list[str]:
    """Return the names in a line that are probes; the lines of a run share a few sets of names."""
    return [name for name in names if name not in FIELDS]


class Phases:
    """Seconds per phase: `with phases("train"): ...` adds the time of its block to `seconds["train"]`."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Add the time of the `with` block to the phase of this name."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started
