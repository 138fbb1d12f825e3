"""What the DSL compiles once a function is traced: the module and all that shapes the object made of it.

A trace has a content key, which another process computes alike, and can be sent to a compile process as bytes.
Nothing here is patched; `cute_seam` takes traces where the DSL is about to compile them.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import inspect
import io
import pickle
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from pytest_quack.cache import key as canonical
from pytest_quack.errors import UnkeyableError

FUNCTION: Final = "func"
# Options that change the object or nothing at all. One that is set and is not here (dumps, remarks, targets of another
# kind) makes the compile the DSL's own: it may be wanted for what it leaves on disk.
_KNOWN_OPTIONS: Final = frozenset(
    {
        "OptLevel",
        "EnablePYIR",
        "FrontendNext",
        "ExtraCompilerOpts",
        "PtxasOptions",
        "RDC",
        "EnableAssertions",
        "GenerateLineInfo",
        "NvdisasmOptions",
        "GPUArch",
        "LinkLibraries",
        "EnableTVMFFI",
        "DumpDir",
    }
)
# Settings of the environment under which the DSL leaves files, prints, or does not compile at all.
_KNOWN_BY_NAME: Final = ("keep_ir", "keep_ir_clean", "print_ir", "dryrun", "jit_time_profiling", "loc_tracebacks")


@dataclasses.dataclass(frozen=True, slots=True)
class Trace:
    """One traced function, as plain data.

    Attributes:
        dsl: the name of the DSL's class.
        bytecode: the module, with its locations.
        function_name, display_name: mangled and as written.
        pipeline: as given to the compile; None for the default.
        options: pickled compile options.
        num_kernels, kernel_info: what the trace has counted.
        spec: pickled description of the arguments for TVM-FFI; None for a plain function.
    """

    dsl: str
    bytecode: bytes = dataclasses.field(repr=False)
    function_name: str
    display_name: str | None
    pipeline: str | None
    options: bytes = dataclasses.field(repr=False)
    num_kernels: int
    kernel_info: bytes = dataclasses.field(repr=False)
    spec: bytes | None = dataclasses.field(repr=False)

    @property
    def abi(self) -> str:
        return "cute_traced" if self.spec is None else "tvm_ffi"


def why_not(dsl: Any) -> str | None:
    """Why the DSL must compile this for itself; None where it need not."""
    for kind, option in dsl.compile_options.options.items():
        if kind.__name__ in _KNOWN_OPTIONS:
            continue
        if option.value != kind(kind._default).value:
            return f"the option {kind.__name__} is set"
    for name in _KNOWN_BY_NAME:
        if getattr(dsl.envar, name, False):
            return f"{name} is set"
    backend = getattr(dsl.envar, "compiler_backend", "legacy")
    return None if backend == "legacy" else f"the compiler backend is {backend}"


def take(dsl: Any, arguments: dict[str, Any]) -> tuple[Trace, Any]:
    """The trace of a compile that is about to happen, and its TVM-FFI spec (None for a plain function).

    `arguments` are those of the DSL's `compile_and_cache`. Raises UnkeyableError where part of it cannot be sent.
    """
    spec = ffi_spec(dsl, arguments) if dsl.compile_options.enable_tvm_ffi else None
    try:
        trace = Trace(
            dsl=type(dsl).__name__,
            bytecode=_bytecode(arguments["module"]),
            function_name=arguments["function_name"],
            display_name=arguments.get("original_function_name"),
            pipeline=arguments["pipeline"],
            options=pickle.dumps(dsl.compile_options),
            num_kernels=dsl.num_kernels,
            kernel_info=pickle.dumps(dict(dsl.kernel_info)),
            spec=None if spec is None else pickle.dumps(spec),
        )
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise UnkeyableError(f"what it was traced with cannot be sent to another process ({error})") from error
    return trace, spec


def ffi_spec(dsl: Any, arguments: dict[str, Any]) -> Any:
    """What the DSL derives from the arguments of a TVM-FFI function."""
    converter = dsl._tvm_ffi_args_spec_converter
    if converter is None:
        from cutlass.cute._tvm_ffi_args_spec_converter import attach_args_spec_converter

        attach_args_spec_converter(dsl)
        converter = dsl._tvm_ffi_args_spec_converter
    signature = arguments["signature"]
    return converter(arguments["function_name"], signature, arguments["full_args"], arguments["full_kwargs"])


def content_parts(dsl: Any, module: Any, trace: Trace, spec: Any, options: str) -> dict[str, bytes]:
    """The labelled parts of a content key that come from the trace; `options` are the backend's settings in force."""
    compile_options = dsl.compile_options
    arch = compile_options.gpu_arch or dsl.envar.arch or ""
    pipeline = dsl.preprocess_pipeline(dsl._get_pipeline(trace.pipeline), arch)
    # Line numbers are in the object only where something asks for them.
    has_lines = any(_option(compile_options, name) for name in ("GenerateLineInfo", "EnableAssertions"))
    has_lines = has_lines or getattr(compile_options, "debug_launch_check", False)
    return {
        "kind": b"trace",
        "module": trace.bytecode if has_lines else _bytecode(_stripped(module)),
        "pipeline": pipeline.encode(),
        "flags": compile_options.to_str().encode(),
        "names": canonical.encode((trace.dsl, trace.function_name, trace.display_name, trace.num_kernels > 0)),
        "arch": arch.encode(),
        "spec": b"" if spec is None else canonical.encode(_describe(spec, {})),
        "options": options.encode(),
        "abi": trace.abi.encode(),
    }


def _option(compile_options: Any, name: str) -> Any:
    return next((o.value for kind, o in compile_options.options.items() if kind.__name__ == name), None)


def _bytecode(module: Any) -> bytes:
    out = io.BytesIO()
    module.operation.write_bytecode(out)
    return out.getvalue()


def _stripped(module: Any) -> Any:
    """A copy of the module without locations."""
    from cutlass._mlir import ir
    from cutlass._mlir.passmanager import PassManager

    with module.context, ir.Location.unknown():
        copy = ir.Module.parse(_bytecode(module))
        PassManager.parse("builtin.module(strip-debuginfo)").run(copy.operation)
    return copy


def _describe(value: Any, seen: dict[int, int]) -> Any:
    """Nested tuples that say what a TVM-FFI spec says: of objects their attributes, once, and which are the same."""
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return value
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, *(_describe(part, seen) for part in value))
    if isinstance(value, dict):
        return ("dict", *((_describe(k, seen), _describe(v, seen)) for k, v in value.items()))
    if isinstance(value, type):
        return ("type", value.__module__, value.__qualname__)
    if hasattr(value, "__code__"):
        captured = [cell.cell_contents for cell in value.__closure__ or ()]
        code = canonical.encode_code(value.__code__)
        return ("function", value.__module__, value.__qualname__, code, _describe(captured, seen))
    if id(value) in seen:
        return ("seen", seen[id(value)])
    seen[id(value)] = len(seen)
    if hasattr(value, "__dict__") and type(value).__module__.startswith("cutlass."):
        return (type(value).__qualname__, _describe(vars(value), seen))
    return (type(value).__qualname__, str(value))


@dataclasses.dataclass(frozen=True, slots=True)
class Lowered:
    """The compiled function that the DSL returned for a trace, its object, and what a hit must know besides."""

    function: Any
    payload: bytes = dataclasses.field(repr=False)
    extra: dict[str, Any]


def lower(trace: Trace, compile_and_cache: Callable[..., Any]) -> Lowered:
    """Compile a trace with the DSL's own function, in whichever process this is."""
    from cutlass._mlir import ir
    from cutlass.cutlass_dsl import cutlass as dsl_module

    dsl = getattr(dsl_module, trace.dsl)._get_dsl()
    _load_libraries(tuple(dsl.get_shared_libs()))
    with ir.Context() as context, ir.Location.unknown(), contextlib.ExitStack() as stack:
        context.enable_multithreading(False)
        stack.callback(dsl.post_compilation_cleanup)
        dsl.compile_options = pickle.loads(trace.options)
        dsl.num_kernels = trace.num_kernels
        dsl.kernel_info = pickle.loads(trace.kernel_info)
        if trace.spec is not None:
            spec = _without_keywords(pickle.loads(trace.spec))
            stack.enter_context(swapped(dsl, "_tvm_ffi_args_spec_converter", lambda *_: spec))
        function = compile_and_cache(
            dsl,
            module=ir.Module.parse(trace.bytecode),
            module_hash=None,
            function_name=trace.function_name,
            pipeline=trace.pipeline,
            signature=inspect.Signature(),
            no_cache=True,
            no_jit_engine=True,
            full_args=(),
            full_kwargs={},
            dynamic_args=[],
            dynamic_kwargs={},
            original_function_name=trace.display_name,
        )
        return Lowered(function, export(function, trace.abi), extra_of(function))


def extra_of(function: Any) -> dict[str, Any]:
    """What the DSL has read from the lowered module, which a function over a loaded object lacks."""
    return {
        "kernel_extra_args": dict(getattr(function, "kernel_extra_args", {})),
        "total_added_arguments": int(getattr(function, "total_added_arguments", 0)),
    }


def load_trace(payload: bytes) -> Trace:
    trace = pickle.loads(payload)
    assert isinstance(trace, Trace)
    return trace


def export(function: Any, abi: str) -> bytes:
    """The object of a compiled function under the name `FUNCTION`."""
    if abi == "tvm_ffi":
        with tempfile.TemporaryDirectory(prefix="quack-export-") as folder:
            path = Path(folder) / f"{FUNCTION}.o"
            function.export_to_c(object_file_path=str(path), function_name=FUNCTION)
            return path.read_bytes()
    return bytes(function.dump_to_object(FUNCTION))


def _without_keywords(spec: Any) -> Any:
    """The spec as for a function without keyword arguments: how Python calls it is for the asking process to know."""
    params, wrapper, *rest = spec
    wrapper = wrapper._replace(**{name: type(getattr(wrapper, name))() for name in wrapper._fields})
    return (params, wrapper, *([] for _ in rest))


@functools.cache
def _load_libraries(names: tuple[str, ...]) -> None:
    """Objects are written against the symbols that the process has."""
    for name in names:
        ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)


@contextlib.contextmanager
def swapped(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Give an object another attribute for a while."""
    had, before = name in vars(owner), getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if had:
            setattr(owner, name, before)
        else:
            delattr(owner, name)
