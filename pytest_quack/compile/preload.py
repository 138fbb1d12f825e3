"""Modules that hold compile functions, so that compile processes can be forked from one that has imported them."""

from __future__ import annotations

import sys
from typing import Final

# module name -> backend name, in the order in which the modules were imported
_registered: Final[dict[str, str]] = {}


def register(module: str, backend_name: str) -> None:
    """Note that `module` defines a compile function for that backend."""
    _registered.setdefault(module, backend_name)


def registered_backends() -> tuple[str, ...]:
    return tuple(dict.fromkeys(_registered.values()))


def preloadable_modules() -> tuple[str, ...]:
    """Registered modules that a fresh process can import by name without running tests' own code.

    Test modules and conftest files are left to the jobs that need them: importing them may do anything.
    """
    return tuple(name for name in _registered if _is_preloadable(name))


def _is_preloadable(name: str) -> bool:
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None)
    if module is None or spec is None or name == "__main__":
        return False
    is_rewritten_test = type(spec.loader).__module__.startswith("_pytest.")
    last = name.rpartition(".")[2]
    return not is_rewritten_test and last != "conftest" and not last.startswith("test_")
