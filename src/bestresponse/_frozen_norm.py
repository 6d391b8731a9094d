"""Batch norm with fixed statistics as one multiplication and addition, whose second derivative costs next to nothing.

Torch's own for that case is the general one, of some thirty operations on the activations.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


@contextmanager
def affine_norms(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Let torch's batch norms in eval mode run so, and put their own forward pass back."""
    changed = [
        m
        for m in modules
        if isinstance(m, _BatchNorm) and type(m).forward is _BatchNorm.forward and "forward" not in vars(m)
    ]
    try:
        for module in changed:
            vars(module)["forward"] = partial(_forward, module)
        yield
    finally:
        for module in changed:
            vars(module).pop("forward", None)


def _forward(module: Any, x: Tensor) -> Tensor:
    """(x − mean) / √(var + ε) · weight + bias, with running mean and variance; else torch's."""
    mean, var = module.running_mean, module.running_var
    if module.training or mean is None or x.dtype != mean.dtype:
        outputs: Tensor = type(module).forward(module, x)
        return outputs
    module._check_input_dim(x)
    scale = torch.rsqrt(var + module.eps)
    scale = scale if module.weight is None else scale * module.weight
    shift = -mean * scale if module.bias is None else module.bias - mean * scale
    shape = (1, -1) + (1,) * (x.ndim - 2)
    # addcmul would copy x for its second derivative.
    return (x * scale.view(shape)).add_(shift.view(shape))
