"""What a function reads besides its arguments: module constants, captured values, the helpers that it calls.

Found by following the names that its code loads, through the functions and classes of the project that they lead to.
The result says which modules' sources count, gives the values for the key, and can check in well under a microsecond
that none of them has been bound to something else since.
"""

from __future__ import annotations

import dataclasses
import dis
import enum
import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from pytest_quack.cache import key
from pytest_quack.cache.sources import is_project_file
from pytest_quack.errors import UnkeyableError

_IMMUTABLE_ATOMS = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis), range)
_BINDINGS = (types.FunctionType, types.BuiltinFunctionType, type, types.ModuleType)
_MAX_FUNCTIONS = 2000


def is_immutable(value: Any) -> bool:
    """Whether `value` cannot come to mean something else while it stays the same object."""
    if isinstance(value, (*_IMMUTABLE_ATOMS, enum.Enum, *_BINDINGS)):
        return True
    kind = type(value)
    if kind in (tuple, frozenset):
        return all(map(is_immutable, value))
    if f"{kind.__module__}.{kind.__qualname__}" in {"torch.dtype", "torch.device"}:
        return True
    if dataclasses.is_dataclass(value) and kind.__dataclass_params__.frozen:
        return all(is_immutable(getattr(value, f.name, None)) for f in dataclasses.fields(value))
    return False


@dataclasses.dataclass(frozen=True, slots=True)
class Read:
    """One value that the code reads: `expression` is a global name, or a global and one attribute of it."""

    namespace: dict[str, Any] = dataclasses.field(repr=False)
    module: str
    expression: str
    value: Any = dataclasses.field(repr=False)

    @property
    def label(self) -> str:
        return f"{self.module}.{self.expression}"


class Reach:
    """What `functions` read, as it is now."""

    def __init__(self, roots: list[Any], ignore: tuple[str, ...] = ()) -> None:
        self.modules: set[str] = set()
        self.reads: dict[tuple[str, str], Read] = {}
        self._ignore = frozenset(ignore)
        self._home = {getattr(inspect.unwrap(root), "__module__", "").split(".")[0] for root in roots if callable(root)}
        self._seen: dict[int, Any] = {}
        for root in roots:
            self._visit(root)
        self._mutable = [read for read in self.reads.values() if not is_immutable(read.value)]
        self._snapshots = [key.encode(read.value) for read in self._mutable] if self._is_keyable() else []
        self.check: Callable[[], bool] | None = self._make_check()

    def _is_keyable(self) -> bool:
        try:
            self.encoded()
        except UnkeyableError:
            return False
        return True

    def encoded(self) -> dict[str, bytes]:
        """Canonical bytes of each value read, by label. Raises UnkeyableError naming the global that has none."""
        found = {}
        for read in self.reads.values():
            try:
                found[read.label] = key.encode(read.value)
            except UnkeyableError as error:
                name = read.expression
                raise UnkeyableError(
                    f"it reads {read.label}, and {error}. Pass what it needs as an argument, or write "
                    f'@jit_cache(ignore=["{name}"]) if the kernel does not depend on it'
                ) from error
        return found

    def _make_check(self) -> Callable[[], bool] | None:
        """A function that says whether every name still leads to the value that was found.

        It runs on each in-process hit, so it is generated: one expression for each module, whose names the interpreter
        resolves through its own global cache.
        """
        by_namespace: dict[int, list[Read]] = {}
        for read in self.reads.values():
            by_namespace.setdefault(id(read.namespace), []).append(read)
        checks = [_same_bindings(reads) for reads in by_namespace.values()]
        if self._mutable:
            checks.append(self._same_contents)
        if len(checks) < 2:
            return checks[0] if checks else None
        names = [f"c{i}" for i in range(len(checks))]
        source = f"def check({', '.join(f'{n}={n}' for n in names)}): return {' and '.join(f'{n}()' for n in names)}"
        scope: dict[str, Any] = dict(zip(names, checks, strict=True))
        exec(source, scope)
        return scope["check"]  # type: ignore[no-any-return]

    def _same_contents(self) -> bool:
        try:
            return [key.encode(read.value) for read in self._mutable] == self._snapshots
        except UnkeyableError:
            return False

    def _visit(self, value: Any) -> None:
        if isinstance(value, _IMMUTABLE_ATOMS) or id(value) in self._seen or len(self._seen) > _MAX_FUNCTIONS:
            return
        self._seen[id(value)] = value
        if isinstance(value, (types.FunctionType, functools._lru_cache_wrapper)):
            self._visit_function(inspect.unwrap(value))
        elif isinstance(value, type):
            self._visit_class(value)
        elif isinstance(value, types.MethodType):
            self._visit(value.__func__)
            self._visit(value.__self__)
        elif isinstance(value, functools.partial):
            for part in (value.func, *value.args, *value.keywords.values()):
                self._visit(part)
        elif isinstance(value, (staticmethod, classmethod)):
            self._visit(value.__func__)
        elif isinstance(value, property):
            self._visit(value.fget)
        elif isinstance(value, (list, tuple, set, frozenset)):
            for part in value:
                self._visit(part)
        elif isinstance(value, dict):
            for part in value.values():
                self._visit(part)
        elif not isinstance(value, types.ModuleType):
            self._visit(type(value))
            for part in list(getattr(value, "__dict__", {}).values()) if self._is_project(type(value)) else ():
                self._visit(part)

    def _is_project(self, value: Any) -> bool:
        name = getattr(value, "__module__", None) or ""
        top = name.split(".")[0]
        if top == "pytest_quack":
            return False
        module = sys.modules.get(name)
        if module is None:
            return False
        return top in self._home or name == "__main__" or is_project_file(getattr(module, "__file__", None))

    def _visit_class(self, value: type) -> None:
        if not self._is_project(value):
            return
        self.modules.add(value.__module__)
        for base in value.__bases__:
            self._visit(base)
        for member in list(vars(value).values()):
            if isinstance(member, (types.FunctionType, staticmethod, classmethod, property)):
                self._visit(member)

    def _visit_function(self, function: Any) -> None:
        if not isinstance(function, types.FunctionType) or not self._is_project(function):
            return
        self.modules.add(function.__module__)
        for cell in function.__closure__ or ():
            try:
                self._visit(cell.cell_contents)
            except ValueError:
                continue  # an empty cell: the name is not bound yet
        for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._visit(default)
        for chain in _global_chains(function.__code__):
            self._follow(function, chain)

    def _follow(self, function: types.FunctionType, chain: tuple[str, ...]) -> None:
        name, *attributes = chain
        namespace = function.__globals__
        if name not in namespace or name in self._ignore or name.startswith("__"):
            return
        value, module = namespace[name], function.__module__
        expression = name
        if isinstance(value, types.ModuleType):
            if not attributes or not is_project_file(getattr(value, "__file__", None)):
                return
            self.modules.add(value.__name__)
            module, namespace, expression = value.__name__, value.__dict__, attributes[0]
            if expression in self._ignore or expression not in namespace:
                return
            value, attributes = namespace[expression], attributes[1:]
        self._note(namespace, module, expression, value)
        if isinstance(value, type) and attributes and self._is_project(value):
            member = inspect.getattr_static(value, attributes[0], None)
            if member is not None and not isinstance(member, (types.FunctionType, staticmethod, classmethod, property)):
                self._note(namespace, module, f"{expression}.{attributes[0]}", member)

    def _note(self, namespace: dict[str, Any], module: str, expression: str, value: Any) -> None:
        if isinstance(value, _BINDINGS) and not self._is_project(value):
            return  # names of other distributions: their versions are in the toolchain part of the key
        self._visit(value)
        self.reads[module, expression] = Read(namespace, module, expression, value)


def _same_bindings(reads: list[Read]) -> Callable[[], bool]:
    defaults = {f"_quack_{i}": read.value for i, read in enumerate(reads)}
    tests = " and ".join(f"{read.expression} is {name}" for name, read in zip(defaults, reads, strict=True))
    scope: dict[str, Any] = {}
    exec(f"def check({', '.join(f'{name}=None' for name in defaults)}): return {tests}", scope)
    template: types.FunctionType = scope["check"]
    return types.FunctionType(template.__code__, reads[0].namespace, "check", tuple(defaults.values()))


def _global_chains(code: types.CodeType) -> Iterator[tuple[str, ...]]:
    """Global names that the code loads, each with the attributes that are read from it at once."""
    chain: list[str] = []
    for instruction in dis.get_instructions(code):
        if instruction.opname in {"LOAD_GLOBAL", "LOAD_NAME"}:
            if chain:
                yield tuple(chain)
            chain = [instruction.argval]
        elif instruction.opname in {"LOAD_ATTR", "LOAD_METHOD"} and chain:
            chain.append(instruction.argval)
        elif instruction.opname not in {"CACHE", "PRECALL", "EXTENDED_ARG"} and chain:
            yield tuple(chain)
            chain = []
    if chain:
        yield tuple(chain)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _global_chains(constant)
