"""Compare many generated suites with plain pytest, in every way of `tests/fidelity/runs.py`.

    python scripts/fidelity_check.py --suites 300 --seeds 1 2 3 --json benchmarks/results/fidelity.json
    python scripts/fidelity_check.py --suites 20 --kernels cute

Suites run in groups, side by side in one project. Of a group with a difference, each suite is run alone, and the files
of those that show it are kept. The exit status is 1 where anything differs.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benchmarks")]

from environment import report  # noqa: E402 - found through the path above

from fidelity.runs import WAYS, Comparison, compare_suites  # noqa: E402
from fidelity.suites import SuiteSpec, draw  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suites", type=int, default=300, help="how many for each seed")
    parser.add_argument("--group", type=int, default=10, help="how many in one process")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--kernels", choices=("light", "cute"), default="light")
    parser.add_argument("--keep", type=Path, default=Path("fidelity-failures"), help="where differing suites are kept")
    parser.add_argument("--json", type=Path, help="write the result here")
    args = parser.parse_args()
    rows = [check(args, seed) for seed in args.seeds]
    report({"kernels": args.kernels, "ways": [way.name for way in WAYS], "rows": rows}, args.json)
    sys.exit(any(row["suites_that_differ"] for row in rows))


def check(args: argparse.Namespace, seed: int) -> dict[str, Any]:
    specs = draw(args.suites, seed, has_torch=args.kernels == "cute")
    row: dict[str, Any] = {"seed": seed, "suites": len(specs), "reports": 0, "deferrals": 0, "extra_set_ups": 0}
    row["suites_that_differ"] = []
    began = time.perf_counter()
    for first in range(0, len(specs), args.group):
        group = specs[first : first + args.group]
        result = run(args, group, seed + first)
        row["reports"] += result.reports
        row["deferrals"] += result.deferrals
        row["extra_set_ups"] += sum(n for way, n in result.extra.items() if "workers" not in way)
        if result.found:
            row["suites_that_differ"] += find(args, group, seed, first, result)
        print(f"seed {seed}: {first + len(group)} suites, {len(row['suites_that_differ'])} differ", flush=True)
    row["seconds"] = round(time.perf_counter() - began, 1)
    return row


def run(args: argparse.Namespace, specs: list[SuiteSpec], seed: int, keep: Path | None = None) -> Comparison:
    with tempfile.TemporaryDirectory(prefix="fidelity-") as work:
        result = compare_suites(Path(work) / "run", specs, WAYS, kernels=args.kernels, seed=seed)
        if keep is not None and result.found:
            shutil.rmtree(keep, ignore_errors=True)
            shutil.copytree(Path(work) / "run" / "project", keep)
            (keep / "differences.json").write_text(json.dumps(result.found, indent=1))
        return result


def find(args: argparse.Namespace, group: list[SuiteSpec], seed: int, first: int, result: Comparison) -> list[str]:
    """The suites of a group that differ alone; the whole group where none does."""
    for way, text in result.found.items():
        print(f"{way}:\n{text}"[:4000], flush=True)
    names = []
    for number, spec in enumerate(group, first):
        name = f"seed{seed}_suite{number}"
        if run(args, [spec], seed + number, args.keep / name).found:
            names.append(name)
    return names or [f"seed{seed}_suites{first}to{first + len(group) - 1}"]


if __name__ == "__main__":
    main()
