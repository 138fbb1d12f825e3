"""Which arguments the ops accept. Every function returns nothing or raises ArgumentError."""

import math
import numbers
from functools import cache
from typing import Any, Final

import torch

from ..devices import dtypes_of
from ..errors import ArgumentError
from ..gpu.config import MAX_COLUMNS

# Tensors on the meta device carry shapes only; an op on them gives the shape and dtype of its result.
DEVICE_TYPES: Final = ("cpu", "cuda", "meta")
# Clusters of thread blocks came with Hopper.
_LEAST_CAPABILITY: Final = (9, 0)


def check_operand(argument: str, tensor: Any) -> None:
    """Require a dense tensor on a device with kernels, whose gradient nobody expects."""
    check_tensor(argument, tensor)
    check_device(argument, tensor.device)
    check_forward_only(argument, tensor)


def check_tensor(argument: str, tensor: Any) -> None:
    """Require a dense torch tensor."""
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentError(argument, f"is a {type(tensor).__name__}", "a torch.Tensor is accepted")
    if tensor.layout is not torch.strided:
        raise ArgumentError(argument, f"has layout {tensor.layout}", "only torch.strided is accepted")
    if tensor.is_nested or tensor.is_quantized:
        kind = "nested" if tensor.is_nested else "quantized"
        raise ArgumentError(argument, f"is {kind}", "only a plain tensor is accepted")


def check_device(argument: str, device: torch.device) -> None:
    """Require a device that kernels exist for."""
    if device.type not in DEVICE_TYPES:
        raise ArgumentError(
            argument,
            f"is on device {device}",
            f"kernels exist for {', '.join(DEVICE_TYPES)} tensors only; move it with .cuda() or .cpu()",
        )


def check_gpu(device: torch.device) -> None:
    """Require of a GPU that it has what the kernels use; a CPU has."""
    if device.type == "cuda":
        _check_capability(device)


@cache
def _check_capability(device: torch.device) -> None:
    capability = torch.cuda.get_device_capability(device)
    if capability < _LEAST_CAPABILITY:
        raise ArgumentError(
            "x",
            f"is on {device}, a {torch.cuda.get_device_name(device)} of compute capability {_version(capability)}",
            f"GPU kernels need {_version(_LEAST_CAPABILITY)} or newer; move it with .cpu()",
        )


def check_forward_only(argument: str, tensor: torch.Tensor) -> None:
    """Require that nobody expects a gradient, which would be silently missing."""
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ArgumentError(
            argument,
            "requires a gradient",
            "this op has no backward; call it under torch.no_grad() or pass a detached tensor",
        )
    if torch.autograd.forward_ad.unpack_dual(tensor).tangent is not None:
        raise ArgumentError(argument, "carries a tangent", "this op has no forward-mode derivative; pass the primal")


def check_rows(x: torch.Tensor, device_type: str) -> None:
    """Require a tensor that is a stack of rows which kernels for a type of device accept."""
    if x.dim() < 1:
        raise ArgumentError("x", "has no dimension", "at least 1 is needed: the last one is normalised")
    accepted = _dtypes_on(device_type)
    if x.dtype not in accepted:
        raise ArgumentError("x", f"has dtype {x.dtype}", f"{_listed(accepted)} are accepted on {device_type}")
    if device_type == "cuda" and x.shape[-1] > MAX_COLUMNS:
        raise ArgumentError("x", f"has {x.shape[-1]} columns", f"GPU kernels take at most {MAX_COLUMNS}")


def check_weight(weight: torch.Tensor, x: torch.Tensor) -> None:
    """Require one weight per column of x, on its device, in float32 or the dtype of x."""
    accepted = tuple(dict.fromkeys((torch.float32, x.dtype)))
    if weight.dtype not in accepted:
        raise ArgumentError("weight", f"has dtype {weight.dtype}", f"with x of {x.dtype}, {_listed(accepted)} fits")
    if weight.device != x.device:
        raise ArgumentError("weight", f"is on device {weight.device}", f"x is on {x.device}; both must be on one")
    if weight.shape != x.shape[-1:]:
        raise ArgumentError(
            "weight",
            f"has shape {tuple(weight.shape)}",
            f"x has shape {tuple(x.shape)}, so ({x.shape[-1]},) is accepted",
        )


def check_eps(eps: Any) -> None:
    """Require a finite number that keeps the root real."""
    if not (isinstance(eps, numbers.Real) and math.isfinite(eps) and float(eps) >= 0):
        raise ArgumentError("eps", f"is {eps!r}", "a finite number that is not negative is accepted")


def _dtypes_on(device_type: str) -> tuple[torch.dtype, ...]:
    """Return what kernels on a device accept; a tensor without data may stand for one on any device."""
    return tuple(getattr(torch, name) for name in dtypes_of("cuda" if device_type == "meta" else device_type))


def _version(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def _listed(dtypes: tuple[torch.dtype, ...]) -> str:
    return " or ".join(str(dtype) for dtype in dtypes)
