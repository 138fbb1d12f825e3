"""Other plugins beside ours: each of their features works as without us."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from fidelity.observation import Allowance, differences, show
from fidelity.runs import PLAIN, Project, Way, allowance

pytestmark = pytest.mark.slow

WAYS = (Way("cold"), Way("put off again and again", depth=2), Way("cold, two workers", workers=2))
HEAD = "import os, random, time\nimport pytest\nfrom fidelity.kernels import call, log\n"
PLAIN_SUITE = (
    HEAD
    + """
@pytest.fixture(scope="module")
def module_thing():
    log("set up wide module")
    yield call("module")
    log("tear down wide module")

@pytest.fixture
def kernel():
    yield call("fixture", 0.05)

@pytest.mark.parametrize("number", range(3))
def test_passes(number, kernel, module_thing):
    print("narrow", number)
    assert call(f"passes{number}", 0.1) == 1.0

def test_fails(record_property):
    record_property("narrow", "value")
    print("narrow failure")
    assert call("fails", 0.1) == 2.0

def test_skips():
    call("skips")
    pytest.skip("narrow reason")

@pytest.mark.xfail(reason="narrow mark", strict=True)
def test_xfails():
    assert call("xfails") == 2.0

class TestClass:
    def test_method(self):
        assert call("method", 0.05) == 1.0
"""
)
FLAKY = (
    HEAD
    + """
COUNTS = os.environ["SIDE_LOG"] + ".flaky"

def tries(name):
    with open(COUNTS, "a") as file:
        file.write(name + "\\n")
    with open(COUNTS) as file:
        return file.read().split().count(name)

def test_flaky():
    call("flaky", 0.1)
    assert tries("flaky") == 2

def test_flaky_in_a_kernel_that_is_late():
    call("first", 0.05)
    call("late", 0.1)
    assert tries("late") == 3

@pytest.mark.flaky(reruns=1)
def test_marked():
    call("marked")
    assert tries("marked") == 2

def test_never():
    call("never", 0.05)
    raise ValueError(tries("never"))

def test_stable():
    assert call("stable", 0.1) == 1.0
"""
)
RANDOM = (
    HEAD
    + """
@pytest.mark.parametrize("number", range(5))
def test_numbers(number):
    before = random.random()
    call(f"k{number}", 0.05)
    print("narrow", before, random.random())

def test_failing_number():
    call("failing", 0.05)
    assert random.random() == 2
"""
)
ASYNC = (
    HEAD
    + """
import asyncio

@pytest.fixture
async def resource():
    await asyncio.sleep(0)
    yield call("resource", 0.05)

async def test_with_a_kernel(resource):
    await asyncio.sleep(0)
    assert call("body", 0.1) == 1.0

async def test_tasks():
    values = await asyncio.gather(*(asyncio.to_thread(call, f"task{i}", 0.05) for i in range(3)))
    assert values == [1.0] * 3

async def test_fails(resource):
    async with asyncio.timeout(30):
        assert call("fails") == 2.0
"""
)
PROPERTIES = (
    HEAD
    + """
from hypothesis import given, settings, strategies as st

@settings(derandomize=True, database=None, deadline=None, max_examples=20)
@given(st.integers(0, 3))
def test_property(n):
    assert call(f"k{n}", 0.02) == 1.0

@settings(derandomize=True, database=None, deadline=None, max_examples=20)
@given(st.integers(0, 30))
def test_falsified(n):
    call("one", 0.05)
    assert n < 7
"""
)
BENCHMARKS = (
    HEAD
    + """
def test_speed(benchmark):
    call("before", 0.05)
    assert benchmark(call, "inside") == 1.0

def test_pedantic(benchmark):
    assert benchmark.pedantic(call, ("late", 0.05), rounds=3) == 1.0
"""
)
COVERED = HEAD + "from covered import function\ndef test_it():\n    assert function(call('k', 0.1)) == 2.0\n"
COVERED_MODULE = "def function(x):\n    if x > 5:\n        return 0\n    return x + 1\n"


def html_results(root: Path) -> Counter[str]:
    data = re.search(r'data-jsonblob="([^"]*)"', (root / "report.html").read_text())
    assert data is not None
    blob = json.loads(data.group(1).replace("&#34;", '"').replace("&#39;", "'").replace("&amp;", "&"))
    return Counter(f"{name} {row['result']}" for name, rows in blob["tests"].items() for row in rows)


def json_results(root: Path) -> Any:
    report = json.loads((root / ".report.json").read_text())
    tests = sorted((test["nodeid"], test["outcome"], *sorted(test.keys())) for test in report["tests"])
    return report["summary"], tests, report["exitcode"]


def covered_lines(root: Path) -> Any:
    return json.loads((root / "coverage.json").read_text())["files"]["covered.py"]["executed_lines"]


def benchmark_names(root: Path) -> Any:
    data = json.loads((root / "benchmark.json").read_text())
    return sorted(entry["fullname"] for entry in data["benchmarks"])


@dataclass(frozen=True)
class Neighbour:
    """A plugin and a suite that uses it.

    Attributes:
        made: what else it leaves, to be equal.
        has_terminal: whether what it prints is the same in each run.
        ways: the ways in which it works without us.
        is_put_off: whether tests of the suite are put off.
    """

    module: str
    options: str = ""
    suite: str = PLAIN_SUITE
    ini: str = ""
    files: dict[str, str] = field(default_factory=dict)
    made: Callable[[Path], Any] | None = None
    has_terminal: bool = True
    ways: tuple[Way, ...] = WAYS
    is_put_off: bool = True


NEIGHBOURS = {
    "timeout": Neighbour("pytest_timeout", "--timeout=20"),
    "timeout by thread": Neighbour("pytest_timeout", "--timeout=20 --timeout-method=thread"),
    "rerunfailures": Neighbour("pytest_rerunfailures", "--reruns=2 -rAR", FLAKY),
    "rerunfailures, some errors": Neighbour("pytest_rerunfailures", "--reruns=2 --only-rerun=AssertionError", FLAKY),
    "randomly": Neighbour("pytest_randomly", "-p no:cacheprovider -p pytest_randomly --randomly-seed=7", RANDOM),
    "cov": Neighbour(
        "pytest_cov.plugin",
        "--cov=covered --cov-report=json --cov-branch",
        COVERED,
        files={"covered.py": COVERED_MODULE},
        made=covered_lines,
    ),
    "repeat": Neighbour("pytest_repeat", "--count=3"),
    "benchmark": Neighbour(
        "pytest_benchmark.plugin",
        "--benchmark-json=benchmark.json --benchmark-max-time=0.05",
        BENCHMARKS,
        made=benchmark_names,
        has_terminal=False,
        ways=WAYS[:2],
        is_put_off=False,
    ),
    "html": Neighbour("pytest_html.plugin", "-p pytest_metadata.plugin --html=report.html", made=html_results),
    "json-report": Neighbour("pytest_jsonreport.plugin", "-p pytest_metadata.plugin --json-report", made=json_results),
    "asyncio": Neighbour("pytest_asyncio.plugin", "-o asyncio_mode=auto", ASYNC),
    "hypothesis": Neighbour("_hypothesis_pytestplugin", "", PROPERTIES, is_put_off=False),
}


@pytest.mark.parametrize("name", NEIGHBOURS)
def test_neighbour_works_as_without_us(tmp_path: Path, name: str) -> None:
    neighbour = NEIGHBOURS[name]
    pytest.importorskip(neighbour.module, reason=f"needs the plugin {neighbour.module}")
    project = Project(tmp_path, ini=neighbour.ini)
    for path, text in {"test_it.py": neighbour.suite, **neighbour.files}.items():
        (project.root / path).write_text(text)
    options = ["-p", neighbour.module, "-rA", *neighbour.options.split()]
    plain = project.run(PLAIN, *options)
    assert plain.status[0] < 2, plain.stdout + plain.stderr
    made = neighbour.made(project.root) if neighbour.made is not None else None
    for way in neighbour.ways:
        seen = project.run(way, *options)
        allowed = allowance(way, seen)
        found = differences(plain, seen, Allowance(allowed.workers, allowed.extra, neighbour.has_terminal))
        assert not found, f"{way.name}:\n{show(found)}\n{seen.stderr}"
        assert (seen.deferrals() > 0) == neighbour.is_put_off, seen.stdout
        if neighbour.made is not None:
            assert neighbour.made(project.root) == made, way.name


TIMED = (
    HEAD
    + """
def test_slow_compile():
    call("slow", 3.0)

def test_slow_itself():
    call("quick", 0.3)
    time.sleep(2.5)

@pytest.mark.timeout(20)
def test_with_more_time():
    call("more", 1.0)
    time.sleep(2.0)

def test_quick():
    assert call("quick", 0.3) == 1.0
"""
)


@pytest.mark.parametrize("workers", [0, 2])
def test_timer_is_whole_in_each_attempt_and_stands_still_between_them(tmp_path: Path, workers: int) -> None:
    """A compile may take longer than the test may; what the test itself does may not."""
    pytest.importorskip("pytest_timeout", reason="needs pytest-timeout")
    project = Project(tmp_path)
    (project.root / "test_it.py").write_text(TIMED)
    seen = project.run(Way("cold", workers=workers), "-p", "pytest_timeout", "--timeout=1.5")
    outcomes = {line.split()[0].partition("::")[2]: line.split()[2] for line in seen.order if " call " in line}
    assert outcomes == {
        "test_slow_compile": "passed",
        "test_slow_itself": "failed",
        "test_with_more_time": "passed",
        "test_quick": "passed",
    }, seen.stdout
    assert "Timeout" in seen.stdout


BROKEN = {
    "raises in a hook": """
def pytest_runtest_logreport(report):
    if report.when == "call":
        raise RuntimeError("the neighbour is broken")
""",
    "replaces the run loop": """
import pytest
@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session):
    for i, item in enumerate(session.items):
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
    return True
""",
    "runs the protocol itself": """
import pytest
from _pytest.runner import runtestprotocol
@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item, nextitem):
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    runtestprotocol(item, nextitem=nextitem)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True
""",
    "raises in a wrapper": """
import pytest
@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    yield
    raise RuntimeError("the neighbour is broken")
""",
}


@pytest.mark.light
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("name", BROKEN)
def test_bad_neighbour_gets_what_it_gets_without_us(tmp_path: Path, name: str, workers: int) -> None:
    project = Project(tmp_path)
    (project.root / "test_it.py").write_text(PLAIN_SUITE)
    (project.root / "conftest.py").write_text(BROKEN[name])
    plain = project.run(Way("plain", has_plugin=False, workers=workers), timeout_s=60)
    seen = project.run(Way("cold", workers=workers), timeout_s=60)
    assert plain.status == seen.status, plain.stdout + seen.stdout
    assert plain.reports.keys() == seen.reports.keys() or plain.status[0] == pytest.ExitCode.INTERNAL_ERROR
    assert ("INTERNALERROR" in plain.stdout) == ("INTERNALERROR" in seen.stdout)
