"""Attention whose matrix is never kept whole: each derivative computes it again, by blocks of queries.

With S = q kᵀ + mask, P = softmax(S) and the factors D of dropout, the outputs are (P ∘ D) v. Let rows(X) be the sums
of X over the keys, and P̂(X) = P ∘ (X − rows(P ∘ X)) the derivative of the softmax along X. The gradient of
⟨g, outputs⟩ is

    E k,  Eᵀ q,  (P ∘ D)ᵀ g    with respect to q, k and v, where  E = P̂(F)  and  F = (g vᵀ) ∘ D.

With U = a kᵀ + q bᵀ, the inner product of these three with (a, b, c) has the derivatives

    with respect to g:  (P̂(U) ∘ D) v + (P ∘ D) c,
    with respect to v:  (P̂(U) ∘ D)ᵀ g,
    with respect to q:  R k + E b,
    with respect to k:  Rᵀ q + Eᵀ a,

where R = Z − P ∘ rows(Z), Z = P̂(U) ∘ (F − δ) + P ∘ D ∘ (g cᵀ) and δ = rows(P ∘ F), which is ⟨g, outputs⟩ of each query.
Derivatives of third order keep the matrix.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .tensors import plain, unseen, will_run
from .unread import nothing, present

# The numbers of a block: as many as fit into a processor's cache, or keep a GPU busy.
_CPU, _GPU = 2**17, 2**22
_FEWEST_ROWS = 64
Three = tuple[Tensor, Tensor, Tensor]
Slices = tuple[slice, slice, slice]


class Attention(NamedTuple):
    """The settings of a call. Tensors are [N, length, features], with the scale in the queries.

    ``masks`` says which mask belongs to which of the N; None if all have the same or none. Dropout draws from ``seed``.
    """

    causal: bool
    dropout: float
    seed: int
    masks: Tensor | None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """The outputs [N, queries, features]; ``mask`` is [masks, queries or 1, keys or 1], boolean or added."""
        outputs: Tensor = _Attention.apply(q, k, v, mask, self)  # type: ignore[no-untyped-call]
        return outputs

    def fused(self, q: Tensor, v: Tensor, mask: Tensor | None) -> bool:
        """Whether torch's fused kernel computes the same on a CPU."""
        return q.device.type == "cpu" and mask is None and not self.dropout and q.shape[-1] == v.shape[-1]

    def blocks(self, q: Tensor, k: Tensor) -> Iterator[Slices]:
        """The slices of N, of the queries, and of the keys that these see."""
        (count, queries, _), keys = q.shape, k.shape[1]
        numbers = _CPU if q.device.type == "cpu" else _GPU
        rows = min(queries, max(_FEWEST_ROWS, numbers // keys))
        some = max(1, numbers // (rows * keys))
        for first in range(0, count, some):
            for top in range(0, queries, rows):
                end = min(queries, top + rows)
                seen = min(keys, end) if self.causal else keys
                yield slice(first, min(count, first + some)), slice(top, end), slice(0, seen)

    def probabilities(self, q: Tensor, k: Tensor, mask: Tensor | None, block: Slices) -> Tensor:
        """P of a block, from its queries and keys."""
        count, queries, keys = block
        scores = q @ k.mT
        if self.causal:
            rows, columns = (torch.arange(s.start, s.stop, device=q.device) for s in (queries, keys))
            scores = scores.masked_fill_(columns > rows.unsqueeze(1), -torch.inf)
        if mask is None:
            return scores.softmax(-1)
        own = mask if self.masks is None else mask.index_select(0, self.masks[count])
        own = own[:, queries if own.shape[1] > 1 else slice(1), keys if own.shape[2] > 1 else slice(1)]
        masked = scores.masked_fill_(~own, -torch.inf) if own.dtype == torch.bool else scores + own
        probabilities: Tensor = torch.ops.aten._safe_softmax(masked, -1)  # zeros where all is masked
        return probabilities

    def factors(self, like: Tensor, block: Slices) -> Tensor | None:
        """D of a block, the same at each call; None without dropout."""
        if not self.dropout:
            return None
        generator = torch.Generator(like.device).manual_seed(
            self.seed + block[0].start * 2**24 + block[1].start
        )
        kept = torch.empty(like.shape, dtype=torch.bool, device=like.device)
        return (
            kept.bernoulli_(1.0 - self.dropout, generator=generator).to(like.dtype).div_(1.0 - self.dropout)
        )

    def whole(self, q: Tensor, k: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """P and D, with a graph to q and k."""
        block = (slice(0, len(q)), slice(0, q.shape[1]), slice(0, k.shape[1]))
        matrix = self.probabilities(q, k, mask, block)
        if not self.dropout:
            return matrix, None
        with torch.no_grad():
            factors = torch.zeros_like(matrix)
            for part in self.blocks(q, k):
                own = self.factors(factors[part], part)
                assert own is not None
                factors[part] = own
        return matrix, factors


def _times(x: Tensor, factors: Tensor | None) -> Tensor:
    return x if factors is None else x * factors


def _along(x: Tensor, p: Tensor) -> Tensor:
    """P̂(X), by the kernel of the softmax's gradient."""
    moved: Tensor = torch._softmax_backward_data(x, p, -1, p.dtype)
    return moved


def _gradient(g: Tensor, q: Tensor, k: Tensor, v: Tensor, p: Tensor, d: Tensor | None) -> Three:
    """The gradient of ⟨g, outputs⟩ with respect to q, k and v."""
    e = _along(_times(g @ v.mT, d), p)
    return e @ k, e.mT @ q, _times(p, d).mT @ g


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, call: Attention) -> Tensor:
        ctx.call, ctx.unread, sums = call, present(), None
        if call.fused(q, v, mask):
            outputs, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                *(x.unsqueeze(0) for x in (q, k, v)), 0.0, call.causal, scale=1.0
            )
            outputs = outputs.squeeze(0)
        else:
            outputs = q.new_empty(*q.shape[:2], v.shape[2])
            for block in call.blocks(q, k):
                n, rows, keys = block
                p = call.probabilities(q[n, rows], k[n, keys], mask, block)
                outputs[n, rows] = _times(p, call.factors(p, block)) @ v[n, keys]
        ctx.save_for_backward(q, k, v, mask, outputs, sums)
        return outputs  # type: ignore[no-any-return]

    @staticmethod
    @unseen
    def backward(ctx: Any, saved: Sequence[Any], g: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, mask, outputs, sums = saved
        call: Attention = ctx.call
        if not plain([g, q, k, v]):
            return *_gradient(g, q, k, v, *call.whole(q, k, mask)), None, None
        box = (outputs.detach(), sums)
        return *_Gradient.apply(g, q, k, v, mask, box, call, ctx.unread.of_all), None, None  # type: ignore[no-untyped-call]


class _Gradient(torch.autograd.Function):
    """The gradient of ⟨g, outputs⟩ with respect to q, k and v, or zeros in its place."""

    @staticmethod
    def forward(
        ctx: Any,
        g: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        box: Any,
        call: Attention,
        without: bool,
    ) -> Three:
        outputs, sums = box
        if without:
            ctx.save_for_backward(g, q, k, v, mask, None)
            ctx.call = call
            return nothing(g, q.shape), nothing(g, k.shape), nothing(g, v.shape)
        ctx.save_for_backward(g, q, k, v, mask, (g * outputs).sum(-1, keepdim=True))
        ctx.call = call
        if sums is not None:
            found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *(x.unsqueeze(0) for x in (g, q, k, v, outputs)), sums, 0.0, call.causal, scale=1.0
            )
            of_q, of_k, of_v = (x.squeeze(0) for x in found)
            return of_q, of_k, of_v
        of_q, of_k, of_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for block in call.blocks(q, k):
            n, rows, keys = block
            inputs = q[n, rows], k[n, keys], v[n, keys]
            p = call.probabilities(*inputs[:2], mask, block)
            of_q[n, rows], more_k, more_v = _gradient(g[n, rows], *inputs, p, call.factors(p, block))
            of_k[n, keys] += more_k
            of_v[n, keys] += more_v
        return of_q, of_k, of_v

    @staticmethod
    @unseen
    def backward(ctx: Any, saved: Sequence[Any], *abc: Tensor) -> tuple[Tensor | None, ...]:
        g, q, k, v, mask, delta = saved
        call: Attention = ctx.call
        if torch.is_grad_enabled() or not plain(abc):
            return *_whole_second(abc, (g, q, k, v), mask, call), None, None, None, None
        found = tuple(torch.zeros_like(x) for x in (g, q, k, v))
        rest = any(will_run(node) for node, _ in ctx.next_functions[1:4])
        for block in call.blocks(q, k):
            n, rows, keys = block
            of = [(n, rows), (n, rows), (n, keys), (n, keys)]
            into = [x[at] for x, at in zip(found, of, strict=True)]
            inputs = [x[at] for x, at in zip((g, q, k, v), of, strict=True)]
            p = call.probabilities(inputs[1], inputs[2], mask, block)
            part = [x[at] for x, at in zip(abc, of[1:], strict=True)]
            _add_second(into, part, inputs, p, call.factors(p, block), delta[n, rows] if rest else None)
        return *(found if rest else (found[0], None, None, None)), None, None, None, None


def _add_second(
    into: Sequence[Tensor],
    abc: Sequence[Tensor],
    inputs: Sequence[Tensor],
    p: Tensor,
    d: Tensor | None,
    delta: Tensor | None,
) -> None:
    """Add the derivatives with respect to g, q, k and v; without δ to that of g only."""
    (a, b, c), (g, q, k, v), (of_g, of_q, of_k, of_v) = abc, inputs, into
    moved = _along(torch.cat([a, q], -1) @ torch.cat([k, b], -1).mT, p)
    dropped = _times(moved, d)
    of_g.baddbmm_(dropped, v).baddbmm_(_times(p, d), c)
    if delta is None:
        return
    of_v.baddbmm_(dropped.mT, g)
    f = _times(g @ v.mT, d).sub_(delta)
    z = _times(g @ c.mT, d).mul_(p).addcmul_(moved, f)
    r = z.addcmul_(p, z.sum(-1, keepdim=True), value=-1)
    e = f.mul_(p)
    of_q.baddbmm_(r, k).baddbmm_(e, b)
    of_k.baddbmm_(r.mT, q).baddbmm_(e.mT, a)


def _whole_second(
    abc: Sequence[Tensor], inputs: Sequence[Tensor], mask: Tensor | None, call: Attention
) -> list[Tensor | None]:
    """The same derivatives by autograd, with a graph if one is wanted."""
    graph = torch.is_grad_enabled()
    with torch.enable_grad():
        # g itself depends on the others, which must not count here.
        inputs = g, q, k, v = [x.view_as(x) for x in inputs]
        first = _gradient(g, q, k, v, *call.whole(q, k, mask))
        pairs = [(x, y) for x, y in zip(first, abc, strict=True) if x.requires_grad]
        outputs, vectors = zip(*pairs, strict=True)
        live = [x for x in inputs if x.requires_grad]
        found = iter(torch.autograd.grad(outputs, live, vectors, create_graph=graph, allow_unused=True))
    return [next(found) if x.requires_grad else None for x in inputs]
