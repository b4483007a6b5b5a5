"""The table of registered pieces, kind -> name -> class, and the fields that a class declares."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar, cast

from fedcams.errors import SpecError
from fedcams.registry.fields import Param

if TYPE_CHECKING:
    from fedcams.registry.spec import Spec

_REGISTRY: dict[str, dict[str, type[Spec]]] = {}
S = TypeVar("S", bound="Spec")


def register(name: str) -> Callable[[type[S]], type[S]]:
    """Register a frozen dataclass under `name` in the registry of its kind; use it as a class decorator.

    Refuses a class that is not a frozen dataclass, and a name that another class of the kind has.
    """

    def add(cls: type[S]) -> type[S]:
        known = _REGISTRY.setdefault(cls.kind, {})
        if not getattr(cls.__dict__.get("__dataclass_params__"), "frozen", False):
            raise TypeError(f"{cls.__name__}: put @dataclass(frozen=True) below @register({name!r})")
        if name in known and known[name].__qualname__ != cls.__qualname__:
            raise SpecError(f"{cls.kind} {name!r} is already registered by {known[name].__module__}; rename yours")
        cls.name = name
        known[name] = cls
        return cls

    return add


def params(cls: type[Spec]) -> Mapping[str, tuple[Param, Any]]:
    """Return each declared field with its default, which is `dataclasses.MISSING` if the field is required."""
    return _params(cast(Any, cls))


@functools.cache  # every spec that is made asks for it
def _params(cls: Any) -> Mapping[str, tuple[Param, Any]]:
    fields = dataclasses.fields(cls)
    return MappingProxyType({field.name: (field.metadata["param"], field.default) for field in fields})


def registered(kind: str, internal: bool = False) -> dict[str, type[Spec]]:
    """Return name -> class of everything registered under a kind, by name; `internal` adds what only run files name."""
    found = sorted(_REGISTRY.get(kind, {}).items())
    return {name: cls for name, cls in found if internal or not cls.internal}


def kinds() -> list[str]:
    """Return the kinds that have at least one registered class."""
    return sorted(_REGISTRY)


def import_folder(package: str, path: Iterable[str]) -> None:
    """Import every module of a package, which registers its classes; modules named `_...` are skipped."""
    for module in pkgutil.iter_modules(path):
        if not module.name.startswith("_"):
            importlib.import_module(f"{package}.{module.name}")
