"""What importing the package costs and offers."""

import pickle
from typing import Any

import pytest

import quack_kernels
from quack_kernels import ArgumentError
from quack_kernels.host.config import row_config
from quack_kernels.kernels.rmsnorm.config import host_config as rmsnorm_config
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
