"""The process that compile processes are forked from. It imports what they need, once, and sees no GPU.

It has one thread, so that a fork copies no lock that somebody holds. It talks to the pool over one socket:

    pool -> here    {"op": "start", "parent_pid": p}    once
                    {"op": "preload", ...}        sys.path, backends, modules to import, variables to set: at the start,
                                                  and again when the asking process has imported more
                    {"op": "spawn", "id": n}      with two descriptors: the worker's connection and its stderr
    here -> pool    {"op": "ready", "failed": {module: reason}}    for each preload
                    {"op": "spawned", "id": n, "pid": p}
                    {"op": "exited", "id": n, "status": s}    s as `os.waitstatus_to_exitcode` gives it

multiprocessing's own forkserver is not used: there is one for each process, which tests may need for themselves, with
a GPU; it runs the main script again in each child; and on Python 3.11 it neither inherits `sys.path` nor reports a
preload that failed.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pickle
import select
import signal
import socket
import sys
import traceback
from typing import Any, Final

from pytest_quack.backends import find_backend
from pytest_quack.compile import worker
from pytest_quack.compile.process import die_with_parent, ignore_terminal_signals

MAX_MESSAGE_BYTES: Final = 1 << 18


def send(control: socket.socket, message: dict[str, Any], descriptors: tuple[int, ...] = ()) -> None:
    socket.send_fds(control, [pickle.dumps(message)], list(descriptors))


def receive(control: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """The next message and its descriptors; None where the other side is gone."""
    data, descriptors, _, _ = socket.recv_fds(control, MAX_MESSAGE_BYTES, 2)
    return (pickle.loads(data) if data else None), descriptors


def main(control_fd: int) -> None:
    """Serve the pool until its end of the socket is closed."""
    control = socket.socket(fileno=control_fd)
    ignore_terminal_signals()
    start, _ = receive(control)
    if start is None:
        return
    die_with_parent(start["parent_pid"])
    _serve(control)


def _prepare(message: dict[str, Any], prepared: set[str]) -> dict[str, str]:
    """Import what a preload message names; returns what could not be, with the reason."""
    sys.path[:] = message["sys_path"]
    os.environ.update(message["pinned"])
    failed = {}
    for name in message["backends"]:
        try:
            if name not in prepared:
                find_backend(name).prepare_worker()
                prepared.add(name)
        except Exception as error:  # noqa: BLE001 - a backend of somebody else may raise anything; it is reported
            failed[name] = f"{type(error).__name__}: {error}"
    failed |= _preload(message["modules"])
    for name in sorted(prepared):
        try:
            find_backend(name).pin_worker(message["pinned"])
        except Exception as error:  # noqa: BLE001 - as above
            failed[name] = f"{type(error).__name__}: {error}"
    gc.collect()
    gc.freeze()  # what was imported is never collected, so the workers' pages stay shared
    return failed


def _preload(modules: list[str]) -> dict[str, str]:
    failed = {}
    for name in modules:
        try:
            importlib.import_module(name)
        except BaseException as error:  # noqa: BLE001 - an import may raise anything, SystemExit too; it is reported
            failed[name] = f"{type(error).__name__}: {error}"
    return failed


def _serve(control: socket.socket) -> None:
    wake_read, wake_write = socket.socketpair()
    wake_read.setblocking(False)
    wake_write.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_write.fileno(), warn_on_full_buffer=False)
    children: dict[int, int] = {}
    prepared: set[str] = set()
    while True:
        readable, _, _ = select.select([control, wake_read], [], [])
        if wake_read in readable:
            with contextlib.suppress(BlockingIOError):
                wake_read.recv(4096)
        _reap(control, children)
        if control not in readable:
            continue
        message, descriptors = receive(control)
        if message is None:
            return
        if message["op"] == "preload":
            send(control, {"op": "ready", "failed": _prepare(message, prepared)})
        elif message["op"] == "spawn":
            pid = _spawn(message["id"], descriptors, (control, wake_read, wake_write))
            children[pid] = message["id"]
            send(control, {"op": "spawned", "id": message["id"], "pid": pid})


def _reap(control: socket.socket, children: dict[int, int]) -> None:
    while children:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        worker_id = children.pop(pid, None)
        if worker_id is not None:
            send(control, {"op": "exited", "id": worker_id, "status": os.waitstatus_to_exitcode(status)})


def _spawn(worker_id: int, descriptors: list[int], ours: tuple[socket.socket, ...]) -> int:
    parent_pid = os.getpid()
    pid = os.fork()
    if pid:
        for descriptor in descriptors:
            os.close(descriptor)
        return pid
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        for sock in ours:
            sock.close()
        worker.main(worker_id, parent_pid, *descriptors)
        code = 0
    except BaseException:  # noqa: BLE001 - nothing may return into the server's loop; it is printed for the pool
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.flush()
        os._exit(code)
