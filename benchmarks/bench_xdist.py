"""What the plugin adds to each test of a warm run, under every way of pytest-xdist to distribute tests.

    python benchmarks/bench_xdist.py --json benchmarks/results/xdist_overhead.json

A suite of TESTS tests that do nothing but call one of KEYS kernels, which are all in the store, is run with
`--async-compile` and without the plugin, in turn, ROUNDS times for each scheduler, with two workers ("no": in one
process). Kernels need no compiler. Reported is, for each scheduler and number of tests, the median of the differences
of wall time and of CPU time of all processes of a run, in ms for each test that was run; and, from the smallest and the
largest number of tests, what each further test adds, apart from what a run costs once.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from environment import report

ROOT = Path(__file__).resolve().parent.parent
SCHEDULERS = ("no", "load", "worksteal", "loadscope", "loadfile", "loadgroup", "each")
FILES = 10
TESTS = """
import pytest
from support import light

@pytest.mark.parametrize("number", range({first}, {last}))
def test_kernel(number):
    assert light.build(f"k{{number % {keys}}}")() == 1.0
"""


def write_suite(folder: Path, tests: int, keys: int) -> None:
    folder.mkdir()
    (folder / "pytest.ini").write_text("[pytest]\n")
    each = tests // FILES
    for number in range(FILES):
        text = TESTS.format(first=number * each, last=(number + 1) * each, keys=keys)
        (folder / f"test_{number}.py").write_text(text)


def run(folder: Path, store: Path, scheduler: str, is_with: bool) -> tuple[float, float]:
    """Seconds of wall time and of CPU time."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("QUACK_", "SIDE_LOG"))}
    environ.update(
        PYTHONPATH=os.pathsep.join([str(ROOT / "tests"), str(ROOT)]),
        QUACK_CACHE_DIR=str(store),
        PYTEST_DISABLE_PLUGIN_AUTOLOAD="1",
        PYTHONPYCACHEPREFIX=str(folder.parent / "bytecode"),
    )
    environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else every run compiles what an installed plugin has in bytecode
    plugin = ["-p", "pytest_quack", "--async-compile=2"] if is_with else []
    workers = [] if scheduler == "no" else ["-p", "xdist.plugin", "-n", "2", "--dist", scheduler]
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *plugin, *workers],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    wall_s = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode or (is_with and not re.search(r" 0 submitted| hit", done.stdout)):
        sys.exit(f"a run failed with status {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-2000:]}")
    return wall_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(folder: Path, store: Path, scheduler: str, tests: int, rounds: int) -> dict[str, Any]:
    pairs = []
    for number in range(rounds):
        order = (True, False) if number % 2 else (False, True)
        seconds = {is_with: run(folder, store, scheduler, is_with) for is_with in order}
        pairs.append((seconds[True], seconds[False]))
    ran = tests * (2 if scheduler == "each" else 1)
    result: dict[str, Any] = {"scheduler": scheduler, "tests": ran}
    for part, name in enumerate(("wall", "cpu")):
        added = [(with_us[part] - without[part]) / ran * 1e3 for with_us, without in pairs]
        result[f"{name}_added_ms_per_test"] = round(statistics.median(added), 4)
        result[f"{name}_added_ms_each_round"] = [round(value, 4) for value in added]
        result[f"{name}_without_s"] = round(statistics.median(without[part] for _, without in pairs), 2)
    print(result, flush=True)
    return result


def slope(rows: list[dict[str, Any]], scheduler: str) -> dict[str, float]:
    """What each test adds beyond the smallest number of them, in ms."""
    mine = sorted((row for row in rows if row["scheduler"] == scheduler), key=lambda row: row["tests"])
    first, last = mine[0], mine[-1]
    added = {
        name: [row[f"{name}_added_ms_per_test"] * row["tests"] for row in (first, last)] for name in ("wall", "cpu")
    }
    return {name: round((b - a) / (last["tests"] - first["tests"]), 4) for name, (a, b) in added.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedulers", nargs="+", choices=SCHEDULERS, default=list(SCHEDULERS))
    parser.add_argument("--tests", nargs="+", type=int, default=[1000, 5000])
    parser.add_argument("--keys", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the result here")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="bench-xdist-") as work:
        for tests in args.tests:
            folder, store = Path(work) / f"suite_{tests}", Path(work) / f"store_{tests}"
            write_suite(folder, tests, args.keys)
            run(folder, store, "no", True)  # fills the store
            rows += [measure(folder, store, scheduler, tests, args.rounds) for scheduler in args.schedulers]
    slopes = {scheduler: slope(rows, scheduler) for scheduler in args.schedulers} if len(args.tests) > 1 else {}
    report({"keys": args.keys, "rounds": args.rounds, "rows": rows, "ms_per_further_test": slopes}, args.json)


if __name__ == "__main__":
    main()
