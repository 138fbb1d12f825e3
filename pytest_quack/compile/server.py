"""One pool for several processes of this machine: the side of the process that has it.

    PoolClient (an xdist worker)              PoolServer (the controller)
    connects to a socket in a directory   ->  a thread for each connection
    both prove that they know the secret  <-> before anything is unpickled
    ("submit", job, imports)              ->  CompilePool.submit
    reply                                 <-  ("ok", value) or ("error", text)

The secret reaches a worker over the channel on which it gets its tests. A connection that ends takes nothing with it
but its thread: what it has submitted is compiled all the same. The process that has the pool may answer more questions
than those about it (`calls`).
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any, Final

from pytest_quack.compile.job import Imports, Job, KeyState
from pytest_quack.compile.pool import CompilePool

# A path of a Unix socket may have 107 bytes.
_LONGEST_PATH: Final = 100
# How often a thread that waits for a key looks whether the one that asked is still there.
_LOOK_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Address:
    """Where a pool is and how to prove that one may use it.

    Attributes:
        machine: which machine it is on (`machine_name`).
        path: its socket.
        secret: what both sides know.
    """

    machine: str
    path: str
    secret: bytes

    def to_plain(self) -> dict[str, Any]:
        """Return it as values that any channel can carry."""
        return {"machine": self.machine, "path": self.path, "secret": self.secret}


def machine_name() -> str:
    """A name that no other machine, and no other container, has while this one runs."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {boot}"


class PoolServer:
    """Lets other processes of this user on this machine use a pool, until `close`."""

    def __init__(self, pool: CompilePool, calls: Mapping[str, Callable[..., Any]] | None = None) -> None:
        """Listen; `calls` are more questions to answer, by name. Raises OSError where no socket can be made."""
        self._pool = pool
        self.directory: Final = Path(_private_directory())
        self.address: Final = Address(machine_name(), str(self.directory / "pool"), secrets.token_bytes(32))
        self._listener = socket.socket(socket.AF_UNIX)
        try:
            self._listener.bind(self.address.path)
            self._listener.listen(128)
        except OSError:
            self.close()
            raise
        self._calls: Final[dict[str, Callable[..., Any]]] = {
            "hello": lambda: (pool.jobs, pool.environ),
            "poll": pool.poll,
            "pending": pool.pending,
            "submit": self._submit,
            "wait_any": pool.wait_any,
            "add_waiter": pool.add_waiter,
            "result": pool.result,
            "settled": lambda: pool.settled,
            "stats": pool.stats,
            "prewarm": self._prewarm,
            **(calls or {}),
        }
        threading.Thread(target=self._accept, name="quack-pool-server", daemon=True).start()

    def close(self) -> None:
        """Accept nobody any more and remove the socket; connections end when the pool does."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _accept(self) -> None:
        while True:
            try:
                connected, _ = self._listener.accept()
            except OSError:
                return
            connection = Connection(connected.detach())
            threading.Thread(target=self._serve, args=(connection,), name="quack-pool-client", daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        with contextlib.suppress(EOFError, OSError, AuthenticationError), connection:
            deliver_challenge(connection, self.address.secret)
            answer_challenge(connection, self.address.secret)
            while True:
                name, *arguments = connection.recv()
                if name == "wait_any":
                    connection.send(self._wait_any(connection, *arguments))
                else:
                    connection.send(self._answer(name, arguments))

    def _answer(self, name: str, arguments: list[Any]) -> tuple[str, Any]:
        try:
            return "ok", self._calls[name](*arguments)
        except Exception as error:  # noqa: BLE001 - it is the asking process that must know
            return "error", f"{type(error).__name__}: {error}"

    def _wait_any(self, connection: Connection, keys: list[str], timeout_s: float | None) -> tuple[str, Any]:
        """Wait for keys, but not longer than somebody wants to know. Raises EOFError when nobody does."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left = _LOOK_S if deadline is None else min(_LOOK_S, max(0.0, deadline - time.monotonic()))
            kind, settled = self._answer("wait_any", [keys, left])
            if kind != "ok" or settled or not keys or (deadline is not None and time.monotonic() >= deadline):
                return kind, settled
            if connection.poll():
                raise EOFError("who asked says nothing while it waits, so it is gone")

    def _submit(self, job: Job, imports: Imports | None) -> KeyState:
        if imports is not None:
            self._pool.tell_imports(imports)
        return self._pool.submit(job)

    def _prewarm(self, imports: Imports) -> None:
        self._pool.tell_imports(imports)
        self._pool.prewarm()


def _private_directory() -> str:
    """A new directory that is this user's alone (mode 0700)."""
    directory = tempfile.mkdtemp(prefix="quack-")
    if len(directory) <= _LONGEST_PATH - len("/pool"):
        return directory
    shutil.rmtree(directory)
    return tempfile.mkdtemp(prefix="quack-", dir="/tmp")
