"""Listing devices through NVML, from a stub of its Python binding where there is no driver, and CUDA contexts."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from pytest_quack.gpu import devices
from pytest_quack.gpu.devices import Device, has_cuda_context, list_devices
from support import nvml_stub

pytestmark = pytest.mark.light


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setitem(sys.modules, "pynvml", nvml_stub)
    monkeypatch.setattr(nvml_stub, "opened", 0)
    return nvml_stub


def test_no_driver_means_no_devices() -> None:
    """The real binding, which finds no library on a machine without a GPU and a library with one."""
    found = list_devices()
    assert all(isinstance(device, Device) and 0 < device.free_bytes <= device.total_bytes for device in found)


@pytest.mark.parametrize("text", [nvml_stub.dump([]), nvml_stub.dump(None)])
def test_a_driver_without_gpus(nvml: ModuleType, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("NVML_STUB", text)
    assert list_devices() == []
    assert nvml.opened == 0


def test_gpus_and_mig_instances(nvml: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [
        {"uuid": "GPU-a", "free": 70},
        {"uuid": "GPU-b", "mig": [{"uuid": "MIG-c", "free": 9, "gi": 3, "ci": 0}, None]},
        {"uuid": "GPU-d", "compute_mode": 2},
        {"uuid": "GPU-e", "is_lost": True},
        {"uuid": "GPU-f", "model": "Old", "free": 1, "compute_mode": None},
    ]
    monkeypatch.setenv("NVML_STUB", nvml_stub.dump(gpus))
    gib = 1 << 30
    assert list_devices() == [
        Device(0, ("GPU-a",), "Stub H200", 80 * gib, 70 * gib),
        Device(1, ("MIG-c", "MIG-GPU-b/3/0", "GPU-b"), "Stub H200", 80 * gib, 9 * gib, is_mig=True),
        Device(4, ("GPU-f",), "Old", 80 * gib, 1 * gib),
    ]
    assert nvml.opened == 0  # what was opened is closed again
    assert [device.name for device in list_devices()] == ["0", "MIG-c", "4"]


@pytest.mark.parametrize("name", ["nvmlDeviceGetName", "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetUUID"])
def test_gpu_that_cannot_be_asked_is_left_out(nvml: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    ask = getattr(nvml, name)

    def fail_for_one(gpu: dict[str, object]) -> object:
        if gpu["uuid"] == "GPU-b":
            raise nvml.NVMLError("not supported")
        return ask(gpu)

    monkeypatch.setattr(nvml, name, fail_for_one)
    monkeypatch.setenv("NVML_STUB", nvml_stub.dump([{"uuid": "GPU-a"}, {"uuid": "GPU-b"}, {"uuid": "GPU-c"}]))
    assert [device.uuids[0] for device in list_devices()] == ["GPU-a", "GPU-c"]
    assert nvml.opened == 0


def test_this_process_has_no_cuda_context() -> None:
    assert not has_cuda_context()


def test_torch_is_asked_for_a_context(monkeypatch: pytest.MonkeyPatch) -> None:
    for answer in (True, False):
        cuda = SimpleNamespace(is_initialized=lambda answer=answer: answer)
        monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
        assert has_cuda_context() is answer


@pytest.mark.parametrize(
    ("count_status", "actives", "expected"),
    [(3, [1], False), (100, [], False), (0, [], False), (0, [0, 0], False), (0, [0, 1], True)],
)
def test_the_driver_is_asked_for_a_context(
    monkeypatch: pytest.MonkeyPatch, count_status: int, actives: list[int], expected: bool
) -> None:
    def count(out: object) -> int:
        out._obj.value = len(actives)  # type: ignore[attr-defined]
        return count_status

    def get(out: object, ordinal: int) -> int:
        out._obj.value = ordinal  # type: ignore[attr-defined]
        return 0

    def state(device: object, flags: object, is_active: object) -> int:
        is_active._obj.value = actives[device.value]  # type: ignore[attr-defined]
        return 0

    driver = SimpleNamespace(cuDeviceGetCount=count, cuDeviceGet=get, cuDevicePrimaryCtxGetState=state)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(devices, "_loaded_driver", lambda: driver)
    assert has_cuda_context() is expected
