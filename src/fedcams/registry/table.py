"""The table of registered pieces, kind -> name -> class, and the fields that a class declares."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import pkgutil
import sys
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

    Arguments:
        name: the name in spec strings.

    Returns:
        The decorator, which returns the class unchanged.

    Raises:
        TypeError: for a class that is not a frozen dataclass.
        SpecError: for a name that another class of the kind has; the same class may be defined again.

    Examples:
        >>> from dataclasses import dataclass
        >>> from fedcams import Method
        >>> from fedcams.averages import Average
        >>> from fedcams.registry import Number, number, register
        >>> @register("fixed")
        ... @dataclass(frozen=True)
        ... class Fixed(Average):
        ...     share: Number = number(1/2, low=0, high=1, doc="the weight of the new model")
        ...     def weight(self, t):
        ...         return float(self.share)
        >>> str(Method(average="fixed(share=0.25)").average)
        'fixed(share=1/4)'
    """

    def add(cls: type[S]) -> type[S]:
        known = _REGISTRY.setdefault(cls.kind, {})
        if not getattr(cls.__dict__.get("__dataclass_params__"), "frozen", False):
            raise TypeError(f"{cls.__name__}: put @dataclass(frozen=True) below @register({name!r})")
        if name in known and not _same_definition(known[name], cls):
            raise SpecError(f"{cls.kind} {name!r} is already registered by {known[name].__module__}; rename yours")
        cls.name = name
        known[name] = cls
        return cls

    return add


def _same_definition(old: type[Spec], new: type[Spec]) -> bool:
    """Return whether both come from one definition: of a cell that ran twice, or of a script that is imported too."""
    files = [getattr(sys.modules.get(cls.__module__), "__file__", cls.__module__) for cls in (old, new)]
    return old.__qualname__ == new.__qualname__ and (old.__module__ == new.__module__ or files[0] == files[1])


def params(cls: type[Spec]) -> Mapping[str, tuple[Param, Any]]:
    """Return the declared fields of a registered class.

    Arguments:
        cls: the class.

    Returns:
        For each field its declaration and its default, which is `dataclasses.MISSING` if the field is required.

    Examples:
        >>> import fedcams
        >>> from fedcams.registry import params
        >>> list(params(type(fedcams.compressor("sign"))))
        ['scope']
    """
    return _params(cast(Any, cls))


@functools.cache  # called for every spec that is made
def _params(cls: Any) -> Mapping[str, tuple[Param, Any]]:
    fields = dataclasses.fields(cls)
    return MappingProxyType({field.name: (field.metadata["param"], field.default) for field in fields})


def registered(kind: str, internal: bool = False) -> dict[str, type[Spec]]:
    """Return everything that is registered under a kind.

    Arguments:
        kind: such as `compressor`.
        internal: whether to include pieces that only the files of a run name.

    Returns:
        Name -> class, by name.

    Examples:
        >>> import fedcams.optimizers
        >>> from fedcams.registry import registered
        >>> "fedams" in registered("server")
        True
    """
    found = sorted(_REGISTRY.get(kind, {}).items())
    return {name: cls for name, cls in found if internal or not cls.internal}


def kinds() -> list[str]:
    """Return the kinds that have at least one registered class.

    Returns:
        Their names, such as `compressor` and `server`.

    Examples:
        >>> import fedcams.compress
        >>> from fedcams.registry import kinds
        >>> "compressor" in kinds()
        True
    """
    return sorted(_REGISTRY)


def import_folder(package: str, path: Iterable[str]) -> None:
    """Import every module of a package, which registers its classes; modules named `_...` are skipped.

    Arguments:
        package: the package's name, `__name__` in its `__init__.py`.
        path: its folders, `__path__` there.

    Returns:
        Nothing.

    Examples:
        >>> import fedcams.sampler
        >>> from fedcams.registry import import_folder
        >>> import_folder(fedcams.sampler.__name__, fedcams.sampler.__path__)
    """
    for module in pkgutil.iter_modules(path):
        if not module.name.startswith("_"):
            importlib.import_module(f"{package}.{module.name}")
