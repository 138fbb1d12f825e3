"""Set up what a job of this checkout needs, then run it.

    python3 scripts/dev.py suite [pytest arguments]    the main job: the kernel suite, kernels compiled in the pool
    python3 scripts/dev.py test [tox arguments]        all tests and checks

Needs Python 3.10 or newer and its package index. All that is installed goes into .tox; deleting it
starts afresh. Python 3.11 is preferred (constraints.txt pins torch for it), and every other Python
from 3.10 to 3.13 that is found runs the light tests.
"""

from __future__ import annotations

import glob
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
TOOLS = ROOT / ".tox" / "tools"
TOOLS_PYTHON = TOOLS / "bin" / "python"
STAMP = TOOLS / "dev-stamp"
PREFERENCE = ("3.11", "3.12", "3.13", "3.10")
JOBS = ("suite", "test")


def main(argv: list[str]) -> int:
    """Run the job that the command line names and return its exit status."""
    if argv in (["-h"], ["--help"]):
        print(__doc__)
        return 0
    if not argv or argv[0] not in JOBS:
        given = f"unknown job {argv[0]!r}" if argv else "no job given"
        sys.exit(f"dev.py: {given}; the jobs are {' and '.join(JOBS)} (see python3 scripts/dev.py --help)")
    job, *extra = argv
    pythons = find_pythons()
    if not pythons:
        sys.exit(
            f"dev.py: no usable Python among {', '.join(PREFERENCE)} (found on PATH or under pyenv, with the venv and "
            "ensurepip modules). Install one: on Debian and Ubuntu 'apt-get install python3 python3-venv', "
            "with pyenv 'pyenv install 3.11'."
        )
    print("dev.py: Pythons:", ", ".join(f"{version} ({path})" for version, path in pythons.items()), flush=True)
    make_tools(next(iter(pythons.values())))
    tox = [str(TOOLS_PYTHON), "-m", "tox", "run", "--discover", *pythons.values()]
    if job == "test":
        return run([*tox, *extra])
    return run([*tox, "-e", "core", "--notest"]) or run([*tox, "-e", "suite", *(["--", *extra] if extra else [])])


def find_pythons() -> dict[str, str]:
    """Map each supported version that works here to its executable, in order of preference."""
    found = {
        version: next(filter(None, (probe(path, version) for path in candidates(version))), None)
        for version in PREFERENCE
    }
    return {version: path for version, path in found.items() if path}


def candidates(version: str) -> list[str]:
    """List where a Python may be: the running one, PATH, then pyenv, whose shims fail for an inactive version."""
    pyenv = glob.escape(os.environ.get("PYENV_ROOT") or os.path.expanduser("~/.pyenv"))
    on_path = [shutil.which(f"python{version}", path=entry) for entry in os.get_exec_path()]
    in_pyenv = glob.glob(os.path.join(pyenv, "versions", f"{version}.*", "bin", f"python{version}"))
    return [sys._base_executable, *filter(None, on_path), *sorted(in_pyenv, reverse=True)]  # type: ignore[attr-defined]


def probe(path: str, version: str) -> str | None:
    """Return the executable behind a path, if it is a Python of this version that can make virtual environments."""
    code = "import ensurepip, sys, venv; print('%d.%d' % sys.version_info[:2], sys.executable)"
    try:
        done = subprocess.run(
            [path, "-I", "-c", code], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    actual, _, executable = done.stdout.strip().partition(" ")
    return executable if done.returncode == 0 and actual == version else None


def make_tools(python: str) -> None:
    """Make .tox/tools hold the pinned tox, anew when Python or the pins have changed or an earlier try broke off."""
    stamp = f"{python} {hashlib.sha256(CONSTRAINTS.read_bytes()).hexdigest()}\n"
    if STAMP.exists() and STAMP.read_text() == stamp and run([str(TOOLS_PYTHON), "-c", "import tox"]) == 0:
        return
    steps = (
        [python, "-m", "venv", "--clear", str(TOOLS)],
        [str(TOOLS_PYTHON), "-m", "pip", "install", "-q", "--disable-pip-version-check", "-c", str(CONSTRAINTS), "tox"],
    )
    for step in steps:
        if status := run(step):
            sys.exit(f"dev.py: setting up {TOOLS} failed with status {status}: {' '.join(step)}")
    STAMP.write_text(stamp)


def run(command: list[str]) -> int:
    """Run a command in the checkout, with its output shown, and return its exit status."""
    try:
        return subprocess.run(command, cwd=ROOT).returncode
    except FileNotFoundError:
        return 127


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
