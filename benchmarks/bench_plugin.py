"""Time a suite of host-compiled CuTe DSL kernels with the plugin and without, side by side.

    python benchmarks/bench_plugin.py warm --tests-per-key 5 --test-ms 20 --pairs 7
    python benchmarks/bench_plugin.py cold --keys 200 --jobs 2 --pairs 3

A suite is generated: KEYS kernels that cost about COMPILE_S seconds each, TESTS_PER_KEY tests for each of them that
compute for TEST_MS milliseconds. The two sides run in turn, A B A B ..., each as a process of its own:

    warm    A: with --async-compile, B: plain pytest without the plugin; both on one store that holds every kernel
    cold    A: with --async-compile, B: plain pytest without the plugin; each on an empty store

Reported are the whole process's wall time and pytest's session time, medians, and the ratios A/B pair by pair.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from environment import report

ROOT = Path(__file__).resolve().parent.parent

KERNELS = """
import cutlass.cute as cute
from cutlass import AddressSpace, Constexpr, Float32, range_constexpr
from pytest_quack import jit_cache


def fake(n):
    return cute.runtime.make_fake_compact_tensor(Float32, (n,), stride_order=(0,), memspace=AddressSpace.generic)


@cute.jit
def _horner(x: cute.Tensor, y: cute.Tensor, degree: Constexpr, offset: Constexpr):
    for b in range(cute.size(x) // 8):
        for u in range_constexpr(8):
            v, acc = x[b * 8 + u], Float32(0.0)
            for k in range_constexpr(degree):
                acc = acc * v + Float32(1.0 / (k + 1))
            y[b * 8 + u] = acc + Float32(offset)


@jit_cache
def compile_horner(degree: int, offset: int):
    n = cute.sym_int()
    return cute.compile(_horner, fake(n), fake(n), degree, offset, options="--enable-tvm-ffi")
"""

TESTS = """
import time
import pytest
import torch
from kernels import compile_horner

@pytest.mark.parametrize("repeat", range({tests_per_key}))
@pytest.mark.parametrize("offset", range({keys}))
def test_horner(offset, repeat):
    until = time.perf_counter() + {test_ms} / 1e3
    x = torch.linspace(-0.9, 0.9, 40)
    y = torch.empty_like(x)
    compile_horner({degree}, offset)(x, y)
    reference = torch.zeros_like(x)
    for k in range({degree}):
        reference = reference * x + 1.0 / (k + 1)
    assert torch.allclose(y, reference + offset, atol=1e-4)
    while time.perf_counter() < until:
        pass
"""


@dataclass(frozen=True)
class Timing:
    wall_s: float
    session_s: float
    tail: str


def write_suite(folder: Path, args: argparse.Namespace) -> None:
    folder.mkdir()
    (folder / "kernels.py").write_text(KERNELS)
    text = TESTS.format(keys=args.keys, tests_per_key=args.tests_per_key, test_ms=args.test_ms, degree=args.degree)
    (folder / "test_suite.py").write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\naddopts = -q -p no:cacheprovider\n")


def run(folder: Path, store: Path, extra: list[str]) -> Timing:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("QUACK_")}
    environ["QUACK_CACHE_DIR"] = str(store)
    environ["PYTHONPATH"] = str(ROOT)
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *extra], cwd=folder, env=environ, capture_output=True, text=True, check=False
    )
    wall_s = time.perf_counter() - began
    if done.returncode != 0:
        sys.exit(f"a run failed with status {done.returncode}:\n{done.stdout[-4000:]}\n{done.stderr[-2000:]}")
    session = re.search(r"in ([\d.]+)s", done.stdout.splitlines()[-1])
    assert session, done.stdout
    return Timing(wall_s, float(session.group(1)), "\n".join(done.stdout.splitlines()[-6:]))


def measure(args: argparse.Namespace, work: Path) -> dict[str, Any]:
    folder = work / "suite"
    write_suite(folder, args)
    with_plugin = ["-p", "pytest_quack", f"--async-compile={args.jobs}"]
    # An installed plugin is loaded by its entry point: side B is pytest without it.
    plain = ["-p", "no:pytest_quack"]
    shared = work / "warm-store"
    if args.what == "warm":
        run(folder, shared, with_plugin)
        run(folder, shared, plain)
    pairs = []
    for index in range(args.pairs):
        timings = []
        for side, extra in (("a", with_plugin), ("b", plain)):
            store = shared if args.what == "warm" else work / f"store-{side}{index}"
            timings.append(run(folder, store, extra))
            if args.what == "cold":
                shutil.rmtree(store)
        pairs.append(tuple(timings))
        a, b = timings
        print(f"pair {index + 1}: {a.wall_s:.2f} s / {b.wall_s:.2f} s = {a.wall_s / b.wall_s:.3f}", flush=True)
    return {
        "what": args.what,
        "keys": args.keys,
        "tests_per_key": args.tests_per_key,
        "test_ms": args.test_ms,
        "degree": args.degree,
        "jobs": args.jobs,
        "pairs": args.pairs,
        "plugin_wall_s": [round(a.wall_s, 3) for a, _ in pairs],
        "plain_wall_s": [round(b.wall_s, 3) for _, b in pairs],
        "plugin_session_s": [a.session_s for a, _ in pairs],
        "plain_session_s": [b.session_s for _, b in pairs],
        "median_wall_ratio": round(statistics.median(a.wall_s / b.wall_s for a, b in pairs), 4),
        "median_session_ratio": round(statistics.median(a.session_s / b.session_s for a, b in pairs), 4),
        "last_summary": pairs[-1][0].tail,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["warm", "cold"])
    parser.add_argument("--keys", type=int, default=200)
    parser.add_argument("--tests-per-key", type=int, default=1)
    parser.add_argument("--test-ms", type=float, default=0.0)
    parser.add_argument("--degree", type=int, default=20, help="sets the compile cost of a kernel (default 20)")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the result here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-plugin-") as work:
        result = measure(args, Path(work))
    report(result, args.json)


if __name__ == "__main__":
    main()
