"""Defer loading torch until something computes: it takes seconds, too long for a list or an error message."""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec, spec_from_loader
from types import ModuleType
from typing import Any


class Deferred(ModuleType):
    """A module that is named but not loaded; the first use of anything in it loads it, in place."""

    def __getattr__(self, name: str) -> Any:
        """Load the module and return its attribute; Python calls this only for what the module does not have yet."""
        object.__setattr__(self, "__class__", ModuleType)  # from here on it is an ordinary module
        spec = self.__spec__
        assert spec is not None
        assert spec.loader is not None
        self.__path__ = spec.submodule_search_locations or []
        spec.loader.exec_module(self)
        if name == "__path__":
            sys.meta_path.insert(0, _AlreadyLoaded())
        return getattr(self, name)


class _AlreadyLoaded(MetaPathFinder, Loader):
    """Makes `import name.part` return the part that `name` has already loaded; Python would load it a second time."""

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Answer only for the import in progress."""
        sys.meta_path.remove(self)
        if target is not None or name not in sys.modules:
            return None
        self.part = sys.modules.pop(name)  # Python does not ask our loader for a module that is already there
        return spec_from_loader(name, self)

    def exec_module(self, module: ModuleType) -> None:
        """Put the part back in place of the new, empty module."""
        sys.modules[module.__name__] = self.part


def defer(name: str) -> None:
    """Make `import name` cost nothing until the module is used; does nothing if it is loaded, or not installed."""
    spec = None if name in sys.modules else find_spec(name)
    if spec is None:
        return
    module = module_from_spec(spec)
    module.__class__ = Deferred
    del module.__path__  # `import name.part` looks it up, which loads the whole module first, as it must
    sys.modules[name] = module
