"""Deferral under xdist: one pool, every scheduler, nothing lost when a worker dies."""

from __future__ import annotations

from collections import Counter

import pytest

from support import crash
from support.inner import InnerProject, InnerResult

pytest.importorskip("xdist", reason="needs pytest-xdist")
pytestmark = [pytest.mark.light, pytest.mark.slow]

WARM = ("load", "loadscope")
# Two files of two classes each, so that schedulers by scope have something to give out; keys shared by both files.
SUITE = """
    import pytest
    from support import light

    @pytest.fixture(scope="module")
    def wide():
        light.log("wide up {name}")
        yield
        light.log("wide down {name}")

    class TestOne:
        @pytest.mark.parametrize("number", range(6))
        def test_kernel(self, number, wide):
            assert light.build(f"k{{number}}", seconds=0.2)() == 1.0

    class TestTwo:
        @pytest.mark.xdist_group("group-{name}")
        @pytest.mark.parametrize("number", range(6))
        def test_kernel(self, number):
            assert light.build(f"k{{number}}", seconds=0.2)() == 1.0

        def test_no_kernel(self):
            light.log("plain {name}")
"""


def write_suite(inner: InnerProject) -> int:
    for name in ("a", "b"):
        inner.write(f"test_{name}.py", SUITE.format(name=name))
    return 26


def outcomes(result: InnerResult) -> Counter[str]:
    """How many tests have which outcomes, of which each should have one."""
    return Counter("+".join(kinds) for kinds in result.outcomes.values())


@pytest.mark.parametrize("scheduler", crash.SCHEDULERS)
def test_each_key_is_compiled_once_and_each_test_has_one_outcome(inner: InnerProject, scheduler: str) -> None:
    number = write_suite(inner)
    result = inner.run("-n", "2", "--dist", scheduler)
    times = 2 if scheduler == "each" else 1
    assert result.counts == {"passed": number * times}, result.show()
    assert outcomes(result) == {"+".join(["passed"] * times): number}, result.show()
    assert result.summary("submitted") == result.summary("done") == 6
    compiles = {event: n for event, n in result.events.items() if event.startswith("compile")}
    assert compiles == {f"compile k{n}": 1 for n in range(6)}, result.show()
    assert "deferred: " in result.stdout
    assert "compiled in the test process" not in result.stdout
    ups = {name: n for name, n in result.events.items() if name.startswith("wide up")}
    assert all(result.events[name.replace("up", "down")] == n for name, n in ups.items()), result.show()
    if scheduler not in WARM:
        return
    warm = inner.run("-n", "2", "--dist", scheduler)
    assert warm.counts == {"passed": number * times}, warm.show()
    assert (warm.summary("submitted"), warm.summary("hit")) == (0, 6)
    assert "deferred" not in warm.stdout


@pytest.mark.parametrize("arguments", [("-n", "1"), ("-n", "2", "--dist", "no"), ("-n", "4", "--maxprocesses=2")])
def test_other_ways_to_name_workers(inner: InnerProject, arguments: tuple[str, ...]) -> None:
    number = write_suite(inner)
    result = inner.run(*arguments)
    assert result.counts == {"passed": number}, result.show()
    assert result.summary("submitted") == 6
    assert "deferred: " in result.stdout


KILLER = """
    import os, signal, time
    import pytest
    from support import light

    @pytest.mark.parametrize("number", range(8))
    def test_kernel(number):
        assert light.build(f"k{number}", seconds=0.6)() == 1.0

    def test_that_kills_its_worker():
        if not os.path.exists(os.environ["SIDE_LOG"] + ".killed"):
            open(os.environ["SIDE_LOG"] + ".killed", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)

    @pytest.mark.parametrize("number", range(4))
    def test_after(number):
        pass
"""


@pytest.mark.parametrize("moment", crash.MOMENTS)
@pytest.mark.parametrize("scheduler", crash.SCHEDULERS)
def test_crash_is_blamed_on_the_test_that_ran_and_nothing_is_lost(
    inner: InnerProject, scheduler: str, moment: str
) -> None:
    """A worker is killed with five tests or more put off on it; a script repeats this (scripts/xdist_kill_check.py)."""
    crash.write_suite(inner)
    result = crash.run(inner, scheduler, moment)
    assert crash.faults(result, scheduler, moment) == [], result.show()


@pytest.mark.parametrize("scheduler", ["load", "loadgroup"])
def test_only_worker_is_replaced(inner: InnerProject, scheduler: str) -> None:
    inner.write("test_it.py", KILLER)
    result = inner.run("-n", "1", "--dist", scheduler)
    assert result.status == 1, result.show()
    assert result.counts == {"failed": 1, "passed": 12}, result.show()
    assert "replacing crashed worker gw0" in result.stdout


def test_test_that_nobody_is_left_to_run_is_reported_as_failed(inner: InnerProject) -> None:
    # The first three tests are sent together: two are put off, the third kills the worker.
    suite = KILLER.replace("range(8)", "range(2)").replace("seconds=0.6", "seconds=5.0").replace("range(4)", "range(9)")
    inner.write("test_it.py", suite)
    result = inner.run("-n", "1", "--max-worker-restart=0", "-rf")
    assert result.status == 1, result.show()
    assert result.counts == {"failed": 12}, result.show()
    lost = [line for line in result.stdout.splitlines() if line.endswith("allowed no replacement.")]
    assert len(lost) == 11, result.show()
    assert outcomes(result) == {"failure": 11, "error": 1}  # xdist reports a crash as an error


@pytest.mark.parametrize("option", ["-x", "--maxfail=2"])
def test_tests_left_out_by_a_limit_are_excused(inner: InnerProject, option: str) -> None:
    inner.write(
        "test_it.py",
        """
        import pytest
        from support import light

        @pytest.mark.parametrize("number", range(30))
        def test_kernel(number):
            assert light.build(f"k{number % 5}", seconds=0.3)() == 2.0
        """,
    )
    result = inner.run("-n", "2", option)
    assert result.status == 2, result.show()
    assert "no worker was left" not in result.stdout
    assert 1 <= result.counts["failed"] < 30


def test_x_ends_the_run_without_waiting_for_compiles(inner: InnerProject) -> None:
    inner.write(
        "test_it.py",
        """
        from support import light

        def test_cold():
            light.build("slow", seconds=60.0)()

        def test_fails():
            assert 0

        def test_more():
            pass
        """,
    )
    result = inner.run("-n", "2", "-x", timeout_s=40)
    assert result.status == 2, result.show()
    assert result.counts["failed"] == 1
    assert "test_it::test_cold" not in result.outcomes
    assert "no worker was left" not in result.stdout


def test_many_cold_keys_use_no_more_processes_than_jobs_and_one_import(inner: InnerProject) -> None:
    inner.write(
        "kernels.py",
        """
        import os, psutil
        from support import light
        from pytest_quack import jit_cache

        light.log(f"import by {'the pool' if os.environ.get('CUDA_VISIBLE_DEVICES') == '' else 'a worker'}")

        @jit_cache(backend=light.NAME)
        def build(number):
            siblings = [p for p in psutil.Process(os.getppid()).children() if p.status() != psutil.STATUS_ZOMBIE]
            light.log(f"alive {len(siblings)}")
            return light.LightKernel("k", float(number))
        """,
    )
    inner.write(
        "test_it.py",
        """
        import pytest
        import kernels

        @pytest.mark.parametrize("number", range(200))
        def test_kernel(number):
            assert kernels.build(number)() == number
        """,
    )
    result = inner.run("-n", "4", jobs="8")
    assert result.counts == {"passed": 200}, result.show()
    assert result.summary("submitted") == 200
    assert result.events["import by the pool"] == 1, result.show()
    assert result.events["import by a worker"] == 4
    assert len({line.split()[0] for line in result.log if "alive" in line}) <= 8
    alive = [int(event.split()[1]) for event in result.events if event.startswith("alive")]
    assert 1 < max(alive) <= 8, alive


def test_one_key_that_all_workers_want_is_submitted_once(inner: InnerProject) -> None:
    inner.write(
        "test_it.py",
        "from support import light\n\ndef test_it():\n    assert light.build('k', seconds=2.0)() == 1.0\n",
    )
    result = inner.run("-n", "8", "--dist", "each")
    assert result.counts == {"passed": 8}, result.show()
    assert result.summary("submitted") == result.events["compile k"] == 1
    assert "deferred: 1 test, 8 times in all" in result.stdout


def test_idle_worker_gets_tests_while_what_it_has_is_put_off(inner: InnerProject) -> None:
    """The scheduler sends two tests of these to each worker at first, and more when they are complete."""
    inner.write(
        "test_it.py",
        """
        import time
        import pytest
        from support import light

        @pytest.mark.parametrize("number", range(6))
        def test_slow(number):
            light.build(f"k{number}", seconds=4.0)()
            light.log("slow done")

        @pytest.mark.parametrize("number", range(10))
        def test_quick(number):
            light.log("quick done")
        """,
    )
    result = inner.run("-n", "2", jobs="6")
    assert result.counts == {"passed": 16}, result.show()
    order = [line.partition(" ")[2] for line in result.log if "done" in line]
    assert order == ["quick done"] * 10 + ["slow done"] * 6, result.show()


def test_group_stays_on_its_worker(inner: InnerProject) -> None:
    inner.write(
        "test_it.py",
        """
        import os
        import pytest
        from support import light

        GROUPS = [pytest.param(group, marks=pytest.mark.xdist_group(f"group{group}")) for group in range(4)]

        @pytest.mark.parametrize("number", range(5))
        @pytest.mark.parametrize("group", GROUPS)
        def test_kernel(group, number):
            assert light.build(f"k{number}", seconds=0.2)() == 1.0
            light.log(f"group {group} on {os.environ['PYTEST_XDIST_WORKER']}")
        """,
    )
    result = inner.run("-n", "2", "--dist", "loadgroup", "-v")
    assert result.counts == {"passed": 20}, result.show()
    if "@group" not in result.stdout:
        pytest.skip(reason="with this pytest, this xdist does not keep groups together")
    places = {event for event in result.events if event.startswith("group")}
    assert len(places) == 4, result.show()
    assert "deferred: " in result.stdout


def test_put_off_tests_can_be_stolen(inner: InnerProject) -> None:
    inner.write(
        "test_it.py",
        """
        import os, time
        import pytest
        from support import light

        @pytest.mark.parametrize("number", range(40))
        def test_kernel(number):
            if os.environ["PYTEST_XDIST_WORKER"] == "gw0":
                time.sleep(0.05)
            assert light.build(f"k{number}", seconds=0.1)() == 1.0
        """,
    )
    result = inner.run("-n", "3", "--dist", "worksteal", jobs="4")
    assert result.counts == {"passed": 40}, result.show()
    assert outcomes(result) == {"passed": 40}
    assert result.summary("submitted") == 40


def test_wait_mode_shares_the_pool_too(inner: InnerProject) -> None:
    number = write_suite(inner)
    result = inner.run("-n", "2", "--async-compile-mode=wait")
    assert result.counts == {"passed": number}, result.show()
    assert result.summary("submitted") == 6
    assert "deferred" not in result.stdout
    assert "waited in place: " in result.stdout


def test_xdist_that_is_not_known_runs_its_own_loop(inner: InnerProject) -> None:
    number = write_suite(inner)
    inner.write("conftest.py", "import pytest_quack.run\npytest_quack.run.find_worker_channel = lambda config: None\n")
    result = inner.run("-n", "2")
    assert result.counts == {"passed": number}, result.show()
    assert outcomes(result) == {"passed": number}
    assert result.summary("submitted") == 6
    assert "this version of xdist is not known" in result.stdout
