"""Every compile of the DSL, taken where it happens: the same results, from objects that were made elsewhere."""

from __future__ import annotations

import pytest

from support.inner import InnerProject, InnerResult

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
pytest.importorskip("torch", reason="needs torch")

KERNELS = """
import functools
import cutlass
import cutlass.cute as cute
import torch
from cutlass import AddressSpace, Constexpr, Float32
from cutlass.cute.runtime import from_dlpack

FFI = "--enable-tvm-ffi"

def fake(n, space=AddressSpace.generic):
    return cute.runtime.make_fake_compact_tensor(Float32, (n,), stride_order=(0,), memspace=space)

@cute.jit
def _affine(x: cute.Tensor, y: cute.Tensor, a: Constexpr, b: Constexpr):
    for i in range(cute.size(x)):
        y[i] = x[i] * a + b

def affine(a, b, options=FFI):
    n = cute.sym_int()
    return cute.compile(_affine, fake(n), fake(n), a, b, options=options)

@cute.kernel
def _scale_kernel(x: cute.Tensor, a: Float32):
    x[cute.arch.thread_idx()[0]] *= a

@cute.jit
def _scale(x: cute.Tensor, a: Float32):
    _scale_kernel(x, a).launch(grid=[1, 1, 1], block=[32, 1, 1])

def scale(options=FFI):
    return cute.compile(_scale, fake(cute.sym_int(), AddressSpace.gmem), Float32(1.0), options=options)

def dynamic(t):
    return from_dlpack(t).mark_layout_dynamic()
"""
TESTS = """
import cutlass.cute as cute
import pytest
import torch
from cutlass import Constexpr
from kernels import *
from kernels import _affine

X = torch.arange(8, dtype=torch.float32)
OWN = {}

def right(kernel, a, b):
    y = torch.empty(8)
    kernel(X, y)
    return torch.equal(y, X * a + b)

def test_own_dictionary():
    if 2 not in OWN:
        OWN[2] = affine(2.0, 1.0)
    assert right(OWN[2], 2.0, 1.0)

@functools.cache
def cached(a):
    return affine(a, 0.0)

@pytest.mark.parametrize("a", [3.0, 4.0])
def test_functools_cache(a):
    assert right(cached(a), a, 0.0)

def test_closure_and_local_class():
    class Local:
        def __init__(self, b):
            self.b = b
        @cute.jit
        def __call__(self, x: cute.Tensor, y: cute.Tensor):
            for i in range(cute.size(x)):
                y[i] = x[i] + self.b
    n = cute.sym_int()
    assert right(cute.compile(Local(5.0), fake(n), fake(n), options=FFI), 1.0, 5.0)

def test_plain_function_and_real_tensors():
    y = torch.empty(8)
    kernel = cute.compile(_affine, dynamic(X), dynamic(y), 6.0, 1.0)
    kernel(dynamic(X), dynamic(y))
    assert torch.equal(y, X * 6.0 + 1.0)

def test_implicit_compile():
    y = torch.empty(8)
    _affine(dynamic(X), dynamic(y), 7.0, 1.0)
    assert torch.equal(y, X * 7.0 + 1.0)

def test_custom_op_and_autograd_backward():
    @torch.library.custom_op("quacktest::double", mutates_args=())
    def double(x: torch.Tensor) -> torch.Tensor:
        y = torch.empty_like(x)
        affine(2.0, 0.0)(x, y)
        return y

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return double(x)
        @staticmethod
        def backward(ctx, grad):
            out = torch.empty_like(grad)
            affine(2.0, -0.0)(grad.contiguous(), out)
            return out

    x = X.clone().requires_grad_()
    Double.apply(x).sum().backward()
    assert torch.equal(x.grad, torch.full((8,), 2.0))

@pytest.mark.parametrize("name", ["func", "other"])
def test_export(tmp_path, name):
    path = str(tmp_path / "kernel.o")
    affine(9.0, 1.0).export_to_c(object_file_path=path, function_name=name)
    assert right(cute.runtime.load_module(path, enable_tvm_ffi=True)[name], 9.0, 1.0)

def test_device_code(tmp_path):
    kernel = scale()
    assert "llvm.func" in str(kernel.ir_module)
    path = str(tmp_path / "kernel.o")
    kernel.export_to_c(object_file_path=path, function_name="func")
    assert callable(cute.runtime.load_module(path, enable_tvm_ffi=True)["func"])
"""
N_TESTS = 10


@pytest.fixture
def project(inner: InnerProject) -> InnerProject:
    inner.environ["CUTE_DSL_ARCH"] = "sm_90a"
    inner.environ["QUACK_COMPILE_INTERCEPT"] = "1"
    inner.write("kernels.py", KERNELS)
    return inner


def assert_all_in_the_pool(result: InnerResult) -> None:
    assert "compiled in the test process" not in result.stdout, result.show()
    assert "intercepted" not in result.stdout, result.show()


def test_every_form_of_compile_is_made_in_the_pool_once_and_then_loaded(project: InnerProject) -> None:
    project.write("test_it.py", TESTS)
    cold, warm = project.run(), project.run()
    for result in (cold, warm):
        assert result.counts == {"passed": N_TESTS}, result.show()
        assert_all_in_the_pool(result)
    assert cold.summary("submitted") == cold.summary("done") > 8, cold.show()
    assert warm.summary("submitted") == 0, warm.show()
    assert "deferred: " in cold.stdout


def test_switched_off_it_leaves_the_compiler_alone(project: InnerProject) -> None:
    project.write("test_it.py", TESTS)
    result = project.run("--async-compile-intercept=0")
    assert result.counts == {"passed": N_TESTS}, result.show()
    assert result.summary("submitted") == 0


def test_objects_are_those_of_an_in_process_compile(project: InnerProject) -> None:
    project.write(
        "test_it.py",
        """
        import pathlib
        from kernels import affine, scale

        def test_it(request):
            for name, kernel in (("host", affine(2.0, 1.0)), ("device", scale())):
                kernel.export_to_c(object_file_path=f"{name}.o", function_name="func")
        """,
    )
    made = {}
    for jobs in ("2", None):
        assert project.run(jobs=jobs).counts == {"passed": 1}
        made[jobs] = {name: (project.root / f"{name}.o").read_bytes() for name in ("host", "device")}
    assert made["2"] == made[None]


def test_compile_function_of_jit_cache_shares_the_artifact_of_a_compile_beside_it(project: InnerProject) -> None:
    project.write(
        "shared.py",
        """
        from kernels import affine
        from pytest_quack import jit_cache

        @jit_cache
        def compile_affine(a):
            return affine(a, 1.0)
        """,
    )
    project.write("test_it.py", "from kernels import affine\n\ndef test_it():\n    affine(2.0, 1.0)\n")
    assert project.run().summary("submitted") == 1
    project.write("test_it.py", "from shared import compile_affine\n\ndef test_it():\n    compile_affine(2.0)\n")
    shared = project.run()
    assert shared.counts == {"passed": 1}, shared.show()
    assert len(list(project.cache.rglob("artifacts/*/*.o"))) == 1, "one artifact, two ways to it"


def test_function_that_no_other_process_can_find_is_compiled_in_the_pool_by_its_trace(project: InnerProject) -> None:
    project.write(
        "test_it.py",
        """
        import torch
        from kernels import affine
        from pytest_quack import jit_cache

        def test_it():
            @jit_cache
            def compile_affine(a):
                return affine(a, 1.0)
            x, y = torch.ones(4), torch.empty(4)
            compile_affine(3.0)(x, y)
            assert torch.equal(y, torch.full((4,), 4.0))
        """,
    )
    cold = project.run()
    assert cold.counts == {"passed": 1}, cold.show()
    assert (cold.summary("submitted"), cold.summary("done")) == (1, 1), cold.show()
    assert_all_in_the_pool(cold)


@pytest.mark.parametrize("options", ["--keep-ptx", "--keep-cubin", "--dump-dir=dumped --keep-ptx"])
def test_compile_that_leaves_files_is_left_to_the_compiler(project: InnerProject, options: str) -> None:
    project.write(
        "test_it.py", f"from kernels import scale\n\ndef test_it():\n    scale('--enable-tvm-ffi {options}')\n"
    )
    for _ in range(2):
        result = project.run()
        assert result.counts == {"passed": 1}, result.show()
        assert result.summary("submitted") == 0, result.show()


def test_compile_that_fails_raises_its_own_error_and_is_not_sent_again(project: InnerProject) -> None:
    project.write(
        "test_it.py",
        """
        import pytest
        from kernels import scale

        def test_it():
            with pytest.raises(Exception) as raised:
                scale("--enable-tvm-ffi --ptxas-options=--no-such-option")
            assert "Pending" not in type(raised.value).__name__
        """,
    )
    first, second = project.run(), project.run()
    assert first.counts == second.counts == {"passed": 1}, first.show() + second.show()
    assert second.summary("submitted") == 0, second.show()


def test_an_edit_that_changes_nothing_hits_and_one_that_does_misses(project: InnerProject) -> None:
    project.write("test_it.py", "from kernels import affine\n\ndef test_it():\n    affine(2.0, 1.0)\n")
    assert project.run().summary("submitted") == 1
    project.write("kernels.py", "# a comment\n\n" + KERNELS)
    assert project.run().summary("submitted") == 0
    project.write("kernels.py", KERNELS.replace("x[i] * a + b", "x[i] * a - b"))
    assert project.run().summary("submitted") == 1


def test_another_target_is_another_artifact(project: InnerProject) -> None:
    project.write("test_it.py", "from kernels import scale\n\ndef test_it():\n    scale()\n")
    assert project.run().summary("submitted") == 1
    project.environ["CUTE_DSL_ARCH"] = "sm_100a"
    other = project.run()
    assert (other.summary("submitted"), other.summary("done")) == (1, 1), other.show()
    assert project.run().summary("submitted") == 0


def test_compiler_that_is_not_as_expected_is_left_alone_with_one_notice(project: InnerProject) -> None:
    project.write(
        "conftest.py",
        """
        from cutlass.cutlass_dsl.cutlass import CutlassBaseDSL

        before = CutlassBaseDSL.compile_and_cache

        def compile_and_cache(self, *args, **kwargs):
            return before(self, *args, **kwargs)

        CutlassBaseDSL.compile_and_cache = compile_and_cache
        """,
    )
    project.write("test_it.py", TESTS)
    result = project.run()
    assert result.counts == {"passed": N_TESTS}, result.show()
    assert result.summary("submitted") == 0
    assert result.stdout.count("compiles are not intercepted") == 1, result.show()
