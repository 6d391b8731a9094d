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
from torch import Tensor, nn

from .._tree import Tree
from ..batches import weighted
from ..distributed import Group
from ..errors import EvaluationError
from . import graph
from .moved_statistics import Updates, along_channels, paths_of
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
        if not self._passes.statistics_follow:
            return [None] * len(inputs)
        self._tell_unseen()
        cotangents = {k: s for k, s in self._cotangents.items() if any(bool(x.any()) for x in s)}
        if not cotangents:
            return [None] * len(inputs)
        group: Group = self._passes.problem.group
        return group.mean(lambda: self._pulled(cotangents, inputs, weights), inputs)

    def _pulled(
        self, cotangents: dict[Key, tuple[Tensor, Tensor]], inputs: Sequence[Tensor], weights: Tree | None
    ) -> list[Tensor | None]:
        total: list[Tensor | None] = [None] * len(inputs)
        pieces, followed = weighted(self._batch), set[Key]()
        for number, (piece, _) in enumerate(pieces):
            update = Updates(self._passes)
            with self._passes.numbered(number), update:
                loss = self._passes.train_loss(piece, weights)
            found, keys = update.pull(cotangents, inputs, (number, len(pieces)))
            del loss
            total = [graph.plus(sofar, g) for sofar, g in zip(total, found, strict=True)]
            followed |= keys
            update.tell(cotangents)
        names = paths_of(self._passes)
        self.norms = tuple(names.get(key[0], key[1]) for key in cotangents if key in followed)
        return total

    @property
    def places(self) -> list[Tensor]:
        """The running statistics of all norms, for the ranks of a group, which send each other s̄."""
        return [x for _, pair in self._norms for x in pair]

    @property
    def kept(self) -> list[Tensor | None]:
        """s̄ for each of `places`, None where the loss has not read it; raises if the loss has read others."""
        norms = self._norms
        other = self._cotangents.keys() - {key for key, _ in norms}
        if other and self._passes.problem.group.averages:
            raise EvaluationError(
                "with several processes, val_loss may read the running statistics of modules alone, from their buffers "
                f"running_mean and running_var; got others, {[key[1] for key in other][:5]}. Use nn.BatchNorm."
            )
        return [x for key, _ in norms for x in self._cotangents.get(key, (None, None))]

    def adopt(self, means: Sequence[Tensor | None]) -> None:
        """Take the mean of s̄ over the ranks for each of `places`; nothing changes for one process alone."""
        pairs = zip(self._norms, means[::2], means[1::2], strict=True)
        self._cotangents |= {key: (x, y) for (key, _), x, y in pairs if x is not None and y is not None}

    @property
    def _norms(self) -> list[tuple[Key, tuple[Tensor, Tensor]]]:
        """The running mean and variance of each module that has them; none for one process alone."""
        if not self._passes.problem.group.averages:
            return []
        pairs = [
            (module, buffers.get("running_mean"), buffers.get("running_var"))
            for module, buffers in self._passes.buffers().items()
        ]
        return [
            ((module, "running_mean", int(mean.storage_offset()), mean.shape), (mean, var))
            for module, mean, var in pairs
            if mean is not None and var is not None
        ]

    def _tell_unseen(self) -> None:
        """Warn once of running statistics that move, and that the loss may have read where calls cannot be seen."""
        unseen = self._transformed | out_of_sight(self._passes.problem.model)
        unseen -= {module for module, *_ in self._cotangents}
        if unseen and self._passes.problem.val_mode == "eval":
            names = paths_of(self._passes)
            self._passes.problem.warn_once(
                "unseen statistics",
                f"val_loss may read the running statistics of {sorted(names[m] for m in unseen)[:5]} where they cannot "
                "be followed, in a compiled or scripted module or a transform of torch.func: they count as "
                "constants, although training moves them. Give Problem the original module, or train "
                "with these norms in eval mode.",
            )


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
        return y * along_channels(scale, y).to(y.dtype) + along_channels(shift, y).to(y.dtype)


@contextmanager
def _saved_here() -> Iterator[None]:
    """Hide what autograd saves here from a checkpoint, whose second run is without these operations."""
    with ExitStack() as stack:
        with suppress(RuntimeError):  # hooks are off: then there is no checkpoint
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(_same, _same))
        yield


def _same(x: Tensor) -> Tensor:
    return x
