"""How many compile processes this machine carries, from what the system says."""

from __future__ import annotations

import os

import pytest

from pytest_quack.compile import limits
from pytest_quack.compile.limits import MEMORY_PER_JOB_BYTES, default_jobs, usable_cpus, usable_memory_bytes

pytestmark = pytest.mark.light

GIB = 1 << 30
MEMINFO = {"/proc/meminfo": "MemTotal:       99999999 kB\nMemFree:  1 kB\nMemAvailable:   8388608 kB\n"}


@pytest.fixture
def cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)


CPU_CASES = {
    "no cgroup": ({}, 16),
    "no quota": ({"/sys/fs/cgroup/cpu.max": "max 100000\n"}, 16),
    "quota": ({"/sys/fs/cgroup/cpu.max": "400000 100000\n"}, 4),
    "part of a CPU": ({"/sys/fs/cgroup/cpu.max": "50000 100000\n"}, 1),
    "a CPU and a half": ({"/sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1),
    "more than there are": ({"/sys/fs/cgroup/cpu.max": "6400000 100000\n"}, 16),
    "another period": ({"/sys/fs/cgroup/cpu.max": "30000 10000\n"}, 3),
    "own group": (
        {"/proc/self/cgroup": "0::/a/b\n", "/sys/fs/cgroup/a/b/cpu.max": "200000 100000\n"},
        2,
    ),
    "group above": (
        {"/proc/self/cgroup": "0::/a/b\n", "/sys/fs/cgroup/a/cpu.max": "300000 100000\n"},
        3,
    ),
    "version 1": (
        {
            "/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "500000\n",
            "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
        5,
    ),
    "version 1 without a quota": (
        {"/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n", "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n"},
        16,
    ),
    "nonsense": ({"/sys/fs/cgroup/cpu.max": "?\n", "/proc/self/cgroup": "\n::\n"}, 16),
    "empty": ({"/sys/fs/cgroup/cpu.max": ""}, 16),
}


@pytest.mark.usefixtures("cpus")
@pytest.mark.parametrize(("system", "expected"), CPU_CASES.values(), ids=CPU_CASES)
def test_cpus_are_those_of_the_affinity_within_the_quota(system: dict[str, str], expected: int) -> None:
    assert usable_cpus(system.get) == expected


@pytest.mark.usefixtures("cpus")
def test_of_nested_groups_the_strictest_quota_counts() -> None:
    system = {
        "/proc/self/cgroup": "0::/a/b\n",
        "/sys/fs/cgroup/a/b/cpu.max": "800000 100000\n",
        "/sys/fs/cgroup/a/cpu.max": "200000 100000\n",
    }
    assert usable_cpus(system.get) == 2


MEMORY_CASES = {
    "no limit": ({**MEMINFO}, 8 * GIB),
    "max": ({**MEMINFO, "/sys/fs/cgroup/memory.max": "max\n"}, 8 * GIB),
    "limit": (
        {**MEMINFO, "/sys/fs/cgroup/memory.max": f"{4 * GIB}\n", "/sys/fs/cgroup/memory.current": f"{GIB}\n"},
        3 * GIB,
    ),
    "limit above what is there": ({**MEMINFO, "/sys/fs/cgroup/memory.max": f"{64 * GIB}\n"}, 8 * GIB),
    "used up": (
        {**MEMINFO, "/sys/fs/cgroup/memory.max": f"{GIB}\n", "/sys/fs/cgroup/memory.current": f"{2 * GIB}\n"},
        0,
    ),
    "strictest group": (
        {
            **MEMINFO,
            "/proc/self/cgroup": "0::/a/b\n",
            "/sys/fs/cgroup/a/b/memory.max": f"{6 * GIB}\n",
            "/sys/fs/cgroup/a/memory.max": f"{2 * GIB}\n",
        },
        2 * GIB,
    ),
    "version 1": (
        {
            **MEMINFO,
            "/sys/fs/cgroup/memory/memory.limit_in_bytes": f"{5 * GIB}\n",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB}\n",
        },
        4 * GIB,
    ),
    "version 1 without a limit": (
        {**MEMINFO, "/sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"},
        8 * GIB,
    ),
}


@pytest.mark.parametrize(("system", "expected"), MEMORY_CASES.values(), ids=MEMORY_CASES)
def test_memory_is_what_is_available_within_the_limit(system: dict[str, str], expected: int) -> None:
    assert usable_memory_bytes(system.get) == expected


def test_a_system_that_tells_nothing_limits_nothing() -> None:
    assert usable_memory_bytes(lambda path: None) >= 1 << 40


@pytest.mark.parametrize(
    ("cpu_count", "memory_bytes", "jobs"),
    [
        (16, 64 * GIB, 16),
        (16, 4 * MEMORY_PER_JOB_BYTES, 4),
        (16, 4 * MEMORY_PER_JOB_BYTES - 1, 3),
        (16, 0, 1),
        (1, 64 * GIB, 1),
    ],
)
def test_jobs_are_bounded_by_cpus_and_memory_and_never_none(
    monkeypatch: pytest.MonkeyPatch, cpu_count: int, memory_bytes: int, jobs: int
) -> None:
    monkeypatch.setattr(limits, "usable_cpus", lambda: cpu_count)
    monkeypatch.setattr(limits, "usable_memory_bytes", lambda: memory_bytes)
    assert default_jobs() == jobs


def test_this_machine_carries_at_least_one() -> None:
    assert 1 <= default_jobs() <= (os.cpu_count() or 1)
