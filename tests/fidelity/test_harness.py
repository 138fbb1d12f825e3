"""The comparison itself: it notices whatever a run may show that a plain run does not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest

from fidelity.observation import Allowance, Observation, differences, unpaired
from fidelity.runs import PLAIN, Project

pytestmark = pytest.mark.light

SUITE = """
import pytest
from fidelity.kernels import log, noise

@pytest.fixture(scope="session")
def session_thing():
    log("begin wide session_thing")
    noise("wide session_thing in set-up")
    log("set up wide session_thing")
    yield
    log("tear down wide session_thing")

@pytest.fixture(scope="module")
def module_thing():
    log("begin wide module_thing")
    log("set up wide module_thing")
    yield
    log("tear down wide module_thing")
    raise RuntimeError("wide module_thing cannot be torn down")

@pytest.fixture
def narrow_thing():
    log("set up narrow narrow_thing")
    yield
    log("tear down narrow narrow_thing")

def test_a(session_thing, module_thing, narrow_thing, record_property):
    noise("narrow test_a")
    record_property("name", "value")
    assert [1, 2] == [1, 3]

def test_b(module_thing):
    pass
"""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Observation:
    project = Project(tmp_path_factory.mktemp("harness"))
    (project.root / "test_it.py").write_text(SUITE)
    return project.run(PLAIN, "-rA")


@pytest.fixture
def seen(plain: Observation) -> Observation:
    return copy.deepcopy(plain)


A, B = "test_it.py::test_a", "test_it.py::test_b"


def _rewrite(seen: Observation, old: str, new: str) -> None:
    text = next(text for text in seen.reports[A] if old in text)
    seen.reports[A][text.replace(old, new)] = seen.reports[A].pop(text)


def _rewrite_junit(seen: Observation, old: str, new: str) -> None:
    text = next(text for text in seen.junit["test_it::test_a"] if old in text)
    seen.junit["test_it::test_a"][text.replace(old, new)] = seen.junit["test_it::test_a"].pop(text)


CHANGES: dict[str, Callable[[Observation], object]] = {
    "a test is missing": lambda seen: seen.reports.pop(B),
    "a report is missing": lambda seen: seen.reports[B].pop(
        next(text for text in seen.reports[B] if '"when": "call"' in text)
    ),
    "a report came twice": lambda seen: seen.reports[B].update(seen.reports[B]),
    "another outcome": lambda seen: _rewrite(seen, '"outcome": "failed"', '"outcome": "passed"'),
    "another message": lambda seen: _rewrite(seen, "assert [1, 2] == [1, 3]", "assert False"),
    "output is missing": lambda seen: _rewrite(seen, "Captured stdout call\\nnarrow test_a", ""),
    "a property is missing": lambda seen: _rewrite(seen, "\"'value'\"", ""),
    "no duration": lambda seen: _rewrite(seen, '"has_times": true', '"has_times": false'),
    "another record in the JUnit XML": lambda seen: _rewrite_junit(seen, "narrow test_a", ""),
    "no record in the JUnit XML": lambda seen: seen.junit.pop("test_it::test_a"),
    "a warning is missing": lambda seen: seen.warnings.popitem(),
    "a warning came twice": lambda seen: seen.warnings.update(seen.warnings),
    "a test was announced twice": lambda seen: seen.begun.update([f"start {A}"]),
    "a debugger would open twice": lambda seen: seen.interactions.update(seen.interactions),
    "another status": lambda seen: seen.status.append(0),
    "a session fixture was set up twice": lambda seen: seen.events.update(["set up wide session_thing"]),
    "a wider fixture was not torn down": lambda seen: seen.events.update({"tear down wide session_thing": -1}),
    "a wider fixture was never torn down": lambda seen: seen.events.pop("tear down wide module_thing"),
    "a wider fixture was not set up": lambda seen: seen.events.update({"set up wide module_thing": -1}),
    "a wider fixture was set up too often": lambda seen: seen.events.update({"set up wide module_thing": 2}),
    "a narrow fixture was not torn down": lambda seen: seen.events.update({"tear down narrow narrow_thing": -1}),
    "output of a wider fixture is missing": lambda seen: seen.wide.pop("stdout: wide session_thing in set-up"),
    "the warning of a wider fixture is missing": lambda seen: seen.wide.pop(
        next(line for line in seen.wide if line.startswith("UserWarning"))
    ),
    "output of a wider fixture came twice": lambda seen: seen.wide.update(["stderr: wide session_thing in set-up"]),
    "the error of a wider fixture is missing": lambda seen: seen.wide.update(
        {"wide module_thing cannot be torn down": -1}
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_difference_is_noticed(plain: Observation, seen: Observation, change: Callable[[Observation], object]) -> None:
    change(seen)
    assert differences(plain, seen, Allowance(extra=1))


def test_nothing_is_noticed_where_nothing_differs(plain: Observation, seen: Observation) -> None:
    assert differences(plain, seen, Allowance()) == []
    assert list(unpaired(plain)) == []
    assert plain.events["set up wide session_thing"] == 1
    assert plain.reports.keys() == {A, B}
    assert plain.junit.keys() == {"test_it::test_a", "test_it::test_b"}


def test_terminal_and_memory_of_failures_are_compared(tmp_path: Path) -> None:
    """Where no wider fixture fails, of which each further tear-down shows there too."""
    project = Project(tmp_path)
    (project.root / "test_it.py").write_text("def test_a():\n    assert 1 == 2\ndef test_b():\n    print('b')\n")
    plain = project.run(PLAIN, "-rA")
    assert plain.last_failed == {A}
    other = copy.deepcopy(plain)
    other.last_failed = set()
    assert any("remembered" in line for line in differences(plain, other, Allowance()))
    for line in ("PASSED test_it.py::test_b", "E       assert 1 == 2", "= 1 failed, 1 passed in #s", "b"):
        other = copy.deepcopy(plain)
        assert other.lines[line] == 1, sorted(plain.lines)
        del other.lines[line]
        assert any(line.startswith("terminal") for line in differences(plain, other, Allowance())), line


def test_two_plain_runs_do_not_differ(tmp_path: Path) -> None:
    project = Project(tmp_path)
    (project.root / "test_it.py").write_text(SUITE)
    first, second = project.run(PLAIN, "-rA"), project.run(PLAIN, "-rA")
    assert differences(first, second, Allowance()) == []
