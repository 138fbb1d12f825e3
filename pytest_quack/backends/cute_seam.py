"""The place where the DSL is about to compile what it has traced: there artifacts are looked up and jobs are made.

`CutlassBaseDSL.compile_and_cache` is called for every `cute.compile` and every first call of a `@cute.jit` function,
with the traced module. In its place a seam computes the content key and asks a resolver what to do: go on with an
artifact, or compile after all. With an artifact the DSL's own function runs to its end, with a provider that hands over
the loaded object instead of compiling, so that the caller gets the very class that the DSL returns, with its signature.

Anything of the DSL that is not as expected switches the seam off, with one notice; the DSL then compiles as ever.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import inspect
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from pytest_quack.backends import CompileHere, Exported, Resolver, cute_trace
from pytest_quack.backends.cute_trace import FUNCTION, Trace, swapped
from pytest_quack.cache import key as canonical
from pytest_quack.cache.store import Artifact
from pytest_quack.errors import InterceptionError, UnkeyableError

ORIGIN: Final = "__quack_origin__"
_OURS: Final = "__quack_seam__"
_COLOURS: Final = re.compile(r"\x1b\[[0-9;]*m")
_NEEDED: Final = frozenset(
    {
        *("module", "module_hash", "function_name", "pipeline", "signature", "no_cache", "no_jit_engine"),
        *("full_args", "full_kwargs", "dynamic_args", "dynamic_kwargs", "original_function_name"),
    }
)


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a compiled function comes from, kept on it: its content key, and on a hit its trace and artifact."""

    content_key: str
    trace: Trace
    artifact: Artifact | None


class Seam:
    """Patches the DSL of this process; one at a time.

    Args:
        key_parts: labelled parts of a content key that do not come from the trace (toolchain, host).
        options: the backend's settings in force, as one text.
        arch: the architecture that this process compiles for; empty where the DSL would only guess.
        export: a compiled function as bytes.
        resolver: says what to do with a traced function.
        notice: called with what the user should be told once.
    """

    def __init__(
        self,
        *,
        key_parts: Callable[[], dict[str, bytes]],
        options: Callable[[], str],
        arch: Callable[[], str],
        export: Callable[[Any], Exported],
        resolver: Resolver,
        notice: Callable[[str], None],
    ) -> None:
        self._key_parts = key_parts
        self._options = options
        self._arch = arch
        self._export = export
        self._resolver = resolver
        self._notice = notice
        self._undo: contextlib.ExitStack | None = None
        self._is_ffi_patched = False
        self._original: Callable[..., Any] | None = None
        self._signature = inspect.Signature()

    def install(self) -> None:
        """Put the seam in place; a DSL that has another shape is left alone, with a notice."""
        from cutlass.cutlass_dsl.cutlass import CutlassBaseDSL

        original = plain_compile()
        signature = inspect.signature(original)
        missing = _NEEDED - signature.parameters.keys()
        if missing:
            self._notice(
                f"compiles are not intercepted: this version of nvidia-cutlass-dsl has no {', '.join(sorted(missing))} "
                "where they are expected"
            )
            return
        if getattr(original, "__wrapped__", None) is not None:
            self._notice(
                f"compiles are not intercepted: something else ({original.__module__}) stands where they are taken"
            )
            return
        seam, self._original, self._signature = self, original, signature

        @functools.wraps(original)
        def compile_and_cache(self: Any, *args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            return seam.compile(self, args, kwargs)

        setattr(compile_and_cache, _OURS, True)
        self._undo = contextlib.ExitStack()
        self._undo.enter_context(swapped(CutlassBaseDSL, "compile_and_cache", compile_and_cache))

    def remove(self) -> None:
        if self._undo is not None:
            self._undo.close()
            self._undo = None

    def compile(self, dsl: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Stands in for the DSL's `compile_and_cache`."""
        # An error of the compiler looks as it does without us, and has no other as its context.
        __tracebackhide__ = True
        original = self._original
        assert original is not None
        if self._undo is None:
            return original(dsl, *args, **kwargs)
        bound = self._signature.bind(dsl, *args, **kwargs)
        bound.apply_defaults()
        arguments = bound.arguments
        name = arguments.get("original_function_name") or arguments["function_name"]
        taken, reason = self._take(dsl, arguments, name)
        if taken is None:
            function = original(dsl, *args, **kwargs)  # if this fails as well, the function is to blame
            if reason:
                self._give_up(reason)
            return function
        content_key, trace = taken
        found, reason = self._resolve(content_key, name, trace)
        if found is None:
            if reason:
                self._give_up(reason)
            return original(dsl, *args, **kwargs)
        unusable: Exception | None = None
        if not isinstance(found, CompileHere):
            try:
                return self._build(dsl, arguments, trace, found)
            except Exception as error:  # noqa: BLE001 - whatever the loader raises: the object cannot be used
                unusable, found = error, CompileHere()
        if found.is_for_export:
            # An engine and a function to call cost two more translations to machine code than the export does.
            arguments["no_jit_engine"] = True
        began = time.perf_counter()
        function = original(*bound.args, **bound.kwargs)
        seconds = time.perf_counter() - began
        if unusable is not None:  # had the compiler's own failed as well, the object would not be to blame
            self._resolver.discard(content_key, unusable)
        setattr(function, ORIGIN, Origin(content_key, trace, None))
        self._resolver.made_here(content_key, name, found, seconds, functools.partial(self._export, function))
        return function

    def _take(self, dsl: Any, arguments: dict[str, Any], name: str) -> tuple[tuple[str, Trace] | None, str]:
        """The content key and the trace; None where the DSL is to compile, with the reason if nothing can be taken."""
        try:
            if cute_trace.why_not(dsl) is not None:
                return None, ""
            trace = cute_trace.take(dsl, arguments)
            self._refuse_guess(trace)
            parts = cute_trace.content_parts(dsl, arguments["signature"], trace, self._options())
        except UnkeyableError as error:
            self._note_uncached(name, error)
            return None, ""
        except Exception as error:  # noqa: BLE001 - the DSL is not as expected: whatever it raises, it compiles for itself
            return None, f"{type(error).__name__}: {_one_line(error)}"
        return (canonical.digest({**parts, **self._key_parts()}), trace), ""

    def _resolve(self, content_key: str, name: str, trace: Trace) -> tuple[Artifact | CompileHere | None, str]:
        """What the resolver says; None where the DSL is to compile, with the reason if nothing more can be taken."""
        __tracebackhide__ = True
        try:
            return self._resolver.resolve(content_key, name, trace.dump), ""
        except UnkeyableError as error:
            self._note_uncached(name, error)
            return None, ""
        except InterceptionError as error:
            return None, str(error)

    def _refuse_guess(self, trace: Trace) -> None:
        """Device code for the DSL's default architecture is nobody else's."""
        if trace.num_kernels and not self._arch() and trace.target == trace.arch:
            raise UnkeyableError(guessed_arch_text(trace.target))

    def _note_uncached(self, name: str, error: UnkeyableError) -> None:
        self._notice(f"{name} was compiled in the test process: {_one_line(error)}")

    def _give_up(self, reason: str) -> None:
        self.remove()
        self._notice(f"compiles are no longer intercepted: {reason}")

    def _build(self, dsl: Any, arguments: dict[str, Any], trace: Trace, artifact: Artifact) -> Any:
        """What the DSL returns, over a loaded object."""
        assert self._original is not None
        self._patch_functions()
        engine = LoadedObject(artifact.payload, list(dsl.get_shared_libs()), is_tvm_ffi=trace.spec is not None)
        call = {name: value for name, value in arguments.items() if name != "self"}
        with contextlib.ExitStack() as stack:
            stack.enter_context(swapped(dsl, "compiler_provider", _Provider(engine)))
            if trace.spec is not None:
                stack.enter_context(swapped(dsl, "_tvm_ffi_args_spec_converter", lambda *_: trace.spec))
            if not arguments["no_cache"]:  # or it would write the module that was not lowered to its own file cache
                stack.enter_context(swapped(dsl.envar, "disable_file_caching", True))
            function = self._original(dsl, **call)
        extra = artifact.sidecar.extra
        function.kernel_extra_args = dict(extra.get("kernel_extra_args", {}))
        function.total_added_arguments = extra.get("total_added_arguments", 0)
        has_extra_args = bool(function.kernel_extra_args or function.total_added_arguments)
        function.ir_module = LazyModule(functools.partial(self._lower, trace), has_extra_args=has_extra_args)
        setattr(function, ORIGIN, Origin(artifact.sidecar.content_key, trace, artifact))
        return function

    def _lower(self, trace: Trace) -> Any:
        assert self._original is not None
        return cute_trace.lower(trace, self._original).function.ir_module

    def _patch_functions(self) -> None:
        """Have functions over a loaded object start and export from it."""
        if self._is_ffi_patched or self._undo is None:
            return
        self._is_ffi_patched = True
        from cutlass.base_dsl.jit_executor import JitCompiledFunction

        plain_export, dump = (_over_real_module(JitCompiledFunction, n) for n in ("export_to_c", "dump_to_object"))
        self._undo.enter_context(swapped(JitCompiledFunction, "export_to_c", plain_export))
        self._undo.enter_context(swapped(JitCompiledFunction, "dump_to_object", _dump_from_object(dump)))
        try:
            from cutlass.cutlass_dsl.tvm_ffi_provider import TVMFFIJitCompiledFunctionBase as Base
        except ImportError:
            return
        self._undo.enter_context(swapped(Base, "_create_tvm_ffi_function", _start_from_object(Base)))
        export = _export_from_object(_over_real_module(Base, "export_to_c"))
        self._undo.enter_context(swapped(Base, "export_to_c", export))


def plain_compile() -> Callable[..., Any]:
    """The DSL's `compile_and_cache` without seams of ours, whether or not one is in place."""
    from cutlass.cutlass_dsl.cutlass import CutlassBaseDSL

    method: Any = CutlassBaseDSL.compile_and_cache
    while getattr(method, _OURS, False):
        method = method.__wrapped__
    return method


def _one_line(error: Exception) -> str:
    """What an error says, without the colours and the frames that the DSL adds."""
    lines = [line.strip() for line in _COLOURS.sub("", str(error)).splitlines()]
    return next(filter(None, lines), "")


def guessed_arch_text(arch: str) -> str:
    return (
        f"device code was compiled for {arch}, which is only the default of the DSL: there is no GPU to ask. Name the "
        "architecture with --compile-arch (for example sm_90a) or CUTE_DSL_ARCH."
    )


class LoadedObject:
    """An object that was exported as `FUNCTION`, in the shape of the DSL's execution engine."""

    def __init__(self, payload: bytes, libraries: list[str], *, is_tvm_ffi: bool) -> None:
        from cutlass._mlir._mlir_libs._cutlass_ir._execution_engine import BinaryExecutionEngine

        self.is_tvm_ffi: Final = is_tvm_ffi
        self._binary = BinaryExecutionEngine(payload, libraries, True)  # with JITLink, as the DSL's own loader

    def raw_lookup(self, name: str) -> Any:
        """The address of a symbol; None where there is none."""
        if name.startswith("__tvm_ffi_"):
            name = f"__tvm_ffi_{FUNCTION}"
        elif not self.is_tvm_ffi:
            name = f"_mlir_{FUNCTION}_{name}"
        try:
            return self._binary.lookup(name)
        except Exception:  # noqa: BLE001 - the engine raises for a symbol that is not there
            return None

    def lookup(self, name: str) -> Any:
        """The entry point of a host function."""
        address = self.raw_lookup(f"__tvm_ffi_{name}" if self.is_tvm_ffi else f"_mlir_ciface_{name}")
        if not address:
            raise RuntimeError(f"Unknown function {name}")
        return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)


class _Provider:
    """Stands in for the DSL's compiler provider where there is nothing to compile."""

    _post_compile_hook: Any = None

    def __init__(self, engine: LoadedObject) -> None:
        def compile_and_jit(module: Any, *args: Any, return_module: bool = False, **kwargs: Any) -> Any:
            return (engine, module) if return_module else engine

        compile_and_jit.__signature__ = _PROVIDER_SIGNATURE  # type: ignore[attr-defined] # the DSL asks each time
        self.compile_and_jit = compile_and_jit
        self._engine = engine

    def compile(self, module: Any, pipeline: Any, *args: Any, **kwargs: Any) -> Any:
        return module

    def jit(self, *args: Any, **kwargs: Any) -> Any:
        return self._engine


_PROVIDER_SIGNATURE: Final = inspect.signature(lambda module, *args, return_module=False, **kwargs: None)


class LazyModule:
    """The lowered module of a function that was not lowered here: made when somebody looks at it.

    `has_extra_args` says whether it names workspaces, which the DSL asks each module of some kernels.
    """

    def __init__(self, make: Callable[[], Any], *, has_extra_args: bool) -> None:
        self.__dict__.update(_quack_make=make, _quack_module=None, _quack_has_extra_args=has_extra_args)

    def _quack_real(self) -> Any:
        if self.__dict__["_quack_module"] is None:
            self.__dict__["_quack_module"] = self.__dict__["_quack_make"]()
        return self.__dict__["_quack_module"]

    @property
    def operation(self) -> Any:
        return self._quack_real().operation if self.__dict__["_quack_has_extra_args"] else _LazyOperation(self)

    @property  # type: ignore[misc] # what isinstance sees
    def __class__(self) -> Any:
        from cutlass._mlir import ir

        return ir.Module

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._quack_real().__reduce_ex__(protocol)

    def __repr__(self) -> str:
        return repr(self._quack_real())

    def __str__(self) -> str:
        return str(self._quack_real())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._quack_real(), name)


class _LazyOperation:
    """Answers whether its module names workspaces, without the module."""

    def __init__(self, module: LazyModule) -> None:
        self._quack_owner = module

    @property
    def attributes(self) -> Any:
        return _LazyAttributes(self._quack_owner)

    def __str__(self) -> str:
        return str(self._quack_owner._quack_real().operation)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._quack_owner._quack_real().operation, name)


class _LazyAttributes:
    def __init__(self, module: LazyModule) -> None:
        self._quack_owner = module

    def _quack_real(self) -> Any:
        return self._quack_owner._quack_real().operation.attributes

    def __contains__(self, name: object) -> bool:
        return False if name == "lir.kernel_extra_args" else name in self._quack_real()

    def __getitem__(self, name: Any) -> Any:
        return self._quack_real()[name]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._quack_real(), name)


def _over_real_module(owner: Any, name: str) -> Callable[..., Any]:
    original = getattr(owner, name)

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if type(self.ir_module) is LazyModule:
            self.ir_module = self.ir_module._quack_real()
        return original(self, *args, **kwargs)

    return method


def _start_from_object(owner: Any) -> Callable[..., Any]:
    original = owner._create_tvm_ffi_function

    @functools.wraps(original)
    def create(self: Any) -> Any:
        if not isinstance(self.engine, LoadedObject):
            return original(self)
        import tvm_ffi

        address = self.engine.raw_lookup(f"__tvm_ffi_{self.function_name}")
        return tvm_ffi.Function.__from_extern_c__(address, keep_alive_object=self.engine)

    return create


def _export_from_object(otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """`export_to_c` that copies the artifact where that is what would be made."""
    from cutlass.cutlass_dsl import tvm_ffi_provider

    signature = inspect.signature(otherwise)
    format_of = getattr(tvm_ffi_provider, "_get_format_from_object_file_path", lambda path: path.rpartition(".")[2])

    @functools.wraps(otherwise)
    def export_to_c(self: Any, *args: Any, **kwargs: Any) -> Any:
        origin = getattr(self, ORIGIN, None)
        if origin is None or origin.artifact is None:
            return otherwise(self, *args, **kwargs)
        try:
            bound = signature.bind(self, *args, **kwargs)
        except TypeError:
            return otherwise(self, *args, **kwargs)  # raises it in its own words
        bound.apply_defaults()
        given = dict(bound.arguments)
        path, name = given.pop("object_file_path", ""), given.pop("function_name", None)
        del given["self"]
        if (
            name != FUNCTION
            or format_of(path) != "o"
            or any(signature.parameters[n].default != given[n] for n in given)
        ):
            return otherwise(self, *args, **kwargs)
        with open(path, "wb") as file:
            file.write(origin.artifact.payload)
        return None

    return export_to_c


def _dump_from_object(otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """`dump_to_object` of a plain function, in the same way."""

    @functools.wraps(otherwise)
    def dump_to_object(self: Any, function_prefix: str) -> Any:
        origin = getattr(self, ORIGIN, None)
        artifact = origin.artifact if origin is not None else None
        if artifact is None or artifact.sidecar.abi != "cute" or function_prefix != FUNCTION:
            return otherwise(self, function_prefix)
        return artifact.payload

    return dump_to_object
