"""The machine's GPUs as the driver lists them through NVML, which makes no CUDA context.

Also whether this process has a CUDA context already, asked of the driver only where it is loaded.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

_PROHIBITED: Final = 2  # NVML_COMPUTEMODE_PROHIBITED
_MIG_ENABLED: Final = 1  # NVML_DEVICE_MIG_ENABLE
_CUDA_SUCCESS: Final = 0


@dataclass(frozen=True, slots=True)
class Device:
    """What a CUDA program can have: a GPU, or an instance of one that is partitioned (MIG).

    Attributes:
        index: the GPU's number in the order of PCI bus ids.
        uuids: what it can be named by besides: its UUID first, then, for a MIG instance, its older name and the UUID of
            its GPU, by which CUDA knows the first instance.
        model: the GPU's product name.
        total_bytes, free_bytes: its memory, and how much of it nobody uses now.
        is_mig: whether it is a MIG instance.
    """

    index: int
    uuids: tuple[str, ...]
    model: str
    total_bytes: int
    free_bytes: int
    is_mig: bool = False

    @property
    def name(self) -> str:
        """How CUDA_VISIBLE_DEVICES names it: by number in the order of PCI bus ids, or a MIG instance by UUID."""
        return self.uuids[0] if self.is_mig else str(self.index)


Lister = Callable[[], list[Device]]


def list_devices() -> list[Device]:
    """All GPUs of the machine, in the order of PCI bus ids; none where there is no driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    found: list[Device] = []
    try:
        for index in range(pynvml.nvmlDeviceGetCount()):
            for handle in _usable(pynvml, index):
                with contextlib.suppress(pynvml.NVMLError):  # one that cannot be asked is as good as lost
                    found += _devices_of(pynvml, index, handle)
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()
    return found


def _usable(nvml: Any, index: int) -> list[Any]:
    """The GPU's handle; nothing where it is lost or not ours, or where no CUDA program may use it."""
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
    except nvml.NVMLError:
        return []
    try:
        return [] if nvml.nvmlDeviceGetComputeMode(handle) == _PROHIBITED else [handle]
    except nvml.NVMLError:  # a GPU that knows no such modes
        return [handle]


def _devices_of(nvml: Any, index: int, handle: Any) -> Iterator[Device]:
    uuid, model = _text(nvml.nvmlDeviceGetUUID(handle)), _text(nvml.nvmlDeviceGetName(handle))
    if not _is_partitioned(nvml, handle):
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        yield Device(index, (uuid,), model, int(memory.total), int(memory.free))
        return
    for place in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        with contextlib.suppress(nvml.NVMLError):  # a place that holds no instance
            part = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, place)
            memory = nvml.nvmlDeviceGetMemoryInfo(part)
            instance, compute = nvml.nvmlDeviceGetGpuInstanceId(part), nvml.nvmlDeviceGetComputeInstanceId(part)
            names = (_text(nvml.nvmlDeviceGetUUID(part)), f"MIG-{uuid}/{instance}/{compute}", uuid)
            yield Device(index, names, model, int(memory.total), int(memory.free), is_mig=True)


def _is_partitioned(nvml: Any, handle: Any) -> bool:
    try:
        current, _ = nvml.nvmlDeviceGetMigMode(handle)
    except nvml.NVMLError:
        return False
    return bool(current == _MIG_ENABLED)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def has_cuda_context() -> bool:
    """Whether this process has initialised CUDA so far that it holds a device. Initialises nothing.

    Asking how many devices there are (`torch.cuda.is_available`) does not count: it holds none.
    """
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is not None and getattr(cuda, "is_initialized", bool)():
        return True
    driver = _loaded_driver()
    return driver is not None and _has_primary_context(driver)


def _loaded_driver() -> ctypes.CDLL | None:
    if not hasattr(os, "RTLD_NOLOAD"):
        return None
    try:
        return ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return None


def _has_primary_context(driver: Any) -> bool:
    count = ctypes.c_int()
    if driver.cuDeviceGetCount(ctypes.byref(count)) != _CUDA_SUCCESS:
        return False  # not initialised, or no device
    for ordinal in range(count.value):
        device, flags, is_active = ctypes.c_int(), ctypes.c_uint(), ctypes.c_int()
        if driver.cuDeviceGet(ctypes.byref(device), ordinal) != _CUDA_SUCCESS:
            continue
        state = driver.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(is_active))
        if state == _CUDA_SUCCESS and is_active.value:
            return True
    return False
