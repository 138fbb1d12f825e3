"""Having a GPU alone among workers that share it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from pytest_quack.gpu.turns import Turns

pytestmark = pytest.mark.light


class Worker:
    """Stands aside as a worker does: when it has been asked, and is between two tests."""

    def __init__(self, turns: Turns, name: str, devices: set[str]) -> None:
        self.turns, self.name = turns, name
        self.asked = threading.Event()
        turns.enter(name, frozenset(devices), self.asked.set)

    def start(self, act: Callable[[str], object]) -> threading.Thread:
        thread = threading.Thread(target=act, args=(self.name,), daemon=True)
        thread.start()
        return thread


def is_waiting(thread: threading.Thread) -> bool:
    thread.join(0.1)
    return thread.is_alive()


def ended(thread: threading.Thread) -> bool:
    thread.join(10)
    return not thread.is_alive()


def test_alone_at_once_without_siblings() -> None:
    turns = Turns()
    a, b = Worker(turns, "a", {"0"}), Worker(turns, "b", {"1"})
    assert turns.take_alone("a")
    assert not b.asked.is_set()
    turns.stand_aside("b")  # returns: nobody wants its device
    assert turns.take_alone("b")
    assert not a.asked.is_set()


def test_siblings_are_asked_and_waited_for() -> None:
    turns = Turns()
    a, b, c = Worker(turns, "a", {"0"}), Worker(turns, "b", {"0", "1"}), Worker(turns, "c", set())
    taking = a.start(turns.take_alone)
    assert b.asked.wait(10)
    assert c.asked.wait(10)  # which devices it has is not known
    assert is_waiting(taking)
    b_aside = b.start(turns.stand_aside)
    assert is_waiting(taking)
    c_aside = c.start(turns.stand_aside)
    assert ended(taking)
    assert is_waiting(b_aside)
    assert is_waiting(c_aside)
    turns.give_back("a")
    assert ended(b_aside)
    assert ended(c_aside)


def test_one_after_the_other() -> None:
    turns = Turns()
    a, b = Worker(turns, "a", {"0"}), Worker(turns, "b", {"0"})
    taking_a = a.start(turns.take_alone)
    assert b.asked.wait(10)
    taking_b = b.start(turns.take_alone)  # it waits for its own turn, so it runs nothing: as good as aside
    assert ended(taking_a)
    assert is_waiting(taking_b)
    turns.give_back("a")
    assert is_waiting(taking_b)  # until a is between two tests again
    assert a.asked.is_set()
    aside = a.start(turns.stand_aside)
    assert ended(taking_b)
    assert is_waiting(aside)
    turns.give_back("b")
    assert ended(aside)


@pytest.mark.parametrize("who", ["a", "b"])
def test_worker_that_is_gone_holds_up_nobody(who: str) -> None:
    turns = Turns()
    a, b = Worker(turns, "a", {"0"}), Worker(turns, "b", {"0"})
    if who == "b":  # the one that is waited for
        taking = a.start(turns.take_alone)
        assert b.asked.wait(10)
        turns.leave("b")
        assert ended(taking)
        return
    aside = b.start(turns.stand_aside)
    assert ended(aside)
    taking = a.start(turns.take_alone)
    assert b.asked.wait(10)
    aside = b.start(turns.stand_aside)
    assert ended(taking)
    assert is_waiting(aside)
    turns.leave("a")  # it died while it had the device alone
    assert ended(aside)


def test_waiting_worker_that_dies_gives_up_its_place() -> None:
    turns = Turns()
    a, b = Worker(turns, "a", {"0"}), Worker(turns, "b", {"0"})
    taken: list[bool] = []
    taking = a.start(lambda name: taken.append(turns.take_alone(name)))
    assert b.asked.wait(10)
    turns.leave("a")
    assert ended(taking)
    assert taken == [False]
    turns.stand_aside("b")


def test_patience_ends() -> None:
    turns = Turns()
    Worker(turns, "a", {"0"})
    b = Worker(turns, "b", {"0"})
    began = time.monotonic()
    assert not turns.take_alone("a", 0.2)
    assert time.monotonic() - began >= 0.2
    assert b.asked.is_set()
    turns.stand_aside("b")  # the request is over


def test_worker_that_comes_while_another_is_alone_waits() -> None:
    turns = Turns()
    Worker(turns, "a", {"0"})
    assert turns.take_alone("a")
    b = Worker(turns, "b", {"0"})
    aside = b.start(turns.stand_aside)
    assert is_waiting(aside)
    turns.give_back("a")
    assert ended(aside)


def test_name_that_is_not_known_waits_for_nobody() -> None:
    turns = Turns()
    Worker(turns, "a", {"0"})
    assert turns.take_alone("stranger", 5)
    turns.give_back("stranger")
    turns.leave("stranger")
    turns.stand_aside("stranger")
