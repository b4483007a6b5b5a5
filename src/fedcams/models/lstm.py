"""The LSTM for next-character prediction, as in the experiments of Adaptive Federated Optimization."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedcams.models.base import Model
from fedcams.registry import integer, register

if TYPE_CHECKING:
    from torch import nn


@register("lstm")
@dataclass(frozen=True)
class LSTM(Model):
    """Embedding, `layers` LSTM layers, then linear; a token is predicted from all tokens before it."""

    hidden: int = integer(256, low=1, doc="units of an LSTM layer")
    layers: int = integer(2, low=1, doc="LSTM layers")
    embedding: int = integer(8, low=1, doc="the size of a token's embedding")

    reference = "Reddi et al., Adaptive Federated Optimization, ICLR 2021"
    takes_tokens = True
    examples = ("lstm", "lstm(hidden=8, layers=1, embedding=4)")
    refused = (
        ("lstm(hidden=0)", r"allowed: an integer in \[1, inf\)"),
        ("lstm(dropout=0.1)", "lstm has no key 'dropout'"),
    )

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        from fedcams.models.networks.lstm import CharacterLSTM

        self.sequence_length(shape)
        return CharacterLSTM(classes, self.embedding, self.hidden, self.layers)
