"""Stands for the module `pynvml` where there is no driver: lists the GPUs that NVML_STUB describes, as JSON.

Each is an object: `uuid`, and, if wanted, `free` (GiB), `model`, `compute_mode` (None: not supported), `is_lost`, and
`mig`, a list of instances (None: an empty place) of `uuid`, `free`, `gi` and `ci`. Null instead of the list: no driver.
"""

from __future__ import annotations

import json
import os
from types import SimpleNamespace
from typing import Any

GIB = 1 << 30
opened = 0


class NVMLError(Exception):
    """As pynvml's."""


def dump(gpus: list[dict[str, Any]] | None) -> str:
    return json.dumps(gpus)


def write_to(folder: Any) -> None:
    """Have `import pynvml` find this in a process that has `folder` first on its path."""
    (folder / "pynvml.py").write_text("from support.nvml_stub import *\n")


def _gpus() -> Any:
    path = os.environ.get("NVML_STUB_FILE")
    text = open(path).read() if path else os.environ["NVML_STUB"]  # noqa: SIM115
    return json.loads(text)


def nvmlInit() -> None:  # noqa: N802
    global opened
    if _gpus() is None:
        raise NVMLError("no driver")
    opened += 1


def nvmlShutdown() -> None:  # noqa: N802
    global opened
    opened -= 1


def nvmlDeviceGetCount() -> int:  # noqa: N802
    return len(_gpus())


def nvmlDeviceGetHandleByIndex(index: int) -> Any:  # noqa: N802
    gpu = _gpus()[index]
    if gpu.get("is_lost"):
        raise NVMLError("lost")
    return gpu


def nvmlDeviceGetComputeMode(gpu: Any) -> int:  # noqa: N802
    mode = gpu.get("compute_mode", 0)
    if mode is None:
        raise NVMLError("not supported")
    return int(mode)


def nvmlDeviceGetUUID(gpu: Any) -> str:  # noqa: N802
    return str(gpu["uuid"])


def nvmlDeviceGetName(gpu: Any) -> bytes:  # noqa: N802
    return str(gpu.get("model", "Stub H200")).encode()


def nvmlDeviceGetMemoryInfo(gpu: Any) -> Any:  # noqa: N802
    return SimpleNamespace(total=80 * GIB, free=gpu.get("free", 79) * GIB)


def nvmlDeviceGetMigMode(gpu: Any) -> tuple[int, int]:  # noqa: N802
    if "mig" not in gpu:
        raise NVMLError("not supported")
    return 1, 1


def nvmlDeviceGetMaxMigDeviceCount(gpu: Any) -> int:  # noqa: N802
    return len(gpu["mig"])


def nvmlDeviceGetMigDeviceHandleByIndex(gpu: Any, place: int) -> Any:  # noqa: N802
    if gpu["mig"][place] is None:
        raise NVMLError("not found")
    return gpu["mig"][place]


def nvmlDeviceGetGpuInstanceId(part: Any) -> int:  # noqa: N802
    return int(part["gi"])


def nvmlDeviceGetComputeInstanceId(part: Any) -> int:  # noqa: N802
    return int(part["ci"])
