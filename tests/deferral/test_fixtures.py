"""Fixtures wider than the function stay up while tests move; every set-up has one tear-down, the inner ones first."""

from __future__ import annotations

import pytest

from support.inner import ALONE_AND_ONE_WORKER, ALONE_AND_TWO_WORKERS, InnerProject, InnerResult

pytestmark = [pytest.mark.light, pytest.mark.slow]


def check_nesting(result: InnerResult) -> None:
    """In each process, every "+scope name" is followed by its "-scope name", and they nest."""
    for process in {line.partition(" ")[0] for line in result.log}:
        _check_nesting([line.partition(" ")[2] for line in result.log if line.startswith(f"{process} ")], result)


def _check_nesting(events: list[str], result: InnerResult) -> None:
    stack: list[str] = []
    for event in events:
        if event.startswith("+"):
            stack.append(event[1:])
        elif event.startswith("-"):
            assert stack[-1:] == [event[1:]], f"{event} while {stack} is set up\n{result.show()}"
            stack.pop()
    assert not stack, f"{stack} is still set up\n{result.show()}"


MODULE = """
import pytest
from support.light import build, log

@pytest.fixture(scope="module", autouse=True)
def module_thing():
    log("+module {name}")
    yield
    log("-module {name}")

@pytest.fixture(scope="class")
def class_thing(request):
    log(f"+class {name} {{request.cls.__name__}}")
    yield
    log(f"-class {name} {{request.cls.__name__}}")

class TestA:
    @pytest.mark.parametrize("i", range(3))
    def test_a(self, class_thing, session_thing, i):
        build(f"{name}-a{{i}}", seconds=0.3 * (3 - i))()

class TestB:
    @pytest.mark.parametrize("i", range(3))
    def test_b(self, class_thing, i):
        build(f"{name}-b{{i}}", seconds=0.1 * i)()

def test_warm():
    pass
"""

CONFTEST = """
import pytest
from support.light import log

@pytest.fixture(scope="session", autouse=True)
def session_thing():
    log("+session")
    yield
    log("-session")

@pytest.fixture(scope="package")
def package_thing():
    log("+package")
    yield
    log("-package")
"""


@ALONE_AND_TWO_WORKERS
def test_retries_across_classes_modules_and_packages(inner: InnerProject, workers: tuple[str, ...]) -> None:
    inner.write("conftest.py", CONFTEST)
    for folder in ("p", "q"):
        inner.write(f"{folder}/__init__.py", "")
        for module in ("x", "y"):
            inner.write(f"{folder}/test_{module}.py", MODULE.format(name=f"{folder}{module}"))
    cold = inner.run(*workers)
    assert cold.counts == {"passed": 28}, cold.show()
    check_nesting(cold)
    assert cold.events["+session"] == (2 if workers else 1)
    warm = inner.run(*workers)
    assert warm.counts == {"passed": 28}
    check_nesting(warm)
    if workers:
        return  # which worker gets which test differs
    assert {event: n for event, n in warm.events.items() if event[0] == "+" and n != 1} == {}


@ALONE_AND_ONE_WORKER
def test_session_and_module_fixtures_are_set_up_once_for_rising_compile_times(
    inner: InnerProject, workers: tuple[str, ...]
) -> None:
    inner.write("conftest.py", CONFTEST)
    inner.write(
        "test_it.py",
        """
import pytest
from support.light import build, log

@pytest.fixture(scope="module")
def module_thing():
    log("+module")
    yield
    log("-module")

@pytest.mark.parametrize("i", range(3))
def test_cold(module_thing, i):
    build(f"k{i}", seconds=0.4 * (i + 1))()

def test_warm(module_thing):
    pass
""",
    )
    result = inner.run(*workers)
    assert result.counts == {"passed": 4}, result.show()
    check_nesting(result)
    assert result.events["+session"] == result.events["+module"] == 1, result.show()


def test_session_of_one_cold_test(inner: InnerProject) -> None:
    inner.write("conftest.py", CONFTEST)
    inner.write("test_it.py", "from support.light import build\ndef test_it(package_thing):\n    build('k')()\n")
    result = inner.run()
    assert result.counts == {"passed": 1}, result.show()
    check_nesting(result)
    assert result.events["+session"] == result.events["+package"] == 1


def test_parametrized_session_fixture(inner: InnerProject) -> None:
    inner.write(
        "conftest.py",
        """
import pytest
from support.light import log

@pytest.fixture(scope="session", params=[1, 2])
def device(request):
    log(f"+device {request.param}")
    yield request.param
    log(f"-device {request.param}")
""",
    )
    inner.write(
        "test_it.py",
        """
import pytest
from support.light import build

@pytest.mark.parametrize("i", range(3))
def test_it(device, i):
    assert build(f"{device}-{i}", seconds=0.1)() == 1.0
""",
    )
    result = inner.run()
    assert result.counts == {"passed": 6}, result.show()
    check_nesting(result)


def test_order_within_a_class_is_kept(inner: InnerProject) -> None:
    inner.write(
        "test_it.py",
        """
import pytest
from support.light import build, log

@pytest.fixture(scope="class")
def table():
    return {}

class TestTable:
    @pytest.mark.parametrize("i", range(3))
    def test_fill(self, table, i):
        build(f"k{i}", seconds=0.2 * (3 - i))()
        table[i] = True

    def test_all_filled(self, table):
        log("attempt filled")
        assert sorted(table) == [0, 1, 2]

def test_other():
    log("other")
""",
    )
    result = inner.run()
    assert result.counts == {"passed": 5}, result.show()
    assert result.events["attempt filled"] == 1


def test_failing_finalizers_are_reported_once_and_as_plain_pytest_does(inner: InnerProject) -> None:
    inner.write(
        "test_it.py",
        """
import pytest
from support.light import build

@pytest.fixture(scope="module")
def module_thing():
    yield
    raise RuntimeError("module finalizer")

def test_a(module_thing):
    build("a", seconds=0.3)()
""",
    )
    inner.write(
        "test_other.py",
        """
import pytest
from support.light import build

@pytest.fixture
def function_thing():
    yield
    raise RuntimeError("function finalizer")

def test_b(function_thing):
    build("b", seconds=0.1)()

def test_c():
    build("c", seconds=1.0)()
""",
    )
    cold, warm = inner.run(), inner.run()
    plain = inner.run(jobs=None)
    assert cold.counts == warm.counts == plain.counts == {"passed": 3, "error": 2}, cold.show()
    assert cold.status == plain.status == 1
    assert cold.stdout.count("RuntimeError: module finalizer") == plain.stdout.count("RuntimeError: module finalizer")
    assert all(len(outcomes) == 1 for outcomes in cold.outcomes.values()), cold.outcomes


def test_module_finalizer_that_fails_after_a_put_off_attempt_is_not_lost(inner: InnerProject) -> None:
    inner.write(
        "test_a.py",
        """
import pytest
from support.light import build, log

@pytest.fixture(scope="module")
def module_thing():
    yield
    raise RuntimeError("module finalizer")

def test_a(module_thing):
    build("a", seconds=1.0)()
""",
    )
    inner.write("test_b.py", "def test_b():\n    pass\n")
    cold, plain = inner.run(), inner.run(jobs=None)
    assert cold.counts == plain.counts == {"passed": 2, "error": 1}, cold.show()


def test_assertion_that_only_an_abandoned_attempt_breaks_is_not_a_failure(inner: InnerProject) -> None:
    inner.write(
        "test_a.py",
        """
import pytest
from support.light import build

@pytest.fixture
def used():
    seen = []
    yield seen
    assert seen, "the kernel never ran"

def test_a(used):
    used.append(build("a")())
""",
    )
    result = inner.run()
    assert result.counts == {"passed": 1}, result.show()
    assert "tearing down that attempt failed: " in result.stdout
    assert "the kernel never ran" in result.stdout


@pytest.mark.parametrize("option", ["-x", "--maxfail=1"])
def test_stopping_early_reports_nothing_of_what_is_put_off(inner: InnerProject, option: str) -> None:
    inner.write(
        "test_it.py",
        """
from support.light import build
def test_cold():
    build("slow", seconds=30.0)()
def test_fails():
    assert False
def test_never():
    pass
""",
    )
    result = inner.run(option, timeout_s=25)
    assert result.status == 1
    assert result.counts == {"failed": 1}, result.show()
    assert list(result.outcomes) == ["test_it::test_fails"]


@pytest.mark.parametrize("option", ["-x", "--maxfail=2"])
def test_errors_of_all_tear_downs_of_the_last_test_are_reported(inner: InnerProject, option: str) -> None:
    inner.write(
        "conftest.py", "from support.light import log\ndef pytest_runtest_logreport(report): log(report.outcome)\n"
    )
    inner.write(
        "test_it.py",
        """
import pytest
from support.light import build, log

@pytest.fixture(scope="module")
def wide():
    yield
    print("said while it is torn down")
    raise ValueError("wide")

@pytest.fixture
def narrow():
    yield
    log("torn down")
    raise KeyError("narrow")

def test_a(narrow, wide):
    assert 0

def test_b(wide):
    pass
""",
    )
    plain, ours = inner.run(option, jobs=None), inner.run(option)
    assert [line.partition(" ")[2] for line in ours.log] == [line.partition(" ")[2] for line in plain.log], ours.show()
    assert (ours.status, ours.counts, ours.outcomes) == (plain.status, plain.counts, plain.outcomes), ours.show()
    for text in ("KeyError: 'narrow'", "ValueError: wide", "said while it is torn down"):
        assert (text in ours.stdout) == (text in plain.stdout), ours.show()


def test_error_in_a_hook_that_is_told_of_a_failure_ends_the_run_as_without_the_plugin(inner: InnerProject) -> None:
    inner.write(
        "conftest.py",
        """
        def pytest_runtest_logreport(report):
            if report.when == "call" and report.failed:
                raise RuntimeError("a hook is broken")
        """,
    )
    inner.write("test_it.py", "def test_a():\n    assert 0\n\ndef test_b():\n    pass\n")
    plain, ours = inner.run(jobs=None), inner.run()
    assert plain.status == ours.status == 3, ours.show()
    assert "a hook is broken" in ours.stdout
    assert (ours.counts, ours.outcomes) == (plain.counts, plain.outcomes), ours.show()


@pytest.mark.parametrize("where", ["call", "teardown"])
def test_run_that_is_told_to_stop_in_a_test_ends_as_without_the_plugin(inner: InnerProject, where: str) -> None:
    inner.write(
        "test_it.py",
        f"""
import pytest
from support.light import build, log

@pytest.fixture(scope="module")
def wide():
    yield
    log("-wide")
    raise ValueError("wide")

@pytest.fixture
def stop(request):
    yield
    if {where == "teardown"}:
        request.session.shouldstop = "told"

def test_a(wide, stop, request):
    if {where == "call"}:
        request.session.shouldstop = "told"

def test_b(wide):
    pass
""",
    )
    plain, ours = inner.run(jobs=None), inner.run()
    assert plain.events["-wide"] == ours.events["-wide"] == 1
    assert (ours.status, ours.counts, ours.outcomes) == (plain.status, plain.counts, plain.outcomes), ours.show()


def test_x_does_not_stop_at_a_deferral(inner: InnerProject) -> None:
    inner.write(
        "test_it.py", "from support.light import build\ndef test_a():\n    build('a')()\ndef test_b():\n    pass\n"
    )
    result = inner.run("-x")
    assert (result.status, result.counts) == (0, {"passed": 2}), result.show()


def test_collect_only_starts_nothing(inner: InnerProject) -> None:
    inner.write("test_it.py", "from support.light import build\ndef test_a():\n    build('a')()\n")
    result = inner.run("--collect-only")
    assert (result.status, result.log) == (0, []), result.show()
