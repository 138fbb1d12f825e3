"""The pytest plugin: every hook, each of which reads, builds or delegates.

Hooks are found through the package itself (`pytest_quack.__dir__`), so that the plugin has one name and is loaded once.
"""

from __future__ import annotations

import os
import sys
from typing import Final

import pytest

from pytest_quack.errors import CacheDirectoryError, SettingsError
from pytest_quack.settings import OPTIONS, resolve

HOOKS: Final = frozenset(
    {
        "pytest_addoption",
        "pytest_configure",
        "pytest_load_initial_conftests",
        "pytest_report_header",
        "pytest_runtestloop",
        "pytest_terminal_summary",
        "pytest_unconfigure",
    }
)
PEER: Final = "quack"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("async-compile", "compiling kernels while tests run (pytest-quack)")
    for option in OPTIONS:
        if option.flag is not None:
            arguments: dict[str, object] = {"metavar": option.metavar, "default": None, "help": option.help}
            if option.flag == "--async-compile":
                arguments.update(nargs="?", const="")  # without a number: the ini file's, the environment's, or auto
            try:
                group.addoption(option.flag, dest=_dest(option.flag), **arguments)
            except ValueError as error:
                raise pytest.UsageError(_conflict(option.flag)) from error
        if option.ini is not None:
            kind = "linelist" if option.field == "sources" else "string"
            parser.addini(option.ini, option.help, type=kind, default=None)  # type: ignore[arg-type]


def _dest(flag: str) -> str:
    return "quack_" + flag.lstrip("-").replace("-", "_")


def _conflict(flag: str) -> str:
    return (
        f"Another plugin has already registered {flag}: most likely the one of the distribution quack-kernels, which "
        "this plugin replaces. Load one of them only: drop `-p quack.pytest_plugin` (or whatever loads it), or drop "
        "`-p pytest_quack` with `-p no:pytest_quack`."
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


def pytest_report_header(config: pytest.Config) -> str | None:
    from pytest_quack.run import find_run

    run = find_run(config)
    return run.header() if run is not None else None


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    from pytest_quack.run import find_run

    run = find_run(session.config)
    if run is None or not run.may_defer(session):
        return None
    return run.drive(session)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    from pytest_quack.run import find_run

    run = find_run(config)
    text = run.summary() if run is not None else []
    if text:
        terminalreporter.section("async-compile", sep="-")
        for line in text:
            terminalreporter.write_line(line)


def pytest_unconfigure(config: pytest.Config) -> None:
    if "pytest_quack.run" in sys.modules:
        from pytest_quack.run import end_run

        end_run(config)
