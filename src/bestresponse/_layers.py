"""Layers in a form whose gradient is cheap to differentiate, in the place of torch's own while a pass runs.

Torch's convolutions (`_convolution`), and its batch norms with fixed statistics, whose own second derivative is that of
the general case, of some thirty operations on the activations.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ._convolution import convolve, transformed


@contextmanager
def cheap_layers(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Let these layers run so, but those that have changed the method; and put back what was there."""
    changed = [
        (module, method, function)
        for module in modules
        for kind, method, function in _FORMS
        if isinstance(module, kind)
        and getattr(type(module), method) is getattr(kind, method)
        and method not in vars(module)
    ]
    try:
        for module, method, function in changed:
            vars(module)[method] = partial(function, module)
        yield
    finally:
        for module, method, _ in changed:
            vars(module).pop(method, None)


def _norm(module: Any, x: Tensor) -> Tensor:
    """(x − mean) / √(var + ε) · weight + bias, with running mean and variance; else torch's."""
    mean, var = module.running_mean, module.running_var
    if module.training or mean is None or x.dtype != mean.dtype or transformed():
        outputs: Tensor = type(module).forward(module, x)
        return outputs
    module._check_input_dim(x)
    scale = torch.rsqrt(var + module.eps)
    scale = scale if module.weight is None else scale * module.weight
    shift = -mean * scale if module.bias is None else module.bias - mean * scale
    shape = (1, -1) + (1,) * (x.ndim - 2)
    # addcmul would copy x for its second derivative.
    return (x * scale.view(shape)).add_(shift.view(shape))


_FORMS: tuple[tuple[type, str, Callable[..., Tensor]], ...] = (
    (_BatchNorm, "forward", _norm),
    *((kind, "_conv_forward", convolve) for kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d)),
)
