"""A small causal transformer with layer-norm first, for next-character prediction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedcams.errors import SpecError
from fedcams.models.base import Model
from fedcams.registry import integer, register

if TYPE_CHECKING:
    from torch import nn


@register("transformer")
@dataclass(frozen=True)
class Transformer(Model):
    """Embeddings of tokens and positions, `depth` blocks of attention and perceptron, then linear; no dropout."""

    dim: int = integer(128, low=1, doc="width")
    depth: int = integer(4, low=1, doc="blocks")
    heads: int = integer(4, low=1, doc="heads of attention, which divide the width")

    reference = "Vaswani et al., Attention Is All You Need, 2017; layer-norm first: Xiong et al., ICML 2020"
    takes_tokens = True
    examples = ("transformer", "transformer(dim=8, depth=1, heads=2)")
    refused = (
        ("transformer(dim=10)", "dim=10 is not a multiple of heads=4"),
        ("transformer(depth=0)", r"allowed: an integer in \[1, inf\)"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dim % self.heads:
            raise SpecError(f"transformer: dim={self.dim} is not a multiple of heads={self.heads}; change one of them")

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        from fedcams.models.networks.transformer import CharacterTransformer

        return CharacterTransformer(self.sequence_length(shape), classes, self.dim, self.depth, self.heads)
