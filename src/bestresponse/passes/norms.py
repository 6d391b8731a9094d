"""Norms whose gradient is cheap to differentiate, and right at every order.

With x̂ = (x − μ) r and r = 1/√(σ² + ε), the outputs are w x̂ + b, and the gradient is

    g ↦ (P(w g), Σ g x̂, Σ g),     P(u) = r (u − mean(u) − x̂ mean(u x̂)),

where means go over all numbers with the same statistics, and sums over all with the same weight. P is symmetric, so
the inner product of these three with (v, a, b) has the derivatives

    with respect to g:  w P(v) + a x̂ + b,
    with respect to w:  Σ g P(v),
    with respect to x:  P(a g − r mean(v x̂) w g) − r mean(w g x̂) P(v) − r mean(w g P(v)) x̂.

The derivatives of x and w have their own node, so autograd can skip what is not needed. (Torch's own second
derivatives treat μ and r as constants, so its third derivatives are wrong.)
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .tensors import Own, plain, unseen, wide
from .unread import nothing, present

Three = tuple[Tensor, Tensor, Tensor]


class Norm(ABC):
    """One run of a norm: by plain operations here, and by few kernels in the subclasses."""

    mean: Tensor
    scale: Tensor  # r

    def __init__(self, dims: Sequence[int], rest: Sequence[int], eps: float) -> None:
        self.dims, self.rest, self.eps = list(dims), list(rest), eps

    @abstractmethod
    def outputs(self, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        """The outputs; keeps mean and scale."""

    @abstractmethod
    def gradients(self, g: Tensor, x: Tensor, w: Tensor, wanted: Sequence[bool]) -> Any:
        """The gradients with respect to x, w and b."""

    @abstractmethod
    def of_gradients(self, v: Three, x: Tensor, w: Tensor) -> Tensor:
        """The derivative of ⟨v, gradients⟩ with respect to g."""

    @abstractmethod
    def of_rest(self, v: Sequence[Tensor], gradients: Three, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        """The derivatives with respect to x and w; ``gradients`` are g itself, Σ g x̂ and Σ g."""

    def along(self, of_weights: Tensor, x: Tensor) -> Tensor:
        """A tensor of the weights' shape, broadcast against x."""
        shape = [1 if d - x.ndim in self.rest else n for d, n in enumerate(x.shape)]
        return of_weights.view(shape)

    def total(self, u: Tensor, w: Tensor) -> Tensor:
        """The sum over all numbers with the same weight."""
        return u.sum(self.rest).view(w.shape) if self.rest else u

    def average(self, u: Tensor) -> Tensor:
        """The mean over all numbers with the same statistics."""
        return u.mean(self.dims, keepdim=True)

    def statistics(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The mean and r, with a graph to x."""
        mean = self.average(x)
        return mean, torch.rsqrt(self.average((x - mean).square()) + self.eps)

    def plainly(self, x: Tensor) -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]:
        """x̂, r and P, with a graph to x."""
        mean, r = self.statistics(x)
        normal = (x - mean) * r

        def project(u: Tensor) -> Tensor:
            return r * (u - self.average(u) - normal * self.average(u * normal))

        return normal, r, project

    def plain_outputs(self, x: Tensor, w: Tensor | None, b: Tensor | None) -> Tensor:
        """The outputs by plain operations."""
        y = self.plainly(x)[0]
        y = y if w is None else y * self.along(w, x)
        return y if b is None else y + self.along(b, x)

    def plain_gradients(self, g: Tensor, x: Tensor, w: Tensor) -> Three:
        """`gradients` by plain operations."""
        normal, _, project = self.plainly(x)
        return project(self.along(w, x) * g), self.total(g * normal, w), self.total(g, w)

    def plain_of_gradients(self, v: Three, x: Tensor, w: Tensor) -> Tensor:
        """`of_gradients` by plain operations."""
        normal, _, project = self.plainly(x)
        return self.along(w, x) * project(v[0]) + self.along(v[1], x) * normal + self.along(v[2], x)

    def plain_of_rest(self, v: Sequence[Tensor], g: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        """`of_rest` by plain operations."""
        normal, r, project = self.plainly(x)
        u, projected = self.along(w, x) * g, project(v[0])
        of_x = project(self.along(v[1], x) * g - r * self.average(v[0] * normal) * u)
        of_x = of_x - r * self.average(u * normal) * projected - r * self.average(u * projected) * normal
        return of_x, self.total(g * projected, w)


def normalised(
    own: Own, norm: Norm, x: Tensor, weight: Tensor | None, bias: Tensor | None, shape: Sequence[int]
) -> Any:
    """The outputs in this form, for weights of this shape; by plain operations if a transform is active.

    Torch's own function runs first, for its errors and for the running statistics.
    """
    wide_x = wide(x)
    w, b = (None if t is None else wide(t) for t in (weight, bias))
    given = [t for t in (wide_x, w, b) if t is not None]
    if not plain(given):
        with torch.no_grad():
            like = own()
        return norm.plain_outputs(wide_x, w, b).to(like.dtype)
    if not any(t.requires_grad for t in given):
        return own()
    w = wide_x.new_ones(shape) if w is None else w
    b = wide_x.new_zeros(shape) if b is None else b
    return _Normalised.apply(wide_x, w, b, norm).to(x.dtype)  # type: ignore[no-untyped-call]


class _Normalised(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor, norm: Norm) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.norm, ctx.unread = norm, present()
        return norm.outputs(x, w, b)

    @staticmethod
    @unseen
    def backward(ctx: Any, saved: Sequence[Tensor], g: Tensor) -> tuple[Tensor | None, ...]:
        x, w = saved
        norm: Norm = ctx.norm
        if not plain([g, x, w]):
            return *norm.plain_gradients(g, x, w), None
        if not torch.is_grad_enabled():
            return *norm.gradients(g, x, w, ctx.needs_input_grad[:3]), None
        of_x, of_w, of_b = _OfGradients.apply(g, (x, w), norm, ctx.unread.of_all)  # type: ignore[no-untyped-call]
        if ctx.unread.of_all:
            return of_x, of_w, of_b, None
        zeros, none = _OfRest.apply(x, w, (g, of_w.detach(), of_b.detach()), norm)  # type: ignore[no-untyped-call]
        return of_x.add_(zeros), of_w + none, of_b, None


class _OfGradients(torch.autograd.Function):
    """The gradients, or zeros in their place, and their derivatives with respect to g."""

    @staticmethod
    def forward(ctx: Any, g: Tensor, box: tuple[Tensor, Tensor], norm: Norm, without: bool) -> Any:
        ctx.save_for_backward(*box)
        ctx.norm = norm
        if without:
            x, w = box
            return nothing(g, x.shape), nothing(g, w.shape), nothing(g, w.shape)
        return norm.gradients(g, *box, (True, True, True))

    @staticmethod
    @unseen
    def backward(ctx: Any, saved: Sequence[Tensor], *v: Tensor) -> tuple[Tensor, None, None, None]:
        x, w = saved
        if torch.is_grad_enabled() or not plain(v):
            return ctx.norm.plain_of_gradients(v, x, w), None, None, None
        return ctx.norm.of_gradients(v, x, w), None, None, None


class _OfRest(torch.autograd.Function):
    """Zeros, and the derivatives with respect to x and w."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, box: Three, norm: Norm) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, w, *box)
        ctx.norm = norm
        return nothing(x, x.shape), nothing(x, w.shape)

    @staticmethod
    @unseen
    def backward(ctx: Any, saved: Sequence[Tensor], *v: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, w, *gradients = saved
        if torch.is_grad_enabled() or not plain(v):
            return *ctx.norm.plain_of_rest(v, gradients[0], x, w), None, None
        return *ctx.norm.of_rest(v, gradients, x, w), None, None
