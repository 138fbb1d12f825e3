"""What a mutable value held at one moment, compared quickly with what it holds now.

Canonical bytes would say the same, but take some 5 µs for each part; this runs on every in-process hit of a compile
function that reads a list or a dictionary.
"""

from __future__ import annotations

import enum
import types
from collections.abc import Callable
from typing import Any

from pytest_quack.cache import key
from pytest_quack.errors import UnkeyableError

_EQUAL_MEANS_SAME = (int, bool, str, bytes, type(None))
_SAME_OBJECT = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType, enum.Enum)


def take_snapshot(value: Any, within: tuple[int, ...] = ()) -> Callable[[Any], bool]:
    """A function that says whether a value still means what `value` means now.

    `within` holds the containers that `value` is a part of, by id. Raises UnkeyableError where part of it has no
    canonical form.
    """
    kind = type(value)
    if id(value) in within:  # a cycle: what it holds is compared where it was met first
        return lambda now: now is value
    if kind in _EQUAL_MEANS_SAME:
        return lambda now: type(now) is kind and now == value
    if kind is object or isinstance(value, _SAME_OBJECT):
        return lambda now: now is value
    if kind in (list, tuple):
        return _sequence(kind, [*value], (*within, id(value)))
    if kind is dict:
        return _dictionary(dict(value), (*within, id(value)))
    return _canonical(value)


def _sequence(kind: Any, parts: list[Any], within: tuple[int, ...]) -> Callable[[Any], bool]:
    checks = [take_snapshot(part, within) for part in parts]

    def holds(now: Any) -> bool:
        if type(now) is not kind:
            return False
        return len(now) == len(checks) and all(check(part) for check, part in zip(checks, now, strict=True))

    return holds


def _dictionary(parts: dict[Any, Any], within: tuple[int, ...]) -> Callable[[Any], bool]:
    names, values = _sequence(list, [*parts], within), _sequence(list, [*parts.values()], within)
    return lambda now: type(now) is dict and names([*now]) and values([*now.values()])


def _canonical(value: Any) -> Callable[[Any], bool]:
    expected = key.encode(value)

    def holds(now: Any) -> bool:
        try:
            return key.encode(now) == expected
        except UnkeyableError:
            return False

    return holds
