"""Runs that are expected to find all kernels run as pytest's own loop does; where that is wrong, nothing is lost."""

from __future__ import annotations

import os
import time

import pytest

from pytest_quack.deferral.warm import WarmMark
from pytest_quack.runtime import Runtime
from support.inner import ALONE_AND_TWO_WORKERS, InnerProject

pytestmark = pytest.mark.light
CONFTEST = """
    import pytest
    from pytest_quack.deferral.attempt import Attempt
    from support.light import log

    begin = Attempt.begin

    def logged(*args):
        log("made ready to step aside")
        return begin(*args)

    Attempt.begin = logged
"""
SUITE = """
    import pytest
    from kernels import VALUE
    from support.light import build

    @pytest.mark.parametrize("number", range(6))
    def test_kernel(number):
        assert build(f"k{number}", value=VALUE, seconds=0.1)() == VALUE

    def test_plain():
        pass
"""


@pytest.fixture
def project(inner: InnerProject) -> InnerProject:
    inner.write("kernels.py", "VALUE = 1.0\n")
    inner.write("conftest.py", CONFTEST)
    inner.write("test_it.py", SUITE)
    return inner


@pytest.mark.slow
@ALONE_AND_TWO_WORKERS
def test_second_run_takes_no_precautions_and_a_changed_source_brings_them_back(
    project: InnerProject, workers: tuple[str, ...]
) -> None:
    ready = "made ready to step aside"
    cold = project.run(*workers)
    assert cold.counts == {"passed": 7}, cold.show()
    assert cold.events[ready] > 7
    assert "deferred: 6 tests" in cold.stdout
    warm = project.run(*workers)
    assert warm.counts == {"passed": 7}, warm.show()
    assert warm.summary("submitted") == warm.events[ready] == 0
    part = project.run(*workers, "-k", "plain")  # other tests, of which nothing is known
    assert part.events[ready] == 1, part.show()
    project.write("kernels.py", "VALUE = 2.0\n")
    edited = project.run(*workers)
    assert edited.counts == {"passed": 7}, edited.show()
    assert "deferred: 6 tests" in edited.stdout
    assert "waited in place" not in edited.stdout


@pytest.mark.slow
@ALONE_AND_TWO_WORKERS
def test_kernels_that_are_missing_all_the_same_cost_one_wait_for_each_process(
    project: InnerProject, workers: tuple[str, ...]
) -> None:
    assert project.run(*workers).counts == {"passed": 7}
    for path in [*project.cache.rglob("artifacts/*/*"), *project.cache.rglob("direct/*/*")]:
        path.unlink()
    result = project.run(*workers)
    assert result.counts == {"passed": 7}, result.show()
    assert result.summary("submitted") == 6
    assert "because all kernels were there in the last run of these tests" in result.stdout
    assert "deferred: " in result.stdout
    assert all(len(kinds) == 1 for kinds in result.outcomes.values())


@pytest.mark.slow
@pytest.mark.parametrize("how", ["-x", "exit"])
def test_run_that_was_not_complete_promises_nothing(project: InnerProject, how: str) -> None:
    project.write(
        "test_a.py", "import pytest\ndef test_a(): pytest.exit('early')\n" if how == "exit" else "def test_a(): 0/0\n"
    )
    project.run(*(["-x"] if how == "-x" else []))
    assert not list(project.cache.rglob("warm/*"))


def make(runtime: Runtime, nodeids: list[str], began_ns: int = 0) -> WarmMark:
    assert runtime.store is not None
    return WarmMark(runtime.store, nodeids, began_ns or time.time_ns())


def test_mark_is_that_of_its_tests_and_surroundings(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    make(runtime, ["a", "b"]).write()
    assert make(runtime, ["a", "b"]).is_fresh()
    assert not make(runtime, ["b", "a"]).is_fresh()
    assert not make(runtime, ["a"]).is_fresh()
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_100a")
    assert not make(runtime, ["a", "b"]).is_fresh()


def test_source_that_changed_while_the_run_went_on_makes_the_mark_stale(runtime: Runtime) -> None:
    make(runtime, ["a"]).write()
    assert make(runtime, ["a"]).is_fresh()
    changed = os.stat(__file__).st_mtime_ns
    make(runtime, ["a"], changed - 1).write()
    assert not make(runtime, ["a"]).is_fresh()
