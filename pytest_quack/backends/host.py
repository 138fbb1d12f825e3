"""The CPU that host code is compiled for, and whether this CPU can run code made for another.

The host part of a CuTe DSL object (launch code of a GPU kernel, all of a host-only function) is made for the very CPU
that compiles it: measured on 4.8.1, objects hold AVX2, BMI2 and F16C instructions on a CPU that has them. An object is
therefore good on a CPU that has at least the features of its maker.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Final

# The flags of /proc/cpuinfo that LLVM's x86 code generator makes use of; the rest (mitigations, virtualisation, power)
# say nothing about which instructions a program may hold.
_X86_TEXT: Final = (
    "sse sse2 pni ssse3 sse4_1 sse4_2 sse4a avx avx2 fma fma4 f16c xop popcnt abm lzcnt bmi1 bmi2 tbm adx aes "
    "vaes pclmulqdq vpclmulqdq sha_ni sha512 sm3 sm4 gfni movbe cx16 lahf_lm rdrand rdseed fsgsbase prfchw "
    "3dnowprefetch clflushopt clwb clzero xsave xsaveopt xsavec xsaves rdpid movdiri movdir64b serialize waitpkg "
    "cldemote avx512f avx512bw avx512cd avx512dq avx512er avx512pf avx512vl avx512ifma avx512vbmi avx512_vbmi2 "
    "avx512_vnni avx512_bitalg avx512_vpopcntdq avx512_bf16 avx512_fp16 avx512_vp2intersect avx_vnni avx_ifma "
    "avx_vnni_int8 avx_vnni_int16 avx_ne_convert amx_tile amx_int8 amx_bf16 amx_fp16 "
)
_X86_FEATURES: Final = frozenset(_X86_TEXT.split())


@functools.cache
def host_features() -> tuple[str, ...]:
    """Features of this CPU that compiled code may use, sorted; empty where the system does not tell."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return ()
    return parse_cpuinfo(text, platform.machine())


def parse_cpuinfo(text: str, machine: str) -> tuple[str, ...]:
    """The features that every CPU in a /proc/cpuinfo has, for this kind of machine."""
    sets = []
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in {"flags", "Features"}:
            sets.append(frozenset(value.split()))
    if not sets:
        return ()
    common = frozenset.intersection(*sets)
    return tuple(sorted(common & _X86_FEATURES if machine in {"x86_64", "AMD64", "i686"} else common))


def missing_features(needed: Iterable[str]) -> tuple[str, ...]:
    """Those of `needed` that this CPU lacks."""
    return tuple(sorted(set(needed) - set(host_features())))
