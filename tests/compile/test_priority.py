"""Which key is compiled next."""

from __future__ import annotations

import itertools

import pytest

from pytest_quack.compile.priority import QueuedKey, next_key

pytestmark = pytest.mark.light


def test_nothing_queued_is_nothing_to_compile() -> None:
    assert next_key([]) is None


def test_what_most_wait_for_comes_first_then_what_was_asked_for_first() -> None:
    queued = [QueuedKey("a", 0, 0), QueuedKey("b", 2, 3), QueuedKey("c", 2, 1), QueuedKey("d", 1, 2)]
    order = []
    while queued:
        key = next_key(queued)
        order.append(key)
        queued = [entry for entry in queued if entry.key != key]
    assert order == ["c", "b", "d", "a"]


def test_the_order_in_which_keys_are_listed_does_not_matter() -> None:
    queued = [QueuedKey("a", 1, 2), QueuedKey("b", 1, 1), QueuedKey("c", 0, 0), QueuedKey("d", 1, 3)]
    assert {next_key(listed) for listed in itertools.permutations(queued)} == {"b"}


def test_any_iterable_will_do_and_is_read_once() -> None:
    assert next_key(iter([QueuedKey("a", 0, 0)])) == "a"
