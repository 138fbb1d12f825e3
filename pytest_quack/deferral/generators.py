"""The process's random generators: their state when a test begins, put back before each further attempt.

The state of `random` costs 20 µs to take, before every test of a run, while few tests use it. So the memory of the
generator is compared first, and the former state is used again where nothing has changed. Where that memory lies is an
implementation detail of CPython: it is looked at only if, at the start, it holds what the generator itself says, and
nothing is ever written there.
"""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

_WORDS: Final = 624  # of a Mersenne Twister
_HEADER_BYTES: Final = object.__basicsize__


@dataclass(slots=True)
class Generators:
    """The state of the process's random generators, with which every attempt of a test begins."""

    python: Any
    numpy: Any
    torch: Any
    torch_cuda: Any

    @classmethod
    def capture(cls) -> Generators:
        numpy, torch = sys.modules.get("numpy.random"), sys.modules.get("torch")
        has_cuda = torch is not None and hasattr(torch, "cuda") and torch.cuda.is_initialized()
        return cls(
            python=_python.state(),
            numpy=numpy.get_state(legacy=False) if numpy is not None else None,
            torch=torch.get_rng_state() if torch is not None and hasattr(torch, "get_rng_state") else None,
            torch_cuda=torch.cuda.get_rng_state_all() if has_cuda else None,  # type: ignore[union-attr]
        )

    def restore(self) -> None:
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy.random"].set_state(self.numpy)
        if self.torch is not None:
            sys.modules["torch"].set_rng_state(self.torch)
        self._restore_cuda()

    def _restore_cuda(self) -> None:
        cuda = getattr(sys.modules.get("torch"), "cuda", None)
        if cuda is None or not cuda.is_initialized():
            return
        if self.torch_cuda is not None:
            cuda.set_rng_state_all(self.torch_cuda)
        else:  # the attempt was the first to use the device: back to where its generators began
            for generator in cuda.default_generators:
                generator.manual_seed(generator.initial_seed())


class PythonState:
    """The state of `random`, taken anew only where it has changed."""

    def __init__(self, take: Callable[[], Any] = random.getstate) -> None:
        self._take = take
        self._owner: Any = getattr(random.getstate, "__self__", None)
        self._memory = _find_memory(self._owner)
        self._seen: tuple[bytes, float | None] | None = None
        self._state: Any = None

    def state(self) -> Any:
        if self._memory is None:
            return self._take()
        # The generator keeps the second of two normal numbers for later, and gives it away without a draw.
        now = ctypes.string_at(*self._memory), self._owner.gauss_next
        if self._seen != now:
            self._state, self._seen = self._take(), now
        return self._state


def _find_memory(owner: Any) -> tuple[int, int] | None:
    """Where the generator keeps an index and its words: address and size in bytes; None if not behind its header."""
    if type(owner) is not random.Random or not hasattr(owner, "gauss_next"):
        return None
    place = id(owner) + _HEADER_BYTES, 4 * (_WORDS + 1)
    index, *words = struct.unpack(f"=i{_WORDS}I", ctypes.string_at(*place))
    return place if (*words, index) == owner.getstate()[1] else None


_python: Final = PythonState()
