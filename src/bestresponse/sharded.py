"""Weights that are sharded over the ranks of a group: FSDP2 (``fully_shard``), whose parameters are DTensors.

FSDP2 reduces gradients in hooks that ``torch.autograd.grad`` does not run. Here a loss gathers each weight itself when
it reads it, by an operation whose derivatives of any order communicate too:

    gather: the shards of the ranks ↦ the whole weight;      its derivative is scatter
    scatter: each rank's own tensor ↦ a shard of their mean;  its derivative is gather

Likewise a hyperparameter enters a loss by an identity whose derivative is the mean over the ranks, and a loss leaves by
a mean whose derivative is the identity. So all derivatives are those of the mean of the losses, and every rank sees the
same problem, with sharded weights, gradients and vectors. A whole weight lives only while an operation uses it; what
autograd would keep of it is gathered again.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from . import _tree
from .distributed import Group
from .errors import EvaluationError, named


class Sharded(Group):
    """The processes that share one copy of the weights, in shards; derivatives are means by themselves."""

    def __init__(self, handle: Any, device: torch.device | None, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(handle, device)
        self.averages, self.sharded = False, True
        self._ours = {id(p) for p in parameters}
        self._whole: dict[int, weakref.ref[Tensor]] = {}
        self._places: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}
        self._last: tuple[Tensor, Tensor] | None = None

    @contextmanager
    def reading(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """Let the attributes of modules be whole weights, and hyperparameters whose derivative is a mean."""
        listed, entered = list(modules), dict[int, Tensor]()
        self._whole, self._last = {}, None  # the weights may have moved since they were gathered

        def read(p: Any) -> Any:
            if _tree.is_sharded(p):
                return self._gathered(p)
            if id(p) in self._ours and id(p) not in entered:
                entered[id(p)] = _apply(_Enter, p, self)
            return entered.get(id(p), p)

        with ExitStack() as stack:
            for module in listed:
                stack.enter_context(_without_hooks(module))
                own = module.__dict__["_parameters"]
                module.__dict__["_parameters"] = _Read(own, read)
                stack.callback(module.__dict__.__setitem__, "_parameters", own)
            yield

    @contextmanager
    def differentiating(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """Let autograd keep a reference to a whole weight's shards in place of the weight."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield
        self._last = None

    def joined(self, loss: Tensor) -> Tensor:
        """The mean of the losses of all ranks."""
        if _tree.is_sharded(loss):
            raise EvaluationError(
                "a loss must be a plain tensor; got a DTensor. Read the weights through the argument model."
            )
        return _apply(_Exit, loss, self)

    def mean_over_ranks(self, x: Tensor) -> Tensor:
        """The mean of a tensor of each rank."""
        total = x.detach().clone(memory_format=torch.contiguous_format)
        self.reduce(total)
        return total.div_(self.size)

    def _gathered(self, p: Tensor) -> Tensor:
        known = self._whole.get(id(p))
        whole = None if known is None else known()
        if whole is None or (torch.is_grad_enabled() and p.requires_grad and not whole.requires_grad):
            whole = _apply(_Gather, p, self)
            self._whole[id(p)] = weakref.ref(whole)
            self._note(whole, p)
        return whole

    def _note(self, whole: Tensor, p: Tensor) -> None:
        self._places[whole.untyped_storage().data_ptr()] = weakref.ref(whole), p

    def _pack(self, x: Tensor) -> Any:
        place = x.untyped_storage().data_ptr() if type(x) is Tensor else 0
        whole, p = self._places.get(place, (lambda: None, x))
        base = whole()
        if base is None or base.untyped_storage().data_ptr() != place:
            return x
        return p, x.size(), x.stride(), x.storage_offset() - base.storage_offset()

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        p, size, stride, offset = packed
        if self._last is None or self._last[0] is not p:
            self._last = None
            with torch.no_grad():
                self._last = p, self.full(p)
            self._note(self._last[1], p)  # the graph of a gradient may keep it again
        whole = self._last[1]
        return whole.as_strided(size, stride, whole.storage_offset() + offset)

    def full(self, x: Any) -> Tensor:
        """The whole of a sharded tensor, outside any graph."""
        self.calls += 1
        self.bytes += x.numel() * x.element_size()
        whole: Tensor = x.detach().full_tensor()
        return whole


class _Read(dict[str, Any]):
    """The parameters of a module, read through a function."""

    def __init__(self, own: Mapping[str, Any], read: Callable[[Any], Any]) -> None:
        super().__init__(own)
        self._read = read

    def __getitem__(self, name: str) -> Any:
        return self._read(super().__getitem__(name))

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401

    def items(self) -> Any:
        return [(name, self[name]) for name in self]

    def values(self) -> Any:
        return [self[name] for name in self]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, group: Sharded) -> Tensor:
        ctx.group, ctx.mesh, ctx.placements = group, x.device_mesh, x.placements
        ctx.set_materialize_grads(False)
        return group.full(x)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor | None) -> Any:
        (slope,) = slopes
        if slope is None:
            return None, None
        return _apply(_Scatter, slope, ctx.group, ctx.mesh, ctx.placements), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Sharded, mesh: Any, placements: Sequence[Any]) -> Any:
        from torch.distributed.tensor import DTensor, Partial

        ctx.group = group
        ctx.set_materialize_grads(False)
        group.calls += 1
        group.bytes += x.numel() * x.element_size()
        summed = DTensor.from_local(x.detach().contiguous(), mesh, [Partial("sum")], run_check=False)
        return summed.redistribute(placements=placements) / group.size

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor | None) -> Any:
        (slope,) = slopes
        return (None if slope is None else _apply(_Gather, slope, ctx.group)), None, None, None


class _Enter(torch.autograd.Function):
    """A replicated tensor as a part of each rank's own computation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Sharded) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Any, None]:
        return _apply(_Exit, _tree.dense(slopes[0]), ctx.group), None


class _Exit(torch.autograd.Function):
    """The mean over the ranks, which is replicated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Sharded) -> Tensor:
        ctx.group = group
        return group.mean_over_ranks(x)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Any, None]:
        return _apply(_Enter, slopes[0], ctx.group), None


def _apply(function: type[torch.autograd.Function], *arguments: Any) -> Tensor:
    result: Tensor = function.apply(*arguments)  # type: ignore[no-untyped-call]
    return result


@contextmanager
def _without_hooks(module: nn.Module) -> Iterator[None]:
    """Leave out the hooks of FSDP around a module's forward pass."""
    kept = []
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        kept.append((hooks, dict(hooks)))
        for key, hook in list(hooks.items()):
            if type(getattr(hook, "__self__", None)).__name__ == "FSDPState":
                del hooks[key]
    try:
        yield
    finally:
        for hooks, before in kept:
            hooks.clear()
            hooks.update(before)


def refuse_other_shardings(weights: Mapping[str, Any], hyperparameters: Mapping[str, Any]) -> None:
    """Raise unless all weights are sharded over one dimension of one mesh, and all hyperparameters are whole."""
    whole = [n for n, w in weights.items() if not _tree.is_sharded(w)]
    if tuned := [n for n, p in hyperparameters.items() if _tree.is_sharded(p)]:
        raise EvaluationError(
            f"hyperparameters must be whole on each rank; {named(tuned)} are DTensors. Pass them to fully_shard as "
            "ignored_params, or keep them in a module of their own."
        )
    if whole:
        raise EvaluationError(
            f"either all weights are sharded or none; {named(whole)} are whole. Call fully_shard on the whole model "
            "after its blocks."
        )
    meshes = {w.device_mesh for w in weights.values()}
    other = [n for n, w in weights.items() if w.device_mesh.ndim != 1 or not w.placements[0].is_shard()]
    if len(meshes) > 1 or other:
        got = f"{named(other)} otherwise" if other else f"{len(meshes)} meshes"
        raise EvaluationError(
            f"weights must be sharded over one mesh with one dimension, as fully_shard does; got {got}. Tensor "
            "parallelism and hybrid sharding are not supported."
        )
