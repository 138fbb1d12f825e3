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
