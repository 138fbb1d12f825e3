"""Everything that leans on the inside of xdist, one small function each.

Written for xdist 3.7 to 3.8; `tests/deferral/test_xdist_internals.py` notices when it changes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from typing import Any, Final

import pytest

_NEEDED: Final = ("torun", "channel", "handle_command", "sendevent", "config")


class WorkerChannel:
    """A worker's line to the controller: which tests to run comes in, what became of them goes out.

    Attributes:
        end: what `take` returns when no test comes any more.
    """

    def __init__(self, interactor: Any) -> None:
        """Take xdist's own plugin of the worker."""
        self._interactor = interactor
        self.end: Final = _end_mark(interactor)

    def listen(self, act: Callable[[Any], None]) -> None:
        """Have `act` called with every command, in another thread; it passes on to `handle` what it leaves alone."""
        self._interactor.channel.setcallback(act, endmarker=self.end)

    def handle(self, command: Any) -> None:
        """Do what xdist does with a command."""
        self._interactor.handle_command(command)

    def take(self) -> Any:
        """The next test, as an index into the session's items; None where there is none yet; `end` after the last."""
        with self._interactor.torun.lock() as items:
            return items.popleft() if items else None

    def give_back(self, indices: Collection[int]) -> list[int]:
        """Remove tests that nobody has taken, of those given; returns them."""
        with self._interactor.torun.lock() as items:
            given = [index for index in items if index is not self.end and index in indices]
            for index in given:
                items.remove(index)
        return given

    def tell_unscheduled(self, indices: list[int]) -> None:
        """Answer a request to give tests back; nobody hears it where the controller is gone."""
        with contextlib.suppress(OSError):
            self._interactor.sendevent("unscheduled", indices=indices)

    def tell_complete(self, index: int, duration_s: float) -> None:
        """Say that a test has its outcome, after its last report."""
        self._interactor.sendevent("runtest_protocol_complete", item_index=index, duration=duration_s)

    def begin(self, index: int, title: str) -> None:
        """Say which test the coming reports are about, and show it as the name of the process."""
        self._interactor.item_index = index
        show = type(self._interactor).handle_command.__globals__.get("worker_title")
        if show is not None:
            show(title)


def find_worker_channel(config: pytest.Config) -> WorkerChannel | None:
    """The line to the controller; None where this xdist has none that we know."""
    for plugin in config.pluginmanager.get_plugins():
        if type(plugin).__name__ == "WorkerInteractor":
            is_known = all(hasattr(plugin, name) for name in _NEEDED) and hasattr(plugin.torun, "lock")
            return WorkerChannel(plugin) if is_known and _end_mark(plugin) is not None else None
    return None


def tell_worker(node: Any, name: str) -> None:
    """Send a command of our own to a worker, from the controller; xdist's own loop there leaves it alone."""
    with contextlib.suppress(OSError):  # it is gone
        node.sendcommand(name)


def is_command(command: Any, name: str) -> bool:
    """Whether a worker has been sent this command."""
    return isinstance(command, tuple) and bool(command[0] == name)


def stolen_indices(command: Any) -> list[int] | None:
    """Which tests a command asks back; None where it is another command."""
    if isinstance(command, tuple) and command[0] == "steal":
        return list(command[1]["indices"])
    return None


def _end_mark(interactor: Any) -> Any:
    marker = type(interactor).handle_command.__globals__.get("Marker")  # since 3.7
    return marker.SHUTDOWN if marker is not None else getattr(interactor, "SHUTDOWN_MARK", None)


def find_scheduler(config: pytest.Config) -> Any:
    """The controller's scheduler; None before it is made."""
    return getattr(config.pluginmanager.get_plugin("dsession"), "sched", None)


def has_scheduled(config: pytest.Config) -> bool:
    """Whether tests have been given out: not where workers have collected different ones."""
    scheduler = find_scheduler(config)
    return scheduler is not None and getattr(scheduler, "collection", ()) is not None


def is_ended_early(config: pytest.Config) -> bool:
    """Whether the controller has been told to stop before all tests have run (-x, --maxfail, an interrupt)."""
    return bool(getattr(config.pluginmanager.get_plugin("dsession"), "shouldstop", False))


def on_event(config: pytest.Config, name: str, act: Callable[[Any], None]) -> None:
    """Have `act` called with a worker in the controller's own loop, whenever `post_event` says so."""
    dsession = config.pluginmanager.get_plugin("dsession")
    if dsession is not None:
        setattr(dsession, f"worker_{name}", lambda node: act(node))


def post_event(node: Any, name: str) -> None:
    """Have something done about a worker in the controller's own loop; may be called from any thread."""
    node.notify_inproc(name, node=node)


def send_more(scheduler: Any, node: Any, completed: int) -> None:
    """Send a worker more tests, if it has not had its share: all that it has is put off, so it has nothing to do.

    The schedulers count a test that was put off as one that the worker is about to run. One that has given out
    everything (`worksteal`, `each`) has no more to send. The share is what each worker would get of an even division,
    so that a worker that is early leaves to the others what is theirs.
    """
    nodes = getattr(scheduler, "nodes", ())
    if node not in nodes or node.shutting_down:
        return
    if hasattr(scheduler, "_send_tests") and not hasattr(scheduler, "steal_requested_from_node"):
        held = completed + len(scheduler.node2pending[node])
        room = -(-len(scheduler.collection) // len(nodes)) - held
        if not scheduler.pending:
            node.shutdown()  # as the scheduler does when a test is complete and none is left
        elif room > 0:
            scheduler._send_tests(node, min(room, max(2, len(scheduler.pending) // len(nodes) // 4)))
    elif hasattr(scheduler, "_assign_work_unit"):
        held = sum(len(unit) for unit in scheduler.assigned_work.get(node, {}).values())
        total = len(scheduler.registered_collections.get(node, ()))
        if not scheduler.workqueue:
            node.shutdown()
        elif held * len(nodes) < total:
            scheduler._assign_work_unit(node)


def blame(scheduler: Any, node: Any, running: int | None) -> None:
    """Have the crash of a worker blamed on the test that was running on it, and on none where none was.

    The scheduler itself takes the first test that it has sent and that is not complete, which may be one that was put
    off. The schedulers by scope also hand out the work of a dead worker again with the test that killed it, and with
    units that are complete, after which a worker waits for ever.
    """
    original = scheduler.remove_node

    def remove_node(dead: Any) -> Any:
        del scheduler.remove_node  # the class's own again
        if dead is not node:
            return original(dead)
        if hasattr(scheduler, "node2pending"):
            return _remove_from_list(scheduler, dead, running, original)
        if hasattr(scheduler, "assigned_work"):
            return _remove_from_scopes(scheduler, dead, running, original)
        return original(dead)

    scheduler.remove_node = remove_node


def _remove_from_list(scheduler: Any, node: Any, running: int | None, original: Callable[[Any], Any]) -> Any:
    pending = scheduler.node2pending.get(node)
    if not pending:
        return original(node)
    if running in pending:
        pending.remove(running)
        pending.insert(0, running)
        return original(node)
    pending.insert(0, pending[0])  # the first is taken for the culprit and dropped
    original(node)
    return None


def _remove_from_scopes(scheduler: Any, node: Any, running: int | None, original: Callable[[Any], Any]) -> Any:
    work, collection = scheduler.assigned_work.get(node), scheduler.registered_collections.get(node)
    if work is None or collection is None:
        return original(node)
    culprit = None
    if running is not None:
        nodeid = collection[running]
        unit = work.get(scheduler._split_scope(nodeid), {})
        if unit.get(nodeid) is False:
            culprit, unit[nodeid] = nodeid, True
    for scope in [scope for scope, unit in work.items() if all(unit.values())]:
        del work[scope]
    _keep_two_pending(scheduler)
    original(node)
    return culprit


def _keep_two_pending(scheduler: Any) -> None:
    """Have each worker get a second test, or the word that there is none: it waits for that before it runs the first.

    At the start the scheduler sees to it; it does not for the worker that replaces a dead one.
    """
    original = scheduler._reschedule

    def reschedule(node: Any) -> None:
        original(node)
        if scheduler._pending_of(scheduler.assigned_work.get(node, {})) < 2:
            original(node)

    scheduler._reschedule = reschedule


def expected_outcomes(config: pytest.Config) -> int:
    """How many outcomes each test must have: one, or one of each worker where each runs all."""
    dsession = config.pluginmanager.get_plugin("dsession")
    if config.getoption("dist", "no") != "each":
        return 1
    with contextlib.suppress(AttributeError):
        return len(dsession.nodemanager.specs)  # type: ignore[union-attr]
    return 1
