"""How many compile processes this machine carries."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

# A compile process that has imported torch and a compiler shares most of its memory with the others; its own grows to
# 0.4 to 0.7 GiB while it compiles (measured with nvidia-cutlass-dsl 4.8.1 on small kernels).
MEMORY_PER_JOB_BYTES: Final = 1 << 30
_UNLIMITED: Final = 1 << 60


def default_jobs() -> int:
    """At least 1: what the CPU affinity, the cgroup's CPU quota and the available memory allow."""
    return max(1, min(usable_cpus(), usable_memory_bytes() // MEMORY_PER_JOB_BYTES))


def usable_cpus(read: Callable[[str], str | None] | None = None) -> int:
    """CPUs that this process may use at the same time, at least 1."""
    read = read or _read
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cgroup_cpus(read)
    return max(1, min(cpus, quota) if quota is not None else cpus)


def usable_memory_bytes(read: Callable[[str], str | None] | None = None) -> int:
    """Memory that is available now, within the cgroup's limit."""
    read = read or _read
    return min(_available_bytes(read), _cgroup_bytes(read))


def _cgroup_cpus(read: Callable[[str], str | None]) -> int | None:
    """CPUs of the quota, rounded down; None where there is no quota."""
    quotas = []
    for path in _cgroup_paths(read, "cpu.max"):
        quota, _, period = (read(path) or "").strip().partition(" ")
        if quota.isdigit() and period.strip().isdigit() and int(period):
            quotas.append(int(quota) // int(period))
    if quotas:
        return max(1, min(quotas))
    quota = (read("/sys/fs/cgroup/cpu/cpu.cfs_quota_us") or "").strip()
    period = (read("/sys/fs/cgroup/cpu/cpu.cfs_period_us") or "").strip()
    if quota.isdigit() and period.isdigit() and int(period):
        return max(1, int(quota) // int(period))
    return None


def _available_bytes(read: Callable[[str], str | None]) -> int:
    for line in (read("/proc/meminfo") or "").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return _UNLIMITED


def _cgroup_bytes(read: Callable[[str], str | None]) -> int:
    free = _UNLIMITED
    pairs = [(path, path.replace("memory.max", "memory.current")) for path in _cgroup_paths(read, "memory.max")]
    pairs.append(("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"))
    for limit_path, used_path in pairs:
        limit, used = (read(limit_path) or "").strip(), (read(used_path) or "").strip()
        if limit.isdigit() and int(limit) < _UNLIMITED:
            free = min(free, max(0, int(limit) - int(used or 0)))
    return free


def _cgroup_paths(read: Callable[[str], str | None], name: str) -> list[str]:
    """Where this process's cgroup (version 2) and its ancestors keep the setting, the innermost first."""
    own = ""
    for line in (read("/proc/self/cgroup") or "").splitlines():
        if line.startswith("0::"):
            own = line[3:].strip().strip("/")
    parts = [part for part in own.split("/") if part and part != ".."]
    folders = ["/".join(parts[:i]) for i in range(len(parts), -1, -1)]
    return [f"/sys/fs/cgroup/{folder + '/' if folder else ''}{name}" for folder in folders]


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text()
    except OSError:
        return None
