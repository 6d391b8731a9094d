"""Batch norm whose gradient is cheap to differentiate.

With fixed statistics it is one multiplication and addition. With those of the batch, x̂ = (x − μ) r and r = 1/√(σ² + ε)
for each channel, its gradient is

    g ↦ (w P(g), Σ g x̂, Σ g),     P(g) = r (g − mean(g) − x̂ mean(g x̂)),

whose derivative with respect to g is the same map, by the same kernel. Those with respect to x and w are in nodes of
their own, so that autograd leaves out what is not asked for. (Torch's own second derivative is that of the general
case, of some thirty operations on the activations.)
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._convolution import plain

_torchs: ContextVar[bool] = ContextVar("_torchs", default=False)


@contextmanager
def torchs_own() -> Iterator[None]:
    """Let batch norms of this thread run by torch's function, so that a function mode sees them."""
    token = _torchs.set(True)
    try:
        yield
    finally:
        _torchs.reset(token)


def normalise(self: Any, torchs: Any, input: Tensor) -> Tensor:
    """``forward`` of torch's batch norms, which is ``torchs``."""
    own = [self.weight, self.bias, self.running_mean, self.running_var]
    given = [t for t in own if t is not None]
    channels = input.shape[1] if input.ndim > 1 else 0
    # Torch's kernels write to as many statistics as there are channels.
    fits = all(t.numel() == channels for t in given) and (own[2] is None) == (own[3] is None)
    if (
        _torchs.get()
        or not fits
        or not self.eps > 0
        or not plain([input, *given])
        or input.numel() <= channels
    ):
        outputs: Tensor = torchs(self, input)
        return outputs
    self._check_input_dim(input)
    fixed = not self.training and self.running_mean is not None
    return _fixed(self, input) if fixed else _of_batch(self, input)


def _fixed(module: Any, x: Tensor) -> Tensor:
    """(x − mean) / √(var + ε) · weight + bias, with running mean and variance."""
    scale = torch.rsqrt(module.running_var + module.eps)
    scale = scale if module.weight is None else scale * module.weight
    y = (x - _along(module.running_mean, x)) * _along(scale, x)
    return y if module.bias is None else y.add_(_along(module.bias, x))


def _of_batch(module: Any, x: Tensor) -> Tensor:
    """The same with mean and variance of the batch, which move the running ones."""
    factor, tracked = module.momentum, module.training and module.track_running_stats
    if tracked and module.num_batches_tracked is not None:
        module.num_batches_tracked.add_(1)
        factor = 1.0 / float(module.num_batches_tracked) if factor is None else factor
    mean, var = (module.running_mean, module.running_var) if tracked else (None, None)
    weight = x.new_ones(x.shape[1]) if module.weight is None else module.weight
    bias = x.new_zeros(x.shape[1]) if module.bias is None else module.bias
    settings = _Settings(mean, var, factor or 0.0, module.eps)
    outputs: Tensor = _BatchNorm.apply(x, weight, bias, settings)  # type: ignore[no-untyped-call]
    return outputs


def _along(of_channels: Tensor, x: Tensor) -> Tensor:
    return of_channels.view(1, -1, *(1,) * (x.ndim - 2))


def _mean(x: Tensor) -> Tensor:
    """Of each channel."""
    return x.mean([0, *range(2, x.ndim)])


class _Settings(NamedTuple):
    running_mean: Tensor | None
    running_var: Tensor | None
    momentum: float
    eps: float


class _Statistics(NamedTuple):
    mean: Tensor
    scale: Tensor
    eps: float

    def at(self, x: Tensor) -> "_Statistics":
        """The same with a graph to x, where one is wanted."""
        if not torch.is_grad_enabled():
            return self
        mean = _mean(x)
        var = _mean((x - _along(mean, x)).square())
        return _Statistics(mean, torch.rsqrt(var + self.eps), self.eps)

    def gradients(self, grad: Tensor, x: Tensor, w: Tensor, wanted: tuple[bool, ...]) -> tuple[Any, ...]:
        """Those with respect to input, weight and bias, by torch's kernel (whose own derivative is the costly one)."""
        found: tuple[Any, ...] = torch.ops.aten.native_batch_norm_backward(
            grad, x, w, None, None, self.mean, self.scale, True, self.eps, wanted
        )
        return found


class _BatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor, settings: _Settings) -> Tensor:
        y, mean, scale = torch.native_batch_norm(x, w, bias, *settings[:2], True, *settings[2:])
        ctx.save_for_backward(x, w)
        ctx.statistics = _Statistics(mean, scale, settings.eps)
        outputs: Tensor = y
        return outputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        statistics = ctx.statistics
        if not torch.is_grad_enabled() or not plain([grad, x, w]):
            return *statistics.gradients(grad, x, w, ctx.needs_input_grad[:3]), None
        of_input, of_weight, of_bias = _FromGrad.apply(grad, (x, w), statistics)  # type: ignore[no-untyped-call]
        nothing, none = _FromInput.apply(x, (grad, w), statistics)  # type: ignore[no-untyped-call]
        zero = _FromWeight.apply(w, (grad, x), statistics)  # type: ignore[no-untyped-call]
        return of_input.add_(nothing).add_(zero), of_weight + none, of_bias, None


class _FromGrad(torch.autograd.Function):
    """The values, and their derivatives with respect to grad."""

    @staticmethod
    def forward(
        ctx: Any, grad: Tensor, box: tuple[Tensor, Tensor], statistics: _Statistics
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*box)
        ctx.statistics = statistics
        return statistics.gradients(grad, *box, (True, True, True))

    @staticmethod
    def backward(ctx: Any, v: Tensor, of_weight: Tensor, of_bias: Tensor) -> tuple[Tensor, None, None]:
        x, w = ctx.saved_tensors
        mean, scale, _ = ctx.statistics.at(x)
        if torch.is_grad_enabled() or not plain([v, of_weight, of_bias]):
            normal = (x - _along(mean, x)) * _along(scale, x)
            inner = v - _along(_mean(v), x) - normal * _along(_mean(v * normal), x)
            total = _along(w * scale, x) * inner + _along(of_weight, x) * normal + _along(of_bias, x)
            return total, None, None
        total = ctx.statistics.gradients(v, x, w, (True, False, False))[0]
        slope = of_weight * scale
        return total.addcmul_(x, _along(slope, x)).add_(_along(of_bias - slope * mean, x)), None, None


class _Second(NamedTuple):
    """For each channel the means of what the derivatives of ⟨v, w P(grad)⟩ are made of."""

    v: Tensor
    grad: Tensor
    v_normal: Tensor
    grad_normal: Tensor
    covariance: Tensor  # mean(v P(grad)) / r

    @classmethod
    def of(cls, v: Tensor, grad: Tensor, x: Tensor, w: Tensor, statistics: _Statistics) -> "_Second":
        if torch.is_grad_enabled():
            normal = (x - _along(statistics.mean, x)) * _along(statistics.scale, x)
            of_v, of_grad = ((_mean(g * normal), _mean(g)) for g in (v, grad))
        else:
            count = x.numel() // x.shape[1]
            of_v, of_grad = (
                tuple(s / count for s in statistics.gradients(g, x, w, (False, True, True))[1:])
                for g in (v, grad)
            )
        covariance = _mean(v * grad) - of_v[1] * of_grad[1] - of_v[0] * of_grad[0]
        return cls(of_v[1], of_grad[1], of_v[0], of_grad[0], covariance)


class _FromInput(torch.autograd.Function):
    """Zeros, and the derivatives with respect to the input."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, box: tuple[Tensor, Tensor], statistics: _Statistics
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(*box, x)
        ctx.statistics = statistics
        nothing = x.new_zeros(())
        return nothing.expand_as(x), nothing.new_zeros(x.shape[1])

    @staticmethod
    def backward(ctx: Any, v: Tensor, of_weight: Tensor) -> tuple[Tensor, None, None]:
        grad, w, x = ctx.saved_tensors
        statistics = ctx.statistics.at(x)
        mean, r, _ = statistics
        of = _Second.of(v, grad, x, w, statistics)
        bend = w * r * r
        by_v, by_grad = -bend * of.grad_normal, of_weight * r - bend * of.v_normal
        by_normal = (
            -bend * (of.covariance - 2 * of.v_normal * of.grad_normal) - of_weight * r * of.grad_normal
        )
        by_one = bend * (of.grad_normal * of.v + of.v_normal * of.grad) - of_weight * r * of.grad
        by_x = by_normal * r
        total, shift = v * _along(by_v, x), by_one - by_x * mean
        if not plain([v, of_weight]):
            return total + grad * _along(by_grad, x) + x * _along(by_x, x) + _along(shift, x), None, None
        total.addcmul_(grad, _along(by_grad, x)).addcmul_(x, _along(by_x, x))
        return total.add_(_along(shift, x)), None, None


class _FromWeight(torch.autograd.Function):
    """Zeros, and the derivative of the input's gradient with respect to the weight."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, box: tuple[Tensor, Tensor], statistics: _Statistics) -> Tensor:
        ctx.save_for_backward(*box, w)
        ctx.statistics = statistics
        return w.new_zeros(()).expand_as(box[1])

    @staticmethod
    def backward(ctx: Any, v: Tensor) -> tuple[Tensor, None, None]:
        grad, x, w = ctx.saved_tensors
        statistics = ctx.statistics.at(x)
        of = _Second.of(v, grad, x, w, statistics)
        return statistics.scale * of.covariance * (x.numel() // x.shape[1]), None, None
