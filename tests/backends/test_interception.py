"""Every compile of the DSL, taken where it happens: the same results, from objects that were made elsewhere."""

from __future__ import annotations

import hashlib
import json
import os
import textwrap
from typing import Any

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

X = torch.arange(8, dtype=torch.float32)
"""
TESTS = """
import cutlass.cute as cute
import pytest
import torch
from cutlass import Constexpr
from kernels import *
from kernels import _affine

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

class Tag:
    pass  # prints as its address, which is another in each process

@cute.jit
def _tagged(x: cute.Tensor, y: cute.Tensor, tag: Constexpr = Tag()):
    for i in range(cute.size(x)):
        y[i] = x[i] - 1.0

def test_default_of_a_constant():
    n = cute.sym_int()
    assert right(cute.compile(_tagged, fake(n), fake(n), options=FFI), 1.0, -1.0)
    y = torch.empty(8)
    _tagged(dynamic(X), dynamic(y))
    assert torch.equal(y, X - 1.0)

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

@pytest.mark.parametrize(("name", "file"), [("func", "kernel.o"), ("func", "kernel.o.12.part"), ("other", "kernel.o")])
def test_export(tmp_path, name, file):
    path = str(tmp_path / file)
    kernel = affine(9.0, 1.0)
    kernel.export_to_c(object_file_path=path, function_name=name)
    if name == "func":  # a hit copies the artifact
        assert getattr(kernel.ir_module, "__dict__", {}).get("_quack_module") is None
    assert right(cute.runtime.load_module(path, enable_tvm_ffi=True)[name], 9.0, 1.0)

def test_device_code(tmp_path):
    kernel = scale()
    assert "llvm.func" in str(kernel.ir_module)
    path = str(tmp_path / "kernel.o")
    kernel.export_to_c(object_file_path=path, function_name="func")
    assert callable(cute.runtime.load_module(path, enable_tvm_ffi=True)["func"])
"""
N_TESTS = 12


@pytest.fixture
def project(inner: InnerProject) -> InnerProject:
    inner.environ["CUTE_DSL_ARCH"] = "sm_90a"
    inner.write("kernels.py", KERNELS)
    return inner


def artifacts(project: InnerProject) -> dict[str, dict[str, Any]]:
    """The sidecars of the cache, by content key, without that of the self-check."""
    found = [json.loads(path.read_text()) for path in project.cache.rglob("artifacts/*/*.json")]
    return {sidecar["content_key"]: sidecar for sidecar in found if "self-check" not in sidecar["description"]}


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
            for name, kernel in (("plain host", affine(2.0, 1.0, "")), ("plain device", scale(""))):
                pathlib.Path(f"{name}.o").write_bytes(kernel.dump_to_object("func"))
        """,
    )
    made = {}
    for jobs in ("2", None):
        result = project.run(jobs=jobs)
        assert result.counts == {"passed": 1}, result.show()
        made[jobs] = {path.name: path.read_bytes() for path in project.root.glob("*.o")}
        assert len(made[jobs]) == 4
        if jobs is not None:
            stored = {path.read_bytes() for path in project.cache.rglob("artifacts/*/*.o")}
            assert stored >= {*made[jobs].values()}, "what is exported is the worker's object"
    assert made["2"] == made[None]


def in_the_server(project: InnerProject, text: str) -> None:
    """Have `text` run where compile processes are forked from."""
    condition = 'if any("pytest_quack.compile.forkserver" in argument for argument in sys.orig_argv):'
    body = textwrap.indent(textwrap.dedent(text), "    ")
    (project.root / "sitecustomize.py").write_text(f"import sys\n{condition}\n{body}\n")
    project.environ["PYTHONPATH"] = os.pathsep.join([str(project.root), project.run_environ()["PYTHONPATH"]])


def test_compile_function_of_jit_cache_shares_the_artifact_of_a_compile_beside_it(project: InnerProject) -> None:
    project.write(
        "shared.py",
        """
        from kernels import affine
        from pytest_quack import jit_cache

        @jit_cache
        def compile_affine(a, options):
            return affine(a, 1.0, options)
        """,
    )
    project.write(
        "test_it.py",
        """
        import pytest
        from kernels import FFI, X, dynamic, torch

        @pytest.mark.parametrize("options", [FFI, ""])
        def test_it(options, make):
            kernel, y = make(2.0, 1.0, options), torch.empty(8)
            kernel(*(X, y) if options else (dynamic(X), dynamic(y)))
            assert torch.equal(y, X * 2.0 + 1.0)
        """,
    )
    project.write("conftest.py", "import pytest, kernels\n\n@pytest.fixture\ndef make():\n    return kernels.affine\n")
    beside = project.run()
    assert beside.summary("submitted") == 2
    assert_all_in_the_pool(beside)
    project.write(
        "conftest.py",
        """
        import pytest
        from shared import compile_affine

        @pytest.fixture
        def make():
            return lambda a, b, options: compile_affine(a, options)
        """,
    )
    # An artifact that is there ends the compile early: a compiler that cannot compile does as well.
    in_the_server(
        project,
        """
        import cutlass.base_dsl.compiler
        cutlass.base_dsl.compiler.Compiler.compile = None
        """,
    )
    shared = project.run()
    assert (shared.counts, shared.summary("submitted")) == ({"passed": 2}, 2), shared.show()
    assert_all_in_the_pool(shared)
    assert len(artifacts(project)) == 2, "two artifacts, two ways to each"


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


def test_compile_that_leaves_files_is_left_to_the_compiler(project: InnerProject) -> None:
    project.write(
        "test_it.py",
        """
        import pytest
        from kernels import scale

        @pytest.mark.parametrize("options", ["--keep-ptx", "--keep-cubin", "--dump-dir=dumped --keep-ptx"])
        def test_it(options):
            scale(f"--enable-tvm-ffi {options}")
        """,
    )
    result = project.run()
    assert result.counts == {"passed": 3}, result.show()
    assert (result.summary("hit"), result.summary("submitted")) == (0, 0), result.show()
    assert not artifacts(project)


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
    for arch in ("sm_90a", "sm_100a"):
        project.environ["CUTE_DSL_ARCH"] = arch
        result = project.run()
        assert (result.summary("submitted"), result.summary("done")) == (1, 1), result.show()
    assert sorted(sidecar["arch"] for sidecar in artifacts(project).values()) == ["sm_100a", "sm_90a"]


def test_device_code_for_a_guessed_architecture_is_not_cached(project: InnerProject) -> None:
    del project.environ["CUTE_DSL_ARCH"]
    project.write("test_it.py", "from kernels import scale\n\ndef test_it():\n    scale()\n")
    result = project.run()
    assert result.counts == {"passed": 1}, "as without the plugin"
    assert result.summary("submitted") == 0, result.show()
    assert "only the default of the DSL" in result.stdout
    assert not artifacts(project)


def test_architectures_that_alternate_in_one_session(project: InnerProject) -> None:
    """Each object has the architecture that an in-process compile would have given it (hazard C25)."""
    project.write(
        "test_it.py",
        """
        import pytest
        from kernels import scale
        from pytest_quack.backends.cute_dsl import device_sm

        # The first two by option, the last by the environment.
        @pytest.mark.parametrize(("option", "sm"), [("--gpu-arch sm_100a", 100), ("--gpu-arch sm_80", 80), ("", 90)])
        def test_it(option, sm, tmp_path):
            path = tmp_path / "k.o"
            scale(f"--enable-tvm-ffi {option}").export_to_c(object_file_path=str(path), function_name="func")
            assert device_sm(path.read_bytes()) == sm
        """,
    )
    project.write("conftest.py", "import os\nos.environ['CUTE_DSL_ARCH'] = 'sm_90a'\nimport cutlass.cute\n")
    project.environ["CUTE_DSL_ARCH"] = "sm_120a"
    cold, warm = project.run(), project.run()
    for result in (cold, warm):
        assert result.counts == {"passed": 3}, result.show()
        assert_all_in_the_pool(result)
    assert (cold.summary("submitted"), warm.summary("submitted")) == (3, 0), cold.show()
    assert sorted(sidecar["arch"] for sidecar in artifacts(project).values()) == ["sm_100a", "sm_80", "sm_90a"]


HAZARDS = """
import os, pathlib, random, unittest
import pytest, torch
from kernels import affine

def log(event):
    with open(os.environ["SIDE_LOG"], "a") as file:
        file.write(f"{os.getpid()} {event}\\n")

def run(number, offset=0.0):
    y = torch.empty(2)
    affine(float(number), offset)(torch.ones(2), y)
    log(f"ran {number}")
    return float(y[0])

# C02
def test_subtests(subtests):
    with subtests.test(msg="trivial"):
        pass
    with subtests.test(msg="cold"):
        assert run(1) == 1.0

class TestCase(unittest.TestCase):
    def test_sub_test(self):
        with self.subTest("trivial"):
            pass
        with self.subTest("cold"):
            self.assertEqual(run(2), 2.0)

# C03
def test_raises_base_exception():
    with pytest.raises(BaseException):
        run(3)
        raise ValueError

def test_bare_except():
    try:
        result = run(4)
    except:
        result = None
    assert result == 4.0

def test_return_in_finally():
    try:
        run(5)
    finally:
        return

@pytest.mark.xfail(strict=True, reason="fails once its kernel has run")
def test_strict_xfail():
    run(6)
    assert False

@pytest.mark.xfail(strict=True, reason="passes once its kernel has run")
def test_strict_xfail_that_passes():
    run(7)

class Holder:
    def __del__(self):
        run(8)

def test_in_del():
    holder = Holder()
    del holder

# C06
class TestState:
    def test_instance(self):
        assert not hasattr(self, "seen")
        self.seen = True
        assert run(9) == 9.0

@pytest.mark.parametrize("values", [[]])
def test_around(values, monkeypatch, tmp_path):
    assert values == [] and "HAZARD" not in os.environ and not list(tmp_path.iterdir())
    values.append(1)
    monkeypatch.setenv("HAZARD", "1")
    (tmp_path / "file").write_text("x")
    drawn = random.random(), float(torch.rand(1))
    path = pathlib.Path(os.environ["SIDE_LOG"]).with_suffix(".drawn")
    if path.exists():
        assert path.read_text() == str(drawn)
    path.write_text(str(drawn))
    assert run(10) == 10.0
"""


def test_nothing_that_a_test_does_turns_a_deferral_into_a_result(project: InnerProject) -> None:
    """Hazards C02, C03 and C06, with compiles of the DSL's own."""
    project.write("test_it.py", HAZARDS)
    result = project.run("-W", "ignore::SyntaxWarning")
    assert result.counts == {"passed": 8, "xfailed": 1, "failed": 1}, result.show()
    assert result.outcomes["test_it::test_strict_xfail_that_passes"] == ["failure"]
    assert all(len(outcomes) == 1 for outcomes in result.outcomes.values())
    assert result.events == {f"ran {number}": 1 for number in range(1, 11)}, result.show()
    assert "CompilePending" not in result.stdout
    assert_all_in_the_pool(result)


def test_object_that_passes_its_checks_but_cannot_be_loaded_is_one_miss(project: InnerProject) -> None:
    project.write("test_it.py", TESTS)
    assert project.run("-k", "test_functools_cache").summary("submitted") == 2
    for path in project.cache.rglob("artifacts/*/*.o"):
        payload = b"\x7fELF" + bytes(len(path.read_bytes()) - 4)
        path.write_bytes(payload)
        sidecar = path.with_suffix(".json")
        text = json.loads(sidecar.read_text())
        sidecar.write_text(json.dumps({**text, "sha256": hashlib.sha256(payload).hexdigest()}))
    damaged = project.run("-k", "test_functools_cache")
    assert damaged.counts == {"passed": 2}, damaged.show()
    assert damaged.stdout.count("a damaged entry was set aside") == 2, damaged.show()
    assert (damaged.summary("hit"), damaged.summary("compiled in the test process")) == (0, 2), damaged.show()
    again = project.run("-k", "test_functools_cache")
    assert (again.counts, again.summary("hit"), again.summary("submitted")) == ({"passed": 2}, 2, 0), again.show()


def test_compile_that_raised_once_is_made_in_place_and_kept(project: InnerProject) -> None:
    """What another run remembers of a failure is a hint: it is taken back by the first compile that succeeds."""
    project.write("test_it.py", TESTS)
    assert project.run("-k", "test_own_dictionary").summary("submitted") == 1
    (key,) = artifacts(project)
    for path in [*project.cache.rglob(f"{key}.o"), *project.cache.rglob(f"{key}.json")]:
        path.unlink()
    from pytest_quack.cache.directory import CacheDirectory
    from pytest_quack.cache.store import Store

    (root,) = project.cache.rglob("v1")
    Store(CacheDirectory(root, is_writable=True)).note_failure(key)
    in_place = project.run("-k", "test_own_dictionary")
    assert in_place.counts == {"passed": 1}, in_place.show()
    assert in_place.summary("compiled in the test process") == 1, in_place.show()
    assert [*artifacts(project)] == [key]
    warm = project.run("-k", "test_own_dictionary")
    assert (warm.summary("hit"), warm.summary("submitted")) == (1, 0), warm.show()
    assert_all_in_the_pool(warm)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("raise RuntimeError('no engine today')", "no engine today"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV"),
    ],
)
def test_failed_self_check_leaves_all_to_the_compiler(project: InnerProject, body: str, reason: str) -> None:
    in_the_server(
        project,
        f"""
        from cutlass._mlir._mlir_libs._cutlass_ir import _execution_engine

        class Engine:
            def __init__(self, *args):
                {body}

        _execution_engine.BinaryExecutionEngine = Engine
        """,
    )
    project.write("test_it.py", TESTS)
    result = project.run("-k", "functools or plain_function or device_code")
    assert result.counts == {"passed": 4}, result.show()
    assert result.stdout.count("compiles are no longer intercepted: a check of the interception failed") == 1
    assert reason in result.stdout, result.show()


ODD = """
import copy
import os
import pathlib
import cutlass.base_dsl.compiler as compiler
import cutlass.cute as cute
import pytest
import torch
from cutlass import Int32
from cutlass.cute.runtime import nullptr
from cutlass.cutlass_dsl.cutlass import CuTeDSL
from kernels import *
from kernels import _affine

NULL = nullptr(Float32, AddressSpace.generic)

@cute.jit
def _with_default(x: cute.Tensor, y: cute.Tensor, p: cute.Pointer = NULL):
    for i in range(cute.size(x)):
        y[i] = x[i] * 9.25

def test_default_that_cannot_be_pickled():
    n, y = cute.sym_int(), torch.empty(8)
    cute.compile(_with_default, fake(n), fake(n), options=FFI)(X, y)
    assert torch.equal(y, X * 9.25)

def test_default_that_cannot_be_pickled_plain():
    y = torch.empty(8)
    cute.compile(_with_default, dynamic(X), dynamic(y))(dynamic(X), dynamic(y), NULL)
    assert torch.equal(y, X * 9.25)

class Unsupported:
    def __get_mlir_types__(self):
        return []
    def __extract_mlir_values__(self):
        return []
    def __new_from_mlir_values__(self, values):
        return self

@cute.jit
def _unsupported(x: cute.Tensor, config: Unsupported):
    x[0] = 1.0

def test_error_of_the_compiler_itself():
    with pytest.raises(Exception, match="Unsupported argument type"):
        cute.compile(_unsupported, fake(8), Unsupported(), options=FFI)

def object_of(kernel, tmp_path):
    path = tmp_path / "k.o"
    kernel.export_to_c(object_file_path=str(path), function_name="func")
    return path.read_bytes()

def test_pipeline_that_a_test_changes(monkeypatch, tmp_path):
    usual = CuTeDSL._get_pipeline
    first = object_of(scale(), tmp_path)
    monkeypatch.setattr(CuTeDSL, "_get_pipeline", lambda self, p: usual(self, p).replace("opt-level=3", "opt-level=0"))
    assert object_of(scale(), tmp_path) != first

def test_hook_that_sees_the_lowered_module():
    seen = []
    with compiler.PostCompileHookContext(CuTeDSL._get_dsl().compiler_provider, seen.append):
        cute.compile(_affine, dynamic(X), dynamic(torch.empty(8)), 2.0, 1.0)
    assert len(seen) == 1

def test_modes_of_torch():
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.set_default_device("meta")
    affine(11.0, 1.0)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.set_default_device(None)

def test_after_modes_of_torch():
    one = torch.ones(1)
    assert (one.dtype, one.device.type, torch.is_grad_enabled()) == (torch.float32, "cpu", True)

def test_what_is_returned(tmp_path):
    kernel = affine(12.0, 1.0)
    assert isinstance(kernel.ir_module, cute.core.ir.Module)
    with pytest.raises(TypeError):
        copy.copy(kernel.ir_module)
    with pytest.raises(AttributeError):
        kernel.export_to_c(tmp_path / "k.o", "func")
    with pytest.raises(TypeError, match="TVMFFIJitCompiledFunctionBase.export_to_c"):
        kernel.export_to_c("k.o", "func", no_such_option=1)

def test_experimental(monkeypatch):
    if os.environ.get("WARM"):
        monkeypatch.delattr(compiler.Compiler, "compile")
    from cutlass.cute import experimental

    y = torch.empty(8)
    experimental.compile(_affine, dynamic(X), dynamic(y), 13.0, 1.0)(dynamic(X), dynamic(y))
    assert torch.equal(y, X * 13.0 + 1.0)
"""


def test_odd_uses_are_as_without_the_plugin(project: InnerProject) -> None:
    project.write("test_it.py", ODD)
    plain, cold = project.run(jobs=None), project.run()
    project.environ["WARM"] = "1"
    warm = project.run()
    assert plain.counts == {"passed": 9, "warning": 1}, plain.show()
    for result in (cold, warm):
        assert result.counts == plain.counts, result.show()
        assert "no longer intercepted" not in result.stdout, result.show()
        assert "compiled in the test process" not in result.stdout, result.show()
    assert warm.summary("submitted") == 0, warm.show()
    assert cold.summary("submitted") == warm.summary("hit") == 7, cold.show()


@pytest.mark.parametrize("decorator", ["", "@functools.wraps(before)"])
def test_compiler_that_is_not_as_expected_is_left_alone_with_one_notice(project: InnerProject, decorator: str) -> None:
    project.write(
        "conftest.py",
        f"""
        import functools
        from cutlass.cutlass_dsl.cutlass import CutlassBaseDSL

        before = CutlassBaseDSL.compile_and_cache

        {decorator}
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
