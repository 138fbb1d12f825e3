"""Running one project in several ways, each in a process of its own, and comparing what a user sees."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from fidelity.observation import Allowance, Observation, differences, extra_set_ups, observe, show, unpaired
from fidelity.suites import SuiteSpec, cool_down, write
from support.inner import inner_environ


@dataclass(frozen=True)
class Way:
    """How to run a project.

    Attributes:
        cache: what is in the store: "new" nothing, "kept" what the run before left, "half" about half of that.
        depth: how often each call of a kernel is put off beyond the first time.
        workers: xdist workers; 0 for none.
        has_plugin: False for plain pytest.
    """

    name: str
    cache: str = "new"
    depth: int = 0
    workers: int = 0
    has_plugin: bool = True


PLAIN = Way("plain", has_plugin=False)
WAYS = (
    Way("cold"),
    Way("warm", cache="kept"),
    Way("half cold", cache="half"),
    Way("put off again and again", depth=2),
    Way("plain, two workers", has_plugin=False, workers=2),
    Way("cold, two workers", workers=2),
    Way("warm, two workers", cache="kept", workers=2),
    Way("put off again and again, two workers", depth=2, workers=2),
)


class Project:
    """Files of a project, and what is kept between its runs."""

    def __init__(self, root: Path, *, kernels: str = "light", ini: str = "") -> None:
        self.root = root / "project"
        self.root.mkdir(parents=True)
        self.cache = root / "store"
        self.kernels = kernels
        (self.root / "pytest.ini").write_text(f"[pytest]\njunit_family = xunit1\njunit_logging = all\n{ini}\n")

    def run(
        self,
        way: Way,
        *arguments: str,
        seed: int = 0,
        has_memory: bool = False,
        stdin: str = "",
        timeout_s: float = 300,
    ) -> Observation:
        """Run pytest; `seed` chooses what is cold where half is, `has_memory` keeps what pytest itself remembers."""
        folder = self.root.parent / "seen"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        if way.cache == "new":
            shutil.rmtree(self.cache, ignore_errors=True)
        elif way.cache == "half":
            cool_down(self.cache / "pytest-quack" / "v1", seed)
        if not has_memory:
            shutil.rmtree(self.root / ".pytest_cache", ignore_errors=True)
        command = [sys.executable, "-m", "pytest", "-p", "fidelity.recorder", f"--junitxml={folder / 'junit.xml'}"]
        command += ["-p", "xdist", "-n", str(way.workers)] if way.workers else []
        command += ["-p", "pytest_quack", "--async-compile=2"] if way.has_plugin else []
        done = subprocess.run(
            [*command, *arguments],
            cwd=self.root,
            env=self._environ(folder, way),
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        return observe(folder, self.root, done.returncode, done.stdout, done.stderr)

    def _environ(self, folder: Path, way: Way) -> dict[str, str]:
        return {
            **inner_environ(self.cache, folder / "side.log"),
            "FIDELITY_LOG": str(folder / "reports.jsonl"),
            "FIDELITY_KERNELS": self.kernels,
            "FIDELITY_DEPTH": str(way.depth),
            "COLUMNS": "200",
            "PYTHONHASHSEED": "0",  # assertion messages list the items of a dictionary in the order of a set
        }


def allowance(way: Way, seen: Observation) -> Allowance:
    """Wider fixtures may be set up once more for each time that a test was put off; under xdist by each worker."""
    return Allowance(workers=max(way.workers, 1), extra=seen.deferrals())


@dataclass
class Comparison:
    """What came of running one project in several ways.

    Attributes:
        found: what differs, by name of the way; only those in which something does.
        reports: how many reports the plain run had.
        deferrals: how often tests were put off in all runs together.
        extra: how often wider fixtures were set up more than in the plain run, by name of the way.
    """

    found: dict[str, str] = field(default_factory=dict)
    reports: int = 0
    deferrals: int = 0
    extra: dict[str, int] = field(default_factory=dict)


def compare(project: Project, ways: tuple[Way, ...], *arguments: str, seed: int = 0) -> Comparison:
    """Run a project plainly and in each of these ways."""
    plain = project.run(PLAIN, *arguments)
    result = Comparison(reports=sum(counts.total() for counts in plain.reports.values()))
    if plain.status[0] > 1 or not plain.reports:
        result.found["plain"] = f"the plain run ended with {plain.status}:\n{plain.stdout}\n{plain.stderr}"
        return result
    _note(result, PLAIN, list(unpaired(plain)))
    for way in ways:
        seen = project.run(way, *arguments, seed=seed)
        _note(result, way, differences(plain, seen, allowance(way, seen)))
        result.deferrals += seen.deferrals()
        result.extra[way.name] = extra_set_ups(plain, seen).total()
    return result


def _note(result: Comparison, way: Way, found: list[str]) -> None:
    if found:
        result.found[way.name] = show(found)


def compare_suites(root: Path, specs: list[SuiteSpec], ways: tuple[Way, ...], *, kernels: str, seed: int) -> Comparison:
    """Write generated suites side by side into one project, and compare with every detail shown."""
    project = Project(root, kernels=kernels)
    for number, spec in enumerate(specs):
        write(spec, project.root / f"s{number}")
    return compare(project, ways, "-rA", "--durations=0", "--durations-min=0", seed=seed)
