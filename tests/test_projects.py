"""The sample projects, unmodified, under the plugin: each outcome as their README says, cold and warm."""

from __future__ import annotations

import dataclasses
import shutil
from collections import Counter
from pathlib import Path

import pytest

from support.bfloat16 import bfloat16_environ
from support.inner import TESTS, InnerProject, InnerResult

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
pytest.importorskip("torch", reason="needs torch")
pytestmark = pytest.mark.slow


@dataclasses.dataclass(frozen=True)
class Runs:
    """One project with an empty cache and with a filled one; and what the first run logged."""

    cold: InnerResult
    warm: InnerResult
    log: list[str]
    own: Path


def run_project(name: str, folder: Path) -> Runs:
    project = InnerProject(folder)
    (project.root / "pytest.ini").unlink()
    shutil.copytree(TESTS / "projects" / name, project.root, dirs_exist_ok=True)
    rounding = bfloat16_environ(folder)
    if rounding is None:
        pytest.skip(reason="the C runtime cannot round to bfloat16, and there is no C compiler to help it")
    results, logs = [], []
    for number in range(2):
        log = folder / f"case-{number}.log"
        own = folder / f"own-{number}"
        project.environ = {"CASE_LOG": str(log), "OWNCACHE_DIR": str(own), **rounding}
        results.append(project.run("-q", "-p", "no:cacheprovider", timeout_s=600))
        lines = log.read_text().splitlines() if log.exists() else []
        logs.append([line.partition(" ")[2] for line in lines])
    return Runs(*results, logs[0], folder / "own-0")


@pytest.fixture(scope="module")
def memo(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return run_project("memo_style", tmp_path_factory.mktemp("memo"))


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return run_project("own_cache_style", tmp_path_factory.mktemp("own"))


def assert_right(runs: Runs, counts: dict[str, int], keys: int) -> None:
    for result in (runs.cold, runs.warm):
        assert (result.counts, result.status) == (counts, 0), result.show()
        assert all(len(kinds) == 1 for kinds in result.outcomes.values()), result.show()
        assert "compiled in the test process" not in result.stdout, result.show()
        assert "intercepted" not in result.stdout, result.show()
    assert runs.cold.outcomes == runs.warm.outcomes
    assert (runs.cold.summary("submitted"), runs.cold.summary("done")) == (keys, keys), runs.cold.show()
    assert (runs.warm.summary("submitted"), runs.warm.summary("hit")) == (0, keys), runs.warm.show()
    assert "deferred: " in runs.cold.stdout


def test_memo_style(memo: Runs) -> None:
    counts = {"passed": 49, "skipped": 2, "xfailed": 1, "subtests passed": 5}
    assert_right(memo, counts, keys=46)
    assert len(memo.cold.outcomes) == 52
    expected = {
        "test_three_kernel_pipeline": "passed",
        "test_known_inexact": "skipped",  # JUnit's word for an expected failure
        "test_skip_after_compile": "skipped",
        "test_skipped_never_compiles": "skipped",
        "test_invalid_config": "passed",
    }
    for name, outcome in expected.items():
        assert [kinds for test, kinds in memo.cold.outcomes.items() if test.endswith(f"::{name}")] == [[outcome]]


def test_memo_style_sets_its_fixtures_up_once(memo: Runs) -> None:
    events = [f"{scope} {phase}" for scope in ("module grid", "class table") for phase in ("set-up", "tear-down")]
    assert Counter(memo.log) == Counter(events)


def test_own_cache_style(own: Runs) -> None:
    assert_right(own, {"passed": 37}, keys=30)
    assert len(own.cold.outcomes) == 37
    assert {path.suffix for path in own.own.iterdir()} == {".lock", ".o"}
