"""Two losses over weights and hyperparameters: equation 1 of the paper."""

import copy
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from . import _tree, passes
from ._tree import Tree
from .distributed import ALONE
from .errors import ArgumentError, ArgumentTypeError, BestResponseWarning, EvaluationError, require_parameters
from .hyperparameters.protocol import knows_its_curvature
from .memory import MethodState, Remembering, settings_of
from .parallel_models import check_processes, group_of, inner, processes
from .parameters import split
from .parts import Undivided
from .passes.edits import Edits
from .passes.substitution import Loss


class Problem(Undivided):
    """Two losses over weights w and hyperparameters λ.

        λ* = argmin_λ L_V(w*(λ), λ),  w*(λ) = argmin_w L_T(w, λ)    (equation 1 of the paper)

    The modules stay as they are. ``model``'s trainable parameters that are not ``hyper``'s are the
    weights; ``hyper``'s trainable parameters are the hyperparameters. ``hyper`` may be a submodule of
    ``model``. Both dicts are fixed when the problem is made; a shared parameter appears once.

    A loss is a function (model, hyper, batch) -> scalar tensor, a mean over the batch. It reads every
    weight and hyperparameter through its first two arguments, and unpacks and moves the batch itself.

    Running statistics of norms that the training passes move and the validation loss reads depend on the weights
    and hyperparameters. They are differentiated as the statistics of the training batch, for any call of torch's
    ``batch_norm`` and ``instance_norm``. Other state in buffers counts as constant: moving averages that you keep by
    hand, codebooks, power iterations.

    Args:
        model: the module to train.
        hyper: the module whose parameters to tune.
        train_loss: L_T, regulariser included. It runs in the modules' current mode.
        val_loss: L_V. It runs in eval mode.
        val_mode: "eval", or "as_is" to run the validation loss in the modules' current mode.
        verify: whether the first hypergradient of each method compares the derivatives that it uses with differences.
        group: the processes over whose batches losses and derivatives are the mean; None takes the group of
            DistributedDataParallel or ``fully_shard``, or this process alone. The losses get the module inside the
            former.
        batch_size: (batch) -> number of examples, by which the batches of the ranks count; None means equally.

    Attributes:
        weights: the live weights by name, as named in ``model``.
        hyperparameters: the live hyperparameters by name, as named in ``hyper``.
        edits: compares both before and after the passes.

    A hypergradient leaves the modules as they are. It restores what a loss changes in them: buffers, frozen parameters,
    and attributes of registered modules with their entries (numbers, tensors, generators). Of tensors that are not
    buffers it restores up to 256 MiB; a warning names larger ones once, if they changed. A loss that changes
    weights or hyperparameters in place is an error.

    Raises:
        ArgumentTypeError: an argument is not a module, or not a function.
        ArgumentError: there are no weights or no hyperparameters, ``hyper`` holds a part of ``model``, or weights are
            complex or on the meta device.
        EvaluationError: the model is in FullyShardedDataParallel, or sharded otherwise than by ``fully_shard``.
    """

    def __init__(
        self,
        model: nn.Module,
        hyper: nn.Module,
        train_loss: Loss,
        val_loss: Loss,
        val_mode: Literal["eval", "as_is"] = "eval",
        verify: bool = True,
        group: Any = None,
        batch_size: Callable[[Any], float] | None = None,
    ) -> None:
        _check_arguments(model, hyper, train_loss, val_loss, val_mode)
        if not isinstance(verify, bool):
            raise ArgumentTypeError(f"Problem.verify must be True or False; got {verify!r}.")
        self.model, self.hyper = inner(model), inner(hyper)
        self.train_loss, self.val_loss, self.val_mode = train_loss, val_loss, val_mode
        self.group, self._processes = group_of(model, hyper, group, batch_size), processes()
        self.verify = verify
        self.weights, self.hyperparameters = split(self.model, self.hyper)
        self.edits = Edits()
        self._states: weakref.WeakKeyDictionary[Any, MethodState] = weakref.WeakKeyDictionary()
        self._met: dict[str, tuple[weakref.ref[Any], int]] = {}
        self._warned: set[object] = set()
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()
        self._verified: weakref.WeakKeyDictionary[Any, dict[str, str]] = weakref.WeakKeyDictionary()

    def __repr__(self) -> str:
        return (
            f"Problem({type(self.model).__name__} with {_tree.size(self.weights):,} weights, "
            f"{type(self.hyper).__name__} with {_tree.size(self.hyperparameters):,} hyperparameters)"
        )

    def check_intact(self) -> None:
        """Raise if a weight or hyperparameter was replaced or frozen since, or differs between the ranks."""
        if self.group is ALONE and (size := processes()) > self._processes:
            self.warn_once(
                "late group",
                f"the process group ({size} processes) was initialised after this problem was made, which is computed "
                "on its own process alone: hyperparameters of several ranks drift apart. Call init_process_group "
                "first; before it, torch.distributed.group.WORLD is None.",
            )
        check_processes(self.group, self.model.modules(), self.live() | dict(self.model.named_parameters()))
        for side, module, fixed in (
            ("weights", self.model, self.weights),
            ("hyperparameters", self.hyper, self.hyperparameters),
        ):
            present = dict(module.named_parameters())
            if moved := [n for n, p in fixed.items() if present.get(n) is not p]:
                raise EvaluationError(
                    f"the {side} must be the parameters that the problem was made with; {moved[:5]} were replaced "
                    "or renamed since. Change values in place (load_state_dict without assign), or make a new "
                    "Problem and new optimisers."
                )
            if frozen := [n for n, p in fixed.items() if not p.requires_grad]:
                raise EvaluationError(
                    f"the {side} must require gradients; {frozen[:5]} were frozen since the problem was made. "
                    "Make a new Problem without them."
                )

    def alone(self) -> "Problem":
        """The same problem on the batches of this process alone."""
        other = copy.copy(self)
        other.group = ALONE
        return other

    def live(self) -> Tree:
        """Weights by name and hyperparameters as ``hyper.``name, in one dict."""
        return {**self.weights, **{f"hyper.{n}": p for n, p in self.hyperparameters.items()}}

    def state(self, method: Any) -> MethodState:
        """The state that ``method`` keeps on this problem between calls; read it, or restore it.

        It lives as long as the method object. It is reset when the shapes, devices or dtypes of the weights change.
        """
        state = self._states.get(method)
        if state is None or not state.fits(self.weights):
            state = self._states[method] = MethodState()
        return state

    def forget(self, method: Any) -> None:
        """Drop the state that ``method`` and its parts keep on this problem."""
        for part in (
            method,
            *(method.parts_that_remember().values() if isinstance(method, Remembering) else ()),
        ):
            self._states.pop(part, None)

    def remember(self, method: Any, state: MethodState) -> None:
        """Keep ``state`` for the next call of ``method``; the methods call this when they succeed."""
        self._states[method] = state

    def meet(self, method: Any) -> None:
        """Warn once if a method with a state is created again for each call, so that it starts cold each time."""
        settings = settings_of(method)
        earlier, calls = self._met.get(settings, (None, 0))
        gone = earlier is not None and earlier() is None
        if gone and calls == 1:
            self.warn_once(
                ("made anew", settings),
                f"{method!r} keeps its solution for the next call, so each call must use the same object; "
                "got a second object with the same settings, and the first one no longer exists. Make the method "
                "once, before the loop.",
            )
        again = earlier is not None and earlier() is method
        self._met[settings] = (weakref.ref(method), calls + 1 if again else 1)

    def has_checked(self, thing: Any) -> bool:
        """Whether ``thing`` (a curvature) passed the checks of a first call on this problem."""
        return thing in self._seen

    def checked(self, thing: Any) -> None:
        """Note that ``thing`` passed them."""
        self._seen.add(thing)

    def verifications(self, thing: Any) -> dict[str, str]:
        """The results of verification for ``thing`` (a curvature, a kind of method), by what was checked."""
        return self._verified.setdefault(thing, {})

    def warn_once(self, key: object, message: str) -> None:
        """Give a warning the first time that ``key`` comes up on this problem."""
        if key not in self._warned:
            self._warned.add(key)
            warnings.warn(message, BestResponseWarning, stacklevel=3)

    def curvature_diagonal(self, names: Iterable[str]) -> Tree | None:
        """The part of the curvature's diagonal that modules in ``hyper`` know, by weight; None if none knows any.

        They provide it as ``hyperparameters.KnownCurvature``. It serves as a preconditioner and is not part of A.
        """
        known = [m for m in self.hyper.modules() if knows_its_curvature(m)]
        if not known or self.group.sharded:
            return None
        total = _tree.zeros_like({n: self.weights[n] for n in names})
        with torch.no_grad():
            for module in known:
                try:
                    diagonals = module.curvature_diagonal(self.model)
                except EvaluationError:  # made for a part of the model, which has other names
                    continue
                for name, diagonal in diagonals.items():
                    if name in total:
                        total[name] += diagonal
        return total

    def undisturbed(
        self, seed: int | None = None, weight_optimizer: Optimizer | None = None, twice: bool = True
    ) -> "Passes":
        """A context in which the losses run without side effects, and can be differentiated ``twice``."""
        return passes.Passes(self, seed, weight_optimizer, twice)


Passes = passes.Passes[Problem]  # the passes of a problem, for annotations


def _check_arguments(
    model: object, hyper: object, train_loss: object, val_loss: object, val_mode: object
) -> None:
    for name, module in (("model", model), ("hyper", hyper)):
        if not isinstance(module, nn.Module):
            raise ArgumentTypeError(
                f"Problem.{name} must be a torch.nn.Module; got {type(module).__name__}. "
                "Put single tensors into an nn.ParameterDict."
            )
    for name, loss in (("train_loss", train_loss), ("val_loss", val_loss)):
        if not callable(loss):
            raise ArgumentTypeError(
                f"Problem.{name} must be a function (model, hyper, batch) -> scalar tensor; "
                f"got {type(loss).__name__}."
            )
        require_parameters(f"Problem.{name}", loss, "model, hyper, batch")
    if val_mode not in ("eval", "as_is"):
        raise ArgumentError(f'Problem.val_mode must be "eval" or "as_is"; got {val_mode!r}.')
