"""Batch norm and instance norm in the form of `_norms`, by kernels of channels.

With fixed statistics it is one multiplication and addition. Instance norm is batch norm of one example, which has the
channels of all examples.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .norms import Norm, Three, normalised
from .tensors import Own, eager, of_one_kind, plain, wide


def batch_norm(
    own: Own,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """The form of ``torch.nn.functional.batch_norm``; torch's own is ``own``."""
    kept = [running_mean, running_var]
    if not _fits(input, kept, weight, bias) or (training and input.numel() <= input.shape[1]):
        return own()
    if not training:
        return _fixed(own, input, kept, weight, bias, eps)
    return normalised(own, _Channels(input, kept, momentum, eps), input, weight, bias, input.shape[1:2])


def instance_norm(
    own: Own,
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """The form of ``torch.nn.functional.instance_norm``; torch's own is ``own``."""
    kept = [running_mean, running_var]
    if not _fits(input, kept, weight, bias) or input[:1, :1].numel() <= 1:
        return own()
    if not use_input_stats:
        return _fixed(own, input, kept, weight, bias, eps)
    examples = len(input)
    x = input.reshape(1, -1, *input.shape[2:])
    w, b = (t if t is None else t.repeat(examples) for t in (weight, bias))
    return normalised(own, _Channels(x, kept, momentum, eps), x, w, b, x.shape[1:2]).view(input.shape)


def torch_batch_norm(
    own: Own,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool = True,
) -> Any:
    """The form of ``torch.batch_norm``, which takes the same arguments in another order."""
    return batch_norm(own, input, running_mean, running_var, weight, bias, training, momentum, eps)


def torch_instance_norm(
    own: Own,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool = True,
) -> Any:
    """The form of ``torch.instance_norm``, likewise."""
    return instance_norm(own, input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)


def native_batch_norm(
    own: Own,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    """The form of ``torch.native_batch_norm``, which also returns mean and r."""
    fits = _fits(input, [running_mean, running_var], weight, bias)
    if not training or not fits or input.numel() <= input.shape[1]:
        return own()
    y = batch_norm(lambda: own()[0], input, running_mean, running_var, weight, bias, True, momentum, eps)
    return y, *(t.view(-1) for t in _Channels(input, (), momentum, eps).statistics(input))


def _fits(x: Tensor, kept: Sequence[Tensor | None], weight: Tensor | None, bias: Tensor | None) -> bool:
    """Whether these are arguments for a form: torch's kernels write to as many statistics as there are channels."""
    given = [t for t in (weight, bias, *kept) if t is not None]
    return (
        torch.is_grad_enabled()
        and eager([x, *given])
        and x.ndim > 1
        and (kept[0] is None) == (kept[1] is None)
        and all(t.shape == x.shape[1:2] for t in given)
        and of_one_kind(x, given)
    )


def _fixed(
    own: Own,
    input: Tensor,
    kept: Sequence[Tensor | None],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Any:
    """(x − mean) / √(var + ε) · weight + bias, with running mean and variance."""
    mean, var = kept
    given = [t for t in (input, mean, var, weight, bias) if t is not None]
    simple = plain([wide(t) for t in given])
    if mean is None or var is None or (simple and not any(t.requires_grad for t in given)):
        return own()
    shape = (1, -1, *(1,) * (input.ndim - 2))
    scale = torch.rsqrt(wide(var) + eps)
    scale = scale if weight is None else scale * wide(weight)
    y = (wide(input) - wide(mean).view(shape)) * scale.view(shape)
    if bias is not None:
        y = y.add_(wide(bias).view(shape)) if simple else y + wide(bias).view(shape)
    return y.to(input.dtype)


class _Channels(Norm):
    def __init__(self, x: Tensor, kept: Sequence[Tensor | None], momentum: float, eps: float) -> None:
        others = [-x.ndim, *range(2 - x.ndim, 0)]
        super().__init__(others, others, eps)
        self.kept, self.momentum = [t for t in kept if t is not None], momentum

    def outputs(self, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        moved = [t.to(x.dtype) for t in self.kept]
        moved = [t if len(t) == len(w) else t.repeat(len(w) // len(t)) for t in moved]
        mean, var = moved or (None, None)
        y, self.mean, self.scale = torch.native_batch_norm(x, w, b, mean, var, True, self.momentum, self.eps)
        for t, now in zip(self.kept, moved, strict=True):
            if now is not t:
                t.copy_(now.view(-1, len(t)).mean(0))
        outputs: Tensor = y
        return outputs

    def gradients(self, g: Tensor, x: Tensor, w: Tensor, wanted: Sequence[bool]) -> Any:
        return torch.ops.aten.native_batch_norm_backward(
            g, x, w, None, None, self.mean, self.scale, True, self.eps, wanted
        )

    def of_gradients(self, v: Three, x: Tensor, w: Tensor) -> Tensor:
        of_g: Tensor = self.gradients(v[0], x, w, (True, False, False))[0]
        slope = v[1] * self.scale
        of_g.addcmul_(x, self.along(slope, x)).add_(self.along(v[2] - slope * self.mean, x))
        return of_g

    def of_rest(self, v: Sequence[Tensor], gradients: Three, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        """Each channel has its own statistics and weight, so all terms are numbers of the channel, times v, g and x."""
        g, r, count = gradients[0], self.scale, x.numel() // len(w)
        g_normal, g_mean = gradients[1] / count, gradients[2] / count
        v_normal, v_mean = (t / count for t in self.gradients(v[0], x, w, (False, True, True))[1:])
        inner = self._inner(v[0], g, w) / count - v_mean * g_mean - v_normal * g_normal  # mean(g P(v)) / r
        bend = w * r * r
        by_v, by_g = -bend * g_normal, v[1] * r - bend * v_normal
        by_x = -r * (bend * (inner - 2 * v_normal * g_normal) + v[1] * r * g_normal)
        by_one = bend * (g_normal * v_mean + v_normal * g_mean) - v[1] * r * g_mean - by_x * self.mean
        of_x = v[0] * self.along(by_v, x)
        of_x.addcmul_(g, self.along(by_g, x)).addcmul_(x, self.along(by_x, x)).add_(self.along(by_one, x))
        return of_x, count * r * inner

    def _inner(self, v: Tensor, g: Tensor, w: Tensor) -> Tensor:
        """Σ v g in each channel, by the kernel for Σ g x̂."""
        none, one = torch.zeros_like(w), torch.ones_like(w)
        total: Tensor = torch.ops.aten.native_batch_norm_backward(
            v, g, w, None, None, none, one, True, self.eps, (False, True, False)
        )[1]
        return total
