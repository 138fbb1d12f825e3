"""Fixtures of the reference suite, and what its `gpu` tests do where there is no GPU.

There, a test marked `gpu` runs on tensors without data. Each op compiles and loads the kernel that it would launch, and
launches nothing; the test is reported as skipped with the number of its kernels, or as failed where one does not
compile. What a test asserts of numbers cannot be asked and ends it. Only the body of a test function runs so, not its
fixtures and no TestCase.
"""

import json
import os
import subprocess
import sys
from collections.abc import Generator
from contextlib import suppress
from typing import Any, Final

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from quack_kernels.ops.launch import compile_only

HAS_GPU: Final = torch.cuda.is_available()
if not HAS_GPU:
    # The compiler reads it once, when it is imported.
    os.environ["CUTE_DSL_ARCH"] = os.environ.get("CUTE_DSL_ARCH") or "sm_90a"

_IS_ANNOUNCED: Final = pytest.StashKey[bool]()


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker, for runs that do not read the project's own configuration."""
    config.addinivalue_line("markers", "gpu: launches kernels on a GPU")


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Say once what the tests marked `gpu` do here."""
    if HAS_GPU or config.stash.get(_IS_ANNOUNCED, False):
        return []
    config.stash[_IS_ANNOUNCED] = True
    return [f"quack_kernels: no GPU, tests marked gpu compile for {os.environ['CUTE_DSL_ARCH']} and launch nothing"]


def pytest_report_collectionfinish(config: pytest.Config) -> list[str]:
    """Say it now where this file was found too late for the header, as with `--pyargs` from elsewhere."""
    return pytest_report_header(config)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Run a test marked `gpu` without its launches where there is no GPU."""
    if HAS_GPU or pyfuncitem.get_closest_marker("gpu") is None:
        return (yield)
    with compile_only() as kernels, FakeTensorMode(), suppress(DataDependentOutputException):
        yield
    number = f"{len(kernels)} kernel{'' if len(kernels) == 1 else 's'}"
    pytest.skip(f"no GPU; {number} compiled for {os.environ['CUTE_DSL_ARCH']}")


# Runs in a process of its own, since a test process has imported everything already.
_PROBE = """
import json, sys
def loaded(*names):
    return [name for name in names if name in sys.modules]
facts = {}
import quack_kernels
facts["package"] = loaded("torch", "cutlass")
import cutlass.cute
facts["dsl"] = loaded("torch")
import quack_kernels.kernels.rmsnorm.compile, quack_kernels.kernels.softmax.compile
facts["compile"] = loaded("torch")
import torch
x = torch.ones(2, 3)
facts["results"] = [quack_kernels.softmax(x).tolist(), quack_kernels.rmsnorm(x, x[0], eps=0.0).tolist()]
facts["call"] = loaded("torch._dynamo", "torch._inductor", "sympy")
facts["cuda"] = torch.cuda.is_initialized()
print(json.dumps(facts))
"""


@pytest.fixture(scope="session")
def fresh_process() -> dict[str, Any]:
    """Return what a fresh interpreter has loaded after importing the package and after calling the ops."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, "-c", _PROBE], capture_output=True, text=True, env=environment, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return facts
