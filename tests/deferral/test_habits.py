"""What suites do besides: each outcome as in plain pytest (each of these once was not)."""

from __future__ import annotations

import pytest

from support.inner import InnerProject, InnerResult

pytestmark = [pytest.mark.light, pytest.mark.slow]

PREAMBLE = "import asyncio, os, random\nimport pytest\nfrom support.light import build, build_badly, log\n"


def cold_and_plain(inner: InnerProject, body: str, *args: str) -> tuple[InnerResult, InnerResult]:
    inner.write("test_it.py", PREAMBLE + body)
    cold, plain = inner.run(*args), inner.run(*args, jobs=None)
    assert (cold.counts, cold.status) == (plain.counts, plain.status), cold.show() + plain.show()
    assert "deferred: " in cold.stdout or "waited in place" in cold.stdout, cold.show()
    return cold, plain


def test_kernels_in_function_fixtures_and_setup_methods(inner: InnerProject) -> None:
    cold, _ = cold_and_plain(
        inner,
        """
class TestIt:
    def setup_method(self):
        build("setup", seconds=0.3)()
    def test_1(self):
        pass

@pytest.fixture
def one():
    pass

@pytest.fixture
def two(one, request):
    log("+two")
    request.addfinalizer(lambda: log("-two"))
    build("two", seconds=0.3)()

def test_2(two):
    pass
""",
    )
    assert cold.events["+two"] == cold.events["-two"] == 2


def test_environment_and_seed_of_wider_fixtures_stay(inner: InnerProject) -> None:
    cold, plain = cold_and_plain(
        inner,
        """
@pytest.fixture(scope="session", autouse=True)
def mode():
    os.environ["MY_MODE"] = "fast"
    random.seed(1234)
    yield
    del os.environ["MY_MODE"]

@pytest.fixture(scope="session")
def late():
    os.environ["LATE"] = "1"
    yield
    del os.environ["LATE"]

def test_a():
    log(f"drew {random.random()}")
    build("a", seconds=0.3)()

def test_b(late):
    assert os.environ["MY_MODE"] == "fast"

def test_c(late):
    assert os.environ["LATE"] == "1"
    build("c", seconds=0.3)()
""",
    )
    drawn = {event for event in cold.events if event.startswith("drew")}
    assert drawn == {event for event in plain.events if event.startswith("drew")}


def test_hooks_that_look_at_the_next_item(inner: InnerProject) -> None:
    inner.write(
        "conftest.py",
        """
def pytest_runtest_teardown(item, nextitem):
    assert nextitem is None or nextitem.module is item.module
    assert nextitem is None or nextitem.cls is None
""",
    )
    cold_and_plain(
        inner,
        "def test_a():\n    build('a', seconds=0.5)()\ndef test_b():\n    build('b')()\ndef test_c():\n    pass\n",
    )


def test_what_an_abandoned_attempt_leaves_open_is_not_blamed_on_the_next_test(inner: InnerProject) -> None:
    cold_and_plain(
        inner,
        """
def test_a(tmp_path):
    file = open(tmp_path / "x", "w")
    build("a", seconds=0.3)()
    file.close()

def test_b():
    pass

async def helper():
    pass

def test_c():
    coroutine = helper()
    build("c", seconds=0.3)()
    asyncio.run(coroutine)

def test_d():
    pass
""",
        "-W",
        "error",
    )


def test_properties_of_hypothesis(inner: InnerProject) -> None:
    pytest.importorskip("hypothesis", reason="needs hypothesis")
    cold_and_plain(
        inner,
        """
from hypothesis import given, settings, strategies as st

class TestIt:
    @given(n=st.integers(0, 3))
    @settings(deadline=None, max_examples=10)
    def test_method(self, n):
        assert build("m", value=float(n))() == n
""",
    )


def test_kernels_in_the_set_up_of_a_collector(inner: InnerProject) -> None:
    inner.write("cases.txt", "")
    inner.write(
        "conftest.py",
        """
import pytest
from support.light import build

class Case(pytest.Item):
    def runtest(self):
        assert self.parent.kernel() == 1.0

class Cases(pytest.File):
    def setup(self):
        self.kernel = build("file", seconds=0.3)
    def collect(self):
        return [Case.from_parent(self, name=name) for name in "ab"]

def pytest_collect_file(file_path, parent):
    if file_path.name == "cases.txt":
        return Cases.from_parent(parent, path=file_path)
""",
    )
    cold_and_plain(inner, "def test_it():\n    build('other')()\n")


def test_tmp_path_of_a_set_up_that_is_put_off(inner: InnerProject) -> None:
    cold, _ = cold_and_plain(
        inner,
        """
@pytest.fixture
def made(tmp_path):
    build("made", seconds=0.3)()

def test_it(made, tmp_path):
    pass
""",
    )
    assert "tearing down that attempt failed" not in cold.stdout, cold.show()


def test_a_compile_function_that_changes_the_environment_spoils_nothing(inner: InnerProject) -> None:
    inner.write(
        "kernels.py",
        """
import os
from pytest_quack import jit_cache
from support.light import LightKernel, NAME

@jit_cache(backend=NAME)
def compile_it(n):
    before = os.environ.get("MY_TILE")
    os.environ["MY_TILE"] = str(n)
    return LightKernel(f"tile {before}", 1.0)
""",
    )
    inner.write(
        "test_it.py",
        """
import pytest, kernels
@pytest.mark.parametrize("n", range(6))
def test_it(n):
    assert kernels.compile_it(n).name == "tile None"
""",
    )
    result = inner.run()
    assert result.counts == {"passed": 6}, result.show()
    assert "compiled in the test process" not in result.stdout, result.show()


def test_log_file_holds_each_record_once(inner: InnerProject) -> None:
    inner.write("test_it.py", PREAMBLE + LOGGING)
    lines = {}
    for jobs in ("2", None):
        path = inner.root / f"log-{jobs}.txt"
        options = (f"--log-file={path}", "--log-file-level=INFO", "--log-file-format=%(message)s")
        result = inner.run(*options, jobs=jobs)
        assert result.counts == {"passed": 3, "failed": 1}, result.show()
        assert ("deferred: 4 tests" in result.stdout) == (jobs is not None), result.show()
        lines[jobs] = sorted(path.read_text().splitlines())
    assert lines["2"] == lines[None]
    assert lines["2"].count("before ['a']") == lines["2"].count("the session begins") == 1


LOGGING = """
import logging
LOG = logging.getLogger("suite")

@pytest.fixture(scope="session", autouse=True)
def wide():
    LOG.info("the session begins")
    yield
    LOG.info("the session ends")

@pytest.fixture(scope="module")
def module():
    LOG.info("the module begins")
    yield
    LOG.info("the module ends")

@pytest.fixture
def narrow(module):
    LOG.info("set up %s", [1])
    yield
    LOG.info("tear down")

@pytest.mark.parametrize("name", ["a", "b", "c", "d"])
def test_it(narrow, name):
    state = [name]
    LOG.info("before %s", state)
    state.clear()
    build(name, seconds=0.3)()
    try:
        raise ValueError(name)
    except ValueError:
        LOG.exception("it raised")
    assert name != "d"
"""


@pytest.mark.parametrize("name", ["logging", "terminal", "subtests", "unittest", "tmpdir", "warnings", "faulthandler"])
def test_without_a_plugin_of_pytest(inner: InnerProject, name: str) -> None:
    inner.write(
        "test_it.py", PREAMBLE + "def test_it():\n    build('a', seconds=0.3)()\n\ndef test_no():\n    assert 0\n"
    )
    cold = inner.run("-p", f"no:{name}")
    assert cold.status == 1, cold.show()
    assert sorted(cold.outcomes.values()) == [["failure"], ["passed"]], cold.show()


def test_tracebacks_show_none_of_our_frames(inner: InnerProject) -> None:
    inner.write(
        "conftest.py",
        """
        import pytest

        @pytest.fixture
        def broken():
            raise ValueError("set-up")

        @pytest.fixture
        def leaving():
            yield
            raise ValueError("tear-down")
        """,
    )
    cold, plain = cold_and_plain(
        inner,
        """
def test_cold():
    build("a", seconds=0.3)()

def test_broken(broken):
    pass

def test_leaving(leaving):
    pass

def test_that_does_not_compile():
    build_badly("bad", "raise")
""",
    )
    assert "bad has a bad tile" in cold.stdout, cold.show()
    for result in (cold, plain):
        assert "pytest_quack/" not in result.stdout, result.show()
        assert "<jit_cache>" not in result.stdout, result.show()
        assert "During handling of" not in result.stdout, result.show()
    errors = [result.stdout.partition("= ERRORS =")[2] for result in (cold, plain)]
    assert errors[0].count("conftest.py:") == errors[1].count("conftest.py:") > 0


def test_record_that_cannot_be_formatted_fails_no_test(inner: InnerProject) -> None:
    path = inner.root / "log.txt"
    cold_and_plain(
        inner,
        """
import logging

def test_it():
    logging.debug("wrong %s %s", 1)
    build("a", seconds=0.3)()
""",
        f"--log-file={path}",
        "--log-level=WARNING",
        "--log-file-level=DEBUG",
    )


def test_wider_fixtures_are_set_up_once(inner: InnerProject) -> None:
    inner.write("test_later.py", PREAMBLE + "\ndef test_later():\n    build('later', seconds=0.1)()\n")
    cold, plain = cold_and_plain(
        inner,
        """
import unittest

@pytest.fixture(scope="module", params=[1, 2])
def wide(request):
    log(f"+module {request.param}")
    yield
    log(f"-module {request.param}")

@pytest.fixture(scope="class")
def filled():
    log("+class")
    yield {}
    log("-class")

class TestTable:
    @pytest.mark.parametrize("name", ["a", "b"])
    def test_fill(self, filled, name):
        build(name, seconds=0.3)()
        filled[name] = True

    def test_all(self, filled):
        assert set(filled) == {"a", "b"}

    class TestInner:
        def test_inner(self, filled):
            build("inner", seconds=0.3)()

class Case(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        log("+case")

    def test_it(self):
        build("case", seconds=0.3)()

def test_module(wide):
    build("module", seconds=0.3)()

def test_free():
    build("free", seconds=0.3)()
""",
        ".",
    )
    assert {e: n for e, n in cold.events.items() if e[0] in "+-"} == {
        e: n for e, n in plain.events.items() if e[0] in "+-"
    }
