"""When and where kernels run on a GPU: streams, graphs, devices."""

import pytest
import torch

from quack_kernels import rmsnorm, softmax

from .inputs import BF16, random_rows
from .reference import assert_within_one_ulp, rmsnorm_reference, softmax_reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU, so no streams, graphs and devices"),
]


def test_kernel_runs_on_the_current_stream() -> None:
    x, stream = random_rows(4096, 4096, device="cuda"), torch.cuda.Stream()
    softmax(x)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)  # tens of milliseconds, in which a kernel on another stream would overtake
        x.neg_()
        y = softmax(x)
    stream.synchronize()
    assert_within_one_ulp(y, softmax_reference(x))


def test_graph_replays_the_kernels_on_new_numbers() -> None:
    x, weight = random_rows(64, 4096, device="cuda", dtype=BF16), random_rows(4096, device="cuda", dtype=BF16, seed=1)
    softmax(rmsnorm(x, weight))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        normalised = rmsnorm(x, weight)
        y = softmax(normalised)
    x.copy_(random_rows(64, 4096, device="cuda", dtype=BF16, seed=2))
    graph.replay()
    assert_within_one_ulp(normalised, rmsnorm_reference(x, weight, 1e-6))
    assert_within_one_ulp(y, softmax_reference(normalised))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_kernel_runs_on_the_device_of_its_tensors() -> None:
    x = random_rows(64, 4096).to("cuda:1")
    y = softmax(x)
    assert torch.cuda.current_device() == 0
    assert_within_one_ulp(y, softmax_reference(x))
