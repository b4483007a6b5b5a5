"""From parsed spec strings to registered pieces: names and keys are looked up, values read as their fields declare."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fedcams.errors import SpecError, UnknownName
from fedcams.registry.fields import Param, nearest
from fedcams.registry.grammar import Call, Several, Value, Word
from fedcams.registry.table import params, registered

if TYPE_CHECKING:
    from fedcams.registry.spec import Spec


def build(kind: str, call: Call) -> Spec:
    """Return the piece of a kind that a parsed spec describes; refuses unknown names and keys, and missing values."""
    known = registered(kind, internal=True)
    if call.name not in known:
        names = registered(kind)
        raise UnknownName(
            f"no {kind} is named {call.name!r}{nearest(call.name, names)}; known: {', '.join(names) or 'none'}"
        )
    cls = known[call.name]
    declared = params(cls)
    values: dict[str, Any] = {}
    for position, (key, value) in enumerate(call.arguments):
        key = _key(cls, declared, position, key)
        if key in values:
            raise SpecError(f"{cls.name}: {key} is given twice; give it once")
        values[key] = _meaning(cls, declared[key][0], value, f"{cls.name}: {key}")
    for key, (param, default) in declared.items():
        if default is dataclasses.MISSING and key not in values:
            raise SpecError(f"{cls.name}: {key} is missing; give {key}=..., {param.allowed}")
    return cls(**values)


def _key(cls: type[Spec], declared: Mapping[str, tuple[Param, Any]], position: int, key: str | None) -> str:
    keys = list(declared)
    if key is None and position >= len(keys):
        raise SpecError(f"{cls.name} takes at most {len(keys)} values, got one more at position {position + 1}")
    if key is None:
        return keys[position]
    if key not in declared:
        raise SpecError(f"{cls.name} has no key {key!r}{nearest(key, keys)}; known: {', '.join(keys) or 'none'}")
    return key


def _meaning(cls: type[Spec], param: Param, value: Value, where: str) -> Any:
    """Return a parsed value as its field reads it: a bare word may be a boolean, a string or a spec."""
    calls = _calls(value)
    if calls and param.kind == "specs":
        return tuple(build(param.spec_kind, call) for call in calls)
    if isinstance(value, Several):
        raise SpecError(f"{where}: several specs joined by + are not accepted; allowed: {param.allowed}")
    if not calls:
        return value
    if param.kind == "spec":
        return build(param.spec_kind, calls[0])
    misspelt = cls.schedulable and isinstance(value, Call)  # probably meant as a schedule, although none has its name
    if param.kind in ("number", "integer") and (misspelt or calls[0].name in registered("schedule")):
        return build("schedule", calls[0])
    if isinstance(value, Call):
        raise SpecError(f"{where}={value.name}(...): a spec is not accepted; allowed: {param.allowed}")
    return value


def _calls(value: Value) -> tuple[Call, ...]:
    """Return the specs that a value may stand for."""
    if isinstance(value, Word):
        return (Call(value.text, ()),)
    if isinstance(value, Several):
        return value.calls
    return (value,) if isinstance(value, Call) else ()
