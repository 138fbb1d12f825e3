"""The package as a whole: its public names, what an import costs, and the plugin that is loaded once and only once."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import pytest_quack
from support.inner import ROOT, TESTS

pytestmark = [pytest.mark.light, pytest.mark.slow]

USAGE_ERROR = 4


def run(command: list[str], cwd: Path, *paths: Path) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("QUACK_", "PYTEST_"))}
    environ["PYTHONPATH"] = os.pathsep.join(map(str, [cwd, *paths, TESTS, ROOT]))
    environ["PYTHONDONTWRITEBYTECODE"] = "1"
    environ["QUACK_CACHE_DIR"] = str(cwd / "cache")
    return subprocess.run([sys.executable, *command], cwd=cwd, env=environ, capture_output=True, text=True, timeout=120)


def said(script: str, cwd: Path) -> list[str]:
    done = run(["-W", "error", "-c", textwrap.dedent(script)], cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


PUBLIC = [
    "CompilePending",
    "CompilePool",
    "KeyState",
    "QuackError",
    "get_active_pool",
    "jit_cache",
    "pool_scope",
    "suppress_pool",
]


def test_marks_of_the_plugins_hooks_are_in_force(pytester: pytest.Pytester) -> None:
    config = pytester.parseconfig("-p", "pytest_quack")
    for name in ("pytest_runtestloop", "pytest_sessionstart", "pytest_sessionfinish"):
        ours = [i for i in getattr(config.hook, name).get_hookimpls() if i.plugin_name == "pytest_quack"]
        assert [implementation.tryfirst for implementation in ours] == [True], name


def test_the_public_names_are_these() -> None:
    assert pytest_quack.__all__ == PUBLIC
    for name in PUBLIC:
        value = getattr(pytest_quack, name)
        assert value.__name__ == name
        assert value.__module__.startswith("pytest_quack.")
    with pytest.raises(AttributeError, match="no attribute 'jit_cahce'"):
        _ = pytest_quack.jit_cahce


HEAVY = "[name for name in ('pytest', '_pytest', 'torch', 'cutlass', 'numpy', 'grimp') if name in sys.modules]"


@pytest.mark.parametrize(
    "statement", ["import pytest_quack", "from pytest_quack import *", "from pytest_quack import jit_cache"]
)
def test_an_import_brings_neither_pytest_nor_torch_nor_a_compiler(tmp_path: Path, statement: str) -> None:
    assert said(f"import sys\n{statement}\nprint(*{HEAVY})", tmp_path) == []


def test_a_call_brings_neither_pytest_nor_torch_nor_a_compiler(tmp_path: Path) -> None:
    script = f"import sys\nfrom support.light import build\nbuild('a')\nheavy = {HEAVY}\nprint(*heavy)"
    assert set(said(script, tmp_path)) <= {"grimp"}


def test_the_plugin_without_a_flag_brings_neither_torch_nor_a_compiler_nor_the_cache(tmp_path: Path) -> None:
    unwanted = {"torch", "cutlass", "grimp", "filelock", "pytest_quack.run", "pytest_quack.cache.decorator"}
    (tmp_path / "test_it.py").write_text(f"import sys\ndef test_it():\n    assert not {unwanted} & set(sys.modules)\n")
    done = run(["-m", "pytest", "-q", "-p", "pytest_quack", "test_it.py"], tmp_path)
    assert "1 passed" in done.stdout, done.stdout + done.stderr


CONFTEST = """
{plugins}
def pytest_report_header(config):
    manager = config.pluginmanager
    ours = [name for name, plugin in manager.list_name_plugin()
            if getattr(plugin, "__name__", "").startswith("pytest_quack")]
    impls = [impl for impl in manager.hook.pytest_runtestloop.get_hookimpls()
             if impl.function.__module__.startswith("pytest_quack")]
    return [f"loaded {{len(ours)}} times", f"hooks {{len(impls)}}"]
"""
WAYS = ["-p", "entry point", "pytest_plugins"]


@pytest.mark.parametrize(
    "ways",
    [ways for count in (1, 2, 3) for ways in itertools.combinations(WAYS, count)],
    ids=" and ".join,
)
def test_the_plugin_is_loaded_once_however_often_it_is_named(tmp_path: Path, ways: tuple[str, ...]) -> None:
    plugins = 'pytest_plugins = ["pytest_quack"]' if "pytest_plugins" in ways else ""
    (tmp_path / "conftest.py").write_text(CONFTEST.format(plugins=plugins))
    (tmp_path / "test_it.py").write_text("def test_it(): pass\n")
    site = tmp_path / "site"
    if "entry point" in ways:
        info = site / "pytest_quack_of_this_test-0.1.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pytest-quack-of-this-test\nVersion: 0.1\n")
        (info / "entry_points.txt").write_text("[pytest11]\npytest_quack = pytest_quack\n")
    # Plugins that are loaded like ours, where they are installed, and warn when they are.
    others = ["-p", "no:asyncio", "-p", "no:benchmark", "-p", "no:randomly"]
    command = ["-m", "pytest", "-W", "error", *others, *(["-p", "pytest_quack"] if "-p" in ways else [])]
    done = run(command, tmp_path, site)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "loaded 1 times" in done.stdout
    assert "hooks 1" in done.stdout
    if "pytest_plugins" not in ways or len(ways) > 1:  # options of a conftest's plugin come too late for the first
        done = run([*command, "--async-compile=1"], tmp_path, site)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.count("loaded 1 times") == 1


# As the plugin of the distribution quack-kernels registers its option.
PEER = """
def pytest_addoption(parser):
    parser.addoption("--async-compile", type=int, nargs="?", const=32, default=None, help="the peer's")
"""
PEER_MODULE = "quack.testing.pytest_plugin"


@pytest.mark.parametrize("order", ["peer first", "ours first"])
def test_the_peers_plugin_beside_ours_is_a_usage_error_that_says_what_to_drop(tmp_path: Path, order: str) -> None:
    path = tmp_path / "quack" / "testing" / "pytest_plugin.py"
    path.parent.mkdir(parents=True)
    for folder in (path.parent, path.parent.parent):
        (folder / "__init__.py").write_text("")
    path.write_text(PEER)
    (tmp_path / "test_it.py").write_text("def test_it(): pass\n")
    plugins = ["-p", PEER_MODULE, "-p", "pytest_quack"]
    if order == "ours first":
        plugins = plugins[2:] + plugins[:2]
    done = run(["-m", "pytest", *plugins, "--async-compile=2"], tmp_path)
    assert done.returncode == USAGE_ERROR, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    for words in ("--async-compile", f"-p {PEER_MODULE}", "-p no:pytest_quack"):
        assert words in done.stderr
