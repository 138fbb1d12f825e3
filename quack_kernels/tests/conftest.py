"""Fixtures of the reference suite."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

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
