"""Where the cache lives, and whether what lies there may be run as code.

Trust is decided once, when the directory is opened: symlinks are resolved and the target is checked. An unsafe default
place means running uncached with one warning; a directory that the user named and that is foreign or open to others is
an error that says what to do, unless QUACK_CACHE_TRUST=1.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from pytest_quack.errors import CacheDirectoryError
from pytest_quack.settings import Settings

_OURS = Path("pytest-quack") / "v1"


@dataclass(frozen=True, slots=True)
class CacheDirectory:
    """A directory that may be used.

    Attributes:
        root: everything of ours lies below it.
        is_writable: False where artifacts can be read but not stored.
        problem: why nothing can be stored, for one warning; empty where all is well.
    """

    root: Path
    is_writable: bool
    problem: str = ""


def default_place() -> Path:
    """The user's cache directory for kernels. Raises CacheDirectoryError where this user has none."""
    import platformdirs

    try:
        place = Path(platformdirs.user_cache_dir("quack", appauthor=False))
    except (KeyError, RuntimeError, OSError) as error:
        raise CacheDirectoryError(f"this user has no cache directory ({error})") from error
    if not place.is_absolute() or "~" in place.parts:
        raise CacheDirectoryError("this user has no home directory")
    return place


def open_directory(settings: Settings) -> CacheDirectory:
    """The cache directory that `settings` ask for, created where it is missing.

    Raises CacheDirectoryError where it cannot be used at all, or must not be.
    """
    explicit = settings.cache_dir
    place = Path(explicit) if explicit else default_place()
    name = f"the cache directory {place}"
    try:
        place = place.expanduser()
        if place.exists() and not place.is_dir():
            raise CacheDirectoryError(
                f"{name} is not a directory; remove the file or name another directory with QUACK_CACHE_DIR."
            )
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        place = place.resolve(strict=True)
    except (OSError, RuntimeError) as error:
        raise CacheDirectoryError(
            f"{name} cannot be created ({error}); name another directory with QUACK_CACHE_DIR."
        ) from error
    if not settings.is_cache_trusted:
        _check_trust(place)
    root = place / _OURS
    problem = _make_private(place, root)
    if root.is_dir() and not settings.is_cache_trusted:
        for folder in (root.parent, root):
            _check_trust(folder.resolve())
    return CacheDirectory(root, not problem, problem)


def _check_trust(folder: Path) -> None:
    status = folder.stat()
    remedy = (
        "Artifacts are code that this process runs, so name a directory of your own with QUACK_CACHE_DIR, or set "
        "QUACK_CACHE_TRUST=1 if you trust everybody who can write there."
    )
    if status.st_uid != os.geteuid():
        raise CacheDirectoryError(
            f"the cache directory {folder} belongs to user {status.st_uid}, not to you (user {os.geteuid()}). {remedy}"
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise CacheDirectoryError(
            f"the cache directory {folder} can be written to by others (mode {stat.S_IMODE(status.st_mode):04o}). "
            f"Run `chmod go-w {folder}`. {remedy}"
        )


def _make_private(place: Path, root: Path) -> str:
    """Create what is missing below `place`, for this user alone; returns why it cannot be written to, if so."""
    try:
        for folder in (root.parent, root, *(root / name for name in ("artifacts", "direct", "locks", "quarantine"))):
            folder.mkdir(mode=0o700, exist_ok=True)
        probe = root / f".probe-{os.getpid()}"
        probe.write_bytes(b"probe")
        probe.unlink()
    except OSError as error:
        return f"the cache directory {place} cannot be written to ({error.strerror or error})"
    return ""
