"""Defer loading torch until something computes: it takes seconds, too long for a list or an error message."""

from __future__ import annotations

import sys
from importlib.util import find_spec, module_from_spec
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
        return getattr(self, name)


def defer(name: str) -> None:
    """Make `import name` cost nothing until the module is used; does nothing if it is loaded, or not installed."""
    spec = None if name in sys.modules else find_spec(name)
    if spec is None:
        return
    module = module_from_spec(spec)
    module.__class__ = Deferred
    del module.__path__  # `import name.part` looks it up, which loads the whole module first, as it must
    sys.modules[name] = module
