"""The tensors that the forms of functions accept, and the type in which they compute."""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn
from torch._C import _functorch

Own = Callable[[], Any]  # a call of torch's own function


def eager(given: Sequence[Tensor]) -> bool:
    """Whether these are tensors with torch's own functions, which run now and are not recorded for later.

    Compilers, traces and subclasses that redefine functions know torch's own functions only.
    """
    return (
        all(computes_as_tensor(type(t)) for t in given)
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
    )


def plain(given: Sequence[Tensor]) -> bool:
    """Whether these are real tensors of one dtype and device, not empty, and no transform is active.

    Transforms of torch.func, batched gradients and dual numbers know torch's own functions only.
    """
    x = given[0]
    return (
        eager(given)
        and not torch._C._are_functorch_transforms_active()
        and all(
            type(t) in (Tensor, nn.Parameter) and t.dtype == x.dtype and t.device == x.device for t in given
        )
        and x.is_floating_point()
        and (x.dtype != torch.float16 or x.device.type != "cpu")  # whose kernels of gradients are slow
        and x.numel() > 0
        and not any(_functorch.is_legacy_batchedtensor(t) for t in given)
        and all(forward_ad.unpack_dual(t).tangent is None for t in given)  # type: ignore[no-untyped-call]
    )


def of_one_kind(x: Tensor, others: Sequence[Tensor]) -> bool:
    """Whether a norm takes such weights and statistics: x's dtype, or float32 for one of half precision."""
    dtypes = {t.dtype for t in others} or {x.dtype}
    return (
        x.is_floating_point()
        and len(dtypes) == 1
        and dtypes <= {x.dtype, wide_dtype(x)}
        and all(t.device == x.device for t in others)
    )


def wide_dtype(x: Tensor) -> torch.dtype:
    """The precision of sums over x."""
    return torch.float32 if x.dtype in (torch.bfloat16, torch.float16) else x.dtype


def wide(x: Tensor) -> Tensor:
    """The tensor x in this precision."""
    return x.to(wide_dtype(x))


def as_autocast(given: Sequence[Tensor]) -> list[Tensor]:
    """The tensors in the type to which autocast takes the arguments of a matrix product."""
    kind, wide = given[0].device.type, any(t.dtype == torch.float64 for t in given)
    if wide or not torch.is_autocast_enabled(kind) or not all(t.is_floating_point() for t in given):
        return list(given)
    return [t.to(torch.get_autocast_dtype(kind)) for t in given]


def computes_as_tensor(kind: type) -> bool:
    """Whether a class computes as Tensor does."""
    if kind in (Tensor, nn.Parameter):
        return True
    if not issubclass(kind, Tensor) or kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return False
    function = kind.__torch_function__
    return (
        function is nn.Parameter.__torch_function__
        or getattr(function, "__func__", None) is Tensor.__torch_function__.__func__  # type: ignore[attr-defined]
    )


def unseen(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward that also takes what was saved, and whose own calls of torch no function mode sees.

    Saved tensors are unpacked before that, since a checkpoint computes them again, by forms.
    """

    @wraps(backward)
    def quiet(ctx: Any, *gradients: Tensor) -> Any:
        saved = ctx.saved_tensors
        with torch._C.DisableTorchFunction():
            return backward(ctx, saved, *gradients)

    return quiet


def will_run(node: Any) -> bool:
    """Whether the backward pass that runs now goes on to a node; a leaf, which has no backward of its own, counts."""
    if node is None:
        return False
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # torch does not tell for a leaf that is asked for
        return True
