"""Time one suite of host-compiled CuTe DSL kernels several ways, side by side.

    python benchmarks/bench_plugin.py --sides plain jit_cache interception peer --keys 200 --rounds 2
    python benchmarks/bench_plugin.py --sides plain_cached jit_cache --phases warm --tests-per-key 5 --test-ms 20
    python benchmarks/bench_plugin.py --project tests/projects/memo_style --sides plain interception --rounds 3
    python benchmarks/bench_plugin.py --sides jit_cache jit_cache:2 peer peer:2 --phases cold

A suite is generated: KEYS kernels whose compile cost DEGREE sets, TESTS_PER_KEY tests for each of them that compute for
TEST_MS milliseconds. Or it is a project of its own, with `--project`. The sides are

    plain          pytest without a plugin; kernels are kept in the process only
    plain_cached   pytest without a plugin; compile functions decorated with jit_cache
    jit_cache      with --async-compile; compile functions decorated with jit_cache
    interception   with --async-compile; the code of "plain"
    peer           the plugin and jit_cache of the distribution quack-kernels, where it and triton are installed

and each of them, followed by ":N", with N workers of pytest-xdist.

In each round each side runs in turn, each run a process of its own: cold, on an empty store, and warm, on the store
that the cold run has filled. Reported are the wall time of the whole process and pytest's session time, their medians,
and the ratios of each side to the first and to the peer, round by round.
"""

from __future__ import annotations

import argparse
import importlib.util
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
_CACHES = {
    "plain": "from functools import cache as jit_cache",
    "ours": "from pytest_quack import jit_cache",
    "peer": "from quack.cache import jit_cache",
}
KERNELS = """
import cutlass.cute as cute
from cutlass import AddressSpace, Constexpr, Float32, range_constexpr
{jit_cache}


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
class Side:
    """One way to run the suite: whose cache its compile functions have, and pytest's arguments."""

    cache: str
    arguments: tuple[str, ...]


def sides(jobs: int) -> dict[str, Side]:
    # An installed plugin is loaded by its entry point: a plain run must say that it does not want it.
    none = ("-p", "no:pytest_quack")
    ours = ("-p", "pytest_quack", f"--async-compile={jobs}")
    return {
        "plain": Side("plain", none),
        "plain_cached": Side("ours", none),
        "jit_cache": Side("ours", ours),
        "interception": Side("plain", ours),
        "peer": Side("peer", (*none, "-p", "quack.testing.pytest_plugin", f"--async-compile={jobs}")),
    }


@dataclass(frozen=True)
class Timing:
    wall_s: float
    session_s: float
    summary: str


def find_side(name: str, jobs: int) -> Side:
    """The side of that name, which may end in ":N". Raises ValueError where there is none."""
    base, _, workers = name.partition(":")
    if base not in sides(jobs) or (workers and not workers.isdigit()):
        raise ValueError(f"choose from {', '.join(sides(jobs))}, each with an optional :N")
    side = sides(jobs)[base]
    return Side(side.cache, (*side.arguments, "-p", "xdist.plugin", "-n", workers)) if workers else side


def side_name(text: str) -> str:
    """An argument of --sides."""
    try:
        find_side(text, 1)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def kernels(cache: str) -> str:
    """The module of compile functions, with the cache of "plain", "ours" or "peer"."""
    return KERNELS.format(jit_cache=_CACHES[cache])


def write_suite(folder: Path, cache: str, args: argparse.Namespace) -> None:
    if args.project is not None:
        shutil.copytree(args.project, folder)
        return
    folder.mkdir()
    (folder / "kernels.py").write_text(kernels(cache))
    text = TESTS.format(keys=args.keys, tests_per_key=args.tests_per_key, test_ms=args.test_ms, degree=args.degree)
    (folder / "test_suite.py").write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\n")


def run(folder: Path, store: Path, side: Side, more: dict[str, str]) -> Timing:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("QUACK_")}
    environ["QUACK_CACHE_DIR"] = str(store)
    environ["OWNCACHE_DIR"] = f"{store}-own"  # the cache that a project has of its own
    environ["PYTHONPATH"] = str(ROOT)
    environ.setdefault("CUTE_DSL_ARCH", "sm_90a")
    environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # no side pays for what else is installed
    environ.pop("PYTHONDONTWRITEBYTECODE", None)
    environ.update(more)
    shutil.rmtree(environ["OWNCACHE_DIR"], ignore_errors=True)
    store.mkdir(mode=0o700, exist_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *side.arguments]
    began = time.perf_counter()
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)
    wall_s = time.perf_counter() - began
    if done.returncode != 0:
        sys.exit(f"a run failed with status {done.returncode}:\n{done.stdout[-4000:]}\n{done.stderr[-2000:]}")
    session = re.findall(r"passed.* in ([\d.]+)s", done.stdout)
    assert session, done.stdout
    lines = [line for line in done.stdout.strip().splitlines() if "site-packages" not in line]  # warnings of others
    return Timing(wall_s, float(session[-1]), "\n".join(lines[-6:]))


def measure(args: argparse.Namespace, work: Path) -> dict[str, Any]:
    chosen = {name: find_side(name, args.jobs) for name in args.sides}
    for cache in {side.cache for side in chosen.values()}:
        write_suite(work / cache, cache, args)
    more: dict[str, str] = {}
    if args.project is not None:
        sys.path.insert(0, str(ROOT / "tests"))
        from support.bfloat16 import bfloat16_environ

        more = bfloat16_environ(work) or {}
    timings: dict[tuple[str, str], list[Timing]] = {(name, phase): [] for name in chosen for phase in args.phases}
    for number in range(args.rounds):
        for name, side in chosen.items():
            store = work / f"store-{name.replace(':', '-n')}-{number}"
            for phase in ("cold", "warm"):
                if phase == "cold" and "cold" not in args.phases and number:
                    store = work / f"store-{name.replace(':', '-n')}-0"  # filled in the first round
                elif phase == "cold" or phase in args.phases:
                    timing = run(work / side.cache, store, side, more)
                    if phase in args.phases:
                        timings[name, phase].append(timing)
                        print(
                            f"{number + 1}: {name}, {phase}: {timing.wall_s:.2f} s ({timing.session_s} s)", flush=True
                        )
    return {
        "suite": args.project.name if args.project else "generated",
        **({} if args.project else {key: getattr(args, key) for key in ("keys", "tests_per_key", "test_ms", "degree")}),
        "jobs": args.jobs,
        "rounds": args.rounds,
        "phases": {phase: compare({name: timings[name, phase] for name in chosen}) for phase in args.phases},
    }


def compare(timings: dict[str, list[Timing]]) -> dict[str, Any]:
    """Medians of each side and, for the first side and the peer, ratios of the others to it, round by round."""
    result: dict[str, Any] = {}
    for name, runs in timings.items():
        result[name] = {
            "wall_s": [round(run.wall_s, 3) for run in runs],
            "session_s": [run.session_s for run in runs],
            "median_wall_s": round(statistics.median(run.wall_s for run in runs), 3),
            "median_session_s": round(statistics.median(run.session_s for run in runs), 3),
            "last_summary": runs[-1].summary,
        }
    # Each side with workers is compared with the same side without them, too.
    alone = [name.partition(":")[0] for name in timings if ":" in name]
    references = [next(iter(timings)), *(name for name in ("peer", *alone) if name in timings)]
    for reference in dict.fromkeys(references):
        result[f"ratios_to_{reference}"] = {
            name: {
                part: round(statistics.median(getattr(a, part) / getattr(b, part) for a, b in pairs), 4)
                for part in ("wall_s", "session_s")
            }
            for name, runs in timings.items()
            if name != reference
            for pairs in [list(zip(runs, timings[reference], strict=True))]
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sides", nargs="+", type=side_name, default=["plain", "jit_cache", "interception"])
    parser.add_argument("--phases", nargs="+", choices=["cold", "warm"], default=["cold", "warm"])
    parser.add_argument("--project", type=Path, help="a folder with a suite of its own")
    parser.add_argument("--keys", type=int, default=200)
    parser.add_argument("--tests-per-key", type=int, default=1)
    parser.add_argument("--test-ms", type=float, default=0.0)
    parser.add_argument("--degree", type=int, default=20, help="sets the compile cost of a kernel (default 20)")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the result here")
    args = parser.parse_args()
    bases = {name.partition(":")[0] for name in args.sides}
    if "peer" in bases and importlib.util.find_spec("quack") is None:
        parser.error('the side "peer" needs the distributions quack-kernels and triton in this environment')
    if args.project is not None and {"plain_cached", "jit_cache", "peer"} & bases:
        parser.error('a project has its own compile functions: its sides are "plain" and "interception"')
    with tempfile.TemporaryDirectory(prefix="bench-plugin-") as work:
        result = measure(args, Path(work))
    report(result, args.json)


if __name__ == "__main__":
    main()
