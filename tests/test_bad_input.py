"""Bad input gets an error that says what is wrong and what to do, and never costs a test."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import filelock
import pytest

from support.inner import ALONE_AND_TWO_WORKERS, InnerProject

pytestmark = [pytest.mark.light, pytest.mark.slow]
USAGE_ERROR = 4

TWO_TESTS = """
from support.light import build, build_badly, log

def test_a():
    assert build("a")() == 1.0

def test_b():
    assert build("b")() == 1.0
"""


@pytest.mark.parametrize(
    ("jobs", "words"),
    [
        ("-1", ["--async-compile=-1", "at least 0"]),
        ("many", ["--async-compile=many", '"auto"']),
        ("1.5", ["--async-compile=1.5", "a whole number"]),
        ("tests/", ["--async-compile=tests/", "a whole number"]),
    ],
)
def test_number_of_jobs(inner: InnerProject, jobs: str, words: list[str]) -> None:
    inner.write("test_it.py", TWO_TESTS)
    result = inner.run(jobs=jobs)
    assert result.status == USAGE_ERROR, result.show()
    for word in words:
        assert word in result.stderr, result.show()


def test_zero_jobs_is_off(inner: InnerProject) -> None:
    inner.write("test_it.py", TWO_TESTS)
    result = inner.run(jobs="0")
    assert result.counts == {"passed": 2}, result.show()
    assert "compile processes" not in result.stdout


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--async-compile-mode", "later", '"defer" or "wait"'),
        ("--async-compile-timeout", "0", "seconds above 0"),
        ("--async-compile-timeout", "soon", "seconds above 0"),
        ("--compile-arch", "hopper", "sm_90a"),
        ("--quack-cache", "perhaps", "true"),
    ],
)
def test_other_options(inner: InnerProject, option: str, value: str, words: str) -> None:
    inner.write("test_it.py", TWO_TESTS)
    result = inner.run(f"{option}={value}")
    assert result.status == USAGE_ERROR, result.show()
    assert f"{option}={value}" in result.stderr
    assert words in result.stderr


def test_settings_from_the_ini_file(inner: InnerProject) -> None:
    inner.write("pytest.ini", "[pytest]\nasync_compile = 1\nasync_compile_mode = wait\n")
    inner.write("test_it.py", TWO_TESTS)
    result = inner.run(jobs=None)
    assert result.counts == {"passed": 2}, result.show()
    assert "1 compile processes, tests wait in place" in result.stdout
    assert "2 submitted" in result.stdout


def test_bad_setting_from_the_environment(inner: InnerProject) -> None:
    inner.write("test_it.py", TWO_TESTS)
    inner.environ["QUACK_COMPILE_TIMEOUT"] = "never"
    result = inner.run()
    assert result.status == USAGE_ERROR, result.show()
    assert "QUACK_COMPILE_TIMEOUT=never" in result.stderr


def test_cache_directory_that_is_a_file(inner: InnerProject) -> None:
    inner.cache.write_text("not a directory")
    inner.write("test_it.py", TWO_TESTS)
    result = inner.run()
    assert result.status == USAGE_ERROR, result.show()
    assert "is not a directory" in result.stderr
    assert "QUACK_CACHE_DIR" in result.stderr


def test_cache_directory_that_others_can_write_to(inner: InnerProject) -> None:
    inner.cache.mkdir()
    inner.cache.chmod(0o777)
    inner.write("test_it.py", TWO_TESTS)
    result = inner.run()
    assert result.status == USAGE_ERROR, result.show()
    assert "can be written to by others" in result.stderr
    assert f"chmod go-w {inner.cache}" in result.stderr
    assert "QUACK_CACHE_TRUST=1" in result.stderr
    inner.environ["QUACK_CACHE_TRUST"] = "1"
    assert inner.run().counts == {"passed": 2}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to somebody else")
def test_cache_directory_of_somebody_else(inner: InnerProject) -> None:
    inner.cache.mkdir()
    os.chown(inner.cache, 12345, 12345)
    inner.write("test_it.py", TWO_TESTS)
    result = inner.run()
    assert result.status == USAGE_ERROR, result.show()
    assert "belongs to user 12345" in result.stderr


def mount(*arguments: str) -> None:
    """Mount, or skip where this user or container may not."""
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"mounting is not possible here: {done.stderr.strip()}")


def test_cache_directory_that_is_read_only(inner: InnerProject) -> None:
    inner.write("test_it.py", TWO_TESTS)
    inner.cache.mkdir(mode=0o700)
    mount("-t", "tmpfs", "-o", "ro,mode=0700", "tmpfs", str(inner.cache))
    try:
        result = inner.run()
    finally:
        subprocess.run(["umount", str(inner.cache)], check=True)
    assert result.counts == {"passed": 2}, result.show()
    assert result.stdout.count("cannot be written to (Read-only file system)") == 1, result.show()


def test_read_only_cache_directory_still_serves_what_it_holds(inner: InnerProject) -> None:
    inner.write("test_it.py", TWO_TESTS)
    assert inner.run().status == 0
    mount("--bind", str(inner.cache), str(inner.cache))
    try:
        mount("-o", "remount,ro,bind", str(inner.cache))
        result = inner.run()
    finally:
        subprocess.run(["umount", str(inner.cache)], check=True)
    assert result.counts == {"passed": 2}, result.show()
    assert result.summary("hit") == 2
    assert not [event for event in result.events if event.startswith("compile")]


def test_cache_directory_that_is_full(inner: InnerProject) -> None:
    inner.write("test_it.py", TWO_TESTS)
    inner.cache.mkdir(mode=0o700)
    mount("-t", "tmpfs", "-o", "size=64k,mode=0700", "tmpfs", str(inner.cache))
    try:
        filler = os.open(inner.cache / "filler", os.O_WRONLY | os.O_CREAT)
        with pytest.raises(OSError, match="No space left"):
            all(os.write(filler, b"x" * 4096) for _ in range(1000))
        os.close(filler)
        result = inner.run()
    finally:
        subprocess.run(["umount", str(inner.cache)], check=True)
    assert result.counts == {"passed": 2}, result.show()
    assert "No space left on device" in result.stdout


def test_cache_directory_deleted_during_the_run(inner: InnerProject) -> None:
    inner.write(
        "test_it.py",
        """
import os, shutil
from support.light import build

def test_a():
    assert build("a")() == 1.0
    shutil.rmtree(os.environ["QUACK_CACHE_DIR"])

def test_b():
    assert build("b", seconds=0.5)() == 1.0

def test_c():
    assert build("c", seconds=1.0)() == 1.0
""",
    )
    result = inner.run()
    assert result.counts == {"passed": 3}, result.show()


def test_no_home_and_no_name_for_the_default_place(inner: InnerProject) -> None:
    inner.write("test_it.py", TWO_TESTS)
    environ = inner.run_environ()
    for name in ("QUACK_CACHE_DIR", "HOME", "USER", "LOGNAME", "XDG_CACHE_HOME"):
        environ.pop(name, None)
    if os.geteuid() != 0:
        pytest.skip("only root can become a user without a name")
    environ.update(HOME="/nonexistent-home", PYTHONDONTWRITEBYTECODE="1")
    inner.log_path.write_text("")
    inner.log_path.chmod(0o666)
    for folder in (inner.root, *inner.root.parents):
        if folder == Path("/tmp"):
            break
        folder.chmod(0o755)
    if subprocess.run(["setpriv", "--reuid=54321", "test", "-x", sys.executable], check=False).returncode != 0:
        pytest.skip("another user cannot run this interpreter")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "pytest_quack", "--async-compile=2", "-q"],
        cwd=inner.root,
        env=environ,
        user=54321,
        group=54321,
        extra_groups=[],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("kernels are not kept between runs") == 1, done.stdout


@pytest.mark.parametrize("damage", ["truncated", "garbage", "empty", "directory", "no sidecar"])
def test_damaged_artifact_is_compiled_again(inner: InnerProject, damage: str) -> None:
    inner.write("test_it.py", TWO_TESTS)
    assert inner.run().status == 0
    artifact = min((inner.cache / "pytest-quack" / "v1" / "artifacts").rglob("*.o"))
    content = artifact.read_bytes()
    if damage == "truncated":
        artifact.write_bytes(content[: len(content) // 2])
    elif damage == "garbage":
        artifact.write_bytes(bytes(reversed(content)))
    elif damage == "empty":
        artifact.write_bytes(b"")
    elif damage == "directory":
        artifact.unlink()
        artifact.mkdir()
    else:
        artifact.with_suffix(".json").unlink()
    result = inner.run()
    assert result.counts == {"passed": 2}, result.show()
    assert result.summary("submitted") == 1
    if damage != "no sidecar":
        assert "damaged cache entries set aside and compiled again: 1" in result.stdout
    again = inner.run()
    assert again.summary("submitted") == 0, again.show()


@ALONE_AND_TWO_WORKERS
def test_compile_function_that_goes_wrong_in_every_way(inner: InnerProject, workers: tuple[str, ...]) -> None:
    inner.write(
        "test_it.py",
        """
import pytest
from support.light import build, build_badly, log

@pytest.mark.parametrize("how", ["raise", "crash", "exit", "hang", "export", "worker"])
def test_badly(how):
    assert build_badly(how, how)() == 1.0

@pytest.mark.parametrize("i", range(6))
def test_well(i):
    assert build(f"k{i}")() == 1.0
""",
    )
    result = inner.run("--async-compile-timeout=2", *workers)
    assert result.counts == {"passed": 7, "failed": 5}, result.show()
    for words in (
        "ValueError: raise has a bad tile",
        "was killed by SIGSEGV",
        "exited with status 3",
        "ended after 2 s",
        "is not a light kernel",
    ):
        assert words in result.stdout, result.show()
    assert "worker fails in a compile process only" in result.stdout
    again = inner.run("--async-compile-timeout=2", "-k", "raise or export or well", *workers)
    assert again.summary("submitted") == 0, again.show()


@ALONE_AND_TWO_WORKERS
def test_lock_that_another_process_never_gives_back(inner: InnerProject, workers: tuple[str, ...]) -> None:
    inner.write("test_it.py", "from support.light import build\ndef test_it():\n    assert build('k')() == 1.0\n")
    assert inner.run().counts == {"passed": 1}
    locks = list(inner.cache.rglob("locks/*"))
    assert locks
    for path in [*inner.cache.rglob("artifacts/*/*"), *inner.cache.rglob("direct/*/*")]:
        path.unlink()
    with contextlib.ExitStack() as stack:
        for path in locks:
            stack.enter_context(filelock.FileLock(path))
        result = inner.run("--async-compile-timeout=2", *workers, timeout_s=60)
    assert result.counts == {"passed": 1}, result.show()
    assert result.events["compile k"] == 1
    assert "without its lock" in result.stdout, result.show()
