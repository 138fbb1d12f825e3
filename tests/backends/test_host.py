"""The CPU that host code is made for, read from /proc/cpuinfo as every kind of machine writes it."""

from __future__ import annotations

import platform

import pytest

from pytest_quack.backends import find_backend
from pytest_quack.backends.host import host_features, missing_features, parse_cpuinfo
from pytest_quack.errors import SettingsError

pytestmark = pytest.mark.light

X86 = """processor	: 0
model name	: Some CPU @ 2.00GHz
flags		: fpu vme sse2 avx avx2 bmi2 f16c avx512f hypervisor ibrs md_clear
bugs		: spectre_v1 avx_bug
power management:

processor	: 1
model name	: Some CPU @ 2.00GHz
flags		: fpu vme sse2 avx avx2 bmi2 f16c hypervisor ibrs
"""
ARM = """processor	: 0
Features	: fp asimd crc32 sve
CPU implementer	: 0x41

processor	: 1
Features	: fp asimd crc32
"""


def test_only_what_every_cpu_has_and_code_may_use_counts() -> None:
    assert parse_cpuinfo(X86, "x86_64") == ("avx", "avx2", "bmi2", "f16c", "sse2")


def test_features_of_arm_count_as_they_are() -> None:
    assert parse_cpuinfo(ARM, "aarch64") == ("asimd", "crc32", "fp")


@pytest.mark.parametrize("text", ["", "processor : 0\nmodel name : x\n", "no colon at all"])
def test_where_the_system_does_not_tell_there_are_none(text: str) -> None:
    assert parse_cpuinfo(text, "x86_64") == ()


def test_the_order_in_which_the_kernel_lists_them_does_not_matter() -> None:
    swapped = X86.replace("sse2 avx avx2", "avx2 avx sse2")
    assert parse_cpuinfo(swapped, "x86_64") == parse_cpuinfo(X86, "x86_64")


def test_this_machine_lacks_none_of_its_own_features() -> None:
    assert missing_features(host_features()) == ()
    assert missing_features(("zz_new", *host_features(), "aa_new")) == ("aa_new", "zz_new")
    assert missing_features(()) == ()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="every x86-64 CPU has SSE2")
def test_this_machine_tells_its_features() -> None:
    assert "sse2" in host_features()


def test_a_backend_is_found_by_name_or_by_path() -> None:
    from support.light import BACKEND, NAME

    assert find_backend(NAME) is BACKEND
    with pytest.raises(
        SettingsError, match=r'no backend "triton"; use one of cute_dsl, or "package\.module:attribute"'
    ):
        find_backend("triton")
