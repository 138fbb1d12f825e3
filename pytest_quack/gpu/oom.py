"""Running out of device memory: what counts as that, and what must be let go of before a second attempt."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import sys
import textwrap
import traceback
import warnings
from dataclasses import dataclass
from typing import Any, Final

# What the CUDA runtime and the driver call it, in the messages of torch, the CuTe DSL, cuda-python, numba and others.
_MESSAGE: Final = re.compile(
    r"CUDA out of memory\.|CUDA(?: driver)? error: out of memory|\bcudaErrorMemoryAllocation\b|"
    r"\bCUDA_ERROR_OUT_OF_MEMORY\b"
)
_COLOR: Final = re.compile(r"\x1b\[[0-9;]*m")
_WIDTH: Final = 110
_DEVICE_FILES: Final = ("/dev/nvidiactl", "/dev/dxg")  # Linux, and Linux under Windows
# Errors of a test's own, whatever they quote.
_NEVER: Final = (AssertionError, SyntaxError, NameError, ImportError)


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """One attempt that ran out of device memory.

    Attributes:
        error: the error in one line.
        device: the device and its free memory at that moment, in words.
    """

    error: str
    device: str

    @classmethod
    def of(cls, error: BaseException) -> OutOfMemory:
        """What has just happened, on the device in use."""
        first = (_COLOR.sub("", str(error)).strip().splitlines() or [""])[0]
        return cls(textwrap.shorten(f"{type(error).__name__}: {first}", _WIDTH, placeholder=" ..."), describe_device())

    def __str__(self) -> str:
        return f"{self.device}: {self.error}"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device had no memory left for what was asked of it.

    True for torch's class, for the messages of the CUDA runtime and driver, for an error that was raised `from` one of
    these, and for a group of nothing else. An assertion that quotes such a message is none.
    """
    members = _members(error)
    if members:
        return all(map(is_out_of_memory, members))
    if isinstance(error, _NEVER) or not isinstance(error, Exception):
        return False
    torch_class = getattr(sys.modules.get("torch"), "OutOfMemoryError", None)
    if isinstance(torch_class, type) and isinstance(error, torch_class):
        return True
    if _MESSAGE.search(str(error)):
        return True
    return error.__cause__ is not None and is_out_of_memory(error.__cause__)


def _members(error: BaseException) -> list[BaseException]:
    """What a group, or a doctest's failures, consist of; nothing for an error that stands for itself."""
    found = [*(getattr(error, "exceptions", None) or ()), *(getattr(error, "failures", None) or ())]
    raised = getattr(error, "exc_info", None)  # of doctest.UnexpectedException
    if isinstance(raised, tuple) and len(raised) == 3:
        found.append(raised[1])
    return [member for member in found if isinstance(member, BaseException)]


def has_device() -> bool:
    """Whether this process may be able to use a GPU, as far as can be said without asking the driver."""
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in {"", "-1"}
    return not is_hidden and any(os.path.exists(path) for path in _DEVICE_FILES)


def describe_device() -> str:
    """The device that is in use and how much of its memory is free, in words."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is None or not cuda.is_initialized():
        return "a GPU whose free memory is not known"
    try:
        number = cuda.current_device()
        free, total = cuda.mem_get_info(number)
        properties = cuda.get_device_properties(number)
    except RuntimeError as error:  # the device has failed
        return f"a GPU whose free memory is not known ({str(error).splitlines()[0]})"
    uuid = f", GPU-{properties.uuid}" if hasattr(properties, "uuid") else ""
    return f"{properties.name}{uuid}, {free / 1e9:.1f} of {total / 1e9:.1f} GB free"


def let_go(error: BaseException) -> None:
    """Clear the frames of an error and of all that it is chained to: their locals may hold device memory.

    Objects that the test would have closed are closed by this, with warnings (an open file, a coroutine that was never
    awaited) that are not its fault and would be blamed on the next test.
    """
    hook = sys.unraisablehook
    sys.unraisablehook = lambda _: None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for part in _chain(error):
                traceback.clear_frames(part.__traceback__)
                part.__traceback__ = None
    finally:
        sys.unraisablehook = hook


def _chain(error: BaseException) -> list[BaseException]:
    """Return the error and all that it was raised from, or while handling, or is a group of."""
    found: dict[int, BaseException] = {}
    waiting: list[BaseException | None] = [error]
    while waiting:
        part = waiting.pop()
        if part is not None and id(part) not in found:
            found[id(part)] = part
            waiting += [part.__cause__, part.__context__, *_members(part)]
    return list(found.values())


def forget_last_error() -> None:
    """Forget the error that the interpreter keeps for a debugger."""
    for name in ("last_exc", "last_value", "last_type", "last_traceback"):
        with contextlib.suppress(AttributeError):
            delattr(sys, name)


def free_memory_if_used() -> None:
    """As `free_memory`, at no cost in a process that has not used a device."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is not None and cuda.is_initialized():
        free_memory()


def free_memory() -> None:
    """Collect what nothing refers to, and give memory that torch keeps for later back to the device."""
    gc.collect()
    cuda: Any = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is not None and cuda.is_initialized():
        with contextlib.suppress(RuntimeError):  # the device has failed: the next attempt says so
            cuda.synchronize()
            cuda.empty_cache()
