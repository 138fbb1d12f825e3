"""The controller of an xdist run: it has the pool that all workers use, and sees to it that no test is lost.

before a worker starts    it is told where the pool is, and gets a file in which it notes which test it runs
while tests run           a worker that needs its GPU alone gets it: see gpu/turns.py
when a worker dies        the crash is blamed on the test that the file names; what was put off goes to others
at the end                each test that has no outcome, and no excuse, is reported as failed
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from pytest_quack.compile.pool import CompilePool
from pytest_quack.compile.server import PoolServer
from pytest_quack.deferral import running, xdist_internals
from pytest_quack.deferral.worker_data import WORKER_DATA
from pytest_quack.deferral.worker_end import GIVE_UP, INTERRUPT
from pytest_quack.gpu.turns import STAND_ASIDE, Turns
from pytest_quack.report.summary import RunCounts

# The event by which the controller's own loop learns that a worker has nothing to do.
_IS_IDLE: Final = "quack_is_idle"
# The event after a failure, which may have been the last that the run allows.
_HAS_FAILED: Final = "quack_has_failed"
_COMPLETE: Final = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)


class Controller:
    """What the controller of one run knows of its workers.

    Attributes:
        counts: what workers that have finished have counted.
        warm_nodeids: the tests of a run that was complete, so that the next one may expect their kernels in the store.
    """

    def __init__(self, config: pytest.Config, pool: CompilePool) -> None:
        """Offer the pool to workers. Raises OSError where no socket can be made."""
        self.counts = RunCounts()
        self.warm_nodeids: list[str] = []
        self._config = config
        self._turns = Turns()
        calls: dict[str, Callable[..., Any]] = {
            "take_gpu_alone": self._turns.take_alone,
            "give_gpu_back": self._turns.give_back,
            "stand_aside": self._turns.stand_aside,
            "leave_gpu": self._turns.leave,
            "is_idle": self._note_idle,
        }
        self._server = PoolServer(pool, calls)
        self._marks: dict[Any, Path] = {}
        self._nodes: dict[str, Any] = {}
        self._completed: Counter[Any] = Counter()  # by worker
        self._expected: dict[str, int] = {}
        self._outcomes: Counter[str] = Counter()
        config.pluginmanager.register(self, "pytest_quack_controller")

    def configure_worker(self, node: Any) -> None:
        """Tell a worker that is about to start what it needs to know; a replacement too."""
        mark = self._server.directory / f"running-{node.gateway.id}"
        running.create(mark)
        self._marks[node] = mark
        name = node.gateway.id
        about = {"name": name, "mark": str(mark), "controller_pid": os.getpid()}
        node.workerinput[WORKER_DATA] = {**self._server.address.to_plain(), **about}
        self._nodes[name] = node
        xdist_internals.on_event(self._config, _IS_IDLE, self._send_more)
        xdist_internals.on_event(self._config, _HAS_FAILED, self._give_up_after_limit)
        self._turns.enter(name, _devices(node), lambda: xdist_internals.tell_worker(node, STAND_ASIDE))

    def note_collection(self, ids: list[str]) -> None:
        """A worker has collected these tests."""
        number = xdist_internals.expected_outcomes(self._config)
        for nodeid in ids:
            self._expected[nodeid] = number

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test has its outcome with the report of its tear-down; one that killed its worker with another."""
        if report.when not in {"setup", "call"}:
            self._outcomes[report.nodeid] += 1
            self._completed[getattr(report, "node", None)] += 1
        if report.failed and hasattr(report, "node"):
            xdist_internals.post_event(report.node, _HAS_FAILED)  # xdist counts it when all have seen it

    def worker_is_down(self, node: Any, error: object) -> None:
        """A worker has finished, or died."""
        self._turns.leave(node.gateway.id)
        mark = self._marks.get(node)
        if error is None:
            output = getattr(node, "workeroutput", None) or {}
            self.counts.add_plain(output.get(WORKER_DATA, {}))
            return
        scheduler = xdist_internals.find_scheduler(self._config)
        if scheduler is not None and mark is not None:
            xdist_internals.blame(scheduler, node, running.read(mark))

    def _note_idle(self, name: str) -> None:
        """All that a worker has is put off. Called in a thread of the server."""
        xdist_internals.post_event(self._nodes[name], _IS_IDLE)

    def _send_more(self, node: Any) -> None:
        xdist_internals.send_more(xdist_internals.find_scheduler(self._config), node, self._completed[node])

    def _give_up_after_limit(self, _: Any) -> None:
        """Where the run ends early, have no worker wait for the kernels of tests that are put off."""
        if xdist_internals.is_ended_early(self._config):
            for node in self._nodes.values():
                xdist_internals.tell_worker(node, GIVE_UP)

    @pytest.hookimpl(tryfirst=True)
    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Have workers stop now: execnet does so after 5 seconds, where a terminal has not told them too."""
        if type(excinfo.value) is KeyboardInterrupt:  # not xdist's own, which ends a run after -x
            for node in self._nodes.values():
                xdist_internals.tell_worker(node, INTERRUPT)

    def report_lost(self, session: pytest.Session, exit_status: int) -> None:
        """Report each test without an outcome as failed, unless the run was ended before all could have one."""
        config = self._config
        is_excused = xdist_internals.is_ended_early(config) or not xdist_internals.has_scheduled(config)
        if exit_status not in _COMPLETE or is_excused:
            return
        self.warm_nodeids = list(self._expected)
        lost = [nodeid for nodeid, number in self._expected.items() if self._outcomes[nodeid] < number]
        for nodeid in lost:
            self._config.hook.pytest_runtest_logreport(report=_lost_report(nodeid))
        if lost:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def close(self) -> None:
        """Offer the pool to nobody any more."""
        self._config.pluginmanager.unregister(self)
        self._server.close()


def _devices(node: Any) -> frozenset[str]:
    """The devices that a worker was given; none where they may be any."""
    environ = getattr(node.gateway.spec, "env", None) or {}
    return frozenset(filter(None, environ.get("CUDA_VISIBLE_DEVICES", "").split(",")))


def _lost_report(nodeid: str) -> pytest.TestReport:
    path = nodeid.partition("::")[0]
    text = (
        f"{nodeid} has no outcome: no worker was left to run it after one died, or --max-worker-restart allowed no "
        "replacement."
    )
    return pytest.TestReport(nodeid, (path, None, nodeid), {}, "failed", text, "call")
