"""What is drawn against what: the metrics and the axes, said once for the page and for the printed figures."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """Something recorded every round, or every round with an evaluation."""

    key: str
    """The field of `RoundRecord`, and the name of files."""
    title: str


@dataclass(frozen=True)
class Axis:
    """Something that grows with the rounds."""

    key: str
    title: str
    short: str
    """What its button says."""
    unit: str = ""

    @property
    def log(self) -> bool:
        """Whether it is logarithmic: methods differ in communication by orders of magnitude."""
        return bool(self.unit)


ACCURACY = Metric("test_accuracy", "Test accuracy")
HELD = Metric("held_accuracy", "Test accuracy of what clients hold")
TEST_LOSS = Metric("test_loss", "Test loss")
TRAIN_LOSS = Metric("train_loss", "Training loss")
Q = Metric("q", "Compression error q")
GAMMA = Metric("gamma", "Dissimilarity γ")

CURVES = (ACCURACY, TEST_LOSS, TRAIN_LOSS)
"""Drawn against every axis."""
COMPRESSION = (Q, GAMMA)
"""Drawn against rounds."""

ROUNDS = Axis("rounds", "Round", "Rounds")
BYTES = Axis("bytes", "Bytes sent, up + down, all clients", "Bytes up + down", "B")
BYTES_UP = Axis("bytes_up", "Bytes sent up, all clients", "Bytes up", "B")
PAPER_BITS = Axis("paper_bits", "Paper bits, up + down, one client’s link", "Paper bits", "bit")
AXES = (ROUNDS, BYTES, BYTES_UP, PAPER_BITS)
