"""Softmax forward: numbers, layouts, odd values, refused arguments."""

from typing import Any, Final

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from quack_kernels import ArgumentError, softmax
from quack_kernels.kernels.softmax.compile import compile_softmax

from .inputs import BF16, CPU_DTYPES, F16, F32, LAYOUTS, PLACES, SHAPES, on, random_rows
from .reference import assert_within_one_ulp, softmax_reference

NAN, INF = float("nan"), float("inf")


def assert_matches(x: torch.Tensor) -> None:
    """Assert that the result is contiguous and within 1 ulp of float64."""
    y = softmax(x)
    assert y.is_contiguous()
    assert_within_one_ulp(y, softmax_reference(x))


@PLACES
@pytest.mark.parametrize("n", [1, 2, 3, 17, 128, 1000, 1024, 4096, 8192])
def test_result_is_within_one_ulp_of_float64(n: int, device: str, dtype: torch.dtype) -> None:
    assert_matches(random_rows(5, n, device=device, dtype=dtype))


# One step beyond each: vectors that begin before their row, several rows of a warp, warps of a row, CTAs of a row.
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("n", "dtype"),
    [
        (9, BF16),
        (63, F32),
        (1001, F16),
        (16_384, BF16),
        (32_768, BF16),
        (50_257, BF16),
        (50_257, F32),
        (65_536, F16),
        (131_071, BF16),
        (131_072, F32),
        (262_143, BF16),
        (262_144, BF16),
        (262_144, F32),
    ],
    ids=str,
)
def test_long_and_odd_rows_on_a_gpu(n: int, dtype: torch.dtype) -> None:
    assert_matches(random_rows(6, n, device="cuda", dtype=dtype, scale=3.0))


@PLACES
@pytest.mark.parametrize("n", [3, 1000])
@pytest.mark.parametrize("scale", [1e-30, 10.0, 60.0, 1e30])
def test_magnitude_of_x_costs_no_accuracy(scale: float, n: int, device: str, dtype: torch.dtype) -> None:
    assert_matches(random_rows(7, n, device=device, dtype=dtype, seed=2, scale=scale))


@PLACES
@pytest.mark.parametrize("n", [17, 1000, 4096])
def test_rows_sum_to_one(n: int, device: str, dtype: torch.dtype) -> None:
    total = softmax(random_rows(5, n, device=device, dtype=dtype, seed=4, scale=3.0)).double().sum(-1)
    # Each element is within 1 ulp, that is within 2 * eps / 2 of its own size, and the sizes sum to 1.
    assert (total - 1).abs().max() <= torch.finfo(dtype).eps


@PLACES
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_leading_dimensions_are_rows(shape: tuple[int, ...], device: str, dtype: torch.dtype) -> None:
    assert_matches(random_rows(*shape, device=device, dtype=dtype))


@PLACES
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("n", [17, 1000])
def test_layout_of_x_does_not_matter(n: int, layout: str, device: str, dtype: torch.dtype) -> None:
    x = LAYOUTS[layout](random_rows(6, n, device=device, dtype=dtype))
    before = x.clone()
    assert_matches(x)
    assert torch.equal(x, before)


@PLACES
@pytest.mark.parametrize("shape", [(3, 0), (0,), (0, 0)], ids=str)
def test_rows_without_columns_give_an_empty_result(shape: tuple[int, ...], device: str, dtype: torch.dtype) -> None:
    y = softmax(on(device, torch.empty(shape, dtype=dtype)))
    assert (y.shape, y.dtype) == (shape, dtype)


@PLACES
def test_single_column_is_one(device: str, dtype: torch.dtype) -> None:
    assert torch.equal(
        softmax(random_rows(9, 1, device=device, dtype=dtype)), on(device, torch.ones(9, 1, dtype=dtype))
    )


@PLACES
def test_large_elements_do_not_overflow(device: str, dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    y = softmax(on(device, torch.tensor([[largest, largest, -largest], [0.0, -largest, -INF]], dtype=dtype)))
    assert y.tolist() == [[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]


@PLACES
def test_subnormal_results_are_kept(device: str, dtype: torch.dtype) -> None:
    x = on(device, torch.tensor([[0.0, -11.0, -15.0] if dtype is F16 else [0.0, -88.0, -90.0]], dtype=dtype))
    assert_matches(x)
    assert 0 < softmax(x)[0, 2] < torch.finfo(dtype).tiny


@PLACES
@pytest.mark.parametrize("row", [(NAN, 1.0, 2.0), (1.0, 2.0, NAN), (NAN, NAN, NAN), (INF, 1.0, 2.0), (-INF,) * 3])
def test_row_without_a_maximum_to_shift_by_becomes_nan_alone(
    row: tuple[float, ...], device: str, dtype: torch.dtype
) -> None:
    x = on(device, torch.tensor([(0.0, 1.0, 2.0), row, (3.0, 4.0, 5.0)], dtype=dtype))
    assert_matches(x)
    y = softmax(x)
    assert y[1].isnan().all()
    assert y[[0, 2]].isfinite().all()


@PLACES
def test_negative_infinity_masks_an_element(device: str, dtype: torch.dtype) -> None:
    x = random_rows(4, 17, device=device, dtype=dtype)
    x[:, 5:] = -INF
    assert_matches(x)
    assert softmax(x)[:, 5:].count_nonzero() == 0


@PLACES
@pytest.mark.parametrize("n", [1000, 4096])
def test_part_of_a_row_that_is_all_masked_takes_no_part(n: int, device: str, dtype: torch.dtype) -> None:
    # Where threads share a row, most of them, and whole warps, see negative infinity only.
    x = on(device, torch.full((3, n), -INF, dtype=dtype))
    x[0, -1], x[1, 7], x[2, n // 2 :] = -1000.0, 1000.0, random_rows(n - n // 2, device=device, dtype=dtype) - 300
    assert_matches(x)


X = torch.zeros(2, 3)
REFUSED: Final[dict[str, tuple[Any, str]]] = {
    "list": ([1.0], "x is a list"),
    "scalar": (torch.zeros(()), "x has no dimension"),
    "float64": (X.double(), "x has dtype torch.float64, but torch.float32 or torch.bfloat16"),
    "complex": (X.to(torch.complex64), "x has dtype torch.complex64"),
    "bool": (X.bool(), "x has dtype torch.bool"),
    "sparse": (X.to_sparse(), "x has layout torch.sparse_coo"),
    "gradient": (torch.zeros(2, 3, requires_grad=True), "x requires a gradient"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_argument_is_named_with_its_value(case: str) -> None:
    x, message = REFUSED[case]
    with pytest.raises(ArgumentError, match=message) as caught:
        softmax(x)
    assert isinstance(caught.value, ValueError)


@pytest.mark.filterwarnings("ignore")  # torch says that nested tensors are a prototype
def test_nested_tensor_is_refused() -> None:
    x = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])
    with pytest.raises(ArgumentError, match="x is nested, but only a plain tensor is accepted"):
        softmax(x)


@pytest.mark.filterwarnings("ignore")  # torch uses something of its own that it deprecates
def test_tangent_is_refused_rather_than_lost() -> None:
    with torch.autograd.forward_ad.dual_level(), pytest.raises(ArgumentError, match="x carries a tangent"):
        softmax(torch.autograd.forward_ad.make_dual(torch.zeros(2, 3), torch.ones(2, 3)))


@pytest.mark.parametrize(
    ("device", "dtype", "n", "message"),
    [
        ("cpu", "int8", 17, "dtype is 'int8', but cpu kernels accept float32, bfloat16"),
        ("cpu", "float16", 17, "dtype is 'float16', but cpu kernels accept"),
        ("cuda", "float64", 17, "dtype is 'float64', but cuda kernels accept float32, bfloat16, float16"),
        ("tpu", "float32", 17, "device is 'tpu', but kernels exist for cpu and cuda"),
        ("cpu", "float32", 0, "n is 0"),
        ("cuda", "float32", 0, "n is 0"),
        ("cuda", "float32", 262_145, "n is 262145, but GPU kernels are compiled for 1 to 262144 columns"),
    ],
)
def test_compile_function_refuses_what_has_no_kernel(device: str, dtype: str, n: int, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        compile_softmax(device, dtype, n)


@CPU_DTYPES
def test_meta_tensors_give_the_shape_of_the_result(dtype: torch.dtype) -> None:
    x = random_rows(2, 17, 3, dtype=dtype).transpose(1, 2)
    real, meta = softmax(x), softmax(x.to("meta"))
    assert meta.device.type == "meta"
    assert (meta.shape, meta.dtype, meta.stride()) == (real.shape, real.dtype, real.stride())


@CPU_DTYPES
def test_fake_tensors_give_what_a_tracer_needs(dtype: torch.dtype) -> None:
    x = random_rows(2, 17, 3, dtype=dtype).transpose(1, 2)
    real = softmax(x)
    with FakeTensorMode() as mode:
        fake = softmax(mode.from_tensor(x))
    assert isinstance(fake, FakeTensor)
    assert (fake.shape, fake.dtype, fake.stride(), fake.device) == (real.shape, real.dtype, real.stride(), real.device)


def test_op_is_registered_with_this_schema() -> None:
    softmax(X)
    assert str(torch.ops.quack_kernels.softmax.default._schema) == "quack_kernels::softmax(Tensor x) -> Tensor"
