"""Check on a machine with a GPU what no other machine can show, and print a table.

    python scripts/gpu_check.py --json benchmarks/results/gpu_core.json

Needs torch, nvidia-cutlass-dsl, apache-tvm-ffi and pytest in the running interpreter, and an NVIDIA GPU. Each row is a
pytest run in a process of its own over a project that this script writes, cold and then warm.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_LONGEST_S = 540
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT)]

from environment import describe  # noqa: E402 - found through the path above

KERNELS = """
import os
import cutlass.cute as cute
from cutlass import AddressSpace, Float32
from pytest_quack import jit_cache

def fake(*shape):
    order = tuple(reversed(range(len(shape))))
    return cute.runtime.make_fake_compact_tensor(Float32, shape, stride_order=order, memspace=AddressSpace.gmem)

@cute.kernel
def _scale_kernel(x: cute.Tensor, y: cute.Tensor, factor: Float32):
    i = cute.arch.block_idx()[0] * 128 + cute.arch.thread_idx()[0]
    if i < cute.size(x):
        y[i] = x[i] * factor

@cute.jit
def _scale(x: cute.Tensor, y: cute.Tensor, factor: Float32):
    _scale_kernel(x, y, factor).launch(grid=[cute.ceil_div(cute.size(x), 128), 1, 1], block=[128, 1, 1])

def open_devices():
    links = []
    for name in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            pass
    return [link for link in links if "nvidia" in link]

@jit_cache
def compile_scale(number):
    if os.environ.get("EXPECT_POOL"):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "", "compiled in the test process"
        assert not open_devices(), open_devices()
    n = cute.sym_int()
    return cute.compile(_scale, fake(n), fake(n), Float32(1.0), options="--enable-tvm-ffi")

@jit_cache
def compile_scale_plain(number):
    n = cute.sym_int()
    return cute.compile(_scale, fake(n), fake(n), Float32(1.0))
"""

TESTS = {
    "launch": """
import pytest, torch
from kernels import compile_scale

@pytest.mark.parametrize("number", range(12))
def test_scale(number):
    x = torch.randn(1000, device="cuda")
    y = torch.empty_like(x)
    compile_scale(number)(x, y, 3.0)
    torch.testing.assert_close(y, x * 3.0)
""",
    "launch without tvm-ffi": """
import torch
from cutlass.cute.runtime import from_dlpack
from kernels import compile_scale_plain

def test_scale():
    x = torch.randn(1000, device="cuda")
    y = torch.empty_like(x)
    compile_scale_plain(0)(from_dlpack(x).mark_layout_dynamic(), from_dlpack(y).mark_layout_dynamic(), 3.0)
    torch.cuda.synchronize()
    torch.testing.assert_close(y, x * 3.0)
""",
    "no memory is kept by a put-off attempt": """
import torch
from kernels import compile_scale

def test_memory():
    torch.cuda.init()
    assert torch.cuda.memory_allocated() == 0
    x = torch.ones(1 << 26, device="cuda")
    y = torch.empty_like(x)
    compile_scale(0)(x, y, 2.0)
    assert float(y[0]) == 2.0
""",
    "each attempt draws the same numbers": """
import torch
from kernels import compile_scale

seen = []

def test_random():
    x = torch.randn(4, device="cuda")
    seen.append(x.tolist())
    compile_scale(0)(x, torch.empty_like(x), 2.0)
    assert all(values == seen[0] for values in seen), seen

def test_that_draws_in_between():
    assert torch.randn(4, device="cuda").tolist() != torch.randn(4, device="cuda").tolist()
""",
    "a call under graph capture waits": """
import torch
from kernels import compile_scale

def test_capture():
    x = torch.ones(64, device="cuda")
    y = torch.zeros_like(x)
    graph = torch.cuda.CUDAGraph()
    attempts.append(1)
    with torch.cuda.graph(graph):
        kernel = compile_scale(0)
    assert len(attempts) == 1
    kernel(x, y, 2.0)
    assert float(y[0]) == 2.0

attempts = []
""",
    "a fault in a put-off attempt is that test's": """
import torch
from kernels import compile_scale

def test_fault():
    table = torch.ones(4, device="cuda")
    table[torch.tensor([1 << 20], device="cuda")]
    compile_scale(0)
    torch.cuda.synchronize()
""",
}
TESTS["intercepted compiles launch"] = """
import cutlass.cute as cute
import torch
from cutlass import Float32
from cutlass.cute.runtime import from_dlpack
from kernels import _scale, fake

def check(run):
    x = torch.arange(1000, device="cuda", dtype=torch.float32)
    y = torch.empty_like(x)
    run(x, y)
    torch.cuda.synchronize()
    assert torch.equal(y, x * 3.0)

def dynamic(*tensors):
    return [from_dlpack(tensor).mark_layout_dynamic() for tensor in tensors]

def test_tvm_ffi():
    n = cute.sym_int()
    kernel = cute.compile(_scale, fake(n), fake(n), Float32(1.0), options="--enable-tvm-ffi")
    check(lambda x, y: kernel(x, y, 3.0))

def test_plain():
    check(lambda x, y: cute.compile(_scale, *dynamic(x, y), Float32(1.0))(*dynamic(x, y), Float32(3.0)))

def test_implicit():
    check(lambda x, y: _scale(*dynamic(x, y), Float32(3.0)))
"""
if importlib.util.find_spec("quack") is not None:
    TESTS["kernels of quack-kernels, intercepted"] = """
import pytest
import quack
import quack.cache
import torch
from quack.gemm_interface import gemm

quack.cache.CACHE_ENABLED = False  # its own cache on disk, which would answer first

def close(actual, expected):
    torch.testing.assert_close(actual.float(), expected.float(), atol=3e-2, rtol=3e-2)

def data(*shape):
    torch.manual_seed(0)
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16).requires_grad_()

def forward_and_backward(op, reference, *shape):
    x, y = data(*shape), data(*shape)
    out, expected = op(x), reference(y.float())
    grad = torch.randn_like(expected)
    out.backward(grad.to(out.dtype))
    expected.backward(grad)
    close(out, expected)
    close(x.grad, y.grad)

@pytest.mark.parametrize("n", [1024, 4096])
def test_softmax(n):
    forward_and_backward(quack.softmax, lambda x: torch.softmax(x, -1), 64, n)

@pytest.mark.parametrize("n", [1024, 4096])
def test_rmsnorm(n):
    weight = torch.ones(n, device="cuda")
    reference = lambda x: torch.nn.functional.rms_norm(x, (n,), weight, 1e-6)
    forward_and_backward(lambda x: quack.rmsnorm(x, weight, eps=1e-6), reference, 64, n)

def test_cross_entropy():
    target = torch.arange(64, device="cuda")
    reference = lambda x: torch.nn.functional.cross_entropy(x, target, reduction="none")
    forward_and_backward(lambda x: quack.cross_entropy(x, target, reduction="none"), reference, 64, 1024)

def test_gemm():
    a, b = data(256, 128).detach(), data(128, 512).detach()
    close(gemm(a, b, tuned=False) / 128, a.float() @ b.float() / 128)
"""
EXPECTED = {name: {"passed": 1} for name in TESTS}
EXPECTED["kernels of quack-kernels, intercepted"] = {"passed": 6}
EXPECTED["intercepted compiles launch"] = {"passed": 3}
EXPECTED["launch"] = {"passed": 12}
EXPECTED["each attempt draws the same numbers"] = {"passed": 2}
EXPECTED["a fault in a put-off attempt is that test's"] = {"failed": 1}


def run(folder: Path, cache: Path, args: Sequence[str], more: Mapping[str, str | None]) -> dict[str, Any]:
    """Run pytest in a process of its own; `more` are variables for it, None for one that it is not to have."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    given = {"QUACK_CACHE_DIR": str(cache), "PYTHONPATH": path, "CUTE_DSL_ARCH": None, **more}
    environ = {name: value for name, value in {**os.environ, **given}.items() if value is not None}
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:benchmark", *args],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=_LONGEST_S,
    )
    wall_s = time.perf_counter() - began
    last = done.stdout.splitlines()[-1] if done.stdout else ""
    counts = {name: int(n) for n, name in re.findall(r"(\d+) (passed|failed|errors?|skipped)", last)}
    numbers = {
        name: int(n) for n, name in re.findall(r"(\d+) (hit|submitted|compiled in the test process)", done.stdout)
    }
    seconds = re.search(r"in ([\d.]+)s", last)
    return {
        "status": done.returncode,
        "counts": counts,
        "session_s": float(seconds.group(1)) if seconds else None,
        "wall_s": round(wall_s, 2),
        **numbers,
        "output": done.stdout + done.stderr,
    }


def check(name: str, work: Path, jobs: int) -> dict[str, Any]:
    folder, cache = work / re.sub(r"\W", "_", name), work / ("cache_" + re.sub(r"\W", "_", name))
    folder.mkdir()
    (folder / "kernels.py").write_text(KERNELS)
    (folder / "test_it.py").write_text(TESTS[name])
    plugin = ["-p", "pytest_quack", f"--async-compile={jobs}"]
    environ = {"EXPECT_POOL": "1"} if name == "launch" else {}
    cold, warm = run(folder, cache, plugin, environ), run(folder, cache, plugin, environ)
    is_right = all(r["counts"] == EXPECTED[name] and "compiled in the test process" not in r for r in (cold, warm))
    # A fault may end the run before its kernel is there.
    warm_submitted = {0, 1} if "failed" in EXPECTED[name] else {0}
    is_right = is_right and cold.get("submitted", 0) > 0 and warm.get("submitted") in warm_submitted
    sidecars = [json.loads(path.read_text()) for path in cache.rglob("artifacts/*/*.json")]
    archs = sorted({card["arch"] for card in sidecars})
    if not is_right:
        print(f"--- {name}, cold:\n{cold['output']}\n--- warm:\n{warm['output']}")
    for result in (cold, warm):
        del result["output"]
    return {"name": name, "is_right": is_right, "archs": archs, "cold": cold, "warm": warm}


def check_suite(work: Path, jobs: int) -> dict[str, Any]:
    cache = work / "cache_suite"
    plugin = ["-p", "pytest_quack", f"--async-compile={jobs}", "--pyargs", "quack_kernels"]
    cold, warm = run(work, cache, plugin, {}), run(work, cache, plugin, {})
    plain = run(work, work / "cache_plain", ["-p", "no:pytest_quack", "--pyargs", "quack_kernels"], {})
    is_right = cold["status"] == warm["status"] == plain["status"] == 0 and warm.get("submitted") == 0
    if not is_right:
        print(cold["output"], warm["output"], plain["output"])
    for result in (cold, warm, plain):
        del result["output"]
    return {"name": "suite of quack_kernels", "is_right": is_right, "cold": cold, "warm": warm, "plain cold": plain}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--only", choices=("checks", "suite"), help="leave the other part out")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        work = Path(folder)
        rows = [] if args.only == "suite" else [check(name, work, args.jobs) for name in TESTS]
        rows += [] if args.only == "checks" else [check_suite(work, args.jobs)]
    result = {**describe(), "jobs": args.jobs, "checks": rows}
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{'check':45} right  submitted cold/warm  session s cold/warm")
    for row in rows:
        cold, warm = row["cold"], row["warm"]
        submitted = f"{cold.get('submitted')}/{warm.get('submitted')}"
        print(f"{row['name']:45} {row['is_right']!s:6} {submitted:20} {cold['session_s']}/{warm['session_s']}")
    if not all(row["is_right"] for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
