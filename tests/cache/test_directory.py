"""Where the cache lives: private, refused where others could plant code in it, and never a reason to crash."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from pytest_quack.cache.directory import default_place, open_directory
from pytest_quack.cache.store import Store
from pytest_quack.errors import CacheDirectoryError
from pytest_quack.runtime import Runtime
from pytest_quack.settings import Settings
from support import mounts
from support.fresh import FreshProject
from support.inner import ROOT, TESTS

pytestmark = pytest.mark.light

as_root = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None, reason="only root can become another user, by setpriv"
)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def asking(place: Path, *, trust: bool = False) -> Settings:
    return Settings(cache_dir=str(place), is_cache_trusted=trust)


def test_a_named_directory_is_created_for_this_user_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        directory = open_directory(asking(tmp_path / "new" / "cache"))
    finally:
        os.umask(before)
    assert directory.root == tmp_path / "new" / "cache" / "pytest-quack" / "v1"
    assert (directory.is_writable, directory.problem) == (True, "")
    for path in (tmp_path / "new" / "cache", directory.root.parent, directory.root, *directory.root.iterdir()):
        assert mode(path) == 0o700


def test_nothing_but_our_own_folder_is_touched(tmp_path: Path) -> None:
    (tmp_path / "theirs").write_text("x")
    open_directory(asking(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {"theirs", "pytest-quack"}


def test_a_home_in_the_name_is_expanded_and_an_unknown_one_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert open_directory(asking(Path("~/kernels"))).root.is_relative_to(tmp_path / "kernels")
    with pytest.raises(CacheDirectoryError, match=r"~nobody-of-that-name.*name another directory"):
        open_directory(asking(Path("~nobody-of-that-name/x")))


def test_a_file_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(CacheDirectoryError, match=r"/file is not a directory; remove the file or name another"):
        open_directory(asking(tmp_path / "file"))
    with pytest.raises(CacheDirectoryError, match=r"cannot be created .*name another directory"):
        open_directory(asking(tmp_path / "file" / "below"))


def test_a_symlink_is_resolved_and_its_target_checked(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.mkdir(mode=0o700)
    link.symlink_to(target)
    assert open_directory(asking(link)).root.is_relative_to(target)
    target.chmod(0o777)
    with pytest.raises(CacheDirectoryError, match=f"{target} can be written to by others"):
        open_directory(asking(link))


@pytest.mark.parametrize("aim", ["nowhere", "link"], ids=["dangling", "to itself"])
def test_a_symlink_that_leads_nowhere_is_an_error(tmp_path: Path, aim: str) -> None:
    (tmp_path / "link").symlink_to(tmp_path / aim)
    with pytest.raises(CacheDirectoryError, match=r"link cannot be created"):
        open_directory(asking(tmp_path / "link"))


@pytest.mark.parametrize("bits", [0o777, 0o770, 0o1777, 0o702])
@pytest.mark.parametrize("below", ["", "pytest-quack", "pytest-quack/v1"])
def test_a_directory_that_others_can_write_to_is_refused_unless_trusted(tmp_path: Path, bits: int, below: str) -> None:
    place = tmp_path / "cache"
    (place / below).mkdir(parents=True, mode=0o700)
    (place / below).chmod(bits)
    with pytest.raises(CacheDirectoryError) as error:
        open_directory(asking(place))
    assert f"can be written to by others (mode {bits:04o})" in str(error.value)
    assert f"chmod go-w {place / below}" in str(error.value)
    assert "QUACK_CACHE_TRUST=1" in str(error.value)
    assert open_directory(asking(place, trust=True)).is_writable


def test_a_directory_that_others_can_only_read_is_used(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    assert open_directory(asking(tmp_path)).is_writable


@as_root
@pytest.mark.parametrize("below", ["", "pytest-quack", "pytest-quack/v1"])
def test_a_directory_of_another_user_is_refused_unless_trusted(tmp_path: Path, below: str) -> None:
    place = tmp_path / "cache"
    (place / below).mkdir(parents=True, mode=0o700)
    os.chown(place / below, 65534, 65534)
    with pytest.raises(CacheDirectoryError, match=r"belongs to user 65534, not to you \(user 0\).*QUACK_CACHE_TRUST=1"):
        open_directory(asking(place))
    assert open_directory(asking(place, trust=True)).is_writable


@as_root
def test_a_symlink_to_a_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir(mode=0o755)
    os.chown(tmp_path / "theirs", 65534, 65534)
    (tmp_path / "link").symlink_to(tmp_path / "theirs")
    with pytest.raises(CacheDirectoryError, match="belongs to user 65534"):
        open_directory(asking(tmp_path / "link"))


def test_the_default_place_is_private_and_in_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    directory = open_directory(Settings())
    assert directory.root.is_relative_to(default_place())
    assert directory.root.is_relative_to(tmp_path)
    assert mode(directory.root) == mode(default_place()) == 0o700


def test_an_unsafe_default_place_means_running_uncached_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "quack").mkdir()
    (tmp_path / "quack").chmod(0o777)
    runtime = Runtime(Settings())
    assert runtime.store is None
    assert runtime.store is None
    assert len(caplog.messages) == 1
    assert "kernels are not kept between runs: " in caplog.text
    assert "can be written to by others" in caplog.text
    with pytest.raises(CacheDirectoryError):
        _ = Runtime(Settings(cache_dir=str(tmp_path / "quack"))).store


def as_user(script: str, tmp_path: Path, environ: dict[str, str]) -> str:
    """What a script prints that runs as a user without a name, in a folder that is this user's own."""
    reachable(tmp_path)
    os.chown(tmp_path, 54321, 54321)
    setup = f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(TESTS)!r}]\n"
    # The interpreter itself may lie where only root can read.
    become = ["setpriv", "--reuid=54321", "--regid=54321", "--clear-groups"]
    become += ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
    done = subprocess.run(
        [*become, sys.executable, "-c", setup + textwrap.dedent(script)],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1", **environ},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def reachable(folder: Path) -> None:
    """Let other users pass through pytest's own folders, which are private."""
    for part in (folder, *folder.parents[:-2]):
        if part.stat().st_uid == os.geteuid() and not mode(part) & 0o001:
            part.chmod(mode(part) | 0o011)


@as_root
@pytest.mark.parametrize("environ", [{}, {"HOME": ""}, {"HOME": "/nonexistent"}], ids=["unset", "empty", "absent"])
def test_a_user_without_name_and_home_runs_uncached(tmp_path: Path, environ: dict[str, str]) -> None:
    script = """
        from support.light import build
        print(build("a")(), build("a")())
    """
    said = as_user(script, tmp_path, environ)
    assert "1.0 1.0" in said
    assert said.count("kernels are not kept between runs") == 1


@as_root
def test_a_user_without_a_name_has_a_cache_where_there_is_a_home(tmp_path: Path) -> None:
    script = """
        from support.light import build
        from pytest_quack.runtime import get_runtime
        build("a")
        print(get_runtime().store.root, get_runtime().store.is_writable)
    """
    said = as_user(script, tmp_path, {"HOME": str(tmp_path)})
    assert said.split() == [str(tmp_path / ".cache" / "quack" / "pytest-quack" / "v1"), "True"]


def test_the_import_of_a_compile_function_opens_no_directory(tmp_path: Path) -> None:
    fresh = FreshProject(tmp_path)
    (tmp_path / "cache").write_text("not a directory")
    fresh.kernels("kern.py", "@jit_cache(backend=NAME)\ndef build():\n    return LightKernel('k', 1)\n")
    script = """
        import kern
        from pytest_quack.errors import CacheDirectoryError
        try:
            kern.build()
        except CacheDirectoryError as error:
            show(str(error))
    """
    (said,) = fresh.run(script).values
    assert "is not a directory" in said


CALLS = """
import kern
from pytest_quack.runtime import get_runtime
{before}
show([kern.build(n)() for n in (0, 1)])
show([kern.build(n)() for n in (0, 1)])
show([list(get_runtime().store.problems), get_runtime().store.corrupt])
"""
KERN = """
@jit_cache(backend=NAME)
def build(n):
    log("compile")
    return LightKernel("k" * 20000, n)
"""


def said_by(fresh: FreshProject, command: list[str]) -> list[str]:
    done = subprocess.run(command, cwd=fresh.root, env=fresh.environ(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def script(before: str = "") -> list[str]:
    text = "import json\ndef show(value): print(json.dumps(value))\n" + CALLS.format(before=before)
    return [sys.executable, "-c", text]


@pytest.mark.parametrize("is_warm", [False, True], ids=["cold", "warm"])
def test_a_read_only_directory_is_read_and_what_is_missing_is_compiled(tmp_path: Path, is_warm: bool) -> None:
    fresh = FreshProject(tmp_path)
    fresh.kernels("kern.py", KERN)
    fresh.cache.mkdir(mode=0o700)
    if is_warm:
        fresh.run("import kern\nkern.build(0)")
    before = fresh.compiles()
    first, second, last = said_by(fresh, mounts.read_only(fresh.cache, script()))
    assert first == second == "[0.0, 1.0]"
    assert fresh.compiles() - before == (1 if is_warm else 2)
    assert last.count("cannot be written to (Read-only file system); kernels are compiled again in each run") == 1


def test_a_full_disk_stores_nothing_and_is_said_once(tmp_path: Path) -> None:
    fresh = FreshProject(tmp_path)
    fresh.kernels("kern.py", KERN)
    fresh.cache.mkdir(mode=0o700)
    fill = """
import os
get_runtime().store
os.chmod(os.environ["QUACK_CACHE_DIR"], 0o700)
with open(os.path.join(os.environ["QUACK_CACHE_DIR"], "filler"), "wb", buffering=0) as file:
    try:
        while file.write(b"x" * 4096): pass
    except OSError: pass
"""
    command = mounts.small(
        fresh.cache, 256, ["sh", "-c", 'chmod 700 "$QUACK_CACHE_DIR" && exec "$@"', "sh", *script(fill)]
    )
    first, second, last = said_by(fresh, command)
    assert first == second == "[0.0, 1.0]"
    assert fresh.compiles() == 2
    assert last.count("No space left on device") == 1


def test_a_directory_that_is_deleted_meanwhile_is_made_again_or_done_without(tmp_path: Path) -> None:
    fresh = FreshProject(tmp_path)
    fresh.kernels("kern.py", KERN)
    delete = "kern.build(0); import shutil, os; shutil.rmtree(os.environ['QUACK_CACHE_DIR']); kern.build.cache_clear()"
    first, second, last = said_by(fresh, script(delete))
    assert first == second == "[0.0, 1.0]"
    assert last == "[[], 0]"
    assert fresh.run("import kern\nshow([kern.build(n)() for n in (0, 1)])").compiles == 0


def test_a_directory_that_became_a_file_meanwhile_does_not_end_the_run(tmp_path: Path) -> None:
    fresh = FreshProject(tmp_path)
    fresh.kernels("kern.py", KERN)
    become = (
        "import shutil, os; get_runtime().store; place = os.environ['QUACK_CACHE_DIR']; "
        "shutil.rmtree(place); open(place, 'w').close()"
    )
    first, second, _ = said_by(fresh, script(become))
    assert first == second == "[0.0, 1.0]"
    assert fresh.compiles() == 2


def test_a_store_that_is_deleted_between_two_calls_is_only_a_miss(tmp_path: Path) -> None:
    store = Store(open_directory(asking(tmp_path / "cache")))
    shutil.rmtree(tmp_path / "cache")
    assert store.find("0" * 64) is None
    assert store.find_pointer("0" * 64) is None
    assert (store.problems, store.corrupt) == ({}, 0)
