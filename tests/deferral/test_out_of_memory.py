"""Tests that run out of device memory are run again, when nothing is left of the first attempt."""

from __future__ import annotations

import textwrap

import pytest

from support.inner import InnerProject

pytestmark = [pytest.mark.light, pytest.mark.slow]

PRELUDE = """
    import gc, sys, unittest, weakref
    import pytest
    from support import light

    class Thing:
        pass

    first = []  # weak references to what attempts have had
    gone = []  # whether it was gone when the next one began

    def have():
        gone.extend(reference() is None for reference in first)
        thing = Thing()
        first.append(weakref.ref(thing))
        return thing

    def run_out(of="CUDA error: out of memory"):
        raise RuntimeError(of)

    def attempts(name, count={}):
        count[name] = count.get(name, 0) + 1
        light.log(f"attempt {name}")
        return count[name]
"""


def write(inner: InnerProject, text: str, name: str = "test_it.py") -> None:
    inner.write(name, textwrap.dedent(PRELUDE) + textwrap.dedent(text))


LET_GO = {
    "a local": """
        def test_it():
            thing = have()
            if attempts("it") == 1:
                run_out()
    """,
    "a chain": """
        def test_it():
            try:
                thing = have()
                raise KeyError("first")
            except KeyError:
                if attempts("it") == 1:
                    run_out()
    """,
    "a fixture value": """
        @pytest.fixture
        def value():
            yield have()

        def test_it(value):
            if attempts("it") == 1:
                run_out()
    """,
    "a returned fixture value": """
        @pytest.fixture
        def value():
            return have()

        def test_it(value, request):
            if attempts("it") == 1:
                run_out()
    """,
    "a set-up": """
        @pytest.fixture
        def value():
            thing = have()
            if attempts("it") == 1:
                run_out()
            return thing

        def test_it(value):
            pass
    """,
    "a tear-down": """
        @pytest.fixture
        def value():
            thing = have()
            yield
            if attempts("it") == 1:
                run_out()

        def test_it(value):
            pass
    """,
    "a wider fixture's set-up": """
        @pytest.fixture(scope="module")
        def value():
            thing = have()
            if attempts("it") == 1:
                run_out()
            yield thing

        def test_it(value):
            assert isinstance(value, Thing)
    """,
    "setup_module": """
        def setup_module():
            thing = have()
            if attempts("it") == 1:
                run_out()

        def test_it():
            pass
    """,
    "a closure": """
        def test_it():
            thing = have()
            def use():
                return thing
            def loop():
                return loop, use
            if attempts("it") == 1:
                run_out()
    """,
    "the last error": """
        def test_it():
            thing = have()
            if attempts("it") == 1:
                error = RuntimeError("CUDA error: out of memory")
                error.things = [thing]
                sys.last_value = error
                raise error
    """,
    "a log record": """
        import logging

        def test_it(caplog):
            thing = have()
            logging.getLogger().warning("with %s", thing)
            if attempts("it") == 1:
                run_out()
    """,
    "a warning": """
        import warnings

        def test_it():
            thing = have()
            warnings.warn(ResourceWarning("unclosed"), source=thing)
            if attempts("it") == 1:
                run_out()
    """,
    "a class instance": """
        class TestIt:
            def test_it(self):
                self.thing = have()
                if attempts("it") == 1:
                    run_out()
    """,
    "a TestCase": """
        class TestIt(unittest.TestCase):
            def test_it(self):
                self.thing = have()
                if attempts("it") == 1:
                    run_out()
    """,
    "a TestCase's setUp": """
        class TestIt(unittest.TestCase):
            def setUp(self):
                self.thing = have()
                if attempts("it") == 1:
                    run_out()

            def test_it(self):
                pass
    """,
    "a TestCase's setUpClass": """
        class TestIt(unittest.TestCase):
            @classmethod
            def setUpClass(cls):
                thing = have()
                if attempts("it") == 1:
                    run_out()

            def test_it(self):
                pass
    """,
    "a subtest": """
        def test_it(subtests):
            thing = have()
            with subtests.test("a"):
                if attempts("it") == 1:
                    run_out()
    """,
    "an error with a cause": """
        def test_it():
            thing = have()
            if attempts("it") == 1:
                try:
                    run_out()
                except RuntimeError as error:
                    raise ValueError("the launch failed") from error
    """,
}
NEEDS = {"a subtest": "subtests came with pytest 9"}


@pytest.mark.parametrize("what", LET_GO)
def test_nothing_is_left_of_the_first_attempt(inner: InnerProject, what: str) -> None:
    if what in NEEDS and not hasattr(pytest, "Subtests"):
        pytest.skip(reason=NEEDS[what])
    write(inner, textwrap.dedent(LET_GO[what]) + "\n\ndef test_that_it_was_gone():\n    assert gone == [True], gone\n")
    result = inner.run("-W", "ignore")
    assert result.status == 0, result.show()
    assert result.counts["passed"] >= 2
    assert result.events["attempt it"] == 2
    assert "out of device memory: 1 attempt, each made again" in result.stdout
    assert "test_it was run again, alone on its GPU (a GPU whose free memory is not known: " in result.stdout
    assert all(len(kinds) == 1 for kinds in result.outcomes.values()), result.outcomes


def test_order_of_what_happens(inner: InnerProject) -> None:
    """Out of memory, pending, passed; pending, out of memory, passed; twice out of memory; and other second errors."""
    write(
        inner,
        """
        def test_oom_pending_pass():
            if attempts("a") == 1:
                run_out()
            assert light.build("ka", seconds=0.3)() == 1.0

        def test_pending_oom_pass():
            light.build("kb", seconds=0.3)()
            if attempts("b") == 1:
                run_out()

        def test_oom_oom():
            attempts("c")
            run_out(f"CUDA error: out of memory in attempt {attempts('c again')}")

        def test_oom_assertion():
            if attempts("d") == 1:
                run_out()
            assert "CUDA error: out of memory" == ""

        def test_oom_skip():
            if attempts("e") == 1:
                run_out()
            pytest.skip("for a reason of its own")

        def test_assertion_that_quotes():
            attempts("f")
            assert "CUDA error: out of memory" == ""

        @pytest.mark.compile_in_place
        def test_that_must_not_run_twice():
            attempts("g")
            run_out()

        @pytest.mark.xfail(strict=True, reason="it runs out of memory each time")
        def test_that_is_expected_to_fail():
            attempts("h")
            run_out()

        def test_raises():
            attempts("i")
            with pytest.raises(RuntimeError):
                run_out()

        @pytest.fixture
        def torn_down_twice():
            yield
            if attempts("j") == 1:
                run_out()

        def test_teardown(torn_down_twice):
            attempts("j body")
        """,
    )
    result = inner.run("-rA")
    assert result.counts == {"failed": 4, "passed": 4, "skipped": 1, "xfailed": 1}, result.show()
    assert result.status == 1
    expected = {"a": 3, "b": 2, "c": 2, "d": 2, "e": 2, "f": 1, "g": 1, "h": 1, "i": 1, "j": 2, "j body": 2}
    for name, times in expected.items():
        assert result.events[f"attempt {name}"] == times, (name, result.show())
    assert "in attempt 2" in result.stdout
    assert "E       RuntimeError: CUDA error: out of memory in attempt 1" not in result.stdout
    assert result.stdout.count("Out of device memory in an earlier attempt") == 2  # oom_oom, oom_assertion
    assert "out of device memory: 6 attempts" in result.stdout
    assert "deferred: 2 tests" in result.stdout
    assert all(len(kinds) == 1 for kinds in result.outcomes.values()), result.outcomes
    assert "warning" not in result.counts


@pytest.mark.parametrize(("retries", "attempts", "status"), [("0", 1, 1), ("2", 3, 0)])
def test_number_of_retries(inner: InnerProject, retries: str, attempts: int, status: int) -> None:
    write(
        inner,
        """
        def test_it():
            if attempts("it") < 3:
                run_out()
        """,
    )
    result = inner.run(f"--oom-retries={retries}")
    assert result.events["attempt it"] == attempts
    assert result.status == status, result.show()


def test_stop_at_the_first_failure_counts_only_the_last_attempt(inner: InnerProject) -> None:
    write(
        inner,
        """
        @pytest.fixture(scope="module", autouse=True)
        def wide():
            light.log("wide up")
            yield
            light.log("wide down")
            raise ValueError("wide")

        def test_passes_at_last():
            if attempts("a") == 1:
                run_out()

        def test_fails():
            attempts("b")
            assert 0

        def test_never_run():
            attempts("c")
        """,
    )
    result = inner.run("-x")
    assert result.events == {
        "wide up": 1,
        "wide down": 1,
        "attempt a": 2,
        "attempt b": 1,
    }, result.show()
    assert result.counts == {"failed": 1, "passed": 1, "error": 1}  # as without the plugin
    assert "ERROR test_it.py::test_fails - ValueError: wide" in result.stdout


def test_the_next_test_runs_after_a_tear_down_that_ran_out(inner: InnerProject) -> None:
    """It was chosen when the tear-down began; fixtures are set up and torn down in pairs all the same."""
    for name in ("a", "b"):
        write(
            inner,
            f"""
            @pytest.fixture(scope="module")
            def wide():
                light.log("up {name}")
                yield
                light.log("down {name}")

            class TestIt:
                @pytest.fixture
                def short(self):
                    yield
                    if attempts("{name}") in (1, 2):
                        run_out()

                def test_one(self, wide, short):
                    light.build("k{name}", seconds=0.2)()

                def test_two(self, wide):
                    light.build("k{name}2", seconds=0.2)()

                def test_three(self):
                    light.log("three {name}")
            """,
            f"test_{name}.py",
        )
    result = inner.run("--oom-retries=2")
    assert result.counts == {"passed": 6}, result.show()
    for name in ("a", "b"):
        assert result.events[f"up {name}"] == result.events[f"down {name}"], result.show()
        assert result.events[f"attempt {name}"] >= 3
        assert result.events[f"three {name}"] == 1
    assert all(len(kinds) == 1 for kinds in result.outcomes.values()), result.outcomes


def test_random_numbers_environment_and_parameters_start_as_in_the_first_attempt(inner: InnerProject) -> None:
    write(
        inner,
        """
        import os, random
        seen = []

        @pytest.mark.parametrize("values", [[1]])
        def test_it(values, monkeypatch, tmp_path):
            seen.append((random.random(), list(values), os.environ.get("SET_BY_IT"), tmp_path.name, os.getcwd()))
            values.append(2)
            os.environ["SET_BY_IT"] = "1"
            if attempts("it") == 1:
                os.chdir(tmp_path)
                run_out()
            assert seen[0] == seen[1], seen
        """,
    )
    result = inner.run()
    assert result.counts == {"passed": 1}, result.show()


def test_out_of_memory_in_the_compile_function(inner: InnerProject) -> None:
    """In a compile process it is an error of the compile function; the test's own compile then decides."""
    inner.write(
        "kernels.py",
        """
        import os
        from pytest_quack import jit_cache
        from support import light

        @jit_cache(backend=light.NAME)
        def build(number):
            light.log("compile")
            raise RuntimeError("CUDA error: out of memory")
        """,
    )
    inner.write("test_it.py", "import kernels\ndef test_it():\n    kernels.build(1)\n")
    result = inner.run()
    assert result.counts == {"failed": 1}, result.show()
    assert "out of device memory: 1 attempt" in result.stdout


def test_options_that_would_do_nothing_are_refused(inner: InnerProject) -> None:
    write(inner, "def test_it(): pass\n")
    result = inner.run("--oom-retries=2", jobs=None)
    assert result.status == 4
    assert "--oom-retries needs --async-compile" in result.stderr
    for option in ("--gpu-min-free=1GB", "--gpu-wait=5", "--workers-per-gpu=2"):
        result = inner.run(option, jobs=None)
        assert result.status == 4, result.show()
        assert f"{option.partition('=')[0]} needs workers that get GPUs" in result.stderr
        assert inner.run(option, "--gpus-per-worker=1", jobs=None).status == 0
