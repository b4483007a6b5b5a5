"""Local training: stochastic gradient descent on a client's own examples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, cast

from fedcams.errors import SpecError
from fedcams.registry import Number, Spec, flag, integer, number, register, resolve


class Local(Spec):
    """The root of what clients may do with a model."""

    kind = "local"
    reference: ClassVar[str] = ""


@register("sgd")
@dataclass(frozen=True)
class SGD(Local):
    """SGD on the client's examples, in a new random order every epoch.

    A step is `g = ∇f(w) + prox (w - w₀)`, scaled down to norm `clip`, then `g += weight_decay w`,
    `u = momentum u + g`, `w -= lr u`; w₀ is the model received and u starts at zero in every round.
    """

    lr: Number = number(0.01, low=0, open="low", doc="local learning rate")
    momentum: Number = number(0, low=0, high=1, open="high", doc="how much of the last direction a step keeps")
    weight_decay: Number = number(0, low=0, doc="pull towards zero")
    clip: Number | None = number(None, low=0, open="low", doc="largest norm of a gradient; none: any")
    prox: Number = number(0, low=0, doc="FedProx: pull towards the model received")
    epochs: int | None = integer(None, low=1, doc="passes over the client's examples; 1 when steps is not given either")
    steps: int | None = integer(None, low=1, doc="number of batches, over as many epochs as that takes")
    batch: int = integer(20, low=1, doc="examples a step; a client with fewer has one batch of what it has")
    drop_last: bool = flag(False, doc="leave out an epoch's last batch where it is not full")

    reference = "McMahan et al., Communication-Efficient Learning of Deep Networks, AISTATS 2017; prox: Li et al., 2020"
    examples = (
        "sgd",
        "sgd(lr=0.05, epochs=3)",
        "sgd(momentum=0.9, weight_decay=1e-4, steps=5, batch=8)",
        "sgd(clip=1, prox=0.1, drop_last=true)",
    )
    refused = (
        ("sgd(epochs=1, steps=1)", "give epochs or steps, not both"),
        ("sgd(lr=0)", r"allowed: a number in \(0, inf\)"),
        ("sgd(batch=0)", r"allowed: an integer in \[1, inf\)"),
        ("sgd(epoch=3)", "did you mean 'epochs'"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.epochs is not None and self.steps is not None:
            raise SpecError(f"sgd: epochs={self.epochs}, steps={self.steps}: give epochs or steps, not both")


def local(spec: str | SGD) -> SGD:
    """The local training that a spec string such as `sgd(lr=0.05, epochs=3)` spells."""
    return cast(SGD, resolve("local", spec))
