"""The network of the model `lstm`."""

from __future__ import annotations

from torch import Tensor, nn


class CharacterLSTM(nn.Module):
    """Predictions of the next token at each place of a sequence: `[n, length] -> [n, length, classes]`."""

    def __init__(self, classes: int, embedding: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(classes, embedding)
        self.lstm = nn.LSTM(embedding, hidden, layers, batch_first=True)
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs for `x [n, length]`; the state before the first token is zero."""
        states, _ = self.lstm(self.embedding(x))
        outputs: Tensor = self.head(states)
        return outputs
