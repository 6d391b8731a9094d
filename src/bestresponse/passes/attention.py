"""Attention with second derivatives: torch's own by plain operations, whichever backends are enabled."""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from .tensors import Own, as_autocast, eager


def attend(
    own: Own,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """The form of ``torch.nn.functional.scaled_dot_product_attention``; torch's own is ``own``."""
    given = [t for t in (query, key, value, attn_mask) if t is not None]
    if not eager(given):
        return own()
    kind = query.device.type
    mixed = torch.is_autocast_enabled(kind)
    given = [as_autocast([t])[0] for t in given] if mixed else given
    mask = given[3] if len(given) > 3 else None
    if mask is not None and mask.dtype == torch.bool:
        mask = given[0].new_zeros(()).masked_fill(mask.logical_not(), -torch.inf)
    with torch.autocast(kind, enabled=False) if mixed else nullcontext():
        outputs, _ = torch.ops.aten._scaled_dot_product_attention_math(
            *(*given[:3], mask, dropout_p, is_causal), scale=scale, enable_gqa=enable_gqa
        )
    return outputs
