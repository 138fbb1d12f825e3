"""Host code that rounds to bfloat16, on machines whose C runtime is older than that."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

_NAME = "__truncsfbf2"
# The result is returned as a 16-bit float is, in a vector register: C compilers have known _Float16 for longer.
_SOURCE = """
#include <string.h>

_Float16 __truncsfbf2(float value)
{
    unsigned bits;
    unsigned short rounded;
    _Float16 result;

    memcpy(&bits, &value, sizeof bits);
    if ((bits & 0x7fffffffu) > 0x7f800000u)
        rounded = (bits >> 16) | 0x40; /* a quiet NaN */
    else
        rounded = (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16; /* to nearest, ties to even */
    memcpy(&result, &rounded, sizeof result);
    return result;
}
"""


def bfloat16_environ(folder: Path) -> dict[str, str] | None:
    """Variables for a process whose host code rounds to bfloat16; None where that cannot be had.

    Where the CPU has no instruction for it LLVM calls a function that libgcc has from GCC 13 on; where that is older, a
    library with it is built in `folder` and preloaded, which takes a C compiler.
    """
    if hasattr(ctypes.CDLL("libgcc_s.so.1"), _NAME):
        return {}
    compiler = shutil.which("cc")
    if compiler is None:
        return None
    source, library = folder / "bfloat16.c", folder / "libbfloat16.so"
    source.write_text(_SOURCE)
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", library, source], check=True)
    preloaded = [str(library), *filter(None, [os.environ.get("LD_PRELOAD")])]
    return {"LD_PRELOAD": " ".join(preloaded)}
