"""The base class of hypernetworks: weights as a trained function of the hyperparameters."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from .. import _tree
from .._tree import Tree
from ..errors import ArgumentError, ArgumentTypeError, EvaluationError, require_integer
from ..passes import graph
from ..passes.checked_loss import checked_loss
from ..passes.edits import unmoved
from ..problem import Problem
from .template import Template


class Hypernetwork(nn.Module, ABC):
    """Weights as a function of the hyperparameters, linear in them: w_φ(λ) = w₀ + Δ_φ(λ − λ₀).

    Its parameters φ replace the weights: ``problem`` is the given problem with φ as weights, for
    `Tuner` and `Direct`. Call it like the model: it runs the model with w_φ(λ) at the present λ.

    The given modules do not change until `write_`. Losses run on a copy of both, which is made here, so later
    changes of the modules (a bound, an attribute) have no effect; λ itself is the live λ of the given module.

    Args:
        problem: the two losses. Both must read weights and hyperparameters through their arguments, and accept any
            λ′, even outside the bounds that ``hyper`` restores after a step. Its modules must be on their final device.
        samples: the number of perturbed λ′ in a loss, which takes their mean.

    Attributes:
        problem: the losses over φ and λ.
        source: the problem that was given.
        base: w₀, a parameter for each weight.
        centre: λ₀, all hyperparameters in one vector [H].

    Raises:
        ArgumentError: the modules can't be copied, or have an embedding with ``max_norm``.
    """

    problem: Problem
    centre: Tensor

    def __init__(self, problem: Problem, samples: int) -> None:
        super().__init__()
        kind = type(self).__name__
        if not isinstance(problem, Problem):
            raise ArgumentTypeError(
                f"{kind}.problem must be a Problem; got {type(problem).__name__}. Make one of model, hyper and the "
                "two losses."
            )
        require_integer(f"{kind}.samples", samples, 1)
        problem.check_intact()
        self.source, self.samples = problem, samples
        self.base = nn.ParameterList(nn.Parameter(w.detach().clone()) for w in problem.weights.values())
        self.register_buffer("centre", _vector(problem.hyperparameters).detach())
        if problem.group.own or problem.group.sharded:
            raise ArgumentError(
                f"{type(self).__name__} needs the same weights and hyperparameters on all ranks; got sharded ones. Use "
                "Implicit."
            )
        self._template = Template(problem)
        self._reached: dict[str, set[str]] = {}

    @abstractmethod
    def changes(self, shift: Tensor) -> list[Tensor]:
        """Δ_φ(λ − λ₀) for each weight, from the shift λ − λ₀ [H]; linear in it."""

    @abstractmethod
    def train_loss(self, hyper: Any, batch: Any) -> Tensor:
        """L_T as a loss over φ."""

    @abstractmethod
    def val_loss(self, hyper: Any, batch: Any) -> Tensor:
        """L_V as a loss over φ."""

    def weights(self, hyperparameters: Mapping[str, Tensor] | None = None) -> Tree:
        """w_φ(λ), named and shaped as the given problem's weights; outside any graph.

        Args:
            hyperparameters: other values, with the names and shapes of the given problem. Omitted ones, or all with
                None, take their present values.

        Raises:
            ArgumentError: a name or a shape is not one of the problem's.
        """
        values: Tree = dict(self.source.hyperparameters)
        for name, value in (hyperparameters or {}).items():
            if name not in values or value.shape != values[name].shape:
                known = {n: list(x.shape) for n, x in self.source.hyperparameters.items()}
                raise ArgumentError(
                    f"hyperparameters must be a dict of tensors with names and shapes among {known}; got "
                    f"{name!r} of shape {list(value.shape)}. Take them from problem.hyperparameters."
                )
            values[name] = value
        with torch.no_grad():
            return self._response(_vector(values))

    @torch.no_grad()
    def write_(self) -> None:
        """Copy w_φ(λ), and the buffers that came with it, into the given model."""
        self.source.check_intact()
        _tree.write_(self.source.weights, self.weights())
        pairs = zip(self.source.model.modules(), self._template.model.modules(), strict=True)
        for theirs, mine in pairs:
            for name, buffer in mine._buffers.items():
                before = theirs._buffers.get(name)
                if buffer is not None and before is not None and before.shape == buffer.shape:
                    before.copy_(buffer)  # in place: it may be shared
                else:
                    theirs._buffers[name] = None if buffer is None else buffer.clone()

    @torch.no_grad()
    def recentre(self, tuner: Any = None) -> None:
        """Move λ₀ to the present λ and w₀ to w_φ(λ), which does not change the function w_φ.

        As a callback of `Tuner` it runs after each hyper-step. Far from λ₀ the gradients of w₀ and Δ_φ are
        nearly equal up to a factor, and the response is slow to learn.

        Reference: the centred parametrisation of Bae and Grosse (2020).
        """
        vector = _vector(self.source.hyperparameters)
        for mine, w in zip(self.base, self._response(vector).values(), strict=True):
            mine.copy_(w)
        self.centre.copy_(vector)

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """The output of the model with w_φ(λ) at the present λ."""
        vector = _vector(self.source.hyperparameters)
        return self._template.run(
            lambda model, hyper: model(*arguments, **keywords), *self._substitutes(vector)
        )

    def over_parameters(self, hyper: nn.Module) -> Problem:
        """The problem over φ; a subclass makes it after its parameters exist."""
        kind = type(self)
        source, group = self.source, self.source.group
        return Problem(
            self,
            hyper,
            kind.train_loss,
            kind.val_loss,
            source.val_mode,
            source.verify,
            group.handle,
            group.batch_size,
        )

    def vector(self, hyper: nn.Module) -> Tensor:
        """The present λ of a module like the given one, in one vector [H] with a graph."""
        parameters = dict(hyper.named_parameters())
        return _vector({name: parameters[name] for name in self.source.hyperparameters})

    def mean_loss(self, name: str, points: list[Tensor], batch: Any) -> Tensor:
        """The mean of the given problem's loss of this name over several λ′ [H], each with its w_φ(λ′)."""
        return torch.stack([self._loss(name, vector, batch) for vector in points]).mean()

    def _response(self, vector: Tensor) -> Tree:
        changes = self.changes(vector - self.centre)
        return {
            name: w + change for name, w, change in zip(self.source.weights, self.base, changes, strict=True)
        }

    def _substitutes(self, vector: Tensor) -> tuple[Tree, Tree]:
        """w_φ(λ) and λ, by name."""
        return self._response(vector), _tree.unflatten(vector, self.source.hyperparameters)

    def _loss(self, name: str, vector: Tensor, batch: Any) -> Tensor:
        """The given loss at λ′ and w_φ(λ′); the first call checks which parameters it reads."""
        function = getattr(self.source, name)
        if name in self._reached or not torch.is_grad_enabled():
            return cast(Tensor, self._template.run(function, *self._substitutes(vector), batch)).reshape(())
        if not vector.requires_grad:
            vector = vector.detach().requires_grad_()
        weights, values = self._substitutes(vector)
        with (
            self._template.watched(),
            unmoved(name, {**weights, **{f"hyper.{n}": x for n, x in values.items()}}),
        ):
            loss = checked_loss(name, self._template.run(function, weights, values, batch))
        self._template.refuse_captured(name, loss, [*weights.values(), *values.values()])
        met = set(graph.nodes([loss], until=weights.values()))
        reached = {**self._reached, name: {n for n, x in values.items() if x.grad_fn in met}}
        self._refuse_unreached(reached)
        self._reached = reached
        return loss

    def _refuse_unreached(self, reached: Mapping[str, set[str]]) -> None:
        """Raise if neither loss reads a λ. `Direct` cannot see this, since w_φ(λ) depends on every λ."""
        lost = self.source.hyperparameters.keys() - set().union(*reached.values())
        if lost and reached.keys() == {"train_loss", "val_loss"}:
            raise EvaluationError(
                f"every hyperparameter must reach train_loss or val_loss; {sorted(lost)[:5]} reach neither, so "
                "their hypergradient would be zero. Use them in a loss, through the argument hyper; freeze the rest "
                "with requires_grad_(False) before you make the Problem."
            )


def require_room(name: str, entries: int, most: int, advice: str) -> None:
    """Raise if a response would have too many parameters."""
    require_integer(f"{name}.max_entries", most, 1)
    if entries > most:
        raise ArgumentError(
            f"{name} needs room for its response in max_entries={most:,}; it would have {entries:,} entries. {advice}, "
            "or raise max_entries."
        )


def _vector(values: Mapping[str, Tensor]) -> Tensor:
    """All values as one vector with their graph, on the device of the first; float32 at least."""
    device, dtype = next(iter(values.values())).device, _tree.vector_dtype(values)
    return torch.cat([x.reshape(-1).to(device, dtype) for x in values.values()])
