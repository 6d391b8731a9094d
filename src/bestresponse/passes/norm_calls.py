"""Calls of norms with running statistics, by any module or function, as a function mode sees them."""

from collections.abc import Callable, Iterable
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C import _functorch
from torch.nn.modules.batchnorm import _NormBase
from torch.overrides import TorchFunctionMode

from .batch_norm import batch_norm, instance_norm, torch_batch_norm, torch_instance_norm
from .passes import Passes

_FORMS: dict[Any, Callable[..., Any]] = {
    F.batch_norm: batch_norm,
    F.instance_norm: instance_norm,
    torch.batch_norm: torch_batch_norm,
    torch.instance_norm: torch_instance_norm,
}
# The names of each function's arguments: in its form they follow torch's own function.
_ARGUMENTS: dict[Any, list[str]] = {f: list(signature(form).parameters)[1:] for f, form in _FORMS.items()}
# Which running mean: the module that holds it and its name there (or where it lies in memory), offset, shape.
Key = tuple[nn.Module | None, str, int, torch.Size]


class NormCalls(TorchFunctionMode):
    """Hands each call of a norm with running statistics to `norm`, its arguments by name."""

    def __init__(self, passes: Passes[Any]) -> None:
        super().__init__()
        self._passes = passes
        self._buffers: dict[int, tuple[nn.Module, str, Tensor]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        names, named = _ARGUMENTS.get(func), kwargs or {}
        if names is None or not self._passes.innermost:
            return func(*args, **named)
        call = {**dict(zip(names, args, strict=False)), **named}
        return func(**call) if call.get("running_mean") is None else self.norm(func, call)

    def norm(self, func: Any, call: dict[str, Any]) -> Any:
        """Make one call; return what it returns."""
        raise NotImplementedError

    def key(self, mean: Tensor) -> Key:
        """The buffer of this pass that a running mean is, or is a part of."""
        pointer = mean.untyped_storage().data_ptr()
        if pointer not in self._buffers:  # each pass has its own; those of the last pass are held until here
            self._buffers = {
                buffer.untyped_storage().data_ptr(): (module, name, buffer)
                for module, buffers in self._passes.buffers().items()
                for name, buffer in buffers.items()
                if buffer is not None and ordinary(buffer) and buffer.is_floating_point()
            }
        module, name, _ = self._buffers.get(pointer, (None, f"at {pointer:#x}", mean))
        return module, name, int(mean.storage_offset()), mean.shape


def of_batch(func: Any, call: dict[str, Any]) -> bool:
    """Whether a norm takes the statistics of its batch."""
    if "use_input_stats" in _ARGUMENTS[func]:
        return bool(call.get("use_input_stats", True))
    return bool(call.get("training", False))


def ordinary(x: Tensor) -> bool:
    """Whether a tensor has its own memory, and no transform or compiler is active."""
    return (
        not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
        and type(x) in (Tensor, nn.Parameter)
        and x.layout == torch.strided
        and not _functorch.is_legacy_batchedtensor(x)
    )


def moving(modules: Iterable[nn.Module]) -> set[nn.Module]:
    """The norms whose running statistics their calls move."""
    tracked = [m for m in modules if isinstance(m, _NormBase) and m.running_mean is not None]
    return {m for m in tracked if m.training and m.track_running_stats and m.momentum != 0}


def out_of_sight(model: nn.Module) -> set[nn.Module]:
    """The norms whose calls a function mode may not see, in compiled and scripted modules."""
    found: set[nn.Module] = set()
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule):
            if module.training and "running_mean" in dict(module.named_buffers(recurse=False)):
                found.add(module)
        elif "_orig_mod" in module._modules or module._compiled_call_impl is not None:
            found |= moving(module.modules())
    return found
