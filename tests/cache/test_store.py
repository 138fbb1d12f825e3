"""The store: whole artifacts or none, damage is a miss and is set aside, locks hold as long as their holders."""

from __future__ import annotations

import errno
import hashlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import filelock
import pytest

from pytest_quack.cache.directory import open_directory
from pytest_quack.cache.store import (
    Artifact,
    LockTimeoutError,
    Pointer,
    Sidecar,
    Store,
    encode_record,
    parse_pointer,
    parse_sidecar,
)
from pytest_quack.errors import ArtifactError
from pytest_quack.settings import Settings
from support.inner import ROOT, TESTS

pytestmark = pytest.mark.light

FORK = multiprocessing.get_context("fork")
SPAWN = multiprocessing.get_context("spawn")


def key(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def artifact(text: str) -> Artifact:
    payload = text.encode() * 100
    sidecar = Sidecar(
        content_key=key(text),
        size_bytes=len(payload),
        sha256=hashlib.sha256(payload).hexdigest(),
        backend="light",
        abi="light",
        arch="",
        host_machine="any",
        host_features=("avx2",),
        toolchain={"light": "1"},
        description=text,
        compile_s=0.5,
    )
    return Artifact(sidecar, payload)


def open_store(root: Path) -> Store:
    return Store(open_directory(Settings(cache_dir=str(root))))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "cache")


def temporary_files(store: Store) -> list[Path]:
    return [path for path in store.root.rglob(".*") if path.is_file()]


def test_what_is_published_is_found_by_both_keys_in_another_process(store: Store, tmp_path: Path) -> None:
    files = {"plug": ("plug.py", key("plug"))}
    assert store.publish(artifact("a"), key("direct"), files)
    other = open_store(tmp_path / "cache")
    pointer = other.find_pointer(key("direct"))
    assert pointer == Pointer(key("a"), files)
    assert other.find(key("a")) == artifact("a")
    assert (other.corrupt, other.problems, temporary_files(other)) == (0, {}, [])


def test_what_was_never_published_is_a_plain_miss(store: Store) -> None:
    assert store.find_pointer(key("x")) is None
    assert store.find(key("x")) is None
    assert (store.corrupt, store.problems) == (0, {})


def test_two_direct_keys_may_lead_to_one_artifact_that_is_written_once(store: Store) -> None:
    store.publish(artifact("a"), key("one"))
    path = store._object(key("a"))
    before = path.stat().st_ino
    store.publish(artifact("a"), key("two"))
    assert path.stat().st_ino == before
    assert store.find_pointer(key("one")) == store.find_pointer(key("two"))


def test_everything_is_private_to_the_user(store: Store) -> None:
    store.publish(artifact("a"), key("direct"))
    for path in (store.root, *store.root.rglob("*")):
        assert path.stat().st_mode & 0o077 == 0, path


def cut(path: Path, size: int) -> None:
    os.truncate(path, size)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)


def become_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "inside").write_text("x")


def become_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def become_symlink(path: Path) -> None:
    kept = path.with_suffix(".kept")
    path.rename(kept)
    path.symlink_to(kept)


def become_other_kernel(path: Path) -> None:
    path.write_bytes(b"b" * path.stat().st_size)


def become_json(**values: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        path.write_text(json.dumps({**json.loads(path.read_bytes()), **values}))

    return change


def lose(name: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        path.write_text(json.dumps({k: v for k, v in json.loads(path.read_bytes()).items() if k != name}))

    return change


ANY_FILE: dict[str, Callable[[Path], Any]] = {
    "0 bytes": lambda path: cut(path, 0),
    "half": lambda path: cut(path, path.stat().st_size // 2),
    "flipped": flip,
    "directory": become_directory,
    "FIFO": become_fifo,
    "symlink": become_symlink,
    "symlink to itself": lambda path: (path.unlink(), path.symlink_to(path)),
    "noise": lambda path: path.write_bytes(os.urandom(200)),
}
RECORDS: dict[str, Callable[[Path], Any]] = {
    "JSON of another kind": lambda path: path.write_text("[1]"),
    "null": lambda path: path.write_text("null"),
    "deep JSON": lambda path: path.write_text("[" * 200_000),
    "another format": become_json(format=99),
    "unknown field": become_json(more=1),
    "content key of another kind": become_json(content_key=5),
    "content key that is a path": become_json(content_key="../" * 21 + "x"),
}
SIDECARS: dict[str, Callable[[Path], Any]] = {
    "content key of another": become_json(content_key=key("b")),
    "size as text": become_json(size_bytes="100"),
    "another size": become_json(size_bytes=1),
    "another digest": become_json(sha256=key("x")),
    "features of another kind": become_json(host_features=[1]),
    "features that are no list": become_json(host_features="avx2"),
    "abi of another kind": become_json(abi=None),
    "toolchain of another kind": become_json(toolchain=[]),
    "without a size": lose("size_bytes"),
    "without an abi": lose("abi"),
    "without features": lose("host_features"),
}
POINTERS: dict[str, Callable[[Path], Any]] = {
    "files of another kind": become_json(files=[1]),
    "files of another shape": become_json(files={"a": 1}),
    "without files and key": lose("content_key"),
}
DAMAGE = [
    *(("object", name, do) for name, do in {**ANY_FILE, "other kernel": become_other_kernel}.items()),
    *(("sidecar", name, do) for name, do in {**ANY_FILE, **RECORDS, **SIDECARS}.items()),
    *(("pointer", name, do) for name, do in {**ANY_FILE, **RECORDS, **POINTERS}.items()),
]


def find_all(store: Store) -> Artifact | None:
    pointer = store.find_pointer(key("direct"))
    return store.find(pointer.content_key) if pointer is not None else None


@pytest.mark.parametrize(("what", "name", "damage"), DAMAGE, ids=[f"{what}: {name}" for what, name, _ in DAMAGE])
def test_damage_is_a_miss_is_set_aside_counted_and_repaired_by_the_next_publish(
    store: Store, what: str, name: str, damage: Callable[[Path], Any]
) -> None:
    store.publish(artifact("a"), key("direct"))
    store.publish(artifact("b"), key("other"))
    paths = {"object": store._object(key("a")), "sidecar": store._sidecar(key("a"))}
    path = paths.get(what, store._direct(key("direct")))
    damage(path)
    assert find_all(store) is None
    assert store.corrupt == 1
    assert [text for text in store.problems if "damaged entry was set aside" in text]
    assert list((store.root / "quarantine").iterdir())
    assert not os.path.lexists(path)
    assert find_all(store) is None, "what was set aside is a plain miss from now on"
    assert store.corrupt == 1
    assert store.publish(artifact("a"), key("direct"))
    assert find_all(store) == artifact("a")
    assert store.find(key("b")) == artifact("b"), "others are not touched"


@pytest.mark.parametrize("what", ["_object", "_sidecar", "_direct"])
def test_a_missing_part_is_a_miss_and_is_repaired(store: Store, what: str) -> None:
    store.publish(artifact("a"), key("direct"))
    getattr(store, what)(key("direct" if what == "_direct" else "a")).unlink()
    assert find_all(store) is None
    store.publish(artifact("a"), key("direct"))
    assert find_all(store) == artifact("a")


def test_damage_is_set_aside_even_where_the_quarantine_is_gone(store: Store) -> None:
    store.publish(artifact("a"), key("direct"))
    become_directory(store._object(key("a")))
    (store.root / "quarantine").rmdir()
    assert find_all(store) is None
    assert store.publish(artifact("a"), key("direct"))
    assert find_all(store) == artifact("a")


def test_discarding_spares_what_a_sound_one_has_replaced(store: Store) -> None:
    store.publish(artifact("a"), key("direct"))
    store.discard(key("a"), ArtifactError("it was damaged when somebody looked"))
    assert find_all(store) == artifact("a")
    store.discard(key("a"), RuntimeError("the loader refuses it"))
    assert find_all(store) is None


def test_trouble_that_says_nothing_of_the_file_sets_nothing_aside(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.publish(artifact("a"), key("direct"))

    def fail(*args: Any) -> bytes:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(store, "_read", fail)
    assert find_all(store) is None
    monkeypatch.undo()
    assert find_all(store) == artifact("a")
    assert store.corrupt == 0
    assert store.problems


SETUP = f"""
import os, sys, time
sys.path[:0] = [{str(ROOT)!r}, {str(TESTS)!r}]
from pathlib import Path
from cache.test_store import *
store = open_store(Path(sys.argv[1]))
"""
UNREADABLE = """
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
os.environ["HOME"] = "/"
store = open_store(Path(sys.argv[1]) / "theirs")
store.publish(artifact("a"), key("direct"))
store._object(key("a")).chmod(0)
assert find_all(store) is None
assert store.corrupt == 1, store.problems
assert store.publish(artifact("a"), key("direct")), store.problems
assert find_all(store) == artifact("a")
"""


def run_script(text: str, root: Path, *args: str) -> None:
    command = [sys.executable, "-c", SETUP + text, str(root), *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_an_unreadable_file_is_a_miss_and_is_repaired(tmp_path: Path) -> None:
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == 0 and str(folder).startswith(os.path.join(os.sep, "tmp", "")):
            folder.chmod(folder.stat().st_mode | 0o011)
    (tmp_path / "theirs").mkdir()
    os.chown(tmp_path / "theirs", 65534, 65534)
    run_script(UNREADABLE, tmp_path)


@pytest.mark.parametrize("what", ["_object", "_sidecar", "_direct"])
def test_a_writer_that_is_killed_before_the_rename_leaves_nothing_that_counts(tmp_path: Path, what: str) -> None:
    script = f"""
target = str(store.{what}(key("direct" if {what!r} == "_direct" else "a")))
replace_file = os.replace
def die(source, path):
    if str(path) == target:
        os.kill(os.getpid(), 9)
    replace_file(source, path)
os.replace = die
store.publish(artifact("a"), key("direct"))
"""
    root = tmp_path / "cache"
    done = subprocess.run([sys.executable, "-c", SETUP + script, str(root)], capture_output=True, timeout=60)
    assert done.returncode == -signal.SIGKILL, done.stderr
    store = open_store(root)
    assert len(temporary_files(store)) == 1
    assert find_all(store) is None
    assert store.corrupt == 0
    assert store.publish(artifact("a"), key("direct"))
    assert find_all(store) == artifact("a")


def test_what_killed_writers_left_is_swept_once_it_is_old(store: Store) -> None:
    folder = store._object(key("a")).parent
    folder.mkdir(parents=True)
    old, young = folder / ".tmp-old", folder / ".tmp-young"
    for path in (old, young):
        path.write_text("x")
    os.utime(old, (1, 1))
    store.publish(artifact("a"), key("direct"))
    assert (old.exists(), young.exists()) == (False, True)


def test_many_threads_publish_and_find_one_key(store: Store) -> None:
    barrier = threading.Barrier(16)

    def work(_: int) -> Artifact | None:
        barrier.wait(timeout=60)
        assert store.publish(artifact("a"), key("direct"))
        return find_all(store)

    with ThreadPoolExecutor(16) as threads:
        assert list(threads.map(work, range(16))) == [artifact("a")] * 16
    assert (store.corrupt, store.problems, temporary_files(store)) == (0, {}, [])


def publish_often(root: Path, barrier: Any) -> None:
    store = open_store(root)
    barrier.wait(60)
    for number in range(10):
        assert store.publish(artifact("a"), key(f"direct {number}"))
        assert store.find(key("a")) == artifact("a")
    assert (store.corrupt, store.problems) == (0, {})


def test_many_processes_publish_and_find_one_key(tmp_path: Path) -> None:
    barrier = FORK.Barrier(8)
    processes = [FORK.Process(target=publish_often, args=(tmp_path / "cache", barrier)) for _ in range(8)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 8
    store = open_store(tmp_path / "cache")
    assert store.find(key("a")) == artifact("a")
    assert temporary_files(store) == []


def test_a_lock_file_without_an_owner_is_free(store: Store) -> None:
    (store.root / "locks" / f"{key('a')}.lock").write_text("4711")
    with store.lock(key("a"), timeout_s=0):
        pass


def hold(root: Path, held: Any, release: Any) -> None:
    with open_store(root).lock(key("a"), timeout_s=10):
        held.set()
        release.wait(60)


def test_a_lock_is_refused_while_held_and_free_once_its_holder_is_killed(tmp_path: Path) -> None:
    held, release = SPAWN.Event(), SPAWN.Event()
    process = SPAWN.Process(target=hold, args=(tmp_path / "cache", held, release))
    process.start()
    try:
        assert held.wait(60)
        store = open_store(tmp_path / "cache")
        with (
            pytest.raises(LockTimeoutError, match=r"held the lock of .* for 0\.1 s"),
            store.lock(key("a"), timeout_s=0.1),
        ):
            pass
        with store.lock(key("b"), timeout_s=0):
            pass
    finally:
        process.kill()
        process.join(60)
    with store.lock(key("a"), timeout_s=10):
        pass


TAKE_TURNS = """
owner = Path(sys.argv[1]) / "owner"
for _ in range(150):
    with store.lock(key("a"), timeout_s=60):
        descriptor = os.open(owner, os.O_CREAT | os.O_EXCL)  # fails where somebody else is inside
        os.close(descriptor)
        owner.unlink()
"""


def test_processes_that_take_turns_never_overlap(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    store = open_store(root)
    command = [sys.executable, "-c", SETUP + TAKE_TURNS, str(root)]
    processes = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    lock_path = store.root / "locks" / f"{key('a')}.lock"
    seen = set()
    while any(process.poll() is None for process in processes):
        with store.lock(key("a"), timeout_s=60):  # the fourth, so that this is no idle loop
            seen.add(lock_path.stat().st_ino)
    assert [(process.wait(60), process.communicate()[1]) for process in processes] == [(0, "")] * 3
    assert len(seen) <= 1, "the file of a lock stays the same one"


def wait_for(event: Any) -> None:
    event.wait(60)


def test_a_child_forked_while_a_lock_is_held_does_not_keep_it(store: Store) -> None:
    release = FORK.Event()
    with store.lock(key("a"), timeout_s=1):
        child = FORK.Process(target=wait_for, args=(release,))
        child.start()
    try:
        with store.lock(key("a"), timeout_s=1):
            assert child.is_alive()
    finally:
        release.set()
        child.join(60)


def test_a_program_started_while_a_lock_is_held_does_not_keep_it_when_the_holder_dies(tmp_path: Path) -> None:
    script = """
import subprocess
with store.lock(key("a"), timeout_s=1):
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=0, close_fds=False)
    print(child.pid, flush=True)
    os.kill(os.getpid(), 9)
"""
    root = tmp_path / "cache"
    command = [sys.executable, "-c", SETUP + script, str(root)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        child = int(holder.stdout.readline())
        holder.wait(60)
        os.kill(child, 0)  # it lives
        with open_store(root).lock(key("a"), timeout_s=1):
            pass


def test_records_survive_their_round_trip_and_nothing_else_parses() -> None:
    sidecar = artifact("a").sidecar
    assert parse_sidecar(encode_record(sidecar)) == sidecar
    pointer = Pointer(key("a"), {"m": ("m.py", "d")})
    assert parse_pointer(encode_record(pointer)) == pointer
    assert parse_pointer(encode_record(Pointer(""))) == Pointer("")
    for text in (b"", b"{}", b"\xff\xfe", encode_record(replace(sidecar, format=2))):
        with pytest.raises(ArtifactError):
            parse_sidecar(text)
        with pytest.raises(ArtifactError):
            parse_pointer(text)


def test_locks_leave_nothing_in_the_logs_of_the_test_that_compiles(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(0)
    with store.lock(key("a"), timeout_s=1):
        pass
    assert caplog.records == []
    with filelock.FileLock(tmp_path / "somebody's.lock"):
        pass
    assert caplog.records, "those of others are logged as before"
