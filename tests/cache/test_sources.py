"""The sources that a module reaches: all that count, none that does not, and their meaning rather than their text."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import pytest_quack
from pytest_quack.cache import sources
from pytest_quack.cache.sources import is_project_file, module_file, sources_of
from pytest_quack.errors import UnkeyableError
from support.inner import ROOT

pytestmark = pytest.mark.light


class Project:
    """Files below a folder of their own, which is where modules are looked up first; forgotten at the end."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir()

    def write(self, name: str, text: str = "") -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return path

    def package(self, *folders: str) -> None:
        for folder in folders:
            self.write(f"{folder}/__init__.py")

    def reached(self, *modules: str, extra_dirs: tuple[str, ...] = ()) -> set[str]:
        forget()
        return {name for name, _ in sources_of(modules, extra_dirs).files}

    def digests(self, *modules: str, extra_dirs: tuple[str, ...] = ()) -> dict[str, str]:
        return sources_of(modules, extra_dirs).digests()


def forget() -> None:
    sources._sets.clear()
    sources._scans.clear()
    sources._graph.cache_clear()
    sys.path_importer_cache.clear()


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    monkeypatch.syspath_prepend(tmp_path / "project")
    project = Project(tmp_path / "project")
    before = set(sys.modules)
    forget()
    yield project
    for name in set(sys.modules) - before:
        path = getattr(sys.modules[name], "__file__", None) or ""
        if path.startswith(str(tmp_path)):
            del sys.modules[name]
    forget()


def test_flat_modules_are_followed_through_every_form_of_import(project: Project) -> None:
    project.write(
        "root.py",
        """
        import one
        import two as other
        from three import name
        from four import *
        def compile_it():
            import five
            import importlib
            importlib.import_module("six")
            __import__("seven")
        class K:
            from eight import tile
        if True:
            try:
                import nine
            except ImportError:
                import ten
        """,
    )
    numbers = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    for name in (*numbers, "unrelated"):
        project.write(f"{name}.py", "tile = name = 1")
    assert project.reached("root") == {"root", *numbers}


def test_a_package_is_followed_module_by_module_with_the_inits_on_the_way(project: Project) -> None:
    project.package("pkg", "pkg/deep", "pkg/deep/er", "pkg/other")
    project.write("pkg/a.py", "from pkg.deep.er import leaf\nfrom . import sibling\nfrom .deep.tool import f")
    project.write("pkg/deep/er/leaf.py", "from ...base import CONST\nfrom .. import level_two")
    for name in ("sibling", "base", "deep/tool", "deep/level_two", "other/unrelated", "unrelated"):
        project.write(f"pkg/{name}.py", "f = CONST = 1")
    assert project.reached("pkg.a") == {
        *("pkg", "pkg.a", "pkg.sibling", "pkg.base"),
        *("pkg.deep", "pkg.deep.tool", "pkg.deep.level_two", "pkg.deep.er", "pkg.deep.er.leaf"),
    }


def test_what_an_init_on_the_way_imports_counts(project: Project) -> None:
    project.write("pkg/__init__.py", "from .common import x\nimport outside")
    project.write("pkg/common.py", "x = 1")
    project.write("pkg/a.py")
    project.write("outside.py")
    assert project.reached("pkg.a") == {"pkg", "pkg.common", "pkg.a", "outside"}


@pytest.mark.parametrize(
    "statement",
    [
        "from sibling import helper",
        "from sibling.helper import f",
        "import sibling.helper",
        "import sibling.helper as h",
        "import importlib; importlib.import_module('sibling.helper')",
    ],
)
@pytest.mark.parametrize("importer", ["flat", "pkg.inside"])
def test_a_submodule_of_a_sibling_package_counts(project: Project, statement: str, importer: str) -> None:
    project.package("pkg", "sibling")
    project.write(importer.replace(".", "/") + ".py", statement)
    project.write("sibling/helper.py", "from .base import f")
    project.write("sibling/base.py", "f = 1")
    project.write("sibling/unrelated.py")
    own = {"flat"} if importer == "flat" else {"pkg", "pkg.inside"}
    assert project.reached(importer) == own | {"sibling", "sibling.helper", "sibling.base"}


def test_a_name_from_a_module_is_not_taken_for_a_module_beside_it(project: Project) -> None:
    project.package("pkg")
    project.write("root.py", "from pkg.tools import checks")
    project.write("pkg/tools.py", "checks = 1")
    project.write("pkg/checks.py")
    assert project.reached("root") == {"root", "pkg", "pkg.tools"}


@pytest.mark.parametrize("is_loaded", [False, True])
def test_namespace_packages_are_followed(project: Project, is_loaded: bool) -> None:
    project.write("root.py", "from space.inner.helper import f\nfrom space import flat")
    project.write("space/inner/helper.py", "from space.inner import base\nf = 1")
    project.write("space/inner/base.py")
    project.write("space/flat.py")
    if is_loaded:
        __import__("root")
    assert project.reached("root") == {"root", "space.inner.helper", "space.inner.base", "space.flat"}


def test_a_computed_import_makes_the_whole_package_count(project: Project) -> None:
    project.package("pkg", "pkg/plugins")
    project.write("pkg/a.py", "import importlib\ndef load(name):\n    importlib.import_module(f'pkg.plugins.{name}')")
    project.write("pkg/plugins/red.py", "import beside")
    project.write("pkg/far.py")
    project.write("beside.py")
    everything = {"pkg", "pkg.a", "pkg.plugins", "pkg.plugins.red", "pkg.far", "beside"}
    assert project.reached("pkg.a") == everything
    project.write("pkg/__init__.py", "import importlib\nfor n in ('red',):\n    importlib.import_module('.' + n, 'x')")
    project.write("pkg/a.py", "")
    assert project.reached("pkg.a") == everything


LAZY = """
    from importlib import import_module
    from typing import TYPE_CHECKING

    if TYPE_CHECKING:
        from .softmax import softmax

    def __getattr__(name):
        return getattr(import_module(f"{__name__}.{name}"), name)
"""


def test_lazy_names_of_a_package_count_for_who_imports_them_only(project: Project) -> None:
    project.write("pkg/__init__.py", LAZY)
    project.write("pkg/softmax.py", "from pkg.tool import t")
    project.write("pkg/gemm.py", "from .tool import t")
    project.write("pkg/user.py", "from pkg import softmax")
    project.write("pkg/tool.py", "t = 1")
    project.write("outside.py", "import pkg")
    assert project.reached("pkg.gemm") == {"pkg", "pkg.gemm", "pkg.tool"}
    assert {"pkg.softmax", "pkg.tool"} <= project.reached("pkg.user")
    assert {"pkg.softmax", "pkg.gemm", "pkg.tool"} <= project.reached("outside")


def test_editing_softmax_does_not_touch_rmsnorm_in_our_own_kernels() -> None:
    forget()
    softmax = {name for name, _ in sources_of(["quack_kernels.kernels.softmax.compile"]).files}
    rmsnorm = {name for name, _ in sources_of(["quack_kernels.kernels.rmsnorm.compile"]).files}
    assert "quack_kernels.kernels.softmax.host" in softmax - rmsnorm
    assert "quack_kernels.kernels.rmsnorm.host" in rmsnorm - softmax
    assert "quack_kernels.host.reduction" in softmax & rmsnorm
    assert not any("test" in name or ".ops" in name for name in softmax | rmsnorm)


def test_imports_for_type_checkers_do_not_count(project: Project) -> None:
    text = "import typing\nif typing.TYPE_CHECKING:\n    import {0}\nelse:\n    import {1}"
    project.package("pkg")
    project.write("pkg/a.py", text.format("pkg.types_only", "pkg.real"))
    project.write("flat.py", text.format("pkg.types_only", "pkg.real"))
    project.write("pkg/types_only.py")
    project.write("pkg/real.py")
    assert project.reached("pkg.a") == {"pkg", "pkg.a", "pkg.real"}
    assert project.reached("flat") == {"flat", "pkg", "pkg.real"}


def test_a_syntax_error_elsewhere_in_the_package_changes_nothing(project: Project) -> None:
    project.package("pkg")
    project.write("pkg/a.py", "from pkg.helper import f")
    project.write("pkg/helper.py", "from .base import f")
    project.write("pkg/base.py", "f = 1")
    project.write("pkg/broken.py", "def (:\n")
    project.write("pkg/unrelated.py")
    assert project.reached("pkg.a") == {"pkg", "pkg.a", "pkg.helper", "pkg.base"}


def test_modules_that_import_each_other_are_followed_once(project: Project) -> None:
    project.write("a.py", "import b")
    project.write("b.py", "import a")
    assert project.reached("a") == project.reached("b") == {"a", "b"}


def test_neither_the_interpreter_nor_installed_distributions_nor_this_plugin_count(project: Project) -> None:
    project.write("root.py", "import os, json, pytest, filelock, pytest_quack.cache.key, absent_module")
    assert project.reached("root") == {"root"}
    assert not is_project_file(os.__file__)
    assert not is_project_file(pytest.__file__)
    assert not is_project_file(None)
    assert not is_project_file("/somewhere/module.so")
    assert is_project_file(str(project.root / "root.py"))


def test_an_installed_package_counts_where_the_compile_function_is_in_it() -> None:
    reached = {name for name, _ in sources_of(["pluggy._manager"]).files}
    assert {"pluggy", "pluggy._manager", "pluggy._hooks"} <= reached
    assert all(name.split(".")[0] == "pluggy" for name in reached)


def test_a_module_that_is_not_loaded_is_found_as_an_import_would(project: Project) -> None:
    project.package("pkg")
    path = project.write("pkg/late.py")
    assert module_file("pkg.late") == str(path)
    assert module_file("pkg.absent") is None
    assert module_file("pkg.late.inside_a_module") is None
    assert module_file("absent.module") is None
    assert module_file("sys") is None


@pytest.fixture
def chain(project: Project) -> Project:
    project.write("root.py", "from pkg.helper import f")
    project.package("pkg")
    project.write("pkg/helper.py", "from .base import g\n\ndef f(x):\n    return g(x)  # twice\n")
    project.write("pkg/base.py", "def g(x):\n    return x + 1\n")
    project.write("pkg/unrelated.py", "y = 1")
    return project


NO_OPS: dict[str, Callable[[Project], object]] = {
    "nothing": lambda project: None,
    "touch": lambda project: os.utime(project.root / "pkg/helper.py"),
    "written again": lambda project: project.write("pkg/base.py", (project.root / "pkg/base.py").read_text()),
    "comment": lambda project: project.write("pkg/base.py", "# why\ndef g(x):\n    # because\n    return x + 1\n"),
    "layout": lambda project: project.write("pkg/base.py", "\n\ndef g(\n    x\n):\n    return (x  +  1)\n"),
    "unrelated module": lambda project: project.write("pkg/unrelated.py", "y = 2"),
    "new module": lambda project: project.write("pkg/new.py", "z = 2"),
    "syntax error elsewhere": lambda project: project.write("pkg/broken.py", "def (:"),
}
EDITS: dict[str, Callable[[Project], object]] = {
    "helper": lambda project: project.write("pkg/helper.py", "from .base import g\n\ndef f(x):\n    return -g(x)\n"),
    "helper of the helper": lambda project: project.write("pkg/base.py", "def g(x):\n    return x + 2\n"),
    "type of a number": lambda project: project.write("pkg/base.py", "def g(x):\n    return x + 1.0\n"),
    "init on the way": lambda project: project.write("pkg/__init__.py", "import os"),
    "own module": lambda project: project.write("root.py", "from pkg.helper import f\nN = 1"),
    "another import": lambda project: project.write(
        "pkg/base.py", "from .unrelated import y\n\ndef g(x): return x + y"
    ),
    "syntax error in reach": lambda project: project.write("pkg/base.py", "def g(x:"),
    "gone": lambda project: (project.root / "pkg/base.py").unlink(),
}


@pytest.mark.parametrize("edit", NO_OPS.values(), ids=NO_OPS)
@pytest.mark.parametrize("is_fresh", [False, True], ids=["one process", "fresh"])
def test_a_change_without_meaning_keeps_the_digests(
    chain: Project, edit: Callable[[Project], object], is_fresh: bool
) -> None:
    before = chain.digests("root")
    edit(chain)
    if is_fresh:
        forget()
    assert chain.digests("root") == before


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
@pytest.mark.parametrize("is_fresh", [False, True], ids=["one process", "fresh"])
def test_a_real_change_changes_the_digests(chain: Project, edit: Callable[[Project], object], is_fresh: bool) -> None:
    before = chain.digests("root")
    edit(chain)
    if is_fresh:
        forget()
    assert chain.digests("root") != before


def test_an_edit_that_keeps_size_and_time_is_seen(chain: Project) -> None:
    before = chain.digests("root")
    path = chain.root / "pkg/base.py"
    status = path.stat()
    path.write_text(path.read_text().replace("1", "2"))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert chain.digests("root") != before


def test_a_new_import_is_followed_after_an_edit_in_the_same_process(chain: Project) -> None:
    before = chain.digests("root")
    chain.write("pkg/helper.py", "from .base import g\nfrom . import unrelated\n\ndef f(x):\n    return g(x)\n")
    between = chain.digests("root")
    assert between.keys() - before.keys() == {"pkg.unrelated"}
    chain.write("pkg/unrelated.py", "y = 3")
    assert chain.digests("root") != between


def test_moving_the_project_changes_nothing(chain: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = chain.digests("root", extra_dirs=(str(chain.root / "pkg"),))
    moved = tmp_path / "elsewhere" / "renamed"
    moved.parent.mkdir()
    chain.root.rename(moved)
    monkeypatch.syspath_prepend(moved)
    forget()
    assert chain.digests("root", extra_dirs=(str(moved / "pkg"),)) == before


def test_added_directories_count_with_every_python_file_below(project: Project, tmp_path: Path) -> None:
    project.write("root.py")
    folders = [tmp_path / side / "lib" for side in ("left", "right")]
    for folder in folders:
        (folder / "deep").mkdir(parents=True)
        (folder / "deep" / "x.py").write_text("x = 1")
        (folder / "data.txt").write_text("x")
    extra = tuple(map(str, folders))
    before = project.digests("root", extra_dirs=extra)
    assert len(before) == 3
    (folders[0] / "data.txt").write_text("y")
    assert project.digests("root", extra_dirs=extra) == before
    seen = [before]
    for folder in folders:  # of one name, and with files of one name
        (folder / "deep" / "x.py").write_text("x = 2")
        forget()
        seen.append(project.digests("root", extra_dirs=extra))
    assert seen[0] != seen[1] != seen[2] != seen[0]


def test_names_read_from_the_environment_are_found_in_every_form(project: Project) -> None:
    project.write("root.py", "import helper\nimport os\nA = os.environ['A1']\nB = os.environ.get('A2', '0')")
    project.write(
        "helper.py",
        """
        import os
        from os import environ, getenv
        def f():
            del os.environ["A3"]
            return os.getenv("A4"), getenv("A5"), environ["A6"], environ.get("A7"), "A8" in os.environ, \
                "A9" not in environ, os.environ.setdefault("A10", "x"), os.environ.pop("A11")
        other = {}.get("NOT")
        """,
    )
    forget()
    assert sources_of(["root"]).environ() == {f"A{i}" for i in range(1, 12)}


def test_a_source_that_cannot_be_read_is_a_refusal_naming_it(chain: Project) -> None:
    found = sources_of(["root"])
    (chain.root / "pkg" / "base.py").unlink()
    with pytest.raises(UnkeyableError, match=r"base\.py cannot be read"):
        found.digests()


def test_an_edit_after_the_import_is_detected(chain: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    import_ns = time.time_ns()
    monkeypatch.setattr(pytest_quack, "IMPORTED_NS", import_ns)
    __import__("root")
    found = sources_of(["root"])
    later = import_ns + 10**9
    assert found.edited_after_import("root", later) is None
    assert found.edited_after_import("root", 0) == str(chain.root / "root.py")
    base = chain.root / "pkg" / "base.py"
    text, status = base.read_text(), base.stat()
    until_the_clock_of_files_moves(chain.root, import_ns)
    base.write_text(text.replace("1", "2"))
    assert found.edited_after_import("root", later) == str(base)
    os.utime(base, ns=(status.st_atime_ns, status.st_mtime_ns))  # as a copy that keeps times does
    assert found.edited_after_import("root", later) == str(base)


def test_an_edit_of_a_module_that_is_not_loaded_is_no_edit_after_import(
    chain: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pytest_quack, "IMPORTED_NS", 0)
    assert sources_of(["root"]).edited_after_import("root", 0) is None


def until_the_clock_of_files_moves(folder: Path, after_ns: int) -> None:
    """A file system stamps files with a clock of coarse ticks, up to 10 ms behind."""
    probe = folder / "probe"
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        probe.write_text("x")
        if probe.stat().st_mtime_ns > after_ns:
            return
    raise AssertionError("the clock of the file system stands still")


def test_scanning_imports_nothing(project: Project) -> None:
    """A scan must not run the code that it reads."""
    project.package("pkg")
    project.write("pkg/a.py", "from pkg import trap\nimport flat_trap")
    project.write("pkg/trap.py", "raise SystemExit('imported')")
    project.write("flat_trap.py", "raise SystemExit('imported')")
    script = (
        "import sys; from pytest_quack.cache.sources import sources_of; "
        "print(len(sources_of(['pkg.a']).digests()), 'pkg' in sys.modules)"
    )
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(project.root), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=Path(pytest_quack.__file__).parent.parent, env=environ, text=True,
        capture_output=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout.split() == ["4", "False"]


FORKED = """
import os, signal, sys
sys.path.insert(0, {folder!r})
from pytest_quack.cache.sources import sources_of

assert len(sources_of(["pkg_a.one"]).files) == 3
pid = os.fork()
if pid == 0:
    signal.alarm(20)
    os._exit(0 if len(sources_of(["pkg_b.one"]).files) == 3 else 1)
assert os.waitpid(pid, 0)[1] == 0
"""


def test_a_child_made_by_fork_finds_sources_after_its_parent_did(tmp_path: Path) -> None:
    for name in ("pkg_a", "pkg_b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
        (tmp_path / name / "one.py").write_text(f"from {name} import two\n")
        (tmp_path / name / "two.py").write_text("X = 1\n")
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", FORKED.format(folder=str(tmp_path))], env=environ, timeout=60, check=True)
