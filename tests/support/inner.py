"""Whole pytest runs in a process of their own, over files that a test writes, with a private cache directory."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent.parent
ROOT = TESTS.parent
# What would tell an inner run something about the outer one, or about the developer's own settings.
# TOX_: pytest would keep its cache in tox's environment, which all runs would share.
_PRIVATE = ("QUACK_", "PYTEST_", "CUTE_DSL_", "LIGHT_", "COV_", "SIDE_LOG", "FIDELITY_", "TOX_")


# Arguments of a run without xdist, and of one with as many workers as a test needs to show something.
ALONE_AND_ONE_WORKER = pytest.mark.parametrize(
    "workers", [(), pytest.param(("-n", "1"), marks=pytest.mark.slow)], ids=["alone", "one worker"]
)
ALONE_AND_TWO_WORKERS = pytest.mark.parametrize(
    "workers", [(), pytest.param(("-n", "2"), marks=pytest.mark.slow)], ids=["alone", "two workers"]
)


def inner_environ(cache: Path, side_log: Path) -> dict[str, str]:
    """The environment of an inner run that keeps its kernels in `cache`: nothing in it is of the outer run's."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(_PRIVATE)}
    paths = [str(TESTS), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH", "")])]
    environ.update(
        PYTHONPATH=os.pathsep.join(paths),
        QUACK_CACHE_DIR=str(cache),
        SIDE_LOG=str(side_log),
        PYTHONDONTWRITEBYTECODE="1",  # an edit within the same second must be seen
        # Only what a test asks for. That of hypothesis, for one, costs seconds where no bytecode is written.
        PYTEST_DISABLE_PLUGIN_AUTOLOAD="1",
    )
    return environ


@dataclass(frozen=True)
class InnerResult:
    """What an inner run showed."""

    status: int
    stdout: str
    stderr: str
    log: list[str] = field(repr=False)
    outcomes: dict[str, list[str]] = field(repr=False)

    @property
    def counts(self) -> dict[str, int]:
        """pytest's own count of outcomes, from its last line."""
        found = re.findall(
            r"(\d+) (passed|failed|skipped|xfailed|xpassed|errors?|warnings?|subtests passed)", self.last
        )
        return {name.rstrip("s") if name.startswith(("error", "warning")) else name: int(n) for n, name in found}

    @property
    def last(self) -> str:
        lines = [line for line in self.stdout.splitlines() if re.search(r" in [\d.]+s", line)]
        return lines[-1] if lines else ""

    @property
    def events(self) -> Counter[str]:
        """The side log without process ids: how often each event happened."""
        return Counter(line.partition(" ")[2] for line in self.log)

    def summary(self, name: str) -> int:
        """A number from our own summary, such as `summary("submitted")`."""
        match = re.search(rf"(\d+) {name}", self.stdout)
        assert match, f"no {name!r} in:\n{self.stdout}"
        return int(match.group(1))

    def show(self) -> str:
        return f"status {self.status}\n{self.stdout}\n{self.stderr}\n" + "\n".join(self.log)


class InnerProject:
    """A folder of test files and how to run pytest in it."""

    def __init__(self, root: Path) -> None:
        self.root = root / "project"
        self.root.mkdir()
        self.cache = root / "cache"
        self.log_path = root / "side.log"
        self.environ: dict[str, str] = {}
        self.write("pytest.ini", "[pytest]\naddopts = -p no:cacheprovider\n")

    def write(self, name: str, text: str) -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return path

    def clear_log(self) -> None:
        self.log_path.write_text("")

    def run_environ(self) -> dict[str, str]:
        return {**inner_environ(self.cache, self.log_path), **self.environ}

    def run(self, *args: str, jobs: str | None = "2", has_plugin: bool = True, timeout_s: float = 120) -> InnerResult:
        """Run pytest; `jobs` None leaves `--async-compile` away, `has_plugin` False `-p pytest_quack`."""
        self.clear_log()
        junit = self.root.parent / "junit.xml"
        command = [
            sys.executable,
            "-m",
            "pytest",
            *(["-p", "pytest_quack"] if has_plugin else []),
            *(["-p", "xdist.plugin"] if "-n" in args else []),
            f"--junitxml={junit}",
            "-o",
            "junit_family=xunit1",
        ]
        command += [f"--async-compile={jobs}"] if jobs is not None else []
        done = subprocess.run(
            [*command, *args],
            cwd=self.root,
            env=self.run_environ(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        return InnerResult(
            done.returncode, done.stdout, done.stderr, self.log_path.read_text().splitlines(), _read_junit(junit)
        )


def _read_junit(path: Path) -> dict[str, list[str]]:
    """Outcomes by test, as JUnit XML has them: a list, since a test that is reported twice would show here."""
    found: dict[str, list[str]] = {}
    if path.exists():
        for case in ElementTree.parse(path).getroot().iter("testcase"):
            kinds = [child.tag for child in case if child.tag in {"failure", "error", "skipped"}]
            found.setdefault(f"{case.get('classname')}::{case.get('name')}", []).append("+".join(kinds) or "passed")
        path.unlink()
    return found
