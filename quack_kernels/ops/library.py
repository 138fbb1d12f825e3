"""Registration of torch ops.

`torch.library.Library` and not `torch.library.custom_op`: the latter imports `torch._dynamo`, seconds that a test
process has no use for.
"""

from collections.abc import Callable
from typing import Any, Final

import torch

NAMESPACE: Final = "quack_kernels"

# Registrations last as long as this object.
_LIBRARY: Final = torch.library.Library(NAMESPACE, "DEF")


def register(schema: str, *, real: Callable[..., torch.Tensor], fake: Callable[..., torch.Tensor]) -> Any:
    """Define an op by its schema, with the function for CPU and CUDA tensors and the one for tensors without data.

    Returns: the op's default overload, to be called with the schema's arguments by position.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    for key in ("CPU", "CUDA"):
        _LIBRARY.impl(name, real, key)
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)
    return getattr(getattr(torch.ops, NAMESPACE), name).default
