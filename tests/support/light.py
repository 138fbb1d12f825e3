"""A backend whose artifacts need neither torch nor a compiler, and compile functions that do what a test asks of them.

Each event (a compile, a run of a kernel, a fixture) is one line of the file named by SIDE_LOG: "<pid> <event>".
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from pytest_quack import jit_cache
from pytest_quack.backends import Exported, Target
from pytest_quack.cache.store import Artifact
from pytest_quack.errors import ArtifactError, ExportError

NAME = "support.light:BACKEND"
SCALE = 1.0


def log(event: str) -> None:
    """Append one event to the side log, if there is one."""
    path = os.environ.get("SIDE_LOG")
    if path:
        with open(path, "a") as file:
            file.write(f"{os.getpid()} {event}\n")


class LightKernel:
    """Calling it logs that it ran and returns its value plus what it is given."""

    def __init__(self, name: str, value: float) -> None:
        self.name = name
        self.value = value

    def __call__(self, x: float = 0.0) -> float:
        log(f"ran {self.name}")
        return self.value + x


def _arch() -> str:
    """What the environment names, else what the device is, which a compile process cannot see."""
    return os.environ.get("LIGHT_ARCH") or ("" if os.environ.get("CUDA_VISIBLE_DEVICES") == "" else "detected")


class LightBackend:
    """Artifacts are JSON."""

    name = "light"

    def toolchain(self) -> Mapping[str, str]:
        return {"light": os.environ.get("LIGHT_VERSION", "1"), "python": "any"}

    def options(self) -> str:
        return ""

    def target(self) -> Target:
        return Target(_arch(), "any", tuple(os.environ.get("LIGHT_FEATURES", "").split()))

    def export(self, compiled: Any) -> Exported:
        if not isinstance(compiled, LightKernel):
            raise ExportError(f"a {type(compiled).__name__} is not a light kernel")
        return Exported(json.dumps([compiled.name, compiled.value]).encode(), "light", "")

    def load(self, artifact: Artifact) -> Callable[..., Any]:
        try:
            name, value = json.loads(artifact.payload)
        except ValueError as error:
            raise ArtifactError(f"it cannot be loaded ({error})") from error
        return LightKernel(name, value)

    def interception(self, resolver: Any, notice: Callable[[str], None]) -> None:
        return None

    def lower(self, payload: bytes, content_key: str) -> Exported:
        raise NotImplementedError("nothing is traced here")

    def check_interception(self) -> Exported:
        raise NotImplementedError("nothing is traced here")

    def worker_environ(self) -> Mapping[str, str]:
        return {"LIGHT_ARCH": _arch()}

    def prepare_worker(self) -> None:
        pass

    def pin_worker(self, pinned: Mapping[str, str]) -> None:
        pass

    def worker_preload(self) -> tuple[str, ...]:
        return ()

    def heralds(self) -> frozenset[str]:
        return frozenset()


BACKEND = LightBackend()


@jit_cache(backend=NAME)
def build(name: str, *, value: float = 1.0, seconds: float = 0.0) -> Callable[..., float]:
    """A kernel that takes `seconds` to compile."""
    log(f"compile {name}")
    time.sleep(seconds)
    return LightKernel(name, value)


@jit_cache(backend=NAME)
def build_badly(name: str, how: str) -> Callable[..., float]:
    """A compile that goes wrong: "raise", "crash", "exit", "hang", "export", "worker" (in a compile process only)."""
    log(f"compile {name}")
    is_worker = os.environ.get("CUDA_VISIBLE_DEVICES") == ""
    if how == "raise":
        raise ValueError(f"{name} has a bad tile")
    if how == "worker" and is_worker:
        raise RuntimeError(f"{name} fails in a compile process only")
    if how == "crash":
        print(f"about to crash in {name}", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)
    if how == "exit":
        os._exit(3)
    if how == "hang":
        time.sleep(3600)
    if how == "export":
        return lambda x=0.0: x
    return LightKernel(name, 1.0)


@jit_cache(backend=NAME)
def build_surroundings(_number: int) -> Callable[..., float]:
    """A kernel whose name says what its compile saw."""
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "all").split(",")
    gpus = [gpu for gpu in gpus if gpu]
    return LightKernel(f"gpus={gpus} mode={os.environ.get('LIGHT_MODE')} cwd={os.getcwd()}", 1.0)


@jit_cache(backend=NAME)
def build_scaled(name: str) -> Callable[..., float]:
    """A kernel that depends on a global of this module."""
    return LightKernel(name, SCALE)
