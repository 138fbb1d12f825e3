"""Canonical bytes: equal for equal meaning in every process, different for different meaning, refused in doubt."""

from __future__ import annotations

import abc
import dataclasses
import enum
import fractions
import functools
import io
import math
import operator
import os
import pathlib
import re
import subprocess
import sys
import textwrap
import threading
import types
import typing
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pytest_quack.cache.key import digest, encode, encode_code, is_importable
from pytest_quack.errors import UnkeyableError
from support.inner import ROOT

pytestmark = pytest.mark.light


class Color(enum.Enum):
    RED = 1
    GREEN = 2


class Level(enum.IntEnum):
    LOW = 1


class Bits(enum.Flag):
    A = 1
    B = 2


@dataclasses.dataclass(frozen=True)
class Tile:
    m: int
    n: int = 128


@dataclasses.dataclass
class OtherTile:
    m: int
    n: int = 128


Point = namedtuple("Point", "x y")


class Plain:
    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


class Slotted:
    __slots__ = ("a",)

    def __init__(self, a: Any) -> None:
        self.a = a


class Custom:
    def __init__(self, said: Any) -> None:
        self.said = said
        self.lock = threading.Lock()

    def __quack_key__(self) -> Any:
        return self.said


def adder(k: Any) -> Callable[[int], int]:
    def add(x: int) -> int:
        return x + k  # type: ignore[no-any-return]

    return add


def scaled(k: int) -> Callable[[Callable[[int], int]], Callable[[int], int]]:
    def decorate(function: Callable[[int], int]) -> Callable[[int], int]:
        @functools.wraps(function)
        def wrapper(x: int) -> int:
            return function(x) * k

        return wrapper

    return decorate


def decorated(k: int) -> Callable[[int], int]:
    @scaled(k)
    def helper(x: int) -> int:
        return x

    return helper


def cached(k: int) -> Callable[[int], int]:
    @functools.lru_cache
    def helper(x: int) -> int:
        return x * k

    return helper


def local_class(tile: int) -> type:
    class Kernel:
        size = tile

        def run(self) -> int:
            return self.size

    return Kernel


def local_dataclass(default: int) -> type:
    @dataclasses.dataclass(frozen=True)
    class Config:
        tile: int = default

    return Config


def local_abc(tile: int) -> type:
    class Kernel(abc.ABC):
        size = tile

        @abc.abstractmethod
        def run(self) -> int: ...

    return Kernel


def defined(text: str, name: str = "f") -> Any:
    scope: dict[str, Any] = {"__name__": "made"}
    exec(textwrap.dedent(text), scope)
    return scope[name]


# Values that mean the same though they are other objects, or are written another way.
SAME: dict[str, tuple[Any, Any]] = {
    "set order": ({"a", "b", "c"}, {"c", "b", "a"}),
    "frozenset order": (frozenset(range(50)), frozenset(reversed(range(50)))),
    "shared or copied parts": ([[1, 2]] * 2, [[1, 2], [1, 2]]),
    "shared or copied text": (["ab" * 3, "ab" * 3], ["".join("ababab"), "ababab"]),
    "shared or copied instances": ((lambda t: (t, t))(Tile(1)), (Tile(1), Tile(1))),
    "dataclass with a default left out": (Tile(64), Tile(64, 128)),
    "partial keywords in another order": (
        functools.partial(operator.add, a=1, b=2),
        functools.partial(operator.add, b=2, a=1),
    ),
    "attributes in another order": (Plain(a=1, b=2), Plain(b=2, a=1)),
    "closures of one factory with one value": (adder(3), adder(3)),
    "functions that only stand elsewhere": (
        defined("def f(x): return x + 1"),
        defined("# a comment\n\n\ndef f(x):\n    return x + 1  # and another"),
    ),
    "decorated closures with one value": (decorated(3), decorated(3)),
    "cached closures with one value": (cached(3), cached(3)),
    "local classes with one value": (local_class(3), local_class(3)),
    "local dataclasses with one default": (local_dataclass(3), local_dataclass(3)),
    "local abstract classes with one value": (local_abc(3), local_abc(3)),
    "what an object says of itself": (Custom((1, 2)), Custom((1, 2))),
}

# Values each of which means something else than every other.
DIFFERENT: dict[str, Any] = {
    "True": True,
    "1": 1,
    "1.0": 1.0,
    "1+0j": 1 + 0j,
    "text 1": "1",
    "bytes 1": b"1",
    "bytearray 1": bytearray(b"1"),
    "IntEnum 1": Level.LOW,
    "False": False,
    "0": 0,
    "0.0": 0.0,
    "-0.0": -0.0,
    "None": None,
    "text None": "None",
    "Ellipsis": ...,
    "NotImplemented": NotImplemented,
    "nan": math.nan,
    "inf": math.inf,
    "empty text": "",
    "empty bytes": b"",
    "()": (),
    "[]": [],
    "{}": {},
    "set()": set(),
    "frozenset()": frozenset(),
    "(1,)": (1,),
    "[1]": [1],
    "{1}": {1},
    "frozenset 1": frozenset({1}),
    "(True,)": (True,),
    "(1, 2)": (1, 2),
    "((1, 2),)": ((1, 2),),
    "((1,), 2)": ((1,), 2),
    "(1, (2,))": (1, (2,)),
    "(12,)": (12,),
    "('1', '2')": ("1", "2"),
    "('12',)": ("12",),
    "a text that looks like bytes of ours": "int 1:1",
    "dict": {"a": 1},
    "dict of list": {"a": [1]},
    "OrderedDict": OrderedDict(a=1),
    "pairs": [("a", 1)],
    "range": range(3),
    "slice": slice(3),
    "list of range": [0, 1, 2],
    "Color.RED": Color.RED,
    "Color.GREEN": Color.GREEN,
    "Bits.A": Bits.A,
    "Bits.A|B": Bits.A | Bits.B,
    "class Color": Color,
    "Tile": Tile(1),
    "Tile 2": Tile(1, 2),
    "another dataclass": OtherTile(1),
    "class Tile": Tile,
    "Point": Point(1, 2),
    "Slotted 1": Slotted(1),
    "Slotted 2": Slotted(2),
    "Plain a": Plain(a=1),
    "Plain b": Plain(b=1),
    "Plain empty": Plain(),
    "int": int,
    "float": float,
    "list[int]": list[int],
    "list[str]": list[str],
    "list": list,
    "List[int]": typing.List[int],  # noqa: UP006 - another object than list[int]
    "List[str]": typing.List[str],  # noqa: UP006
    "Decimal 1": Decimal(1),
    "Decimal 1.0": Decimal("1.0"),
    "Fraction": fractions.Fraction(1, 2),
    "path": pathlib.PurePosixPath("a"),
    "text a": "a",
    "pattern": re.compile("a"),
    "pattern with a flag": re.compile("a", re.ASCII),
    "len": len,
    "math.sin": math.sin,
    "bound method of 1": "x".join,
    "bound method of 2": "y".join,
    "method": Plain(a=1).__init__,
    "module": math,
    "name of module": "math",
    "function": adder,
    "partial": functools.partial(adder, 1),
    "partial keyword": functools.partial(adder, k=1),
    "partial 2": functools.partial(adder, 2),
    "closure 3": adder(3),
    "closure 4": adder(4),
    "closure 3.0": adder(3.0),
    "decorated closure 3": decorated(3),
    "decorated closure 4": decorated(4),
    "cached closure 3": cached(3),
    "cached closure 4": cached(4),
    "local class 3": local_class(3),
    "local class 4": local_class(4),
    "local instance 3": local_class(3)(),
    "local instance 4": local_class(4)(),
    "local dataclass 3": local_dataclass(3),
    "local dataclass 4": local_dataclass(4),
    "f + 1": defined("def f(x): return x + 1"),
    "f + 2": defined("def f(x): return x + 2"),
    "f - 1": defined("def f(x): return x - 1"),
    "f with another default": defined("def f(x=1): return x + 1"),
    "f with yet another": defined("def f(x=True): return x + 1"),
    "f with a keyword default": defined("def f(*, x=1): return x + 1"),
    "f with another keyword default": defined("def f(*, x=2): return x + 1"),
    "f of another name it calls": defined("def f(x): return g(x)"),
    "f of yet another": defined("def f(x): return h(x)"),
    "f with an inner function": defined("def f(x): return (lambda y: y + 1)(x)"),
    "f with another inner function": defined("def f(x): return (lambda y: y + 2)(x)"),
    "custom": Custom(1),
    "other custom": Custom(2),
}


@pytest.mark.parametrize("pair", SAME.values(), ids=SAME)
def test_values_that_mean_the_same_have_the_same_bytes(pair: tuple[Any, Any]) -> None:
    assert encode(pair[0]) == encode(pair[1])


def test_values_that_mean_different_things_have_different_bytes() -> None:
    for wrap in (lambda value: value, lambda value: [value], adder):
        seen: dict[bytes, str] = {}
        for name, value in DIFFERENT.items():
            first = seen.setdefault(encode(wrap(value)), name)
            assert first == name, f"{name} has the bytes of {first}"


def test_functions_of_one_name_in_two_modules_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for name in ("left_kernels", "right_kernels"):
        module = types.ModuleType(name)
        exec("def build(x): return x", module.__dict__)
        monkeypatch.setitem(sys.modules, name, module)
        found.append(module.build)
    assert all(map(is_importable, found))
    assert encode(found[0]) != encode(found[1])


def test_the_name_of_another_object_is_not_taken_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("left_kernels")
    exec("def build(x): return x", module.__dict__)
    monkeypatch.setitem(sys.modules, "left_kernels", module)
    original = module.build
    before = encode(original)
    exec("def build(x): return -x", module.__dict__)
    assert not is_importable(original)
    assert encode(module.build) == before  # by name: what the name leads to is for the sources to say
    assert encode(original) != before


@pytest.mark.parametrize(
    ("value", "named"),
    [
        pytest.param(threading.Lock(), "lock", id="lock"),
        pytest.param((x for x in [1]), "generator", id="generator"),
        pytest.param(memoryview(b"ab"), "memoryview", id="memoryview"),
        pytest.param(object(), "object()", id="bare object"),
        pytest.param(threading.local(), "_local", id="thread-local"),
        pytest.param([{"a": (threading.RLock(),)}], "RLock", id="lock deep inside"),
    ],
)
def test_what_has_no_canonical_form_is_refused_by_name(value: Any, named: str) -> None:
    with pytest.raises(UnkeyableError, match=re.escape(named)):
        encode(value)


def test_open_files_and_what_holds_one_are_refused_by_name(tmp_path: Path) -> None:
    with open(tmp_path / "x", "w") as file:
        for value in (file, [file], {"a": (file,)}, Plain(f=file), adder(file), functools.partial(adder, file)):
            with pytest.raises(UnkeyableError, match=r"TextIOWrapper"):
                encode(value)
    with pytest.raises(UnkeyableError, match=r"cell|frame"):
        encode(sys._getframe())


class RaisesAnything:
    def __reduce_ex__(self, protocol: Any) -> Any:
        raise LookupError("no such thing")


class NumbersAsState:
    def __getstate__(self) -> Any:
        return {1: "a", "b": 2}


def test_whatever_a_foreign_reduce_raises_is_a_refusal() -> None:
    with pytest.raises(UnkeyableError, match=r"RaisesAnything.*no such thing"):
        encode(RaisesAnything())


def test_state_with_keys_that_cannot_be_sorted_has_bytes() -> None:
    assert encode(NumbersAsState()) == encode(NumbersAsState())


def test_nesting_without_end_is_refused() -> None:
    value: Any = 1
    for _ in range(500):
        value = [value]
    with pytest.raises(UnkeyableError, match="levels deep"):
        encode(value)


def test_cycles_have_bytes_of_their_own() -> None:
    one: list[Any] = []
    one.append(one)
    other: list[Any] = []
    other.append(other)
    longer: list[Any] = [[]]
    longer[0].append(longer)
    assert encode(one) == encode(other)
    assert len({encode(one), encode(longer), encode([]), encode([[]])}) == 4


def test_a_function_that_captures_itself_has_bytes() -> None:
    def factory(step: int) -> Callable[[int], int]:
        def count(n: int) -> int:
            return 0 if n <= 0 else 1 + count(n - step)

        return count

    assert encode(factory(1)) == encode(factory(1))
    assert encode(factory(1)) != encode(factory(2))


def test_code_says_what_it_does_not_where_it_stands() -> None:
    plain = defined("def f(x): return [y for y in x if y in {1, 2, 3}]").__code__
    moved = compile("\n\n\ndef f(x): return [y for y in x if y in {3, 2, 1}]", "/elsewhere/x.py", "exec").co_consts[0]
    other = defined("def f(x): return [y for y in x if y in {1, 2, 4}]").__code__
    assert encode_code(plain) == encode_code(moved)
    assert encode_code(plain) != encode_code(other)


def test_digest_depends_on_labels_and_parts_but_not_on_their_order() -> None:
    assert digest({"a": b"1", "b": b"2"}) == digest({"b": b"2", "a": b"1"})
    different = [{"a": b"1", "b": b"2"}, {"a": b"2", "b": b"1"}, {"a": b"12", "b": b""}, {"ab": b"12"}, {"a": b"1b2"}]
    assert len({digest(parts) for parts in different}) == len(different)
    assert re.fullmatch("[0-9a-f]{64}", digest({}))


MODULE = """
    import dataclasses, enum, functools

    class Color(enum.Enum):
        RED = 1

    @dataclasses.dataclass(frozen=True)
    class Tile:
        m: int
        names: frozenset = frozenset({"m", "n", "k", "l"})

    def build(x):
        return x

    def adder(k):
        def add(x):
            return x + k if x in {"a", "b", "c"} else x
        return add

    def local(k):
        class Kernel:
            tiles = {"a", "b", k}
        return Kernel

    shared = ["x" * 20]
"""
ASKED = """
    import functools, sys
    import keyed
    from pytest_quack.cache.key import encode
    values = [
        {"alpha", "beta", "gamma", "delta"}, frozenset(map(str, range(40))), {1: {"a", "b"}, "c": (1.5, None)},
        keyed.Color.RED, keyed.Tile(1), keyed.build, keyed.adder, keyed.adder({"p", "q"}), keyed.adder(keyed.Tile(2)),
        functools.partial(keyed.build, z=1, a={"u", "v", "w"}), keyed.local("z"), keyed.local("z")(),
        (keyed.shared, keyed.shared), [1, True, 1.0, -0.0, b"x", range(4)], list[int], len, keyed,
    ]
    for value in values:
        print(encode(value).hex())
"""


def ask(folder: Path, seed: str) -> list[str]:
    folder.mkdir()
    (folder / "keyed.py").write_text(textwrap.dedent(MODULE))
    environ = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
    script = textwrap.dedent(ASKED)
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=folder, env=environ, capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.split()


def test_bytes_are_the_same_in_processes_with_other_hash_seeds_and_folders(tmp_path: Path) -> None:
    first, second = ask(tmp_path / "one", "1"), ask(tmp_path / "two", "4711")
    assert len(first) == 17
    assert first == second
    assert all(str(tmp_path).encode().hex() not in text for text in first)


ATOMS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.complex_numbers(),
    st.text(),
    st.binary(),
    st.just(...),
    st.sampled_from([Color.RED, Level.LOW, Bits.A, int, float, list[int]]),
)
HASHABLE = st.recursive(
    ATOMS, lambda inner: st.tuples(inner) | st.tuples(inner, inner) | st.frozensets(inner, max_size=3), max_leaves=6
)
VALUES = st.recursive(
    HASHABLE,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(HASHABLE, inner, max_size=3)
        | st.sets(HASHABLE, max_size=3)
        | st.tuples(inner, inner)
    ),
    max_leaves=8,
)


# The machine may be busy, and what was found once is in this file.
patient = settings(deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])


def typed(value: Any) -> Any:
    """A value that is equal to another one's only where both have the same types and contents all the way down."""
    kind = type(value).__name__
    if isinstance(value, float):
        return (kind, repr(value))
    if isinstance(value, complex):
        return (kind, repr(value.real), repr(value.imag))
    if isinstance(value, (tuple, list)):
        return (kind, *map(typed, value))
    if isinstance(value, (set, frozenset)):
        return (kind, frozenset((typed(member), n) for n, member in counted(value)))
    if isinstance(value, dict):
        return (kind, *((typed(k), typed(v)) for k, v in value.items()))
    return (kind, value)


def counted(members: Any) -> Iterator[tuple[int, Any]]:
    """Members, each with a number that tells apart those that look alike (several NaNs in one set)."""
    seen: dict[Any, int] = {}
    for member in members:
        seen[typed(member)] = number = seen.get(typed(member), 0) + 1
        yield number, member


@patient
@given(VALUES, VALUES)
def test_bytes_are_equal_exactly_where_types_and_contents_are(one: Any, other: Any) -> None:
    assert (encode(one) == encode(other)) == (typed(one) == typed(other))


@patient
@given(st.one_of(st.booleans(), st.integers(0, 1), st.sampled_from([0.0, -0.0, 1.0, 0j, "0", b"0"])), st.data())
def test_small_values_that_are_easily_confused_are_told_apart(one: Any, data: st.DataObject) -> None:
    other = data.draw(st.sampled_from([False, True, 0, 1, 0.0, -0.0, 1.0, 0j, -0j, "0", b"0", Level.LOW]))
    for wrap in (lambda v: v, lambda v: (v,), lambda v: [v], lambda v: {v}, lambda v: {v: v}):
        assert (encode(wrap(one)) == encode(wrap(other))) == (typed(wrap(one)) == typed(wrap(other)))


@patient
@given(VALUES)
def test_bytes_are_stable_and_say_nothing_of_identity(value: Any) -> None:
    import copy

    assert encode(value) == encode(copy.deepcopy(value))


def test_a_stream_in_memory_is_keyed_by_its_contents() -> None:
    assert encode(io.BytesIO(b"a")) == encode(io.BytesIO(b"a"))
    assert encode(io.BytesIO(b"a")) != encode(io.BytesIO(b"b"))
