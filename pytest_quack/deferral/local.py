"""The run loop of one process: attempts, deferrals, retries.

Who does what in one attempt:

    loop            takes an item from the queue and calls the ordinary `pytest_runtest_protocol` hook
    call in a test  misses; `Deferral.on_pending` records that and raises CompilePending, or waits where it must
    gate            holds back what the attempt reports until it is known to count, then lets it out or drops it
    loop            parks the item until its keys are settled, or counts it as finished

An attempt that ran out of device memory does not count either, as long as the item may try again: that happens at once,
when nothing refers to what the attempt had.

Fixtures: an attempt that counts is torn down towards the item that really runs next. Where that is not known yet (all
that is left waits for compiles), and for an attempt that does not count, only what belongs to the function is torn
down; the rest follows when the next item is known. Errors of that second step are reported as tear-down errors of the
item whose attempt came before.
"""

from __future__ import annotations

import contextlib
import logging
import logging.handlers
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from typing import Any, Final

import pytest

from pytest_quack.compile.asking import AskingSide
from pytest_quack.deferral import internals
from pytest_quack.deferral.attempt import Attempt
from pytest_quack.deferral.generators import Generators
from pytest_quack.deferral.kept import KeptOutput, add_sections
from pytest_quack.deferral.queue import ItemQueue, Place
from pytest_quack.errors import CompilePending
from pytest_quack.gpu import oom
from pytest_quack.runtime import Notices

MARKER: Final = "compile_in_place"
# A test that is still cold after this many attempts asks for something new each time, or for very much in sequence:
# from then on its calls wait.
MAX_DEFERRALS: Final = 25
_PUT_OFF: Final = "put off until its kernel is compiled"
_TO_TEXT: Final = logging.handlers.QueueHandler(SimpleQueue())
_HELD_HOOKS: Final = (
    "pytest_runtest_logstart",
    "pytest_runtest_logreport",
    "pytest_runtest_logfinish",
    "pytest_exception_interact",
    "pytest_warning_recorded",
)


class Bookmark(pytest.Item):
    """Stands for "the next item", where only its surroundings are known; never runs.

    Hooks that look at the next item (its module, its class) find what the item beside it has.
    """

    beside: pytest.Item | None = None

    def runtest(self) -> None:
        raise AssertionError("a bookmark is not a test")

    def __getattr__(self, name: str) -> Any:
        if self.beside is None or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.beside, name)


class Deferral:
    """What a run knows of its attempts.

    Attributes:
        deferrals: how often each item was put off, by node id.
        waits: how often a call waited in place, by reason.
        oom_retries: what is to be said of each attempt that ran out of device memory and was made again.
        why_wait: why no test of this run may step aside; None where they may.
        is_trusting: whether all kernels are expected to be in the store, so that no test is made ready to step aside.
        max_oom_retries: how often a test that runs out of device memory is run again.
    """

    def __init__(
        self, pool: AskingSide, notices: Notices, *, why_wait: str | None = None, max_oom_retries: int = 0
    ) -> None:
        self.deferrals: dict[str, int] = {}
        self.waits: dict[str, int] = {}
        self.oom_retries: list[str] = []
        self.why_wait: Final = why_wait
        self.is_trusting = False
        self.max_oom_retries: Final = max_oom_retries
        self.pool: Final = pool
        self.notices: Final = notices
        self._attempt: Attempt | None = None
        self._main_thread = threading.get_ident()
        pool.pending_policy = self.on_pending

    # Calls that miss.

    def on_pending(self, key: str, description: str) -> None:
        """Raise CompilePending if the attempt can be abandoned here; else return when the key is settled."""
        reason = self._why_wait()
        attempt = self._attempt
        if reason is None and attempt is not None:
            signal = CompilePending(key, description)
            attempt.refuse(key, signal)
            raise signal
        if reason is not None:
            self.waits[reason] = self.waits.get(reason, 0) + 1
        self.pool.wait(key)

    def _why_wait(self) -> str | None:
        attempt = self._attempt
        if self.why_wait is not None:
            return self.why_wait
        if attempt is None and self.is_trusting:
            self.is_trusting = False
            return "all kernels were there in the last run of these tests"
        if attempt is None:
            return "it runs outside a test"
        if attempt.is_settled:
            return "it runs in a tear-down"
        if threading.get_ident() != self._main_thread:
            return "it runs in another thread than the test"
        if getattr(getattr(attempt.item, "obj", None), "is_hypothesis_test", False):
            return "its test is a property, which hypothesis runs many times"
        if "benchmark" in getattr(attempt.item, "fixturenames", ()):
            return "its test is measured by pytest-benchmark, which counts every attempt"
        if attempt.item.get_closest_marker(MARKER) is not None:
            return f"its test is marked {MARKER}"
        if self.deferrals.get(attempt.item.nodeid, 0) >= MAX_DEFERRALS:
            return f"its test was put off {MAX_DEFERRALS} times"
        return internals.why_not_abandon(sys._getframe(1)) or _why_not_abandon_gpu_work()

    # The loop.

    def drive(self, session: pytest.Session) -> bool:
        """Run all items of the session; the plugin's `pytest_runtestloop`."""
        done = self._run_plainly(session)
        if done == len(session.items):
            return True
        return Loop(self, session, self.pool, self.notices, session.items[done:]).run()

    def _run_plainly(self, session: pytest.Session) -> int:
        """While all kernels are there, run items as pytest's own loop does; returns how many have their results."""
        items = session.items
        for position, item in enumerate(items):
            if not self.is_trusting:
                return position
            nextitem = items[position + 1] if position + 1 < len(items) else None
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=nextitem)
            raise_if_told_to_stop(session)
        return len(items)


class Loop:
    """One run of the loop.

    A subclass may have the items come one by one: see `xdist_worker.py`.
    """

    def __init__(
        self,
        deferral: Deferral,
        session: pytest.Session,
        pool: AskingSide,
        notices: Notices,
        items: Sequence[pytest.Item],
    ) -> None:
        self._deferral = deferral
        self.pid: Final = os.getpid()
        self._session = session
        self._pool = pool
        self._notices = notices
        self._items: list[pytest.Item] = []
        self._places: list[Place] = []
        self._queue = ItemQueue()
        for item in items:
            self.add(item)
        self._generators: dict[int, Generators] = {}
        self._waiting_for: dict[int, frozenset[str]] = {}
        self._out_of_memory: dict[int, list[oom.OutOfMemory]] = {}  # attempts of an item that ran out of memory
        self.owed_errors: dict[int, pytest.TestReport] = {}
        self._is_reported_now = False  # whether the result goes out though the next item is unknown
        self._settled_seen = -1
        self._has_new_parked = False
        self._current = -1
        self._next: int | None = None
        self.kept: Final = KeptOutput(session.config, lambda: self._current)
        self._gate = _Gate(self, session.config)

    def add(self, item: pytest.Item) -> int:
        """Add an item at the end; returns its position."""
        place = place_of(item)
        self._items.append(item)
        self._places.append(place)
        return self._queue.append(place)

    @property
    def is_over(self) -> bool:
        """Whether every item has its result."""
        return self._queue.is_done

    @property
    def is_next_unknown(self) -> bool:
        """Whether items are left, or may come, of which none can run yet."""
        return self._next is None and not self.is_over

    # What a subclass does otherwise.

    is_result_indivisible = False  # whether, while the next item is unknown, all of a result is held, not its end only

    def _fetch(self) -> None:
        """Have the queue know of what may run next; called before each choice."""

    def _before(self, index: int) -> None:
        """An attempt of the item at this position is about to begin."""

    def _alone(self) -> contextlib.AbstractContextManager[None]:
        """Have this process's GPU alone for the length of the block, as far as other processes of the run go."""
        return contextlib.nullcontext()

    def _finished(self, index: int) -> None:
        """The item at this position has its result, of which the end may still be held."""

    def _released(self) -> None:
        """Everything that was held has gone out."""

    def _wait_for_news(self, keys: list[str]) -> None:
        """Wait until one of the pending `keys` is settled; of none, return at once."""
        self._pool.wait_any(keys)

    def take_owed_error(self) -> pytest.TestReport | None:
        return self.owed_errors.pop(self._current, None)

    def run(self) -> bool:
        try:
            self._fetch()
            self._next = self._queue.take(None)
            while True:
                if self._next is None:
                    if not self.is_over:
                        self._next = self._wait_for_next()
                    if self._next is None or self._is_told_to_stop():
                        return True
                self._run_one(self._next)
                if self._is_told_to_stop():
                    return True
        finally:
            self._gate.remove()
            self.kept.close()
            self._deferral._attempt = None

    def _is_told_to_stop(self) -> bool:
        """Whether the loop ends here and all is well; raises what pytest's own loop raises where it is not."""
        raise_if_told_to_stop(self._session)
        return False

    def _run_one(self, index: int) -> None:
        self._current = index
        self._before(index)
        with self._alone() if index in self._out_of_memory else contextlib.nullcontext():
            attempt = self._attempt(index)
        if attempt.is_deferred:
            self._put_off(index, attempt)
        elif attempt.out_of_memory is not None and not self._is_stopping:
            self._try_again(index, attempt)
            return
        else:
            self._finished(index)
            self.kept.forget(index)
            if self._is_reported_now or not (self.is_result_indivisible and self.is_next_unknown):
                self._gate.release_all_but_teardown()
        if not self._is_stopping:
            if self.is_next_unknown and not self._is_reported_now:
                return  # what else is torn down depends on the next item: see _wait_for_next
            if attempt.is_deferred and self._next is not None:
                self._tear_down_between(index, self._items[self._next])
        self._gate.release()
        self._released()

    @property
    def _is_stopping(self) -> bool:
        return bool(self._session.shouldfail or self._session.shouldstop)

    def _attempt(self, index: int) -> Attempt:
        item = self._items[index]
        self._gate.install()
        attempt = Attempt.begin(item, self._generators.get(index))
        self._deferral._attempt = attempt
        self._gate.open_for(attempt)
        try:
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=self._likely_next(index))
        except BaseException:  # an exit or interrupt: what is held goes out or is dropped; raised on
            if attempt.is_deferred:
                self._gate.drop()
            else:
                self._gate.release()
            raise
        finally:
            self._deferral._attempt = None
            self._gate.close()
        if attempt.hook_error is not None:
            raise attempt.hook_error
        self.settle(attempt)  # a protocol without a tear-down, of a plugin's own, has not settled it
        return attempt

    def settle(self, attempt: Attempt) -> pytest.Item | None:
        """Decide whether the attempt counts and what runs next; returns the item to tear down towards.

        Called when the tear-down begins: from here on calls wait instead of raising, and reports go out at once.
        """
        if attempt.is_settled:
            return self._teardown_target(attempt)
        index = self._current
        if attempt.is_deferred or attempt.out_of_memory is not None:
            self._blame_gpu_faults(attempt)
        attempt.is_settled = True
        attempt.note_temporary()
        self._is_reported_now = False
        if attempt.out_of_memory is not None and not attempt.is_deferred:
            self._next = index
            return self._teardown_target(attempt)
        if attempt.is_deferred:
            self._queue.park(index)
            self._has_new_parked = True
            self._waiting_for[index] = frozenset(attempt.keys)
            for key in attempt.keys:
                self._pool.add_waiter(key)
        else:
            self._queue.finish(index)
        self._fetch()
        self._collect_ready()
        self._next = self._queue.take(index, self._scopes_in_use(index))
        self._is_reported_now = not attempt.is_deferred and self._may_end_the_run()
        has_failed = not attempt.is_deferred and self._gate.holds_failure
        if has_failed and not (self.is_result_indivisible and self.is_next_unknown):
            # What tears down may look at it, and pytest tears all down if it ends the run. To run the test again
            # because its tear-down runs out of memory would not help it.
            attempt.is_reported = True
            try:
                self._gate.release()
            except Exception as error:  # noqa: BLE001 - of somebody's hook, raised on when the tear-down is over
                attempt.hook_error = error
        return self._teardown_target(attempt)

    def _may_end_the_run(self) -> bool:
        """Whether somebody must know of a failure at once (-x, --maxfail) whose result would be held as a whole.

        All is torn down then, so that the result is complete.
        """
        is_held = self.is_result_indivisible and self.is_next_unknown
        return is_held and bool(self._session.config.getoption("maxfail")) and self._gate.holds_failure

    def _scopes_in_use(self, index: int) -> list[int]:
        """The scopes of an item, by position, that hold fixtures; the session is never left."""
        scopes = self._places[index].scopes
        return [
            level
            for level, scope in enumerate(scopes)
            if level and (isinstance(scope, tuple) or internals.holds_fixtures(self._session, scope))
        ]

    def _teardown_target(self, attempt: Attempt) -> pytest.Item | None:
        if attempt.does_not_count:
            return bookmark_beside(attempt.item)
        if self._is_stopping:
            return None
        if self._next is not None:
            return self._items[self._next]
        return None if self.is_over or self._is_reported_now else bookmark_beside(attempt.item)

    def _likely_next(self, index: int) -> pytest.Item | None:
        """What plugins are told; what is torn down is decided in `settle`."""
        return self._items[index + 1] if index + 1 < len(self._items) else None

    def _put_off(self, index: int, attempt: Attempt) -> None:
        nodeid = attempt.item.nodeid
        self._deferral.deferrals[nodeid] = self._deferral.deferrals.get(nodeid, 0) + 1
        self._undo(index, attempt)

    def _undo(self, index: int, attempt: Attempt) -> None:
        self._generators[index] = attempt.generators
        self.kept.keep(index, attempt.wider_output)
        if attempt.teardown_error is not None:
            self._notices.add(
                f"{attempt.item.nodeid} was put off, and tearing down that attempt failed: {attempt.teardown_error}; "
                "its result is that of its last attempt"
            )
        attempt.undo()
        internals.forget_failed_subtests(attempt.item)

    # Attempts that run out of device memory.

    def may_try_again(self, attempt: Attempt, error: BaseException) -> bool:
        """Whether an attempt that failed with `error` is made again, because a device had no memory left."""
        tries = len(self._out_of_memory.get(self._current, ()))
        return (
            tries < self._deferral.max_oom_retries
            and not attempt.is_reported
            and attempt.item.get_closest_marker(MARKER) is None
            and oom.is_out_of_memory(error)
        )

    def earlier_oom(self) -> list[str]:
        """What the current item's attempts have run out of, in words."""
        return [str(happened) for happened in self._out_of_memory.get(self._current, ())]

    def _try_again(self, index: int, attempt: Attempt) -> None:
        """Have the item run next, with nothing left of the attempt."""
        happened = attempt.out_of_memory
        assert happened is not None
        self._gate.drop()
        if self._next != index:  # it had counted until its tear-down failed
            self._queue.reopen(index)
            if self._next is not None:
                self._queue.put_back(self._next)
            self._next = index
        self._out_of_memory.setdefault(index, []).append(happened)
        self._deferral.oom_retries.append(f"{attempt.item.nodeid} was run again, alone on its GPU ({happened})")
        internals.finish_failed_fixtures(attempt.item, oom.is_out_of_memory)
        self._undo(index, attempt)
        internals.forget_log_records(attempt.item.config)
        oom.forget_last_error()
        oom.free_memory()

    def _blame_gpu_faults(self, attempt: Attempt) -> None:
        """Wait for the GPU work of an attempt that is about to be dropped: a fault in it is that test's failure."""
        torch = sys.modules.get("torch")
        cuda = getattr(torch, "cuda", None)
        if cuda is None or not cuda.is_initialized():
            return
        phase = "setup" if len(self._gate.held_reports()) < 2 else "call"
        call = pytest.CallInfo.from_call(cuda.synchronize, phase)  # type: ignore[arg-type]
        if call.excinfo is not None:
            attempt.keys.clear()
            if attempt.out_of_memory is not None:
                attempt.out_of_memory = None  # the error that was reported first stands
                return
            report = attempt.item.ihook.pytest_runtest_makereport(item=attempt.item, call=call)
            self._gate.replace_discarded_report(report)

    def _collect_ready(self) -> None:
        if not self._queue.parked:
            return
        settled = self._pool.settled
        if settled == self._settled_seen and not self._has_new_parked:
            return
        self._settled_seen, self._has_new_parked = settled, False
        pending = self._pending_keys()
        for index in self._queue.parked:
            if not self._waiting_for[index] & pending:
                self._queue.unpark(index)

    def _pending_keys(self) -> set[str]:
        """The pending keys that items wait for."""
        return self._pool.pending({key for index in self._queue.parked for key in self._waiting_for[index]})

    def _wait_for_next(self) -> int | None:
        """Wait until an item can run, and tear down what it does not share with the one before.

        Returns None where no item comes any more.
        """
        last = self._current
        while True:
            self._fetch()
            self._collect_ready()
            index = self._queue.take(last if last >= 0 else None, self._scopes_in_use(last) if last >= 0 else ())
            if index is not None or self.is_over or self._is_stopping:
                break
            # A key may settle just now: then there may be nothing left to wait for, and the next round sees it.
            self._wait_for_news(sorted(self._pending_keys()))
        if last >= 0:
            self._tear_down_between(last, self._items[index] if index is not None else None)
        self._gate.release()
        self._released()
        return index

    def _tear_down_between(self, last: int, nextitem: pytest.Item | None) -> None:
        if internals.is_torn_down_to(self._session, nextitem):
            return
        item = self._items[last]
        with internals.as_in_teardown(item) as said:
            call = pytest.CallInfo.from_call(
                lambda: internals.tear_down_to(self._session, nextitem),
                "teardown",
                reraise=(pytest.exit.Exception, KeyboardInterrupt),
            )
        held = self._gate.held_teardown_report()
        if held is not None:
            add_sections(held, said)
        else:
            self.kept.keep(last, said)
        if call.excinfo is None:
            return
        report = item.ihook.pytest_runtest_makereport(item=item, call=call)
        if held is not None:
            report.sections = held.sections
            self._gate.replace_teardown_report(report)
        else:
            self.owed_errors[last] = report  # it was put off: part of the result that it will have


class _Gate:
    """Stands in front of the hooks that publish what happens, and lets through what counts.

    What an attempt reports is held until its protocol is over, since its tear-down may still run out of device memory;
    where it has failed by then, until its tear-down begins. Between attempts the gate is open, except that the
    tear-down report of an item is held while it is not known yet whether a later step of its tear-down fails.
    """

    def __init__(self, loop: Loop, config: pytest.Config) -> None:
        self._loop = loop
        self._config = config
        self._hook = config.hook
        self._attempt: Attempt | None = None
        self._held: list[tuple[str, Any, dict[str, Any], bool]] = []
        self._former: dict[str, internals.HookExec] = {}
        self._former_finish: Callable[..., Any] = lambda fixturedef, request: None
        self._log_file = internals.log_file_handler(config)
        self._held_records: list[logging.LogRecord] = []
        self._is_in_wider = False

    def install(self) -> None:
        """Stand in front of the hooks, unless that has been done."""
        if self._former:
            return
        if self._log_file is not None:
            self._log_file.emit = self._on_log_record  # type: ignore[method-assign]
        handlers = dict.fromkeys(_HELD_HOOKS, self._on_publish)
        handlers["pytest_runtest_teardown"] = self._on_teardown
        handlers["pytest_runtest_makereport"] = self._on_makereport
        handlers["pytest_fixture_setup"] = self._on_fixture_setup
        for name, handler in handlers.items():
            self._former[name] = internals.swap_hook_exec(getattr(self._hook, name), handler)

        def finish(fixturedef: Any, request: Any) -> None:
            __tracebackhide__ = True
            self._on_fixture_finish(fixturedef, request)

        self._former_finish = internals.swap_fixture_finish(finish)

    def remove(self) -> None:
        if not self._former:
            return
        self.release()
        for name, former in self._former.items():
            internals.swap_hook_exec(getattr(self._hook, name), former)
        internals.swap_fixture_finish(self._former_finish)
        if self._log_file is not None:
            del self._log_file.emit  # the class's own again

    def open_for(self, attempt: Attempt) -> None:
        self._attempt = attempt

    def close(self) -> None:
        self._attempt = None

    def release_all_but_teardown(self) -> None:
        """Let out what is held before the report of the tear-down, in order."""
        reports = [entry[2].get("report") for entry in self._held]
        at = next((i for i, report in enumerate(reports) if report is not None and report.when == "teardown"), None)
        if at is None:
            self.release()
            return
        later = self._held[at:]
        del self._held[at:]
        self.release()
        self._held = later

    def release(self) -> None:
        """Let out what is held, in order."""
        held, self._held = self._held, []
        for name, methods, kwargs, firstresult in held:
            self._former[name](name, methods, kwargs, firstresult)
        records, self._held_records = self._held_records, []
        for record in records:
            self._write_record(record)

    def drop(self) -> None:
        """Forget what is held: it belongs to an attempt that does not count."""
        held, self._held = self._held, []
        for name, _, kwargs, _ in held:
            self._forget(name, kwargs)
        self._held_records.clear()

    def held_reports(self) -> list[pytest.TestReport]:
        return [kwargs["report"] for name, _, kwargs, _ in self._held if name == "pytest_runtest_logreport"]

    @property
    def holds_failure(self) -> bool:
        return any(report.failed for report in self.held_reports())

    def replace_discarded_report(self, report: pytest.TestReport) -> None:
        """Put `report` in the place of the one that said that the attempt was put off."""
        self._held = [entry for entry in self._held if not _is_discarded(entry[2].get("report"))]
        caller = self._hook.pytest_runtest_logreport
        self._held.append((caller.name, list(caller.get_hookimpls()), {"report": report}, False))

    def held_teardown_report(self) -> pytest.TestReport | None:
        return next((report for report in self.held_reports() if report.when == "teardown"), None)

    def replace_teardown_report(self, report: pytest.TestReport) -> None:
        """Put `report` in the place of the item's own tear-down report, which is held."""
        for name, _, kwargs, _ in self._held:
            if name == "pytest_runtest_logreport" and kwargs["report"].when == "teardown":
                kwargs["report"] = report

    def _on_publish(self, name: str, methods: Sequence[Any], kwargs: dict[str, Any], firstresult: bool) -> Any:
        __tracebackhide__ = True
        attempt, loop = self._attempt, self._loop
        if attempt is None or os.getpid() != loop.pid:
            return self._former[name](name, methods, kwargs, firstresult)
        nothing: list[Any] | None = None if firstresult else []
        if attempt.is_settled and attempt.is_deferred:
            if any(kwargs.get("warning_message") is warning for warning in attempt.wider_warnings):
                return self._former[name](name, methods, kwargs, firstresult)  # it will not be warned of again
            self._note_teardown_error(attempt, name, kwargs)
            self._forget(name, kwargs)
            return nothing
        if attempt.out_of_memory is not None:
            self._note_teardown_error(attempt, name, kwargs)
        elif attempt.is_settled:
            self._pay_owed_error(name, kwargs)
        self._held.append((name, list(methods), kwargs, firstresult))
        return nothing

    def _on_log_record(self, record: logging.LogRecord) -> None:
        """Stands before the handler of `--log-file`, which writes what is logged at once."""
        attempt = self._attempt
        is_outside = attempt is None or os.getpid() != self._loop.pid or self._is_in_wider
        if attempt is None or is_outside:
            self._write_record(record)
        elif not (attempt.is_settled and attempt.is_deferred):
            try:  # as text: what it refers to may change, or be what the attempt must let go of
                self._held_records.append(_TO_TEXT.prepare(record))
            except Exception:  # noqa: BLE001 - what `emit` does with a record that cannot be formatted
                assert self._log_file is not None
                self._log_file.handleError(record)

    def _write_record(self, record: logging.LogRecord) -> None:
        assert self._log_file is not None
        type(self._log_file).emit(self._log_file, record)

    @staticmethod
    def _note_teardown_error(attempt: Attempt, name: str, kwargs: dict[str, Any]) -> None:
        is_teardown = name == "pytest_runtest_logreport" and kwargs["report"].when == "teardown"
        if is_teardown and kwargs["report"].failed and attempt.out_of_memory_when != "teardown":
            attempt.teardown_error = internals.crash_line(kwargs["report"])

    def _pay_owed_error(self, name: str, kwargs: dict[str, Any]) -> None:
        """A wider fixture failed when it was torn down after an earlier attempt: part of this item's result."""
        if name == "pytest_runtest_logreport" and kwargs["report"].when == "teardown":
            owed = self._loop.take_owed_error()
            if owed is not None and kwargs["report"].passed:
                kwargs["report"] = owed

    def _forget(self, name: str, kwargs: dict[str, Any]) -> None:
        if name == "pytest_warning_recorded":
            internals.forget_historic_call(getattr(self._hook, name), kwargs)

    def _on_teardown(self, name: str, methods: Sequence[Any], kwargs: dict[str, Any], firstresult: bool) -> Any:
        __tracebackhide__ = True
        attempt = self._attempt
        if attempt is not None and kwargs.get("item") is attempt.item:
            kwargs = {**kwargs, "nextitem": self._loop.settle(attempt)}
            if attempt.is_deferred:
                self.drop()
        return self._former[name](name, methods, kwargs, firstresult)

    def _on_fixture_setup(self, name: str, methods: Sequence[Any], kwargs: dict[str, Any], firstresult: bool) -> Any:
        __tracebackhide__ = True
        attempt = self._attempt
        is_wider = kwargs["fixturedef"].scope != "function"
        try:
            with self._as_wider() if is_wider else contextlib.nullcontext():
                result = self._former[name](name, methods, kwargs, firstresult)
        except BaseException as error:
            if attempt is not None and attempt.is_deferred:
                internals.mark_fixture_as_set_up(kwargs["fixturedef"], kwargs["request"], error)
            raise
        if attempt is not None and is_wider and not attempt.is_settled:
            attempt.note_wider_fixture()
        return result

    def _on_fixture_finish(self, fixturedef: Any, request: Any) -> None:
        """A wider fixture is also torn down where one with another parameter takes its place, in a set-up."""
        __tracebackhide__ = True
        is_wider = fixturedef.scope != "function" and getattr(request, "config", None) is self._config
        with self._as_wider() if is_wider else contextlib.nullcontext():
            self._former_finish(fixturedef, request)

    @contextlib.contextmanager
    def _as_wider(self) -> Iterator[None]:
        """What is said in the block is said once, by a fixture that stays whether the attempt counts or not."""
        __tracebackhide__ = True
        attempt, was_wider = self._attempt, self._is_in_wider
        if attempt is None or attempt.is_settled or was_wider:
            yield
            return
        self._is_in_wider = True
        try:
            with self._loop.kept.listen(attempt, "call" if self.held_reports() else "setup"):
                yield
        finally:
            self._is_in_wider = False

    def _on_makereport(self, name: str, methods: Sequence[Any], kwargs: dict[str, Any], firstresult: bool) -> Any:
        __tracebackhide__ = True
        attempt, call = self._attempt, kwargs["call"]
        if attempt is not None and attempt.is_deferred and not attempt.is_settled:
            internals.forget_unittest_errors(kwargs["item"])
            internals.note_phase(kwargs["item"], call.when)
            if call.excinfo is not None:
                oom.let_go(call.excinfo.value)
            return _discarded_report(kwargs["item"], call)
        report = self._former[name](name, methods, kwargs, firstresult)
        if attempt is None or os.getpid() != self._loop.pid or call.excinfo is None or not report.failed:
            return report
        if not attempt.is_deferred and self._loop.may_try_again(attempt, call.excinfo.value):
            attempt.run_out_of_memory(call.when, call.excinfo.value)
        elif earlier := self._loop.earlier_oom():
            report.sections += [("Out of device memory in an earlier attempt", text) for text in earlier]
        return report


def raise_if_told_to_stop(session: pytest.Session) -> None:
    """Raise what pytest's own loop raises between two items if somebody has ended the run."""
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    if session.shouldstop:
        raise session.Interrupted(session.shouldstop)


def place_of(item: pytest.Item) -> Place:
    """Where an item stands: its collectors, and the wider parameters that fixtures are set up for."""
    scopes: list[Any] = list(item.listchain()[:-1])
    callspec = getattr(item, "callspec", None)
    if callspec is not None:
        wider = callspec._arg2scope if hasattr(callspec, "_arg2scope") else {}
        named = [(n, callspec.indices.get(n)) for n, scope in sorted(wider.items()) if scope.value != "function"]
        if named:
            scopes.append(tuple(named))
    return Place(tuple(scopes), item.getparent(pytest.Class))


def bookmark_beside(item: pytest.Item) -> pytest.Item:
    assert item.parent is not None
    bookmark = Bookmark.from_parent(item.parent, name="(next)")
    bookmark.beside = item
    return bookmark


def _discarded_report(item: pytest.Item, call: pytest.CallInfo[Any]) -> pytest.TestReport:
    """A report that nobody sees: without the cost of formatting a traceback, and no failure to plugins that rerun."""
    return pytest.TestReport(
        nodeid=item.nodeid,
        location=item.location,
        keywords={},
        outcome="skipped",
        longrepr=("", 0, _PUT_OFF),
        when=call.when,  # type: ignore[arg-type]
    )


def _is_discarded(report: Any) -> bool:
    return report is not None and report.skipped and report.longrepr == ("", 0, _PUT_OFF)


def _why_not_abandon_gpu_work() -> str | None:
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    if _is_capturing(getattr(torch, "cuda", None)):
        return "it runs while a CUDA graph is captured"
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return "it runs in a distributed test"
    return None


def _is_capturing(cuda: Any) -> bool:
    try:
        return cuda is not None and cuda.is_initialized() and bool(cuda.is_current_stream_capturing())
    except RuntimeError:  # the device has failed: `Loop._blame_gpu_faults` says so when the attempt is over
        return False
