"""Time the small things: an in-process hit, a load from the store, an intercepted hit, the import of the plugin.

    python benchmarks/bench_cache.py --json benchmarks/results/cache.json

Every figure is the median over REPEATS rounds; the in-process hits are timed over many calls each.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
from pathlib import Path
from typing import Any

from environment import report

ROOT = Path(__file__).resolve().parent.parent

HITS = """
from pytest_quack import jit_cache

TILE = 4
NAMES = {"a": 1, "b": 2, "c": 3, "d": 4}


class Kernel:
    pass


@jit_cache(backend="bench_light:BACKEND")
def with_constant(dtype, n, is_fast=False):
    return Kernel() if TILE else None


@jit_cache(backend="bench_light:BACKEND")
def with_container(dtype, n, is_fast=False):
    return Kernel() if NAMES else None
"""

LIGHT = """
from pytest_quack.backends import Exported, Target


class Backend:
    name = "bench"

    def toolchain(self):
        return {}

    def options(self):
        return ""

    def target(self):
        return Target("", "any", ())

    def export(self, compiled):
        return Exported(b"kernel", "bench", "")

    def load(self, artifact):
        return print

    def interception(self, resolver, notice):
        return None

    def worker_environ(self):
        return {}

    def prepare_worker(self):
        pass

    def pin_worker(self, pinned):
        pass

    def worker_preload(self):
        return ()

    def heralds(self):
        return frozenset()


BACKEND = Backend()
"""


def nanoseconds(call: str, names: dict[str, Any], repeats: int) -> float:
    """The median time of one call, in nanoseconds."""
    number = 100_000
    rounds = timeit.repeat(call, globals=names, number=number, repeat=repeats)
    return round(statistics.median(rounds) / number * 1e9, 1)


def measure_hits(folder: Path, repeats: int) -> dict[str, float]:
    (folder / "bench_hits.py").write_text(HITS)
    (folder / "bench_light.py").write_text(LIGHT)
    sys.path.insert(0, str(folder))
    import bench_hits  # type: ignore[import-not-found]

    names = {"f": bench_hits.with_constant, "g": bench_hits.with_container}
    calls = {
        "hit_positional_ns": 'f("float32", 1024)',
        "hit_keywords_ns": 'f(dtype="float32", n=1024, is_fast=True)',
        "hit_mutable_container_ns": 'g("float32", 1024)',
    }
    for call in calls.values():
        eval(call, dict(names))  # warm
    return {name: nanoseconds(call, names, repeats) for name, call in calls.items()}


def measure_loads(repeats: int) -> dict[str, float]:
    """Load artifacts of a real kernel: from the call to the loaded kernel, and the store and backend alone."""
    import bench_plugin

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "kernels.py").write_text(bench_plugin.kernels("ours"))
        sys.path.insert(0, folder)
        import kernels  # type: ignore[import-not-found]

        from pytest_quack.runtime import get_runtime

        compile_horner = kernels.compile_horner
        for offset in range(2):
            compile_horner(20, offset)
        jit = compile_horner.__quack_jit__
        store = get_runtime().store
        assert store is not None
        key = jit.direct_key((20, 1), {}).key
        calls, loads = [], []
        for _ in range(max(repeats, 20)):
            compile_horner.cache_clear()
            began = time.perf_counter()
            compile_horner(20, 1)
            calls.append(time.perf_counter() - began)
            began = time.perf_counter()
            pointer = store.find_pointer(key)
            assert pointer is not None
            artifact = store.find(pointer.content_key)
            assert artifact is not None
            jit.backend.load(artifact)
            loads.append(time.perf_counter() - began)
    return {
        "warm_call_ms": round(statistics.median(calls) * 1e3, 2),
        "load_of_an_artifact_ms": round(statistics.median(loads) * 1e3, 2),
    }


UNROLLED = """
import cutlass.cute as cute
from cutlass import AddressSpace, Constexpr, Float32, range_constexpr


@cute.kernel
def _kernel(x: cute.Tensor, steps: Constexpr, offset: Constexpr):
    i = cute.arch.thread_idx()[0]
    for k in range_constexpr(steps):
        x[i + k] = x[i + k] * Float32(k) + x[i] + Float32(offset)


@cute.jit
def _launch(x: cute.Tensor, steps: Constexpr, offset: Constexpr):
    _kernel(x, steps, offset).launch(grid=[1, 1, 1], block=[32, 1, 1])


def compile_unrolled(steps, offset, options):
    x = cute.runtime.make_fake_compact_tensor(
        Float32, (cute.sym_int(),), stride_order=(0,), memspace=AddressSpace.gmem
    )
    return cute.compile(_launch, x, steps, offset, options=options)
"""


def measure_interception(folder: Path, repeats: int) -> dict[str, Any]:
    """What a hit costs once the function is traced: key, look-up, load, the object that the DSL returns.

    For a module of some 20 kB and one of the size of a GEMM's, with TVM-FFI and without.
    """
    (folder / "bench_unrolled.py").write_text(UNROLLED)
    sys.path.insert(0, str(folder))
    import bench_unrolled  # type: ignore[import-not-found]

    from pytest_quack.backends import find_backend
    from pytest_quack.backends.cute_seam import ORIGIN, Seam
    from pytest_quack.cache.traced import TraceCache

    seam = find_backend("cute_dsl").interception(TraceCache("cute_dsl"), print)
    assert isinstance(seam, Seam)
    seconds: list[float] = []
    compile_traced = seam.compile

    def timed(*args: Any) -> Any:
        began = time.perf_counter()
        try:
            return compile_traced(*args)
        finally:
            seconds.append(time.perf_counter() - began)

    seam.compile = timed  # type: ignore[method-assign]
    seam.install()
    result: dict[str, Any] = {}
    try:
        for name, steps in (("20_kb", 120), ("gemm_size", 560)):
            for abi, options in (("ffi", "--enable-tvm-ffi"), ("plain", "")):
                for offset in range(3):
                    bench_unrolled.compile_unrolled(steps, offset, options)
                seconds.clear()
                for i in range(max(repeats, 15)):
                    kernel = bench_unrolled.compile_unrolled(steps, i % 3, options)
                origin = getattr(kernel, ORIGIN)
                assert origin.artifact is not None, "not a hit"
                result[f"intercepted_hit_{name}_{abi}_ms"] = round(statistics.median(seconds) * 1e3, 2)
                result[f"bytecode_{name}_{abi}_bytes"] = len(origin.trace.bytecode)
    finally:
        seam.remove()
    return result


def measure_import(repeats: int) -> dict[str, Any]:
    """What loading the plugin adds to a pytest start, without a flag, and what it brings into the process."""
    code = (
        "import sys, time, pytest; began = time.perf_counter(); config = pytest.Config.fromdictargs; "
        "from _pytest.config import get_config; config = get_config(); "
        "pm = config.pluginmanager; began = time.perf_counter(); pm.import_plugin('pytest_quack'); "
        "print(time.perf_counter() - began, 'torch' in sys.modules, 'cutlass' in sys.modules)"
    )
    times, heavy = [], set()
    for _ in range(repeats):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        )
        seconds, *flags = done.stdout.split()
        times.append(float(seconds))
        heavy.update(flags)
    return {"plugin_import_ms": round(statistics.median(times) * 1e3, 2), "imports_torch_or_cutlass": "True" in heavy}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path, help="write the result here")
    args = parser.parse_args()
    sys.path[:0] = [str(ROOT)]
    os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")  # read when the compiler is imported
    with tempfile.TemporaryDirectory(prefix="bench-cache-") as work:
        os.environ["QUACK_CACHE_DIR"] = str(Path(work) / "cache")
        result = {
            **measure_import(args.repeats),
            **measure_hits(Path(work), args.repeats),
            **measure_loads(args.repeats),
            **measure_interception(Path(work), args.repeats),
        }
    report(result, args.json)


if __name__ == "__main__":
    main()
