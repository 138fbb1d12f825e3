"""What counts as running out of device memory, and what an error keeps alive."""

from __future__ import annotations

import gc
import sys
import weakref
from types import SimpleNamespace

import pytest

from pytest_quack.gpu import oom

pytestmark = pytest.mark.light
if sys.version_info < (3, 11):
    ExceptionGroup = None


class TorchError(RuntimeError):
    """Stands for torch.OutOfMemoryError."""


class DSLCudaRuntimeError(Exception):
    """Named as that of the CuTe DSL."""


REAL = [
    RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
    RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 139.80 GiB"),
    RuntimeError("CUDA driver error: out of memory"),
    DSLCudaRuntimeError("DSLCudaRuntimeError: CUDA_ERROR_OUT_OF_MEMORY (error code: 2)"),
    RuntimeError("cudaMalloc failed: cudaErrorMemoryAllocation"),
    MemoryError("cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY"),
]
NONE = [
    AssertionError("CUDA error: out of memory"),
    RuntimeError("out of memory"),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes"),
    RuntimeError("out of resource: shared memory, Required: 300000, Hardware limit: 232448"),
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("XCUDA_ERROR_OUT_OF_MEMORYX"),
    MemoryError(),
    NameError("name 'CUDA_ERROR_OUT_OF_MEMORY' is not defined"),
    KeyboardInterrupt("CUDA error: out of memory"),
    pytest.fail.Exception("CUDA error: out of memory"),
    pytest.skip.Exception("CUDA error: out of memory"),
    ValueError(""),
]


@pytest.mark.parametrize("error", REAL, ids=str)
def test_real(error: BaseException) -> None:
    assert oom.is_out_of_memory(error)


@pytest.mark.parametrize("error", NONE, ids=repr)
def test_none(error: BaseException) -> None:
    assert not oom.is_out_of_memory(error)


def test_class_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(OutOfMemoryError=TorchError))
    assert oom.is_out_of_memory(TorchError("whatever it says"))
    assert not oom.is_out_of_memory(RuntimeError("whatever it says"))
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace())
    assert not oom.is_out_of_memory(TorchError("whatever it says"))


def raised(*, cause: BaseException | None = None, context: BaseException | None = None, own: Exception) -> Exception:
    own.__cause__, own.__context__ = cause, context
    return own


def test_an_error_raised_from_one_counts_and_one_raised_while_handling_one_does_not() -> None:
    assert oom.is_out_of_memory(raised(cause=REAL[0], own=ValueError("launch failed")))
    assert oom.is_out_of_memory(raised(cause=raised(cause=REAL[0], own=ValueError("b")), own=ValueError("a")))
    assert not oom.is_out_of_memory(raised(context=REAL[0], own=ValueError("a")))
    assert not oom.is_out_of_memory(raised(cause=REAL[0], own=AssertionError("it should not have run out")))


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exception groups came with Python 3.11")
def test_a_group_counts_if_all_of_it_does() -> None:
    assert oom.is_out_of_memory(ExceptionGroup("teardown", [REAL[0], REAL[1]]))
    assert oom.is_out_of_memory(ExceptionGroup("teardown", [ExceptionGroup("inner", [REAL[0]])]))
    assert not oom.is_out_of_memory(ExceptionGroup("teardown", [REAL[0], ValueError("also")]))


def test_failures_of_a_doctest_are_looked_into() -> None:
    wrapped = ValueError("unexpected")
    wrapped.exc_info = (RuntimeError, REAL[0], None)  # type: ignore[attr-defined]
    assert oom.is_out_of_memory(wrapped)
    several = ValueError("several")
    several.failures = [wrapped, ValueError("also")]  # type: ignore[attr-defined]
    assert not oom.is_out_of_memory(several)
    several.failures = [wrapped]  # type: ignore[attr-defined]
    assert oom.is_out_of_memory(several)


class Thing:
    """Something that a weak reference can be to."""


def fail(kind: str) -> tuple[BaseException, weakref.ref[Thing]]:
    """An error whose frames, or those of one it is chained to, hold a thing."""

    def inner() -> None:
        thing = Thing()
        references.append(weakref.ref(thing))
        raise RuntimeError("inner")

    def outer() -> None:
        try:
            inner()
        except RuntimeError as error:
            if kind == "cause":
                raise ValueError("outer") from error
            if kind == "context":
                raise ValueError("outer")  # noqa: B904 - the chain is what is tested
            if kind == "suppressed":
                raise ValueError("outer") from None
            if kind == "group":
                raise ExceptionGroup("outer", [error])  # noqa: B904
            raise

    references: list[weakref.ref[Thing]] = []
    try:
        outer()
    except Exception as error:  # noqa: BLE001 - whatever it is
        return error, references[0]
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize(
    "kind",
    [
        "plain",
        "cause",
        "context",
        "suppressed",
        pytest.param(
            "group", marks=pytest.mark.skipif(sys.version_info < (3, 11), reason="groups came with Python 3.11")
        ),
    ],
)
def test_letting_go(kind: str) -> None:
    error, reference = fail(kind)
    gc.collect()
    assert reference() is not None
    oom.let_go(error)
    gc.collect()
    assert reference() is None
    oom.let_go(error)  # harmless


def test_a_chain_that_bites_its_tail_ends() -> None:
    first, second = ValueError("a"), ValueError("b")
    first.__context__, second.__context__ = second, first
    oom.let_go(first)


def test_frames_that_still_run_are_left_alone() -> None:
    thing = Thing()
    try:
        raise ValueError("here")
    except ValueError as error:
        oom.let_go(error)
    assert isinstance(thing, Thing)


def test_the_interpreters_last_error_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("last_type", "last_value", "last_traceback", "last_exc")
    for name in names:
        monkeypatch.delattr(sys, name, raising=False)  # put back at the end, where it was there
        setattr(sys, name, None)
    oom.forget_last_error()
    assert not any(hasattr(sys, name) for name in names)
    oom.forget_last_error()


def test_device_without_a_device() -> None:
    assert str(oom.OutOfMemory.of(REAL[0])) == (
        "a GPU whose free memory is not known: RuntimeError: CUDA error: out of memory"
    )


def test_the_error_is_one_short_line_without_colours() -> None:
    long = RuntimeError(
        "\x1b[91mCUDA out of memory.\x1b[0m Tried to allocate 90.87 GiB. " + "More words. " * 40 + "\nmore"
    )
    assert oom.OutOfMemory.of(long).error.startswith("RuntimeError: CUDA out of memory. Tried to allocate 90.87 GiB.")
    assert len(oom.OutOfMemory.of(long).error) <= 110


def test_device_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(device: int) -> None:
        raise RuntimeError("CUDA error: unspecified launch failure\nmore")

    cuda = SimpleNamespace(
        is_initialized=lambda: True,
        current_device=lambda: 0,
        mem_get_info=lambda device: (1_250_000_000, 150_000_000_000),
        get_device_properties=lambda device: SimpleNamespace(name="NVIDIA H200", uuid="1-2"),
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    assert oom.describe_device() == "NVIDIA H200, GPU-1-2, 1.2 of 150.0 GB free"
    cuda.mem_get_info = fail
    assert oom.describe_device() == "a GPU whose free memory is not known (CUDA error: unspecified launch failure)"
