"""The precision in which a loss computes, which may differ from that of the weights."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import graph

_LOW = 1e-4
# Products that torch may compute in less than float32, and the setting that decides it.
_PRODUCTS = ("Addmm", "Mm", "Bmm", "Baddbmm", "Linear", "ScaledDot", "Attention", "Compiled")
_CONVOLUTIONS = ("Convolution", "CudnnConvolution")
_SETTINGS = {"tf32": ("TensorFloat-32", 2.0**-10), "bf16": ("bfloat16", 2.0**-7)}


@dataclass(frozen=True)
class Arithmetic:
    """A precision: its name, and the distance from 1 to the next number."""

    name: str
    eps: float

    @property
    def low(self) -> bool:
        """Whether it is less than float32."""
        return self.eps > _LOW


def arithmetic(loss: Tensor) -> Arithmetic:
    """The coarsest precision of an operation in the graph of a loss, from weights and hyperparameters to its value."""
    found = {_of(node, value) for node in graph.nodes([loss]) for value in node._input_metadata}
    known = [x for x in found if x is not None]
    return max(known, key=lambda x: x.eps, default=_of_dtype(loss.dtype))


def _of(node: Any, value: Any) -> Arithmetic | None:
    """The precision of one output of an operation."""
    if not value.dtype.is_floating_point:
        return None
    if value.dtype is torch.float32:
        name = node.name().removeprefix("torch::autograd::").lstrip("_")
        setting = _SETTINGS.get(_setting(name, value.device))
        if setting is not None:
            return Arithmetic(*setting)
    return _of_dtype(value.dtype)


def _of_dtype(dtype: torch.dtype) -> Arithmetic:
    return Arithmetic(str(dtype).removeprefix("torch."), torch.finfo(dtype).eps)


def _setting(name: str, device: torch.device) -> str:
    """How torch computes a float32 product on a device: "none" or "ieee", "tf32", "bf16"."""
    product, convolution = name.startswith(_PRODUCTS), name.startswith(_CONVOLUTIONS)
    if not (product or convolution):
        return "none"
    backends: Any = torch.backends
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0):
        return str((backends.cudnn.conv if convolution else backends.cuda.matmul).fp32_precision)
    return str(backends.mkldnn.matmul.fp32_precision) if device.type == "cpu" and product else "none"
