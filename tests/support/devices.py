"""GPUs that no machine needs to have."""

from __future__ import annotations

from pytest_quack.gpu.devices import Device

GIB = 1 << 30


def device(index: int, free_gib: float = 80, model: str = "H200") -> Device:
    return Device(index, (f"GPU-{index}{index}-abc{index}",), model, 141 * GIB, int(free_gib * GIB))


def mig(index: int, place: int) -> Device:
    uuids = (f"MIG-{index}{place}-77", f"MIG-GPU-{index}{index}-abc{index}/{place}/0", f"GPU-{index}{index}-abc{index}")
    return Device(index, uuids, "H200", 18 * GIB, 17 * GIB, is_mig=True)


FOUR = [device(index) for index in range(4)]
PARTITIONED = [device(0), mig(1, 3), mig(1, 4), device(2)]
MIXED = [device(0, model="A"), device(1, model="B"), device(2, model="A")]
