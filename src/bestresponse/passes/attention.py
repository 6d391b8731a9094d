"""Attention with second derivatives, in blocks, whichever backends are enabled; short sequences by plain operations."""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from .attention_blocks import Attention
from .tensors import Own, as_autocast, eager, plain, wide

# For smaller attention matrices, torch's math backend is faster.
_SMALL = 128 * 128


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
    if not eager(given) or (attn_mask is not None and not _masks(attn_mask)):
        return own()
    kind = query.device.type
    mixed = torch.is_autocast_enabled(kind)
    given = [as_autocast([t])[0] for t in given] if mixed else given
    mask = given[3] if len(given) > 3 else None
    with torch.autocast(kind, enabled=False) if mixed else nullcontext():
        q, k, v = given[:3]
        batch = _batch(q, k, v, mask, enable_gqa) if 0.0 <= dropout_p < 1.0 else None
        if batch is not None and not (is_causal and mask is not None):
            return _in_blocks(q, k, v, mask, batch, dropout_p, is_causal, scale)
        if mask is not None and mask.dtype == torch.bool:
            mask = q.new_zeros(()).masked_fill(mask.logical_not(), -torch.inf)
        outputs, _ = torch.ops.aten._scaled_dot_product_attention_math(
            q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    return outputs


def _masks(mask: Tensor) -> bool:
    """Whether torch takes a mask of this kind."""
    return mask.dtype == torch.bool or mask.is_floating_point()


def _batch(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, grouped: bool) -> torch.Size | None:
    """The common shape before queries and keys; None if blocks do not serve, or if torch refuses the arguments."""
    fits = (
        plain([q, k, v])
        and min(k.numel(), v.numel()) > 0
        and min(x.ndim for x in (q, k, v)) > 1
        and q.shape[-1] == k.shape[-1]
        and k.shape[-2] == v.shape[-2]
    )
    if fits and mask is not None:
        fits = mask.dtype == torch.bool or (plain([q, mask]) and not mask.requires_grad)
        fits = fits and mask.device == q.device and mask.ndim > 1
    if not fits:
        return None
    try:
        shapes = [_heads(x, q if grouped else x).shape[:-2] for x in (q, k, v)]
        batch: torch.Size = torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]
        if mask is not None:
            whole = (*batch, q.shape[-2], k.shape[-2])
            fits = torch.broadcast_shapes(whole, mask.shape) == whole  # type: ignore[no-untyped-call]
    except RuntimeError:
        return None
    return batch if fits and q.shape[-2] * k.shape[-2] >= _SMALL else None


def _heads(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values with as many heads as the queries."""
    if x.ndim < 3 or q.ndim < 3 or x.shape[-3] == q.shape[-3] or q.shape[-3] % x.shape[-3]:
        return x
    return x.repeat_interleave(q.shape[-3] // x.shape[-3], -3)


def _in_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    batch: torch.Size,
    dropout: float,
    causal: bool,
    scale: float | None,
) -> Tensor:
    dtype, factor = q.dtype, q.shape[-1] ** -0.5 if scale is None else scale
    q = wide(q) * factor
    flat = [
        wide(_heads(x, q)).expand(*batch, *x.shape[-2:]).reshape(-1, *x.shape[-2:]).contiguous()
        for x in (q, k, v)
    ]
    masks = None
    if mask is not None:
        shape = mask.shape[:-2]
        mask = mask.reshape(-1, *mask.shape[-2:])
        if len(mask) > 1:
            masks = torch.arange(len(mask), device=mask.device).view(shape).expand(batch).reshape(-1)
    seed = int(torch.randint(2**62, ())) if dropout else 0
    outputs = Attention(causal, dropout, seed, masks)(flat[0], flat[1], flat[2], mask)
    # A copy, since the derivatives need the outputs, and the caller may change these in place.
    return outputs.view(*batch, *outputs.shape[-2:]).to(dtype, copy=True)
