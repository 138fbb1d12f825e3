"""Canonical bytes for Python values, and the digests made of them.

Two values have the same bytes when they mean the same to a compile function, in every process and on every machine:
no addresses, no `hash()`, no set order, no absolute paths, and no dependence on which objects happen to be shared (as
a pickle has through its memo). Values that mean different things have different bytes: `True`, `1` and `1.0` differ,
as do `0.0` and `-0.0`, and functions of one name from two modules or two closures.

What has no canonical form is refused with `UnkeyableError`; a guess here would be a wrong kernel later.
"""

from __future__ import annotations

import copyreg
import dataclasses
import enum
import functools
import hashlib
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pytest_quack.backends import source_code
from pytest_quack.errors import UnkeyableError

_MAX_DEPTH = 60
_ATOMS = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis), type(NotImplemented))


def digest(parts: Mapping[str, bytes]) -> str:
    """The hex digest of labelled parts, independent of the order in which they are given."""
    total = hashlib.sha256()
    for label in sorted(parts):
        for field in (label.encode(), parts[label]):
            total.update(len(field).to_bytes(8, "little"))
            total.update(field)
    return total.hexdigest()


def encode(value: object) -> bytes:
    """Canonical bytes of `value`. Raises UnkeyableError naming the part that has none."""
    out: list[bytes] = []
    _Encoder(out).put(value)
    return b"".join(out)


def encode_code(code: types.CodeType) -> bytes:
    """Canonical bytes of a code object: what it does, not where it stands in which file."""
    out: list[bytes] = []
    _Encoder(out).put_code(code)
    return b"".join(out)


def is_importable(value: Any) -> bool:
    """Whether `value.__module__` and `value.__qualname__` lead back to this very object."""
    module = sys.modules.get(getattr(value, "__module__", None) or "")
    if module is None or module.__name__ == "__main__":
        return False
    found: Any = module
    for name in getattr(value, "__qualname__", "<locals>").split("."):
        found = getattr(found, name, None) if not isinstance(found, type) else found.__dict__.get(name)
        if isinstance(found, (staticmethod, classmethod)):
            found = found.__func__
    return found is value


class _Encoder:
    """Writes one value; `_path` holds the objects that are being written, to see a cycle."""

    def __init__(self, out: list[bytes]) -> None:
        self._out = out
        self._path: list[int] = []

    def put(self, value: Any) -> None:
        kind = type(value)
        if kind in _ATOMS:
            self._put_atom(value)
            return
        if id(value) in self._path:
            self._tag(b"cycle", str(len(self._path) - self._path.index(id(value))).encode())
            return
        if len(self._path) > _MAX_DEPTH:
            raise UnkeyableError(f"a {_name(kind)} is nested more than {_MAX_DEPTH} levels deep")
        self._path.append(id(value))
        try:
            self._put_compound(value, kind)
        finally:
            self._path.pop()

    def _tag(self, tag: bytes, payload: bytes) -> None:
        self._out.append(b"%b %d:" % (tag, len(payload)))
        self._out.append(payload)

    def _put_atom(self, value: Any) -> None:
        if isinstance(value, str):
            payload = value.encode("utf-8", "surrogatepass")
        elif isinstance(value, bytes):
            payload = value
        else:
            payload = repr(value).encode()
        self._tag(type(value).__name__.encode(), payload)

    def _put_all(self, tag: bytes, values: Iterable[Any]) -> None:
        values = list(values)
        self._out.append(b"%b %d[" % (tag, len(values)))
        for value in values:
            self.put(value)
        self._out.append(b"]")

    def _put_compound(self, value: Any, kind: type) -> None:
        if kind is tuple or kind is list:
            self._put_all(kind.__name__.encode(), value)
        elif kind is dict:
            self._put_all(b"dict", [part for item in value.items() for part in item])
        elif kind is set or kind is frozenset:
            members = []
            for member in value:
                encoder = _Encoder([])
                encoder._path = self._path
                encoder.put(member)
                members.append(b"".join(encoder._out))
            self._put_all(kind.__name__.encode(), sorted(members))
        elif isinstance(value, enum.Enum):
            self._put_all(b"enum", [kind, value.name, value.value])
        elif isinstance(value, type) and kind is not types.GenericAlias:  # list[int] is a type on Python 3.10
            self._put_class(value)
        elif isinstance(value, types.ModuleType):
            self._tag(b"module", value.__name__.encode())
        elif isinstance(value, types.FunctionType):
            self.put_function(value)
        elif isinstance(value, functools._lru_cache_wrapper):
            self._put_all(b"cached", [value.__wrapped__])
        elif isinstance(value, types.BuiltinFunctionType):
            owner = value.__self__
            is_free = owner is None or isinstance(owner, types.ModuleType)
            self._put_all(b"builtin", [value.__module__, value.__qualname__, None if is_free else owner])
        elif isinstance(value, types.MethodType):
            self._put_all(b"method", [value.__func__, value.__self__])
        elif kind is functools.partial:
            self._put_all(b"partial", [value.func, value.args, sorted(value.keywords.items())])
        elif isinstance(value, types.CodeType):
            self.put_code(value)
        elif isinstance(value, (staticmethod, classmethod)):
            self._put_all(kind.__name__.encode(), [value.__func__])
        elif isinstance(value, property):
            self._put_all(b"property", [value.fget, value.fset, value.fdel])
        elif isinstance(value, types.MappingProxyType):
            self._put_all(b"mappingproxy", [dict(value)])
        elif isinstance(value, types.CellType):
            self.put_cell(value)
        else:
            try:
                self._put_instance(value, kind)
            except (UnkeyableError, RecursionError):
                raise
            except Exception as error:  # foreign attributes may raise anything
                raise UnkeyableError(f"a {_name(kind)} has no canonical form ({error!r})") from error

    def _put_class(self, value: type) -> None:
        if is_importable(value):
            self._tag(b"class", _name(value).encode())
            return
        if value.__module__ == "builtins":
            self._tag(b"class", _name(value).encode())
            return
        members = {k: v for k, v in vars(value).items() if k not in _NOT_MEANING and not isinstance(v, _SLOT_TYPES)}
        self._put_all(b"local class", [value.__qualname__, value.__bases__, sorted(members.items())])

    def put_function(self, value: types.FunctionType) -> None:
        """A function by name where the name leads to it, else by what it does and what it has captured."""
        if is_importable(value):
            self._tag(b"function", f"{value.__module__}.{value.__qualname__}".encode())
            return
        if hasattr(value, "__quack_jit__"):  # a compile function of ours: its cells hold what it has compiled so far
            self._put_all(b"jit_cache", [getattr(value, "__wrapped__", None)])
            return
        self._out.append(b"by value[")
        self._put_all(b"name", [value.__module__, value.__qualname__])
        self.put_code(source_code(value))
        self._put_all(b"defaults", [value.__defaults__, sorted((value.__kwdefaults__ or {}).items())])
        self._put_all(b"captured", value.__closure__ or ())
        self._out.append(b"]")

    def put_cell(self, value: types.CellType) -> None:
        try:
            contents = value.cell_contents
        except ValueError:
            self._tag(b"empty cell", b"")
        else:
            self._put_all(b"cell", [contents])

    def put_code(self, code: types.CodeType) -> None:
        flags = code.co_flags
        shape = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, flags, code.co_name)
        names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
        self._put_all(b"code", [shape, names, code.co_code, getattr(code, "co_exceptiontable", b""), code.co_consts])

    def _put_instance(self, value: Any, kind: type) -> None:
        by_value = _BY_TEXT.get(f"{kind.__module__}.{kind.__qualname__}")
        if by_value is not None:
            self._put_all(b"named", [_name(kind), by_value(value)])
            return
        canonical = getattr(kind, "__quack_key__", None)
        if callable(canonical):
            self._put_all(b"custom", [kind, canonical(value)])
            return
        if dataclasses.is_dataclass(kind):
            state = [(f.name, getattr(value, f.name, None)) for f in dataclasses.fields(value)]
            extra = sorted(set(getattr(value, "__dict__", {})) - {name for name, _ in state})
            state += [(name, value.__dict__[name]) for name in extra]
            self._put_all(b"dataclass", [kind, state])
            return
        self._put_reduced(value, kind)

    def _put_reduced(self, value: Any, kind: type) -> None:
        """Anything else by what pickle would rebuild it from, written here without pickle's memo."""
        if kind.__module__.split(".")[0] == "torch" and hasattr(value, "data_ptr"):
            raise UnkeyableError(
                f"a tensor ({_name(kind)}) is data, not a parameter of a kernel; pass its dtype or shape"
            )
        if kind is object:
            raise UnkeyableError("a bare object() means nothing but itself, which another process cannot tell")
        reducer = copyreg.dispatch_table.get(kind)
        try:
            reduced = reducer(value) if reducer is not None else value.__reduce_ex__(4)
        except Exception as error:  # foreign code, which may raise anything
            raise UnkeyableError(f"a {_name(kind)} has no canonical form ({error})") from error
        if isinstance(reduced, str):
            if "<locals>" in reduced:
                raise UnkeyableError(f"a {_name(kind)} has no canonical form (it is only known as {reduced})")
            self._put_all(b"global", [kind, getattr(value, "__module__", None), reduced])
            return
        parts: tuple[Any, ...] = (*reduced, None, None, None)
        make, args, state, listed, mapped = parts[:5]
        if isinstance(state, dict) and all(type(name) is str for name in state):
            state = sorted(state.items())  # attributes have no order that means anything
        items = [list(part) if part is not None else None for part in (listed, mapped)]
        self._put_all(b"reduced", [kind, make, args, state, *items])


_NOT_MEANING = frozenset(
    {"__dict__", "__weakref__", "__module__", "__doc__", "__firstlineno__", "__static_attributes__", "_abc_impl"}
)
_SLOT_TYPES = (types.GetSetDescriptorType, types.MemberDescriptorType, types.WrapperDescriptorType)


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


_BY_TEXT: dict[str, Callable[[Any], Any]] = {
    "torch.dtype": str,
    "torch.device": str,
    "torch.layout": str,
    "torch.memory_format": str,
    "torch.Size": tuple,
    "tvm_ffi._dtype.dtype": str,
    "tvm_ffi.core.dtype": str,
    "pathlib.PosixPath": str,
    "pathlib.PurePosixPath": str,
    "builtins.range": lambda r: (r.start, r.stop, r.step),
    "builtins.slice": lambda s: (s.start, s.stop, s.step),
    "builtins.bytearray": bytes,
    "decimal.Decimal": str,
    "fractions.Fraction": str,
}
