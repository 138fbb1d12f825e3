"""What a function reads besides its arguments: module constants, captured values, the helpers that it calls.

Found by following the names that its code loads, through the functions and classes of the project that they lead to:
globals, attributes of modules and classes, captured variables. The result says which modules' sources count, gives the
values for the key, and can check in well under a microsecond that none of them has been bound to something else since.
"""

from __future__ import annotations

import builtins
import dataclasses
import dis
import enum
import functools
import importlib
import inspect
import re
import sys
import types
from collections.abc import Callable, Collection, Iterator
from typing import Any

from pytest_quack.backends import source_code
from pytest_quack.cache import key
from pytest_quack.cache.snapshot import take_snapshot
from pytest_quack.cache.sources import absolute_name, is_project_file, module_file
from pytest_quack.errors import CompilePending, UnkeyableError

_IMMUTABLE_ATOMS = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis), range)
_BINDINGS = (types.FunctionType, types.BuiltinFunctionType, type, types.ModuleType)
_MAX_OBJECTS = 5000
_MODULE_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_IMPORTING_NAMES = frozenset({"import_module", "__import__", "modules"})
_READS_NAMESPACE = (globals, eval, exec, locals, vars)


def is_immutable(value: Any) -> bool:
    """Whether `value` cannot come to mean something else while it stays the same object."""
    kind = type(value)
    if isinstance(value, (*_IMMUTABLE_ATOMS, enum.Enum, *_BINDINGS)) or kind is object:
        return True
    if kind in (tuple, frozenset):
        return all(map(is_immutable, value))
    if f"{kind.__module__}.{kind.__qualname__}" in {"torch.dtype", "torch.device"}:
        return True
    if dataclasses.is_dataclass(value) and kind.__dataclass_params__.frozen:
        return all(is_immutable(getattr(value, f.name, None)) for f in dataclasses.fields(value))
    return False


@dataclasses.dataclass(frozen=True, slots=True)
class Read:
    """One value that the code reads: `expression` leads to it in `namespace`, `name` is what people call it.

    `is_keyed` is False where the value is part of the key through something else, or its identity is all that counts.
    """

    namespace: dict[str, Any] = dataclasses.field(repr=False)
    module: str
    expression: str
    name: str
    value: Any = dataclasses.field(repr=False)
    is_keyed: bool = True

    @property
    def label(self) -> str:
        return f"{self.module}.{self.name}"


class Reach:
    """What `functions` read, as it is now."""

    def __init__(self, roots: list[Any], ignore: tuple[str, ...] = ()) -> None:
        self.modules: set[str] = set()
        self.reads: dict[tuple[int, str], Read] = {}
        self._ignore = frozenset(ignore)
        self._home = {getattr(inspect.unwrap(root), "__module__", "").split(".")[0] for root in roots if callable(root)}
        self._seen: dict[int, Any] = {}
        self._is_cut_short = False
        self._aliases: dict[str, Any] = {}  # a namespace for what has no global name: cells, classes
        self._owners: list[Any] = []  # classes and functions, which have attributes
        self._has_getattr = False
        self._attributes: set[str] = set()  # names of all attributes that the code reads, of whatever object
        for root in roots:
            self._visit(root)
        self._note_attributes()
        self._mutable = [read for read in self.reads.values() if read.is_keyed and not is_immutable(read.value)]
        self._snapshots = [take_snapshot(read.value) for read in self._mutable] if self._is_keyable() else None
        self.check: Callable[[], bool] | None = self._make_check()

    def _is_keyable(self) -> bool:
        try:
            self.encoded()
        except UnkeyableError:
            return False
        return True

    def encoded(self) -> dict[str, bytes]:
        """Canonical bytes of each value read, by label. Raises UnkeyableError naming the one that has none."""
        if self._is_cut_short:
            raise UnkeyableError(f"it reaches more than {_MAX_OBJECTS} objects, too many to look at")
        found: dict[str, list[bytes]] = {}
        for read in self.reads.values():
            if not read.is_keyed:
                continue
            try:
                found.setdefault(read.label, []).append(self._encode(read.value))
            except UnkeyableError as error:
                raise UnkeyableError(
                    f"it reads {read.label}, and {error}. Pass what it needs as an argument, or write "
                    f'@jit_cache(ignore=["{read.name}"]) if the kernel does not depend on it'
                ) from error
        return {label: key.encode(values) for label, values in found.items()}

    def _encode(self, value: Any) -> bytes:
        if type(value) is object:
            return b"object"  # a marker, which the name that it is read by tells from others
        if isinstance(value, types.ModuleType) or not isinstance(value, _BINDINGS) or self._is_project(value):
            return key.encode(value)
        # A name of another distribution, whose version is in the toolchain part of the key.
        return f"{getattr(value, '__module__', None)}.{getattr(value, '__qualname__', None)}".encode()

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
        if self._snapshots is None:
            return False
        return all(same(read.value) for same, read in zip(self._snapshots, self._mutable, strict=True))

    def _visit(self, value: Any) -> None:
        if isinstance(value, _IMMUTABLE_ATOMS) or id(value) in self._seen:
            return
        if len(self._seen) >= _MAX_OBJECTS:
            self._is_cut_short = True
            return
        self._seen[id(value)] = value
        if isinstance(value, (types.FunctionType, functools._lru_cache_wrapper)):
            self._visit_function(value)
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
            for part in (value.fget, value.fset):
                self._visit(part)
        elif isinstance(value, (list, tuple, set, frozenset)):
            for part in value:
                self._visit(part)
        elif isinstance(value, dict):
            for part in (*value.keys(), *value.values()):
                self._visit(part)
        elif isinstance(value, types.ModuleType):
            if self._is_project(value):
                self._follow_module(value, [])
        else:
            self._visit(type(value))
            for part in list(_state(value).values()) if self._is_project(type(value)) else ():
                self._visit(part)

    def _is_project(self, value: Any) -> bool:
        """Whether a function, a class or a module belongs to the project."""
        if isinstance(value, types.FunctionType):  # a decorator of another distribution keeps our function's __module__
            name, path = value.__globals__.get("__name__") or "", value.__code__.co_filename
        elif isinstance(value, types.ModuleType):
            name, path = value.__name__, getattr(value, "__file__", None) or ""
        else:
            name, path = getattr(value, "__module__", None) or "", ""
        top = name.split(".")[0]
        if top == "pytest_quack":
            return False
        module = sys.modules.get(name)
        if module is not None:
            path = getattr(module, "__file__", None) or ""
        elif isinstance(value, type):  # of a module that nobody can import: its functions tell
            return any(map(self._is_project, filter(_is_function, list(vars(value).values()))))
        elif not path.endswith(".py"):
            return isinstance(value, types.FunctionType)  # made by exec
        return top in self._home or name == "__main__" or is_project_file(path)

    def _visit_class(self, value: type) -> None:
        if not self._is_project(value):
            return
        self.modules.add(value.__module__)
        self._owners.append(value)
        for base in (*value.__bases__, type(value)):
            self._visit(base)
        for member in list(vars(value).values()):
            is_generated = dataclasses.is_dataclass(value) and _is_function(member) and _is_made_by_exec(member)
            if isinstance(member, (types.FunctionType, staticmethod, classmethod, property)) and not is_generated:
                self._visit(member)

    def _note_attributes(self) -> None:
        """Note what the code may read of classes and functions: members of a name that it reads from anything at all.

        Where some of it calls `getattr`, with whatever name, that is every member of a class.
        """
        done: set[tuple[int, str]] = set()
        while wanted := [
            (owner, name)
            for owner in self._owners
            for name in vars(owner)
            if (name in self._attributes or (self._has_getattr and isinstance(owner, type)))
            and (id(owner), name) not in done
            and not name.startswith("__")
            and not (isinstance(owner, type) and issubclass(owner, enum.Enum))
        ]:
            for owner, name in wanted:
                done.add((id(owner), name))
                member = vars(owner)[name]
                member = member.__func__ if isinstance(member, staticmethod) else member
                label = f"{owner.__qualname__}.{name}"
                is_ours = self._is_project(type(member))
                is_plain = _is_function(member) or is_ours or not hasattr(type(member), "__get__")
                if is_plain and not {name, label} & self._ignore:
                    # A descriptor of the project is read from the class's own dictionary, or it would be called.
                    expression = f"{self._alias(owner)}.{name}"
                    if is_ours and hasattr(type(member), "__get__"):
                        expression = f"{self._alias(vars(owner))}[{name!r}]"
                    is_keyed = name in self._attributes or (_is_data(member) and self._can_encode(member))
                    self._note(self._aliases, owner.__module__, expression, label, member, is_keyed)

    def _alias(self, value: Any) -> str:
        name = f"_quack_alias_{id(value)}"
        self._aliases[name] = value
        return name

    def _visit_function(self, function: Any) -> None:
        """Visit a function and, where it is a decorator's wrapper, what it wraps."""
        seen: set[int] = set()
        while function is not None and id(function) not in seen:
            seen.add(id(function))
            if isinstance(function, types.FunctionType) and self._is_project(function):
                self._visit_layer(function)
            function = getattr(function, "__wrapped__", None)

    def _visit_layer(self, function: types.FunctionType) -> None:
        code = source_code(function)
        module = function.__globals__.get("__name__") or ""
        self.modules.add(module)
        self._owners.append(function)
        names = set(_names(code))
        self._attributes.update(names)
        self._has_getattr |= not names.isdisjoint({"getattr", "attrgetter"})
        if not names.isdisjoint(_IMPORTING_NAMES):
            self._follow_named_modules(code)
        imports = LocalImports(function)
        if module == "__main__" or module not in sys.modules:  # nobody scans its source for imports
            self.modules.update(name for name in imports.modules() if is_project_file(module_file(name)))
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            try:
                value = cell.cell_contents
            except ValueError:
                continue  # an empty cell: the name is not bound yet
            if name == "__class__":
                continue
            # What a function that counts by name has captured is for its source to say, unless it is bound anew.
            is_keyed = not key.is_importable(function)
            expression, label = f"{self._alias(cell)}.cell_contents", f"{function.__qualname__}.{name}"
            self._note(self._aliases, module, expression, label, value, is_keyed)
        self._note_function(function, module)
        for is_global, chain in _chains(code, imports.names):
            if is_global:
                self._follow(function.__globals__, module, chain)
            else:
                self._follow_import(imports, chain)

    def _note_function(self, function: types.FunctionType, module: str) -> None:
        """Note the defaults of a function, which can be replaced without replacing it.

        So can its code, but the DSL itself does that to each function that it compiles.
        """
        alias, name = self._alias(function), function.__qualname__
        if function.__defaults__ is not None:
            self._note_default(module, f"{alias}.__defaults__", f"{name}.__defaults__", function.__defaults__)
        for argument, value in (function.__kwdefaults__ or {}).items():
            self._note_default(module, f"{alias}.__kwdefaults__[{argument!r}]", f"{name}({argument}=)", value)

    def _note_default(self, module: str, expression: str, label: str, value: Any) -> None:
        """A default that has no canonical form is for the source to say, unless another takes its place."""
        self._note(self._aliases, module, expression, label, value, is_keyed=self._can_encode(value))

    def _can_encode(self, value: Any) -> bool:
        try:
            self._encode(value)
        except UnkeyableError:
            return False
        return True

    def _follow(self, namespace: dict[str, Any], module: str, chain: tuple[str, ...]) -> None:
        name, *attributes = chain
        found = namespace.get(name, vars(builtins).get(name))
        if any(found is reader for reader in _READS_NAMESPACE):
            self._note_contents(namespace, module)
        if name not in namespace or name in self._ignore or name.startswith("__"):
            return
        value = namespace[name]
        if isinstance(value, types.ModuleType) and not self._is_project(value):
            return
        if isinstance(value, types.ModuleType):
            self.reads[id(namespace), name] = Read(namespace, module, name, name, value)
            self._follow_module(value, attributes)
        else:
            self._note(namespace, module, name, name, value)

    def _follow_module(self, value: types.ModuleType, attributes: list[str]) -> None:
        self.modules.add(value.__name__)
        if not attributes or attributes[0] == "__dict__":  # given to somebody: any of its names may be read
            self._note_contents(value.__dict__, value.__name__)
        else:
            self._follow(value.__dict__, value.__name__, tuple(attributes))

    def _follow_import(self, imports: LocalImports, chain: tuple[str, ...]) -> None:
        """Follow a name that the function itself imports: that happens as late as the call, and finds what is there."""
        local, *attributes = chain
        module, name = imports.names[local]
        found = self._import(module)
        if found is None:
            return
        if name is None:
            self._follow_module(found, attributes)
        elif name in vars(found) or self._import(f"{module}.{name}") is None:
            self._follow(vars(found), found.__name__, (name, *attributes))
        else:
            self._follow_module(sys.modules[f"{module}.{name}"], attributes)

    def _import(self, name: str) -> types.ModuleType | None:
        """A module of the project, imported as the call would; None for any other, or where that fails."""
        path = module_file(name)
        if path is None or not (is_project_file(path) or name.split(".")[0] in self._home):
            return None
        if name.split(".")[0] == "pytest_quack":
            return None
        try:
            return importlib.import_module(name)
        except (KeyboardInterrupt, CompilePending):
            raise
        except BaseException:  # noqa: BLE001 - the call will meet it (a skip, an exit), or does not come to it
            return None

    def _follow_named_modules(self, code: types.CodeType) -> None:
        """Note the contents of modules that the code names by a text, to import them or to look them up."""
        for text in _texts(code):
            module = self._import(text) if _MODULE_NAME.fullmatch(text) else None
            if module is not None:
                self._follow_module(module, [])

    def _note_contents(self, namespace: dict[str, Any], module: str) -> None:
        """Note everything that a module holds, apart from other modules."""
        if id(namespace) in self._seen:
            return
        self._seen[id(namespace)] = namespace
        for name, value in list(namespace.items()):
            if name.startswith("__") or name in self._ignore or isinstance(value, types.ModuleType):
                continue
            if (id(namespace), name) not in self.reads and name.isidentifier():
                self._note(namespace, module, name, name, value, self._can_encode(value))

    def _note(
        self, namespace: dict[str, Any], module: str, expression: str, name: str, value: Any, is_keyed: bool = True
    ) -> None:
        self._visit(value)
        self.reads[id(namespace), expression] = Read(namespace, module, expression, name, value, is_keyed)


def _state(value: Any) -> dict[str, Any]:
    """An instance's own attributes, without asking a `__getattr__` that it may have."""
    try:
        state = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return state if isinstance(state, dict) else {}


def _is_data(value: Any) -> bool:
    return isinstance(value, (*_IMMUTABLE_ATOMS, tuple, list, dict, set, frozenset, enum.Enum))


def _texts(code: types.CodeType) -> Iterator[str]:
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, types.CodeType):
            yield from _texts(constant)


def _is_function(value: Any) -> bool:
    return isinstance(value, types.FunctionType)


def _is_made_by_exec(function: types.FunctionType) -> bool:
    return function.__code__.co_filename == "<string>"


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _same_bindings(reads: list[Read]) -> Callable[[], bool]:
    defaults = {f"_quack_{i}": read.value for i, read in enumerate(reads)}
    tests = " and ".join(f"{read.expression} is {name}" for name, read in zip(defaults, reads, strict=True))
    scope: dict[str, Any] = {}
    exec(f"def check({', '.join(f'{name}=None' for name in defaults)}): return {tests}", scope)
    template: types.FunctionType = scope["check"]
    return types.FunctionType(template.__code__, reads[0].namespace, "check", tuple(defaults.values()))


def _chains(code: types.CodeType, imported: Collection[str]) -> Iterator[tuple[bool, tuple[str, ...]]]:
    """Names that the code loads, each with the attributes that are read from it at once.

    The flag says whether the name is a global; the others are those of `imported`, local names bound by an import.
    """
    chain: list[str] = []
    is_global = True
    for instruction in dis.get_instructions(code):
        kind, value = instruction.opname, instruction.argval
        if kind in {"LOAD_ATTR", "LOAD_METHOD"} and chain:
            chain.append(value)
            continue
        if kind in {"CACHE", "PRECALL", "EXTENDED_ARG"}:
            continue
        if chain:
            yield is_global, tuple(chain)
            chain = []
        if kind in {"LOAD_GLOBAL", "LOAD_NAME"}:
            chain, is_global = [value], True
        elif "LOAD_FAST" in kind or kind in {"LOAD_DEREF", "LOAD_CLASSDEREF"}:
            loaded = value if isinstance(value, tuple) else (value,)  # some opcodes have two names
            yield from ((False, (name,)) for name in loaded[:-1] if name in imported)
            if loaded[-1] in imported:
                chain, is_global = [loaded[-1]], False
    if chain:
        yield is_global, tuple(chain)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _chains(constant, imported)


class LocalImports:
    """The names that a function, or one defined inside it, binds by importing.

    Attributes:
        names: local name -> (absolute module, name taken from it or None).
    """

    def __init__(self, function: types.FunctionType) -> None:
        self.names: dict[str, tuple[str, str | None]] = {}
        namespace = function.__globals__
        self._package = str(namespace.get("__name__") or "")
        self._is_package = "__path__" in namespace
        self._scan(source_code(function))

    def modules(self) -> Iterator[str]:
        """Every module that may be meant: a name taken from a package may be one."""
        for module, taken in self.names.values():
            yield module
            if taken:
                yield f"{module}.{taken}"

    def _scan(self, code: types.CodeType) -> None:
        constants: list[Any] = [0, None]
        module, names, taken = "", None, None
        for instruction in dis.get_instructions(code):
            kind = instruction.opname
            if kind == "IMPORT_NAME":
                level, names = constants[-2:]
                module, taken = absolute_name(self._package, self._is_package, instruction.argval, level or 0), None
            elif kind == "IMPORT_FROM":
                taken = instruction.argval
            elif kind.startswith("STORE_") and module:
                value = instruction.argval
                bound = value[0] if isinstance(value, tuple) else value  # STORE_FAST_LOAD_FAST has two names
                if names:
                    self.names[bound] = module, taken
                else:  # `import a.b` binds a, `import a.b as c` binds a.b to c
                    self.names[bound] = (module if taken else module.split(".")[0]), None
                    module = ""
            elif kind == "POP_TOP" and names:
                module = ""
            elif kind.startswith("LOAD_"):
                constants.append(instruction.argval)
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self._scan(constant)
