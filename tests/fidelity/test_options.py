"""pytest's own options, each with tests that are put off: what it does is what it does without us."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fidelity.observation import Observation, differences, neutral, show
from fidelity.runs import PLAIN, Project, Way, allowance, compare

pytestmark = [pytest.mark.light, pytest.mark.slow]

COLD, AGAIN = Way("cold"), Way("put off again and again", depth=2)
COLD_ON_TWO = Way("cold, two workers", workers=2)
SUITE = """
import logging
import unittest
import warnings

import pytest
from fidelity.kernels import call, log

@pytest.fixture(scope="session", autouse=True)
def all_tests():
    log("set up wide session")
    yield
    log("tear down wide session")

@pytest.fixture(scope="module")
def module_kernel():
    kernel = call("module")
    log("set up wide module")
    yield kernel
    log("tear down wide module")

@pytest.fixture
def kernel():
    kernel = call("fixture", 0.05)
    log("set up narrow kernel")
    yield kernel
    log("tear down narrow kernel")

@pytest.fixture
def broken():
    call("broken")
    raise LookupError("narrow set-up")

@pytest.mark.parametrize("number", range(4))
def test_passes(number, kernel):
    print("narrow", number)
    logging.getLogger().info("narrow %d", number)
    assert call(f"passes{number}", 0.1 - number / 50) == 1.0

def test_fails(module_kernel):
    values = [call("fails", 0.1), 3]
    warnings.warn("narrow warning")
    assert values == [1.0, 2]

def test_fails_too(kernel):
    print("narrow failure")
    raise ValueError(call("fails too"))

def test_error(broken):
    pass

def test_skips():
    call("skips")
    pytest.skip("narrow reason")

@pytest.mark.xfail(reason="narrow mark", strict=True)
def test_xfails():
    assert call("xfails", 0.05) == 2.0

class TestCase(unittest.TestCase):
    def setUp(self):
        self.value = call("case")

    def test_one(self):
        self.assertEqual(self.value, 1.0)

    def test_two(self):
        self.assertEqual(call("two"), 2.0)

def test_last(tmp_path, module_kernel):
    (tmp_path / "file").write_text("")
    assert call("last") == 1.0
"""


@pytest.fixture
def project(tmp_path: Path) -> Project:
    project = Project(tmp_path, ini="addopts = -rA\nmarkers = some: some tests")
    (project.root / "test_first.py").write_text(SUITE)
    (project.root / "test_second.py").write_text(
        "from fidelity.kernels import call\ndef test_second():\n    assert call('second', 0.2) == 1.0\n"
    )
    return project


def say(found: dict[str, str]) -> str:
    return "\n\n".join(f"{way}:\n{text}" for way, text in found.items())


@pytest.mark.parametrize(
    "options",
    [
        "--durations=0 --durations-min=0",
        "-W error -p no:logging",
        "-p no:warnings -p no:cacheprovider",
        "-p no:faulthandler -p no:unraisableexception -p no:threadexception",
        "--capture=sys --log-level=DEBUG",
        "-q --tb=short --color=yes",
        "--tb=long --show-capture=stderr --runxfail",
        "--disable-warnings --no-header -k fails",
        "-o faulthandler_timeout=1 -o junit_family=xunit2 --import-mode=importlib -l",
    ],
)
def test_option_works_as_without_us(project: Project, options: str) -> None:
    result = compare(project, (AGAIN,), *options.split())
    assert not result.found, say(result.found)
    assert result.deferrals > 0


@pytest.mark.parametrize("options", ["-s", "-p no:capture", "--capture=tee-sys"])
def test_without_capture_only_what_each_attempt_prints_at_once_differs(project: Project, options: str) -> None:
    plain = project.run(PLAIN, *options.split())
    seen = project.run(AGAIN, *options.split())
    assert not differences(plain, seen, replace(allowance(AGAIN, seen), has_terminal=False))
    assert plain.stdout.count("narrow 2") < seen.stdout.count("narrow 2")


def test_two_workers(project: Project) -> None:
    result = compare(project, (Way("again", depth=2, workers=2),), "--durations=0", "--durations-min=0")
    assert not result.found, say(result.found)
    assert result.deferrals > 0


@pytest.mark.parametrize("option", ["--lf", "--ff", "--nf", "--collect-only"])
@pytest.mark.parametrize("way", [COLD, COLD_ON_TWO], ids=lambda way: way.name)
def test_what_the_run_before_left_is_used(project: Project, option: str, way: Way) -> None:
    options = option.split()
    project.run(PLAIN)
    plain = project.run(PLAIN, *options, has_memory=True)
    project.run(way)
    seen = project.run(way, *options, has_memory=True)
    assert (plain.status, plain.last_failed) == (seen.status, seen.last_failed)
    assert plain.reports.keys() == seen.reports.keys()
    assert all(plain.reports[nodeid] == seen.reports[nodeid] for nodeid in plain.reports), seen.stdout


WAITING = ("--sw", "--setup-show", "--setup-only", "--setup-plan", "--pdb", "--trace", "-o log_cli=true")


@pytest.mark.parametrize("option", WAITING)
def test_option_that_shows_the_order_waits_and_keeps_it(project: Project, option: str) -> None:
    answers = "continue\n" * 60
    plain = project.run(PLAIN, *option.split(), stdin=answers)
    seen = project.run(COLD, *option.split(), stdin=answers)
    assert "deferred" not in seen.stdout
    assert seen.order == plain.order
    assert seen.status == plain.status
    assert ordered(seen) == ordered(plain), show([plain.stdout, seen.stdout])
    assert plain.events == seen.events


def ordered(seen: Observation) -> list[str]:
    """The terminal's lines in their order, without those that name us."""
    lines = neutral(seen.stdout).splitlines()
    if any("- async-compile -" in line for line in lines):
        at = next(i for i, line in enumerate(lines) if "- async-compile -" in line)
        end = next(i for i in range(at + 1, len(lines)) if lines[i].startswith(("=", "-", "!")))
        del lines[at:end]
    return [line for line in lines if line and not line.startswith(("async-compile:", "plugins:"))]


def test_debugger_opens_once_for_each_failure(project: Project) -> None:
    seen = project.run(AGAIN, "--pdb", stdin="continue\n" * 60)
    assert seen.stdout.count("entering PDB") == seen.stdout.count("PDB post_mortem") == 4, seen.stdout


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("option", "limit"), [("-x", 1), ("--maxfail=2", 2), ("--maxfail=3", 3)])
def test_limit_of_failures(project: Project, option: str, limit: int, workers: int) -> None:
    everything = project.run(PLAIN)
    stopped = project.run(PLAIN, option)
    seen = project.run(Way("again", depth=2, workers=workers), option)
    assert seen.status == ([2, 2] if workers else stopped.status), seen.stdout
    for nodeid, reports in seen.reports.items():
        assert not reports - everything.reports[nodeid], seen.stdout
    assert f"stopping after {limit} failures" in seen.stdout
    if not workers:  # else others report what they had begun
        failures = [i for i, line in enumerate(seen.order) if line.endswith(" failed")]
        assert len(failures) == limit, seen.stdout
        stopped_at = seen.order[failures[-1]].split()[0]
        assert all(line.startswith(stopped_at) for line in seen.order[failures[-1] :]), seen.stdout


def test_limit_that_is_not_reached(project: Project) -> None:
    result = compare(project, (COLD,), "--maxfail=20")
    assert not result.found, say(result.found)
