"""Random suites: whatever a suite is made of, a run that puts tests off shows what a plain run shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from fidelity.runs import WAYS, compare_suites
from fidelity.suites import draw

pytestmark = pytest.mark.slow
GROUP = 20
SEED = 20_261_201
LIGHT = draw(60, SEED)


@pytest.mark.light
@pytest.mark.parametrize("first", range(0, len(LIGHT), GROUP))
def test_light_kernels(tmp_path: Path, first: int) -> None:
    result = compare_suites(tmp_path, LIGHT[first : first + GROUP], WAYS, kernels="light", seed=SEED + first)
    assert not result.found, "\n\n".join(f"{way}:\n{text}" for way, text in result.found.items())
    assert result.deferrals > 50


@pytest.mark.parametrize("workers", [0, 2])
def test_kernels_of_the_cute_dsl(tmp_path: Path, workers: int) -> None:
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
    pytest.importorskip("torch", reason="needs torch")
    ways = tuple(way for way in WAYS if way.workers == workers and way.has_plugin and not way.depth)
    result = compare_suites(tmp_path, draw(20, SEED, has_torch=True), ways, kernels="cute", seed=SEED)
    assert not result.found, "\n\n".join(f"{way}:\n{text}" for way, text in result.found.items())
    assert result.deferrals > 50
