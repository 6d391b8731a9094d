"""Runs of a problem's losses without side effects: each starts from the same state, and everything is restored."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import cached_property
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .._tree import Tree
from ..batches import weighted
from ..errors import SecondDerivativeError, named
from . import random_state
from .batch_edits import batch_kept
from .checked_loss import checked_loss, refuse_not_finite
from .embedding import dense_embeddings, has_max_norm
from .foreign_parameters import foreign_parameters, warn_of_foreign_parameters
from .forms import first_derivatives, second_derivatives
from .module_state import LARGEST, ModuleState, places_of
from .substitution import Losses, no_checkpoints, places, refuse_captured
from .two_losses import TwoLosses

Buffers = dict[nn.Module, dict[str, Tensor | None]]

P = TypeVar("P", bound=TwoLosses)

_innermost: ContextVar["Passes[Any] | None"] = ContextVar("_innermost", default=None)


class Passes(Generic[P]):
    """Runs a problem's losses without side effects.

    Buffers, training modes, ``.grad`` and the random state of every device are restored at the end, even after
    an error. Each pass starts from the same buffers and the same random state, so all passes use
    the same dropout masks; with a seed, they come from an independent draw. Each of several `Batches` has its own
    random state. The same holds for other state of registered modules: frozen parameters,
    and attributes with their entries (numbers, tensors, generators, lists), but nothing deeper. Tensors that do not
    fit into 256 MiB together are not restored; a warning names them if they changed. A pass that changes a weight or
    a hyperparameter is an error. Embeddings have dense gradients.

    For second derivatives, recurrent layers run by plain operations, and attention, convolutions, norms and large
    linear layers in their own forms, since torch's backward has no derivative, a wrong one or a slow one. For first
    derivatives, recurrent layers in eval mode run without cuDNN, which refuses them.

    Attributes:
        problem: the problem with the losses.
        weight_optimizer: the optimiser of the weights, for methods that read its state; None if not known.
        twice: whether the losses will be differentiated twice.
        statistics_follow: whether running statistics depend on the weights; if not, they are constants.
    """

    def __init__(
        self,
        problem: P,
        seed: int | None = None,
        weight_optimizer: Optimizer | None = None,
        twice: bool = True,
    ) -> None:
        self.problem, self.weight_optimizer, self.twice = problem, weight_optimizer, twice
        self.statistics_follow = True
        self.changed_others = False  # whether the passes changed tensors other than weights and buffers
        self._seed = seed
        self._carried: Buffers = {}
        self._number = 0
        self._losses = Losses(problem.model, problem.hyper)
        self._validating = False
        self._foreign: dict[str, list[nn.Parameter]] = {}

    def __enter__(self) -> Self:
        problem, scripted = self.problem, torch.jit.ScriptModule
        modules = (*problem.model.modules(), *problem.hyper.modules())
        self._training = {module: module.training for module in modules}
        self._stack = ExitStack()
        with self._stack:
            self._stack.enter_context(torch.inference_mode(False))
            self._stack.enter_context(dense_embeddings(self._training, self.twice))
            self._stack.enter_context(problem.group.differentiating(self._training))
            self._buffers = {m: dict(m._buffers) for m in self._training if not isinstance(m, scripted)}
            self._live = problem.live()
            renormed = {id(m.weight) for m in modules if has_max_norm(m)}  # these are restored below
            self._fixed = {n: p for n, p in self._live.items() if id(p) not in renormed}
            self._grads = [(p, p.grad) for p in self._live.values()]
            self._state = ModuleState(self._training, self._live, problem.edits)
            self._before = self._replayed = random_state.snapshot()
            self._stack.callback(self._restore)
            outer = _innermost.set(self)
            self._stack.callback(lambda: _innermost.reset(outer))
            self._stack.enter_context(torch.enable_grad())
            for p in self._live.values():
                p.grad = None
            if self.twice:
                self._stack.enter_context(second_derivatives())
            elif any(isinstance(m, nn.RNNBase) for m in modules):
                self._stack.enter_context(first_derivatives())
            if self._seed is not None:
                random_state.seed_all(self._seed)
                self._replayed = random_state.snapshot()
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

    @property
    def innermost(self) -> bool:
        """Whether no other passes run inside these, such as those of a hypergradient that a loss computes."""
        return _innermost.get() is self

    def train_loss(self, batch: Any, weights: Tree | None = None) -> Tensor:
        """L_T at the live weights, or at ``weights`` instead, as a checked scalar."""
        return self._mean("train_loss", batch, weights)

    def val_loss(self, batch: Any, weights: Tree | None = None) -> Tensor:
        """L_V, likewise, in the problem's validation mode; differentiate it within `validating`."""
        with self.validating():
            return self._mean("val_loss", batch, weights)

    @contextmanager
    def validating(self) -> Iterator[None]:
        """The mode of the validation loss, also for its backward pass, which may run parts of the model again."""
        if self.problem.val_mode == "as_is" or self._validating:
            yield
            return
        try:
            self._validating = True
            with self.eval_mode():
                yield
        finally:
            self._validating = False

    @contextmanager
    def unmoved(self, name: str, batch: Any, weights: Mapping[str, Tensor] | None = None) -> Iterator[None]:
        """A context for running a loss, or a part; raises if that edits weights, hyperparameters, or a batch again."""
        problem = self.problem
        with (
            batch_kept(name, batch, problem.edits.of_batches),
            problem.edits.over(name, {**self._fixed, **(weights or {})}),
            problem.group.reading(self._training),
        ):
            yield

    def conclude(self) -> None:
        """Warn of foreign parameters in the losses, after the last pass."""
        self._refuse_filled()
        for name, foreign in self._foreign.items():
            warn_of_foreign_parameters(self.problem, name, foreign)

    def _refuse_filled(self) -> None:
        """Raise if a backward pass put the gradients of weights into their ``.grad``."""
        if filled := [name for name, p in self._live.items() if p.grad is not None]:
            raise SecondDerivativeError(
                f"the derivatives of {named(filled)} must come out of torch.autograd.grad; a function of the model "
                "runs a backward pass inside its own, which fills .grad instead (reversible blocks, custom "
                "checkpoints), so paths are lost. Use torch.utils.checkpoint with use_reentrant=False, or run "
                "these parts without it."
            )

    @contextmanager
    def numbered(self, number: int) -> Iterator[None]:
        """Run passes for the batch with this number among several."""
        try:
            self._number = number
            yield
        finally:
            self._number = 0

    def _mean(self, name: str, batch: Any, weights: Tree | None) -> Tensor:
        pieces = weighted(batch)
        if len(pieces) == 1:
            return self._run(name, pieces[0][0], weights)
        losses, carried = [], self._carried
        try:
            for number, (piece, weight) in enumerate(pieces):
                with self.numbered(number):
                    losses.append(weight * self._run(name, piece, weights))
                if name == "train_loss" and weights is not None:
                    # In steps ahead of the weights, running statistics see one piece after the other.
                    self.carry(self.buffers())
        finally:
            self._carried = carried
        return torch.stack(losses).sum()

    def _run(self, name: str, batch: Any, weights: Tree | None) -> Tensor:
        self._refuse_filled()
        self.replay()
        problem, function = self.problem, getattr(self.problem, name)
        with self.unmoved(name, batch, weights):
            if weights is None:
                loss = function(problem.model, problem.hyper, batch)
            else:
                placed = {place: weights[name] for place, name in self._places.items()}
                with no_checkpoints():
                    loss = torch.func.functional_call(
                        self._losses, placed, (function, batch), tie_weights=False
                    )
        self._state.unfreeze()
        for p in self._live.values():  # a backward pass inside the loss also fills them
            p.grad = None
        loss = problem.group.joined(checked_loss(name, loss))
        if problem.edits.first and (foreign := foreign_parameters(problem, loss)):
            self._foreign[name] = foreign
        refuse_not_finite(name, loss)
        if weights is not None:
            refuse_captured(name, loss, problem.weights, weights)
        return loss

    def carry(self, buffers: Buffers) -> None:
        """Let all following passes start from these buffers; with an empty dict, from the initial buffers."""
        self._carried = buffers

    def buffers(self) -> Buffers:
        """The buffers as the last pass left them; they are no longer changed."""
        return {m: {n: m._buffers.get(n) for n in buffers} for m, buffers in self._buffers.items() if buffers}

    @cached_property
    def _places(self) -> dict[str, str]:
        """Where each weight is."""
        return places(self._losses, self.problem.weights)

    def replay(self) -> None:
        """Start a pass: buffers, attributes and random state as they were, no weight cast before."""
        torch.clear_autocast_cache()
        self._collect()
        self._state.restore()
        self.rewind()

    def rewind(self) -> None:
        """Buffers and random state as at the start of the pass, for a backward pass that runs parts of it again."""
        copies: dict[int, Tensor] = {}
        for module, buffers in self._buffers.items():
            carried = self._carried.get(module, {})
            for name, kept in buffers.items():
                buffer = carried.get(name, kept)
                if buffer is not None and id(buffer) not in copies:
                    copies[id(buffer)] = buffer.detach().clone()
                module._buffers[name] = None if buffer is None else copies[id(buffer)]
        random_state.restore(self._replayed)
        # The ranks of a group have the random states that their batches have as `Batches` of one process.
        group = self.problem.group
        if number := self._number * group.size + group.rank:
            random_state.seed_all(int(torch.randint(2**62, ())) + number)

    def _restore(self) -> None:
        self._collect()
        for module, buffers in self._buffers.items():
            module._buffers.update(buffers)
        moved = self._state.moved()
        self._state.restore()
        for module, training in self._training.items():
            module.training = training
        for p, grad in self._grads:
            p.grad = grad
        random_state.restore(self._before)
        self.changed_others = self._state.changed
        del self._state  # its copies
        if moved and not self.problem.edits.drift():
            self._tell(moved)

    def _collect(self) -> None:
        """Adopt buffers that a pass created or enlarged: a cache that belongs to other state of the module."""
        for module, buffers in self._buffers.items():
            for name, buffer in module._buffers.items():
                kept = buffers.get(name)
                if name not in buffers or (
                    buffer is not None and (kept is None or kept.shape != buffer.shape)
                ):
                    buffers[name] = buffer
                    self._state.take_over(module)

    def _tell(self, moved: Sequence[Tensor]) -> None:
        """Warn once of tensors that passes changed and that are too large to restore."""
        names = named(places_of(self._losses, moved))
        self.problem.warn_once(
            "too large",
            f"a pass changed {names}, and the tensors of the modules besides weights and buffers are larger than "
            f"{LARGEST // 2**20} MiB; the largest of them are not restored: each hypergradient changes "
            "them. Update them outside the losses.",
        )

    @contextmanager
    def eval_mode(self) -> Iterator[None]:
        """Eval mode for all modules; restores the mode of each afterwards."""
        try:
            self.problem.model.eval()
            self.problem.hyper.eval()
            yield
        finally:
            for module, training in self._training.items():
                module.training = training
