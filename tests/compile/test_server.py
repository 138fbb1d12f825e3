"""One pool for several processes: who may use it, and what happens when it goes away."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from pytest_quack.compile.client import PoolClient, PoolUnreachableError
from pytest_quack.compile.job import CompileJob, FailureKind, KeyState
from pytest_quack.compile.pool import CompilePool
from pytest_quack.compile.server import PoolServer
from pytest_quack.runtime import Notices, get_runtime

pytestmark = pytest.mark.light


@pytest.fixture
def pool() -> Iterator[CompilePool]:
    pool = CompilePool(2, is_shared=True)
    yield pool
    pool.shutdown()


@pytest.fixture
def server(pool: CompilePool) -> Iterator[PoolServer]:
    server = PoolServer(pool)
    yield server
    server.close()


@pytest.fixture
def notices() -> Notices:
    return Notices(is_reported=True)


def job(client: PoolClient | CompilePool, key: str = "key") -> CompileJob:
    """A job that is refused: there is no such function."""
    return CompileJob(key, {}, "support.light", "no_such_function", "", b"", client.asker(get_runtime()), key)


def test_socket_is_this_users_alone(server: PoolServer) -> None:
    mode = os.stat(server.directory)
    assert stat.S_IMODE(mode.st_mode) == 0o700
    assert mode.st_uid == os.getuid()
    server.close()
    assert not server.directory.exists()


def test_who_does_not_know_the_secret_is_turned_away(server: PoolServer, notices: Notices) -> None:
    with pytest.raises(PoolUnreachableError, match="AuthenticationError"):
        PoolClient(replace(server.address, secret=b"wrong"), notices)
    assert PoolClient(server.address, notices).jobs == 2


def test_nothing_is_unpickled_before_the_secret_is_proved(server: PoolServer, tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(tmp_path / "exploded"),)

    with socket.socket(socket.AF_UNIX) as plain:
        plain.connect(server.address.path)
        connection = Connection(os.dup(plain.fileno()))
    connection.recv_bytes()  # the challenge
    connection.send(Bomb())
    with contextlib.suppress(EOFError, OSError):
        while True:  # what is answered, until the connection is closed
            connection.recv_bytes()
    connection.close()
    assert not (tmp_path / "exploded").exists()


def test_silent_connection_keeps_nobody_waiting(server: PoolServer, notices: Notices) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(server.address.path)
        assert PoolClient(server.address, notices).poll("key")[0] is KeyState.NEW


def test_pool_on_another_machine_is_not_tried(server: PoolServer, notices: Notices) -> None:
    with pytest.raises(PoolUnreachableError, match="on another machine"):
        PoolClient(replace(server.address, machine="elsewhere"), notices)


def test_pool_without_a_socket_is_unreachable(server: PoolServer, notices: Notices) -> None:
    server.close()
    with pytest.raises(PoolUnreachableError, match="FileNotFoundError"):
        PoolClient(server.address, notices)


def test_key_asked_for_by_eight_at_once_is_submitted_once(pool: CompilePool, server: PoolServer) -> None:
    clients = [PoolClient(server.address, Notices(is_reported=True)) for _ in range(8)]
    barrier = threading.Barrier(8)
    states = []

    def ask(client: PoolClient) -> None:
        barrier.wait()
        client.submit(job(client))
        client.wait("key")
        states.append(client.poll("key"))

    threads = [threading.Thread(target=ask, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert pool.stats().submitted == clients[0].stats().submitted == 1
    assert pool.stats().workers_started == 1
    assert {state for state, _ in states} == {KeyState.FAILED}
    assert len(states) == 8


def test_wait_ends_when_it_is_told_to_and_the_next_question_gets_its_own_answer(
    pool: CompilePool, server: PoolServer, notices: Notices
) -> None:
    client, is_told = PoolClient(server.address, notices), threading.Event()
    pool._ensure_thread = lambda: None  # type: ignore[method-assign] # nothing settles
    client.submit(job(client))

    def tell() -> None:
        is_told.set()
        client.nudge()

    timer = threading.Timer(0.2, tell)
    timer.start()
    assert client.wait_any(["key"], until=is_told.is_set) == ()
    timer.join()
    assert client.poll("key")[0] is KeyState.PENDING
    assert client.pending(["key", "other"]) == {"key"}
    assert client.wait_any(["key"], timeout_s=0.05) == ()


def test_thread_of_a_wait_that_was_given_up_ends(
    pool: CompilePool, server: PoolServer, notices: Notices, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pytest_quack.compile.server._LOOK_S", 0.05)
    pool._ensure_thread = lambda: None  # type: ignore[method-assign] # nothing settles
    client = PoolClient(server.address, notices)
    client.submit(job(client))

    def serving() -> int:
        return sum(thread.name == "quack-pool-client" for thread in threading.enumerate())

    before = serving()
    asked = iter([False, True])
    client.nudge()
    assert client.wait_any(["key"], until=lambda: next(asked)) == ()
    deadline = time.monotonic() + 10
    while serving() >= before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert serving() == before - 1  # the client has hung up, and connects anew for its next question


def test_nudge_of_a_client_that_was_shut_down_touches_nothing(
    pool: CompilePool, server: PoolServer, notices: Notices
) -> None:
    """Its descriptors belong to somebody else by then; and the thread that nudges must not see an error."""
    client = PoolClient(server.address, notices)
    write = client._wake_write
    client.shutdown()
    client.shutdown()
    read, other = os.pipe()
    os.dup2(other, write)
    try:
        client.nudge()
        os.set_blocking(read, False)
        with pytest.raises(BlockingIOError):
            os.read(read, 1)
    finally:
        for descriptor in {read, other, write}:
            os.close(descriptor)


def test_client_whose_pool_was_lost_gives_its_descriptors_back(server: PoolServer, notices: Notices) -> None:
    before = len(os.listdir("/proc/self/fd"))
    client = PoolClient(server.address, notices)
    client._lose("it has ended")
    client.shutdown()
    assert len(os.listdir("/proc/self/fd")) <= before + 1  # the server's end of the connection may linger


def test_server_answers_more_questions(pool: CompilePool, notices: Notices) -> None:
    server = PoolServer(pool, {"double": lambda number: 2 * number})
    try:
        client = PoolClient(server.address, notices)
        assert client.ask_server("double", 21) == 42
        client._lose("it has ended")
        assert client.ask_server("double", 21) is None
    finally:
        server.close()


def test_pool_that_goes_away_fails_every_key_and_says_so_once(
    pool: CompilePool, server: PoolServer, notices: Notices
) -> None:
    client = PoolClient(server.address, notices)
    client.submit(job(client))
    client.wait("key")
    assert client.poll("key")[1].kind is FailureKind.REFUSED  # type: ignore[union-attr]
    client._disconnect()
    server.close()
    for key in ("other", "third"):
        assert client.submit(job(client, key)) is KeyState.FAILED
        state, failure = client.poll(key)
        assert (state, failure and failure.kind) == (KeyState.FAILED, FailureKind.POOL)
        assert client.wait_any([key]) == (key,)
    assert client.pending(["other"]) == set()
    assert client.poll("key")[1].kind is FailureKind.REFUSED  # type: ignore[union-attr]
    assert len(notices.counts) == 1
    assert "compiled in the test process" in next(iter(notices.counts))


def test_variables_of_xdist_itself_do_not_travel(
    server: PoolServer, notices: Notices, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = PoolClient(server.address, notices)
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw7")
    monkeypatch.setenv("SOME_TILE", "4")
    assert client.environ_difference() == {"SOME_TILE": "4"}
