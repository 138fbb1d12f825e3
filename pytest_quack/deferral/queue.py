"""Which item runs next: a pure structure over positions in the order in which items come.

That is the collected order, all at once, or under xdist the order in which the controller sends them. Items run in
their order. One that was put off is `parked` until its keys are settled, then `ready`. A ready item runs
as soon as that costs no more fixture tear-downs than going on would; otherwise once the items of the order are
through. Within a class the order is kept: while one item of it is put off, the later ones are held.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Place:
    """Where an item stands.

    Attributes:
        scopes: what is set up around it, the widest first: session, packages, module, class, wider parameters.
        ordered_group: items of one group keep their order; None for an item of no group.
    """

    scopes: tuple[Hashable, ...]
    ordered_group: Hashable | None = None


def shared_scopes(a: Place, b: Place) -> int:
    """How many scopes stay set up between two items."""
    count = 0
    for x, y in zip(a.scopes, b.scopes, strict=False):
        if x != y:
            break
        count += 1
    return count


class ItemQueue:
    """The items of a run by their position; each must be finished once, or withdrawn."""

    def __init__(self, places: Sequence[Place] = ()) -> None:
        self._places = list(places)
        self._next_fresh = 0
        self._ready: list[int] = []  # put off and ready again, or held and free again, in order
        self._parked: set[int] = set()
        self._held: dict[Hashable, list[int]] = {}
        self._waiting: dict[Hashable, set[int]] = {}  # by group: items that are parked or ready
        self._delayed: Counter[tuple[Hashable, ...]] = Counter()  # by scope: items that are parked, ready or held
        self._finished = 0

    def append(self, place: Place) -> int:
        """Add an item at the end; returns its position."""
        self._places.append(place)
        return len(self._places) - 1

    @property
    def has_candidate(self) -> bool:
        """Whether an item is left that is not parked, held behind one, or running."""
        return bool(self._ready) or self._peek_fresh() is not None

    @property
    def remaining(self) -> int:
        """How many items have no result yet, one that runs included."""
        return len(self._places) - self._finished

    @property
    def is_done(self) -> bool:
        return self.remaining == 0

    @property
    def parked(self) -> frozenset[int]:
        """Items that wait for their keys."""
        return frozenset(self._parked)

    def take(self, last: int | None, in_use: Sequence[int] = ()) -> int | None:
        """The item to run after `last`; None where all that may run now waits. It leaves the queue.

        `in_use` names the scopes of `last`, by position, that hold something set up. Such a scope is not left while an
        item of it waits, or what it holds would have to be set up again.
        """
        least = self._scopes_to_keep(last, in_use)
        ready = [i for i in self._ready if not self._is_blocked(i) and self._closeness(i, last) >= least]
        fresh = self._peek_fresh()
        if fresh is not None and self._closeness(fresh, last) < least:
            fresh = None
        choice = self._best(ready, last)
        if choice is None or (fresh is not None and self._closeness(fresh, last) > self._closeness(choice, last)):
            choice = fresh
        if choice is None:
            return None
        if choice == fresh:
            self._next_fresh += 1
        else:
            self._ready.remove(choice)
            self._count_delayed(choice, -1)
            self._waiting.get(self._places[choice].ordered_group, set()).discard(choice)
        return choice

    def park(self, index: int) -> None:
        """The item was put off."""
        self._parked.add(index)
        self._count_delayed(index, 1)
        self._wait_in_group(index)

    def unpark(self, index: int) -> None:
        """The item's keys are settled."""
        self._parked.discard(index)
        bisect.insort(self._ready, index)

    def finish(self, index: int) -> None:
        """The item has its result."""
        self._finished += 1
        group = self._places[index].ordered_group
        for held in self._held.pop(group, ()) if group is not None else ():
            bisect.insort(self._ready, held)
            self._wait_in_group(held)

    def reopen(self, index: int) -> None:
        """The item, which was finished last, has no result after all: it runs again."""
        self._finished -= 1

    def put_back(self, index: int) -> None:
        """The item that was taken last is not to run yet."""
        bisect.insort(self._ready, index)
        self._count_delayed(index, 1)
        self._wait_in_group(index)

    def withdraw(self, index: int) -> bool:
        """Take back an item that has not been taken, or was put off; False where it runs or is finished."""
        group = self._places[index].ordered_group
        if index in self._parked:
            self._parked.discard(index)
        elif index in self._ready:
            self._ready.remove(index)
        elif index in self._held.get(group, ()):
            self._held[group].remove(index)
            self._count_delayed(index, -1)
            self._finished += 1
            return True
        else:
            return False
        self._count_delayed(index, -1)
        self._waiting.get(group, set()).discard(index)
        self.finish(index)
        return True

    def _scopes_to_keep(self, last: int | None, in_use: Sequence[int]) -> int:
        """How many of the scopes of `last` the next item must share."""
        if last is None:
            return 0
        scopes = self._places[last].scopes
        return max((level + 1 for level in in_use if self._delayed[scopes[: level + 1]]), default=0)

    def _count_delayed(self, index: int, step: int) -> None:
        scopes = self._places[index].scopes
        for level in range(len(scopes)):
            self._delayed[scopes[: level + 1]] += step

    def _wait_in_group(self, index: int) -> None:
        self._waiting.setdefault(self._places[index].ordered_group, set()).add(index)

    def _peek_fresh(self) -> int | None:
        while self._next_fresh < len(self._places):
            index = self._next_fresh
            if not self._is_blocked(index):
                return index
            self._held.setdefault(self._places[index].ordered_group, []).append(index)
            self._count_delayed(index, 1)
            self._next_fresh += 1
        return None

    def _is_blocked(self, index: int) -> bool:
        group = self._places[index].ordered_group
        return group is not None and any(other < index for other in self._waiting.get(group, ()))

    def _best(self, candidates: list[int], last: int | None) -> int | None:
        return min(candidates, key=lambda index: (-self._closeness(index, last), index), default=None)

    def _closeness(self, index: int, last: int | None) -> int:
        return 0 if last is None else shared_scopes(self._places[index], self._places[last])
