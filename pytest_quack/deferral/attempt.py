"""One attempt at one item: what it was refused, what it reported so far, and how to undo it.

Whether an attempt was interrupted is decided by the record made here when CompilePending is raised, not by the
exception that arrives: no `except`, `raises(BaseException)`, `finally: return`, xfail or TestCase can turn it into a
result. What the attempt reports is held back until its tear-down begins where it has failed, else until it is over;
then it either counts, and what was held is reported, or it does not, and nothing of it remains.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pytest_quack.deferral.generators import Generators
from pytest_quack.deferral.internals import ItemState, give_back_temporary
from pytest_quack.gpu.oom import OutOfMemory, let_go


@dataclass(slots=True)
class Surroundings:
    """The environment, the working directory and torch's modes, to be put back when an attempt does not count."""

    environ: dict[Any, Any]
    directory: str | None
    modes: tuple[Any, ...] | None

    @classmethod
    def capture(cls) -> Surroundings:
        try:
            directory: str | None = os.getcwd()
        except OSError:
            directory = None
        return cls(_environ(), directory, _torch_modes())

    def restore(self) -> None:
        if self.modes is not None and self.modes != _torch_modes():
            _set_torch_modes(self.modes)
        if _environ() != self.environ:
            former = {os.fsdecode(name): os.fsdecode(value) for name, value in self.environ.items()}
            for name in set(os.environ) - set(former):
                del os.environ[name]
            os.environ.update(former)
        if self.directory is not None:
            with contextlib.suppress(OSError):
                os.chdir(self.directory)


def _environ() -> dict[Any, Any]:
    """A copy of the environment, taken from CPython's encoded mapping where there is one: thirty times as fast."""
    encoded = getattr(os.environ, "_data", None)
    return dict(encoded) if isinstance(encoded, dict) else dict(os.environ)


def _torch_modes() -> tuple[Any, ...] | None:
    """What a test may set for the whole process; None where torch is not loaded (or only in part)."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "get_float32_matmul_precision"):
        return None
    return (
        torch.get_default_dtype(),
        _default_device(),
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.get_float32_matmul_precision(),
        torch.get_num_threads(),
    )


def _default_device() -> Any:
    """The device that was set for the process, None for none; torch's public way to ask takes as long as all else."""
    return getattr(sys.modules.get("torch.utils._device"), "CURRENT_DEVICE", None)


def _set_torch_modes(modes: tuple[Any, ...]) -> None:
    torch = sys.modules["torch"]
    dtype, device, has_grad, is_deterministic, only_warns, precision, threads = modes
    torch.set_default_dtype(dtype)
    if device != _default_device():
        torch.set_default_device(device)
    torch.set_grad_enabled(has_grad)
    torch.use_deterministic_algorithms(is_deterministic, warn_only=only_warns)
    torch.set_float32_matmul_precision(precision)
    torch.set_num_threads(threads)


@dataclass(slots=True)
class Attempt:
    """One run of an item's protocol.

    Attributes:
        keys: what it was refused because it is still being compiled; not empty means that it does not count.
        is_settled: whether it was decided, at the beginning of the tear-down, if it counts.
        is_first: whether it is the item's first.
        is_reported: whether its result is out already, before its tear-down.
        hook_error: what a hook raised that was told of the result before the tear-down.
        out_of_memory: what ran out of device memory, where the item may try again: it does not count then.
        out_of_memory_when: in which phase.
        wider_output: what wider fixtures have said while it set them up: phase, stream, text.
        wider_warnings: what they have warned of.
    """

    item: pytest.Item
    state: ItemState
    generators: Generators
    surroundings: Surroundings
    is_first: bool
    keys: set[str] = field(default_factory=set)
    is_settled: bool = False
    teardown_error: str | None = None
    is_reported: bool = False
    hook_error: Exception | None = None
    out_of_memory: OutOfMemory | None = None
    out_of_memory_when: str = ""
    wider_output: list[tuple[str, str, str]] = field(default_factory=list)
    wider_warnings: list[warnings.WarningMessage] = field(default_factory=list)
    _exceptions: list[weakref.ref[BaseException]] = field(default_factory=list)
    _temporary: Path | None = None

    @classmethod
    def begin(cls, item: pytest.Item, generators: Generators | None) -> Attempt:
        """Start an attempt; `generators` are those that the item's first attempt began with, None for the first."""
        if generators is not None:
            generators.restore()
        return cls(
            item, ItemState(item), generators or Generators.capture(), Surroundings.capture(), generators is None
        )

    def note_wider_fixture(self) -> None:
        """A fixture that stays up has been set up: what it did to the process is not the attempt's to undo."""
        self.surroundings = Surroundings.capture()
        if self.is_first:
            self.generators = Generators.capture()

    @property
    def is_deferred(self) -> bool:
        return bool(self.keys)

    @property
    def does_not_count(self) -> bool:
        return self.is_deferred or self.out_of_memory is not None

    def run_out_of_memory(self, when: str, error: BaseException) -> None:
        """Record that a device had no memory left, and let go of what the error keeps alive."""
        if self.out_of_memory is None:
            self.out_of_memory, self.out_of_memory_when = OutOfMemory.of(error), when
        let_go(error)

    def refuse(self, key: str, signal: BaseException) -> None:
        """Record that the attempt cannot go on without `key`."""
        self.keys.add(key)
        self._exceptions.append(weakref.ref(signal))

    def note_temporary(self) -> None:
        """Remember the attempt's tmp_path while the item still knows it."""
        path = (getattr(self.item, "funcargs", None) or {}).get("tmp_path")
        self._temporary = path if isinstance(path, Path) else None

    def undo(self) -> None:
        """Leave no trace of an attempt that does not count."""
        for reference in self._exceptions:
            signal = reference()
            if signal is not None:
                let_go(signal)
        self.state.restore(self.item)
        self.generators.restore()
        self.surroundings.restore()
        if self._temporary is not None:  # the next attempt gets the same name
            give_back_temporary(self.item, self._temporary)
