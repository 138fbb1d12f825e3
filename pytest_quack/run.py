"""One pytest run: the objects that the plugin's hooks need, built from the settings and undone at the end."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from pytest_quack.backends import DEFAULT, INTERCEPTED_MODULE, find_backend
from pytest_quack.cache.directory import open_directory
from pytest_quack.compile import active, preload
from pytest_quack.compile.asking import AskingSide
from pytest_quack.compile.pool import CompilePool
from pytest_quack.compile.preload import AfterImport, ImportWatch
from pytest_quack.deferral import worker_end
from pytest_quack.deferral.worker_data import WORKER_DATA, WorkerData, find_worker_data
from pytest_quack.deferral.xdist_internals import find_worker_channel
from pytest_quack.gpu import oom
from pytest_quack.report import summary
from pytest_quack.runtime import Runtime, replace_runtime
from pytest_quack.settings import Settings

# What only a controller needs, or only a process that runs tests, is imported where it is needed: each module costs
# every run a millisecond or more.
if TYPE_CHECKING:
    from pytest_quack.backends import Interception
    from pytest_quack.deferral.local import Deferral
    from pytest_quack.deferral.warm import WarmMark
    from pytest_quack.deferral.xdist_controller import Controller
    from pytest_quack.gpu.workers import WorkerGpus

_RUN_KEY: Final = pytest.StashKey["QuackRun"]()
_GPUS_KEY: Final = pytest.StashKey["WorkerGpus | None"]()
# Options that show what happens while it happens, or stop at it: a test that steps aside would be shown twice.
_WAIT_OPTIONS: Final = {
    "usepdb": "--pdb",
    "trace": "--trace",
    "stepwise": "--sw",
    "setupshow": "--setup-show",
    "setuponly": "--setup-only",
    "setupplan": "--setup-plan",
}


@dataclass(slots=True)
class QuackRun:
    """What belongs to one run; found through the config's stash."""

    settings: Settings
    runtime: Runtime
    runtime_before: Runtime | None
    pool: AskingSide | None = None
    pool_before: AskingSide | None = None
    deferral: Deferral | None = None
    controller: Controller | None = None
    worker: WorkerData | None = None
    why_wait: str | None = None
    import_watch: ImportWatch | None = None
    interception: Interception | None = None
    after_import: AfterImport | None = None
    gpus: WorkerGpus | None = None
    warm_mark: WarmMark | None = None
    began_ns: int = field(default_factory=time.time_ns)

    def begin(self, config: pytest.Config) -> None:
        """Choose the workers' GPUs, in a controller; elsewhere watch for the import of the compiler.

        That is to take its compiles, and to start the server if nothing is stored.

        Raises GpuError where workers cannot have the GPUs that were asked for.
        """
        if _is_controller(config):
            self.gpus = find_gpus(config, self.settings)
            return  # it runs no tests
        self._intercept()
        store = self.runtime.store
        if self.pool is not None and (store is None or store.is_empty()):
            self.import_watch = ImportWatch(preload.heralds(), self.pool.prewarm)
            self.import_watch.install()

    def _intercept(self) -> None:
        if self.pool is None or not self.settings.is_interception_on:
            return
        self.after_import = AfterImport(frozenset({INTERCEPTED_MODULE}), self._install_interception)
        self.after_import.install()

    def _install_interception(self) -> None:
        from pytest_quack.cache.traced import TraceCache

        self.interception = find_backend(DEFAULT).interception(TraceCache(DEFAULT), self.runtime.notices.add)
        if self.interception is not None:
            preload.register_interception(DEFAULT)
            self.interception.install()

    def header(self) -> list[str]:
        lines = []
        if self.pool is not None:
            store = self.runtime.store
            cache = str(store.root) if store is not None else "off"
            lines.append(summary.header(self.settings, self.pool.jobs, self.why_wait, cache))
        if self.gpus is not None:
            lines.append(self.gpus.header())
        return lines

    def may_defer(self, session: pytest.Session) -> bool:
        """Whether this run's own loop is needed; else pytest's own does it, untouched."""
        stops_early = session.testsfailed and not session.config.option.continue_on_collection_errors
        if self.deferral is None or self.deferral.why_wait is not None or stops_early:
            return False
        if hasattr(session.config, "workerinput") and find_worker_channel(session.config) is None:
            self.runtime.notices.add("tests of xdist workers wait in place: this version of xdist is not known")
            return False
        return not session.config.option.collectonly

    def drive(self, session: pytest.Session) -> bool:
        assert self.deferral is not None
        assert self.pool is not None
        self.pool.adopt_environ()
        if self.pool.is_started:
            self.pool.prewarm()
        self.warm_mark = self._make_warm_mark([item.nodeid for item in session.items])
        may_run_again = self.settings.oom_retries and oom.has_device()
        self.deferral.is_trusting = not may_run_again and self.warm_mark is not None and self.warm_mark.is_fresh()
        channel = find_worker_channel(session.config)
        if channel is not None:
            from pytest_quack.deferral.xdist_worker import WorkerLoop

            name, mark = (self.worker.name, self.worker.mark) if self.worker is not None else ("", None)
            return WorkerLoop(self.deferral, session, channel, name, mark).run()
        return self.deferral.drive(session)

    def _make_warm_mark(self, nodeids: list[str]) -> WarmMark | None:
        from pytest_quack.deferral.warm import WarmMark

        store = self.runtime.store
        return WarmMark(store, nodeids, self.began_ns) if store is not None else None

    def leave_warm_mark(self, session: pytest.Session, exit_status: int) -> None:
        """After a complete run, tell the next one of the same tests that their kernels are in the store."""
        if self.controller is not None:
            nodeids = self.controller.warm_nodeids
            mark = self._make_warm_mark(nodeids) if nodeids else None
        else:
            is_complete = exit_status in {pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED}
            is_complete = is_complete and not session.shouldfail and not session.shouldstop
            mark = self.warm_mark if is_complete else None
        if mark is not None:
            mark.write()

    def counts(self) -> summary.RunCounts:
        """What this process has counted; of a controller, what its workers have."""
        runtime, store, deferral = self.runtime, self.runtime.store, self.deferral
        counts = summary.RunCounts()
        if self.controller is not None:
            counts.add_plain(self.controller.counts.to_plain())
        own = summary.RunCounts(
            hits=runtime.hits,
            compiled_here=set(runtime.compiled_here),
            uncached=runtime.uncached,
            corrupt=store.corrupt if store is not None else 0,
            deferrals=deferral.deferrals if deferral is not None else {},
            oom_retries=deferral.oom_retries if deferral is not None else [],
            waits=deferral.waits if deferral is not None else {},
            notices={**runtime.notices.counts, **(store.problems if store is not None else {})},
        )
        counts.add_plain(own.to_plain())
        return counts

    def hand_over_counts(self, config: Any) -> None:
        """Give what this worker has counted to the controller."""
        config.workeroutput[WORKER_DATA] = self.counts().to_plain()

    def summary(self) -> list[str]:
        counts = self.counts()
        if isinstance(self.pool, CompilePool):
            counts.pool = self.pool.stats()
        if self.pool is None and not counts.notices:
            return []
        return summary.lines(counts)


def start_run(config: pytest.Config, settings: Settings) -> None:
    """Put the settings in force and make the pool active if one is asked for.

    Raises CacheDirectoryError where the user named a directory that cannot be used or trusted.
    """
    directory = open_directory(settings) if settings.is_cache_enabled and settings.cache_dir else None
    runtime = Runtime(settings, is_reported=True, directory=directory)
    run = QuackRun(settings, runtime, replace_runtime(runtime))
    config.stash[_RUN_KEY] = run
    if settings.is_pool_on and not config.option.collectonly:
        run.why_wait = _why_wait(config, settings)
        if _is_controller(config):
            pool = CompilePool(settings.jobs, timeout_s=settings.timeout_s, notices=runtime.notices, is_shared=True)
            run.pool, run.controller = pool, _make_controller(config, pool, runtime)
        else:
            if hasattr(config, "workerinput"):
                config.pluginmanager.register(worker_end.QuietInterrupt(), "pytest_quack_interrupt")
            run.pool, run.worker = _find_pool(config, settings, runtime)
            run.pool_before = active.activate(run.pool)
            from pytest_quack.deferral.local import Deferral

            run.deferral = Deferral(
                run.pool, runtime.notices, why_wait=run.why_wait, max_oom_retries=settings.oom_retries
            )


def _find_pool(config: pytest.Config, settings: Settings, runtime: Runtime) -> tuple[AskingSide, WorkerData | None]:
    """The pool for a process that runs tests: its controller's if it can be reached, else its own."""
    worker = find_worker_data(config)
    if worker is not None:
        from pytest_quack.compile.client import PoolClient, PoolUnreachableError

        try:
            client = PoolClient(worker.address, runtime.notices)
            worker_end.end_with(worker.controller_pid, Path(worker.address.path).parent)
            return client, worker
        except PoolUnreachableError as error:
            runtime.notices.add(
                f"an xdist worker has a pool of its own: that of the controller is unreachable, {error}"
            )
    return CompilePool(settings.jobs, timeout_s=settings.timeout_s, notices=runtime.notices), None


def _make_controller(config: pytest.Config, pool: CompilePool, runtime: Runtime) -> Controller | None:
    from pytest_quack.deferral.xdist_controller import Controller

    try:
        return Controller(config, pool)
    except OSError as error:
        runtime.notices.add(f"each xdist worker has a compile pool of its own: {error.strerror or error}")
        return None


def end_run(config: pytest.Config) -> None:
    """End every compile process and put back what was in force before the run."""
    run = find_run(config)
    if run is None:
        return
    del config.stash[_RUN_KEY]
    for part in (run.import_watch, run.after_import, run.interception):
        if part is not None:
            part.remove()
    if run.controller is not None:
        run.controller.close()
    if run.deferral is not None:
        active.deactivate(run.pool_before)
    if run.pool is not None:
        run.pool.shutdown()
    replace_runtime(run.runtime_before)


def find_run(config: pytest.Config) -> QuackRun | None:
    return config.stash.get(_RUN_KEY, None)


def find_gpus(config: pytest.Config, settings: Settings) -> WorkerGpus | None:
    """The GPUs that this run's workers may have, chosen when first asked for.

    Raises GpuError as `choose_gpus` does.
    """
    if _GPUS_KEY not in config.stash:
        from pytest_quack.gpu.workers import choose_gpus

        config.stash[_GPUS_KEY] = choose_gpus(settings, os.environ, lambda text: _tell(config, text))
    return config.stash[_GPUS_KEY]


def _tell(config: pytest.Config, text: str) -> None:
    """Say something now, whatever is captured."""
    capture = config.pluginmanager.get_plugin("capturemanager")
    with capture.global_and_fixture_disabled() if capture is not None else contextlib.nullcontext():
        print(f"pytest-quack: {text}", file=sys.stderr, flush=True)


def _is_controller(config: pytest.Config) -> bool:
    return not hasattr(config, "workerinput") and config.getoption("dist", "no") != "no"


def _why_wait(config: pytest.Config, settings: Settings) -> str | None:
    if settings.mode == "wait":
        return "async_compile_mode is wait"
    for name, flag in _WAIT_OPTIONS.items():
        if config.getoption(name, False):
            return f"{flag} is given"
    has_logging = config.pluginmanager.hasplugin("logging")
    if has_logging and (config.getoption("log_cli_level", None) or config.getini("log_cli")):
        return "log_cli is on"
    return None
