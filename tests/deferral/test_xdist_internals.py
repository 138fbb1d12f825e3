"""Notices when the inside of xdist that we lean on changes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pytest_quack.deferral import xdist_internals

pytestmark = pytest.mark.light
remote = pytest.importorskip("xdist.remote", reason="needs pytest-xdist")
scheduler = pytest.importorskip("xdist.scheduler")


class Node:
    """A worker as a scheduler knows it."""

    shutting_down = False


class Worker:
    """A worker that keeps what it is sent."""

    def __init__(self) -> None:
        self.shutting_down = False
        self.sent: list[int] = []

    def send_runtest_some(self, indices: list[int]) -> None:
        self.sent += indices

    def shutdown(self) -> None:
        self.shutting_down = True


class FakeExecModel:
    """What xdist's queue needs of execnet's model of threads."""

    def RLock(self) -> Any:  # noqa: N802 - its name there
        import threading

        return threading.RLock()

    def Event(self) -> Any:  # noqa: N802 - its name there
        import threading

        return threading.Event()


def interactor(config: pytest.Config) -> Any:
    channel = SimpleNamespace(gateway=SimpleNamespace(execmodel=FakeExecModel()), sent=[])
    channel.send = channel.sent.append
    config.workerinput = {"workerid": "gw0", "testrunuid": "1"}  # type: ignore[attr-defined]
    return remote.WorkerInteractor(config, channel)


def test_worker_channel_is_found_and_takes_gives_back_and_tells(pytester: pytest.Pytester) -> None:
    config = pytester.parseconfig()
    assert xdist_internals.find_worker_channel(config) is None
    plugin = interactor(config)
    channel = xdist_internals.find_worker_channel(config)
    assert channel is not None
    assert channel.take() is None
    channel.handle(("runtests", {"indices": [3, 1, 2]}))
    channel.handle(channel.end)
    assert channel.take() == 3
    assert channel.give_back([2, 3]) == [2]
    assert channel.take() == 1
    assert channel.take() is channel.end
    channel.tell_complete(3, 0.5)
    channel.tell_unscheduled([2])
    channel.begin(7, "title")
    assert plugin.item_index == 7
    assert plugin.channel.sent == [
        ("runtest_protocol_complete", {"item_index": 3, "duration": 0.5}),
        ("unscheduled", {"indices": [2]}),
    ]


def test_steal_command_is_known() -> None:
    assert xdist_internals.stolen_indices(("steal", {"indices": [1, 2]})) == [1, 2]
    assert xdist_internals.stolen_indices(("runtests", {"indices": [1]})) is None


def lists(name: str, config: pytest.Config) -> tuple[Any, Any]:
    """A scheduler by lists with one worker, which has been sent tests 0 to 3."""
    made, node = getattr(scheduler, name)(config), Node()
    made.node2pending[node] = [0, 1, 2, 3]
    made.collection = ["a", "b", "c", "d"]
    if hasattr(made, "node2collection"):
        made.node2collection[node] = made.collection
    return made, node


@pytest.mark.parametrize("name", ["LoadScheduling", "WorkStealingScheduling", "EachScheduling"])
@pytest.mark.parametrize(("running", "culprit", "left"), [(2, "c", [0, 1, 3]), (None, None, [0, 1, 2, 3])])
def test_schedulers_by_lists_blame_what_ran(
    pytester: pytest.Pytester, name: str, running: int | None, culprit: str | None, left: list[int]
) -> None:
    made, node = lists(name, pytester.parseconfig("--tx=popen"))
    if name != "EachScheduling":
        made.numnodes = 1
        made.check_schedule = lambda *args, **kwargs: None
    xdist_internals.blame(made, node, running)
    assert made.remove_node(node) == culprit
    rest = made._removed2pending[node] if name == "EachScheduling" else made.pending
    assert rest == left


@pytest.mark.parametrize("name", ["LoadScopeScheduling", "LoadFileScheduling", "LoadGroupScheduling"])
@pytest.mark.parametrize(("running", "culprit"), [(2, "b.py::x"), (None, None)])
def test_schedulers_by_scope_blame_what_ran_and_hand_out_the_rest(
    pytester: pytest.Pytester, name: str, running: int | None, culprit: str | None
) -> None:
    made, node = getattr(scheduler, name)(pytester.parseconfig("--tx=popen")), Node()
    collection = ["a.py::x", "a.py::y", "b.py::x", "b.py::y"]
    made.registered_collections[node] = collection
    work: dict[str, dict[str, bool]] = {}
    for nodeid in collection:
        work.setdefault(made._split_scope(nodeid), {})[nodeid] = nodeid.startswith("a")
    made.assigned_work[node] = work
    xdist_internals.blame(made, node, running)
    assert made.remove_node(node) == culprit
    left = {nodeid for unit in made.workqueue.values() for nodeid, is_complete in unit.items() if not is_complete}
    assert left == {"b.py::x", "b.py::y"} - {culprit}
    assert not any(all(unit.values()) for unit in made.workqueue.values())


def loaded(config: pytest.Config, tests: int, sent: int) -> tuple[Any, Worker, Worker]:
    """LoadScheduling with two workers, of which the first has been sent some tests."""
    made, first, second = scheduler.LoadScheduling(config), Worker(), Worker()
    made.node2pending.update({first: list(range(sent)), second: []})
    made.collection = [f"t{number}" for number in range(tests)]
    made.pending = list(range(sent, tests))
    return made, first, second


def test_idle_worker_is_sent_more_up_to_its_share(pytester: pytest.Pytester) -> None:
    made, first, second = loaded(pytester.parseconfig("--tx=2*popen"), 20, 2)
    while True:
        before = len(first.sent)
        xdist_internals.send_more(made, first, completed=3)
        if len(first.sent) == before:
            break
    assert first.sent == [2, 3, 4, 5, 6]  # three are complete and two were there: ten of twenty
    assert made.node2pending[first] == list(range(7))
    assert made.pending == list(range(7, 20))
    assert not first.shutting_down
    assert not second.sent


def test_idle_worker_of_a_scheduler_that_has_no_more_is_told_so(pytester: pytest.Pytester) -> None:
    config = pytester.parseconfig("--tx=2*popen")
    made, first, second = loaded(config, 4, 4)
    xdist_internals.send_more(made, first, completed=0)
    assert first.shutting_down
    xdist_internals.send_more(made, first, completed=0)  # it is on its way out
    xdist_internals.send_more(made, Worker(), completed=0)  # nobody knows this one
    xdist_internals.send_more(None, second, completed=0)
    assert not first.sent
    assert not second.shutting_down


@pytest.mark.parametrize("name", ["WorkStealingScheduling", "EachScheduling"])
def test_schedulers_that_give_everything_out_at_first_are_left_alone(pytester: pytest.Pytester, name: str) -> None:
    made, first = getattr(scheduler, name)(pytester.parseconfig("--tx=popen")), Worker()
    made.node2pending[first] = [0, 1]
    xdist_internals.send_more(made, first, completed=0)
    assert not first.sent
    assert not first.shutting_down


@pytest.mark.parametrize("name", ["LoadScopeScheduling", "LoadFileScheduling", "LoadGroupScheduling"])
def test_idle_worker_is_sent_another_scope_up_to_its_share(pytester: pytest.Pytester, name: str) -> None:
    made, first, second = getattr(scheduler, name)(pytester.parseconfig("--tx=2*popen")), Worker(), Worker()
    collection = [f"{name}.py::{test}" for name in "abcd" for test in "xy"]
    units: dict[str, dict[str, bool]] = {}
    for nodeid in collection:
        units.setdefault(made._split_scope(nodeid), {})[nodeid] = False
    scopes = list(units)
    for node in (first, second):
        made.registered_collections[node] = collection
        made.assigned_work[node] = {}
    made.assigned_work[first] = {scopes[0]: units[scopes[0]]}
    made.workqueue.update({scope: units[scope] for scope in scopes[1:]})
    for _ in range(5):
        xdist_internals.send_more(made, first, completed=0)
    share = 3 if name == "LoadGroupScheduling" else 1  # its scopes are single tests here
    assert len(first.sent) == (share if name == "LoadGroupScheduling" else 2)
    assert not first.shutting_down
    made.workqueue.clear()
    xdist_internals.send_more(made, first, completed=0)
    assert first.shutting_down


def test_events_of_ours_reach_the_controllers_loop(pytester: pytest.Pytester) -> None:
    config, seen = pytester.parseconfig("--tx=popen"), []
    xdist_internals.on_event(config, "quack_test", seen.append)  # no loop: nothing happens
    dsession = SimpleNamespace()
    config.pluginmanager.register(dsession, "dsession")
    xdist_internals.on_event(config, "quack_test", seen.append)
    queue: list[Any] = []
    node = SimpleNamespace(notify_inproc=lambda name, **kwargs: queue.append((name, kwargs)))
    xdist_internals.post_event(node, "quack_test")
    ((name, kwargs),) = queue
    getattr(dsession, f"worker_{name}")(**kwargs)
    assert seen == [node]
