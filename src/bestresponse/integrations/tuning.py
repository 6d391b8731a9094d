"""Hyper-steps of a `Tuner` inside a training loop other than its own."""

import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from ..batches import Batches
from ..errors import ArgumentError, BestResponseWarning, EvaluationError
from ..passes import random_state
from ..runs.streams import Stream
from ..tuner import Tuner
from .gradients import KeepEmpty
from .state import load_state, state_of

Context = Callable[[], AbstractContextManager[Any]]
# A session of so many weight steps without a hyper-step is a mistake.
_SEVERAL = 10


class Tuning:
    """Hyper-steps inside a training loop of your own, or of another library.

        with tuning:
            for batch in loader:
                ...                              # the loop's own step of the weights
                tuning.after_batch(batch, loss)  # makes a hyper-step when one is due

    A hyper-step comes after every ``tuner.weight_steps`` weight steps, and first after ``tuner.warmup_steps`` more. Its
    training batch is the last one, or all batches whose gradients the last weight step accumulated. Within ``with``,
    the ``.grad`` of the hyperparameters stays empty of ∂L_T/∂λ, which a plain ``loss.backward()`` would put there; so
    gradient clipping sees the weights alone. At the end the callbacks of the tuner are closed.

    It has a ``state_dict`` with the hyperparameters, their optimiser and scheduler, the memory of the method, the
    callbacks, the history and the position in ``val_batches``. The loop saves weights and their optimiser itself.

    Args:
        tuner: its weight optimiser is that of the loop. The loop clips gradients and steps the schedulers of the
            weights, so ``clip_weights`` and ``weight_scheduler`` must be None.
        val_batches: a loader or a list of validation batches, taken in turn.
        steps: the weight steps that the loop will make, for callbacks that show progress or measure the end; None if
            unknown.
        context: makes a context in which the losses run during a hyper-step, such as the loop's autocast.
        place: moves a batch to the loop's device; None leaves batches where they are.

    Raises:
        ArgumentError: ``tuner`` has clip_weights or a weight_scheduler; or ``val_batches`` is not a collection that can
            be iterated repeatedly, or was prepared by accelerate.
        EvaluationError: when it begins: the loop runs in several processes.
    """

    def __init__(
        self,
        tuner: Tuner,
        val_batches: Iterable[Any],
        steps: int | None = None,
        context: Context = nullcontext,
        place: Callable[[Any], Any] | None = None,
    ) -> None:
        for name in ("clip_weights", "weight_scheduler"):
            if getattr(tuner, name) is not None:
                raise ArgumentError(
                    f"the tuner must leave {name} out, since the training loop does it; got {getattr(tuner, name)!r}. "
                    "Use the loop's own setting."
                )
        if any(kind.__module__.startswith("accelerate.") for kind in type(val_batches).__mro__):
            raise ArgumentError(
                "val_batches must not be prepared by accelerate, whose gradient accumulation would follow this loader "
                "instead of the training loader; got a prepared one. Pass the plain loader. (With Tuning, also "
                "place=lambda batch: accelerate.utils.send_to_device(batch, accelerator.device).)"
            )
        self.tuner, self.context, self.place = tuner, context, place
        self.val_batches = Stream("val_batches", val_batches)
        self.losses: list[Tensor] = []
        self._batches: list[Any] = []
        self._gradients = KeepEmpty(tuner.problem)
        self.expect(steps)

    def expect(self, steps: int | None) -> None:
        """Set the number of weight steps that the loop still makes."""
        tuner = self.tuner
        made = tuner.weight_step - tuner.warmup_steps
        tuner.last_hyper_step = 0 if steps is None else max(0, (made + steps) // tuner.weight_steps)

    def __enter__(self) -> Self:
        _refuse_several_processes()
        self.tuner.stopped = None
        self._began = self.tuner.hyper_step, self.tuner.weight_step
        self._gradients.begin()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        self._gradients.end()
        tuner = self.tuner
        none, steps = tuner.hyper_step == self._began[0], tuner.weight_step - self._began[1]
        if kind is None and none and steps >= _SEVERAL and tuner.stopped is None:
            warnings.warn(
                f"no hyper-step was made in {steps} weight steps; one comes after every {tuner.weight_steps}, beyond "
                f"the first {tuner.warmup_steps}. Lower weight_steps or warmup_steps.",
                BestResponseWarning,
                stacklevel=3,
            )
        with ExitStack() as stack:
            for callback in self.tuner.callbacks:
                if hasattr(callback, "close"):
                    stack.callback(callback.close)

    def after_batch(
        self, batch: Any, loss: Tensor | float | None = None, stepped: bool = True
    ) -> dict[str, Any] | None:
        """Count a training batch of the loop, and make a hyper-step if one is due.

        Args:
            batch: the batch, as ``train_loss`` takes it.
            loss: its training loss, for the history; None measures it at the hyper-step.
            stepped: whether the weights moved after this batch; False while gradients accumulate.

        Returns:
            The hyper-step's row of the history; None if none was due, or a callback has stopped the run.
        """
        tuner = self.tuner
        self._batches.append(batch)
        if loss is not None:
            self.losses.append(torch.as_tensor(loss).detach().reshape(()))
        if not stepped:
            return None
        tuner.weight_step += 1
        batches, self._batches = self._batches, []
        made = tuner.weight_step - tuner.warmup_steps
        if made <= 0:
            self.losses = []
        if made <= 0 or made % tuner.weight_steps or tuner.stopped is not None:
            return None
        # Accumulated gradients are the mean over the batches, whatever their sizes.
        return self.hyper_step(batches[0] if len(batches) == 1 else Batches(batches, [1] * len(batches)))

    def hyper_step(self, train_batch: Any, val_batch: Any = None) -> dict[str, Any]:
        """Make a hyper-step now, and return its row of the history; without a validation batch it takes the next one.

        Raises:
            EvaluationError: a loss or the hypergradient is not finite.
        """
        self._gradients.require_reached()
        tuner, problem = self.tuner, self.tuner.problem
        val_batch = self._placed(next(self.val_batches) if val_batch is None else val_batch)
        with self._within_the_loop():
            losses, self.losses = self.losses, []
            if not losses:
                with problem.undisturbed(twice=False) as passes:
                    losses = [passes.train_loss(train_batch).detach()]
            return tuner.step(losses, train_batch, val_batch)

    def _placed(self, batch: Any) -> Any:
        return batch if self.place is None else self.place(batch)

    @contextmanager
    def _within_the_loop(self) -> Iterator[None]:
        """The problem's losses run in the loop's context and on its device; nothing else runs in autocast."""
        problem = self.tuner.problem
        losses = problem.train_loss, problem.val_loss
        device = next(iter(problem.weights.values())).device.type

        def here(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
            @functools.wraps(loss)  # messages about the loss look at the one that it wraps
            def run(model: Any, hyper: Any, batch: Any) -> Tensor:
                with self.context():
                    return loss(model, hyper, self._placed(batch))

            return run

        problem.train_loss, problem.val_loss = map(here, losses)
        try:
            with torch.autocast(device, enabled=False):
                yield
        finally:
            problem.train_loss, problem.val_loss = losses

    def state_dict(self) -> dict[str, Any]:
        """Everything that tuning needs to continue, as tensors and plain data."""
        losses = [float(x) for x in self.losses]
        return state_of(self.tuner, val_batches=self.val_batches.state(), losses=losses)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict` of a tuning that was made in the same way.

        Raises:
            ArgumentError: it was made in another way, or its validation batches are other ones.
        """
        load_state(self.tuner, state)
        self.losses = [torch.tensor(x) for x in state["losses"]]
        kept = random_state.snapshot()  # which the loop restores itself, if it does
        self.val_batches.find(state["val_batches"])
        random_state.restore(kept)


def _refuse_several_processes() -> None:
    distributed = torch.distributed
    if (
        distributed.is_available()
        and distributed.is_initialized()
        and (size := distributed.get_world_size()) > 1
    ):
        raise EvaluationError(
            f"the training loop must run in one process, since each would tune its own hyperparameters; got {size} "
            "processes. Use one, or Tuner.fit, which tunes over several (docs/several-processes.md)."
        )
