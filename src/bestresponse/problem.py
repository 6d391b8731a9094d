"""Two losses over weights and hyperparameters: equation 1 of the paper."""

import functools
import warnings
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from . import _tree, passes
from ._tree import Tree
from .distributed import refuse_several_processes
from .errors import ArgumentError, ArgumentTypeError, BestResponseWarning, EvaluationError, require_parameters
from .hyperparameters import KnownCurvature
from .passes.substitution import Loss
from .passes.watch import Watch


class Problem:
    """Two losses over weights w and hyperparameters λ.

    λ* = argmin_λ L_V(w*(λ), λ),  w*(λ) = argmin_w L_T(w, λ).    (equation 1 of the paper)

    The modules stay as they are. ``model``'s trainable parameters that are not ``hyper``'s are the
    weights; ``hyper``'s trainable parameters are the hyperparameters. ``hyper`` may be a submodule of
    ``model``. Both dicts are fixed when the problem is made; a shared parameter appears once.

    A loss is a function (model, hyper, batch) -> scalar tensor, a mean over the batch. It reads every
    weight and hyperparameter through its first two arguments, and unpacks and moves the batch itself.

    The running statistics of norms that the training passes move and the validation loss reads follow the weights
    and hyperparameters, and are differentiated as the statistics of the training batch, for any call of torch's
    ``batch_norm`` and ``instance_norm``. Other state in buffers is constant: moving averages that are kept by hand,
    codebooks, power iterations.

    Args:
        model: the module that is trained.
        hyper: the module whose parameters are tuned.
        train_loss: L_T, regulariser included. It runs in the mode in which the modules are.
        val_loss: L_V. It runs in eval mode.
        val_mode: "eval", or "as_is" for a validation loss in the mode in which the modules are.
        verify: whether the first hypergradient of each method compares the derivatives that it uses with differences.

    Attributes:
        weights: the live weights by name, as named in ``model``.
        hyperparameters: the live hyperparameters by name, as named in ``hyper``.
        watch: compares both before and after the passes.

    A hypergradient leaves the modules as they are. What a loss changes in them beside weights is put back: buffers,
    frozen parameters, attributes of registered modules with their entries (numbers, tensors, generators), up to
    256 MiB of tensors that are not buffers; larger ones are named once, where they changed. A loss that changes
    weights or hyperparameters in place is an error.

    Raises:
        ArgumentTypeError: an argument is not a module, or not a function.
        ArgumentError: there are no weights or no hyperparameters, ``hyper`` holds a part of ``model``, or weights are
            complex or on the meta device.
        EvaluationError: there is a process group of several processes, or a model in DistributedDataParallel or FSDP.
    """

    def __init__(
        self,
        model: nn.Module,
        hyper: nn.Module,
        train_loss: Loss,
        val_loss: Loss,
        val_mode: Literal["eval", "as_is"] = "eval",
        verify: bool = True,
    ) -> None:
        _check_arguments(model, hyper, train_loss, val_loss, val_mode)
        if not isinstance(verify, bool):
            raise ArgumentTypeError(f"Problem.verify must be True or False; got {verify!r}.")
        self.model, self.hyper = model, hyper
        self.train_loss, self.val_loss, self.val_mode = train_loss, val_loss, val_mode
        refuse_several_processes(
            (*model.modules(), *hyper.modules()),
            {**dict(model.named_parameters()), **dict(hyper.named_parameters())},
        )
        self.verify = verify
        self.weights, self.hyperparameters = _split(model, hyper)
        self.watch = Watch()
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
        """Raise when a weight or hyperparameter was replaced or frozen after the problem was made, or spread."""
        refuse_several_processes((), dict(self.model.named_parameters()))
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

    def live(self) -> Tree:
        """Weights and hyperparameters together, these as ``hyper.``name."""
        return {**self.weights, **{f"hyper.{n}": p for n, p in self.hyperparameters.items()}}

    def state(self, method: Any) -> "MethodState":
        """What ``method`` remembers on this problem from its last call: read it, or put it back.

        It is kept for as long as the method object lives, and emptied when the shapes, devices or
        dtypes of the weights have changed.
        """
        state = self._states.get(method)
        if state is None or not state.fits(self.weights):
            state = self._states[method] = MethodState()
        return state

    def forget(self, method: Any) -> None:
        """Drop what ``method`` remembers on this problem."""
        self._states.pop(method, None)

    def remember(self, method: Any, state: "MethodState") -> None:
        """Keep ``state`` for the next call of ``method``; the methods call this when they succeed."""
        self._states[method] = state

    def meet(self, method: Any) -> None:
        """Warn once when a method that remembers was made anew, so that it starts cold each time."""
        settings = settings_of(method)
        earlier, calls = self._met.get(settings, (None, 0))
        gone = earlier is not None and earlier() is None
        if gone and calls == 1:
            self.warn_once(
                ("made anew", settings),
                f"{method!r} keeps what it found for the next call, which needs the same object; "
                "got a second one of the same settings, whose twin is gone. Make the method once, "
                "before the loop.",
            )
        again = earlier is not None and earlier() is method
        self._met[settings] = (weakref.ref(method), calls + 1 if again else 1)

    def first_time(self, thing: Any) -> bool:
        """Whether this is the first call with ``thing`` on this problem."""
        first = thing not in self._seen
        self._seen.add(thing)
        return first

    def verified(self, thing: Any) -> dict[str, str]:
        """What verification said of ``thing`` (a curvature, a kind of method) on this problem, by what it looked at."""
        return self._verified.setdefault(thing, {})

    def warn_once(self, key: object, message: str) -> None:
        """Give a warning the first time that ``key`` comes up on this problem."""
        if key not in self._warned:
            self._warned.add(key)
            warnings.warn(message, BestResponseWarning, stacklevel=3)

    def curvature_diagonal(self, names: Iterable[str]) -> Tree | None:
        """What the modules in ``hyper`` know of the curvature's diagonal, by weight; None if nothing.

        A module that adds a term to the training loss can offer the diagonal of its Hessian as
        ``curvature_diagonal(model) -> dict of tensors by weight``; it is a preconditioner, no part of A.
        """
        known: list[KnownCurvature] = [m for m in self.hyper.modules() if isinstance(m, KnownCurvature)]
        if not known:
            return None
        total = _tree.zeros_like({n: self.weights[n] for n in names})
        with torch.no_grad():
            for module in known:
                try:
                    diagonals = module.curvature_diagonal(self.model)
                except EvaluationError:  # made for a part of the model, whose names are others
                    continue
                for name, diagonal in diagonals.items():
                    if name in total:
                        total[name] += diagonal
        return total

    def undisturbed(
        self, seed: int | None = None, weight_optimizer: Optimizer | None = None, twice: bool = True
    ) -> "Passes":
        """A context in which the losses can be run without a trace, and differentiated ``twice``."""
        return passes.Passes(self, seed, weight_optimizer, twice)


Passes = passes.Passes[Problem]  # the passes of a problem, for annotations


@dataclass
class MethodState:
    """What a method remembers between two calls on one problem.

    Attributes:
        solution: the last solution of the linear system by weight, or how far `Penalty`'s two sets of weights
            are apart; None before the first.
        memory: what goes with it (a scale estimate, a chosen damping, moments).
    """

    solution: Tree | None = None
    memory: dict[str, Any] = field(default_factory=dict)

    def fits(self, weights: Mapping[str, Tensor]) -> bool:
        """Whether the solution still has the layout of the weights."""
        if self.solution is None:
            return True
        of_solution = {n: w for n, w in weights.items() if n in self.solution}
        return _tree.same_layout(self.solution, of_solution)


def settings_of(value: Any) -> str:
    """A method's settings as text, the same for two objects that were made alike."""
    if is_dataclass(value) and not isinstance(value, type):
        inside = ", ".join(f"{f.name}={settings_of(getattr(value, f.name))}" for f in fields(value))
        return f"{type(value).__name__}({inside})"
    if isinstance(value, functools.partial):
        arguments = [value.func, *value.args, *sorted(value.keywords.items())]
        return f"partial({', '.join(map(settings_of, arguments))})"
    if repr(value) == object.__repr__(value):  # which would tell an address
        return type(value).__qualname__
    name = getattr(value, "__qualname__", None)
    return f"{value.__module__}.{name}" if name else repr(value)


def _check_arguments(
    model: object, hyper: object, train_loss: object, val_loss: object, val_mode: object
) -> None:
    for name, module in (("model", model), ("hyper", hyper)):
        if not isinstance(module, nn.Module):
            raise ArgumentTypeError(
                f"Problem.{name} must be a torch.nn.Module; got {type(module).__name__}. "
                "A few tensors can be put into an nn.ParameterDict."
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


def _split(model: nn.Module, hyper: nn.Module) -> tuple[dict[str, nn.Parameter], dict[str, nn.Parameter]]:
    """Weights and hyperparameters, told apart by identity."""
    if not any(module is hyper for module in model.modules()):
        _refuse_shared(model, hyper)
    hyperparameters = {n: p for n, p in hyper.named_parameters() if p.requires_grad}
    if not hyperparameters:
        raise ArgumentError(
            f"hyper must have a trainable parameter; {type(hyper).__name__} has none. "
            "Set requires_grad, or register the hyperparameters as nn.Parameter."
        )
    tuned = {id(p) for p in hyper.parameters()}
    unmade = [n for n, p in model.named_parameters() if isinstance(p, nn.parameter.UninitializedParameter)]
    if unmade:
        raise ArgumentError(
            f"the model's parameters must have their shapes; {unmade[:5]} are lazy and wait for a first batch. "
            "Run the model once before Problem is made."
        )
    weights = {n: p for n, p in model.named_parameters() if p.requires_grad and id(p) not in tuned}
    if not weights:
        raise ArgumentError(
            f"model must have a trainable parameter that is not a hyperparameter; {type(model).__name__} has "
            "none. Set requires_grad on its weights, or pass the part to be tuned alone as hyper."
        )
    _warn_of_trained_rates(model, {id(w) for w in weights.values()})
    both = [*weights.items(), *hyperparameters.items()]
    complex_ = [n for n, p in both if p.is_complex()]
    if complex_:
        raise ArgumentError(
            f"weights and hyperparameters must be real; got complex {complex_[:5]}. "
            "Store real and imaginary parts as real parameters (torch.view_as_real)."
        )
    if meta := [n for n, p in both if p.is_meta]:
        raise ArgumentError(
            f"weights and hyperparameters must have values; got {meta[:5]} on the meta device, which has none. Make "
            "Problem after Module.to_empty(device=...) and the initialisation."
        )
    return weights, hyperparameters


def _warn_of_trained_rates(model: nn.Module, weights: set[int]) -> None:
    """Warn of modules of ours in the model whose parameters would be trained as weights."""
    ours = f"{__package__}.hyperparameters"
    trained = [
        name
        for name, module in model.named_modules()
        if type(module).__module__.startswith(ours)
        and any(id(p) in weights for p in module.parameters(recurse=False))
    ]
    if trained:
        warnings.warn(
            f"the model's {trained[:5]} have hyperparameters that are not in hyper, and will be trained as weights, on "
            "the training loss. Put them with all that is tuned into one submodule of the model, and give that as "
            "hyper; or freeze them with requires_grad_(False).",
            BestResponseWarning,
            stacklevel=4,
        )


def _refuse_shared(model: nn.Module, hyper: nn.Module) -> None:
    """Raise when hyper, which is no part of model, holds a part of it."""
    modules = {id(m): n or type(m).__name__ for n, m in model.named_modules()}
    parameters = {id(p): n for n, p in model.named_parameters(remove_duplicate=False)}
    shared = [modules[id(m)] for m in hyper.modules() if id(m) in modules]
    shared += [parameters[id(p)] for p in hyper.parameters() if id(p) in parameters]
    if shared:
        raise ArgumentError(
            f"hyper must be a submodule of model or share nothing with it; {type(hyper).__name__} holds "
            f"{list(dict.fromkeys(shared))[:5]} of the model, which would turn weights into hyperparameters. "
            "Keep names, not the module, in hyper, and take the model as an argument of the loss. Modules with "
            "hyperparameters that run inside the model go into one submodule of it, and that is hyper: "
            "model.tuned = nn.ModuleDict({...}), Problem(model, model.tuned, ...)."
        )
