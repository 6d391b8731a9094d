"""A problem over K copies of the weights, one for each fold, which share the hyperparameters."""

import copy
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .. import _tree
from .._tree import Tree
from ..batches import Batches, weighted
from ..errors import ArgumentError, ArgumentTypeError, require_integer
from ..hyperparameters import Weights
from ..memory import MethodState
from ..parts import Part
from ..passes import random_state
from ..passes.checked_loss import checked_loss
from ..passes.substitution import Loss
from ..problem import Problem
from ..solvers import Solver
from ..solvers.blockwise import Blockwise
from .batched import alike, runs_batched, runs_joined, together


class Folds(Problem):
    """Cross-validation as the outer loss: K copies of the weights, one for each fold, share the hyperparameters.

        λ* = argmin_λ (1/K) Σ_k L_V(w_k*(λ), λ; fold k),  w_k*(λ) = argmin_w L_T(w, λ; all but fold k)

    It is a `Problem`, which `Tuner`, `hypergradient`, every method and `diagnostics.check` accept. Its model holds
    the copies ``fold0`` … ``fold{K-1}``, so weights have names such as ``fold0.weight``. A batch is a tuple of K
    batches, one for each fold; `fold_batches` makes them from a data set. The training loss is the *sum* over folds,
    so each copy trains as the model alone would, at the same learning rate. The validation loss is their mean.

    The curvature is block-diagonal. Each fold has its own solve, with its own Krylov coefficients, warm start and
    damping. A report has the worst of each number over the folds.

    Folds whose batches have equal shapes run batched, by ``torch.func.vmap``, where the model allows it; other folds
    run in turn. These run in turn too: models with buffers, convolutions, layer norms or recurrent layers; modules that
    keep a count or an activation; and batches with parts other than tensors, numbers and texts. Hypergradients run
    batched for ``Implicit(curvature=Hessian())``, `Unrolled` with settings that are numbers, `Direct`, and
    ``Implicit()``, which keeps the Hessian here. Each fold has its own dropout masks, batched or in turn.

    Args:
        model: the module to copy. It is not trained itself: `Tuner.retrain` trains it on all data.
        hyper: the module whose parameters to tune; the copies share it, also if it is a submodule of ``model``.
        train_loss: L_T of one fold: (model, hyper, batch) -> scalar.
        val_loss: L_V of one fold.
        folds: K ≥ 2.
        val_mode: as that of `Problem`.
        verify: as that of `Problem`.
        batched: False runs all folds in turn, True runs them batched where possible.

    Attributes:
        folds: a `Problem` for each fold; its validation loss has the factor 1/K.
        whole: the problem of ``model`` itself.

    Raises:
        ArgumentTypeError: an argument is of the wrong type, or a batch is not a tuple of K batches.
        ArgumentError: those of `Problem`.
    """

    def __init__(
        self,
        model: nn.Module,
        hyper: nn.Module,
        train_loss: Loss,
        val_loss: Loss,
        folds: int = 5,
        val_mode: Literal["eval", "as_is"] = "eval",
        verify: bool = True,
        batched: bool = True,
    ) -> None:
        require_integer("Folds.folds", folds, 2)
        if not isinstance(batched, bool):
            raise ArgumentTypeError(f"Folds.batched must be True or False; got {batched!r}.")
        self._whole = Problem(model, hyper, train_loss, val_loss, val_mode, verify)
        if self._whole.group.size > 1:
            raise ArgumentError(
                "Folds trains all copies of the model in one process; got a model in DistributedDataParallel. Give it "
                "the plain module."
            )
        self._losses = {"train_loss": train_loss, "val_loss": val_loss}
        kept = (*hyper.modules(), *hyper.parameters(), *hyper.buffers())
        copies = [copy.deepcopy(model, {id(x): x for x in kept}) for _ in range(folds)]
        super().__init__(
            nn.ModuleDict({f"fold{k}": x for k, x in enumerate(copies)}),
            hyper,
            self._train_loss,
            self._val_loss,
            val_mode,
            verify,
        )

        def share(model: nn.Module, hyper: nn.Module, batch: Any) -> Tensor:
            """The fold's part of the mean."""
            return val_loss(model, hyper, batch) / folds

        self.folds = [Problem(x, hyper, train_loss, share, val_mode, verify) for x in copies]
        self.keeps_curvature = True
        for fold in self.folds:  # a warning about one fold is true for all, and so is a verification
            fold.keeps_curvature, fold._warned, fold._verified = True, self._warned, self.folds[0]._verified
        # Whether a loss runs batched: known after its first two folds with equal shapes.
        own = {id(x) for x in model.buffers()} - {id(x) for x in hyper.buffers()}
        # In a batched call, a table of weights can't check its indices, and its gradient is not sparse.
        tables = any(isinstance(x, Weights) for x in (*model.modules(), *hyper.modules()))
        static = batched and not own and not tables
        self._batched: dict[str, bool | None] = dict.fromkeys(self._losses, None if static else False)

    def __repr__(self) -> str:
        return f"Folds({len(self.folds)} copies: {self._whole!r})"

    @property
    def batched(self) -> bool | None:
        """Whether folds of equal shapes run batched; None before the first losses."""
        known = [x for x in self._batched.values() if x is not None]
        return all(known) if known else None

    @property
    def singles(self) -> Sequence[Problem]:
        return self.folds

    @property
    def whole(self) -> Problem:
        return self._whole

    def losses(self, batch: Any, which: Literal["train_loss", "val_loss"] = "train_loss") -> Tensor:
        """The loss of each fold at the live weights, [K]."""
        return self._each(which, self.model, self.hyper, batch)

    def parts(self, method: Any, train_batch: Any, val_batch: Any, seed: int | None) -> Sequence[Part]:
        if runs_joined(method) and all(map(self._fits, self._losses, (train_batch, val_batch))):
            return ()
        return [
            (fold, self._of_fold(train_batch, k), self._of_fold(val_batch, k), _seed_of_fold(seed, k))
            for k, fold in enumerate(self.folds)
        ]

    def system_solver(self, solver: Solver) -> Blockwise:
        return Blockwise(solver)

    def state(self, method: Any) -> MethodState:
        states = {f"fold{k}": fold.state(method) for k, fold in enumerate(self.folds)}
        solutions = {name: x.solution for name, x in states.items() if x.solution is not None}
        memory = {name: x.memory for name, x in states.items() if x.memory}
        return MethodState(_tree.joined(solutions) or None, memory)

    def remember(self, method: Any, state: MethodState) -> None:
        solutions = _tree.divided(state.solution or {})
        for k, fold in enumerate(self.folds):
            name = f"fold{k}"
            fold.remember(method, MethodState(solutions.get(name), state.memory.get(name, {})))

    def forget(self, method: Any) -> None:
        for fold in self.folds:
            fold.forget(method)

    def curvature_diagonal(self, names: Any) -> Tree | None:
        wanted = _tree.divided({name: self.weights[name] for name in names})
        found = {name: self.folds[int(name[4:])].curvature_diagonal(x) for name, x in wanted.items()}
        known = {name: x for name, x in found.items() if x is not None}
        return _tree.joined(known) if known else None

    def _train_loss(self, model: nn.Module, hyper: nn.Module, batch: Any) -> Tensor:
        return self._each("train_loss", model, hyper, batch).sum()

    def _val_loss(self, model: nn.Module, hyper: nn.Module, batch: Any) -> Tensor:
        return self._each("val_loss", model, hyper, batch).mean()

    def _each(self, which: str, model: nn.Module, hyper: nn.Module, batch: Any) -> Tensor:
        """The loss of each fold, [K]: those of equal shapes together, the others in turn."""
        loss, batches, names = self._losses[which], self._checked(batch), list(self._whole.weights)
        models = [model.get_submodule(f"fold{k}") for k in range(len(batches))]
        values: dict[int, Tensor] = {}
        for members in alike(batches):
            folds = [(models[k], hyper, batches[k]) for k in members]
            if len(members) > 1 and self._batched[which] is None:
                self._batched[which] = runs_batched(loss, folds, names)
            at_once = len(members) > 1 and self._batched[which]
            found = together(loss, folds, names) if at_once else [loss(*fold) for fold in folds]
            values.update((k, _scalar(which, x)) for k, x in zip(members, found, strict=True))
        return torch.stack([values[k] for k in range(len(models))])

    def _fits(self, which: str, batch: Any) -> bool:
        """Whether a loss runs batched for two folds of a batch at least."""
        pieces = [self._checked(piece) for piece, _ in weighted(batch)]
        if self._batched[which] is None:
            try:
                with random_state.seeded(0), torch.no_grad():
                    self._each(which, self.model, self.hyper, pieces[0])
            except Exception:  # any error of a loss, which the passes of the folds raise again and explain
                return False
        return bool(self._batched[which]) and all(len(alike(piece)) < len(piece) for piece in pieces)

    def _of_fold(self, batch: Any, k: int) -> Any:
        """The batch of one fold."""
        if isinstance(batch, Batches):
            return Batches([self._checked(b)[k] for b in batch], batch.weights, batch.recompute)
        return self._checked(batch)[k]

    def _checked(self, batch: Any) -> Sequence[Any]:
        """A batch, if it is a tuple with a batch for each fold."""
        if not isinstance(batch, tuple | list) or len(batch) != len(self.folds):
            size = f" of {len(batch)}" if isinstance(batch, tuple | list) else ""
            raise ArgumentTypeError(
                f"a batch of Folds must be a tuple of {len(self.folds)} batches, one for each fold; got a "
                f"{type(batch).__name__}{size}. Make the batches with cross_validation.fold_batches."
            )
        # A pair of inputs and targets would pass for the batches of two folds.
        kinds = [(x.ndim, x.dtype) for x in batch if isinstance(x, Tensor)]
        if len(kinds) == len(batch) and len(set(kinds)) > 1:
            raise ArgumentTypeError(
                f"a batch of Folds must be a tuple of {len(batch)} batches, one for each fold; got tensors that look "
                f"like the parts of one batch, with {' and '.join(f'{n} dimensions of {t}' for n, t in kinds)}. Make "
                "the batches with cross_validation.fold_batches."
            )
        return batch


def _scalar(name: str, loss: Any) -> Tensor:
    """The loss of a fold; raises, as for a single problem, if it is more than one number."""
    fits = isinstance(loss, Tensor) and loss.numel() == 1
    return loss.reshape(()) if fits else checked_loss(name, loss)


def _seed_of_fold(seed: int | None, k: int) -> int:
    """A seed for the random draws of fold k, from a seed or from the caller's random state, which stays as it is."""
    if seed is None:
        before = random_state.snapshot()
        seed = int(torch.randint(2**62, ()))
        random_state.restore(before)
    return (seed + k * 0x9E3779B97F4A7C15) % 2**62
