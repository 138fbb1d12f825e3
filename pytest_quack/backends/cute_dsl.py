"""The backend for CuTe DSL (nvidia-cutlass-dsl), with and without TVM-FFI.

Kernels are exported and loaded through the DSL's own export; nothing of the DSL is imported before a kernel needs it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import struct
import sys
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from pytest_quack.backends import Exported, Resolver, Target
from pytest_quack.backends.cute_seam import ORIGIN, Seam, guessed_arch_text, plain_compile
from pytest_quack.backends.cute_trace import FUNCTION, Trace, export, export_tvm_ffi, extra_of, load_trace, lower
from pytest_quack.backends.host import host_features, missing_features
from pytest_quack.cache.artifact import environment_parts
from pytest_quack.cache.store import Artifact
from pytest_quack.errors import ArtifactError, ExportError, TargetArchError

_ARCH_VARIABLE: Final = "CUTE_DSL_ARCH"
_ELF: Final = b"\x7fELF"
_EM_CUDA: Final = 190
_DISTRIBUTIONS: Final = (
    "nvidia-cutlass-dsl",
    "nvidia-cutlass-dsl-libs-base",
    "nvidia-cutlass-dsl-libs-core",
    "nvidia-cutlass-dsl-libs-cu12",
    "nvidia-cutlass-dsl-libs-cu13",
    "apache-tvm-ffi",
)
# Settings that only say where things are or what is printed, and so must not tell two machines apart.
_NOT_OUTPUT: Final = re.compile(r"(?:shared_libs|arch)=(?:'[^']*'|\"[^\"]*\"|[^;]*);")


class CuteDslBackend:
    """See `pytest_quack.backends.Backend`."""

    name = "cute_dsl"

    def toolchain(self) -> Mapping[str, str]:
        return _versions()

    def options(self) -> str:
        dsl = _dsl()
        describe = getattr(dsl.envar, "cache_key_str", None)
        if describe is not None:
            text = _NOT_OUTPUT.sub("", describe())
        else:  # before 4.7 the DSL has no such text: its variables are what it would hold
            names = sorted(name for name in os.environ if name.startswith("CUTE_DSL_") and name != _ARCH_VARIABLE)
            text = "".join(f"{name}={os.environ[name]!r};" for name in names)
        return text + _library_digests()

    def target(self) -> Target:
        return Target(_arch(), platform.machine(), host_features())

    def export(self, compiled: Any) -> Exported:
        origin = getattr(compiled, ORIGIN, None)
        if origin is not None and origin.trace.abi != "cute_traced":
            return _export_traced(compiled)
        payload, abi = _object_of(compiled)
        if not payload.startswith(_ELF):
            raise ExportError(f"the export of {type(compiled).__name__} is not an object file")
        return Exported(payload, abi, _arch_of_device_code(payload, _arch()))

    def interception(self, resolver: Resolver, notice: Callable[[str], None]) -> Seam:
        return Seam(
            key_parts=functools.cache(lambda: environment_parts(self)),
            options=self.options,
            arch=_arch,
            export=_export_traced,
            resolver=resolver,
            notice=notice,
        )

    def lower(self, payload: bytes, content_key: str) -> Exported:
        trace = load_trace(payload)
        lowered = lower(trace, plain_compile())
        arch = _arch_of_device_code(lowered.payload, _named_arch(trace))
        return Exported(lowered.payload, trace.abi, arch, content_key, lowered.extra)

    def check_interception(self) -> Exported:
        from pytest_quack.backends.cute_check import check

        return check(self)

    def load(self, artifact: Artifact) -> Callable[..., Any]:
        sidecar = artifact.sidecar
        if sidecar.host_machine != platform.machine():
            raise ArtifactError(f"it was made for {sidecar.host_machine}, this machine is {platform.machine()}")
        missing = missing_features(sidecar.host_features)
        if missing:
            raise ArtifactError(f"its host code may use {', '.join(missing)}, which this CPU lacks")
        if sidecar.abi not in {"tvm_ffi", "cute"}:
            raise ArtifactError(f"its calling convention {sidecar.abi!r} is unknown")
        if not artifact.payload.startswith(_ELF):
            raise ArtifactError("it is not an object file")
        return _load_object(artifact.payload, is_tvm_ffi=sidecar.abi == "tvm_ffi")

    def worker_environ(self) -> Mapping[str, str]:
        arch = _arch()
        return {_ARCH_VARIABLE: arch} if arch else {}

    def prepare_worker(self) -> None:
        """Keep the DSL from the driver: importing it calls cuInit, even where an architecture is named.

        Measured on an H200 with 4.8.1: a second cuInit in a forked process, after one that found no device, crashes
        about every second process.
        """
        _import_tvm_ffi_alone()
        try:
            import cuda.bindings.driver as driver
        except ImportError:
            return
        driver.cuInit = lambda flags: (driver.CUresult.CUDA_ERROR_NO_DEVICE,)

    def pin_worker(self, pinned: Mapping[str, str]) -> None:
        """The DSL reads its variable when it is imported."""
        arch = pinned.get(_ARCH_VARIABLE)
        if arch is not None and "cutlass" in sys.modules:
            _dsl().envar.arch = arch
        _arch.cache_clear()

    def worker_preload(self) -> tuple[str, ...]:
        return ("cutlass.cute", "tvm_ffi")

    def heralds(self) -> frozenset[str]:
        """torch comes first in most suites, and takes as long to import as the DSL does."""
        return frozenset({"cutlass", "torch"}) if importlib.util.find_spec("cutlass") else frozenset()


BACKEND: Final = CuteDslBackend()


def _import_tvm_ffi_alone() -> None:
    """Import tvm_ffi without torch, which it imports where there is one, to pass tensors faster.

    That takes seconds and hundreds of megabytes, and no compile passes tensors. Code that does still can, if slower.
    """
    if importlib.util.find_spec("tvm_ffi") is None or {"torch", "tvm_ffi"} & sys.modules.keys():
        return
    sys.modules["torch"] = None  # type: ignore[assignment] # makes an import of it fail
    try:
        importlib.import_module("tvm_ffi")
    except ImportError:
        pass  # imported as ever when a compile needs it, and reported if it fails then
    finally:
        del sys.modules["torch"]


def _export_traced(compiled: Any) -> Exported:
    """A function that the seam has seen, under its content key."""
    origin = getattr(compiled, ORIGIN)
    if origin.artifact is not None:
        sidecar = origin.artifact.sidecar
        return Exported(origin.artifact.payload, sidecar.abi, sidecar.arch, origin.content_key, sidecar.extra)
    try:
        payload = export(compiled, origin.trace)
    except Exception as error:  # whatever the DSL raises is the reason why this cannot be exported
        raise ExportError(f"its {type(compiled).__name__} cannot be exported ({error})") from error
    arch = _arch_of_device_code(payload, _named_arch(origin.trace))
    return Exported(payload, origin.trace.abi, arch, origin.content_key, extra_of(compiled))


def _named_arch(trace: Trace) -> str:
    """The architecture that something has named for a trace; empty where it is the DSL's guess."""
    return trace.target if trace.target != trace.arch else _arch()


def _arch_of_device_code(payload: bytes, named: str) -> str:
    """Raises TargetArchError where device code was compiled and nothing has named for what."""
    compiled_for = device_sm(payload)
    if compiled_for is None:
        return ""
    default = str(_dsl().envar.arch)
    if not named and default.rstrip("af") == f"sm_{compiled_for}":
        raise TargetArchError(guessed_arch_text(default))
    return named if named.rstrip("af") == f"sm_{compiled_for}" else f"sm_{compiled_for}"


def device_sm(payload: bytes) -> int | None:
    """The SM version of the device code in an object, such as 90; None where it holds none.

    Device code is a CUDA ELF image inside the object. Its header flags hold the version in the lowest byte up to CUDA
    12's format and in the second byte from ABI version 8 on.
    """
    at = payload.find(_ELF, 4)
    while at != -1:
        if len(payload) >= at + 52 and struct.unpack_from("<H", payload, at + 18)[0] == _EM_CUDA:
            flags = int(struct.unpack_from("<I", payload, at + 48)[0])
            return (flags >> 8) & 0xFF if payload[at + 8] >= 8 else flags & 0xFF
        at = payload.find(_ELF, at + 4)
    return None


def _dsl() -> Any:
    import cutlass.cute  # noqa: F401 - the class below is complete only after this
    from cutlass.cutlass_dsl.cutlass import CuTeDSL

    return CuTeDSL._get_dsl()


@functools.cache
def _versions() -> dict[str, str]:
    found = {}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    found["python"] = f"{sys.version_info.major}.{sys.version_info.minor}"
    return found


@functools.cache
def _arch() -> str:
    """The architecture that this process compiles for; empty where the DSL would only guess."""
    dsl = _dsl()
    arch = str(dsl.envar.arch)
    if os.environ.get(_ARCH_VARIABLE):
        return arch
    try:
        from cutlass.base_dsl.runtime.cuda import get_compute_capability_major_minor
    except ImportError:
        return arch
    try:
        has_gpu = get_compute_capability_major_minor() != (None, None)
    except Exception:  # noqa: BLE001 - no driver, no device: the DSL takes any error for "cannot tell", so do we
        has_gpu = False
    return arch if has_gpu else ""


@functools.cache
def _library_digests() -> str:
    """Libraries that objects are linked with and that are not part of the DSL's own distribution, by content."""
    import cutlass

    own = str(Path(cutlass.__file__).resolve().parents[2])
    found = []
    for name in _dsl().get_shared_libs():
        path = Path(name).resolve()
        if not str(path).startswith(own) and path.is_file():
            found.append(f"{path.name}={sha256(path.read_bytes()).hexdigest()};")
    return "".join(sorted(found))


def _object_of(compiled: Any) -> tuple[bytes, str]:
    if not hasattr(compiled, "export_to_c"):
        raise ExportError(
            f"a compile function must return what cute.compile returns, not a {type(compiled).__name__}: it has no "
            "export_to_c, so it cannot be stored or shared between processes"
        )
    try:
        if _is_tvm_ffi(compiled):
            return export_tvm_ffi(compiled), "tvm_ffi"
        return bytes(compiled.dump_to_object(FUNCTION)), "cute"
    except Exception as error:  # whatever the DSL raises is the reason why this cannot be exported
        raise ExportError(f"its {type(compiled).__name__} cannot be exported ({error})") from error


def _is_tvm_ffi(compiled: Any) -> bool:
    return any(kind.__name__ == "TVMFFIJitCompiledFunctionBase" for kind in type(compiled).__mro__)


def _load_object(payload: bytes, *, is_tvm_ffi: bool) -> Callable[..., Any]:
    """Load from bytes that were checked, not from a path that somebody may have replaced since."""
    from cutlass.base_dsl.export.external_binary_module import ExternalBinaryModule

    descriptor = os.memfd_create("quack-kernel", os.MFD_CLOEXEC)
    try:
        view = memoryview(payload)
        while view:
            view = view[os.write(descriptor, view) :]
        module = ExternalBinaryModule(f"/proc/self/fd/{descriptor}", enable_tvm_ffi=is_tvm_ffi)
        kernel: Callable[..., Any] = module[FUNCTION]
    except Exception as error:  # the loader raises errors of several libraries; each means that it cannot be used
        raise ArtifactError(f"it cannot be loaded ({error})") from error
    finally:
        os.close(descriptor)
    return kernel
