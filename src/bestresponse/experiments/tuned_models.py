"""How the experiment `generalisation` trains and tunes a model: linear ones to the minimum, networks by steps."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, islice, repeat
from typing import Any

import torch
from torch import Tensor, nn

import bestresponse as br

from ..cross_validation import BFGS, Folds, Minimise, fold_batches, whole_batches
from ..hyperparameters import WeightDecay
from ..hyperparameters.sharing import Sharing
from ..tuner import Callback
from . import classification

Data = tuple[Tensor, ...]
# The training of each fold while hyperparameters are tuned; the last training goes to the minimum.
TRAINER = Minimise(max_steps=100, tolerance=1e-6, newton_limit=0)
Step = Callable[[int], float]


def split(examples: Data, share: float) -> tuple[Data, Data]:
    """The first examples and the last ones, which have this share of all."""
    size = len(examples[0]) - round(share * len(examples[0]))
    return tuple(x[:size] for x in examples), tuple(x[size:] for x in examples)


@dataclass(frozen=True, kw_only=True)
class Setting(ABC):
    """One problem on which hyperparameters are tuned.

    Attributes:
        name: the name in the table.
        seconds: CPU time that each way of tuning may use for a seed.
        watches: parts of the data that are set aside in turn, on which `many with help` compares its candidates.
        strengths: the shrinkage of each stage of `many with help`, which falls; 0 for free hyperparameters.
        hyper_rate: Adam's learning rate for the hyperparameters.
        hyper_steps: the largest number of hyper-steps in a run.
    """

    name: str
    seconds: float
    watches: int = 5
    strengths: tuple[float, ...] = (0.3, 0.1, 0.03)
    hyper_rate: float = 0.2
    hyper_steps: int = 100

    @abstractmethod
    def data(self, seed: int) -> tuple[Data, Data]:
        """The examples for training and validation, and those for the test; drawn from the seed."""

    @abstractmethod
    def model(self) -> nn.Module:
        """The untrained model, drawn from torch's global generator."""

    @abstractmethod
    def few(self, model: nn.Module, size: int) -> nn.Module:
        """One or few hyperparameters at their defaults, for ``size`` examples."""

    @abstractmethod
    def many(self, model: nn.Module, size: int, few: nn.Module | None, strength: float) -> nn.Module:
        """Many hyperparameters, which shrinkage of a strength draws together; they begin at ``few`` or the defaults."""

    @abstractmethod
    def problem(self, model: nn.Module, hyper: nn.Module) -> br.Problem:
        """The losses of the model with these hyperparameters."""

    @abstractmethod
    def train(self, model: nn.Module, hyper: nn.Module, examples: Data) -> None:
        """Train a new model from its initial weights; the hyperparameters stay."""

    @abstractmethod
    def tune(self, model: nn.Module, hyper: nn.Module, examples: Data, stop: Callback, fall: Step) -> int:
        """Tune by hypergradients until ``stop`` stops the run, with the factor ``fall`` on the learning rate.

        Returns the number of hyper-steps. The model is trained afterwards: a network is that of the last training that
        was finished.
        """

    @abstractmethod
    def validation_loss(self, model: nn.Module, hyper: nn.Module, examples: Data) -> float:
        """The loss that is tuned, for a new model that is trained from its initial weights."""

    @abstractmethod
    def example_losses(self, model: nn.Module, examples: Data) -> Tensor:
        """The loss of each example, without penalties."""

    def splits(self, examples: Data) -> list[tuple[Data, Data]]:
        """The rest and the part that is set aside: each of ``watches`` blocks in turn; the last quarter for one."""
        if self.watches == 1:
            return [split(examples, 0.25)]
        size, blocks = len(examples[0]), torch.arange(len(examples[0])).tensor_split(self.watches)
        pairs = []
        for block in blocks:
            inside = torch.zeros(size, dtype=torch.bool)
            inside[block] = True
            pairs.append((tuple(x[~inside] for x in examples), tuple(x[inside] for x in examples)))
        return pairs


@dataclass(frozen=True, kw_only=True)
class Convex(Setting):
    """A linear model, trained to the minimum on each fold of a cross-validation.

    Attributes:
        load: a function of the seed that draws the examples for training and validation, and those for the test.
        losses: the module with the losses, `classification` or `regression`.
        inputs, outputs: the sizes of the model.
        per: which weights share a hyperparameter.
        folds: the folds of the cross-validation.
        dtype: the dtype of the examples and the weights.
    """

    load: Callable[[int], tuple[Data, Data]]
    losses: Any = classification
    inputs: int
    outputs: int
    dtype: torch.dtype = torch.float64
    per: Sharing = "input"
    folds: int = 5

    def data(self, seed: int) -> tuple[Data, Data]:
        return self.load(seed)

    def model(self) -> nn.Module:
        model = nn.Linear(self.inputs, self.outputs, dtype=self.dtype)
        classification.set_to_zero(model)
        return model

    def few(self, model: nn.Module, size: int) -> nn.Module:
        """One decay; its default, one over the number of examples, is that of scikit-learn."""
        return WeightDecay(model, per="global", initial=1.0 / size)

    def many(self, model: nn.Module, size: int, few: nn.Module | None, strength: float) -> nn.Module:
        return decays(model, self.per, "global", 1.0 / size, few, strength)

    def problem(self, model: nn.Module, hyper: nn.Module) -> br.Problem:
        return br.Problem(model, hyper, self.losses.train_loss, self.losses.val_loss, verify=False)

    def train(self, model: nn.Module, hyper: nn.Module, examples: Data) -> None:
        Minimise()(self.problem(model, hyper), examples)

    def tune(self, model: nn.Module, hyper: nn.Module, examples: Data, stop: Callback, fall: Step) -> int:
        problem, train, val = self.cross_validation(model, hyper, examples)
        method = br.Implicit(br.ConjugateGradient(max_steps=50, tolerance=1e-3), warm_start=True)
        rates = list(problem.hyperparameters.values())
        optimizer: torch.optim.Optimizer = BFGS(rates)
        callbacks: list[Callback] = [stop, Settled(rates)]
        schedule = None
        if sum(p.numel() for p in rates) > 1:
            optimizer, callbacks = torch.optim.Adam(rates, self.hyper_rate), [stop]
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, fall)
        tuner = br.Tuner(problem, TRAINER, optimizer, method, hyper_scheduler=schedule, callbacks=callbacks)
        return len(tuner.fit(train, val, self.hyper_steps))

    def validation_loss(self, model: nn.Module, hyper: nn.Module, examples: Data) -> float:
        problem, train, val = self.cross_validation(model, hyper, examples)
        TRAINER(problem, next(iter(train)))
        with torch.no_grad():
            return float(problem.losses(next(iter(val)), "val_loss").mean())

    @torch.no_grad()
    def example_losses(self, model: nn.Module, examples: Data) -> Tensor:
        losses: Tensor = self.losses.example_losses(model, None, examples)
        return losses

    def cross_validation(self, model: nn.Module, hyper: nn.Module, examples: Data) -> tuple[Folds, Any, Any]:
        """The problem over the folds, and its batches for training and validation."""
        train, val = fold_batches(examples, self.folds)
        losses = self.losses
        return Folds(model, hyper, losses.train_loss, losses.val_loss, self.folds, verify=False), train, val


@dataclass(frozen=True, kw_only=True)
class Network(Setting):
    """A network, trained for a fixed number of steps; a quarter of the examples is for validation.

    Hyperparameters are tuned along the second half of one training after another, each from new initial weights. Along
    a single long run they come to suit weights that a training of this length never reaches.

    Attributes:
        steps: the weight steps of a training.
        rate: Adam's learning rate for the weights, which falls to zero along a line.
        batch: the examples in a batch.
        weight_steps: weight steps before each hyper-step.
        method: makes the method of a run.
    """

    steps: int
    rate: float = 2e-3
    batch: int = 100
    weight_steps: int = 10
    watches: int = 1
    strengths: tuple[float, ...] = (0.3, 0.0)
    hyper_rate: float = 0.1
    hyper_steps: int = 1000
    method: Callable[[], br.Method] = br.Implicit

    @abstractmethod
    def train_loss(self, model: Any, hyper: Any, batch: Any) -> Tensor:
        """The training loss with all regularisers."""

    @abstractmethod
    def val_loss(self, model: Any, hyper: Any, batch: Any) -> Tensor:
        """The loss without regularisers."""

    def batches(self, examples: Data) -> Iterable[Any]:
        """The examples in shuffled batches, one round for each iteration."""
        return whole_batches(examples, min(self.batch, len(examples[0])))

    def problem(self, model: nn.Module, hyper: nn.Module) -> br.Problem:
        return br.Problem(model, hyper, self.train_loss, self.val_loss, verify=False)

    def train(self, model: nn.Module, hyper: nn.Module, examples: Data) -> None:
        weights = list(self.problem(model, hyper).weights.values())
        optimizer = torch.optim.Adam(weights, self.rate)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self._fall)
        for batch in islice(chain.from_iterable(repeat(self.batches(examples))), self.steps):
            optimizer.zero_grad()
            torch.autograd.backward(self.train_loss(model, hyper, batch), inputs=weights)
            nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            schedule.step()

    def tune(self, model: nn.Module, hyper: nn.Module, examples: Data, stop: Callback, fall: Step) -> int:
        problem, method, total = self.problem(model, hyper), self.method(), 0
        optimizer = torch.optim.Adam(problem.hyperparameters.values(), self.hyper_rate)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, fall)
        train, val = (self.batches(part) for part in split(examples, 0.25))
        begin, finished = self.steps // 2, False
        while True:
            trained = self.problem(self.model(), hyper)
            weights = torch.optim.Adam(trained.weights.values(), self.rate)
            tuner = br.Tuner(
                trained,
                weights,
                optimizer,
                method,
                weight_steps=self.weight_steps,
                warmup_steps=begin,
                weight_scheduler=torch.optim.lr_scheduler.LambdaLR(weights, self._fall),
                clip_weights=1.0,
                policy="skip",
                hyper_scheduler=schedule,
                callbacks=[stop] if finished else [],
            )
            tuner.fit(train, val, max(1, (self.steps - begin) // self.weight_steps))
            total += tuner.hyper_step
            if not tuner.stopped:
                finished = True
                model.load_state_dict(trained.model.state_dict())
                stop(tuner)
            if tuner.stopped or total >= self.hyper_steps:
                return total

    def _fall(self, step: int) -> float:
        """The factor on the learning rate of the weights."""
        return max(0.0, 1.0 - step / self.steps)

    def validation_loss(self, model: nn.Module, hyper: nn.Module, examples: Data) -> float:
        train, val = split(examples, 0.25)
        self.train(model, hyper, train)
        return float(self.example_losses(model, val).mean())


class Settled:
    """A callback that stops the run when hyperparameters hardly move."""

    def __init__(self, parameters: Sequence[Tensor], tolerance: float = 0.01) -> None:
        self._parameters, self._tolerance = parameters, tolerance
        self._before = [p.detach().clone() for p in parameters]

    def __call__(self, tuner: br.Tuner) -> None:
        now = [p.detach().clone() for p in self._parameters]
        moved = max(float((a - b).abs().max()) for a, b in zip(now, self._before, strict=True))
        self._before = now
        if moved < self._tolerance:
            tuner.stop(f"no hyperparameter moved by {self._tolerance:g}")


@torch.no_grad()
def decays(
    model: nn.Module,
    per: Sharing,
    around: Sharing,
    initial: float,
    few: nn.Module | None,
    strength: float,
    exclude: Sequence[str] = (),
) -> WeightDecay:
    """Many decays, which begin at ``few``. Shrinkage draws them to the centre ``around``; without it all are free."""
    if isinstance(few, WeightDecay):
        initial = float(few.values()["all"])
    if not strength:
        return WeightDecay(model, per=per, initial=initial, exclude=exclude)
    return WeightDecay(model, per=per, around=around, initial=initial, shrinkage=strength, exclude=exclude)
