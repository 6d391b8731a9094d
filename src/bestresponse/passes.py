"""Runs of a problem's losses that leave nothing behind: each starts from the same state, and all is put back."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import Optimizer

from . import _graph, _random
from ._layers import cheap_layers
from ._tree import Tree
from .batches import weighted
from .errors import ArgumentError, EvaluationError, NotFiniteError

if TYPE_CHECKING:
    from .problem import Problem

Loss = Callable[[Any, Any, Any], Tensor]
Buffers = dict[nn.Module, dict[str, Tensor | None]]


class Passes:
    """Runs a problem's losses so that nothing of it is left behind.

    Buffers, training modes and the random state of every device are put back at the end, also after
    an error. Each pass starts from the same buffers and the same random state, so that all of them see
    the same dropout masks; with a seed, from an independent draw. Of several `Batches` each has a random
    state of its own. Torch's recurrent modules run without cuDNN, whose backward has no derivative and
    refuses eval mode. For second derivatives attention runs by its math backend, which alone has any; recurrent
    modules run without oneDNN, and convolutions and batch norms in forms of our own, since torch's
    backward of them is slow to differentiate.

    Attributes:
        problem: whose losses they are.
        weight_optimizer: what trains the weights, for methods that look at its state; None if not known.
        twice: whether the losses will be differentiated twice.
    """

    def __init__(
        self,
        problem: "Problem",
        seed: int | None = None,
        weight_optimizer: Optimizer | None = None,
        twice: bool = True,
    ) -> None:
        self.problem, self.weight_optimizer, self.twice = problem, weight_optimizer, twice
        self._seed = seed
        self._carried: Buffers = {}
        self._number = 0
        self._losses = _Losses(problem.model, problem.hyper)

    def __enter__(self) -> Self:
        scripted = torch.jit.ScriptModule
        modules = (*self.problem.model.modules(), *self.problem.hyper.modules())
        self._training = {module: module.training for module in modules}
        self._attributes = {m: _tensor_attributes(m) for m in self._training}
        self._buffers = {m: dict(m._buffers) for m in self._training if not isinstance(m, scripted)}
        # What can't be swapped, or is no buffer and yet changes in a forward pass, is copied.
        changing = [b for m in self._training if isinstance(m, scripted) for b in m.buffers(recurse=False)]
        changing += [
            m.weight
            for m in self._training
            if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.max_norm is not None
        ]
        self._by_value = [(x.detach(), x.detach().clone()) for x in changing]
        self._before = self._replayed = _random.snapshot()
        self._stack = ExitStack()
        self._stack.callback(self._restore)
        with self._stack:
            self._stack.enter_context(torch.inference_mode(False))
            self._stack.enter_context(torch.enable_grad())
            recurrent = [m for m in modules if isinstance(m, nn.RNNBase)]
            off = [torch.backends.cudnn, torch.backends.mkldnn] if self.twice else [torch.backends.cudnn]
            self._stack.enter_context(_without(off, recurrent))
            if self.twice:
                self._stack.enter_context(sdpa_kernel(SDPBackend.MATH))
                self._stack.enter_context(cheap_layers())
            if self._seed is not None:
                _random.seed_all(self._seed)
                self._replayed = _random.snapshot()
            self.replay()
            self._stack = self._stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def train_loss(self, batch: Any, weights: Tree | None = None) -> Tensor:
        """L_T at the live weights, or at ``weights`` in their place, as a checked scalar."""
        return self._mean("train_loss", batch, weights)

    def val_loss(self, batch: Any, weights: Tree | None = None) -> Tensor:
        """L_V, likewise, in the mode that the problem asks for."""
        if self.problem.val_mode == "as_is":
            return self._mean("val_loss", batch, weights)
        with self.eval_mode():
            return self._mean("val_loss", batch, weights)

    @contextmanager
    def numbered(self, number: int) -> Iterator[None]:
        """Run passes as those of the batch with this number among several."""
        try:
            self._number = number
            yield
        finally:
            self._number = 0

    def _mean(self, name: str, batch: Any, weights: Tree | None) -> Tensor:
        pieces = weighted(batch)
        if len(pieces) == 1:
            return self._run(name, pieces[0][0], weights)
        losses = []
        for number, (piece, weight) in enumerate(pieces):
            with self.numbered(number):
                losses.append(weight * self._run(name, piece, weights))
        return torch.stack(losses).sum()

    def _run(self, name: str, batch: Any, weights: Tree | None) -> Tensor:
        self.replay()
        function = getattr(self.problem, name)
        if weights is None:
            loss = function(self.problem.model, self.problem.hyper, batch)
        else:
            placed = {place: weights[name] for place, name in self._places.items()}
            with no_checkpoints():
                loss = torch.func.functional_call(self._losses, placed, (function, batch), tie_weights=False)
        loss = checked_loss(name, loss)
        refuse_not_finite(name, loss)
        if weights is not None:
            self._refuse_captured(name, loss, weights)
        return loss

    def carry(self, buffers: Buffers) -> None:
        """Let all following passes start from these buffers; from those at the beginning with an empty dict."""
        self._carried = buffers

    def buffers(self) -> Buffers:
        """The buffers as the last pass left them; they are no longer changed."""
        return {m: {n: m._buffers.get(n) for n in buffers} for m, buffers in self._buffers.items() if buffers}

    @cached_property
    def _places(self) -> dict[str, str]:
        """Where each weight is."""
        return places(self._losses, self.problem.weights)

    def replay(self) -> None:
        """Start a pass: buffers as they were, random state likewise, no weight cast before."""
        torch.clear_autocast_cache()
        self._collect()
        copies: dict[int, Tensor] = {}
        for module, buffers in self._buffers.items():
            carried = self._carried.get(module, {})
            for name, kept in buffers.items():
                buffer = carried.get(name, kept)
                if buffer is not None and id(buffer) not in copies:
                    copies[id(buffer)] = buffer.detach().clone()
                module._buffers[name] = None if buffer is None else copies[id(buffer)]
        self._copy_back()
        _random.restore(self._replayed)
        if self._number:
            _random.seed_all(int(torch.randint(2**62, ())) + self._number)

    def _restore(self) -> None:
        self._collect()
        for module, buffers in self._buffers.items():
            module._buffers.update(buffers)
        self._copy_back()
        for module, kept in self._attributes.items():
            module.__dict__.update(kept)
        for module, training in self._training.items():
            module.training = training
        _random.restore(self._before)

    def _collect(self) -> None:
        """Take over buffers that a pass made or grew: a cache, to which other state of the module belongs."""
        for module, buffers in self._buffers.items():
            for name, buffer in module._buffers.items():
                kept = buffers.get(name)
                if name not in buffers or (
                    buffer is not None and (kept is None or kept.shape != buffer.shape)
                ):
                    buffers[name] = buffer

    def _copy_back(self) -> None:
        with torch.no_grad():
            for tensor, kept in self._by_value:
                if not torch.equal(tensor, kept):
                    tensor.copy_(kept)

    @contextmanager
    def eval_mode(self) -> Iterator[None]:
        """Eval mode for all modules, and then each as it was."""
        try:
            self.problem.model.eval()
            self.problem.hyper.eval()
            yield
        finally:
            for module, training in self._training.items():
                module.training = training

    def _refuse_captured(self, name: str, loss: Tensor, weights: Tree) -> None:
        reached = _graph.leaves(loss, until=weights.values())
        captured = [key for key, w in self.problem.weights.items() if id(w) in reached]
        if captured:
            raise EvaluationError(
                f"{name} must read the weights through its argument model, since this method puts other "
                f"tensors in their place; it used the original {captured[:5]} as well. Replace the "
                "captured module or parameter in the function by its argument."
            )


def _tensor_attributes(module: nn.Module) -> dict[str, Tensor]:
    """Tensors that are neither parameters nor buffers, as hooks make them (torch.nn.utils.spectral_norm)."""
    return {name: x for name, x in vars(module).items() if isinstance(x, Tensor)}


@contextmanager
def _without(backends: Sequence[Any], modules: Iterable[nn.Module]) -> Iterator[None]:
    """Turn backends off while one of these modules runs, and leave them to all others."""
    before: list[list[bool]] = []

    def begin(*_: object) -> None:
        before.append([backend.enabled for backend in backends])
        for backend in backends:
            backend.enabled = False

    def end(*_: object) -> None:
        if before:
            for backend, enabled in zip(backends, before.pop(), strict=True):
                backend.enabled = enabled

    with ExitStack() as stack:
        stack.callback(end)
        for module in modules:
            stack.callback(module.register_forward_pre_hook(begin).remove)
            stack.callback(module.register_forward_hook(end, always_call=True).remove)
        yield


_NO_CHECKPOINTS = (
    "this method puts other tensors in the place of the weights, and needs a forward pass without "
    "torch.utils.checkpoint and other hooks of saved tensors: a part that is computed again in the backward pass "
    "would see the weights themselves. Turn it off in the model, or use Implicit() with Hessian() or GaussNewton, "
    "which work with use_reentrant=False."
)


@contextmanager
def no_checkpoints() -> Iterator[None]:
    """Refuse checkpointing where other tensors stand in the place of weights: with these back it computes others."""
    try:
        with torch.autograd.graph.disable_saved_tensors_hooks(_NO_CHECKPOINTS):
            yield
    except RuntimeError as error:
        if str(error) != _NO_CHECKPOINTS:
            raise
        raise EvaluationError(_NO_CHECKPOINTS) from error


def places(root: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Every place of these tensors below ``root``, with the tensor's name; each place once.

    functional_call does not put back what it replaced twice, as in a module that is registered under two names.
    """
    names = {id(x): name for name, x in tensors.items()}
    return {
        f"{path}.{leaf}": names[id(p)]
        for path, module in root.named_modules()
        for leaf, p in module._parameters.items()
        if id(p) in names
    }


def refuse_max_norm(model: nn.Module, who: str) -> None:
    """Raise for embeddings that edit their weights in a forward pass."""
    if bounded := bounded_embeddings(model):
        raise ArgumentError(
            f"{who} puts other values in the place of the weights and needs embeddings without max_norm, which edits "
            f"them outside the graph; got {bounded[:5]} with it. Normalise the looked-up rows in the model's forward."
        )


def bounded_embeddings(model: nn.Module) -> list[str]:
    """The names of embeddings with ``max_norm``."""
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None
    ]


class _Losses(nn.Module):
    """One module that holds model and hyper, so that one functional_call can put tensors into both."""

    def __init__(self, model: nn.Module, hyper: nn.Module) -> None:
        super().__init__()
        self.model, self.hyper = model, hyper

    def forward(self, loss: Loss, batch: Any) -> Tensor:
        return loss(self.model, self.hyper, batch)


def checked_loss(name: str, loss: object) -> Tensor:
    """A loss as a scalar with a graph; raises for anything else."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = f"a {type(loss).__name__}. Return the tensor itself, without item() or float()"
        if isinstance(loss, Tensor):
            got = f"shape {list(loss.shape)}. Take the mean over the batch"
        raise EvaluationError(f"{name} must return a scalar tensor; got {got}.")
    if not loss.requires_grad:
        raise EvaluationError(
            f"{name} must depend on the weights or hyperparameters by a graph; got a detached value "
            f"{float(loss):.4g}. Look for detach(), item(), no_grad() or .data in it."
        )
    return loss.reshape(())


def refuse_not_finite(name: str, loss: Tensor) -> None:
    """Raise for a loss of NaN or infinity."""
    if not bool(torch.isfinite(loss)):
        raise NotFiniteError(
            f"{name} must be finite; got {float(loss.detach())}. Lower the learning rates, clip the gradients, "
            "or look at the batch."
        )
