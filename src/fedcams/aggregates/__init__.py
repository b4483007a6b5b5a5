"""stub"""
from dataclasses import dataclass
from fedcams.registry import Spec, register
class Aggregate(Spec):
    kind = "aggregate"
    streaming = True
    def check(self, method): pass
@register("mean")
@dataclass(frozen=True)
class Mean(Aggregate):
    examples = ("mean",)
