"""Doing something to a module once it is imported, without importing it: verl's modules are heavy and many.

The import system is asked for such a module as ever; only what runs behind its execution is added.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

Then = Callable[[ModuleType], None]


class _Executed(Loader):
    """A loader that calls `then` behind the execution."""

    def __init__(self, loader: Loader, then: Then) -> None:
        self._loader = loader
        self._then = then

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._then(module)


class _Finder(MetaPathFinder):
    """Stands before all others, and asks them."""

    def __init__(self, thens: Mapping[str, Then]) -> None:
        self._thens = thens

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        then = self._thens.get(fullname)
        if then is None:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _Executed(spec.loader, then)
                return spec
        return None


def at_import(thens: Mapping[str, Then]) -> None:
    """Call each of `thens` with its module: behind its execution, or now where it is imported already."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, _Finder(dict(thens)))
    for name, then in thens.items():
        if name in sys.modules:
            then(sys.modules[name])
