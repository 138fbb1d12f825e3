"""The suite of `quack_kernels` where there is no GPU: its `gpu` tests compile in the pool, load, and launch nothing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.inner import ROOT, InnerProject, InnerResult

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
torch = pytest.importorskip("torch", reason="needs torch")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, which these tests are about the lack of"),
]
SELECTED = "test_any_leading_dimensions_are_rows or test_long_and_odd_rows_on_a_gpu and 1001"
FORM = re.compile(r"SKIPPED \[(\d+)\] .*no GPU; (\d+) kernels? compiled for (\w+)")


def run_suite(folder: Path, *args: str, selected: str = SELECTED, jobs: str | None = "2") -> InnerResult:
    project = InnerProject(folder)
    project.environ["CUDA_VISIBLE_DEVICES"] = ""
    return project.run("--pyargs", "quack_kernels", "-k", selected, "-rs", *args, jobs=jobs, timeout_s=300)


def skips(result: InnerResult) -> set[tuple[int, int, str]]:
    return {(int(a), int(b), arch) for a, b, arch in FORM.findall(result.stdout)}


def test_each_gpu_kernel_is_compiled_once_in_the_pool_and_counted(tmp_path: Path) -> None:
    result = run_suite(tmp_path)
    # On a GPU: for each op, 7 shapes in 3 dtypes, of which two shapes have no rows, and one long row.
    assert skips(result) == {(32, 1, "sm_90a"), (12, 0, "sm_90a")}, result.show()
    assert result.counts == {"passed": 28, "skipped": 44}, result.show()
    assert result.status == 0
    assert "tests marked gpu compile for sm_90a and launch nothing" in result.stdout
    assert result.summary("submitted") == result.summary("done") == 12, result.show()
    assert "compiled in the test process" not in result.stdout


def test_architecture_may_be_named(tmp_path: Path) -> None:
    result = run_suite(tmp_path, "--compile-arch=sm_100a", selected="test_long_and_odd_rows and 1001", jobs=None)
    assert skips(result) == {(2, 1, "sm_100a")}, result.show()
    assert "tests marked gpu compile for sm_100a and launch nothing" in result.stdout


def test_kernel_that_does_not_compile_is_a_failure(tmp_path: Path) -> None:
    # Clusters, which long rows need, came with sm_90.
    result = run_suite(tmp_path, "--compile-arch=sm_80", selected="test_long_and_odd_rows and 262143", jobs=None)
    assert result.counts == {"failed": 2}, result.show()
    assert result.status == 1


def test_header_comes_before_the_session_where_the_suite_is_at_hand(tmp_path: Path) -> None:
    project = InnerProject(tmp_path)
    project.environ["CUDA_VISIBLE_DEVICES"] = ""
    result = project.run(f"{ROOT}/quack_kernels/tests", "-k", "neighbours_are_one_ulp", timeout_s=300)
    lines = [line for line in result.stdout.splitlines() if "tests marked gpu compile for sm_90a" in line]
    assert len(lines) == 1, result.show()
    assert result.stdout.index(lines[0]) < result.stdout.index("collected ")
    assert ", for sm_90a," in result.stdout, result.show()
