"""The pytest plugin: every hook, each of which reads, builds or delegates.

Hooks are found through the package itself (`pytest_quack.__dir__`), so that the plugin has one name and is loaded once.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

import pytest

from pytest_quack.deferral.internals import swap_hook_exec
from pytest_quack.errors import CacheDirectoryError, GpuError, SettingsError
from pytest_quack.gpu.early import CudaWatch
from pytest_quack.settings import OPTIONS, Settings, resolve

if TYPE_CHECKING:
    from pytest_quack.deferral.xdist_controller import Controller
    from pytest_quack.run import QuackRun

HOOKS: Final = frozenset(
    {
        "pytest_addoption",
        "pytest_configure",
        "pytest_configure_node",
        "pytest_load_initial_conftests",
        "pytest_plugin_registered",
        "pytest_report_header",
        "pytest_runtestloop",
        "pytest_sessionfinish",
        "pytest_sessionstart",
        "pytest_terminal_summary",
        "pytest_testnodedown",
        "pytest_unconfigure",
        "pytest_xdist_auto_num_workers",
        "pytest_xdist_node_collection_finished",
        "pytest_xdist_setupnodes",
    }
)
_MAIN_OPTION: Final = "--async-compile"
_watches: Final[WeakKeyDictionary[pytest.PytestPluginManager, CudaWatch]] = WeakKeyDictionary()


def pytest_plugin_registered(plugin: object, plugin_name: str, manager: pytest.PytestPluginManager) -> None:
    watch = _watches.setdefault(manager, CudaWatch())
    watch.registered(plugin, plugin_name, is_own=plugin is sys.modules["pytest_quack"])


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


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """`-n auto` means as many workers as GPUs carry, where there are any, unless somebody else says something."""
    impls = config.hook.pytest_xdist_auto_num_workers.get_hookimpls()
    has_other = any(impl.plugin_name not in {"xdist", "xdist.plugin", "pytest_quack"} for impl in impls)
    if has_other or config.option.numprocesses != "auto" or os.environ.get("PYTEST_XDIST_AUTO_NUM_WORKERS"):
        return None
    settings = _resolve(config)
    if settings is None:
        return None
    from pytest_quack.run import find_gpus

    with _usage_errors():
        gpus = find_gpus(config, settings)
    return gpus.groups * settings.workers_per_gpu if gpus is not None else None


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "compile_in_place: calls of this test wait for their kernels instead of letting the test step aside and be run "
        "again; for tests that must not run twice (pytest-quack).",
    )
    settings = _resolve(config)
    if settings is None:
        return
    _refuse_options_without_effect(config, settings)
    from pytest_quack.run import start_run

    with _usage_errors():
        start_run(config, settings)


def _refuse_options_without_effect(config: pytest.Config, settings: Settings) -> None:
    """Say so where the command line asks for what the run does not do."""
    if config.getoption(_dest("--oom-retries"), None) and not settings.is_pool_on:
        raise pytest.UsageError("--oom-retries needs --async-compile, whose loop runs a test again.")
    if not settings.gpus_for_each_worker:
        for flag in ("--workers-per-gpu", "--gpu-min-free", "--gpu-wait"):
            if config.getoption(_dest(flag), None):
                raise pytest.UsageError(
                    f"{flag} needs workers that get GPUs: add --async-compile, or --gpus-per-worker=1 without it."
                )


def _resolve(config: pytest.Config) -> Settings | None:
    """The settings; None where nothing is asked of the plugin: jit_cache reads the environment when first called."""
    command_line, ini = _given(config)
    if not command_line and not ini:
        return None
    with _usage_errors():
        return resolve(command_line, ini)


@contextlib.contextmanager
def _usage_errors() -> Iterator[None]:
    try:
        yield
    except (SettingsError, CacheDirectoryError, GpuError) as error:
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
        with _usage_errors():
            run.begin(session.config)


def pytest_report_header(config: pytest.Config) -> list[str]:
    run = _find_run(config)
    return run.header() if run is not None else []


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
        return
    run.leave_warm_mark(session, exitstatus)


# Hooks of the xdist controller.


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: Sequence[Any]) -> None:
    run = _find_run(config)
    if run is None or run.gpus is None:
        return
    culprit = _watches[config.pluginmanager].culprit(config.pluginmanager)
    if culprit is not None:
        raise pytest.UsageError(
            f"CUDA has been initialised in the controller of this run, by {culprit}: it holds memory of a GPU that is "
            "a worker's. Do that in a fixture or a test, or leave GPUs unassigned with --gpus-per-worker=0."
        )
    run.gpus.assign(specs)


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
