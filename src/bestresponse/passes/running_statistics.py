"""Running statistics of norms: a loss in eval mode reads them, training passes move them; they depend on w and λ.

A training pass moves the running mean or variance s of a norm at each call of it, k = 1 … n, by

    s ← (1 − m_k) s + m_k t_k,     t_k the mean, or the unbiased variance, of what the norm is called with.

Where the passes repeat, s tends to the fixed point of the n updates together,

    s(w, λ) = Σ_k c_k t_k(w, λ),     c_k = m_k Π_{j>k} (1 − m_j) / (1 − d),     d = Π_j (1 − m_j),

which for one call is t₁ itself. Several batches follow one another in each pass, so all calls of the i-th of B
batches have the additional factor d^(B − i) (1 − d) / (1 − d^B), whatever the batch's weight in the loss. A cumulative
average (``momentum=None``) has 1/n instead of c_k and 1/B as that factor. With s̄ = ∂L_V/∂s at the present running
statistics, the gradient of the validation loss is

    ∂L_V/∂(w, λ) + (∂s/∂(w, λ))ᵀ s̄.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from .._tree import Tree
from ..batches import weighted
from . import graph
from .norm_calls import Key, NormCalls, moving, of_batch, ordinary, out_of_sight
from .passes import Passes


class _Read(NamedTuple):
    key: Key
    leaves: tuple[Tensor, Tensor]
    mean: Tensor  # held, so that no other tensor can lie in its place


class Reading(NormCalls):
    """The part of ∂L_V through running statistics: the statistics that a loss reads, and the calls that move them.

    Run the loss in this context and differentiate it by `gradients`. Then `followed` makes a training pass,
    unless the loss has read no running statistics.

    Attributes:
        norms: the names of the norms whose statistics were differentiated.
    """

    def __init__(self, passes: Passes[Any], train_batch: Any) -> None:
        super().__init__(passes)
        self._batch = train_batch
        self._reads: list[_Read] = []
        self._cotangents: dict[Key, tuple[Tensor, Tensor]] = {}
        self._moving = moving(passes.problem.model.modules())
        self._transformed: set[nn.Module] = set()
        self.norms: tuple[str, ...] = ()

    @property
    def detail(self) -> str:
        """The note for a report."""
        count = len(self.norms)
        return f"running statistics of {count} norm{'s' * (count > 1)} differentiated" if count else ""

    @property
    def leaves(self) -> list[Tensor]:
        """The statistics that the loss has read since the last `take`; each reading has its own leaves."""
        return [leaf for read in self._reads for leaf in read.leaves]

    def norm(self, func: Any, call: dict[str, Any]) -> Any:
        mean, var = call["running_mean"], call["running_var"]
        if of_batch(func, call) or not torch.is_grad_enabled():
            return func(**call)
        if not (ordinary(mean) and ordinary(var)):
            self._transformed |= self._moving
            return func(**call)
        leaves = mean.detach().clone().requires_grad_(), var.detach().clone().requires_grad_()
        self._reads.append(_Read(self.key(mean), leaves, mean))
        return _normalised(func, call, *leaves)

    def gradients(self, loss: Tensor, inputs: Sequence[Tensor], weight: float = 1.0) -> list[Tensor | None]:
        """The gradient of a loss that ran in this context; that by the statistics is kept, times ``weight``."""
        found = torch.autograd.grad(loss, [*inputs, *self.leaves], allow_unused=True)
        self.take(found[len(inputs) :], weight)
        return list(found[: len(inputs)])

    def take(self, gradients: Sequence[Tensor | None], weight: float = 1.0) -> None:
        """Keep the gradient with respect to `leaves`, times ``weight``."""
        pairs = zip(gradients[::2], gradients[1::2], strict=True)
        for read, pair in zip(self._reads, pairs, strict=True):
            zeros = tuple(torch.zeros_like(leaf) for leaf in read.leaves)
            before = self._cotangents.get(read.key, zeros)
            after = [x if g is None else x.add(g, alpha=weight) for x, g in zip(before, pair, strict=True)]
            self._cotangents[read.key] = after[0], after[1]
        self._reads = []

    def followed(self, inputs: Sequence[Tensor], weights: Tree | None = None) -> list[Tensor | None]:
        """(∂s/∂inputs)ᵀ s̄ in the training pass, or passes, at the live weights or at ``weights``."""
        total: list[Tensor | None] = [None] * len(inputs)
        if not self._passes.statistics_follow:
            return total
        self._tell_unseen()
        cotangents = {k: s for k, s in self._cotangents.items() if any(bool(x.any()) for x in s)}
        if not cotangents:
            return total
        pieces, followed = weighted(self._batch), set[Key]()
        for number, (piece, _) in enumerate(pieces):
            update = _Updates(self._passes)
            with self._passes.numbered(number), update:
                loss = self._passes.train_loss(piece, weights)
            found, keys = update.pull(cotangents, inputs, (number, len(pieces)))
            del loss
            total = [graph.plus(sofar, g) for sofar, g in zip(total, found, strict=True)]
            followed |= keys
            update.tell(cotangents)
        names = _paths(self._passes)
        self.norms = tuple(names.get(key[0], key[1]) for key in cotangents if key in followed)
        return total

    def _tell_unseen(self) -> None:
        """Warn once of running statistics that move, and that the loss may have read where calls cannot be seen."""
        unseen = self._transformed | out_of_sight(self._passes.problem.model)
        unseen -= {module for module, *_ in self._cotangents}
        if unseen and self._passes.problem.val_mode == "eval":
            names = _paths(self._passes)
            self._passes.problem.warn_once(
                "unseen statistics",
                f"val_loss may read the running statistics of {sorted(names[m] for m in unseen)[:5]} where they cannot "
                "be followed, in a compiled or scripted module or a transform of torch.func: they count as "
                "constants, although training moves them. Give Problem the original module, or train "
                "with these norms in eval mode.",
            )


class _Update(NamedTuple):
    input: Tensor
    momentum: float
    instances: bool
    graph: bool


class _Updates(NormCalls):
    """The calls that move running statistics in a training pass."""

    def __init__(self, passes: Passes[Any]) -> None:
        super().__init__(passes)
        self._calls: dict[Key, list[_Update]] = {}
        self._read: set[Key] = set()

    def norm(self, func: Any, call: dict[str, Any]) -> Any:
        mean, x, momentum = call["running_mean"], call["input"], float(call.get("momentum", 0.1))
        if ordinary(mean):
            key = self.key(mean)
            if not of_batch(func, call):
                self._read.add(key)
            elif momentum:
                graph = torch.is_grad_enabled() and ordinary(x)
                update = _Update(x, momentum, func in (F.instance_norm, torch.instance_norm), graph)
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
        problem, names = self._passes.problem, _paths(self._passes)
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


def _shares(key: Key, calls: Sequence[_Update], number: int, count: int) -> list[float]:
    """c_k of each call in a batch, times the share of that batch among so many."""
    if isinstance(key[0], _NormBase) and key[0].momentum is None:
        return [1.0 / (len(calls) * count)] * len(calls)
    shares, left = [], 1.0
    for call in reversed(calls):
        shares.append(call.momentum * left)
        left *= 1.0 - call.momentum
    factor = left ** (count - 1 - number) / (1.0 - left**count)
    return [share * factor for share in reversed(shares)]


def _of_input(call: _Update, of_mean: Tensor, of_var: Tensor, share: float) -> Tensor:
    """The derivative of ⟨s̄, (mean, unbiased variance)⟩ with respect to what a norm is called with."""
    with torch.no_grad():
        x = call.input.detach()
        wide = x.to(torch.promote_types(x.dtype, of_mean.dtype))
        over = list(range(2, x.ndim)) if call.instances else [0, *range(2, x.ndim)]
        centred = wide - wide.mean(over, keepdim=True)
        count = x.numel() // (x.shape[1] * (x.shape[0] if call.instances else 1))
        factor = share * count * x.shape[1] / x.numel()  # the mean over instances
        slope = _along(of_var, x) * (2.0 * factor / (count - 1))
        return (centred * slope).add_(_along(of_mean, x) * (factor / count)).to(x.dtype)


def _normalised(func: Any, call: dict[str, Any], mean: Tensor, var: Tensor) -> Tensor:
    """The call with these equal statistics instead of its own: torch's kernel, and the change of its affine map.

    (x − μ) r w + b = ((x − μ₀) r₀) ρ w + b + (μ₀ − μ) r w,   r = 1/√(σ² + ε),   ρ = r / r₀, which is one.
    """
    eps, weight, bias = call.get("eps", 1e-5), call.get("weight"), call.get("bias")
    with _saved_here():
        ratio = ((call["running_var"] + eps) / (var + eps)).sqrt()
        shift = (call["running_mean"] - mean) * (var + eps).rsqrt()
        shift = shift if weight is None else shift * weight
        shift = shift if bias is None else bias + shift
        scale = ratio if weight is None else (weight * ratio).to(weight.dtype)
    if weight is not None:
        outputs: Tensor = func(**{**call, "weight": scale, "bias": shift.to(weight.dtype)})
        return outputs
    y: Tensor = func(**{**call, "bias": None})
    with _saved_here():  # a weight would be one more saved tensor
        return y * _along(scale, y).to(y.dtype) + _along(shift, y).to(y.dtype)


@contextmanager
def _saved_here() -> Iterator[None]:
    """Hide what autograd saves here from a checkpoint, whose second run is without these operations."""
    with ExitStack() as stack:
        with suppress(RuntimeError):  # hooks are off: then there is no checkpoint
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(_same, _same))
        yield


def _same(x: Tensor) -> Tensor:
    return x


def _along(of_channels: Tensor, x: Tensor) -> Tensor:
    return of_channels.view(1, -1, *(1,) * (x.ndim - 2))


def _paths(passes: Passes[Any]) -> dict[nn.Module | None, str]:
    """Where each module is."""
    problem = passes.problem
    modules = (pair for root in (problem.hyper, problem.model) for pair in root.named_modules())
    return {module: name or type(module).__name__ for name, module in modules}
