"""Small projects of compile functions, called in processes of their own with one cache directory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.inner import ROOT, TESTS

_PRIVATE = ("QUACK_", "CUTE_DSL_", "LIGHT_", "COV_", "SIDE_LOG")
IMPORTS = """
from pytest_quack import jit_cache
from support.light import NAME, LightKernel, log
"""


@dataclass(frozen=True)
class Ran:
    """What one process said: the values that it showed, and how many kernels it compiled."""

    values: list[Any]
    compiles: int
    stderr: str


class FreshProject:
    """A folder of modules, a cache directory, and fresh processes that use both."""

    def __init__(self, root: Path) -> None:
        self.root = root / "project"
        self.root.mkdir()
        self.cache = root / "cache"
        self.log_path = root / "side.log"

    def write(self, name: str, text: str) -> Path:
        """Write one module; those that define compile functions start with `IMPORTS`."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return path

    def kernels(self, name: str, text: str) -> Path:
        return self.write(name, IMPORTS + textwrap.dedent(text))

    def environ(self, **more: str) -> dict[str, str]:
        environ = {name: value for name, value in os.environ.items() if not name.startswith(_PRIVATE)}
        environ.update(
            PYTHONPATH=os.pathsep.join([str(self.root), str(TESTS), str(ROOT)]),
            PYTHONDONTWRITEBYTECODE="1",  # an edit within the same second must be seen
            QUACK_CACHE_DIR=str(self.cache),
            SIDE_LOG=str(self.log_path),
        )
        environ.update(more)
        return environ

    def start(self, script: str, cwd: Path | None = None, **environ: str) -> subprocess.Popen[str]:
        """Start a process whose script may call `show(value)`."""
        text = "import json\ndef show(value): print(json.dumps(value), flush=True)\n" + textwrap.dedent(script)
        return subprocess.Popen(
            [sys.executable, "-W", "error", "-c", text],
            cwd=cwd or self.root,
            env=self.environ(**environ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, script: str, cwd: Path | None = None, **environ: str) -> Ran:
        before = self.compiles()
        with self.start(script, cwd, **environ) as process:
            stdout, stderr = process.communicate(timeout=120)
        assert process.returncode == 0, stderr
        return Ran([json.loads(line) for line in stdout.splitlines()], self.compiles() - before, stderr)

    def compiles(self) -> int:
        lines = self.log_path.read_text().splitlines() if self.log_path.exists() else []
        return sum(line.partition(" ")[2].startswith("compile") for line in lines)
