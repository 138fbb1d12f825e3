"""`jit_cache`: a compile function whose results are kept, in this process, on disk, and made by the pool.

Order on a call: process memory, the store, the pool (where one is active), a compile in this process under the key's
lock. Whichever it is, the caller gets the kernel loaded from its artifact, so that a hit and a miss return the same.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, ParamSpec, TypeVar, overload

from pytest_quack.backends import DEFAULT, Backend, find_backend
from pytest_quack.cache import key as canonical
from pytest_quack.cache.artifact import make_artifact
from pytest_quack.cache.direct import (
    Check,
    DirectKey,
    Fingerprint,
    all_of,
    call_check,
    describe_call,
    environ_seen,
    file_digest,
    files_seen,
    holds,
    is_flat_value,
    source_path,
)
from pytest_quack.cache.environ import environ_check, environ_is, seen_environ
from pytest_quack.cache.store import Artifact, LockTimeoutError, Pointer, Store
from pytest_quack.compile import preload
from pytest_quack.compile.active import get_active_pool
from pytest_quack.compile.asking import AskingSide
from pytest_quack.compile.job import CompileFailure, CompileJob, CompileResult, FailureKind, KeyState
from pytest_quack.errors import ArtifactError, CompileError, UnkeyableError
from pytest_quack.runtime import Runtime, get_runtime

P = ParamSpec("P")
R = TypeVar("R")

ATTRIBUTE: Final = "__quack_jit__"
_NOT_GIVEN: Final = object()
# cute.compile is not thread-safe: one compile at a time in a process.
_compile_lock = threading.RLock()
os.register_at_fork(after_in_child=lambda: globals().update(_compile_lock=threading.RLock()))


@overload
def jit_cache(function: Callable[P, R], /) -> Callable[P, R]: ...
@overload
def jit_cache(
    *, ignore: Iterable[str] = (), environ: Iterable[str] = (), backend: str = DEFAULT
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def jit_cache(
    function: Callable[..., Any] | None = None,
    /,
    *,
    ignore: Iterable[str] = (),
    environ: Iterable[str] = (),
    backend: str = DEFAULT,
) -> Any:
    """Keep the kernels that a compile function returns.

    The function takes no tensors: its arguments are dtypes, sizes, options. It returns what the backend's compiler
    returns (for CuTe DSL, the result of `cute.compile`), and calling it returns that kernel loaded from its artifact.
    Two calls find the same artifact when function, arguments, the sources that they reach, the toolchain, the target
    and the environment variables that those sources read are the same. What cannot be keyed safely is compiled at each
    call, and the reason is given once.

    Args:
        ignore: names of module globals that the kernel does not depend on, though the function reads them.
        environ: more environment variables that change the output; those that code of the project reads are found by
            themselves.
        backend: which compiler; a built-in name or "package.module:attribute".

    Raises, when the decorated function is called: whatever the function itself raises; `CompilePending` where a pool
    is active and the kernel is not there yet; `CompileError` where the compile killed or hung its process;
    `CacheDirectoryError` where the user named a cache directory that cannot be used.

    Thread safety: may be called from several threads; compiles in one process run one after another.
    """
    given: tuple[object, ...] = (ignore, environ)
    if any(isinstance(names, str) for names in given):
        raise TypeError("ignore and environ take a list of names, not one string")

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        if not hasattr(function, "__code__"):
            raise TypeError(f"jit_cache decorates functions, not a {type(function).__name__}")
        preload.register(function.__module__, backend)
        return _wrap(JitFunction(function, tuple(ignore), tuple(environ), backend))

    return decorate if function is None else decorate(function)


def _wrap(jit: JitFunction) -> Callable[..., Any]:
    """The function that users call: the in-process hit inline, everything else in `JitFunction`."""
    wrapper = functools.wraps(jit.function)(_make_wrapper(jit))
    setattr(wrapper, ATTRIBUTE, jit)
    wrapper.cache_clear = jit.clear  # type: ignore[attr-defined]
    return wrapper


def _make_wrapper(jit: JitFunction) -> Callable[..., Any]:
    """A function with the parameters of the decorated one, so that the interpreter itself puts a call in order.

    `hits` is keyed by the values, in the order of the parameters; the check that each entry brings compares their types
    (since 1 == True == 1.0), and whether what the function reads besides is still the same.
    """
    parameters = [*inspect.signature(jit.function).parameters.values()]
    if any(p.kind in {p.VAR_POSITIONAL, p.VAR_KEYWORD} for p in parameters):
        return _make_variadic_wrapper(jit)
    # Names of our own that are no parameter's.
    ours = "_quack"
    while any(p.name.startswith(ours) for p in parameters):
        ours += "_"
    declared: list[str] = []
    for before, p in zip([None, *parameters], [*parameters, None], strict=True):
        kind_before, kind = before and before.kind, p and p.kind
        if kind_before is inspect.Parameter.POSITIONAL_ONLY and kind is not kind_before:
            declared.append("/")
        if kind is inspect.Parameter.KEYWORD_ONLY and kind_before is not kind:
            declared.append("*")
        if p is not None:
            declared.append(p.name if p.default is p.empty else f"{p.name}={ours}_not_given")
    values = "".join(f"{p.name}," for p in parameters)
    source = f"""
def wrapper({", ".join(declared)}):
    try:
        {ours}_kernel, {ours}_check = {ours}_hits[({values})]
        if {ours}_check({values}):
            return {ours}_kernel
    except {ours}_error:
        pass  # not seen yet, not hashable, or a name that the function reads is gone: the long way tells
    __tracebackhide__ = True  # as everywhere between a call and the compile function: pytest shows none of our frames
    return {ours}_miss(({values}))
"""

    def miss(slot: tuple[Any, ...]) -> Any:
        __tracebackhide__ = True
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for position, (p, value) in enumerate(zip(parameters, slot, strict=True)):
            if value is _NOT_GIVEN:
                continue
            if p.kind is p.KEYWORD_ONLY or len(args) < position:  # the second: one before it was left out
                kwargs[p.name] = value
            else:
                args.append(value)
        return jit.call(tuple(args), kwargs, slot, slot)

    names = {"hits": jit.hits, "miss": miss, "not_given": _NOT_GIVEN, "error": Exception}
    scope = {**{f"{ours}_{name}": value for name, value in names.items()}, "__name__": __name__}
    exec(compile(source, "<jit_cache>", "exec"), scope)
    wrapper: Callable[..., Any] = scope["wrapper"]  # type: ignore[assignment]
    return wrapper


def _make_variadic_wrapper(jit: JitFunction) -> Callable[..., Any]:
    hits = jit.hits

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        slot = (args, *kwargs, *kwargs.values()) if kwargs else args
        try:
            kernel, check = hits[slot]
            if check(*args, *kwargs.values()):
                return kernel
        except Exception:  # noqa: BLE001 - as above: what a foreign __hash__ or __eq__ raises is for the long way
            pass
        __tracebackhide__ = True
        return jit.call(args, kwargs, slot, (*args, *kwargs.values()))

    return wrapper


@dataclass(frozen=True, slots=True)
class NotShippable:
    """The call cannot be made in another process, and why."""

    reason: str


@dataclass(frozen=True, slots=True)
class _Call:
    """One call that was not answered from process memory."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    direct: DirectKey
    description: str


class JitFunction:
    """One decorated compile function."""

    def __init__(
        self, function: Callable[..., Any], ignore: tuple[str, ...], environ: tuple[str, ...], backend: str
    ) -> None:
        self.function: Final = function
        self.backend_name: Final = backend
        # Two ways to find a kernel again in this process: by the arguments where these are flat, by canonical bytes.
        self.hits: dict[Any, tuple[Any, Callable[..., bool]]] = {}
        self._deep: dict[bytes, tuple[Any, Check | None]] = {}
        self._fingerprint = Fingerprint(function, ignore, environ)
        self._kernels: dict[str, Any] = {}
        # By direct key: variables that the compile read besides those of the key, with the digests of their values.
        self._environ_seen: dict[str, dict[str, str]] = {}

    @property
    def backend(self) -> Backend:
        return find_backend(self.backend_name)

    def clear(self) -> None:
        """Forget the kernels that this process holds; those on disk stay."""
        self.hits.clear()
        self._deep.clear()
        self._kernels.clear()

    def direct_key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DirectKey:
        """The call's direct key. Raises UnkeyableError, TypeError for arguments that do not fit."""
        bound = self._fingerprint.bind(args, kwargs)
        sources = get_runtime().settings.sources
        return self._fingerprint.compute(bound, self.backend, self.backend_name, sources)[0]

    def call(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], slot: tuple[Any, ...], values: tuple[Any, ...]
    ) -> Any:
        """The kernel for these arguments, by whichever way is the shortest.

        `slot` is where `hits` may keep it, with a check that is called with `values`.
        """
        __tracebackhide__ = True
        deep = _encode_call(args, kwargs)
        entry = self._deep.get(deep) if deep is not None else None
        if entry is not None and holds(entry[1]):
            return entry[0]
        runtime = get_runtime()
        bound = self._fingerprint.bind(args, kwargs)
        try:
            direct, check = self._fingerprint.compute(bound, self.backend, self.backend_name, runtime.settings.sources)
        except UnkeyableError as error:
            runtime.uncached += 1
            runtime.notices.add(f"{self.function.__qualname__} is compiled at each call, not cached: {error}")
            direct = None
        if direct is None:  # outside the handler, so that an error of the function has no other as its context
            with _compile_lock:
                return self.function(*args, **kwargs)
        kernel = self._kernels.get(direct.key)
        if kernel is None or not environ_is(self._environ_seen.get(direct.key, {})):
            kernel = self._resolve(_Call(args, kwargs, direct, describe_call(self.function, bound)), runtime)
            self._kernels[direct.key] = kernel
        check = all_of(check, environ_check(self._environ_seen.get(direct.key, ())))
        if all(map(is_flat_value, (*args, *kwargs.values()))):
            self.hits[slot] = kernel, call_check(tuple(map(type, values)), check)
        elif deep is not None:
            self._deep[deep] = kernel, check
        return kernel

    def _resolve(self, call: _Call, runtime: Runtime) -> Any:
        __tracebackhide__ = True
        key = call.direct.key
        while True:
            kernel, has_raised = self._find(key, runtime)
            if kernel is not None:
                return kernel
            pool = get_active_pool()
            if pool is None:
                return self._compile_here(call, runtime, reason="")
            state, failure = pool.poll(key)
            if state is KeyState.NEW and has_raised:
                return self._compile_here(call, runtime, reason="it raised when it was last compiled, but not now")
            if state is KeyState.NEW:
                job = self._make_job(call, runtime, pool)
                if isinstance(job, NotShippable):
                    return self._compile_here(call, runtime, reason=job.reason)
                pool.submit(job)
            elif state is KeyState.DONE:
                result = pool.result(key)
                if result is not None and result.artifact is not None and environ_is(result.environ):
                    self._environ_seen[key] = result.environ
                    return self.backend.load(result.artifact)
                return self._compile_here(call, runtime, reason=_why_not_from_pool(result))
            elif state is KeyState.FAILED:
                assert failure is not None
                if failure.kind in {FailureKind.CRASHED, FailureKind.TIMED_OUT}:
                    raise CompileError(f"{call.description}: {failure.message}")
                return self._compile_here(call, runtime, reason=failure.message)
            else:
                pool.await_or_raise(key, call.description)

    def _find(self, key: str, runtime: Runtime) -> tuple[Any | None, bool]:
        """The kernel from the store, if it is there, and whether the compile function raised when last tried."""
        store = runtime.store
        pointer = store.find_pointer(key) if store is not None else None
        if store is None or pointer is None or not self._holds(pointer):
            return None, False
        if not pointer.content_key:
            return None, True
        artifact = store.find(pointer.content_key)
        if artifact is None or artifact.sidecar.backend != self.backend.name:
            return None, False
        try:
            kernel = self.backend.load(artifact)
        except ArtifactError as error:
            store.discard(pointer.content_key, RuntimeError(f"it passed its checks, but {error}"))
            return None, False
        runtime.hits.add(key)
        self._environ_seen[key] = pointer.environ
        return kernel, False

    def _holds(self, pointer: Pointer) -> bool:
        """Whether what the compile saw besides its key is still the same."""
        base = os.path.dirname(source_path(self.function))
        files = pointer.files.values()
        return environ_is(pointer.environ) and all(
            file_digest(os.path.join(base, path)) == digest for path, digest in files
        )

    def _compile_here(self, call: _Call, runtime: Runtime, *, reason: str) -> Any:
        """Compile in this process, under the key's lock where there is one; `reason` says why not in the pool."""
        __tracebackhide__ = True
        store, key = runtime.store, call.direct.key
        with _compile_lock, contextlib.ExitStack() as held:
            if key in self._kernels and environ_is(self._environ_seen.get(key, {})):
                return self._kernels[key]  # another thread made it while this one waited
            is_locked = store is not None and store.is_writable and self._take_lock(held, store, call, runtime)
            if store is not None and is_locked:
                kernel, _ = self._find(key, runtime)
                if kernel is not None:
                    return kernel
                artifact, self._environ_seen[key] = self._compile_and_publish(store, call)
            else:
                artifact, self._environ_seen[key] = self._compile(call)
            held.close()
            self._kernels[key] = kernel = self.backend.load(artifact)
        content_key = artifact.sidecar.content_key
        if content_key in runtime.hits:
            return kernel  # the function ran here, but what it traced was compiled elsewhere
        told = runtime.compiled_here.pop(content_key, "")  # its trace was counted: one kernel, one count
        runtime.compiled_here[key] = told or reason
        if reason and not told:
            runtime.notices.add(f"{self.function.__qualname__} was compiled in the test process: {reason}")
        return kernel

    def _take_lock(self, held: contextlib.ExitStack, store: Store, call: _Call, runtime: Runtime) -> bool:
        try:
            held.enter_context(store.lock(call.direct.key, timeout_s=runtime.settings.timeout_s))
        except LockTimeoutError as error:
            runtime.notices.add(f"a kernel was compiled without its lock: {error}")
            return False
        except OSError as error:
            runtime.notices.add(f"the cache directory {store.root} takes no locks ({error.strerror or error})")
            return False
        return True

    def _compile(self, call: _Call) -> tuple[Artifact, dict[str, str]]:
        """Run the compile function and export what it returns; with the variables that it read besides its key's."""
        __tracebackhide__ = True
        backend = self.backend
        started = time.perf_counter()
        with seen_environ(self.function.__module__.split(".")[0]) as names:
            compiled = self.function(*call.args, **call.kwargs)
        exported = backend.export(compiled)
        seconds = time.perf_counter() - started
        artifact = make_artifact(backend, exported, description=call.description, compile_s=seconds)
        return artifact, environ_seen(call.direct, names)

    def _compile_and_publish(self, store: Store, call: _Call) -> tuple[Artifact, dict[str, str]]:
        """Compile and store; not under a key that the sources no longer have when the compile is over."""
        __tracebackhide__ = True
        before = set(sys.modules)
        try:
            artifact, environ = self._compile(call)
        except Exception:  # whatever the compile function raises is remembered, and raised on
            store.note_failure(call.direct.key)
            raise
        try:
            is_same = self.direct_key(call.args, call.kwargs).key == call.direct.key
            files = files_seen(call.direct, before, os.path.dirname(source_path(self.function)))
        except UnkeyableError:
            return artifact, environ
        if is_same:
            store.publish(artifact, call.direct.key, files, environ)
        return artifact, environ

    def _make_job(self, call: _Call, runtime: Runtime, pool: AskingSide) -> CompileJob | NotShippable:
        function = self.function
        if function.__module__ == "__main__":
            return NotShippable("it is defined in __main__, which another process cannot import")
        if "<locals>" in function.__qualname__:
            return NotShippable("it is defined inside another function, where another process cannot find it")
        try:
            arguments = pickle.dumps((call.args, call.kwargs))
        except Exception as error:  # noqa: BLE001 - pickling runs foreign code, which may raise anything
            return NotShippable(f"its arguments cannot be sent to another process ({error})")
        return CompileJob(
            key=call.direct.key,
            parts=call.direct.parts,
            module=function.__module__,
            qualname=function.__qualname__,
            file=source_path(function),
            arguments=arguments,
            asker=pool.asker(runtime),
            description=call.description,
        )

    def run_job(self, job: CompileJob, on_start: Callable[[], None]) -> CompileResult:
        """What a compile process does: check that it sees what the asking process saw, compile, publish.

        `on_start` is called when the compile itself begins, after any wait for the key's lock.
        """
        args, kwargs = pickle.loads(job.arguments)
        runtime = get_runtime()
        try:
            direct = self.direct_key(args, kwargs)
        except UnkeyableError as error:
            return _refusal(job, str(error))
        differing = direct.differing_parts(job.parts)
        if differing or direct.key != job.key:
            return _refusal(job, f"a compile process sees another {' and another '.join(differing) or 'key'}")
        store, call = runtime.store, _Call(args, kwargs, direct, job.description)
        if store is None:
            on_start()
            artifact, environ = self._compile(call)
            return CompileResult(job.key, None, artifact.sidecar.compile_s, artifact, environ)
        with contextlib.ExitStack() as held:
            try:
                held.enter_context(store.lock(job.key, timeout_s=runtime.settings.timeout_s))
            except LockTimeoutError as error:
                return _refusal(job, str(error))
            pointer = store.find_pointer(job.key)
            is_good = pointer is not None and pointer.content_key and self._holds(pointer)
            if pointer is not None and is_good and store.find(pointer.content_key) is not None:
                return CompileResult(job.key, None)
            on_start()
            artifact, environ = self._compile_and_publish(store, call)
        pointer = store.find_pointer(job.key)
        is_stored = pointer is not None and bool(pointer.content_key)
        return CompileResult(job.key, None, artifact.sidecar.compile_s, None if is_stored else artifact, environ)


def _encode_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes | None:
    try:
        return canonical.encode((args, sorted(kwargs.items())))
    except UnkeyableError:
        return None


def _why_not_from_pool(result: CompileResult | None) -> str:
    if result is not None and not environ_is(result.environ):
        return "an environment variable that it read has another value now"
    return "the pool's artifact is no longer in the cache"


def _refusal(job: CompileJob, message: str) -> CompileResult:
    return CompileResult(job.key, CompileFailure(FailureKind.REFUSED, message))


def find_jit_function(module_name: str, qualname: str, file: str) -> JitFunction:
    """The decorated function of that name. Raises LookupError saying what was found instead."""
    module = importlib.import_module(module_name)
    found: Any = module
    for part in qualname.split("."):
        found = getattr(found, part, None)
    jit = getattr(found, ATTRIBUTE, None)
    if not isinstance(jit, JitFunction):
        raise LookupError(f"{module_name}.{qualname} is no compile function there")
    if source_path(jit.function) != file:
        raise LookupError(f"{module_name} is another file there ({source_path(jit.function)})")
    return jit
