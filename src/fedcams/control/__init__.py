"""stub"""
from dataclasses import dataclass
from fedcams.registry import Spec, register
class Control(Spec):
    kind = "control"
    active = True
    def check(self, method): pass
@register("none")
@dataclass(frozen=True)
class NoControl(Control):
    active = False
    examples = ("none",)
