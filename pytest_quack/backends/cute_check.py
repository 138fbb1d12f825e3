"""The self-check of an interception: a small host function through the whole path, with and without TVM-FFI."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, Final, NoReturn

import cutlass.cute as cute
from cutlass import AddressSpace, Constexpr, Float32, Int32

from pytest_quack.backends import Backend, CompileHere, Exported
from pytest_quack.cache.artifact import make_artifact
from pytest_quack.cache.store import Artifact

_LENGTH: Final = 5


@cute.jit
def _affine(x: cute.Pointer, y: cute.Pointer, length: Int32, factor: Float32, offset: Constexpr) -> None:
    source = cute.make_tensor(x, cute.make_layout(length))
    target = cute.make_tensor(y, cute.make_layout(length))
    for i in range(length):
        target[i] = source[i] * factor + offset


class _TakenError(BaseException):
    """Ends a compile whose trace has been taken, as `CompilePending` does."""


class _Once:
    """A resolver that first takes the trace, and the next time gives what was made of it."""

    def __init__(self) -> None:
        self.taken: tuple[str, bytes] | None = None
        self.artifact: Artifact | None = None

    def resolve(self, content_key: str, description: str, dump: Callable[[], bytes]) -> Artifact | CompileHere:
        if self.artifact is None:
            self.taken = content_key, dump()
            raise _TakenError
        if self.artifact.sidecar.content_key != content_key:
            raise RuntimeError("two traces of one function have two content keys")
        return self.artifact

    def made_here(self, *args: Any) -> NoReturn:
        raise RuntimeError("it was compiled in place")

    def discard(self, content_key: str, error: Exception) -> NoReturn:
        raise RuntimeError(f"its object cannot be loaded ({type(error).__name__}: {error})") from error


def check(backend: Backend) -> Exported:
    """See `Backend.check_interception`."""
    exported = [_check(backend, options) for options in ("", "--enable-tvm-ffi")]
    return exported[-1]


def _check(backend: Backend, options: str) -> Exported:
    problems: list[str] = []
    once = _Once()
    interception = backend.interception(once, problems.append)
    assert interception is not None
    interception.install()
    try:
        try:
            _compile(options)
        except _TakenError:
            pass
        else:
            raise RuntimeError(f"a compile was not taken ({'; '.join(problems) or 'its seam was not reached'})")
        assert once.taken is not None
        content_key, payload = once.taken
        exported = backend.lower(payload, content_key)
        once.artifact = make_artifact(backend, exported, description="self-check", compile_s=0.0)
        function = _compile(options)
        if problems:
            raise RuntimeError("; ".join(problems))
        _compare(function, is_tvm_ffi=bool(options))
    finally:
        interception.remove()
    if backend.export(_compile(options)).payload != exported.payload:
        raise RuntimeError("a trace gives another object than a compile in place")
    return exported


def _compile(options: str) -> Any:
    buffers = [(ctypes.c_float * _LENGTH)() for _ in range(2)]
    return cute.compile(_affine, *map(_pointer, buffers), Int32(0), Float32(0.0), 3.0, options=options)


def _compare(function: Any, *, is_tvm_ffi: bool) -> None:
    source, target = (ctypes.c_float * _LENGTH)(*range(_LENGTH)), (ctypes.c_float * _LENGTH)()
    where = ctypes.addressof if is_tvm_ffi else _pointer
    function(where(source), where(target), _LENGTH, 2.0)
    if [*target] != [2.0 * x + 3.0 for x in source]:
        raise RuntimeError(f"a loaded function computes {[*target]} instead of {[2.0 * x + 3.0 for x in source]}")


def _pointer(buffer: Any) -> Any:
    return cute.runtime.make_ptr(Float32, ctypes.addressof(buffer), AddressSpace.generic, assumed_align=4)
