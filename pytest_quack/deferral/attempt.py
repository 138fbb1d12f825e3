"""One attempt at one item: what it was refused, what it reported so far, and how to undo it.

Whether an attempt was interrupted is decided by the record made here when CompilePending is raised, not by the
exception that arrives: no `except`, `raises(BaseException)`, `finally: return`, xfail or TestCase can turn it into a
result. Up to the tear-down everything that the attempt reports is held back; when it begins, the attempt either counts,
and what was held is reported, or it does not, and nothing of it remains.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import traceback
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pytest_quack.deferral.internals import ItemState, give_back_temporary


@dataclass(slots=True)
class Surroundings:
    """Process-wide state that every attempt of a test begins with: random generators, environment, directory."""

    python: Any
    numpy: Any
    torch: Any
    torch_cuda: Any
    environ: dict[Any, Any]
    directory: str | None

    @classmethod
    def capture(cls) -> Surroundings:
        numpy, torch = sys.modules.get("numpy.random"), sys.modules.get("torch")
        has_cuda = torch is not None and hasattr(torch, "cuda") and torch.cuda.is_initialized()
        try:
            directory: str | None = os.getcwd()
        except OSError:
            directory = None
        return cls(
            python=random.getstate(),
            numpy=numpy.get_state(legacy=False) if numpy is not None else None,
            torch=torch.get_rng_state() if torch is not None and hasattr(torch, "get_rng_state") else None,
            torch_cuda=torch.cuda.get_rng_state_all() if has_cuda else None,  # type: ignore[union-attr]
            environ=_environ(),
            directory=directory,
        )

    def restore(self) -> None:
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy.random"].set_state(self.numpy)
        if self.torch is not None:
            sys.modules["torch"].set_rng_state(self.torch)
        self._restore_cuda()
        if _environ() != self.environ:
            former = {os.fsdecode(name): os.fsdecode(value) for name, value in self.environ.items()}
            for name in set(os.environ) - set(former):
                del os.environ[name]
            os.environ.update(former)
        if self.directory is not None:
            with contextlib.suppress(OSError):
                os.chdir(self.directory)

    def _restore_cuda(self) -> None:
        cuda = getattr(sys.modules.get("torch"), "cuda", None)
        if cuda is None or not cuda.is_initialized():
            return
        if self.torch_cuda is not None:
            cuda.set_rng_state_all(self.torch_cuda)
        else:  # the attempt was the first to use the device: back to where its generators began
            for generator in cuda.default_generators:
                generator.manual_seed(generator.initial_seed())


def _environ() -> dict[Any, Any]:
    """A copy of the environment, taken from CPython's encoded mapping where there is one: thirty times as fast."""
    encoded = getattr(os.environ, "_data", None)
    return dict(encoded) if isinstance(encoded, dict) else dict(os.environ)


@dataclass(slots=True)
class Attempt:
    """One run of an item's protocol.

    Attributes:
        keys: what it was refused because it is still being compiled; not empty means that it does not count.
        is_settled: whether it was decided, at the beginning of the tear-down, if it counts.
        held: hook calls that wait for that decision.
    """

    item: pytest.Item
    state: ItemState
    surroundings: Surroundings
    keys: set[str] = field(default_factory=set)
    is_settled: bool = False
    held: list[Callable[[], Any]] = field(default_factory=list)
    teardown_error: str | None = None
    _exceptions: list[weakref.ref[BaseException]] = field(default_factory=list)
    _temporary: Path | None = None

    @classmethod
    def begin(cls, item: pytest.Item, surroundings: Surroundings | None) -> Attempt:
        """Start an attempt; `surroundings` are those that the item's first attempt began with, None for the first."""
        if surroundings is None:
            surroundings = Surroundings.capture()
        else:
            surroundings.restore()
        return cls(item, ItemState(item), surroundings)

    @property
    def is_deferred(self) -> bool:
        return bool(self.keys)

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
        self.held.clear()
        for reference in self._exceptions:
            signal = reference()
            if signal is not None:  # its frames hold the test's locals, and those hold device memory
                traceback.clear_frames(signal.__traceback__)
                signal.__traceback__ = None
        self.state.restore(self.item)
        self.surroundings.restore()
        if self._temporary is not None:  # the next attempt gets the same name
            give_back_temporary(self.item, self._temporary)
