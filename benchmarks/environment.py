"""What all result files share: where and when a measurement was made, and how it is written."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
from pathlib import Path
from typing import Any

_DISTRIBUTIONS = ("pytest", "pluggy", "torch", "nvidia-cutlass-dsl", "apache-tvm-ffi", "quack-kernels")


def describe() -> dict[str, Any]:
    """Date, machine and versions."""
    versions = {}
    for name in _DISTRIBUTIONS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "python": platform.python_version(),
        "cpu": _cpu(),
        "cpus": len(os.sched_getaffinity(0)),
        "gpu": _gpu(),
        "versions": versions,
    }


def report(result: dict[str, Any], path: Path | None, *, is_shown: bool = True) -> dict[str, Any]:
    """Write a result to `path` if one is given, print it unless that is not wanted, and return all that was written."""
    result = {**describe(), **result}
    text = json.dumps(result, indent=1) + "\n"
    if path is not None:
        path.write_text(text)
    if is_shown:
        print(text)
    return result


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _gpu() -> str | None:
    try:
        import torch
    except ImportError:
        return None
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None
