"""The columns of the experiment `generalisation`: five ways to choose hyperparameters, at equal CPU time."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

import bestresponse as br

from ..passes import random_state
from .runs import Row
from .tuned_models import Data, Network, Setting


@dataclass
class Clock:
    """The CPU time of this process since the clock was made, against a limit in seconds."""

    seconds: float
    began: float = field(default_factory=time.process_time)

    @property
    def spent(self) -> float:
        """Seconds since the start."""
        return time.process_time() - self.began

    @property
    def share(self) -> float:
        """The share of the limit that is spent."""
        return min(1.0, self.spent / self.seconds) if self.seconds else 1.0

    @property
    def left(self) -> float:
        """Seconds until the limit."""
        return max(0.0, self.seconds - self.spent)

    def __call__(self, tuner: br.Tuner) -> None:
        """Stop the run of a tuner at the limit."""
        if not self.left:
            tuner.stop("the time is over")


@dataclass(frozen=True)
class Found:
    """Hyperparameters that a way of tuning found, and what it says about them."""

    hyper: nn.Module
    notes: Row = field(default_factory=dict)


# A difference counts from this many standard errors.
ERRORS = 2.0

Way = Callable[[Setting, Data, Clock, int], Found]


def defaults(setting: Setting, examples: Data, clock: Clock, seed: int) -> Found:
    """The defaults."""
    return Found(setting.few(setting.model(), len(examples[0])))


def optuna(setting: Setting, examples: Data, clock: Clock, seed: int) -> Found:
    """The few hyperparameters by trials of Optuna's TPE; a trial trains the model anew."""
    from optuna.storages import InMemoryStorage

    def make() -> br.Problem:
        model = setting.model()
        return setting.problem(model, setting.few(model, len(examples[0])))

    def objective(problem: br.Problem) -> float:
        return setting.validation_loss(problem.model, problem.hyper, examples)

    storage, trials = InMemoryStorage(), 0
    while not trials or clock.left:  # one by one, since the limit of `br.search` is on the time of the wall
        trials += 1
        found = br.search(objective, problem=make, trials=trials, storage=storage, seed=seed)
    problem = make()
    found.write_(problem)
    return Found(problem.hyper, {"trials": trials})


def few(setting: Setting, examples: Data, clock: Clock, seed: int) -> Found:
    """The few hyperparameters by hypergradients."""
    model = setting.model()
    hyper = setting.few(model, len(examples[0]))
    return Found(hyper, {"hyper-steps": _tune(setting, model, hyper, examples, clock)})


def many(setting: Setting, examples: Data, clock: Clock, seed: int) -> Found:
    """The many hyperparameters by hypergradients, without help."""
    model = setting.model()
    hyper = setting.many(model, len(examples[0]), None, 0.0)
    return Found(hyper, {"hyper-steps": _tune(setting, model, hyper, examples, clock)})


def many_with_help(setting: Setting, examples: Data, clock: Clock, seed: int) -> Found:
    """The many hyperparameters, loosened from the few as far as examples that no hypergradient saw allow."""
    return (_along_trainings if isinstance(setting, Network) else _along_paths)(
        setting, examples, clock, seed
    )


def _along_trainings(setting: Setting, examples: Data, clock: Clock, seed: int) -> Found:
    """Few, and the many with each shrinkage, tuned in half of the time without the part that is set aside.

    The losses on that part are those of the last network that the tuning trained. The kind of hyperparameters that is
    chosen goes on, from where it is, on all examples.
    """
    ((rest, aside),) = setting.splits(examples)
    candidates: list[nn.Module] = []
    losses: list[Tensor] = []
    for strength in (1.0, *setting.strengths):
        model = setting.model()
        if candidates:
            hyper = setting.many(model, len(rest[0]), candidates[0], strength)
        else:
            hyper = setting.few(model, len(rest[0]))
        _tune(setting, model, hyper, rest, Clock(clock.seconds / 2 / (1 + len(setting.strengths))))
        candidates.append(hyper)
        losses.append(setting.example_losses(model, aside))
    stage, gains = _chosen(losses)
    _tune(setting, setting.model(), candidates[stage], examples, Clock(clock.left))
    return Found(candidates[stage], _of_stage(setting, stage, gains))


def _along_paths(setting: Setting, examples: Data, clock: Clock, seed: int) -> Found:
    """The few of all examples, loosened up to the stage that is best on parts of the data that are set aside in turn.

    The few are tuned on all examples in half of the time. Each part that is set aside has its path on the other
    examples: the few, then the many with a shrinkage that falls from stage to stage. After each stage, new weights are
    trained at its hyperparameters, and their losses are measured on the part. In the end the few of all examples are
    loosened up to the chosen stage.
    """
    parts = setting.splits(examples)
    begin = _tuned_few(setting, examples, clock.seconds / 2)
    seconds = clock.left / (len(parts) + 1)
    losses: list[list[Tensor]] = [[] for _ in range(1 + len(setting.strengths))]
    for rest, aside in parts:
        own = Clock(seconds)
        few = _tuned_few(setting, rest, seconds / 2)
        for stage, hyper in enumerate(_loosened(setting, rest, few, own, len(setting.strengths))):
            losses[stage].append(retrained(setting, hyper, rest, aside, seed))
    stage, gains = _chosen([torch.cat(of_stage) for of_stage in losses])
    *_, kept = _loosened(setting, examples, begin, Clock(max(clock.left, seconds)), stage)
    return Found(kept, _of_stage(setting, stage, gains))


def _of_stage(setting: Setting, stage: int, gains: list[float]) -> Row:
    """The notes on a choice: the shrinkage of the chosen stage, 1 for the few."""
    return {"shrinkage": (1.0, *setting.strengths)[stage], "gains": gains}


def _chosen(losses: list[Tensor]) -> tuple[int, list[float]]:
    """The stage to take, from the losses of the same examples after each, and the gain of each stage over it.

    A later stage replaces an earlier one if its mean loss is lower by more than two standard errors of the paired
    differences. The gains are in standard errors.
    """
    kept, gains = 0, []
    for stage in range(1, len(losses)):
        gain, error = mean_and_error(losses[kept] - losses[stage])
        gains.append(gain / error)
        if gains[-1] > ERRORS:
            kept = stage
    return kept, gains


def mean_and_error(values: Tensor) -> tuple[float, float]:
    """The mean and its standard error, which is never zero."""
    error = values.double().std() / math.sqrt(len(values))
    return float(values.double().mean()), max(float(error), 1e-30)


def _tuned_few(setting: Setting, examples: Data, seconds: float) -> nn.Module:
    """The few hyperparameters, tuned on these examples."""
    model = setting.model()
    hyper = setting.few(model, len(examples[0]))
    _tune(setting, model, hyper, examples, Clock(seconds))
    return hyper


def _loosened(
    setting: Setting, examples: Data, few: nn.Module, clock: Clock, stages: int
) -> Iterator[nn.Module]:
    """The few hyperparameters as they are, then the many with each shrinkage, up to a stage."""
    before = few
    yield few
    for stage in range(stages):
        model = setting.model()
        hyper = setting.many(model, len(examples[0]), few, setting.strengths[stage])
        if stage:
            hyper.load_state_dict(before.state_dict())
        _tune(setting, model, hyper, examples, Clock(clock.left / (stages - stage)))
        before = hyper
        yield hyper


def retrained(setting: Setting, hyper: nn.Module, examples: Data, others: Data, seed: int) -> Tensor:
    """The losses of other examples for new weights, trained at these hyperparameters from the draws of a seed."""
    with random_state.seeded(seed):
        model = setting.model()
        setting.train(model, hyper, examples)
    return setting.example_losses(model, others)


def _tune(setting: Setting, model: nn.Module, hyper: nn.Module, examples: Data, clock: Clock) -> int:
    """Tune until the limit, with a learning rate that falls to zero on the way."""

    def fall(step: int) -> float:
        return 1.0 - max(step / setting.hyper_steps, clock.share)

    return setting.tune(model, hyper, examples, clock, fall)


WAYS: dict[str, Way] = {
    "defaults": defaults,
    "few by Optuna": optuna,
    "few": few,
    "many": many,
    "many with help": many_with_help,
}
