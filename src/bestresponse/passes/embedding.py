"""Embeddings for hypergradients: with dense gradients, and bags with a second derivative."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@contextmanager
def dense_embeddings(modules: Iterable[nn.Module], twice: bool) -> Iterator[None]:
    """Give embeddings with ``sparse=True`` dense gradients, and for ``twice`` let bags look up row by row.

    Torch has no derivative of a sparse gradient, nor of the gradient of `torch.nn.EmbeddingBag`.
    """
    tables = [
        m
        for m in modules
        if isinstance(m, nn.Embedding | nn.EmbeddingBag) and not isinstance(m, torch.jit.ScriptModule)
    ]
    sparse = [m for m in tables if m.sparse]
    bags = [m for m in tables if type(m).forward is nn.EmbeddingBag.forward and "forward" not in vars(m)]
    try:
        for module in sparse:
            module.sparse = False
        for bag in bags if twice else ():
            vars(bag)["forward"] = _Rows(bag)
        yield
    finally:
        for module in sparse:
            module.sparse = True
        for bag in bags if twice else ():
            vars(bag).pop("forward", None)


def has_max_norm(module: nn.Module) -> TypeGuard[nn.Embedding | nn.EmbeddingBag]:
    """Whether a module edits its weights in a forward pass."""
    return isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None


@torch.no_grad()
def clip_gradients(weights: Sequence[Tensor], largest: float) -> None:
    """Scale all ``.grad`` down to a norm, including sparse ones, which torch's own function refuses."""
    for w in weights:
        if w.grad is not None and w.grad.is_sparse:
            w.grad = w.grad.coalesce()
    gradients = [w.grad for w in weights if w.grad is not None]
    norm = nn.utils.get_total_norm([g.values() if g.is_sparse else g for g in gradients])
    for g in gradients:
        g.mul_((largest / (norm + 1e-6)).clamp(max=1.0).to(g.device))


class _Rows:
    """The forward of a bag, by rows; torch's own forward for bags without such a form."""

    def __init__(self, bag: nn.Module) -> None:
        self._bag = bag

    def __call__(
        self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        bag = self._bag
        assert isinstance(bag, nn.EmbeddingBag)
        fits = input.ndim == 2 if offsets is None else input.ndim == 1
        weighed = per_sample_weights is None or (
            bag.mode == "sum" and per_sample_weights.shape == input.shape
        )
        if not (fits and weighed) or bag.scale_grad_by_freq or (bag.mode == "max" and offsets is not None):
            return nn.EmbeddingBag.forward(bag, input, offsets, per_sample_weights)
        rows = F.embedding(input, bag.weight, max_norm=bag.max_norm, norm_type=bag.norm_type)
        counted = (
            torch.ones_like(input, dtype=torch.bool) if bag.padding_idx is None else input != bag.padding_idx
        )
        if bag.mode == "max":
            lowest = rows.masked_fill(~counted.unsqueeze(2), -torch.inf).max(1).values
            return lowest.masked_fill(~counted.any(1, keepdim=True), 0.0)
        factors = counted.to(rows.dtype)
        if per_sample_weights is not None:
            factors = factors * per_sample_weights
        rows = rows * factors.unsqueeze(-1)
        if offsets is None:
            total, counts = rows.sum(1), counted.sum(1)
        else:
            bags = len(offsets) - bag.include_last_offset
            into = (
                torch.bucketize(torch.arange(len(input), device=input.device), offsets[:bags], right=True) - 1
            )
            total = rows.new_zeros(bags, rows.shape[1]).index_add(0, into, rows)
            counts = input.new_zeros(bags).index_add(0, into, counted.to(input.dtype))
        return total / counts.clamp(min=1).unsqueeze(1) if bag.mode == "mean" else total
