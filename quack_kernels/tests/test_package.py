"""What importing the package costs and offers."""

import pickle
from collections.abc import Callable
from typing import Any

import pytest

import quack_kernels
from quack_kernels import ArgumentError
from quack_kernels.gpu.config import MAX_COLUMNS, RowLaunch, row_launch
from quack_kernels.host.config import row_config
from quack_kernels.kernels.rmsnorm.config import gpu_config as gpu_rmsnorm_config
from quack_kernels.kernels.rmsnorm.config import host_config as rmsnorm_config
from quack_kernels.kernels.softmax.config import gpu_config as gpu_softmax_config
from quack_kernels.kernels.softmax.config import host_config as softmax_config


def test_public_names_are_exactly_these_and_resolve() -> None:
    assert sorted(quack_kernels.__all__) == ["ArgumentError", "QuackKernelsError", "rmsnorm", "softmax"]
    for name in quack_kernels.__all__:
        assert getattr(quack_kernels, name).__name__ == name
        assert name in dir(quack_kernels)


def test_unknown_name_is_an_attribute_error_that_lists_the_known_ones() -> None:
    with pytest.raises(AttributeError, match=r"'sofmax'; it offers .*softmax"):
        quack_kernels.__getattr__("sofmax")


def test_importing_the_package_loads_neither_torch_nor_the_dsl(fresh_process: dict[str, Any]) -> None:
    assert fresh_process["package"] == []


def test_importing_compile_functions_does_not_load_torch(fresh_process: dict[str, Any]) -> None:
    # Some versions of the DSL load it themselves.
    assert fresh_process["compile"] == fresh_process["dsl"]


def test_calling_ops_does_not_load_the_torch_compiler(fresh_process: dict[str, Any]) -> None:
    assert fresh_process["call"] == []


def test_calling_ops_on_cpu_tensors_touches_no_gpu(fresh_process: dict[str, Any]) -> None:
    assert fresh_process["cuda"] is False


def test_ops_give_results_in_a_fresh_process(fresh_process: dict[str, Any]) -> None:
    softmax, rmsnorm = fresh_process["results"]
    assert softmax == [[pytest.approx(1 / 3)] * 3] * 2
    assert rmsnorm == [[1.0] * 3] * 2


def test_argument_error_is_a_value_error_that_survives_pickling() -> None:
    error = ArgumentError("x", "has no dimension", "at least 1 is needed")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is ArgumentError
    assert issubclass(ArgumentError, ValueError)
    assert (copy.argument, copy.value, copy.accepted) == (error.argument, error.value, error.accepted)
    assert str(copy) == str(error) == "x has no dimension, but at least 1 is needed"


@pytest.mark.parametrize("n", [1, 3, 7, 8, 9, 1000, 8192])
def test_blocks_and_tail_cover_each_column_once(n: int) -> None:
    for config in (rmsnorm_config(n), softmax_config(n)):
        assert 1 <= config.unroll <= n
        assert config.tail_start == config.whole_blocks * config.unroll
        assert 0 <= n - config.tail_start < config.unroll


@pytest.mark.parametrize("n", [0, -1, 2**31])
def test_row_without_a_kernel_is_refused(n: int) -> None:
    with pytest.raises(ArgumentError, match=f"n is {n}, but"):
        row_config(n, unroll=8)


GPU_ROWS = (*range(1, 70), 127, 128, 129, 1000, 1001, 4096, 16_384, 50_257, 65_537, 131_071, 262_143, MAX_COLUMNS)


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("gpu_config", [gpu_rmsnorm_config, gpu_softmax_config])
def test_gpu_threads_hold_each_column_once(gpu_config: Callable[[int, int], RowLaunch], itemsize: int) -> None:
    for n in GPU_ROWS:
        config = gpu_config(n, itemsize)
        for shift in range(config.largest_shift + 1):
            start = -shift
            columns = [
                start + cta * config.columns_per_cta + (thread + j * config.threads_per_row) * config.vector
                for cta in range(config.cluster)
                for thread in range(config.threads_per_row)
                for j in range(config.vectors_per_thread)
            ]
            held = {column + v for column in columns for v in range(config.vector)}
            assert len(held) == len(columns) * config.vector
            assert held >= set(range(n)), config
            assert not config.is_even or held == set(range(n))


@pytest.mark.parametrize("n", [0, -1, MAX_COLUMNS + 1])
def test_row_without_a_gpu_kernel_is_refused(n: int) -> None:
    with pytest.raises(ArgumentError, match=f"n is {n}, but GPU kernels are compiled for 1 to {MAX_COLUMNS}"):
        row_launch(n, 2, vectors=4, cta_bytes=32_768)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"threads_per_row": 48}, "48 threads"),
        ({"rows_per_cta": 64}, "2048 threads, which must be whole warps, at most 1024"),
        ({"threads_per_row": 16}, "16 threads"),
        ({"cluster": 3}, "cluster of 3"),
        ({"cluster": 16}, "cluster of 16"),
        ({"cluster": 2, "rows_per_cta": 2}, "several rows in a CTA of a cluster"),
        ({"vectors_per_thread": 3}, "holds 768 columns of a row, too few"),
        ({"n": 1023, "vectors_per_thread": 4}, "holds 1024 columns of a row, too few"),
    ],
)
def test_launch_that_cannot_be_is_refused(change: dict[str, int], message: str) -> None:
    values = {"n": 1024, "vector": 8, "threads_per_row": 32, "rows_per_cta": 1, "vectors_per_thread": 4}
    RowLaunch(**values)
    with pytest.raises(ValueError, match=message):
        RowLaunch(**{**values, **change})
