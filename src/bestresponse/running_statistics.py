"""Running statistics of norms: a loss in eval mode reads them, the training passes move them, so they follow w and λ.

A training pass moves the running mean or variance s of a norm at each call of it, k = 1 … n, by

    s ← (1 − m_k) s + m_k t_k,     t_k the mean, or the unbiased variance, of what the norm is called with.

Where the passes repeat, s tends to the fixed point of the n updates together,

    s(w, λ) = Σ_k c_k t_k(w, λ),     c_k = m_k Π_{j>k} (1 − m_j) / (1 − d),     d = Π_j (1 − m_j),

which for one call is t₁ itself. Several batches follow one another in each pass, so that all calls of the i-th of B
batches have the factor d^(B − i) (1 − d) / (1 − d^B) beside, whatever the batch's weight in the loss. A cumulative
average (``momentum=None``) has 1/n in the place of c_k and 1/B as that factor. With s̄ = ∂L_V/∂s at the present running
statistics, the gradient of the validation loss is

    ∂L_V/∂(w, λ) + (∂s/∂(w, λ))ᵀ s̄.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C import _functorch
from torch.nn.modules.batchnorm import _NormBase
from torch.overrides import TorchFunctionMode

from . import _graph
from ._batch_norm import torchs_own
from ._tree import Tree
from .batches import weighted
from .passes import Passes

_FUNCTIONAL = ("input", "running_mean", "running_var", "weight", "bias")
_TORCHS = ("input", "weight", "bias", "running_mean", "running_var")
_LAST = ("momentum", "eps", "cudnn_enabled")
_ARGUMENTS: dict[Any, tuple[str, ...]] = {
    F.batch_norm: (*_FUNCTIONAL, "training", *_LAST),
    F.instance_norm: (*_FUNCTIONAL, "use_input_stats", *_LAST),
    torch.batch_norm: (*_TORCHS, "training", *_LAST),
    torch.instance_norm: (*_TORCHS, "use_input_stats", *_LAST),
}
# Which running mean: the module that holds it and its name there (or where it lies in memory), offset, shape.
Key = tuple[nn.Module | None, str, int, torch.Size]


class _Watch(TorchFunctionMode):
    """Hands each call of a norm with running statistics to `norm`, its arguments by name."""

    def __init__(self, passes: Passes) -> None:
        super().__init__()
        self._passes = passes
        self._buffers: dict[int, tuple[nn.Module, str, Tensor]] = {}

    def __enter__(self) -> Any:
        self._entered = ExitStack()
        self._entered.enter_context(torchs_own())
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._entered.close()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        names, named = _ARGUMENTS.get(func), kwargs or {}
        if names is None:
            return func(*args, **named)
        call = {**dict(zip(names, args, strict=False)), **named}
        return func(**call) if call.get("running_mean") is None else self.norm(func, call)

    def norm(self, func: Any, call: dict[str, Any]) -> Any:
        """One call, and what it returns."""
        raise NotImplementedError

    def key(self, mean: Tensor) -> Key:
        """Which buffer of this pass a running mean is, or is a part of."""
        pointer = mean.untyped_storage().data_ptr()
        if pointer not in self._buffers:  # a pass has buffers of its own; those of the last are held until here
            self._buffers = {
                buffer.untyped_storage().data_ptr(): (module, name, buffer)
                for module, buffers in self._passes.buffers().items()
                for name, buffer in buffers.items()
                if buffer is not None and _ordinary(buffer) and buffer.is_floating_point()
            }
        module, name, _ = self._buffers.get(pointer, (None, f"at {pointer:#x}", mean))
        return module, name, mean.storage_offset(), mean.shape


class _Read(NamedTuple):
    key: Key
    leaves: tuple[Tensor, Tensor]
    mean: Tensor  # held, so that no other tensor can lie in its place


class Reading(_Watch):
    """The part of ∂L_V that comes through running statistics: what a loss reads of them, and what moves them.

    The loss runs with it as a context, and is differentiated by `gradients`; then `followed` makes a training pass,
    unless the loss has read no running statistics.

    Attributes:
        norms: the names of the norms whose statistics were differentiated.
    """

    def __init__(self, passes: Passes, train_batch: Any) -> None:
        super().__init__(passes)
        self._batch = train_batch
        self._reads: list[_Read] = []
        self._cotangents: dict[Key, tuple[Tensor, Tensor]] = {}
        self.norms: tuple[str, ...] = ()

    @property
    def detail(self) -> str:
        """What a report should say of it."""
        count = len(self.norms)
        return f"running statistics of {count} norm{'s' * (count > 1)} differentiated" if count else ""

    @property
    def leaves(self) -> list[Tensor]:
        """The statistics that the loss has read since the last `take`, each reading as leaves of its own."""
        return [leaf for read in self._reads for leaf in read.leaves]

    def norm(self, func: Any, call: dict[str, Any]) -> Any:
        mean, var = call["running_mean"], call["running_var"]
        if _of_batch(func, call) or not torch.is_grad_enabled() or not (_ordinary(mean) and _ordinary(var)):
            return func(**call)
        leaves = mean.detach().clone().requires_grad_(), var.detach().clone().requires_grad_()
        self._reads.append(_Read(self.key(mean), leaves, mean))
        return _normalised(func, call, *leaves)

    def gradients(self, loss: Tensor, inputs: Sequence[Tensor], weight: float = 1.0) -> list[Tensor | None]:
        """The gradient of a loss that ran in this context; that by the statistics is kept, times ``weight``."""
        with torchs_own():  # for checkpoints, which run a part again
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
            total = [_graph.plus(sofar, g) for sofar, g in zip(total, found, strict=True)]
            followed |= keys
            update.tell(cotangents)
        names = _paths(self._passes)
        self.norms = tuple(names.get(key[0], key[1]) for key in cotangents if key in followed)
        return total


class _Update(NamedTuple):
    input: Tensor
    momentum: float
    instances: bool
    graph: bool


class _Updates(_Watch):
    """The calls that move running statistics in a training pass."""

    def __init__(self, passes: Passes) -> None:
        super().__init__(passes)
        self._calls: dict[Key, list[_Update]] = {}
        self._read: set[Key] = set()

    def norm(self, func: Any, call: dict[str, Any]) -> Any:
        mean, x, momentum = call["running_mean"], call["input"], float(call.get("momentum", 0.1))
        if _ordinary(mean):
            key = self.key(mean)
            if not _of_batch(func, call):
                self._read.add(key)
            elif momentum:
                graph = torch.is_grad_enabled() and _ordinary(x)
                update = _Update(x, momentum, func in (F.instance_norm, torch.instance_norm), graph)
                self._calls.setdefault(key, []).append(update)
        return func(**call)

    def pull(
        self, cotangents: dict[Key, tuple[Tensor, Tensor]], inputs: Sequence[Tensor], batch: tuple[int, int]
    ) -> tuple[list[Tensor | None], set[Key]]:
        """(∂s/∂inputs)ᵀ s̄ of the batch with this number of so many, and the statistics that moved with a graph."""
        outputs, grads, keys = [], [], set[Key]()
        for key in cotangents.keys() & self._calls.keys():
            calls = self._calls[key]
            for call, share in zip(calls, _shares(key, calls, *batch), strict=True):
                if call.graph and call.input.requires_grad:
                    outputs.append(call.input)
                    grads.append(_of_input(call, *cotangents[key], share))
                    keys.add(key)
        if not outputs:
            return [None] * len(inputs), keys
        with torchs_own():
            return list(torch.autograd.grad(outputs, inputs, grads, allow_unused=True)), keys

    def tell(self, cotangents: dict[Key, tuple[Tensor, Tensor]]) -> None:
        """Warn once of statistics that move in a way that has no derivative here."""
        problem, names = self._passes.problem, _paths(self._passes)
        moved = [key for key in cotangents if key in self._calls]
        if hidden := [k for k in moved if not all(call.graph for call in self._calls[k])]:
            problem.warn_once(
                "hidden statistics",
                f"the running statistics of {[names.get(k[0], k[1]) for k in hidden][:5]} follow the weights, but "
                "train_loss moves them under no_grad or in a transform of torch.func, where they are taken as "
                "constants. Let that pass run with gradients, or with these norms in eval mode.",
            )
        if both := [k for k in moved if k in self._read]:
            problem.warn_once(
                "statistics of training",
                f"train_loss reads the running statistics of {[names.get(k[0], k[1]) for k in both][:5]}, which it "
                "moves as well: its gradient and curvature take them as constants. Normalise by the batch there.",
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
    """The call with these equal statistics in place of its own: torch's kernel, and what they change of its affine map.

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
    """Keep what autograd saves from a checkpoint, which compares it with that of a second run without these operations."""
    with ExitStack() as stack:
        with suppress(RuntimeError):  # hooks are off: then there is no checkpoint
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(_same, _same))
        yield


def _same(x: Tensor) -> Tensor:
    return x


def _of_batch(func: Any, call: dict[str, Any]) -> bool:
    """Whether a norm takes the statistics of its batch."""
    if "use_input_stats" in _ARGUMENTS[func]:
        return bool(call.get("use_input_stats", True))
    return bool(call.get("training", False))


def _along(of_channels: Tensor, x: Tensor) -> Tensor:
    return of_channels.view(1, -1, *(1,) * (x.ndim - 2))


def _ordinary(x: Tensor) -> bool:
    """Whether a tensor has a memory of its own, and no transform or compiler is at work."""
    return (
        not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
        and type(x) in (Tensor, nn.Parameter)
        and x.layout == torch.strided
        and not _functorch.is_legacy_batchedtensor(x)
    )


def _paths(passes: Passes) -> dict[nn.Module | None, str]:
    """Where each module is."""
    problem = passes.problem
    return {m: name for root in (problem.hyper, problem.model) for name, m in root.named_modules()}
