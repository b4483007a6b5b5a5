"""stub"""
from dataclasses import dataclass
from fedcams.registry import Spec, register, number, Number
class Average(Spec):
    kind = "average"
    active = True
@register("none")
@dataclass(frozen=True)
class NoAverage(Average):
    active = False
    examples = ("none",)
@register("ema")
@dataclass(frozen=True)
class EMA(Average):
    decay: Number = number(0.97, low=0, high=1, open="high")
    examples = ("ema(0.97)",)
    def step_(self, a, x, t):
        a.lerp_(x, max(float(1-self.decay), 1/t))
