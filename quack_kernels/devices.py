"""Which devices have kernels, and for which dtypes."""

from typing import Final

from .errors import ArgumentError

_DTYPES: Final[dict[str, tuple[str, ...]]] = {
    "cpu": ("float32", "bfloat16"),
    "cuda": ("float32", "bfloat16", "float16"),
}


def dtypes_of(device: str) -> tuple[str, ...]:
    """Return the names of the dtypes that kernels for a device type accept; ArgumentError where it has none."""
    if device not in _DTYPES:
        raise ArgumentError("device", f"is {device!r}", f"kernels exist for {' and '.join(_DTYPES)}")
    return _DTYPES[device]
