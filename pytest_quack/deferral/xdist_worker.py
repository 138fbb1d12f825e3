"""The run loop of an xdist worker.

Tests come from the controller one by one, and can be asked back. To the controller a test that was put off is one that
this worker has not completed: it is told of the completion after the last report, and not before, so that a test on a
worker that dies is given to another.

The loop takes a test from xdist's own queue only when it is to be the next; what is still there can be stolen at once.
Beyond that it gives back tests that were put off, between two others.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from pytest_quack.compile.client import PoolClient
from pytest_quack.deferral.local import Deferral, Loop, bookmark_beside
from pytest_quack.deferral.running import RunningMark
from pytest_quack.deferral.worker_end import GIVE_UP, INTERRUPT, end_soon
from pytest_quack.deferral.xdist_internals import WorkerChannel, is_command, stolen_indices
from pytest_quack.gpu import oom
from pytest_quack.gpu.turns import STAND_ASIDE


class WorkerLoop(Loop):
    """One run of the loop in a worker."""

    # If this worker died between two reports of a test, another one would report the test once more.
    is_result_indivisible = True

    def __init__(
        self, deferral: Deferral, session: pytest.Session, channel: WorkerChannel, name: str, mark: str | None
    ) -> None:
        """Take where tests come from, this worker's name, and the file that says which test is running."""
        super().__init__(deferral, session, deferral.pool, deferral.notices, ())
        self._channel: Final = channel
        self._name: Final = name
        self._must_stand_aside = False
        self._is_finished = False
        self._news: Final = threading.Event()
        self._is_closed = False
        self._indices: list[int] = []  # of the items, by position, in the session
        self._untold: list[tuple[int, float]] = []  # finished, not complete to the controller: position, seconds
        self._steals: deque[tuple[list[int], bool]] = deque()  # asked back, and whether it was put off once
        self._began_s = 0.0
        self._mark: RunningMark | None = None
        if mark is not None:
            with contextlib.suppress(OSError):
                self._mark = RunningMark(Path(mark))

    def run(self) -> bool:
        """Run what the controller sends until it sends no more, or the run is to stop."""
        self._channel.listen(self._on_command)
        try:
            self._ask_controller("stand_aside")  # somebody may have a GPU alone already
            if self._deferral.is_trusting:
                self._run_plainly()
            return self._is_stopping or super().run()
        finally:
            self._is_finished = True
            oom.free_memory_if_used()
            self._ask_controller("leave_gpu")

    def _run_plainly(self) -> None:
        """While all kernels are there, do as xdist's own loop does: nothing is put off, so nothing has to be known.

        The test that is next when one is missing goes to the queue.
        """
        index = self._take_or_wait()
        while index is not None:
            if not self._deferral.is_trusting:
                self._indices.append(index)
                self.add(self._session.items[index])
                return
            next_index = self._take_or_wait()
            if self._is_stopping:
                return
            item = self._session.items[index]
            nextitem = self._session.items[next_index] if next_index is not None else None
            began_s = self._announce(index, item)
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=nextitem)
            self._channel.tell_complete(index, time.perf_counter() - began_s)
            self._note_running(None)
            index = next_index

    def _take_or_wait(self) -> int | None:
        """The next test, as an index into the session's items; None where none comes, or the run is to stop."""
        if self._steals:
            self._answer_steals()
        while not self._is_closed and not self._is_stopping:
            index = self._channel.take()
            if index is self._channel.end:
                self._is_closed = True
            elif index is None:
                self._wait_for_controller()
            else:
                return int(index)
        return None

    @property
    def is_over(self) -> bool:
        """Whether every item has its result and none comes any more."""
        return self._is_closed and super().is_over

    def _is_told_to_stop(self) -> bool:
        """The controller learns why this worker stops when it has finished."""
        return self._is_stopping

    def _on_command(self, command: Any) -> None:
        """In xdist's thread, which must not see an error: without it the process would never end."""
        if is_command(command, INTERRUPT):
            end_soon()
            return
        if self._is_finished:
            self._channel.handle(command)
            return
        if is_command(command, GIVE_UP):
            self._session.shouldstop = "the run ends early"  # xdist expects to hear so from a worker with tests left
            self._news.set()
            self._pool.nudge()
            return
        if is_command(command, STAND_ASIDE):
            self._must_stand_aside = True
            self._news.set()
            self._pool.nudge()
            return
        wanted = stolen_indices(command)
        given = [] if wanted is None else self._channel.give_back(wanted)
        if wanted is None:
            self._channel.handle(command)
        elif given:
            self._channel.tell_unscheduled(given)
        else:
            self._steals.append((wanted, False))  # they may have been put off: the loop looks
        self._news.set()
        self._pool.nudge()

    def _fetch(self) -> None:
        self._answer_steals()
        while not self._is_closed and not self._queue.has_candidate:
            index = self._channel.take()
            if index is None:
                return
            if index is self._channel.end:
                self._is_closed = True
            else:
                self.add(self._session.items[index])
                self._indices.append(index)

    def _before(self, index: int) -> None:
        """As xdist does, know of another test before this one begins, or that there is none."""
        self._fetch()
        while self._queue.remaining == 1 and not self._is_closed and not self._is_stopping:
            self._wait_for_controller()
            self._fetch()
        self._began_s = self._announce(self._indices[index], self._items[index])

    def _announce(self, session_index: int, item: pytest.Item) -> float:
        """Say that a test begins now; returns that moment, in seconds."""
        self._stand_aside_if_asked()
        self._channel.begin(session_index, f"[pytest-xdist running] {item.nodeid}")
        self._note_running(session_index)
        return time.perf_counter()

    def _note_running(self, session_index: int | None) -> None:
        if self._mark is not None:
            self._mark.set(session_index)

    def _likely_next(self, index: int) -> pytest.Item | None:
        likely = super()._likely_next(index)
        return likely if likely is not None or self._is_closed else bookmark_beside(self._items[index])

    def _finished(self, index: int) -> None:
        self._untold.append((self._indices[index], self._began_s))

    def _run_one(self, index: int) -> None:
        super()._run_one(index)
        self._note_running(None)

    def _released(self) -> None:
        now = time.perf_counter()
        for session_index, began_s in self._untold:
            self._channel.tell_complete(session_index, now - began_s)
        self._untold.clear()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        is_alone = self._ask_controller("take_gpu_alone")
        if is_alone is False:
            self._notices.add("a test was run again for want of device memory, but other workers did not stand aside")
        try:
            yield
        finally:
            if is_alone:
                oom.free_memory()
                self._ask_controller("give_gpu_back")

    def _stand_aside_if_asked(self) -> None:
        """Between two tests: let another worker have the GPU that both use, as long as it needs it."""
        while self._must_stand_aside:
            self._must_stand_aside = False
            oom.free_memory()
            self._ask_controller("stand_aside")

    def _ask_controller(self, name: str) -> Any:
        return self._pool.ask_server(name, self._name) if isinstance(self._pool, PoolClient) else None

    def _wait_for_news(self, keys: list[str]) -> None:
        self._stand_aside_if_asked()
        if keys:
            if not self._is_closed:
                self._ask_controller("is_idle")
            self._pool.wait_any(keys, until=self._news.is_set)
            self._news.clear()
        elif not self._queue.parked:
            self._wait_for_controller()

    def _wait_for_controller(self) -> None:
        """Wait for a command, with every question of the controller answered: it may wait for that itself."""
        self._answer_steals()
        self._answer_steals()
        self._stand_aside_if_asked()
        self._news.wait()
        self._news.clear()

    def _answer_steals(self) -> None:
        """Give back what was put off. Where there is nothing, answer at the next call: when something has happened.

        The scheduler asks again at once for what it does not get.
        """
        for _ in range(len(self._steals)):
            wanted, was_put_off = self._steals.popleft()
            given = self._channel.give_back(wanted)
            positions = {session_index: position for position, session_index in enumerate(self._indices)}
            given += [i for i in wanted if i in positions and i not in given and self._queue.withdraw(positions[i])]
            if given or was_put_off:
                self._channel.tell_unscheduled(given)
            else:
                self._steals.append((wanted, True))
