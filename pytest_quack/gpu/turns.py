"""Having a GPU alone for a while, among the workers of one xdist run: the controller's side.

    worker A                     controller                        worker B, on the same GPU
    take_alone        ->         asks B, over xdist's channel  ->  notes it; its test goes on
                                                              <-   stand_aside, between two tests
    runs its test     <-         B stands aside
    give_back         ->                                       ->  goes on

No time is spent per test: a worker learns of a request when there is one. A worker that is gone holds up nobody.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

# The command by which a worker is asked.
STAND_ASIDE: Final = "quack_stand_aside"
# How long a worker waits for the others: a test of theirs may be as long as that, and may itself wait for a fixture of
# the one that waits here, which must not go on for ever.
PATIENCE_S: Final = 600.0


class Turns:
    """Which workers share a GPU, and which of them wants or has it alone. Safe to use from several threads."""

    def __init__(self) -> None:
        """No worker yet."""
        self._changed = threading.Condition()
        self._devices: dict[str, frozenset[str]] = {}
        self._ask: dict[str, Callable[[], None]] = {}
        self._requests: list[str] = []  # who wants or has devices alone, in the order of asking
        self._aside: set[str] = set()

    def enter(self, worker: str, devices: frozenset[str], ask: Callable[[], None]) -> None:
        """Name a worker, its devices (an empty set may be any) and how to ask it to stand aside."""
        with self._changed:
            self._devices[worker] = devices
            self._ask[worker] = ask

    def leave(self, worker: str) -> None:
        """A worker runs no tests any more."""
        with self._changed:
            self._devices.pop(worker, None)
            self._ask.pop(worker, None)
            self._forget(worker)

    def take_alone(self, worker: str, patience_s: float = PATIENCE_S) -> bool:
        """Wait until all others that share a device with `worker` stand aside.

        Returns False if they did not within `patience_s` seconds; nothing is held then.
        """
        with self._changed:
            self._requests.append(worker)
            self._changed.notify_all()  # one that waits runs no test
            asks = [self._ask[other] for other in self._siblings(worker)]
        for ask in asks:
            ask()
        with self._changed:
            is_taken = self._changed.wait_for(
                lambda: worker not in self._requests or self._is_alone(worker), patience_s
            )
            is_taken = is_taken and worker in self._requests
            if not is_taken:
                self._forget(worker)
            return is_taken

    def give_back(self, worker: str) -> None:
        """Let the others go on."""
        with self._changed:
            self._forget(worker)

    def stand_aside(self, worker: str) -> None:
        """Wait as long as another worker wants or has a device of this one alone."""
        with self._changed:
            self._aside.add(worker)
            self._changed.notify_all()
            self._changed.wait_for(lambda: not any(other in self._requests for other in self._siblings(worker)))
            self._aside.discard(worker)

    def _forget(self, worker: str) -> None:
        self._aside.discard(worker)
        if worker in self._requests:
            self._requests.remove(worker)
        self._changed.notify_all()

    def _is_alone(self, worker: str) -> bool:
        earlier = self._requests[: self._requests.index(worker)]
        siblings = self._siblings(worker)
        return not any(other in earlier for other in siblings) and all(
            other in self._aside or other in self._requests for other in siblings
        )

    def _siblings(self, worker: str) -> list[str]:
        own = self._devices.get(worker)
        if own is None:
            return []
        return [
            other
            for other, devices in self._devices.items()
            if other != worker and (not own or not devices or own & devices)
        ]
