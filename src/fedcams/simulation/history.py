"""The course of a run: records that come while it runs, and the model at the end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import nn

from fedcams.extras import load
from fedcams.rounds import ServerState
from fedcams.simulation.record import RoundRecord
from fedcams.simulation.simulation import Simulation

if TYPE_CHECKING:
    import pandas as pd


class History:
    """Iterate to watch the rounds as they are simulated; whatever else is asked for first runs what is left."""

    def __init__(self, simulation: Simulation, state: ServerState, rounds: int) -> None:
        self.simulation = simulation
        self.rounds = rounds
        self.records: list[RoundRecord] = []
        """The rounds so far."""
        self.state = state
        """The server's state after them."""

    def __iter__(self) -> Iterator[RoundRecord]:
        """All rounds in order, those already simulated first."""
        for number in range(self.rounds):
            if number == len(self.records):
                self.state, record = self.simulation.advance(self.state)
                self.records.append(record)
            yield self.records[number]

    def run(self) -> History:
        """Simulates what is left."""
        for _ in self:
            pass
        return self

    @property
    def model(self) -> nn.Module:
        """The final model, with the server's parameters and buffers, in evaluation mode."""
        state = self.run().state
        return self.simulation.problem.load(state.x, state.buffers).eval()

    def to_frame(self) -> pd.DataFrame:
        """One row a round; needs pandas."""
        frames = load("pandas", what="History.to_frame", extra="frame")
        frame: pd.DataFrame = frames.DataFrame([vars(record) for record in self.run().records])
        return frame.set_index("round")

    def __repr__(self) -> str:
        last: Any = self.records[-1].test_accuracy if self.records else None
        return f"History({len(self.records)} of {self.rounds} rounds, test accuracy {last})"
