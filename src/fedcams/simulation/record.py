"""What is known of a round afterwards: plain numbers, one line of JSON, no clock."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RoundRecord:
    """One round. Byte counts are summed over the cohort; paper bits are those of one client's link."""

    round: int
    cohort: list[int]
    train_loss: float | None
    """Mean over the cohort of the loss while training; None for an empty cohort."""
    test_loss: float | None
    """None in rounds without an evaluation."""
    test_accuracy: float | None
    """The metric, which is the accuracy unless another one was given."""
    wire_up: int
    """Bytes of the encoded replies, headers and buffers included."""
    wire_down: int
    """Bytes of the encoded instructions."""
    wire_up_buffers: int
    """The part of `wire_up` that is floating-point buffers."""
    wire_down_buffers: int
    paper_bits_up: int
    paper_bits_down: int
    q: float | None
    """Relative compression error ‖C(h)-h‖/‖h‖, mean over the cohort."""
    gamma: float | None
    """Dissimilarity ‖C(mean h) - mean C(h)‖/‖mean Δ‖, where it was asked for."""
    delta_norm: float
    """Norm of the mean decoded update."""
    wire_down_deltas: int | None = None
    """The part of `wire_down` that is deltas, or compressed models. These three are None in older records; what is left
    of `wire_down` are buffers and the heads of messages."""
    wire_down_catchup: int | None = None
    """The part that brings clients back which missed several deltas."""
    wire_down_dense: int | None = None
    """The part that is dense models."""
    held_loss: float | None = None
    """Test loss of the model that clients hold, where all hold one and it is not the server's."""
    held_accuracy: float | None = None

    def to_json(self) -> str:
        """One line; equal records give equal lines."""
        return json.dumps(dataclasses.asdict(self), allow_nan=False)

    @classmethod
    def from_json(cls, line: str) -> RoundRecord:
        """The reverse of `to_json`."""
        values: dict[str, Any] = json.loads(line)
        return cls(**values)
