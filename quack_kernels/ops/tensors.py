"""How tensors of any rank and stride become the (M, N) rows and (N,) vectors that kernels take."""

import torch


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name by which compile functions know a dtype: `"float32"` for torch.float32."""
    return str(dtype).removeprefix("torch.")


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """Return x (..., N), N > 0, as (M, N) with contiguous columns: a view where strides allow, else a copy."""
    rows = x.detach().resolve_neg().reshape(-1, x.shape[-1])
    return rows if rows.shape[1] == 1 or rows.stride(1) == 1 else rows.contiguous()


def as_vector(weight: torch.Tensor | None) -> torch.Tensor | None:
    """Return the weight contiguous: itself where it is, else a copy."""
    return None if weight is None else weight.detach().resolve_neg().contiguous()
