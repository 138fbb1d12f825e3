"""Artifacts on disk: published by rename, checked before use, damaged ones set aside.

    artifacts/<k[:2]>/<content key>.o      the exported object
    artifacts/<k[:2]>/<content key>.json   its sidecar: what it is, length, digest, versions, target
    direct/<k[:2]>/<direct key>.json       a pointer: direct key -> content key, and files seen while it compiled
    locks/<key>.lock                       held while a key is compiled or published; never removed
    quarantine/                            what was found damaged

An object is written before its sidecar and the sidecar before a pointer to it, each to a temporary file in the same
directory, flushed and renamed; so whoever finds a pointer finds the rest. An artifact is stored under its content key
once and never overwritten by an equal one. Several processes may do all of this at the same time.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import filelock

from pytest_quack.cache.directory import CacheDirectory
from pytest_quack.errors import ArtifactError

FORMAT: Final = 1
_OWN_FOLDER: Final = f"{os.sep}pytest-quack{os.sep}"
_KEY_LENGTH: Final = 64
_TEMPORARY: Final = ".tmp-"
_STALE_S: Final = 3600.0  # writing one file takes seconds at most
# Errors that say something of the file that was asked for, rather than of this process or the machine at the moment.
_DAMAGE: Final = frozenset(
    {errno.ELOOP, errno.EISDIR, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.EIO, errno.ENXIO}
)


def _is_about_others(record: logging.LogRecord) -> bool:
    """Keeps what filelock logs of our locks, at level DEBUG, out of the logs of the test that compiles."""
    return not any(_OWN_FOLDER in str(value) for value in record.args or ())


logging.getLogger("filelock").addFilter(_is_about_others)


@dataclass(frozen=True, slots=True)
class Sidecar:
    """What is known of an artifact besides its bytes.

    Attributes:
        content_key: the key that it is stored under.
        size_bytes, sha256: of the object.
        backend: the name of the backend that made it and can load it.
        abi: how the object is called; the backend's word.
        arch: the GPU architecture of its device code; empty where it has none.
        host_machine, host_features: the CPU that its host code was made for.
        toolchain: versions of what made it.
        description: the compile function and its arguments, or the traced function, for people.
        compile_s: how long the compile took, in seconds.
        extra: what the backend must know to use the object besides its bytes.
    """

    content_key: str
    size_bytes: int
    sha256: str
    backend: str
    abi: str
    arch: str
    host_machine: str
    host_features: tuple[str, ...]
    toolchain: dict[str, str]
    description: str
    compile_s: float
    extra: dict[str, Any] = field(default_factory=dict)
    format: int = FORMAT


@dataclass(frozen=True, slots=True)
class Artifact:
    """An exported object and its sidecar."""

    sidecar: Sidecar
    payload: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Pointer:
    """Where a direct key leads.

    Attributes:
        content_key: the artifact; empty where the compile function raised when it was last tried. That is only a
            hint to try again in the calling process, where the error belongs: it never makes a call fail.
        files: project files outside the static sources that were loaded while it compiled: module -> (path, digest).
        environ: variables besides those of the key that were read while it compiled: name -> digest of the value.
    """

    content_key: str
    files: dict[str, tuple[str, str]] = field(default_factory=dict)
    environ: dict[str, str] = field(default_factory=dict)
    format: int = FORMAT


def encode_record(record: Sidecar | Pointer) -> bytes:
    return json.dumps(asdict(record), sort_keys=True, indent=1).encode()


def parse_sidecar(text: bytes) -> Sidecar:
    """Raises ArtifactError where `text` is no sidecar of this format."""
    values = _parse_record(text)
    texts = ("sha256", "backend", "abi", "arch", "host_machine", "description")
    try:
        is_typed = (
            isinstance(values["size_bytes"], int)
            and isinstance(values["compile_s"], (int, float))
            and isinstance(values["toolchain"], dict)
            and isinstance(values["extra"], dict)
            and isinstance(values["host_features"], list)
            and all(isinstance(text, str) for text in (*(values[name] for name in texts), *values["host_features"]))
        )
        sidecar = Sidecar(**{**values, "host_features": tuple(values["host_features"])})
    except (TypeError, KeyError) as error:
        raise ArtifactError(f"the sidecar lacks a field ({error})") from error
    if not is_typed or not _is_key(sidecar.content_key):
        raise ArtifactError("the sidecar holds values of another type")
    return sidecar


def parse_pointer(text: bytes) -> Pointer:
    """Raises ArtifactError where `text` is no pointer of this format."""
    values = _parse_record(text)
    try:
        values["files"] = {name: (str(path), str(digest)) for name, (path, digest) in values["files"].items()}
        values["environ"] = {str(name): str(digest) for name, digest in values["environ"].items()}
        pointer = Pointer(**values)
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise ArtifactError(f"the pointer lacks a field ({error})") from error
    if pointer.content_key and not _is_key(pointer.content_key):
        raise ArtifactError("the pointer leads to no key")
    return pointer


def _parse_record(text: bytes) -> dict[str, Any]:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"it is not JSON ({error})") from error
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise ArtifactError(f"it is not of format {FORMAT}")
    return values


def _is_key(key: object) -> bool:
    return isinstance(key, str) and len(key) == _KEY_LENGTH and all(c in "0123456789abcdef" for c in key)


class LockTimeoutError(Exception):
    """Another process has held a key's lock for too long."""


class Store:
    """The artifacts of one cache directory.

    Safe to use from several threads and processes. Trouble with the disk never raises: it is counted, described in
    `problems`, and the caller gets a miss, or the artifact is not stored.
    """

    def __init__(self, directory: CacheDirectory) -> None:
        self.root: Final = directory.root
        self.is_writable = directory.is_writable
        self.problems: dict[str, int] = {}
        self.corrupt = 0
        self._counts_lock = threading.Lock()
        if directory.problem:
            self._note(f"{directory.problem}; kernels are compiled again in each run")

    def is_empty(self) -> bool:
        """Whether nothing has been stored yet."""
        try:
            with os.scandir(self.root / "direct") as entries:
                return next(entries, None) is None
        except OSError:
            return True

    def find_pointer(self, direct_key: str) -> Pointer | None:
        path = self._direct(direct_key)
        try:
            return parse_pointer(self._read(path))
        except FileNotFoundError:
            return None
        except (OSError, ArtifactError) as error:
            self._set_aside(direct_key, (path,), error, lambda: parse_pointer(self._read(path)))
            return None

    def find(self, content_key: str) -> Artifact | None:
        """The artifact under a content key, checked for length and digest; None where there is none that is sound."""
        try:
            return self._load(content_key)
        except FileNotFoundError:
            return None
        except (OSError, ArtifactError) as error:
            self.discard(content_key, error)
            return None

    def discard(self, content_key: str, reason: Exception) -> None:
        """Set a damaged artifact aside, unless somebody has put a sound one in its place meanwhile."""
        paths = (self._sidecar(content_key), self._object(content_key))
        recheck: Callable[[], object] = lambda: self._load(content_key)  # noqa: E731
        if not isinstance(reason, (ArtifactError, OSError)):
            recheck = lambda: None  # noqa: E731
        self._set_aside(content_key, paths, reason, recheck)

    def publish(
        self,
        artifact: Artifact,
        direct_key: str,
        files: dict[str, tuple[str, str]] | None = None,
        environ: dict[str, str] | None = None,
    ) -> bool:
        """Store an artifact and the pointer that leads to it; False, with the reason noted, where that fails."""
        if not self.put(artifact):
            return False
        try:
            pointer = Pointer(artifact.sidecar.content_key, files or {}, environ or {})
            self._write(self._direct(direct_key), encode_record(pointer))
        except OSError as error:
            self._note_unstored(error)
            return False
        return True

    def put(self, artifact: Artifact, *, is_locked: bool = False) -> bool:
        """Store an artifact under its content key; False, with the reason noted, where that fails.

        `is_locked` says that the caller holds that key's lock.
        """
        key = artifact.sidecar.content_key
        try:
            with contextlib.nullcontext() if is_locked else self.lock(key, timeout_s=60):
                if self._find_quietly(key) is None:
                    self._write(self._object(key), artifact.payload)
                    self._write(self._sidecar(key), encode_record(artifact.sidecar))
        except (OSError, LockTimeoutError) as error:
            self._note_unstored(error)
            return False
        return True

    def _note_unstored(self, error: Exception) -> None:
        self._note(f"an artifact could not be stored in {self.root} ({getattr(error, 'strerror', None) or error})")

    def note_failure(self, direct_key: str) -> None:
        """Remember that the compile function raised for this key."""
        try:
            self._write(self._direct(direct_key), encode_record(Pointer("")))
        except OSError as error:
            self._note(f"a failure could not be noted in {self.root} ({error.strerror or error})")

    @contextlib.contextmanager
    def lock(self, key: str, *, timeout_s: float) -> Iterator[None]:
        """Hold the lock of one key. It is free again as soon as its holder is gone, however it went.

        Raises LockTimeoutError where somebody else holds it longer than `timeout_s` seconds, OSError where the
        directory cannot hold locks.
        """
        path = self.root / "locks" / f"{key}.lock"
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # thread_local=False: a lock taken by one thread may be released by another, as generators do.
        lock = filelock.FileLock(path, mode=0o600, thread_local=False)
        try:
            lock.acquire(timeout=timeout_s, poll_interval=0.02)
        except filelock.Timeout:
            raise LockTimeoutError(f"another process has held the lock of {key[:12]} for {timeout_s:g} s") from None
        try:
            yield
        finally:
            lock.release()

    def _load(self, content_key: str) -> Artifact:
        sidecar = parse_sidecar(self._read(self._sidecar(content_key)))
        payload = self._read(self._object(content_key))
        if sidecar.content_key != content_key:
            raise ArtifactError(f"its sidecar is that of {sidecar.content_key[:12]}")
        if len(payload) != sidecar.size_bytes:
            raise ArtifactError(f"it has {len(payload)} bytes instead of {sidecar.size_bytes}")
        if hashlib.sha256(payload).hexdigest() != sidecar.sha256:
            raise ArtifactError("its digest is not the one in its sidecar")
        return Artifact(sidecar, payload)

    def _find_quietly(self, content_key: str) -> Artifact | None:
        with contextlib.suppress(OSError, ArtifactError):
            return self._load(content_key)
        return None

    def _set_aside(self, key: str, paths: tuple[Path, ...], reason: Exception, recheck: Callable[[], object]) -> None:
        if isinstance(reason, OSError) and reason.errno not in _DAMAGE:
            self._note(f"an entry could not be read ({reason.strerror or reason})")
            return
        with self._counts_lock:
            self.corrupt += 1
        self._note(f"a damaged entry was set aside and is compiled again: {key[:12]}, {reason}")
        try:
            with self.lock(key, timeout_s=10):
                if isinstance(reason, (ArtifactError, OSError)) and _succeeds(recheck):
                    return  # a good one was written since we looked
                for path in paths:
                    target = self.root / "quarantine" / f"{path.name}.{os.getpid()}.{time.time_ns()}"
                    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                    with contextlib.suppress(FileNotFoundError):
                        os.replace(path, target)
        except (OSError, LockTimeoutError) as error:
            self._note(f"a damaged entry could not be set aside ({error})")

    def _note(self, problem: str) -> None:
        with self._counts_lock:
            self.problems[problem] = self.problems.get(problem, 0) + 1

    @staticmethod
    def _read(path: Path) -> bytes:
        """The bytes of a regular file; anything else at that name (a FIFO would block) is damage."""
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ArtifactError(f"{path.name} is not a regular file")
            with open(descriptor, "rb", closefd=False) as file:
                return file.read()
        finally:
            os.close(descriptor)

    @staticmethod
    def _write(path: Path, data: bytes) -> None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=_TEMPORARY, dir=path.parent)
        try:
            with open(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, path)
        except BaseException:  # an interrupt too must leave no temporary file; raised on
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise
        _sweep(path.parent)

    def _object(self, key: str) -> Path:
        return self.root / "artifacts" / key[:2] / f"{key}.o"

    def _sidecar(self, key: str) -> Path:
        return self.root / "artifacts" / key[:2] / f"{key}.json"

    def _direct(self, key: str) -> Path:
        return self.root / "direct" / key[:2] / f"{key}.json"


def _sweep(folder: Path) -> None:
    """Remove temporary files whose writers were killed long ago."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            is_stale = entry.name.startswith(_TEMPORARY) and time.time() - entry.stat().st_mtime > _STALE_S
            if is_stale:
                os.unlink(entry.path)


def _succeeds(check: Callable[[], object]) -> bool:
    try:
        check()
    except (OSError, ArtifactError):
        return False
    return True
