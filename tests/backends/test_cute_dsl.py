"""The backend for CuTe DSL: what it exports computes the same after loading, and nothing foreign is loaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pytest_quack.cache.artifact import make_artifact
from pytest_quack.cache.store import Artifact, Sidecar
from pytest_quack.errors import ArtifactError, ExportError
from support.inner import ROOT, TESTS

cute = pytest.importorskip("cutlass.cute", reason="needs nvidia-cutlass-dsl")
torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("tvm_ffi", reason="needs apache-tvm-ffi")

from cutlass import AddressSpace, Float32  # noqa: E402 - after the check that there is one

from pytest_quack.backends.cute_dsl import BACKEND, device_sm  # noqa: E402


def fake(*, space: Any = AddressSpace.generic) -> Any:
    return cute.runtime.make_fake_compact_tensor(Float32, (cute.sym_int(),), memspace=space)


@cute.jit
def _affine(x: cute.Tensor, y: cute.Tensor, a: Float32):  # type: ignore[no-untyped-def]
    for i in range(cute.size(x)):
        y[i] = a * x[i] + Float32(1.0)


OPTIONS = {"tvm_ffi": "--enable-tvm-ffi", "cute": ""}


@pytest.fixture(scope="module", params=OPTIONS)
def compiled(request: pytest.FixtureRequest) -> tuple[str, Any]:
    options = OPTIONS[request.param]
    extra = {"options": options} if options else {}
    return request.param, cute.compile(_affine, fake(), fake(), Float32(1.0), **extra)


def artifact_of(compiled: Any, **changes: Any) -> Artifact:
    exported = BACKEND.export(compiled)
    target = BACKEND.target()
    sidecar = Sidecar(
        content_key="0" * 64,
        size_bytes=len(exported.payload),
        sha256="",
        backend=BACKEND.name,
        abi=exported.abi,
        arch=exported.arch,
        host_machine=target.host_machine,
        host_features=target.host_features,
        toolchain=dict(BACKEND.toolchain()),
        description="affine",
        compile_s=0.0,
    )
    return Artifact(replace(sidecar, **changes), exported.payload)


def run(kernel: Any, abi: str, x: Any, a: float) -> Any:
    y = torch.empty_like(x)
    if abi == "tvm_ffi":
        kernel(x, y, a)
    else:
        kernel(*(cute.runtime.from_dlpack(t).mark_layout_dynamic() for t in (x, y)), Float32(a))
    return y


def test_a_kernel_computes_the_same_after_export_and_load(compiled: tuple[str, Any]) -> None:
    abi, kernel = compiled
    artifact = artifact_of(kernel)
    assert (artifact.sidecar.abi, artifact.sidecar.arch) == (abi, "")
    loaded = BACKEND.load(artifact)
    for rows in (1, 7, 64):
        x = torch.linspace(-2, 2, rows)
        torch.testing.assert_close(run(loaded, abi, x, 3.0), 3.0 * x + 1.0)


def test_two_loads_are_two_kernels_that_both_work(compiled: tuple[str, Any]) -> None:
    abi, kernel = compiled
    artifact = artifact_of(kernel)
    first, second = BACKEND.load(artifact), BACKEND.load(artifact)
    x = torch.ones(3)
    del second
    torch.testing.assert_close(run(first, abi, x, 2.0), torch.full((3,), 3.0))


def test_loading_leaves_no_descriptor_open_and_no_file_behind(compiled: tuple[str, Any], tmp_path: Path) -> None:
    artifact = artifact_of(compiled[1])
    BACKEND.load(artifact)
    before = len(os.listdir("/proc/self/fd"))
    kernels = [BACKEND.load(artifact) for _ in range(5)]
    assert len(os.listdir("/proc/self/fd")) == before
    assert len(kernels) == 5


FOREIGN = {
    "another machine": ({"host_machine": "riscv128"}, r"made for riscv128, this machine is "),
    "a feature that is missing": ({"host_features": ("avx9", "zz")}, r"may use avx9, zz, which this CPU lacks"),
    "an unknown abi": ({"abi": "fortran"}, r"calling convention 'fortran' is unknown"),
}


@pytest.mark.parametrize(("changes", "words"), FOREIGN.values(), ids=FOREIGN)
def test_an_artifact_that_is_foreign_here_is_refused_with_the_reason(
    compiled: tuple[str, Any], changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ArtifactError, match=words):
        BACKEND.load(artifact_of(compiled[1], **changes))


@pytest.mark.parametrize("payload", [b"", b"no object", b"\x7fELF", b"\x7fELF" + bytes(100)])
@pytest.mark.parametrize("abi", ["tvm_ffi", "cute"])
def test_bytes_that_are_no_object_are_refused(compiled: tuple[str, Any], payload: bytes, abi: str) -> None:
    artifact = artifact_of(compiled[1], abi=abi)
    with pytest.raises(ArtifactError, match=r"not an object file|cannot be loaded"):
        BACKEND.load(Artifact(artifact.sidecar, payload))


@pytest.mark.parametrize("value", [1, None, lambda x: x, "text"])
def test_what_no_compiler_returned_is_refused_by_its_type(value: Any) -> None:
    with pytest.raises(ExportError, match=rf"must return what cute\.compile returns, not a {type(value).__name__}"):
        BACKEND.export(value)


def test_the_toolchain_names_what_shapes_the_output() -> None:
    toolchain = BACKEND.toolchain()
    assert {"nvidia-cutlass-dsl", "apache-tvm-ffi", "python"} <= toolchain.keys()
    assert toolchain["python"] == f"{sys.version_info.major}.{sys.version_info.minor}"


def test_an_object_without_device_code_has_no_sm_version(compiled: tuple[str, Any]) -> None:
    assert device_sm(BACKEND.export(compiled[1]).payload) is None
    assert device_sm(b"") is None
    assert device_sm(b"\x7fELF" * 3) is None


DEVICE = """
    import json
    import cutlass.cute as cute
    from cutlass import AddressSpace, Float32
    from pytest_quack.backends.cute_dsl import BACKEND, device_sm
    from pytest_quack.errors import TargetArchError

    def fake(space):
        return cute.runtime.make_fake_compact_tensor(Float32, (cute.sym_int(),), memspace=space)

    @cute.kernel
    def scale_kernel(x: cute.Tensor, a: Float32):
        x[cute.arch.thread_idx()[0]] *= a

    @cute.jit
    def scale(x: cute.Tensor, a: Float32):
        scale_kernel(x, a).launch(grid=[1, 1, 1], block=[32, 1, 1])

    @cute.jit
    def host(x: cute.Tensor, a: Float32):
        x[0] = a

    def export(function, space, **options):
        compiled = cute.compile(function, fake(space), Float32(1.0), **options)
        try:
            exported = BACKEND.export(compiled)
        except TargetArchError as error:
            return ["TargetArchError", str(error)]
        return [exported.arch, device_sm(exported.payload), exported.abi]

    said = {
        "device": export(scale, AddressSpace.gmem, options="--enable-tvm-ffi"),
        "host": export(host, AddressSpace.generic, options="--enable-tvm-ffi"),
        "target": BACKEND.target().arch,
        "worker": dict(BACKEND.worker_environ()),
        "options": BACKEND.options(),
    }
    print(json.dumps(said))
"""


def compile_for(tmp_path: Path, arch: str, **more: str) -> dict[str, Any]:
    script = tmp_path / "device.py"  # the DSL reads the source of what it compiles
    script.write_text(textwrap.dedent(DEVICE))
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("CUTE_DSL_", "CUDA_"))}
    environ.update(PYTHONPATH=os.pathsep.join([str(TESTS), str(ROOT)]), CUDA_VISIBLE_DEVICES="", **more)
    if arch:
        environ["CUTE_DSL_ARCH"] = arch
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


@pytest.mark.parametrize(("arch", "sm"), [("sm_90a", 90), ("sm_100a", 100)])
def test_the_arch_of_cross_compiled_device_code_is_read_out_of_the_object(tmp_path: Path, arch: str, sm: int) -> None:
    said = compile_for(tmp_path, arch)
    assert said["device"] == [arch, sm, "tvm_ffi"]
    assert said["host"] == ["", None, "tvm_ffi"]
    assert said["target"] == arch
    assert said["worker"] == {"CUTE_DSL_ARCH": arch}
    assert arch not in said["options"], "the arch is a part of the key of its own"


def test_device_code_without_a_gpu_and_an_arch_is_an_error_and_host_code_is_fine(tmp_path: Path) -> None:
    said = compile_for(tmp_path, "")
    kind, message = said["device"]
    assert kind == "TargetArchError"
    for words in ("only the default of the DSL", "--compile-arch", "sm_90a", "CUTE_DSL_ARCH"):
        assert words in message
    assert said["host"] == ["", None, "tvm_ffi"]
    assert said["target"] == ""
    assert said["worker"] == {}


def test_an_option_variable_changes_the_options_and_a_folder_does_not(tmp_path: Path) -> None:
    plain = compile_for(tmp_path, "sm_90a")["options"]
    assert compile_for(tmp_path, "sm_90a", CUTE_DSL_LINEINFO="1")["options"] != plain
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    assert compile_for(folder, "sm_90a", CUTE_DSL_CACHE_DIR=str(folder))["options"] == plain


def test_compile_process_does_without_torch_and_compiles_the_same() -> None:
    script = """
import importlib, sys
from hashlib import sha256
from pytest_quack.backends.cute_dsl import BACKEND

if sys.argv[1] == "worker":
    BACKEND.prepare_worker()
for name in BACKEND.worker_preload():
    importlib.import_module(name)
exported = BACKEND.check_interception()
print("torch" in sys.modules, sha256(exported.payload).hexdigest(), flush=True)
import torch  # code that needs it can still have it
"""
    found = {}
    for role in ("worker", "test process"):
        done = subprocess.run(
            [sys.executable, "-c", script, role],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        )
        found[role] = done.stdout.split()
    assert found["worker"][0] == "False"
    assert found["test process"] == ["True", found["worker"][1]]


def test_libraries_that_device_code_is_linked_with_count_by_content(tmp_path: Path) -> None:
    from cutlass.base_dsl.compiler import CompileOptions, LinkLibraries

    from pytest_quack.backends.cute_trace import linked, name_libraries_once

    options = CompileOptions()
    assert linked(options) == ()
    library = tmp_path / "library.bc"
    options.options[LinkLibraries] = LinkLibraries(f"{library},missing.bc")
    found = []
    for content in (None, b"one", b"two", b"one"):
        if content is not None:
            library.write_bytes(content)
        found.append(linked(options))
    assert [[name for name, _ in linked] for linked in found] == [[str(library), "missing.bc"]] * 4
    assert len(set(found)) == 3
    assert found[1] == found[3]
    options.options[LinkLibraries] = LinkLibraries("a.bc,b.bc,a.bc")  # as the DSL leaves it after two traces
    name_libraries_once(options)
    assert options.options[LinkLibraries].value == "a.bc,b.bc"


@pytest.mark.parametrize(("added", "kind"), [(0, "_LazyOperation"), (1, "Operation")])
def test_module_of_a_kernel_with_added_arguments_is_the_real_one_when_asked(added: int, kind: str) -> None:
    from pytest_quack.backends.cute_check import _Once, _TakenError

    def compile_it() -> Any:
        return cute.compile(_affine, fake(), fake(), Float32(1.0), options="--enable-tvm-ffi")

    once = _Once()
    seam = BACKEND.interception(once, pytest.fail)
    seam.install()
    try:
        with pytest.raises(_TakenError):
            compile_it()
        assert once.taken is not None
        content_key, payload = once.taken
        exported = BACKEND.lower(payload, content_key)
        extra = {**exported.extra, "total_added_arguments": added}
        once.artifact = make_artifact(BACKEND, replace(exported, extra=extra), description="affine", compile_s=0.0)
        assert type(compile_it().ir_module.operation).__name__ == kind
    finally:
        seam.remove()
