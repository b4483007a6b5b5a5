"""Registered pieces: a frozen dataclass with a kind, a name and a spec string that is its exact spelling."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar, cast

from fedcams.errors import SpecError, UnknownName
from fedcams.registry.grammar import Call, Value, Word, parse_call
from fedcams.registry.params import Param, coerce, nearest, show

_REGISTRY: dict[str, dict[str, type[Spec]]] = {}


class Spec:
    """The root of everything registered. Subclasses are frozen dataclasses whose fields are declared params."""

    kind: ClassVar[str] = ""
    name: ClassVar[str] = ""
    examples: ClassVar[tuple[str, ...]] = ()
    """Spec strings that show it; contract tests run over them and the reference prints them."""
    refused: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Bad specs, each with a pattern that its error must match."""

    def __post_init__(self) -> None:
        """Checks and normalises every field; extend it for rules between fields."""
        for key, (param, default) in params(type(self)).items():
            value = getattr(self, key)
            if value is None and default is None:
                continue
            object.__setattr__(self, key, self._accept(key, param, value))

    def _accept(self, key: str, param: Param, value: Any) -> Any:
        where = f"{self.name}: {key}"
        if param.kind != "spec":
            return coerce(param, value, where)
        if not isinstance(value, str | Spec):
            raise SpecError(f"{where}={show(value)}: not a spec; allowed: {param.allowed}")
        try:
            return resolve(param.spec_kind, value)
        except SpecError as error:
            raise error.within(where) from None

    def __str__(self) -> str:
        """The canonical spec: declared order, defaults omitted, a leading nested spec without its key."""
        shown = []
        for position, (key, (param, default)) in enumerate(params(type(self)).items()):
            value = getattr(self, key)
            if value != default and not (param.kind == "spec" and str(value) == default):
                positional = param.kind == "spec" and position == 0
                shown.append(show(value) if positional else f"{key}={show(value)}")
        return f"{self.name}({', '.join(shown)})" if shown else self.name

    def spelled_out(self) -> str:
        """The spec with every parameter, defaults included: for readers who do not know them by heart."""
        values = {key: getattr(self, key) for key in params(type(self))}
        shown = [f"{key}={'none' if value is None else show(value)}" for key, value in values.items()]
        return f"{self.name}({', '.join(shown)})" if shown else self.name


S = TypeVar("S", bound=Spec)


def register(name: str) -> Callable[[type[S]], type[S]]:
    """Class decorator: puts a frozen dataclass under `name` into the registry of its kind."""

    def add(cls: type[S]) -> type[S]:
        known = _REGISTRY.setdefault(cls.kind, {})
        if not getattr(cls.__dict__.get("__dataclass_params__"), "frozen", False):
            raise TypeError(f"{cls.__name__}: put @dataclass(frozen=True) below @register({name!r})")
        if name in known and known[name].__qualname__ != cls.__qualname__:
            raise SpecError(f"{cls.kind} {name!r} is registered already by {known[name].__module__}")
        cls.name = name
        known[name] = cls
        return cls

    return add


def params(cls: type[Spec]) -> dict[str, tuple[Param, Any]]:
    """Each declared hyperparameter with its default (`dataclasses.MISSING` when it is required)."""
    fields = dataclasses.fields(cast(Any, cls))
    return {field.name: (field.metadata["param"], field.default) for field in fields}


def registered(kind: str) -> dict[str, type[Spec]]:
    """Name -> class of everything registered under a kind, by name."""
    return dict(sorted(_REGISTRY.get(kind, {}).items()))


def kinds() -> list[str]:
    """The kinds that have something registered."""
    return sorted(_REGISTRY)


def resolve(kind: str, spec: str | Spec) -> Spec:
    """The registered piece that a spec string spells; a piece of the right kind is returned as it is."""
    if isinstance(spec, str):
        return _build(kind, parse_call(spec))
    if not isinstance(spec, Spec):
        raise SpecError(f"{kind}={spec!r} is a {type(spec).__name__}; give a spec string, such as {_example(kind)!r}")
    if spec.kind != kind:
        raise SpecError(f"{spec} is a {spec.kind}, not a {kind}; write one of: {', '.join(registered(kind))}")
    return spec


def _example(kind: str) -> str:
    return next((spec for cls in registered(kind).values() for spec in reversed(cls.examples)), kind)


def _build(kind: str, call: Call) -> Spec:
    known = registered(kind)
    if call.name not in known:
        raise UnknownName(
            f"no {kind} is named {call.name!r}{nearest(call.name, known)}; known: {', '.join(known) or 'none'}"
        )
    cls = known[call.name]
    declared = params(cls)
    values: dict[str, Any] = {}
    for position, (key, value) in enumerate(call.arguments):
        key = _key(cls, declared, position, key)
        if key in values:
            raise SpecError(f"{cls.name}: {key} is given twice; give it once")
        values[key] = _meaning(declared[key][0], value, f"{cls.name}: {key}")
    for key, (param, default) in declared.items():
        if default is dataclasses.MISSING and key not in values:
            raise SpecError(f"{cls.name}: {key} is missing; give {key}=..., {param.allowed}")
    return cls(**values)


def _key(cls: type[Spec], declared: dict[str, tuple[Param, Any]], position: int, key: str | None) -> str:
    keys = list(declared)
    if key is None and position >= len(keys):
        raise SpecError(f"{cls.name} takes at most {len(keys)} values, got one more at place {position + 1}")
    if key is None:
        return keys[position]
    if key not in declared:
        raise SpecError(f"{cls.name} has no key {key!r}{nearest(key, keys)}; known: {', '.join(keys) or 'none'}")
    return key


def _meaning(param: Param, value: Value, where: str) -> Any:
    """A parsed value as its parameter reads it: a bare word may be a boolean, a string or a spec."""
    if param.kind == "spec" and isinstance(value, Word):
        return _build(param.spec_kind, Call(value.text, ()))
    if isinstance(value, Call):
        if param.kind != "spec":
            raise SpecError(f"{where}={value.name}(...): a spec is not accepted; allowed: {param.allowed}")
        return _build(param.spec_kind, value)
    return value
