"""The controller of an xdist run: it has the pool that all workers use, and sees to it that no test is lost.

before a worker starts    it is told where the pool is, and gets a file in which it notes which test it runs
when a worker dies        the crash is blamed on the test that the file names; what was put off goes to others
at the end                each test that has no outcome, and no excuse, is reported as failed
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, Final

import pytest

from pytest_quack.compile.pool import CompilePool
from pytest_quack.compile.server import Address, PoolServer
from pytest_quack.deferral import running, xdist_internals
from pytest_quack.report.summary import RunCounts

# Under this name workers find what is theirs in `config.workerinput`, and the controller in `workeroutput`.
WORKER_DATA: Final = "pytest_quack"
_COMPLETE: Final = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)


class Controller:
    """What the controller of one run knows of its workers.

    Attributes:
        counts: what workers that have finished have counted.
    """

    def __init__(self, config: pytest.Config, pool: CompilePool) -> None:
        """Offer the pool to workers. Raises OSError where no socket can be made."""
        self.counts = RunCounts()
        self._config = config
        self._server = PoolServer(pool)
        self._marks: dict[Any, Path] = {}
        self._expected: dict[str, int] = {}
        self._outcomes: Counter[str] = Counter()
        config.pluginmanager.register(self, "pytest_quack_controller")

    def configure_worker(self, node: Any) -> None:
        """Tell a worker that is about to start what it needs to know; a replacement too."""
        mark = self._server.directory / f"running-{node.gateway.id}"
        running.create(mark)
        self._marks[node] = mark
        node.workerinput[WORKER_DATA] = {**self._server.address.to_plain(), "mark": str(mark)}

    def note_collection(self, ids: list[str]) -> None:
        """A worker has collected these tests."""
        number = xdist_internals.expected_outcomes(self._config)
        for nodeid in ids:
            self._expected[nodeid] = number

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test has its outcome with the report of its tear-down; one that killed its worker with another."""
        if report.when not in {"setup", "call"}:
            self._outcomes[report.nodeid] += 1

    def worker_is_down(self, node: Any, error: object) -> None:
        """A worker has finished, or died."""
        mark = self._marks.get(node)
        if error is None:
            output = getattr(node, "workeroutput", None) or {}
            self.counts.add_plain(output.get(WORKER_DATA, {}))
            return
        scheduler = xdist_internals.find_scheduler(self._config)
        if scheduler is not None and mark is not None:
            xdist_internals.blame(scheduler, node, running.read(mark))

    def report_lost(self, session: pytest.Session, exit_status: int) -> None:
        """Report each test without an outcome as failed, unless the run was ended before all could have one."""
        config = self._config
        is_excused = xdist_internals.is_ended_early(config) or not xdist_internals.has_scheduled(config)
        if exit_status not in _COMPLETE or is_excused:
            return
        lost = [nodeid for nodeid, number in self._expected.items() if self._outcomes[nodeid] < number]
        for nodeid in lost:
            self._config.hook.pytest_runtest_logreport(report=_lost_report(nodeid))
        if lost:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def close(self) -> None:
        """Offer the pool to nobody any more."""
        self._config.pluginmanager.unregister(self)
        self._server.close()


def find_address(config: pytest.Config) -> tuple[Address, str] | None:
    """Where the controller's pool is, and the file for the running test; None where it has offered none."""
    plain = getattr(config, "workerinput", {}).get(WORKER_DATA)
    if not plain:
        return None
    return Address(plain["machine"], plain["path"], plain["secret"]), plain["mark"]


def _lost_report(nodeid: str) -> pytest.TestReport:
    path = nodeid.partition("::")[0]
    text = (
        f"{nodeid} has no outcome: no worker was left to run it after one died, or --max-worker-restart allowed no "
        "replacement."
    )
    return pytest.TestReport(nodeid, (path, None, nodeid), {}, "failed", text, "call")
