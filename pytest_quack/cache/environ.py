"""Environment variables that a kernel depends on: those that its compile read, and whether they still say the same.

Names that the sources spell out are part of the key (`cache.sources`). What is read by a name that only the run tells,
through a helper, an alias of `os.environ` or a variable, is seen while the compile function runs, and remembered beside
the artifact.
"""

from __future__ import annotations

import _collections_abc
import contextlib
import dis
import hashlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

from pytest_quack.cache.sources import is_project_file

# Variables that a compile process has otherwise on purpose (it sees no GPU), and those that change all the time without
# saying anything about a kernel.
NOT_KEYED: Final = frozenset(
    {
        "CUDA_VISIBLE_DEVICES",
        "NVIDIA_VISIBLE_DEVICES",
        "PYTEST_CURRENT_TEST",
        "PYTEST_VERSION",
        "PYTORCH_NVML_BASED_CUDA_CHECK",
        "_",
    }
)
# Code through which a read may pass on its way to the mapping, and the methods that read one variable.
_LIBRARY: Final = frozenset(
    {
        *(module.__file__ for module in (os, os.path, _collections_abc)),
        *(f"<frozen {name}>" for name in ("os", "posixpath", "ntpath", "_collections_abc")),
    }
)
_READING_METHODS: Final = frozenset(
    {"getenv", "getenvb", "get", "pop", "setdefault", "__contains__", "expandvars", "expanduser"}
)


@contextlib.contextmanager
def seen_environ(home: str) -> Iterator[set[str]]:
    """The names of variables that code of the project reads meanwhile, in whichever thread.

    `home` is a top-level package that counts as the project wherever it is installed. A copy of the whole environment,
    or a loop over all of it, does not count as reading each variable: a copy is made to start another program.
    """
    names: set[str] = set()
    kind: Any = type(os.environ)
    read = kind.__getitem__
    mappings = [mapping for mapping in (os.environ, getattr(os, "environb", None)) if mapping is not None]

    def traced(self: Any, name: Any) -> Any:
        if (
            any(self is mapping for mapping in mappings)
            and isinstance(name, (str, bytes))
            and _is_read_by_project(home)
        ):
            names.add(os.fsdecode(name))
        return read(self, name)

    kind.__getitem__ = traced
    try:
        yield names
    finally:
        kind.__getitem__ = read


def _is_read_by_project(home: str) -> bool:
    frame, via = sys._getframe(2), ""
    while frame.f_back is not None and frame.f_code.co_filename in _LIBRARY:
        frame, via = frame.f_back, frame.f_code.co_name
    top = str(frame.f_globals.get("__name__", "")).split(".")[0]
    if top == "pytest_quack" or not (top == home or is_project_file(frame.f_code.co_filename)):
        return False
    # Without a method between, a subscript reads one variable; `dict(os.environ)` and the like read each of them.
    opcode = dis.opname[frame.f_code.co_code[frame.f_lasti]]
    return via in _READING_METHODS if via else opcode.startswith("BINARY_")


def environ_digests(names: Iterable[str]) -> dict[str, str]:
    """What each variable says, as a digest: a value may be a secret, and this is written to disk."""
    return {name: _digest(os.environ.get(name)) for name in sorted(names)}


def _digest(value: str | None) -> str:
    return "" if value is None else hashlib.sha256(value.encode("utf-8", "surrogateescape")).hexdigest()


def environ_is(expected: Mapping[str, str]) -> bool:
    """Whether each variable still says what its digest says."""
    return all(_digest(os.environ.get(name)) == digest for name, digest in expected.items())


def environ_check(names: Iterable[str]) -> Callable[[], bool] | None:
    """Does the environment still say what it says now? Asked on each in-process hit, so it looks into the mapping
    underneath.

    `os.environ.get` encodes the name each time, which costs a microsecond; where CPython keeps the encoded mapping
    elsewhere, that is what is used.
    """
    expected = [(name, os.environ.get(name)) for name in sorted(names)]
    if not expected:
        return None
    encode: Callable[[str], Any] | None = getattr(os.environ, "encodekey", None)
    if encode is None or not isinstance(getattr(os.environ, "_data", None), dict):
        return lambda: all(os.environ.get(name) == value for name, value in expected)
    encoded = [(encode(name), None if value is None else encode(value)) for name, value in expected]

    def holds() -> bool:
        data: dict[Any, Any] = os.environ._data  # type: ignore[attr-defined]
        return all([data.get(name) == value for name, value in encoded])  # noqa: C419 - a list is twice as fast here

    return holds
