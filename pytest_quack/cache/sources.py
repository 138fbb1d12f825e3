"""Which source files a compile function depends on, and what they say.

The sources of a module are the transitive closure of its imports inside the project, package `__init__` files on the
way included. grimp finds it for packages; flat modules, conftest files and test modules are scanned here. A file
counts by its syntax tree, so that a comment or a moved line changes nothing. Files outside the project (the standard
library, installed distributions) count by version in the toolchain part of a key, not here; a module's own top-level
package always counts as the project, even where it is installed.

Static imports are not everything: a constant `importlib.import_module("x")` is followed, and a call with a computed
name makes the whole package count. Inside a package's `__getattr__`, such a call counts for modules that import names
from the package, not for those that only lie below it. Imports under `if TYPE_CHECKING` never happen and do not count.
Names that the sources read from the environment are collected as well.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.machinery
import os
import site
import sys
import sysconfig
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

import pytest_quack
from pytest_quack.errors import UnkeyableError

_OWN_PACKAGE = "pytest_quack"
Stamp: TypeAlias = tuple[int, int, int]


@functools.cache
def _installed_prefixes() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    names = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib") if name in paths}
    names.update(site.getsitepackages() if hasattr(site, "getsitepackages") else ())
    names.add(site.getusersitepackages())
    return tuple(sorted({os.path.realpath(name) + os.sep for name in names} | {name + os.sep for name in names}))


def is_project_file(path: str | None) -> bool:
    """Whether a file belongs to the project rather than to the interpreter or an installed distribution."""
    return path is not None and path.endswith(".py") and not path.startswith(_installed_prefixes())


def module_file(name: str) -> str | None:
    """The source file of a module, loaded or not; None where it has none or cannot be found."""
    module = sys.modules.get(name)
    if module is not None:
        return getattr(module, "__file__", None)
    parent, _, _ = name.rpartition(".")
    try:
        if parent:
            search = _search_path(parent)
            if search is None:
                return None
            spec = importlib.machinery.PathFinder.find_spec(name, search)
        else:
            spec = importlib.machinery.PathFinder.find_spec(name)
    except (ImportError, ValueError, KeyError):  # KeyError: a namespace package inside a package that is not loaded
        return None
    return spec.origin if spec is not None and spec.has_location else None


def _search_path(package: str) -> list[str] | None:
    """Where the modules of a package are, loaded or not, with or without an `__init__`; None where it is none."""
    module = sys.modules.get(package)
    if module is not None:
        path = getattr(module, "__path__", None)
        return list(path) if path is not None else None
    parent, _, last = package.rpartition(".")
    search = _search_path(parent) if parent else None
    if parent and search is None:
        return None
    try:
        spec = importlib.machinery.PathFinder.find_spec(package, search)
    except KeyError:
        return [folder for folder in (os.path.join(above, last) for above in search or ()) if os.path.isdir(folder)]
    locations = spec.submodule_search_locations if spec is not None else None
    return list(locations) if locations is not None else None


@dataclass(slots=True)
class _Scan:
    """What one file says: read again only when its stat changes."""

    stamp: Stamp
    digest: str
    imports: tuple[tuple[str, int, tuple[str, ...]], ...]
    has_dynamic_import: bool
    has_lazy_names: bool
    environ: frozenset[str]


_scans: dict[str, _Scan] = {}
_scans_lock = threading.Lock()


def _stamp(path: str) -> Stamp:
    """Size, file and when it changed: the later of the two times, since copying may set the first one back."""
    status = os.stat(path)
    return max(status.st_mtime_ns, status.st_ctime_ns), status.st_size, status.st_ino


def _scan(path: str) -> _Scan:
    stamp = _stamp(path)
    known = _scans.get(path)
    if known is not None and known.stamp == stamp:
        return known
    with open(path, "rb") as file:
        text = file.read()
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        scan = _Scan(stamp, hashlib.sha256(text).hexdigest(), (), True, False, frozenset())
    else:
        visitor = _Visitor()
        visitor.visit(tree)
        meaning = hashlib.sha256(ast.dump(tree).encode("utf-8", "surrogatepass")).hexdigest()
        environ = frozenset(visitor.environ)
        is_dynamic, is_lazy = visitor.has_dynamic_import, visitor.has_lazy_names
        scan = _Scan(stamp, meaning, tuple(visitor.imports), is_dynamic, is_lazy, environ)
    with _scans_lock:
        _scans[path] = scan
    return scan


class _Visitor(ast.NodeVisitor):
    """Collects imports, dynamic imports and names read from the environment."""

    def __init__(self) -> None:
        self.imports: list[tuple[str, int, tuple[str, ...]]] = []
        self.has_dynamic_import = False
        self.has_lazy_names = False
        self.environ: set[str] = set()

    def visit_Module(self, node: ast.Module) -> None:
        for statement in node.body:
            was_dynamic = self.has_dynamic_import
            self.visit(statement)
            if isinstance(statement, ast.FunctionDef) and statement.name == "__getattr__":
                self.has_lazy_names |= self.has_dynamic_import and not was_dynamic
                self.has_dynamic_import = was_dynamic

    def visit_If(self, node: ast.If) -> None:
        if _last_name(node.test) == "TYPE_CHECKING":
            for statement in node.orelse:
                self.visit(statement)
        else:
            self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        self.imports += [(alias.name, 0, ()) for alias in node.names]

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        self.imports.append((node.module or "", node.level, tuple(alias.name for alias in node.names)))

    def visit_Call(self, node: ast.Call) -> None:
        callee = _last_name(node.func)
        if callee in {"import_module", "__import__"}:
            name = _constant(node.args[0]) if node.args else None
            if name is None or name.startswith("."):
                self.has_dynamic_import = True
            else:
                self.imports.append((name, 0, ()))
        elif callee == "getenv" or (callee in {"get", "pop", "setdefault"} and _is_environ(node.func)):
            self._note_environ(node.args[0] if node.args else None)
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        if _last_name(node.value) == "environ":
            self._note_environ(node.slice)
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        if any(_last_name(other) == "environ" for other in node.comparators):
            self._note_environ(node.left)
        self.generic_visit(node)

    def _note_environ(self, node: ast.expr | None) -> None:
        name = _constant(node)
        if name is not None:
            self.environ.add(name)


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _is_environ(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and _last_name(node.value) == "environ"


def _constant(node: ast.expr | None) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


@dataclass(frozen=True, slots=True)
class SourceSet:
    """The sources that some modules reach: module name -> file, in the order of the names."""

    files: tuple[tuple[str, str], ...]

    def digests(self) -> dict[str, str]:
        """What each module says now, by module name. Raises UnkeyableError where a file cannot be read."""
        try:
            return {name: _scan(path).digest for name, path in self.files}
        except OSError as error:
            raise UnkeyableError(f"its source {error.filename} cannot be read ({error.strerror})") from error

    def environ(self) -> frozenset[str]:
        """The environment variables that the sources read by a constant name."""
        return frozenset().union(*(_scan(path).environ for _, path in self.files))

    def has_dynamic_import(self) -> bool:
        """Whether one of them imports by a name that only its run tells."""
        return any(_scan(path).has_dynamic_import for _, path in self.files)

    def edited_after_import(self, own_module: str, own_imported_ns: int) -> str | None:
        """A file that changed after it was imported, so that it does not say what runs; None if there is none.

        When a module was imported is not recorded anywhere. Of the compile function's own module it is known from the
        moment of its decoration; any other is taken to be imported when this package was, the earliest it can be.
        """
        for name, path in self.files:
            imported_ns = own_imported_ns if name == own_module else pytest_quack.IMPORTED_NS
            if name in sys.modules and os.path.exists(path) and _stamp(path)[0] > imported_ns:
                return path
        return None


@dataclass(slots=True)
class _Closure:
    """Walks imports from some modules; `home` are top-level names that count as the project wherever they are."""

    home: frozenset[str]
    files: dict[str, str] = field(default_factory=dict)
    _named: set[str] = field(default_factory=set)

    def add(self, name: str) -> None:
        queue = [(name, True)]
        while queue:
            name, is_named = queue.pop()
            top = name.split(".")[0]
            if top == _OWN_PACKAGE:
                continue
            if name not in self.files:
                path = module_file(name)
                if path is None or not self._counts(name, path):
                    continue
                self.files[name] = path
                queue += [(other, False) for other in _ancestors(name)]
                queue += [(other, True) for other in self._imports_of(name, path)]
            if is_named and name not in self._named:  # rather than passed on the way to what lies below it
                self._named.add(name)
                if _scan(self.files[name]).has_lazy_names:
                    queue += [(other, False) for other in _modules_below(top)]

    def _counts(self, name: str, path: str) -> bool:
        return path.endswith(".py") and (is_project_file(path) or name.split(".")[0] in self.home)

    def _imports_of(self, name: str, path: str) -> list[str]:
        known = _grimp_imports(name)
        try:
            scan = _scan(path)
        except OSError as error:
            raise UnkeyableError(f"its source {path} cannot be read ({error.strerror})") from error
        top = name.split(".")[0]
        is_package = os.path.basename(path) == "__init__.py"
        found = list(known or ())
        for module, level, names in scan.imports:
            base = absolute_name(name, is_package, module, level)
            if known is None or scan.has_dynamic_import or base.split(".")[0] != top:
                found += [base, *(f"{base}.{part}" if base else part for part in names if part != "*")]
        if scan.has_dynamic_import:
            found += _modules_below(top)
        return [module for module in found if module]


def _ancestors(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts))]


def absolute_name(name: str, is_package: bool, module: str, level: int) -> str:
    """The absolute name of what module `name` imports as `module`, with `level` leading dots."""
    if level == 0:
        return module
    parts = name.split(".")
    keep = len(parts) - level + (1 if is_package else 0)
    return ".".join([*parts[: max(keep, 0)], *([module] if module else [])])


def _modules_below(top: str) -> list[str]:
    graph = _graph(top)
    if graph is not None:
        return sorted(graph)
    root = module_file(top)
    if root is None or os.path.basename(root) != "__init__.py":
        return []
    base, found = os.path.dirname(root), []
    for folder, _, names in os.walk(base):
        for file in names:
            if file.endswith(".py"):
                parts = os.path.relpath(os.path.join(folder, file), base)[:-3].split(os.sep)
                found.append(".".join([top, *parts]).removesuffix(".__init__"))
    return found


# grimp works with threads of its own. In a child made by fork of a process that has used it they are gone, and it would
# wait for them for ever.
_has_used_grimp = False
_is_grimp_unusable = False


def _note_fork() -> None:
    global _is_grimp_unusable
    _is_grimp_unusable = _has_used_grimp


os.register_at_fork(after_in_child=_note_fork)


@functools.cache
def _graph(top: str) -> dict[str, tuple[str, ...]] | None:
    """Direct imports inside the package `top`, by module; None where it is no package that grimp can read."""
    global _has_used_grimp
    path = module_file(top)
    if path is None or os.path.basename(path) != "__init__.py" or _is_grimp_unusable:
        return None
    _has_used_grimp = True
    import grimp
    from grimp.exceptions import GrimpException

    try:
        graph = grimp.build_graph(top, cache_dir=None, exclude_type_checking_imports=True)
    except (GrimpException, SyntaxError, ValueError, OSError):
        return None  # our own scan reads it file by file
    return {module: tuple(sorted(graph.find_modules_directly_imported_by(module))) for module in graph.modules}


def _grimp_imports(name: str) -> tuple[str, ...] | None:
    graph = _graph(name.split(".")[0]) if "." in name else None
    return graph.get(name) if graph is not None else None


def _directory_files(directory: str) -> dict[str, str]:
    files = {}
    for folder, folders, names in os.walk(directory):
        folders[:] = sorted(f for f in folders if not f.startswith(".") and f != "__pycache__")
        for name in sorted(names):
            if name.endswith(".py"):
                path = os.path.join(folder, name)
                files[os.path.relpath(path, directory)] = path
    return files


_sets: dict[tuple[frozenset[str], tuple[str, ...]], tuple[SourceSet, dict[str, Stamp]]] = {}


def sources_of(modules: Iterable[str], extra_dirs: tuple[str, ...] = ()) -> SourceSet:
    """The sources that `modules` reach, and every Python file below `extra_dirs`.

    Found once and kept until one of the files changes. Raises UnkeyableError where a source cannot be read.
    """
    wanted = frozenset(modules), extra_dirs
    known = _sets.get(wanted)
    if known is not None and _stamps(known[0]) == known[1]:
        return known[0]
    if known is not None:
        _graph.cache_clear()
    closure = _Closure(frozenset(name.split(".")[0] for name in wanted[0]))
    for name in sorted(wanted[0]):
        closure.add(name)
    files = dict(closure.files)
    for number, directory in enumerate(extra_dirs):  # by number, since two of them may have one name
        files.update({f"{number}/{name}": path for name, path in _directory_files(directory).items()})
    found = SourceSet(tuple(sorted(files.items())))
    _sets[wanted] = found, _stamps(found)
    return found


def _stamps(sources: SourceSet) -> dict[str, Stamp]:
    stamps = {}
    for _, path in sources.files:
        try:
            stamps[path] = _stamp(path)
        except OSError:
            stamps[path] = (0, 0, 0)
    return stamps
