"""Whole runs over real CuTe DSL kernels: host-compiled ones compute on the CPU, device code is cross-compiled."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys

import pytest

from support.inner import InnerProject, InnerResult

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
pytest.importorskip("torch", reason="needs torch")

KERNELS = """
import cutlass.cute as cute
from cutlass import AddressSpace, Constexpr, Float32, range_constexpr
from pytest_quack import jit_cache
from support.light import log

SHIFT = 0.0

def fake(*shape, space=AddressSpace.generic):
    order = tuple(reversed(range(len(shape))))
    return cute.runtime.make_fake_compact_tensor(Float32, shape, stride_order=order, memspace=space)

@cute.jit
def _horner(x: cute.Tensor, y: cute.Tensor, degree: Constexpr):
    for i in range(cute.size(x)):
        v, acc = x[i], Float32(0.0)
        for k in range_constexpr(degree):
            acc = acc * v + Float32(1.0 / (k + 1))
        y[i] = acc + Float32(SHIFT)

@jit_cache
def compile_horner(degree):
    log(f"compile {degree}")
    n = cute.sym_int()
    return cute.compile(_horner, fake(n), fake(n), degree, options="--enable-tvm-ffi")

@jit_cache
def compile_plain(degree):
    log(f"compile plain {degree}")
    n = cute.sym_int()
    return cute.compile(_horner, fake(n), fake(n), degree)

@cute.kernel
def _scale_kernel(x: cute.Tensor, a: Float32):
    x[cute.arch.thread_idx()[0]] *= a

@cute.jit
def _scale(x: cute.Tensor, a: Float32):
    _scale_kernel(x, a).launch(grid=[1, 1, 1], block=[32, 1, 1])

@jit_cache
def compile_scale(factor):
    log(f"compile scale {factor}")
    x = fake(cute.sym_int(), space=AddressSpace.gmem)
    return cute.compile(_scale, x, Float32(factor), options="--enable-tvm-ffi")
"""

REFERENCE = """
import pytest
import torch
import kernels
from kernels import compile_horner, compile_plain, compile_scale
from support.light import log

def reference(x, degree):
    acc = torch.zeros_like(x)
    for k in range(degree):
        acc = acc * x + 1.0 / (k + 1)
    return acc
"""


def sidecars(inner: InnerProject) -> list[dict[str, object]]:
    root = inner.cache / "pytest-quack" / "v1" / "artifacts"
    return [json.loads(path.read_text()) for path in root.rglob("*.json")]


def run_twice(inner: InnerProject, tests: str, *args: str) -> tuple[InnerResult, InnerResult]:
    inner.write("kernels.py", KERNELS)
    inner.write("test_it.py", tests)
    return inner.run(*args), inner.run(*args)


def test_cold_run_compiles_in_the_pool_and_warm_run_loads(inner: InnerProject) -> None:
    cold, warm = run_twice(
        inner,
        REFERENCE
        + """
@pytest.mark.parametrize("rows", [5, 40])
@pytest.mark.parametrize("degree", range(2, 8))
def test_horner(degree, rows):
    x = torch.linspace(-0.9, 0.9, rows)
    y = torch.empty_like(x)
    compile_horner(degree)(x, y)
    torch.testing.assert_close(y, reference(x, degree))
    log("tested")
""",
    )
    assert cold.counts == warm.counts == {"passed": 12}, cold.show()
    compiles = [line for line in cold.log if "compile" in line]
    assert len(compiles) == 6
    assert not {line.split()[0] for line in compiles} & {line.split()[0] for line in cold.log if "tested" in line}
    assert (cold.summary("submitted"), cold.summary("hit")) == (6, 6)
    assert (warm.summary("submitted"), warm.summary("hit")) == (0, 6)
    assert set(warm.events) == {"tested"}
    assert {card["arch"] for card in sidecars(inner)} == {""}
    assert all(card["host_features"] for card in sidecars(inner))


def test_edits_are_seen_and_plain_pytest_shares_the_cache(inner: InnerProject) -> None:
    inner.write("kernels.py", KERNELS)
    inner.write(
        "test_it.py",
        REFERENCE
        + """
def test_it():
    x = torch.linspace(-0.9, 0.9, 8)
    y = torch.empty_like(x)
    compile_horner(3)(x, y)
    torch.testing.assert_close(y, reference(x, 3) + kernels.SHIFT)
""",
    )
    plain = inner.run(jobs=None)
    assert (plain.counts, plain.events["compile 3"]) == ({"passed": 1}, 1), plain.show()
    inner.write("kernels.py", "# a comment\n" + KERNELS)
    commented = inner.run()
    assert (commented.counts, commented.summary("submitted")) == ({"passed": 1}, 0), commented.show()
    inner.write("kernels.py", KERNELS.replace("SHIFT = 0.0", "SHIFT = 2.5"))
    edited = inner.run()
    assert (edited.counts, edited.summary("submitted")) == ({"passed": 1}, 1), edited.show()


def test_device_code_is_compiled_for_the_architecture_that_is_named(inner: InnerProject) -> None:
    tests = "import kernels\ndef test_it():\n    assert callable(kernels.compile_scale(2.0))\n"
    cold, warm = run_twice(inner, tests, "--compile-arch=sm_90a")
    assert cold.counts == warm.counts == {"passed": 1}, cold.show()
    assert "for sm_90a" in cold.stdout
    assert [card["arch"] for card in sidecars(inner)] == ["sm_90a"]
    assert (cold.summary("submitted"), warm.summary("submitted")) == (1, 0)
    other = inner.run("--compile-arch=sm_100a", jobs=None)
    assert other.events["compile scale 2.0"] == 1, other.show()
    assert sorted(str(card["arch"]) for card in sidecars(inner)) == ["sm_100a", "sm_90a"]


def test_device_code_without_gpu_and_architecture_is_an_error(inner: InnerProject) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU to ask")
    inner.write("kernels.py", KERNELS)
    inner.write("test_it.py", "import kernels\ndef test_it():\n    kernels.compile_scale(2.0)\n")
    for jobs in ("2", None):
        result = inner.run(jobs=jobs)
        assert result.counts == {"failed": 1}, result.show()
        assert "Name the architecture with --compile-arch" in result.stdout


def test_kernels_without_tvm_ffi(inner: InnerProject) -> None:
    cold, warm = run_twice(
        inner,
        REFERENCE
        + """
from cutlass.cute.runtime import from_dlpack

def test_it():
    x = torch.linspace(-0.9, 0.9, 16)
    y = torch.empty_like(x)
    compile_plain(4)(from_dlpack(x).mark_layout_dynamic(), from_dlpack(y).mark_layout_dynamic())
    torch.testing.assert_close(y, reference(x, 4))
""",
    )
    assert cold.summary("submitted") == 1, cold.show()
    assert cold.counts == warm.counts, cold.show() + warm.show()
    assert cold.counts == {"passed": 1}, cold.show()


def test_object_that_passes_its_checks_but_cannot_be_loaded_is_compiled_again(inner: InnerProject) -> None:
    tests = "import kernels\ndef test_it():\n    assert callable(kernels.compile_horner(3))\n"
    inner.write("kernels.py", KERNELS)
    inner.write("test_it.py", tests)
    inner.run(jobs=None)
    sidecar = next((inner.cache / "pytest-quack" / "v1" / "artifacts").rglob("*.json"))
    payload = b"\x7fELF" + bytes(200)
    sidecar.with_suffix(".o").write_bytes(payload)
    card = json.loads(sidecar.read_text())
    card.update(size_bytes=len(payload), sha256=hashlib.sha256(payload).hexdigest())
    sidecar.write_text(json.dumps(card))
    result = inner.run()
    assert result.counts == {"passed": 1}, result.show()
    assert "it passed its checks, but it cannot be loaded" in result.stdout
    assert inner.run().summary("submitted") == 0


FORKED = """
import os
import kernels, torch, tvm_ffi

waiting, start = os.pipe()
children = []
for _ in range(16):
    pid = os.fork()
    if not pid:
        os.close(start)
        os.read(waiting, 1)  # ends when all are there
        os._exit(type(kernels.compile_horner(3)).__name__ != "Function")
    children.append(pid)
os.close(start)
print([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children])
"""


def test_sixteen_processes_that_ask_for_one_cold_key_compile_it_once(inner: InnerProject) -> None:
    inner.write("kernels.py", KERNELS)
    inner.clear_log()
    done = subprocess.run(
        [sys.executable, "-c", FORKED], cwd=inner.root, env=inner.run_environ(), capture_output=True, text=True
    )
    assert done.stdout.strip() == str([0] * 16), done.stderr
    assert inner.log_path.read_text().count("compile 3") == 1


def test_suite_of_the_kernels_uses_the_pool_only_once(inner: InnerProject) -> None:
    cold = inner.run("--pyargs", "quack_kernels", "-k", "17 and not bad", "-q")
    warm = inner.run("--pyargs", "quack_kernels", "-k", "17 and not bad", "-q")
    assert cold.status == warm.status == 0, cold.show()
    assert cold.summary("submitted") > 0
    assert warm.summary("submitted") == 0
    assert "compiled in the test process" not in cold.stdout


EARLY_CONFTEST = """
import os
import cutlass.cute

os.environ["SHIFT"] = "2"
"""

EARLY_KERNELS = """
import os
from support.light import log

log("import kernels")
SHIFT = os.environ.get("SHIFT", "0")
"""


def test_server_that_started_early_follows_what_a_conftest_sets_later(inner: InnerProject) -> None:
    kernels = KERNELS.replace("SHIFT = 0.0", "from settings import SHIFT as TEXT\nSHIFT = float(TEXT)")
    inner.write("kernels.py", kernels)
    inner.write("settings.py", EARLY_KERNELS)
    inner.write("below/conftest.py", EARLY_CONFTEST)
    inner.write(
        "below/test_early.py",
        """
        import torch
        from kernels import compile_horner

        def test_shift():
            x, y = torch.zeros(8), torch.empty(8)
            compile_horner(3)(x, y)
            assert torch.allclose(y, torch.full((8,), 1.0 / 3.0 + 2.0))
        """,
    )
    cold = inner.run()
    assert cold.counts == {"passed": 1}, cold.show()
    assert (cold.summary("submitted"), cold.summary("done")) == (1, 1), cold.show()
    assert "compiled in the test process" not in cold.stdout, cold.show()
    importers = {line.split()[0] for line in cold.log if line.endswith("import kernels")}
    assert len(importers) == 2, f"once here, once in the server that counts: {cold.log}"
    warm = inner.run()
    assert warm.counts == {"passed": 1}, warm.show()
    assert warm.summary("submitted") == 0


def test_server_starts_when_the_compiler_is_imported_into_an_empty_store(inner: InnerProject) -> None:
    inner.write("test_one.py", "def test_one():\n    pass\n")
    inner.write(
        "conftest.py",
        """
        import threading
        from support.light import log

        def pool_threads():
            return sum(thread.name == "quack-compile-pool" for thread in threading.enumerate())

        log(f"before: {pool_threads()}")
        import cutlass.cute
        log(f"after: {pool_threads()}")

        def pytest_sessionfinish():
            from pytest_quack import get_active_pool
            log(f"submitted: {get_active_pool().stats().submitted}")
        """,
    )
    # The conftest of the root is loaded before a session starts, so the import comes with a folder below.
    inner.write("below/test_two.py", "def test_two():\n    pass\n")
    (inner.root / "conftest.py").rename(inner.root / "below" / "conftest.py")
    result = inner.run()
    assert result.counts == {"passed": 2}, result.show()
    assert dict(result.events) == {"before: 0": 1, "after: 1": 1, "submitted: 0": 1}, result.show()
