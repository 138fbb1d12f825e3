"""One pool for several processes of this machine: the side of a process that uses it (see server.py)."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge, wait
from typing import Any, Final

from pytest_quack.compile.asking import AskingSide
from pytest_quack.compile.job import CompileFailure, CompileResult, FailureKind, Imports, Job, KeyState, PoolStats
from pytest_quack.compile.server import Address, machine_name
from pytest_quack.runtime import Notices

_CONNECT_TIMEOUT_S: Final = 20.0


class PoolUnreachableError(Exception):
    """The pool of another process cannot be used; says why."""


class PoolClient(AskingSide):
    """A pool in another process of this machine.

    Where that process goes away, every key fails with `FailureKind.POOL`: it is then compiled in this process.

    Raises PoolUnreachableError where the pool is on another machine or does not answer.
    """

    def __init__(self, address: Address, notices: Notices) -> None:
        """Connect."""
        if address.machine != machine_name():
            raise PoolUnreachableError("it is on another machine")
        self._address = address
        self._notices = notices
        self._of_thread: Any = threading.local()  # each thread has a connection of its own: one may wait for long
        self._final: dict[str, tuple[KeyState, CompileFailure | None]] = {}
        self._told: Imports | None = None
        self._lost: str | None = None
        try:
            jobs, environ = self._ask("hello")
        except _PoolLostError as error:
            raise PoolUnreachableError(str(error)) from error
        super().__init__(jobs, environ)
        self._wake_lock = threading.Lock()
        self._is_shut_down = False
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)

    def poll(self, key: str) -> tuple[KeyState, CompileFailure | None]:
        known = self._final.get(key)
        if known is not None:
            return known
        try:
            state, failure = self._ask("poll", key)
        except _PoolLostError as error:
            return KeyState.FAILED, CompileFailure(FailureKind.POOL, str(error))
        if state in {KeyState.DONE, KeyState.FAILED}:
            self._final[key] = state, failure
        return state, failure

    def pending(self, keys: Collection[str]) -> set[str]:
        unknown = [key for key in keys if key not in self._final]
        try:
            return set(self._ask("pending", unknown)) if unknown else set()
        except _PoolLostError:
            return set()

    def submit(self, job: Job) -> KeyState:
        self._pin()
        try:
            state: KeyState = self._ask("submit", job, self._news())
        except _PoolLostError:
            return KeyState.FAILED
        return state

    def wait_any(
        self, keys: Iterable[str], timeout_s: float | None = None, until: Callable[[], bool] | None = None
    ) -> tuple[str, ...]:
        wanted = list(keys)
        settled = tuple(key for key in wanted if key in self._final)
        if settled or not wanted or (until is not None and until()):
            return settled
        try:
            return self._wait_any(wanted, timeout_s, until)
        except _PoolLostError:
            return tuple(wanted)

    def nudge(self) -> None:
        with self._wake_lock, contextlib.suppress(BlockingIOError):
            if not self._is_shut_down:
                os.write(self._wake_write, b"x")

    def add_waiter(self, key: str) -> None:
        with contextlib.suppress(_PoolLostError):
            self._ask("add_waiter", key)

    def result(self, key: str) -> CompileResult | None:
        try:
            result: CompileResult | None = self._ask("result", key)
        except _PoolLostError:
            return None
        return result

    def stats(self) -> PoolStats:
        try:
            stats: PoolStats = self._ask("stats")
        except _PoolLostError:
            return PoolStats(0, 0, 0, 0, 0, 0, 0, (), {})
        return stats

    @property
    def settled(self) -> int:
        try:
            return int(self._ask("settled"))
        except _PoolLostError:
            return -1

    @property
    def is_started(self) -> bool:
        return self._told is not None

    def prewarm(self) -> None:
        self._pin()
        with contextlib.suppress(_PoolLostError):
            self._ask("prewarm", self._news() or self._told)

    def adopt_environ(self) -> None:
        """Nothing: the compile processes have the environment of the process that has the pool."""

    def ask_server(self, name: str, *arguments: Any) -> Any:
        """Ask the process that has the pool something else that it answers; None where it has gone away."""
        try:
            return self._ask(name, *arguments)
        except _PoolLostError:
            return None

    def shutdown(self) -> None:
        """Disconnect; the pool goes on."""
        if os.getpid() != self.owner_pid:
            return
        self._lost = self._lost or "this process has given up the pool"
        self._disconnect()
        with self._wake_lock:
            if not self._is_shut_down:
                self._is_shut_down = True
                os.close(self._wake_read)
                os.close(self._wake_write)

    def _news(self) -> Imports | None:
        """What compile processes need, if that is not what the pool was told last."""
        imports = self._imports()
        if imports == self._told:
            return None
        self._told = imports
        return imports

    def _wait_any(self, keys: list[str], timeout_s: float | None, until: Callable[[], bool] | None) -> tuple[str, ...]:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        connection = self._send("wait_any", keys, timeout_s)
        sources: list[Any] = [connection, self._wake_read] if until is not None else [connection]
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic()) + _CONNECT_TIMEOUT_S
            try:
                ready = wait(sources, left)
            except BaseException:  # as in _receive
                self._disconnect()
                raise
            if connection in ready:
                return tuple(self._receive(connection))
            if not ready:
                raise self._lose("it does not answer")
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_read, 4096)
            if until is not None and until():
                self._disconnect()  # the answer is not waited for, so the connection is of no use any more
                return ()

    def _ask(self, name: str, *arguments: Any) -> Any:
        return self._receive(self._send(name, *arguments))

    def _send(self, name: str, *arguments: Any) -> Connection:
        if self._lost is not None:
            raise _PoolLostError(self._lost)
        connection: Connection | None = getattr(self._of_thread, "connection", None)
        try:
            if connection is None:
                connection = self._of_thread.connection = _connect(self._address)
            connection.send((name, *arguments))
        except (OSError, EOFError, AuthenticationError) as error:
            raise self._lose(f"{type(error).__name__}: {error}") from error
        except BaseException:  # a signal's, an interrupt: half a message may be under way
            self._disconnect()
            raise
        return connection

    def _receive(self, connection: Connection) -> Any:
        try:
            kind, value = connection.recv()
        except (OSError, EOFError) as error:
            raise self._lose("it has ended") from error
        except BaseException:  # as above: the answer may still come, and would be taken for that to the next question
            self._disconnect()
            raise
        if kind == "error":
            raise self._lose(value)
        return value

    def _disconnect(self) -> None:
        connection: Connection | None = getattr(self._of_thread, "connection", None)
        if connection is not None:
            connection.close()
            self._of_thread.connection = None

    def _lose(self, why: str) -> _PoolLostError:
        self._disconnect()
        if self._lost is None:
            self._lost = f"the compile pool of the xdist controller cannot be reached any more: {why}"
            self._notices.add(f"kernels are compiled in the test process: {self._lost}")
        return _PoolLostError(self._lost)


class _PoolLostError(Exception):
    """The process that has the pool has gone away."""


def _connect(address: Address) -> Connection:
    with socket.socket(socket.AF_UNIX) as plain:
        plain.settimeout(_CONNECT_TIMEOUT_S)
        plain.connect(address.path)
        plain.settimeout(None)
        connection = Connection(plain.detach())
    try:
        answer_challenge(connection, address.secret)
        deliver_challenge(connection, address.secret)
    except BaseException:  # a wrong secret, a lost peer, an interrupt: raised on, and nothing is left open
        connection.close()
        raise
    return connection
