"""RMSNorm forward: numbers, layouts, odd values, refused arguments."""

from typing import Any, Final

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from quack_kernels import ArgumentError, rmsnorm
from quack_kernels.kernels.rmsnorm.compile import compile_rmsnorm
from quack_kernels.ops.checks import check_device

from .inputs import (
    BF16,
    DEVICES,
    F16,
    F32,
    LAYOUTS,
    PLACES,
    SHAPES,
    WEIGHTED_PLACES,
    on,
    random_rows,
)
from .reference import assert_within_one_ulp, largest_ulp_distance, rmsnorm_reference

CPU_OPTIONS: Final = pytest.mark.parametrize(
    ("dtype", "weight_dtype"), [(F32, None), (F32, F32), (BF16, F32), (BF16, BF16)], ids=str
)
NAN, INF = float("nan"), float("inf")


def weight_for(n: int, dtype: torch.dtype | None, device: str = "cpu") -> torch.Tensor | None:
    """Return a weight, or None for none."""
    return None if dtype is None else random_rows(n, device=device, dtype=dtype, seed=1)


def assert_matches(x: torch.Tensor, weight: torch.Tensor | None, eps: float = 1e-6) -> None:
    """Assert that the result is contiguous, new, and within 1 ulp of float64."""
    y = rmsnorm(x, weight, eps=eps)
    assert y.is_contiguous()
    assert_within_one_ulp(y, rmsnorm_reference(x, weight, eps))


@WEIGHTED_PLACES
@pytest.mark.parametrize("n", [1, 3, 17, 128, 1000, 4096])
def test_result_is_within_one_ulp_of_float64(
    n: int, device: str, dtype: torch.dtype, weight_dtype: torch.dtype | None
) -> None:
    assert_matches(random_rows(13, n, device=device, dtype=dtype), weight_for(n, weight_dtype, device))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("n", "dtype", "weight_dtype"),
    [
        (9, BF16, F32),
        (63, F32, F32),
        (1001, F16, F16),
        (16_384, BF16, BF16),
        (32_768, BF16, F32),
        (50_257, BF16, BF16),
        (65_536, F16, None),
        (131_071, BF16, BF16),
        (131_072, F32, F32),
        (262_143, BF16, F32),
        (262_144, BF16, BF16),
        (262_144, F32, F32),
    ],
    ids=str,
)
def test_long_and_odd_rows_on_a_gpu(n: int, dtype: torch.dtype, weight_dtype: torch.dtype | None) -> None:
    x = random_rows(6, n, device="cuda", dtype=dtype)
    assert_matches(x, weight_for(n, weight_dtype, "cuda"))


@WEIGHTED_PLACES
@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1e30])
def test_magnitude_of_x_costs_no_accuracy(
    scale: float, device: str, dtype: torch.dtype, weight_dtype: torch.dtype | None
) -> None:
    assert_matches(
        random_rows(7, 1000, device=device, dtype=dtype, seed=2, scale=scale), weight_for(1000, weight_dtype, device)
    )


@PLACES
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_leading_dimensions_are_rows(shape: tuple[int, ...], device: str, dtype: torch.dtype) -> None:
    assert_matches(random_rows(*shape, device=device, dtype=dtype), weight_for(17, dtype, device))


@PLACES
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("n", [17, 1000])
def test_layout_of_x_does_not_matter(n: int, layout: str, device: str, dtype: torch.dtype) -> None:
    x = LAYOUTS[layout](random_rows(6, n, device=device, dtype=dtype))
    before = x.clone()
    assert_matches(x, weight_for(n, dtype, device))
    assert torch.equal(x, before)


@DEVICES
def test_single_column_may_have_any_stride(device: str) -> None:
    assert_matches(random_rows(40, device=device).as_strided((4, 1), (7, 5)), None)


@DEVICES
@pytest.mark.parametrize("n", [17, 1024])
def test_weight_may_be_strided_or_unaligned(n: int, device: str) -> None:
    x = random_rows(4, n, device=device)
    assert_matches(x, random_rows(2 * n, device=device, seed=1)[::2])
    assert_matches(x, random_rows(n + 1, device=device, seed=1)[1:])


@DEVICES
@pytest.mark.parametrize("eps", [0.0, 1e-6, 1e-3, 2.5])
def test_eps_is_a_run_time_number(eps: float, device: str) -> None:
    assert_matches(random_rows(4, 17, device=device, scale=1e-2), None, eps)


@PLACES
@pytest.mark.parametrize("value", [1e-39, 1e-30, 1e30])
def test_without_eps_rows_of_any_magnitude_become_ones(value: float, device: str, dtype: torch.dtype) -> None:
    if dtype is F16:
        value = 6e-8 if value < 1 else 6e4
    assert_matches(on(device, torch.full((2, 1000), value, dtype=dtype)), None, 0.0)


@DEVICES
def test_default_eps_is_a_millionth(device: str) -> None:
    x = random_rows(4, 17, device=device, scale=1e-3)
    assert torch.equal(rmsnorm(x), rmsnorm(x, eps=1e-6))


@WEIGHTED_PLACES
def test_row_of_zeros_stays_zero(device: str, dtype: torch.dtype, weight_dtype: torch.dtype | None) -> None:
    assert (
        rmsnorm(on(device, torch.zeros(2, 17, dtype=dtype)), weight_for(17, weight_dtype, device)).count_nonzero() == 0
    )


@PLACES
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_value_that_is_not_finite_spreads_within_its_row_only(value: float, device: str, dtype: torch.dtype) -> None:
    x = random_rows(3, 17, device=device, dtype=dtype)
    x[1, 4] = value
    assert_matches(x, None)
    assert rmsnorm(x, None)[[0, 2]].isfinite().all()


@DEVICES
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_weight_that_is_not_finite_spreads_within_its_column_only(value: float, device: str) -> None:
    weight = random_rows(17, device=device, seed=1)
    weight[4] = value
    assert_matches(random_rows(3, 17, device=device), weight)


@DEVICES
@pytest.mark.parametrize(
    "bits",
    [
        (0x3F800000, 0x3F807FFF, 0x3F808000, 0x3F808001, 0x3F818000, 0x3FFF8000),  # around ties to even
        (0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF, 0x7F800000, 0x7F7F0000),  # to the largest number or to infinity
        (0x00000001, 0x00007FFF, 0x00008001, 0x007FFFFF, 0x00800000, 0x00018000),  # subnormal
        (0x7F800001, 0x7FFFFFFF, 0x7FC00000, 0x7F808000),  # NaN, payload in either half
    ],
    ids=["ties", "overflow", "subnormal", "nan"],
)
def test_bfloat16_result_is_rounded_to_nearest_even(bits: tuple[int, ...], device: str) -> None:
    # Rows of ones have a root mean square of exactly 1, so the result is the weight, rounded.
    positive = on(device, torch.tensor(bits * 17, dtype=torch.int64)[:17].to(torch.int32).view(F32))
    x = on(device, torch.ones(1, 17, dtype=BF16))
    for weight in (positive, -positive):
        assert largest_ulp_distance(rmsnorm(x, weight, eps=0.0), weight.bfloat16().view(1, 17)) == 0


def test_bfloat16_rounding_agrees_with_torch_on_random_bits() -> None:
    generator = torch.Generator().manual_seed(3)
    for _ in range(20):
        weight = torch.randint(-(2**31), 2**31, (4096,), generator=generator).to(torch.int32).view(F32)
        y = rmsnorm(torch.ones(1, 4096, dtype=BF16), weight, eps=0.0)
        assert largest_ulp_distance(y, weight.bfloat16().view(1, 4096)) == 0


@DEVICES
def test_every_bfloat16_is_read_exactly(device: str) -> None:
    x = on(device, torch.arange(-(2**15), 2**15).to(torch.int16).view(BF16).view(-1, 1))
    assert_matches(x, None, 1.0)


X = torch.zeros(2, 3)
REFUSED: Final[dict[str, tuple[tuple[Any, ...], dict[str, Any], str]]] = {
    "list": (([1.0],), {}, "x is a list"),
    "none": ((None,), {}, "x is a NoneType"),
    "scalar": ((torch.zeros(()),), {}, "x has no dimension"),
    "float64": ((X.double(),), {}, "x has dtype torch.float64, but torch.float32 or torch.bfloat16"),
    "float16": ((X.half(),), {}, "x has dtype torch.float16"),
    "integer": ((X.int(),), {}, "x has dtype torch.int32"),
    "sparse": ((X.to_sparse(),), {}, "x has layout torch.sparse_coo"),
    "weight_number": ((X, 2.0), {}, "weight is a float"),
    "weight_dtype": ((X, torch.ones(3, dtype=BF16)), {}, "weight has dtype torch.bfloat16, .* torch.float32 fits"),
    "weight_dtype_bf16": ((X.bfloat16(), torch.ones(3).half()), {}, "torch.float32 or torch.bfloat16 fits"),
    "weight_length": ((X, torch.ones(2)), {}, r"weight has shape \(2,\), .* \(3,\) is accepted"),
    "weight_rank": ((X, torch.ones(1, 3)), {}, r"weight has shape \(1, 3\)"),
    "weight_device": ((X, torch.ones(3, device="meta")), {}, "weight is on device meta"),
    "eps_negative": ((X,), {"eps": -1e-6}, "eps is -1e-06"),
    "eps_nan": ((X,), {"eps": NAN}, "eps is nan"),
    "eps_inf": ((X,), {"eps": INF}, "eps is inf"),
    "eps_text": ((X,), {"eps": "small"}, "eps is 'small', but a finite number"),
    "eps_none": ((X,), {"eps": None}, "eps is None"),
    "eps_complex": ((X,), {"eps": 1j}, "eps is 1j"),
    "x_gradient": ((torch.zeros(2, 3, requires_grad=True),), {}, "x requires a gradient"),
    "weight_gradient": ((X, torch.ones(3, requires_grad=True)), {}, "weight requires a gradient"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_argument_is_named_with_its_value(case: str) -> None:
    args, kwargs, message = REFUSED[case]
    with pytest.raises(ArgumentError, match=message) as caught:
        rmsnorm(*args, **kwargs)
    assert isinstance(caught.value, ValueError)


def test_refused_device_says_which_are_supported() -> None:
    with pytest.raises(ArgumentError, match="x is on device xpu:0, but kernels exist for cpu, cuda, meta"):
        check_device("x", torch.device("xpu:0"))


def test_row_that_is_too_long_for_a_gpu_is_refused_before_any_kernel() -> None:
    with FakeTensorMode(), pytest.raises(ArgumentError, match="x has 262145 columns, but GPU kernels take at most"):
        rmsnorm(torch.empty(1, 262_145, device="cuda"))


def test_gradient_is_no_obstacle_where_none_is_recorded() -> None:
    x = random_rows(2, 17).requires_grad_()
    with torch.no_grad():
        assert_matches(x, weight_for(17, F32))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(("dtype", "weight_dtype"), [("float64", None), ("float32", "int8")])
def test_compile_function_refuses_other_dtypes(device: str, dtype: str, weight_dtype: str | None) -> None:
    with pytest.raises(ArgumentError, match=f"{device} kernels accept float32, bfloat16"):
        compile_rmsnorm(device, dtype, weight_dtype, 17)


@CPU_OPTIONS
def test_meta_tensors_give_the_shape_of_the_result(dtype: torch.dtype, weight_dtype: torch.dtype | None) -> None:
    x, weight = random_rows(2, 17, 3, dtype=dtype).transpose(1, 2), weight_for(17, weight_dtype)
    real = rmsnorm(x, weight)
    meta = rmsnorm(x.to("meta"), None if weight is None else weight.to("meta"))
    assert meta.device.type == "meta"
    assert (meta.shape, meta.dtype, meta.stride()) == (real.shape, real.dtype, real.stride())


def test_op_checks_its_arguments_on_meta_tensors_too() -> None:
    with pytest.raises(ArgumentError, match="weight has shape"):
        rmsnorm(torch.zeros(2, 3, device="meta"), torch.zeros(2, device="meta"))


@CPU_OPTIONS
def test_fake_tensors_give_what_a_tracer_needs(dtype: torch.dtype, weight_dtype: torch.dtype | None) -> None:
    x, weight = random_rows(2, 17, 3, dtype=dtype).transpose(1, 2), weight_for(17, weight_dtype)
    real = rmsnorm(x, weight)
    with FakeTensorMode() as mode:
        fake = rmsnorm(mode.from_tensor(x), None if weight is None else mode.from_tensor(weight))
    assert isinstance(fake, FakeTensor)
    assert (fake.shape, fake.dtype, fake.stride(), fake.device) == (real.shape, real.dtype, real.stride(), real.device)


def test_op_is_registered_with_this_schema() -> None:
    rmsnorm(X)
    schema = torch.ops.quack_kernels.rmsnorm.default._schema
    assert str(schema) == "quack_kernels::rmsnorm(Tensor x, Tensor? weight, float eps) -> Tensor"
