"""Tuning hyperparameters while the weights train: Algorithm 1 of the paper."""

import random
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from .errors import require_function, require_integer
from .methods import Implicit, Method
from .methods.accumulation import accumulate
from .methods.base import require_method
from .methods.policy import attempt
from .passes import random_state
from .problem import Problem
from .runs import checkpoint
from .runs.callbacks import Checkpoint
from .runs.events import add_event
from .runs.hyper_steps import HyperSteps
from .runs.recovery import LastGood
from .runs.requirements import as_callbacks, check_hyper_optimizer, check_settings, check_weight_optimizer
from .runs.schedulers import step_scheduler
from .runs.streams import Stream
from .runs.watch import Watch, as_watch
from .runs.weight_steps import WeightStep, WeightSteps

Callback = Callable[["Tuner"], None]


class Tuner:
    """Alternate steps of the weights on the training loss with steps of the hyperparameters on the validation loss.

    Repeat: ``weight_steps`` times w ← w − step(∂L_T/∂w), then λ ← λ − step(dL_V/dλ)  (Algorithm 1).

    Each weight step takes the next training batch; a hyper-step takes the next training and the next
    validation batch. Both collections are cycled independently, with one ``iter()`` for each epoch.

    Args:
        problem: the two losses.
        weight_optimizer: a torch optimiser of the weights, or a function (problem, batch) -> None that
            updates them itself (an exact inner solver, L-BFGS).
        hyper_optimizer: a torch optimiser of the hyperparameters.
        method: the hypergradient; None means ``Implicit()``.
        weight_steps: weight steps before each hyper-step; ≥ 1.
        warmup_steps: weight steps before the first hyper-step.
        weight_scheduler: a learning-rate scheduler, stepped once a weight step.
        hyper_scheduler: the same, stepped once a hyper-step. A scheduler that needs a metric gets the
            last validation loss.
        clip_weights: the largest norm of the training gradient; a larger gradient is scaled down to it.
        clip_hypergradient: the same for the hypergradient.
        policy: what to do when a solve fails, a loss or a gradient is not finite, or the validation loss rises beyond
            ``max_rise``. "warn": warn once, but raise where something is not finite; "raise"; "skip": leave out the
            step; "return": go back to the last good state, with half the learning rate of the hyperparameters (of a
            failed solve: skip). The history has each ``event``.
        max_rise: the largest multiple of the median of the last ten validation losses; None for no limit.
        seed: the seed of dropout masks and other random draws in the hypergradients, one draw for each hyper-step.
        callbacks: functions that take the tuner, called after each hyper-step; see `bestresponse.callbacks`.
        watch: a third part of the data as a loader or a list, which no gradient sees: its loss is in the history, and
            ``tuner.watch`` keeps the state that is best on it; see `callbacks.Watch`.

    Attributes:
        history: a dict for each hyper-step: losses, the report of the solve, and a summary of the hyperparameters.
        hyper_step, weight_step: the numbers of steps made.

    Raises:
        ArgumentError: the weight optimiser has its own weight decay, lacks a weight or holds a
            hyperparameter; or an argument is out of its range.

    After each hyper-step, the tuner calls ``shrink_()`` on each module in ``hyper`` that has it, which pulls
    hyperparameters towards a common value, and then ``project_()``, which restores the bounds. Under a penalty with
    a kink at zero, such as ``WeightDecay(power=1)``, the steps of a torch optimiser run in
    `hyperparameters.orthant_wise`, so that weights reach zero and stay there. A function must do this itself.
    """

    def __init__(
        self,
        problem: Problem,
        weight_optimizer: Optimizer | WeightStep,
        hyper_optimizer: Optimizer,
        method: Method | None = None,
        *,
        weight_steps: int = 1,
        warmup_steps: int = 0,
        weight_scheduler: LRScheduler | None = None,
        hyper_scheduler: LRScheduler | None = None,
        clip_weights: float | None = None,
        clip_hypergradient: float | None = None,
        policy: Literal["warn", "raise", "skip", "return"] = "warn",
        max_rise: float | None = None,
        seed: int = 0,
        callbacks: Sequence[Callback] = (),
        watch: Iterable[Any] | Watch | None = None,
    ) -> None:
        method = Implicit() if method is None else method
        require_method(method)
        check_weight_optimizer(problem, weight_optimizer)
        check_hyper_optimizer(problem, hyper_optimizer)
        schedulers = {"weight_scheduler": weight_scheduler, "hyper_scheduler": hyper_scheduler}
        clips = {"clip_weights": clip_weights, "clip_hypergradient": clip_hypergradient}
        check_settings(weight_steps, warmup_steps, clips, max_rise, policy, schedulers)
        self.problem, self.method = problem, method
        self.weight_optimizer, self.hyper_optimizer = weight_optimizer, hyper_optimizer
        self.weight_scheduler, self.hyper_scheduler = weight_scheduler, hyper_scheduler
        self.weight_steps, self.warmup_steps = weight_steps, warmup_steps
        self.clip_weights, self.clip_hypergradient = clip_weights, clip_hypergradient
        self.policy, self.max_rise, self.seed = policy, max_rise, seed
        self.last_good = LastGood()
        self.watch = as_watch(watch)
        self.callbacks: list[Any] = [*filter(None, [self.watch]), *as_callbacks(callbacks)]
        self.history: list[dict[str, Any]] = []
        self.hyper_step = self.weight_step = self.last_hyper_step = 0
        self.stopped: str | None = None
        self.streams: dict[str, Stream] = {}
        self.resumed: dict[str, Any] | None = None
        self._clock = time.perf_counter()
        self._weight_steps = WeightSteps(problem, weight_optimizer)
        self._hyper_steps = HyperSteps(problem, hyper_optimizer)

    def fit(
        self, train_batches: Iterable[Any], val_batches: Iterable[Any], hyper_steps: int
    ) -> list[dict[str, Any]]:
        """Make ``hyper_steps`` more hyper-steps, and return the history.

        Args:
            train_batches: a loader or a list; each epoch starts a new iteration.
            val_batches: likewise, for the validation loss. A second call with the same collections continues
                where the first one stopped, even in the middle of a round.
            hyper_steps: the number of hyper-steps to make, unless a callback stops the run.

        Raises:
            ArgumentError: a collection is empty, or can be iterated only once (a generator).
            EvaluationError: a loss or hypergradient is no longer finite.
            SolveError: a solve failed, and the policy is "raise".
        """
        require_integer("hyper_steps", hyper_steps, 0)
        self.problem.check_intact()
        train, val = self._streams(train_batches=train_batches, val_batches=val_batches)
        self.stopped = None
        self.last_hyper_step = self.hyper_step + hyper_steps
        self._clock = time.perf_counter()
        with ExitStack() as stack:
            for callback in self.callbacks:
                if hasattr(callback, "close"):
                    stack.callback(callback.close)
            for _ in range(self.warmup_steps - self.weight_step if hyper_steps else 0):
                self._move_weights(next(train))
            while self.hyper_step < self.last_hyper_step and self.stopped is None:
                losses = [self._move_weights(next(train)) for _ in range(self.weight_steps)]
                self.step(losses, next(train), next(val))
        return self.history

    def step(self, losses: Sequence[Tensor], train_batch: Any, val_batch: Any) -> dict[str, Any]:
        """Make one hyper-step on these batches, and return its row; for training loops other than `fit`.

        ``losses`` are the training losses of the weight steps since the last one; see `integrations.Tuning`.
        """
        row = self._move_hyperparameters(losses, train_batch, val_batch)
        now, before = time.perf_counter(), self.history[-1]["seconds"] if self.history else 0.0
        row["seconds"], self._clock = before + now - self._clock, now
        row |= self._hyper_steps.summary.of(self.hyper_step, self.last_hyper_step)
        self.history.append(row)
        # Checkpoints come last, since other callbacks may change the row.
        for callback in sorted(self.callbacks, key=lambda c: isinstance(c, Checkpoint)):
            callback(self)
            self.stopped = next(filter(None, self.problem.group.gather(self.stopped)), None)
        return row

    def save(self, path: str | Path) -> None:
        """Write the run into one file, from which `load` continues as if the run had not stopped.

        The file holds weights, buffers, hyperparameters, optimisers, schedulers, the method's state, the history,
        the state of callbacks that have a ``state_dict`` (and of a weight optimiser that is a function, if it has
        one), the positions in both collections of batches, and the random state. The file is complete at any
        time: it is written next to its place and then moved there. During a run, `callbacks.Checkpoint`
        calls this.

        Raises:
            ArgumentError: the file cannot be written, a state holds something other than tensors and plain data, or a
                part has only one of ``state_dict`` and ``load_state_dict``.
        """
        checkpoint.save(self, path)

    def load(self, path: str | Path) -> None:
        """Restore everything that `save` wrote into a tuner that was made in the same way.

        The next `fit` continues in the middle of the round of batches, with the saved random state. Batches
        come in the same order from lists, from loaders with a ``state_dict``, and from a DataLoader (with the
        generators of its samplers and datasets; persistent workers cause a warning). Any other
        collection must have a fixed order, or draw its order at the start of a round, from a
        generator that is its attribute or from a global one. The round is replayed up to the saved position.

        If the file is damaged or missing and ``path.previous`` is there, that one is loaded, with a warning. After an
        error or an interrupt, the tuner is as it was before.

        Raises:
            ArgumentError: `save` did not write the file, it is damaged, or the model, hyperparameters, optimisers or
                schedulers differ from those of the saved run.
        """
        checkpoint.load(self, path)

    def _streams(self, **collections: Iterable[Any]) -> list[Stream]:
        """The batches of both collections; a collection that the last run used continues from there."""
        for name, batches in collections.items():
            if name not in self.streams or self.streams[name].batches is not batches:
                self.streams[name] = Stream(name, batches)
        if self.resumed is not None:
            for name, state in self.resumed["streams"].items():
                self.streams[name].find(state)
            random_state.restore(self.resumed["random"])
            self.resumed = None
        return [self.streams[name] for name in collections]

    def stop(self, reason: str) -> None:
        """Stop the run after the present hyper-step; for callbacks."""
        self.stopped = reason

    def retrain(
        self,
        batches: Iterable[Any],
        steps: int,
        initialise: Callable[[nn.Module], Any],
        optimizer: Optimizer | WeightStep | None = None,
    ) -> list[float]:
        """Train the weights from scratch under the tuned hyperparameters, which stay as they are.

        Args:
            batches: the data to train on, for example training and validation data together.
            steps: the number of weight steps.
            initialise: initialises the model's weights (and buffers) again, in place.
            optimizer: None uses the tuner's optimiser with its original settings (before a scheduler changed
                its rates) and empty state, and restores both afterwards. No scheduler runs.

        Returns:
            The training loss at each step.
        """
        require_integer("steps", steps, 0)
        require_function("initialise", initialise, "model")
        stream, problem = Stream("batches", batches), self.problem.whole
        if optimizer is not None:
            check_weight_optimizer(problem, optimizer)
        with torch.no_grad():
            initialise(problem.model)
        problem.check_intact()
        own = self._weight_steps.afresh(self.weight_optimizer)
        with own if optimizer is None else nullcontext(optimizer) as chosen:
            again = WeightSteps(problem, chosen)
            losses = [again.step(chosen, next(stream), self.clip_weights) for _ in range(steps)]
        return [float(loss) for loss in losses]

    def _move_weights(self, batch: Any) -> Tensor:
        skips = self.policy == "skip"
        loss = self._weight_steps.step(self.weight_optimizer, batch, self.clip_weights, skips)
        self.weight_step += 1
        step_scheduler(self.weight_scheduler, self.history[-1]["val_loss"] if self.history else None)
        return loss

    def _move_hyperparameters(
        self, losses: Sequence[Tensor], train_batch: Any, val_batch: Any
    ) -> dict[str, Any]:
        skips = self.policy == "skip"
        train_loss = float((torch.nanmean if skips else torch.mean)(torch.stack(list(losses))))
        number = self.hyper_step + 1
        seed = random.Random(f"{self.seed}/{number}").getrandbits(62)
        result, outcome, reason = tried = attempt(self, train_loss, train_batch, val_batch, seed)
        row = {
            "hyper_step": number,
            "weight_step": self.weight_step,
            "train_loss": train_loss,
            **result.row(),
            "stepped": tried.stepped,
        }
        self._weight_steps.tell(row)
        if outcome:
            add_event(row, outcome, reason)
        if outcome == "returned":
            self.last_good.put_back(self)
        elif tried.stepped:
            self.last_good.keep(self)
            self.hyper_optimizer.zero_grad(set_to_none=True)
            accumulate(self.problem, result)
            self._hyper_steps.step(self.hyper_optimizer, self.clip_hypergradient, row)
        self.hyper_step = number
        step_scheduler(self.hyper_scheduler, result.val_loss)
        return row
