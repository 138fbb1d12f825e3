"""Who has initialised CUDA in the controller of an xdist run, where nothing needs it.

It would hold memory of a GPU that a worker is to have for itself. Plugins and conftest files are looked at one by one,
as they are registered; what happens in their hooks afterwards is told by which of them have such hooks.
"""

from __future__ import annotations

import sys
from typing import Any

# Hooks in which a plugin may do something between the moment it is registered and the start of workers.
_HOOKS = ("pytest_load_initial_conftests", "pytest_cmdline_main", "pytest_configure", "pytest_sessionstart")
_USERS = frozenset({"torch", "cuda", "cupy", "numba", "jax", "tensorflow"})
_OURS = ("pytest", "_pytest", "pytest_quack", "pluggy", "xdist", "execnet")


class CudaWatch:
    """Looks, after each plugin that is registered, whether CUDA has been initialised in this process."""

    def __init__(self) -> None:
        self._culprit = ""
        self._is_found = False
        self._earlier: list[str] = []
        self._is_past = True  # pytest repeats the registrations from before ours

    def registered(self, plugin: object, name: str, *, is_own: bool) -> None:
        """A plugin has been registered, now or, until ours is, some time before."""
        if self._is_past and not is_own:
            self._earlier.append(_describe(plugin, name))
        elif not self._is_found and _has_context():
            self._is_found = True
            self._culprit = _one_of(self._earlier) if is_own else _describe(plugin, name)
        self._is_past = self._is_past and not is_own

    def culprit(self, plugin_manager: Any) -> str | None:
        """Who has initialised CUDA, as well as it can be told; None where it is not initialised."""
        if not _has_context():
            return None
        if self._culprit:
            return self._culprit
        implementations = [i for hook in _HOOKS for i in getattr(plugin_manager.hook, hook).get_hookimpls()]
        return _one_of([_describe(i.plugin, i.plugin_name) for i in implementations])


def _has_context() -> bool:
    if not _USERS & sys.modules.keys():
        return False
    from pytest_quack.gpu.devices import has_cuda_context  # imports ctypes, which a run without a GPU can do without

    return has_cuda_context()


def _one_of(descriptions: list[str]) -> str:
    others = [text for text in dict.fromkeys(descriptions) if text]
    if len(others) == 1:
        return others[0]
    return f"one of {', '.join(others)}" if others else "something that is no plugin"


def _describe(plugin: object, name: str) -> str:
    """The plugin's name, or the path of a conftest file; empty for what belongs to pytest, xdist or us."""
    module = getattr(plugin, "__name__", type(plugin).__module__)
    if module.partition(".")[0] in _OURS or name.partition(".")[0] in _OURS:
        return ""
    path = getattr(plugin, "__file__", None)
    return f"{name} ({path})" if path and path != name else name
