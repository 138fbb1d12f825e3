"""No test can turn "its kernel is still being compiled" into a result of its own."""

from __future__ import annotations

import pytest

from support.inner import ALONE_AND_ONE_WORKER, InnerProject

pytestmark = pytest.mark.light

PREAMBLE = """
import threading, unittest, asyncio, warnings, logging, os, random
import pytest
from support.light import build, log
"""


def run_cold(inner: InnerProject, body: str, *args: str):
    inner.write("test_it.py", PREAMBLE + body)
    result = inner.run(*args)
    assert "CompilePending" not in result.stdout, result.show()
    return result


def test_absorbed_signal_is_no_result(inner: InnerProject) -> None:
    result = run_cold(
        inner,
        """
def test_raises_base_exception():
    with pytest.raises(BaseException):
        build("a")()
        raise ValueError("after the kernel")

def test_bare_except():
    try:
        y = build("b")()
    except:
        y = None
    assert y == 1.0

def test_return_in_finally():
    try:
        build("c")()
        log("end c")
    finally:
        return

@pytest.mark.xfail(strict=True, reason="fails once its kernel ran")
def test_strict_xfail():
    build("d")()
    assert False

@pytest.mark.xfail(strict=True, reason="passes once its kernel ran")
def test_strict_xfail_that_passes():
    build("e")()

class Holder:
    def __del__(self):
        build("f")()
        log("end f")

def test_in_del():
    holder = Holder()
    del holder

def test_exception_group():
    with pytest.raises(BaseException):
        try:
            build("g")()
        except BaseException as error:
            raise RuntimeError("wrapped") from error
        raise ValueError
""",
        "-W",
        "ignore::SyntaxWarning",
    )
    assert result.counts == {"passed": 5, "xfailed": 1, "failed": 1}, result.show()
    assert result.outcomes["test_it::test_strict_xfail_that_passes"] == ["failure"]
    for name in "abcdefg":
        assert result.events[f"ran {name}"] == 1, result.show()
    assert result.events["end c"] == result.events["end f"] == 1
    assert all(len(outcomes) == 1 for outcomes in result.outcomes.values())


def test_testcase_methods_are_put_off_like_functions(inner: InnerProject) -> None:
    result = run_cold(
        inner,
        """
class Body(unittest.TestCase):
    def test_body(self):
        self.assertEqual(build("body")(), 1.0)

    @unittest.expectedFailure
    def test_expected_failure(self):
        self.assertEqual(build("expected")(), 2.0)

    @unittest.expectedFailure
    def test_unexpected_success(self):
        self.assertEqual(build("unexpected")(), 1.0)

class SetUp(unittest.TestCase):
    def setUp(self):
        log("setUp")
        self.kernel = build("setup")
    def tearDown(self):
        log("tearDown")
    def test_it(self):
        self.assertEqual(self.kernel(), 1.0)

class SetUpClass(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        log("setUpClass")
        cls.kernel = staticmethod(build("class"))
    def test_one(self):
        self.assertEqual(self.kernel(), 1.0)
    def test_two(self):
        self.assertEqual(self.kernel(), 1.0)

class Async(unittest.IsolatedAsyncioTestCase):
    async def test_async(self):
        await asyncio.sleep(0)
        self.assertEqual(build("async")(), 1.0)
""",
    )
    assert result.counts == {"passed": 5, "xfailed": 1, "failed": 1}, result.show()
    assert result.outcomes["test_it.Body::test_unexpected_success"] == ["failure"]
    assert result.events["ran class"] == 2
    assert result.events["setUpClass"] == 1, "the set-up of a class is not run twice: its call waits"
    assert result.events["setUp"] == 2, "the attempt that was put off, and the one that counts"
    for name in ("body", "expected", "unexpected", "setup", "async"):
        assert result.events[f"ran {name}"] == 1


@ALONE_AND_ONE_WORKER
@pytest.mark.parametrize("kind", ["fixture", "unittest"])
def test_subtests_are_reported_once_from_the_attempt_that_counts(
    inner: InnerProject, kind: str, workers: tuple[str, ...]
) -> None:
    pytest.importorskip("_pytest.subtests", reason="sub-tests are part of pytest from version 9 on")
    body = {
        "fixture": """
def test_sub(subtests):
    with subtests.test("warm"):
        pass
    for name in ("a", "b"):
        with subtests.test(name):
            assert build(name)() == 1.0
    with subtests.test("fails"):
        assert build("c")() == 2.0
""",
        "unittest": """
class Sub(unittest.TestCase):
    def test_sub(self):
        with self.subTest("warm"):
            pass
        for name in ("a", "b"):
            with self.subTest(name):
                self.assertEqual(build(name)(), 1.0)
        with self.subTest("fails"):
            self.assertEqual(build("c")(), 2.0)
""",
    }[kind]
    cold = run_cold(inner, body, *workers)
    warm = inner.run(*workers)
    plain = inner.run(*workers, jobs=None)
    assert cold.counts == warm.counts == plain.counts, cold.show() + warm.show() + plain.show()
    assert cold.status == warm.status == plain.status == 1
    assert warm.summary("submitted") == 0
    assert {name: cold.events[f"ran {name}"] for name in "abc"} == {"a": 1, "b": 1, "c": 1}


def test_passing_subtests_do_not_fail_after_a_deferral(inner: InnerProject) -> None:
    pytest.importorskip("_pytest.subtests", reason="sub-tests are part of pytest from version 9 on")
    result = run_cold(
        inner,
        """
def test_sub(subtests):
    for name in ("a", "b", "c"):
        with subtests.test(name):
            assert build(name)() == 1.0
""",
        "--maxfail=1",
    )
    assert result.status == 0, result.show()
    assert result.counts["passed"] == 1
    assert result.summary("submitted") == 3, "one attempt meets all three"


def test_second_attempt_sees_nothing_of_the_first(inner: InnerProject) -> None:
    result = run_cold(
        inner,
        """
class TestInstance:
    def test_attribute(self):
        assert not hasattr(self, "seen")
        self.seen = True
        build("attribute")()

@pytest.mark.parametrize("values, table", [([], {"k": []}), ([1], {"k": [1]})])
def test_mutable_parameter(values, table):
    assert table == {"k": values}
    values.append(2)
    table["k"].append(1)
    table["new"] = 1
    build(f"parameter{len(values)}")()

def test_environment(monkeypatch):
    assert "QUACK_TEST_A" not in os.environ and "QUACK_TEST_B" not in os.environ
    monkeypatch.setenv("QUACK_TEST_A", "1")
    os.environ["QUACK_TEST_B"] = "1"
    build("environment")()

def test_directory(tmp_path, request):
    assert os.getcwd() == str(request.config.rootpath)
    os.chdir(tmp_path)
    build("directory")()
    os.chdir(request.config.rootpath)

def test_tmp_path(tmp_path):
    assert tmp_path.name == "test_tmp_path0"
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").write_text("x")
    build("tmp_path")()

def test_random_state():
    first = random.random()
    log(f"drew {first}")
    build("random")()

def test_markers_and_properties(request, record_property):
    assert not list(request.node.iter_markers("late"))
    request.node.add_marker(pytest.mark.late)
    assert "late" in request.node.keywords
    record_property("key", "value")
    build("markers")()

def test_fixture_of_the_function(request):
    assert not hasattr(request.node, "left_over")
    request.node.left_over = True
    build("stash")()
""",
        "-W",
        "ignore::pytest.PytestUnknownMarkWarning",
    )
    assert result.counts == {"passed": 9}, result.show()
    assert [n for event, n in result.events.items() if event.startswith("drew")] == [2], "both attempts draw the same"
    assert result.stdout.count("deferred: 9 tests") == 1, result.show()


@ALONE_AND_ONE_WORKER
def test_nothing_of_a_discarded_attempt_is_shown(inner: InnerProject, workers: tuple[str, ...]) -> None:
    body = """
def test_noisy(record_property, recwarn):
    print("printed once")
    logging.getLogger("kernel").warning("logged once")
    record_property("size", "1")
    build("noisy")()
    assert False, "the real failure"

def test_warns():
    warnings.warn("warned once")
    build("warns")()
"""
    cold = run_cold(inner, body, "-rA", "--durations=0", "-vv", *workers)
    assert cold.counts == {"passed": 1, "failed": 1, "warning": 1}, cold.show()
    assert cold.stdout.count("logged once") - cold.stdout.count('warning("logged once")') == 1, cold.show()
    assert cold.stdout.count("\nprinted once") == 1
    assert cold.stdout.count("UserWarning: warned once") == 1
    assert cold.stdout.count("call     test_it.py::test_noisy") == 1
    assert cold.stdout.count("PASSED test_it.py::test_warns" if workers else "test_it.py::test_warns PASSED") >= 1
    assert all(len(kinds) == 1 for kinds in cold.outcomes.values()), cold.show()
    assert cold.stdout.count("test_it.py::test_warns ") >= 1
    assert "put off" not in cold.stdout.replace("async-compile", "")


def test_calls_that_cannot_be_abandoned_wait(inner: InnerProject) -> None:
    result = run_cold(
        inner,
        """
def in_thread(name):
    values = []
    thread = threading.Thread(target=lambda: values.append(build(name)()))
    thread.start()
    thread.join()
    return values

def test_thread():
    log("attempt thread")
    assert in_thread("thread") == [1.0]

@pytest.fixture
def late():
    yield
    assert build("teardown")() == 1.0

def test_teardown(late):
    log("attempt teardown")

@pytest.fixture(scope="module")
def module_kernel():
    log("module set-up")
    yield build("module")
    assert build("module-teardown")() == 1.0

def test_module_fixture(module_kernel):
    log("attempt module")
    assert module_kernel() == 1.0

@pytest.mark.compile_in_place
def test_marked():
    log("attempt marked")
    assert build("marked")() == 1.0

@pytest.fixture
def finalized(request):
    request.addfinalizer(lambda: build("finalizer")())

def test_finalizer(finalized):
    log("attempt finalizer")
""",
    )
    assert result.counts == {"passed": 5}, result.show()
    for name in ("thread", "teardown", "module", "marked", "finalizer"):
        assert result.events[f"attempt {name}"] == 1, result.show()
    assert result.events["module set-up"] == 1
    assert "waited in place" in result.stdout


@pytest.mark.slow
def test_wait_mode_runs_each_test_once_in_order(inner: InnerProject) -> None:
    inner.write(
        "test_it.py", PREAMBLE + "".join(f"def test_{n}():\n    log('attempt {n}'); build('{n}')()\n" for n in "ab")
    )
    inner.write("pytest.ini", "[pytest]\n")
    for extra in (
        ["--async-compile-mode=wait"],
        ["--setup-show"],
        ["--sw"],
        ["-o", "log_cli=true"],
        ["--trace-config"],
    ):
        inner.cache = inner.cache.parent / f"cache{len(extra[-1])}"
        result = inner.run(*extra)
        assert result.status == 0, result.show()
        expected = 2 if extra == ["--trace-config"] else 1  # the last one does not wait: it shows that the check works
        assert result.events["attempt a"] == expected, (extra, result.show())


def test_async_code_is_put_off(inner: InnerProject) -> None:
    result = run_cold(
        inner,
        """
async def work(name):
    await asyncio.sleep(0)
    return build(name)()

def test_gather():
    async def main():
        return await asyncio.gather(work("a"), work("b"), return_exceptions=False)
    assert asyncio.run(main()) == [1.0, 1.0]

def test_gather_that_collects_exceptions():
    async def main():
        return await asyncio.gather(work("c"), work("d"), return_exceptions=True)
    assert asyncio.run(main()) == [1.0, 1.0]
""",
    )
    assert result.counts == {"passed": 2}, result.show()


def test_key_that_is_new_in_each_attempt_ends(inner: InnerProject) -> None:
    result = run_cold(
        inner,
        """
import time
def test_new_each_time():
    assert build(str(time.time_ns()))() == 1.0
""",
    )
    assert result.counts == {"passed": 1}, result.show()


def test_three_kernels_in_sequence(inner: InnerProject) -> None:
    result = run_cold(
        inner,
        """
def test_pipeline():
    x = 0.0
    for name in ("a", "b", "c"):
        x = build(name)(x)
    assert x == 3.0
""",
    )
    assert result.counts == {"passed": 1}, result.show()
    assert "deferred: 1 test, 3 times in all" in result.stdout
