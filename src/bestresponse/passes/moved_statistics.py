"""The calls that move running statistics in a training pass, and the derivative of the statistics through them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from .norm_calls import Key, NormCalls, of_batch, ordinary
from .passes import Passes


class Update(NamedTuple):
    """One call of a norm that moves its running statistics."""

    input: Tensor
    momentum: float
    instances: bool
    graph: bool


class Updates(NormCalls):
    """The calls that move running statistics in a training pass."""

    def __init__(self, passes: Passes[Any]) -> None:
        super().__init__(passes)
        self._calls: dict[Key, list[Update]] = {}
        self._read: set[Key] = set()

    def norm(self, func: Any, call: dict[str, Any]) -> Any:
        mean, x, momentum = call["running_mean"], call["input"], float(call.get("momentum", 0.1))
        if ordinary(mean):
            key = self.key(mean)
            if not of_batch(func, call):
                self._read.add(key)
            elif momentum:
                graph = torch.is_grad_enabled() and ordinary(x)
                update = Update(x, momentum, func in (F.instance_norm, torch.instance_norm), graph)
                self._calls.setdefault(key, []).append(update)
        return func(**call)

    def pull(
        self, cotangents: dict[Key, tuple[Tensor, Tensor]], inputs: Sequence[Tensor], batch: tuple[int, int]
    ) -> tuple[list[Tensor | None], set[Key]]:
        """(∂s/∂inputs)ᵀ s̄ of the batch with this number of so many, and the statistics that moved with a graph."""
        outputs, grads, keys = [], [], set[Key]()
        for key in filter(self._calls.__contains__, cotangents):
            calls = self._calls[key]
            for call, share in zip(calls, _shares(key, calls, *batch), strict=True):
                if call.graph and call.input.requires_grad:
                    outputs.append(call.input)
                    grads.append(_of_input(call, *cotangents[key], share))
                    keys.add(key)
        if not outputs:
            return [None] * len(inputs), keys
        return list(torch.autograd.grad(outputs, inputs, grads, allow_unused=True)), keys

    def tell(self, cotangents: dict[Key, tuple[Tensor, Tensor]]) -> None:
        """Warn once of statistics that move in a way that has no derivative here."""
        problem, names = self._passes.problem, paths_of(self._passes)
        moved = [key for key in cotangents if key in self._calls]
        if hidden := [k for k in moved if not all(call.graph for call in self._calls[k])]:
            problem.warn_once(
                "hidden statistics",
                f"train_loss moves the running statistics of {[names.get(k[0], k[1]) for k in hidden][:5]} under "
                "no_grad or in a transform of torch.func, where they cannot be followed: that part counts as "
                "constant. Let that pass run with gradients, or with these norms in eval mode.",
            )
        if both := [k for k in moved if k in self._read]:
            problem.warn_once(
                "statistics of training",
                f"train_loss reads the running statistics of {[names.get(k[0], k[1]) for k in both][:5]}, which it "
                "also moves: its gradient and curvature treat them as constants. Normalise by the batch there.",
            )


def _shares(key: Key, calls: Sequence[Update], number: int, count: int) -> list[float]:
    """c_k of each call in a batch, times the share of that batch among so many."""
    if isinstance(key[0], _NormBase) and key[0].momentum is None:
        return [1.0 / (len(calls) * count)] * len(calls)
    shares, left = [], 1.0
    for call in reversed(calls):
        shares.append(call.momentum * left)
        left *= 1.0 - call.momentum
    factor = left ** (count - 1 - number) / (1.0 - left**count)
    return [share * factor for share in reversed(shares)]


def _of_input(call: Update, of_mean: Tensor, of_var: Tensor, share: float) -> Tensor:
    """The derivative of ⟨s̄, (mean, unbiased variance)⟩ with respect to what a norm is called with."""
    with torch.no_grad():
        x = call.input.detach()
        wide = x.to(torch.promote_types(x.dtype, of_mean.dtype))
        over = list(range(2, x.ndim)) if call.instances else [0, *range(2, x.ndim)]
        centred = wide - wide.mean(over, keepdim=True)
        count = x.numel() // (x.shape[1] * (x.shape[0] if call.instances else 1))
        factor = share * count * x.shape[1] / x.numel()  # the mean over instances
        slope = along_channels(of_var, x) * (2.0 * factor / (count - 1))
        return (centred * slope).add_(along_channels(of_mean, x) * (factor / count)).to(x.dtype)


def along_channels(of_channels: Tensor, x: Tensor) -> Tensor:
    """A vector over the channels, in a shape that broadcasts against ``x``."""
    return of_channels.view(1, -1, *(1,) * (x.ndim - 2))


def paths_of(passes: Passes[Any]) -> dict[nn.Module | None, str]:
    """Where each module is."""
    problem = passes.problem
    modules = (pair for root in (problem.hyper, problem.model) for pair in root.named_modules())
    return {module: name or type(module).__name__ for name, module in modules}
