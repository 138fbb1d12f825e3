"""The direct key of one call: the digest of compile function, arguments, and everything else that they reach.

It needs no trace and no compiler run, only what Python and the file system know. Its parts are labelled, so that two
processes which disagree can say on what.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import inspect
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, Final

from pytest_quack.backends import Backend, find_backend
from pytest_quack.cache import key as canonical
from pytest_quack.cache.environ import NOT_KEYED, environ_check, environ_digests
from pytest_quack.cache.reach import Reach
from pytest_quack.cache.sources import SourceSet, is_project_file, module_file, sources_of
from pytest_quack.compile import preload
from pytest_quack.errors import UnkeyableError

SCHEMA: Final = b"1"
Check = Callable[[], bool]


@dataclass(frozen=True, slots=True)
class DirectKey:
    """A key, and a digest of each of its parts by label.

    Attributes:
        modules: those whose sources are part of the key.
        has_dynamic_import: whether one of them imports by a name that only its run tells.
        environ: the environment variables that are part of the key.
    """

    key: str
    parts: dict[str, str] = field(repr=False)
    modules: frozenset[str] = field(default=frozenset(), repr=False)
    has_dynamic_import: bool = field(default=False, repr=False)
    environ: frozenset[str] = field(default=frozenset(), repr=False)

    def differing_parts(self, other: dict[str, str]) -> tuple[str, ...]:
        labels = sorted(self.parts.keys() | other.keys())
        return tuple(label for label in labels if self.parts.get(label) != other.get(label))


class Fingerprint:
    """Computes direct keys for one compile function.

    What the function reads is found once and kept for as long as its names lead to the same values.
    """

    def __init__(self, function: Callable[..., Any], ignore: tuple[str, ...], environ: tuple[str, ...]) -> None:
        self.function: Final = function
        self._ignore = ignore
        self._environ = environ
        self._signature = inspect.signature(function)
        self._imported_ns = time.time_ns()
        self._reach: Reach | None = None

    def reach(self) -> Reach:
        """What the function reads, as it is now."""
        reach = self._reach
        if reach is None or not holds(reach.check):
            reach = self._reach = Reach([self.function], self._ignore)
        return reach

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> inspect.BoundArguments:
        """The call's arguments with defaults filled in. Raises TypeError as the call itself would."""
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return bound

    def compute(
        self, bound: inspect.BoundArguments, backend: Backend, backend_name: str, source_dirs: tuple[str, ...]
    ) -> tuple[DirectKey, Check | None]:
        """The key, and a quick check that whatever it depends on besides the arguments is still the same.

        The check is None where there is nothing to check; it may raise NameError or AttributeError where a name is
        gone. Raises UnkeyableError saying what has no canonical form, or which source no longer says what runs.
        """
        function, reach = self.function, self.reach()
        arguments, argument_reach = self._encode_arguments(bound)
        modules = reach.modules | argument_reach.modules | {function.__module__}
        sources = sources_of((name for name in modules if _is_importable_module(name)), source_dirs)
        digests = sources.digests()
        edited = sources.edited_after_import(function.__module__, self._imported_ns)
        if edited is not None:
            raise UnkeyableError(f"{edited} was edited after it was imported, so that it does not say what runs now")
        environment = self._environment(sources)
        target = backend.target()
        parts = {
            "schema": SCHEMA,
            "function": f"{function.__module__}.{function.__qualname__}".encode(),
            "code": canonical.encode_code(function.__code__),
            "captured": canonical.encode(function.__closure__ or ()),
            "arguments": arguments,
            "globals": canonical.encode(sorted({**reach.encoded(), **argument_reach.encoded()}.items())),
            "sources": canonical.encode(sorted(digests.items())),
            "environment": canonical.encode(environment),
            "backend": backend_name.encode(),
            "toolchain": canonical.encode(sorted(backend.toolchain().items())),
            "options": backend.options().encode(),
            "target": canonical.encode((target.arch, target.host_machine, target.host_features)),
        }
        short = {label: hashlib.sha256(part).hexdigest()[:16] for label, part in parts.items()}
        check = all_of(reach.check, argument_reach.check, environ_check(name for name, _ in environment))
        key = canonical.digest(parts)
        names = frozenset(name for name, _ in environment)
        return DirectKey(key, short, frozenset(digests), sources.has_dynamic_import(), names), check

    def _encode_arguments(self, bound: inspect.BoundArguments) -> tuple[bytes, Reach]:
        arguments = []
        for name, value in bound.arguments.items():
            kind = self._signature.parameters[name].kind
            if kind is inspect.Parameter.VAR_KEYWORD:
                value = tuple(sorted(value.items()))  # keywords have no order that means anything
            try:
                arguments.append((name, canonical.encode(value)))
            except UnkeyableError as error:
                raise UnkeyableError(f"of its argument {name}: {error}") from error
        return canonical.encode(arguments), Reach(list(_parts(bound.arguments)), self._ignore)

    def _environment(self, sources: SourceSet) -> list[tuple[str, str | None]]:
        # What a backend pins in compile processes is part of its target, and set there for every function.
        names = (sources.environ() - _not_keyed()) | set(self._environ)
        return [(name, os.environ.get(name)) for name in sorted(names)]


def _not_keyed() -> frozenset[str]:
    pinned = {name for backend in preload.registered_backends() for name in find_backend(backend).worker_environ()}
    return NOT_KEYED | pinned


def call_check(types: tuple[type, ...], rest: Check | None) -> Callable[..., bool]:
    """A function of a call's values: are they of these very types, and does `rest` hold?

    It runs on each in-process hit, so it is generated: a comparison by identity costs some 15 ns, a loop over them ten
    times that.
    """
    template = _call_check_template(len(types), rest is not None)
    defaults = types if rest is None else (*types, rest)
    return FunctionType(template.__code__, {}, "check", defaults)


@functools.cache
def _call_check_template(arity: int, has_rest: bool) -> FunctionType:
    values, kinds = [f"v{i}" for i in range(arity)], [f"k{i}" for i in range(arity)]
    rest = ["rest"] if has_rest else []
    tests = [f"type({value}) is {kind}" for value, kind in zip(values, kinds, strict=True)]
    tests += ["rest()"] if has_rest else []
    scope: dict[str, Any] = {}
    parameters = [*values, *(f"{name}=None" for name in (*kinds, *rest))]
    exec(f"def check({', '.join(parameters)}): return {' and '.join(tests) or 'True'}", scope)
    template = scope["check"]
    assert isinstance(template, FunctionType)
    return template


def all_of(*checks: Check | None) -> Check | None:
    present = [check for check in checks if check is not None]
    if len(present) < 2:
        return present[0] if present else None
    return lambda: all(check() for check in present)


def holds(check: Check | None) -> bool:
    """Whether a check holds; a name that is gone is a change as well."""
    try:
        return check is None or check()
    except (NameError, AttributeError, KeyError, TypeError):
        return False


def _parts(arguments: dict[str, Any]) -> list[Any]:
    """Arguments that may lead to code of the project: the rest cannot."""
    return [v for v in arguments.values() if not isinstance(v, (type(None), bool, int, float, complex, str, bytes))]


def _is_importable_module(name: str) -> bool:
    return name != "__main__" and module_file(name) is not None


def is_flat_value(value: Any) -> bool:
    """Whether equal type and equality alone say that two such values mean the same."""
    kind = type(value)
    if kind in (int, bool, str, bytes, type(None)) or isinstance(value, type):
        return True
    if kind is float:
        return bool(value != 0.0)  # 0.0 == -0.0
    return isinstance(value, enum.Enum) or f"{kind.__module__}.{kind.__qualname__}" == "torch.dtype"


def describe_call(function: Callable[..., Any], bound: inspect.BoundArguments) -> str:
    """The call as a person would write it, in one line of at most 120 characters."""
    values = []
    for name, value in bound.arguments.items():
        text = value.__name__ if isinstance(value, type) else saferepr(value)
        values.append(f"{name}={text}" if len(text) <= 40 else f"{name}={text[:37]}...")
    text = f"{function.__qualname__}({', '.join(values)})".replace("\n", " ")
    return text if len(text) <= 120 else text[:117] + "..."


def saferepr(value: Any) -> str:
    """`repr`, or the type's name where a foreign `__repr__` raises."""
    try:
        return repr(value)
    except Exception as error:  # noqa: BLE001 - whatever a foreign __repr__ raises
        return f"<{type(value).__name__}, whose repr raises {type(error).__name__}>"


def source_path(function: Callable[..., Any]) -> str:
    """The file that the function was defined in; empty where there is none."""
    path = function.__code__.co_filename
    return os.path.abspath(path) if os.path.exists(path) else ""


def files_seen(direct: DirectKey, before: set[str], base: str) -> dict[str, tuple[str, str]]:
    """Files of the project besides the static sources that a compile used: module -> (path from `base`, digest).

    `before` names the modules that were loaded when it began. Those loaded since count; and of a function that imports
    by a computed name the others as well, since an import of what is loaded leaves no trace. Raises UnkeyableError
    where one of these was edited after its import.
    """
    names = set(sys.modules) - direct.modules
    if not direct.has_dynamic_import:
        names -= before
    found = {}
    for name in sorted(names):
        path = getattr(sys.modules[name], "__file__", None)
        is_test = name in before and name.rpartition(".")[2].startswith(("test_", "conftest"))
        if is_test or path is None or not is_project_file(path) or name.split(".")[0] == "pytest_quack":
            continue
        if name in before and SourceSet(((name, path),)).edited_after_import("", 0) is not None:
            raise UnkeyableError(f"{path} was edited after it was imported, so that it does not say what runs now")
        found[name] = (os.path.relpath(path, base), file_digest(path))
    return found


def environ_seen(direct: DirectKey, names: set[str]) -> dict[str, str]:
    """Variables that a compile read besides those of its key: name -> digest of its value."""
    return environ_digests(names - direct.environ - _not_keyed())


def file_digest(path: str) -> str:
    """The digest of what a source file says; empty where it cannot be read."""
    try:
        return SourceSet((("", path),)).digests()[""]
    except UnkeyableError:
        return ""
