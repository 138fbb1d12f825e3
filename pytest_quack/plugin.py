"""The pytest plugin: every hook, each of which reads, builds or delegates.

Hooks are found through the package itself (`pytest_quack.__dir__`), so that the plugin has one name and is loaded once.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import pytest

from pytest_quack.deferral.internals import swap_hook_exec
from pytest_quack.errors import CacheDirectoryError, SettingsError
from pytest_quack.settings import OPTIONS, resolve

if TYPE_CHECKING:
    from pytest_quack.deferral.xdist_controller import Controller
    from pytest_quack.run import QuackRun

HOOKS: Final = frozenset(
    {
        "pytest_addoption",
        "pytest_configure",
        "pytest_configure_node",
        "pytest_load_initial_conftests",
        "pytest_report_header",
        "pytest_runtestloop",
        "pytest_sessionfinish",
        "pytest_sessionstart",
        "pytest_terminal_summary",
        "pytest_testnodedown",
        "pytest_unconfigure",
        "pytest_xdist_node_collection_finished",
    }
)
_MAIN_OPTION: Final = "--async-compile"


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    _explain_conflicts(pluginmanager.hook.pytest_addoption)
    group = parser.getgroup("async-compile", "compiling kernels while tests run (pytest-quack)")
    for option in OPTIONS:
        if option.flag is not None:
            arguments: dict[str, Any] = {"metavar": option.metavar, "default": None, "help": option.help}
            if option.flag == _MAIN_OPTION:
                arguments.update(nargs="?", const="")  # without a number: the ini file's, the environment's, or auto
            with _explained_conflict():
                group.addoption(option.flag, dest=_dest(option.flag), **arguments)
        if option.ini is not None:
            kind = "linelist" if option.field == "sources" else "string"
            parser.addini(option.ini, option.help, type=kind, default=None)  # type: ignore[arg-type]


def _explain_conflicts(caller: Any) -> None:
    """Have a plugin that is loaded after us and registers our main option too fail with an error that helps."""

    def execute(name: str, methods: Any, kwargs: dict[str, Any], firstresult: bool) -> Any:
        with _explained_conflict():
            return before(name, methods, kwargs, firstresult)

    before = swap_hook_exec(caller, execute)


@contextlib.contextmanager
def _explained_conflict() -> Iterator[None]:
    try:
        yield
    except (ValueError, argparse.ArgumentError) as error:
        if _MAIN_OPTION not in str(error):
            raise
        raise pytest.UsageError(_conflict()) from error


def _dest(flag: str) -> str:
    return "quack_" + flag.lstrip("-").replace("-", "_")


def _conflict() -> str:
    return (
        f"Another plugin registers {_MAIN_OPTION} too, most likely that of the distribution quack-kernels, which this "
        "one takes the place of. Load only one of them: drop `-p quack.testing.pytest_plugin` (or what else loads it), "
        "or drop ours with `-p no:pytest_quack`."
    )


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Name the target before a conftest can import the compiler, which reads it once."""
    arch = getattr(early_config.known_args_namespace, _dest("--compile-arch"), None) or early_config.getini(
        "compile_arch"
    )
    if not arch:
        return
    arch = str(arch).strip().lower()
    dsl = sys.modules.get("cutlass")
    if dsl is not None and os.environ.get("CUTE_DSL_ARCH") != arch:
        raise pytest.UsageError(
            f"--compile-arch={arch} comes too late: cutlass is imported already and reads the architecture once. "
            f"Set CUTE_DSL_ARCH={arch} in the environment instead."
        )
    os.environ["CUTE_DSL_ARCH"] = arch


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "compile_in_place: calls of this test wait for their kernels instead of letting the test step aside and be run "
        "again; for tests that must not run twice (pytest-quack).",
    )
    command_line, ini = _given(config)
    if not command_line and not ini:
        return  # nothing is asked of the plugin; jit_cache reads the environment when it is first called
    try:
        settings = resolve(command_line, ini)
    except SettingsError as error:
        raise pytest.UsageError(str(error)) from error
    from pytest_quack.run import start_run

    try:
        start_run(config, settings)
    except CacheDirectoryError as error:
        raise pytest.UsageError(str(error)) from error


def _given(config: pytest.Config) -> tuple[dict[str, str], dict[str, str]]:
    """What the command line and the ini file say, by flag and by ini key."""
    command_line, ini = {}, {}
    for option in OPTIONS:
        if option.flag is not None:
            value = config.getoption(_dest(option.flag), None)
            if value is not None:
                command_line[option.flag] = str(value)
        if option.ini is not None:
            value = config.getini(option.ini)
            if value:
                ini[option.ini] = "\n".join(_paths(config, value)) if isinstance(value, list) else str(value)
    return command_line, ini


def _paths(config: pytest.Config, lines: list[str]) -> list[str]:
    return [str(config.rootpath / line) for line in lines]


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    run = _find_run(session.config)
    if run is not None:
        run.begin()


def pytest_report_header(config: pytest.Config) -> str | None:
    run = _find_run(config)
    return run.header() if run is not None else None


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    run = _find_run(session.config)
    if run is None or not run.may_defer(session):
        return None
    return run.drive(session)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    run = _find_run(session.config)
    if run is None:
        return
    if run.controller is not None:
        run.controller.report_lost(session, exitstatus)
    elif hasattr(session.config, "workeroutput"):
        run.hand_over_counts(session.config)


# Hooks of the xdist controller.


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    if (controller := _find_controller(node.config)) is not None:
        controller.configure_worker(node)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node: Any, ids: list[str]) -> None:
    if (controller := _find_controller(node.config)) is not None:
        controller.note_collection(ids)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    if (controller := _find_controller(node.config)) is not None:
        controller.worker_is_down(node, error)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    run = _find_run(config)
    text = run.summary() if run is not None else []
    if text:
        terminalreporter.section("async-compile", sep="-")
        for line in text:
            terminalreporter.write_line(line)


def pytest_unconfigure(config: pytest.Config) -> None:
    if _find_run(config) is not None:
        from pytest_quack.run import end_run

        end_run(config)


def _find_controller(config: pytest.Config) -> Controller | None:
    run = _find_run(config)
    return run.controller if run is not None else None


def _find_run(config: pytest.Config) -> QuackRun | None:
    """This run's objects; a run that asks nothing of the plugin has none and imports nothing of it."""
    if "pytest_quack.run" not in sys.modules:
        return None
    from pytest_quack.run import find_run

    return find_run(config)
