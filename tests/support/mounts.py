"""Commands that run where a folder is a read-only or a small file system, seen by nobody else."""

from __future__ import annotations

import functools
import shlex
import subprocess
from pathlib import Path

import pytest


@functools.cache
def _can_mount() -> bool:
    try:
        return (
            subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "x", "/mnt"], capture_output=True).returncode == 0
        )
    except OSError:
        return False


def read_only(folder: Path, command: list[str]) -> list[str]:
    """`command` with `folder` mounted read-only; skips the test where this user may not mount."""
    at = shlex.quote(str(folder))
    return _within(f"mount --bind {at} {at} && mount -o remount,bind,ro {at}", command)


def small(folder: Path, size_kib: int, command: list[str]) -> list[str]:
    """`command` with an empty file system of that size mounted at `folder`; skips where this user may not mount."""
    return _within(f"mount -t tmpfs -o size={size_kib}k quack {shlex.quote(str(folder))}", command)


def _within(mount: str, command: list[str]) -> list[str]:
    if not _can_mount():
        pytest.skip("this user may not mount file systems in a namespace of its own")
    return ["unshare", "-m", "sh", "-c", f"{mount} && exec {shlex.join(command)}"]
