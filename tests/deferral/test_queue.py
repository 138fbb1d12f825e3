"""Which item runs next, on values."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_quack.deferral.queue import ItemQueue, Place, shared_scopes

pytestmark = pytest.mark.light


def place(text: str) -> Place:
    """ "a/B" is class B of module a, "a" a function of module a."""
    module, _, cls = text.partition("/")
    scopes = ("session", module, *([cls] if cls else []))
    return Place(scopes, (module, cls) if cls else None)


def drain(queue: ItemQueue, last: int | None = None) -> list[int]:
    order = []
    while (index := queue.take(last)) is not None:
        order.append(index)
        queue.finish(index)
        last = index
    return order


def test_items_run_in_their_order_when_nothing_is_put_off() -> None:
    queue = ItemQueue([place("a"), place("a/B"), place("c")])
    assert drain(queue) == [0, 1, 2]
    assert queue.is_done


def test_ready_item_runs_before_its_module_is_left() -> None:
    queue = ItemQueue([place("a"), place("a"), place("b")])
    assert queue.take(None) == 0
    queue.park(0)
    assert queue.take(0) == 1
    queue.unpark(0)
    queue.finish(1)
    assert drain(queue, 1) == [0, 2]


def test_ready_item_of_another_module_waits_until_this_one_is_through() -> None:
    queue = ItemQueue([place("a"), place("b"), place("b"), place("c")])
    assert queue.take(None) == 0
    queue.park(0)
    assert queue.take(0) == 1
    queue.finish(1)
    queue.unpark(0)
    assert queue.take(1) == 2
    queue.finish(2)
    assert drain(queue, 2) == [0, 3]


def test_all_that_is_left_waits() -> None:
    queue = ItemQueue([place("a"), place("a")])
    for index in (0, 1):
        assert queue.take(None) == index
        queue.park(index)
    assert queue.take(1) is None
    assert not queue.is_done
    assert queue.parked == {0, 1}
    queue.unpark(1)
    assert queue.take(1) == 1


def test_later_items_of_a_class_wait_for_one_that_is_put_off() -> None:
    queue = ItemQueue([place("a/B"), place("a/B"), place("a/B"), place("a")])
    assert queue.take(None) == 0
    queue.park(0)
    assert queue.take(0) == 3
    queue.finish(3)
    assert queue.take(3) is None
    queue.unpark(0)
    assert drain(queue, 3) == [0, 1, 2]


def test_shared_scopes_stop_at_the_first_difference() -> None:
    assert shared_scopes(place("a/B"), place("a/B")) == 3
    assert shared_scopes(place("a/B"), place("a")) == 2
    assert shared_scopes(place("a"), place("b")) == 1


@given(
    places=st.lists(st.sampled_from(["a", "a/B", "a/C", "b", "b/B", "c"]), min_size=1, max_size=14),
    choices=st.lists(st.integers(0, 5), min_size=60, max_size=60),
)
def test_every_item_is_finished_once_and_classes_keep_their_order(places: list[str], choices: list[int]) -> None:
    queue = ItemQueue([place(text) for text in places])
    finished: list[int] = []
    waiting: list[int] = []
    last = None
    for choice in [*choices, *([5] * 200)]:
        if waiting and choice % 2:
            queue.unpark(waiting.pop(choice % len(waiting)))
        index = queue.take(last)
        if index is None:
            continue
        last = index
        if choice in (0, 2, 4):
            queue.park(index)
            waiting.append(index)
        else:
            queue.finish(index)
            finished.append(index)
    assert sorted(finished) == list(range(len(places)))
    assert queue.is_done
    for group in {text for text in places if "/" in text}:
        members = [index for index in finished if places[index] == group]
        assert members == sorted(members)


def test_scope_that_holds_something_is_not_left_while_an_item_of_it_waits() -> None:
    queue = ItemQueue([place("a"), place("a/B"), place("a"), place("c")])
    assert queue.take(None) == 0
    queue.finish(0)
    assert queue.take(0) == 1
    queue.park(1)
    assert queue.take(1, [2]) is None, "nothing else of the class"
    assert queue.take(1, [1]) == 2, "the class holds nothing, the module does"
    queue.finish(2)
    assert queue.take(2, [1]) is None
    queue.unpark(1)
    assert queue.take(2, [1]) == 1
    queue.finish(1)
    assert queue.take(1, [1, 2]) == 3


def test_scope_is_left_where_it_holds_nothing_or_nothing_waits() -> None:
    queue = ItemQueue([place("a"), place("b"), place("c")])
    assert queue.take(None) == 0
    queue.park(0)
    assert queue.take(0) == 1
    queue.finish(1)
    assert queue.take(1, [1]) == 2


def test_items_may_come_one_by_one() -> None:
    queue = ItemQueue()
    assert queue.is_done
    assert not queue.has_candidate
    assert queue.append(place("a")) == 0
    assert (queue.remaining, queue.has_candidate) == (1, True)
    assert queue.take(None) == 0
    assert (queue.remaining, queue.has_candidate) == (1, False)
    queue.append(place("a"))
    assert queue.has_candidate
    queue.finish(0)
    assert drain(queue, 0) == [1]
    assert queue.is_done


def test_only_what_does_not_run_can_be_withdrawn() -> None:
    queue = ItemQueue([place("a"), place("a"), place("a")])
    assert [queue.take(None), queue.take(0)] == [0, 1]
    queue.park(0)
    assert queue.withdraw(0)
    assert not queue.withdraw(0)
    assert not queue.withdraw(1)
    queue.park(1)
    queue.unpark(1)
    assert queue.withdraw(1)
    assert drain(queue, 1) == [2]
    assert not queue.withdraw(2)
    assert queue.is_done


def test_withdrawn_item_holds_nobody_of_its_class_and_no_scope() -> None:
    queue = ItemQueue([place("a/B"), place("a/B"), place("a/B"), place("c")])
    assert queue.take(None) == 0
    queue.park(0)
    assert queue.take(0) == 3  # the others of the class are held
    assert queue.withdraw(1)
    queue.finish(3)
    assert queue.take(3) is None
    assert queue.withdraw(0)
    assert drain(queue, 3) == [2]
    assert queue.is_done
    assert queue.take(2, in_use=[1, 2]) is None
