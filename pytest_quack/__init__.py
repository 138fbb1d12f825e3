"""pytest-quack: test suites of JIT-compiled GPU kernels, run as if every kernel had been compiled beforehand.

The public names below are resolved when they are first used, so that importing this package costs milliseconds and
imports neither pytest, torch nor a compiler. The package is also the pytest plugin itself: `-p pytest_quack`, the
`pytest11` entry point and `pytest_plugins = ["pytest_quack"]` all name this one module, so that it is loaded once.

PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import importlib
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytest_quack.cache.decorator import jit_cache as jit_cache
    from pytest_quack.compile.active import get_active_pool as get_active_pool
    from pytest_quack.compile.active import pool_scope as pool_scope
    from pytest_quack.compile.active import suppress_pool as suppress_pool
    from pytest_quack.compile.job import KeyState as KeyState
    from pytest_quack.compile.pool import CompilePool as CompilePool
    from pytest_quack.errors import CompilePending as CompilePending
    from pytest_quack.errors import QuackError as QuackError

__version__ = "0.1.0"

# A source file that changed after this moment may not say what was imported: see cache/sources.py.
IMPORTED_NS = time.time_ns()

_HOME_OF = {
    "CompilePending": "pytest_quack.errors",
    "CompilePool": "pytest_quack.compile.pool",
    "KeyState": "pytest_quack.compile.job",
    "QuackError": "pytest_quack.errors",
    "get_active_pool": "pytest_quack.compile.active",
    "jit_cache": "pytest_quack.cache.decorator",
    "pool_scope": "pytest_quack.compile.active",
    "suppress_pool": "pytest_quack.compile.active",
}

__all__ = [
    "CompilePending",
    "CompilePool",
    "KeyState",
    "QuackError",
    "get_active_pool",
    "jit_cache",
    "pool_scope",
    "suppress_pool",
]


def _plugin() -> Any:
    return importlib.import_module("pytest_quack.plugin")


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is not None:
        value = getattr(importlib.import_module(home), name)
    elif name.startswith("pytest_") and name in _plugin().HOOKS:
        value = getattr(_plugin(), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    # pluggy finds a plugin's hooks by dir(). It then looks for the marks of each without `__getattr__` (since pluggy
    # 1.7), so they must be here by then. pytest, looking for fixtures, gets every name that dir() gives: the public
    # ones are not among them before they are used, or every run would import the modules that they come from.
    plugin = _plugin()
    for name in plugin.HOOKS:
        globals().setdefault(name, getattr(plugin, name))
    return sorted(globals())
