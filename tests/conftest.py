"""What all tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_quack.runtime import Runtime, replace_runtime
from pytest_quack.settings import Settings
from support.inner import InnerProject

pytest_plugins = ["pytester"]


@pytest.fixture
def inner(tmp_path: Path) -> InnerProject:
    """A project for whole pytest runs in a process of their own."""
    return InnerProject(tmp_path)


@pytest.fixture
def runtime(tmp_path: Path) -> Iterator[Runtime]:
    """A runtime with a private cache directory, in force for one test."""
    runtime = Runtime(Settings(cache_dir=str(tmp_path / "cache"), timeout_s=60.0), is_reported=True)
    before = replace_runtime(runtime)
    yield runtime
    replace_runtime(before)
