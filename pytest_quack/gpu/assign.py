"""Which worker gets which GPUs: arithmetic over a list of devices and what CUDA_VISIBLE_DEVICES says.

CUDA's own rules for that variable hold: names are separated by commas; a number counts devices in the order that
CUDA_DEVICE_ORDER names; a UUID may be cut short as long as it fits one device only; at the first name that fits none
the list ends; an empty list, or one that begins with -1, means no device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from pytest_quack.gpu.devices import Device

_GIB: Final = 1 << 30
_PCI_ORDER: Final = "PCI_BUS_ID"


@dataclass(frozen=True, slots=True)
class Choice:
    """A device that workers may get.

    Attributes:
        name: what stands for it in CUDA_VISIBLE_DEVICES, as the caller wrote it where the caller did.
        device: which one it is; None where a number may mean another one to CUDA than to NVML.
    """

    name: str
    device: Device | None

    @property
    def free_bytes(self) -> int:
        return self.device.free_bytes if self.device is not None else 0


@dataclass(frozen=True, slots=True)
class Choices:
    """The devices of a run, in the caller's order.

    Attributes:
        is_callers_list: whether CUDA_VISIBLE_DEVICES was set.
        ignored: the name at which the caller's list ended early, as CUDA has it; empty where none did.
    """

    choices: tuple[Choice, ...]
    is_callers_list: bool
    ignored: str = ""


def read_visible(text: str | None, devices: Sequence[Device], order: str | None) -> Choices:
    """What the values of CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER leave of all devices, each device once."""
    if text is None:
        return Choices(tuple(Choice(device.name, device) for device in devices), False)
    gpus = {device.index: device for device in reversed(devices)}  # of a partitioned one, its first instance
    # By default CUDA puts the fastest first, which NVML does not know of; among equal GPUs both orders are the same.
    is_order_known = order == _PCI_ORDER or len({device.model for device in devices}) <= 1
    found: dict[str, Choice] = {}
    for name in map(str.strip, text.split(",")):
        matches = _named(name, devices, gpus)
        if len(matches) != 1:
            is_end_of_list = name in {"", "-1"}
            return Choices(tuple(found.values()), True, "" if is_end_of_list else name)
        device = matches[0]
        is_certain = is_order_known or not _is_number(name)
        found.setdefault(device.uuids[0], Choice(name, device if is_certain else None))
    return Choices(tuple(found.values()), True)


def _named(name: str, devices: Sequence[Device], gpus: dict[int, Device]) -> list[Device]:
    if _is_number(name):
        return [gpus[int(name)]] if int(name) in gpus else []
    if not name.startswith(("GPU-", "MIG-")):
        return []
    matches = [device for device in devices if any(uuid.startswith(name) for uuid in device.uuids)]
    if matches and all(device.is_mig and device.index == matches[0].index for device in matches):
        is_gpu_named = name.startswith("GPU-")
        return matches[:1] if is_gpu_named else matches
    return matches


def _is_number(name: str) -> bool:
    return name.isascii() and name.isdigit()


def spread(choices: Sequence[Choice], workers: int, per_worker: int = 1) -> list[tuple[Choice, ...]]:
    """What each of `workers` gets: `per_worker` devices that are neighbours in the list, in the order of the list.

    No two groups overlap, and the numbers of workers on two groups differ by one at most. Where not all groups get the
    same number, those with more free memory (in whole GiB, of their fullest device) get more, the first ones otherwise.
    """
    groups = [tuple(choices[i : i + per_worker]) for i in range(0, len(choices) - per_worker + 1, per_worker)]
    rounds, rest = divmod(workers, len(groups))
    roomy = sorted(range(len(groups)), key=lambda i: -(min(choice.free_bytes for choice in groups[i]) // _GIB))
    return groups * rounds + [groups[i] for i in sorted(roomy[:rest])]


def environment(group: Sequence[Choice], is_callers_list: bool) -> dict[str, str]:
    """The variables that give a process these devices."""
    environ = {"CUDA_VISIBLE_DEVICES": ",".join(choice.name for choice in group)}
    if not is_callers_list:
        environ["CUDA_DEVICE_ORDER"] = _PCI_ORDER
    return environ
