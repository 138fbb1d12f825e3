"""Choosing the GPUs of a run's workers: what is asked for, waiting for memory, and errors that say what to do."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_quack.errors import GpuError
from pytest_quack.gpu.devices import Device
from pytest_quack.gpu.workers import WorkerGpus, choose_gpus
from pytest_quack.settings import Settings, resolve
from support.devices import FOUR, GIB, MIXED, device

pytestmark = pytest.mark.light
execnet = pytest.importorskip("execnet", reason="needs pytest-xdist")


def settings(*arguments: str) -> Settings:
    return resolve(dict(text.partition("=")[::2] for text in ("--async-compile=2", *arguments)), {}, {})


def choose(
    devices: list[Device], *arguments: str, visible: str | None = None, **environ: str
) -> tuple[WorkerGpus | None, list[str]]:
    told: list[str] = []
    if visible is not None:
        environ["CUDA_VISIBLE_DEVICES"] = visible
    return choose_gpus(settings(*arguments), environ, told.append, lambda: devices), told


def assigned(gpus: WorkerGpus, *specs: str) -> list[dict[str, Any]]:
    made = [execnet.XSpec(spec) for spec in specs]
    gpus.assign(made)
    return [spec.env for spec in made]


def test_each_local_worker_gets_a_device_and_knows_those_of_the_run() -> None:
    gpus, told = choose(FOUR, visible="3,1")
    assert gpus is not None
    assert not told
    assert assigned(gpus, "popen", "popen") == [
        {"CUDA_VISIBLE_DEVICES": "3", "QUACK_RUN_GPUS": "3,1"},
        {"CUDA_VISIBLE_DEVICES": "1", "QUACK_RUN_GPUS": "3,1"},
    ]


def test_workers_elsewhere_and_workers_that_have_devices_are_left_alone() -> None:
    gpus, _ = choose(FOUR)
    assert gpus is not None
    specs = ("popen", "ssh=host", "popen//via=other", "popen//env:CUDA_VISIBLE_DEVICES=7", "popen//python=python3")
    environs = assigned(gpus, *specs)
    assert [environ.get("CUDA_VISIBLE_DEVICES") for environ in environs] == ["0", None, None, "7", "1"]
    assert environs[0]["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert "CUDA_DEVICE_ORDER" not in environs[3]


@pytest.mark.parametrize("visible", ["", "-1", "  "])
def test_a_list_of_nothing_stays_nothing(visible: str) -> None:
    assert choose(FOUR, visible=visible) == (None, [])


def test_without_gpus_or_with_zero_for_each_worker_nothing_is_assigned() -> None:
    assert choose([], "--gpu-min-free=20GB") == (None, [])
    assert choose(FOUR, "--gpus-per-worker=0") == (None, [])
    assert choose_gpus(resolve({}, {}, {}), {}, print, lambda: FOUR) is None
    explicit = resolve({"--gpus-per-worker": "1"}, {}, {})
    assert choose_gpus(explicit, {}, print, lambda: FOUR) is not None


def test_a_name_that_ends_the_list_is_told() -> None:
    gpus, told = choose(FOUR, visible="0,9,1")
    assert gpus is not None
    assert gpus.groups == 1
    assert told == ["CUDA_VISIBLE_DEVICES ends at 9, which names no GPU of this machine, or several"]


def test_driver_that_cannot_list_its_gpus_ends_the_run_only_where_they_were_asked_for() -> None:
    def lister() -> list[Device]:
        raise AttributeError("no nvmlInit")

    told: list[str] = []
    assert choose_gpus(settings(), {}, told.append, lister) is None
    assert told == ["workers get no GPUs of their own: NVML cannot list them (AttributeError: no nvmlInit)"]
    for option in ("--gpus-per-worker=1", "--gpu-min-free=1GB"):
        with pytest.raises(GpuError, match="NVML cannot list them"):
            choose_gpus(settings(option), {}, told.append, lister)


def test_more_for_each_worker_than_there_are() -> None:
    with pytest.raises(GpuError, match=r"--gpus-per-worker=3 asks for more than the 2 there are: 0 \(H200, .*, 1 \("):
        choose(FOUR, "--gpus-per-worker=3", visible="0,1")


def test_groups() -> None:
    gpus, _ = choose(FOUR, "--gpus-per-worker=2")
    assert gpus is not None
    assert gpus.groups == 2
    assert [env["CUDA_VISIBLE_DEVICES"] for env in assigned(gpus, *["popen"] * 3)] == ["0,1", "2,3", "0,1"]


def test_only_gpus_with_enough_free_memory() -> None:
    devices = [device(0, 10), device(1, 40), device(2, 15), device(3, 60)]
    gpus, _ = choose(devices, "--gpu-min-free=20GB")
    assert gpus is not None
    assert [choice.name for choice in gpus.choices] == ["1", "3"]
    gpus, _ = choose(devices, "--gpu-min-free=20GB", visible="3,2,1")
    assert gpus is not None
    assert [choice.name for choice in gpus.choices] == ["3", "1"]
    with pytest.raises(GpuError, match=r"no GPU has 20\.0 GB free, as --gpu-min-free asks: 0 \(.*10\.7 GB of 151"):
        choose(devices, "--gpu-min-free=20GB", visible="0,2")
    with pytest.raises(GpuError, match="fewer than 2 have 50"):
        choose(devices, "--gpu-min-free=50GB", "--gpus-per-worker=2")


def test_waiting_for_memory() -> None:
    free, told, slept = [10.0, 10.0, 30.0], [], []

    def lister() -> list[Device]:
        return [device(0, free[min(len(slept), 2)])]

    asked = settings("--gpu-min-free=20GB", "--gpu-wait=60")
    gpus = choose_gpus(asked, {}, told.append, lister, slept.append)
    assert gpus is not None
    assert gpus.choices[0].free_bytes == 30 * GIB
    assert len(slept) == 2
    assert len(told) == 1
    assert told[0].startswith("waiting up to 60 s: no GPU has 20.0 GB free")


def test_waiting_ends() -> None:
    slept: list[float] = []
    asked = settings("--gpu-min-free=20GB", "--gpu-wait=0.05")
    import time

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        time.sleep(seconds)

    with pytest.raises(GpuError, match=r"no GPU has 20\.0 GB free"):
        choose_gpus(asked, {}, lambda text: None, lambda: [device(0, 1)], sleep)
    assert slept
    assert all(0 < seconds <= 0.05 for seconds in slept)


def test_free_memory_of_a_number_that_cuda_may_read_otherwise() -> None:
    with pytest.raises(GpuError, match="Set CUDA_DEVICE_ORDER=PCI_BUS_ID"):
        choose(MIXED, "--gpu-min-free=1GB", visible="0,1")
    assert choose(MIXED, "--gpu-min-free=1GB", visible="0,1", CUDA_DEVICE_ORDER="PCI_BUS_ID")[0] is not None
    assert choose(MIXED, "--gpu-min-free=1GB")[0] is not None


def test_header_names_the_devices_and_where_they_come_from() -> None:
    gpus, _ = choose(FOUR, visible="GPU-2,1")
    assert gpus is not None
    assert gpus.header() == (
        "GPUs for workers (CUDA_VISIBLE_DEVICES): GPU-2 (H200, 85.9 GB of 151.4 GB free), "
        "1 (H200, 85.9 GB of 151.4 GB free)"
    )
    everything, _ = choose(FOUR[:1])
    assert everything is not None
    assert everything.header().startswith("GPUs for workers (all): 0 (")
