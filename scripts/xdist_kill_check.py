"""Kill xdist workers and whole runs, many times, and print what was lost: nothing should be.

    python scripts/xdist_kill_check.py --runs 20 --json benchmarks/results/xdist_kills.json

Each run is a pytest run in processes of its own, with two workers and kernels that only wait: it needs no compiler. For
each scheduler a worker is killed (SIGKILL) while five or more tests are put off on it, in turn in the first attempt of
a test, in the last one and between two tests: each test must have its one outcome, and the exit status must be right.
For each way to end a run, nothing may be left of it 5 s later: no process, no lock, no directory.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT), str(ROOT / "tests")]

from environment import describe  # noqa: E402 - found through the path above

from support import crash, ended  # noqa: E402 - as above
from support.inner import InnerProject  # noqa: E402 - as above


def killed_worker(work: Path, scheduler: str, moment: str) -> list[str]:
    """What went wrong in one run."""
    inner = InnerProject(work)
    crash.write_suite(inner)
    try:
        result = crash.run(inner, scheduler, moment)
    except subprocess.TimeoutExpired as error:
        return [f"it hung: {error}"]
    faults = crash.faults(result, scheduler, moment)
    if faults:
        print(result.show())
    return faults


def check(runs: int, ends: int) -> dict[str, Any]:
    """Return how often each went wrong, and how."""
    rows: dict[str, Any] = {}
    for scheduler in crash.SCHEDULERS:
        faults = []
        for number, moment in zip(range(runs), itertools.cycle(crash.MOMENTS), strict=False):
            with tempfile.TemporaryDirectory(prefix="kill-check-") as folder:
                found = killed_worker(Path(folder), scheduler, moment)
            faults += [f"run {number}, {moment}: {text}" for text in found]
        rows[f"worker killed, {scheduler}"] = {"runs": runs, "faults": faults}
        print(f"{scheduler}: {runs} runs, {len(faults)} faults", flush=True)
    for way in ended.WAYS:
        faults = []
        for number in range(ends):
            with tempfile.TemporaryDirectory(prefix="kill-check-") as folder:
                left = ended.end(InnerProject(Path(folder)), way, "-n", "2")
            faults += [f"run {number}: {text}" for text in left]
        rows[f"run ended, {way}"] = {"runs": ends, "faults": faults}
        print(f"{way}: {ends} runs, {len(faults)} faults", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=20, help="for each scheduler")
    parser.add_argument("--ends", type=int, default=5, help="for each way to end a run")
    parser.add_argument("--json", type=Path, help="write the result here")
    args = parser.parse_args()
    rows = check(args.runs, args.ends)
    if args.json:
        args.json.write_text(json.dumps({**describe(), "checks": rows}, indent=1) + "\n")
    for name, row in rows.items():
        print(f"{name:36} {row['runs']:3d} runs  {len(row['faults'])} faults")
    if any(row["faults"] for row in rows.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
