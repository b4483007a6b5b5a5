"""The registry: every exchangeable piece is a registered frozen dataclass, and a spec string names it everywhere."""

from fedcams.registry.fields import Param, flag, integer, nested, number, several, text
from fedcams.registry.numbers import Number, exact, format_number
from fedcams.registry.spec import Schedule, Spec, resolve, resolve_several
from fedcams.registry.table import import_folder, kinds, params, register, registered

__all__ = [
    "Number",
    "Param",
    "Schedule",
    "Spec",
    "exact",
    "flag",
    "format_number",
    "import_folder",
    "integer",
    "kinds",
    "nested",
    "number",
    "params",
    "register",
    "registered",
    "resolve",
    "resolve_several",
    "several",
    "text",
]
