"""GPUs for the workers of an xdist run: chosen by the controller, before a worker starts.

A worker gets its devices in the environment that its process starts its work with, so that nothing it imports can have
asked for a device before; a replacement starts with the environment of the worker it replaces.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from pytest_quack.errors import GpuError
from pytest_quack.gpu import devices
from pytest_quack.gpu.assign import Choice, Choices, environment, read_visible, spread
from pytest_quack.gpu.devices import Lister
from pytest_quack.settings import Settings

# In a worker, the devices of the whole run, as CUDA_VISIBLE_DEVICES would name them: for a test that starts processes
# on several.
RUN_GPUS: Final = "QUACK_RUN_GPUS"
_POLL_S: Final = 1.0


class WorkerGpus:
    """The devices that the workers of one run may have.

    Attributes:
        choices: those devices, in the caller's order.
        per_worker: how many each worker gets.
    """

    def __init__(self, choices: Choices, per_worker: int) -> None:
        """Take what `choose_gpus` found."""
        self.choices: Final = choices.choices
        self.per_worker: Final = per_worker
        self._is_callers_list = choices.is_callers_list

    @property
    def groups(self) -> int:
        """How many workers can have devices of their own."""
        return len(self.choices) // self.per_worker

    def assign(self, specs: Sequence[Any]) -> None:
        """Write devices into the environment of each worker on this machine that has none of its own there."""
        local = [spec for spec in specs if is_local(spec) and "CUDA_VISIBLE_DEVICES" not in spec.env]
        for spec, group in zip(local, spread(self.choices, len(local), self.per_worker), strict=True):
            names = ",".join(choice.name for choice in self.choices)
            spec.env.update({**environment(group, self._is_callers_list), RUN_GPUS: names})

    def header(self) -> str:
        """What the run's header says."""
        names = ", ".join(_show(choice) for choice in self.choices)
        source = "CUDA_VISIBLE_DEVICES" if self._is_callers_list else "all"
        return f"GPUs for workers ({source}): {names}"


def is_local(spec: Any) -> bool:
    """Whether an execnet spec makes a process on this machine."""
    return bool(getattr(spec, "popen", None)) and not getattr(spec, "via", None)


def choose_gpus(
    settings: Settings,
    environ: Mapping[str, str],
    tell: Callable[[str], None],
    lister: Lister = devices.list_devices,
    sleep: Callable[[float], None] = time.sleep,
) -> WorkerGpus | None:
    """The devices that workers may have; None where there are none, or none are to be assigned.

    Waits for free memory if the settings say so; `tell` gets what the user should know.

    Raises GpuError where there are devices, but not as many as one worker is to have.
    """
    per_worker = settings.gpus_for_each_worker
    if not per_worker or _names_none(environ):
        return None
    deadline = time.monotonic() + settings.gpu_wait_s
    is_waiting = False
    while True:
        try:
            visible = _look(environ, lister)
        except Exception as error:  # noqa: BLE001 - NVML's binding raises what it likes: no reason to run no tests
            _refuse_or_tell(settings, tell, error)
            return None
        if visible.ignored and not is_waiting:
            tell(f"CUDA_VISIBLE_DEVICES ends at {visible.ignored}, which names no GPU of this machine, or several")
        if not visible.choices:
            return None
        if len(visible.choices) < per_worker:
            raise GpuError(
                f"--gpus-per-worker={per_worker} asks for more than the {len(visible.choices)} there are: "
                f"{', '.join(map(_show, visible.choices))}"
            )
        roomy = _with_free_memory(visible, settings.gpu_min_free_bytes)
        if len(roomy.choices) >= per_worker:
            return WorkerGpus(roomy, per_worker)
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise GpuError(_too_little_memory(visible, settings))
        if not is_waiting:
            tell(f"waiting up to {settings.gpu_wait_s:g} s: {_too_little_memory(visible, settings)}")
            is_waiting = True
        sleep(min(_POLL_S, left_s))


def _refuse_or_tell(settings: Settings, tell: Callable[[str], None], error: Exception) -> None:
    text = f"workers get no GPUs of their own: NVML cannot list them ({type(error).__name__}: {error})"
    if settings.gpus_per_worker or settings.gpu_min_free_bytes:
        raise GpuError(f"{text}. Leave out --gpus-per-worker and --gpu-min-free to go on without.") from error
    tell(text)


def _names_none(environ: Mapping[str, str]) -> bool:
    return environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in {"", "-1"}


def _look(environ: Mapping[str, str], lister: Lister) -> Choices:
    return read_visible(environ.get("CUDA_VISIBLE_DEVICES"), lister(), environ.get("CUDA_DEVICE_ORDER"))


def _with_free_memory(visible: Choices, least_bytes: int) -> Choices:
    if not least_bytes:
        return visible
    if any(choice.device is None for choice in visible.choices):
        raise GpuError(
            "--gpu-min-free cannot be met: the GPUs of this machine are not all alike, and a number in "
            "CUDA_VISIBLE_DEVICES may mean another one to CUDA than to the driver. Set CUDA_DEVICE_ORDER=PCI_BUS_ID, "
            "or name them by UUID."
        )
    roomy = tuple(choice for choice in visible.choices if choice.free_bytes >= least_bytes)
    return Choices(roomy, visible.is_callers_list)


def _too_little_memory(visible: Choices, settings: Settings) -> str:
    asked = _gigabytes(settings.gpu_min_free_bytes)
    number = "no GPU has" if settings.gpus_for_each_worker == 1 else f"fewer than {settings.gpus_for_each_worker} have"
    return f"{number} {asked} free, as --gpu-min-free asks: {', '.join(map(_show, visible.choices))}"


def _show(choice: Choice) -> str:
    if choice.device is None:
        return choice.name
    free, total = _gigabytes(choice.free_bytes), _gigabytes(choice.device.total_bytes)
    return f"{choice.name} ({choice.device.model}, {free} of {total} free)"


def _gigabytes(number: int) -> str:
    return f"{number / 1e9:.1f} GB"
