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


def register(schema: str, *, cpu: Callable[..., torch.Tensor], meta: Callable[..., torch.Tensor]) -> Any:
    """Define an op by its schema, with the function for CPU tensors and the one that only allocates the result.

    Returns: the op's default overload, to be called with the schema's arguments by position.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, cpu, "CPU")
    _LIBRARY.impl(name, meta, "Meta")
    return getattr(getattr(torch.ops, NAMESPACE), name).default
