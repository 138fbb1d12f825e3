"""What the DSL compiles once a function is traced: the module and all that shapes the object made of it.

A trace has a content key, which another process computes alike, and can be sent to a compile process as bytes.
Nothing here is patched; `cute_seam` takes traces where the DSL is about to compile them.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import dataclasses
import functools
import inspect
import io
import pickle
import re
import tempfile
from collections.abc import Callable, Iterator
from hashlib import sha256
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
_ADDRESS: Final = re.compile(r" at 0x[0-9a-f]{6,}")
_PLAIN: Final = (int, float, str, bytes)
# Settings of the environment under which the DSL leaves files, prints, or does not compile at all.
_KNOWN_BY_NAME: Final = ("keep_ir", "keep_ir_clean", "print_ir", "dryrun", "jit_time_profiling", "loc_tracebacks")


@dataclasses.dataclass(frozen=True, slots=True)
class Trace:
    """One traced function, without anything of the process that traced it: it can be pickled, or says why not.

    Attributes:
        dsl: the name of the DSL's class.
        bytecode: the module, without locations unless the object shows them.
        function_name, display_name: mangled and as written.
        pipeline: the passes, as this process would run them.
        options: the compile options.
        num_kernels, kernel_info: what the trace has counted.
        arch: the architecture in force in the asking process.
        target: the architecture that it is compiled for: the options may name another.
        spec: what the DSL derives from the arguments for TVM-FFI; None for a plain function.
        signature: of a plain function, as the DSL writes it into an object; None where it cannot be written.
    """

    dsl: str
    bytecode: bytes = dataclasses.field(repr=False)
    function_name: str
    display_name: str | None
    pipeline: str
    options: Any = dataclasses.field(repr=False)
    num_kernels: int
    kernel_info: dict[Any, Any] = dataclasses.field(repr=False)
    arch: str
    target: str
    spec: Any = dataclasses.field(repr=False)
    signature: bytes | None = dataclasses.field(repr=False)

    @property
    def abi(self) -> str:
        """How the object is called; "cute_traced" only with the signature that the asking process has."""
        if self.spec is not None:
            return "tvm_ffi"
        return "cute" if self.signature is not None else "cute_traced"

    def dump(self) -> bytes:
        """As bytes, for another process. Raises UnkeyableError where part of it cannot be sent."""
        try:
            return pickle.dumps(dataclasses.replace(self, spec=_without_keywords(self.spec)))
        except Exception as error:  # pickling runs foreign code, which may raise anything
            raise UnkeyableError(f"what it was traced with cannot be sent to another process ({error})") from error


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
    if getattr(dsl.compiler_provider, "_post_compile_hook", None) is not None:
        return "a hook is to see the lowered module"
    backend = getattr(dsl.envar, "compiler_backend", "legacy")
    return None if backend == "legacy" else f"the compiler backend is {backend}"


def take(dsl: Any, arguments: dict[str, Any]) -> Trace:
    """The trace of a compile that is about to happen; `arguments` are those of the DSL's `compile_and_cache`."""
    options, arch = dsl.compile_options, str(dsl.envar.arch or "")
    name_libraries_once(options)
    spec = ffi_spec(dsl, arguments) if options.enable_tvm_ffi else None
    return Trace(
        dsl=type(dsl).__name__,
        bytecode=_bytecode(arguments["module"], with_locations=_shows_locations(options)),
        function_name=arguments["function_name"],
        display_name=arguments.get("original_function_name"),
        pipeline=dsl._get_pipeline(arguments["pipeline"]),
        options=options,
        num_kernels=dsl.num_kernels,
        kernel_info=dict(dsl.kernel_info),
        arch=arch,
        target=options.gpu_arch or arch,
        spec=spec,
        signature=_written(arguments["signature"]) if spec is None else None,
    )


def _called(signature: inspect.Signature) -> inspect.Signature:
    """The signature that a plain compiled function has: without what was constant, with the status of a launch."""
    from cutlass import Int32
    from cutlass.base_dsl.jit_executor import ExecutionArgs

    called: inspect.Signature = ExecutionArgs(signature, FUNCTION).signature
    return called.replace(return_annotation=Int32)


def _written(signature: inspect.Signature) -> bytes | None:
    """A signature as `dump_to_object` writes it; None where that fails, as for classes local to a function."""
    from cutlass.cute.export import _CudaDialectJitCompiledFunction as Function

    try:
        return bytes(Function.export_provider.signature_processor.dumps(_called(signature)))
    except Exception:  # noqa: BLE001 - pickling runs foreign code, which may raise anything
        return None


def ffi_spec(dsl: Any, arguments: dict[str, Any]) -> Any:
    """What the DSL derives from the arguments of a TVM-FFI function."""
    converter = dsl._tvm_ffi_args_spec_converter
    if converter is None:
        from cutlass.cute._tvm_ffi_args_spec_converter import attach_args_spec_converter

        attach_args_spec_converter(dsl)
        converter = dsl._tvm_ffi_args_spec_converter
    signature = arguments["signature"]
    return converter(arguments["function_name"], signature, arguments["full_args"], arguments["full_kwargs"])


def content_parts(dsl: Any, signature: inspect.Signature, trace: Trace, options: str) -> dict[str, bytes]:
    """The labelled parts of a content key that come from the trace; `options` are the backend's settings in force.

    Raises UnkeyableError where part of it has no text that is the same in every process.
    """
    pipeline = dsl.preprocess_pipeline(trace.pipeline, trace.target)
    return {
        "kind": b"trace",
        "module": trace.bytecode,
        "pipeline": pipeline.encode(),
        "flags": trace.options.to_str().encode(),
        "names": canonical.encode((trace.dsl, trace.function_name, trace.display_name, trace.num_kernels > 0)),
        "arch": trace.target.encode(),
        "libraries": canonical.encode(linked(trace.options)),
        "kernels": _text(trace.kernel_info),
        "spec": _text(_without_keywords(trace.spec)),
        "signature": b"" if trace.signature is None else _text(_signature_parts(_called(signature))),
        "options": options.encode(),
        "abi": trace.abi.encode(),
    }


def _shows_locations(compile_options: Any) -> bool:
    """Whether line numbers get into the object."""
    if getattr(compile_options, "debug_launch_check", False):
        return True
    return any(
        kind.__name__ in {"GenerateLineInfo", "EnableAssertions"} and bool(option.value)
        for kind, option in compile_options.options.items()
    )


def _bytecode(module: Any, *, with_locations: bool) -> bytes:
    from cutlass._mlir import ir
    from cutlass._mlir.passmanager import PassManager

    out = io.BytesIO()
    with module.context, ir.Location.unknown():
        operation = module.operation
        if not with_locations:
            operation = operation.clone()
            strip = PassManager.parse("builtin.module(strip-debuginfo)")
            strip.enable_verifier(False)  # it was verified when it was traced, and is again before it is lowered
            strip.run(operation)
        operation.write_bytecode(out)
    return out.getvalue()


def _describe(value: Any, seen: dict[int, int]) -> Any:
    """Nested tuples of plain values, told apart by their `repr`, that say what a TVM-FFI spec says.

    Of objects their attributes, once, and which are the same.
    """
    if value is None or type(value) is bool or type(value) in _PLAIN:
        return value
    for plain in _PLAIN:
        if isinstance(value, plain):  # of a class of its own, which may print anything
            return (type(value).__qualname__, plain.__repr__(value))
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


def _text(value: Any) -> bytes:
    text = repr(_describe(value, {}))
    address = _ADDRESS.search(text)
    if address is not None:
        excerpt = text[max(0, address.start() - 40) : address.end()]
        raise UnkeyableError(f"its arguments hold a value whose text is another in each process (...{excerpt})")
    return text.encode()


def _signature_parts(signature: inspect.Signature) -> Any:
    parameters = [(p.name, p.kind.name, p.default, p.annotation) for p in signature.parameters.values()]
    return (*parameters, signature.return_annotation)


def name_libraries_once(options: Any) -> None:
    """Leave each library once in the options: the DSL adds those of a function to shared options at each trace."""
    kind, names = _libraries(options)
    if kind is not None and len(names) != len(set(names)):
        options.options[kind] = kind(",".join(dict.fromkeys(names)))


def linked(options: Any) -> tuple[tuple[str, str], ...]:
    """The libraries that device code is linked with, by content."""
    paths = [Path(name) for name in _libraries(options)[1]]
    return tuple((str(path), sha256(path.read_bytes()).hexdigest() if path.is_file() else "") for path in paths)


def _libraries(options: Any) -> tuple[Any, list[str]]:
    for kind, option in options.options.items():
        if kind.__name__ == "LinkLibraries":
            return kind, [name for name in (option.value or "").split(",") if name]
    return None, []


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
        dsl.compile_options = copy.deepcopy(trace.options)
        stack.enter_context(swapped(dsl.envar, "arch", trace.arch))
        dsl.num_kernels = trace.num_kernels
        dsl.kernel_info = dict(trace.kernel_info)
        if trace.spec is not None:
            spec = _without_keywords(trace.spec)
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
        return Lowered(function, export(function, trace), extra_of(function))


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


def export(function: Any, trace: Trace) -> bytes:
    """The object of a compiled function under the name `FUNCTION`, as the asking process would export it."""
    if trace.abi == "tvm_ffi":
        return export_tvm_ffi(function)
    provider = copy.copy(function.export_provider)
    provider.signature_processor = _Written(trace.signature or _written(inspect.Signature()) or b"")
    with swapped(function, "export_provider", provider):
        return bytes(function.dump_to_object(FUNCTION))


def export_tvm_ffi(function: Any) -> bytes:
    """The object of a function with TVM-FFI, which the DSL only writes to files."""
    with tempfile.TemporaryDirectory(prefix="quack-export-") as folder:
        path = Path(folder) / f"{FUNCTION}.o"
        function.export_to_c(object_file_path=str(path), function_name=FUNCTION)
        return path.read_bytes()


class _Written:
    """Stands in for the DSL's signature processor where the signature is known only as it is written."""

    def __init__(self, signature: bytes) -> None:
        self._signature = signature

    def dumps(self, signature: inspect.Signature) -> bytes:
        return self._signature


def _without_keywords(spec: Any) -> Any:
    """The spec as for a function without keyword arguments: how Python calls it is for the asking process to know."""
    if spec is None:
        return None
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
