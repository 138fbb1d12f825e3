"""Measure the row-wise ops against the device's copy bandwidth, torch, torch.compile and the public peer.

    python benchmarks/bench_rows.py --json benchmarks/results/rows.json                  # needs a GPU
    python benchmarks/bench_rows.py --from benchmarks/results/rows.json --plot rows.svg  # needs none

Every side computes the same thing on the same tensors in one process, in turn, ROUNDS times; a figure is the median of
all its runs. Bytes are those that must move, one read and one write of the rows, and so is the copy that all are
compared with, `y.copy_(x)` of the same shape in the same run. Rows of one shape have at least 2 ** 28 elements, far
more than the L2 cache holds. Needs torch and triton; the peer is `quack-kernels`, where it is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from environment import report

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

OPS = ("softmax", "rmsnorm")
LONGEST = 2**18  # the longest row that a GPU kernel of ours takes
COLUMNS = tuple(2**power for power in range(8, 19))
OURS = "quack_kernels"
COPY = "copy"
EPS = 1e-6


def main() -> None:
    """Measure or read a result, then print it as a table, and write what else is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ops", nargs="+", choices=OPS, default=list(OPS))
    parser.add_argument("--n", nargs="+", type=int, default=list(COLUMNS), help="columns of a row")
    parser.add_argument("--elements", type=int, default=2**28, help="the fewest elements of a tensor")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--from", dest="source", type=Path, help="read this result instead of measuring")
    parser.add_argument("--table", type=Path, help="write the Markdown table here")
    parser.add_argument("--plot", type=Path, help="draw the result here; needs matplotlib")
    args = parser.parse_args()
    if not all(1 <= n <= LONGEST for n in args.n):
        parser.error(f"--n takes numbers from 1 to {LONGEST}, not {args.n}")
    if args.source is not None:
        try:
            result = json.loads(args.source.read_text())
        except (OSError, ValueError) as error:
            parser.error(f"--from {args.source} is no result of an earlier run: {error}")
    else:
        result = report(measure(args), args.json, is_shown=False)
    text = table(result)
    print(text)
    if args.table is not None:
        args.table.write_text(text)
    if args.plot is not None:
        plot(result, args.plot)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Time every side of every op for every number of columns."""
    import torch

    if not torch.cuda.is_available():
        sys.exit("bench_rows.py: there is no GPU to measure. --from FILE shows an earlier result.")
    dtype = getattr(torch, args.dtype)
    rows = []
    for n in args.n:
        m = math.ceil(args.elements / n)
        torch.manual_seed(0)
        x = torch.randn(m, n, device="cuda", dtype=dtype)
        weight = torch.randn(n, device="cuda", dtype=dtype)
        y = torch.empty_like(x)
        moved = 2 * x.numel() * x.element_size()
        for op in args.ops:
            torch._dynamo.reset()
            sides = {COPY: lambda y=y, x=x: y.copy_(x), **sides_of(op, x, weight)}
            milliseconds = in_turn(sides, args.rounds)
            gbps = {name: moved / median / 1e6 for name, median in milliseconds.items()}
            rows.append({"op": op, "m": m, "n": n, "ms": milliseconds, "gbps": gbps})
            print(f"{op} {m} x {n}:", ", ".join(f"{name} {value:.0f} GB/s" for name, value in gbps.items()), flush=True)
        del x, y
    return {"dtype": args.dtype, "rounds": args.rounds, "rows": rows}


def sides_of(op: str, x: Any, weight: Any) -> dict[str, Callable[[], Any]]:
    """Return who is measured on one op, each as a call without arguments."""
    import torch

    import quack_kernels

    functional = torch.nn.functional
    if op == "softmax":
        ours, eager = quack_kernels.softmax, lambda x: torch.softmax(x, -1)
        arguments: tuple[Any, ...] = (x,)
    else:
        ours = lambda x, weight: quack_kernels.rmsnorm(x, weight, eps=EPS)  # noqa: E731 - the same shape as its peers
        eager = lambda x, weight: functional.rms_norm(x, (x.shape[-1],), weight, EPS)  # noqa: E731
        arguments = (x, weight)
    functions = {OURS: ours, "torch": eager, "torch.compile": torch.compile(eager, dynamic=False)}
    if importlib.util.find_spec("quack") is not None:
        import quack

        functions["quack-kernels"] = (
            quack.softmax if op == "softmax" else lambda x, weight: quack.rmsnorm(x, weight, eps=EPS)
        )
    return {name: lambda function=function: function(*arguments) for name, function in functions.items()}


def in_turn(sides: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Return the median time of each side in milliseconds; a side that cannot do it is left out, with a line."""
    from triton.testing import do_bench

    times: dict[str, list[float]] = {}
    for name, call in sides.items():
        try:
            call()
        except Exception as error:  # noqa: BLE001 - a side of somebody else may refuse a shape in any way
            print(f"{name} cannot do it: {type(error).__name__}: {error}")
        else:
            times[name] = []
    for _ in range(rounds):
        for name in times:
            times[name] += do_bench(sides[name], warmup=2, rep=6, return_mode="all")
    return {name: statistics.median(values) for name, values in times.items()}


def table(result: dict[str, Any]) -> str:
    """Return a Markdown table for each op: GB/s, and in brackets the fraction of the copy's."""
    parts = []
    for op in dict.fromkeys(row["op"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["op"] == op]
        names = list(dict.fromkeys(name for row in rows for name in row["gbps"]))
        lines = [
            f"{op}, {result['dtype']}, {result.get('gpu')}, GB/s (fraction of copy)\n",
            "| N | " + " | ".join(names) + " |",
            "|---" * (len(names) + 1) + "|",
        ]
        for row in rows:
            gbps = row["gbps"]
            cells = [f"{gbps[n]:,.0f} ({gbps[n] / gbps[COPY]:.2f})" if n in gbps else "-" for n in names[1:]]
            lines.append(f"| {row['n']:,} | {gbps[COPY]:,.0f} | " + " | ".join(cells) + " |")
        ratios = {
            name: statistics.geometric_mean([r["gbps"][OURS] / r["gbps"][name] for r in rows if name in r["gbps"]])
            for name in names[2:]
        }
        lines.append("\nGeometric mean of our speed over theirs: ")
        lines[-1] += ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items()) + ".\n"
        parts.append("\n".join(lines))
    return "\n".join(parts)


def plot(result: dict[str, Any], path: Path) -> None:
    """Draw the fraction of the copy bandwidth over the number of columns, one panel for each op."""
    from matplotlib.figure import Figure

    ops = list(dict.fromkeys(row["op"] for row in result["rows"]))
    figure = Figure(figsize=(6 * len(ops), 4), layout="constrained")
    for axes, op in zip(figure.subplots(1, len(ops), squeeze=False)[0], ops, strict=True):
        rows = [row for row in result["rows"] if row["op"] == op]
        for name in dict.fromkeys(name for row in rows for name in row["gbps"] if name != COPY):
            able = [row for row in rows if name in row["gbps"]]
            fractions = [row["gbps"][name] / row["gbps"][COPY] for row in able]
            axes.plot([row["n"] for row in able], fractions, marker="o", label=name)
        axes.set_xscale("log", base=2)
        axes.set_ylim(0, 1.1)
        axes.axhline(1.0, color="gray", linewidth=0.8)
        axes.set(title=f"{op}, {result['dtype']}", xlabel="columns", ylabel="fraction of copy bandwidth")
        axes.legend()
    figure.savefig(path)


if __name__ == "__main__":
    main()
