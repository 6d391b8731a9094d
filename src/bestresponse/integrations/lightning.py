"""Tuning in Lightning's Trainer."""

from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ..errors import ArgumentError, EvaluationError, require_package
from ..problem import Problem
from .late import LateTuning, numbers_of

require_package("lightning", "LightningTuning", "lightning")

import lightning.pytorch as L  # noqa: E402
from lightning.pytorch.plugins.precision import Precision  # noqa: E402


class LightningTuning(LateTuning, L.Callback):
    """A callback of Lightning's Trainer that makes hyper-steps while it trains.

        def training_step(self, batch, index):
            return self.problem.train_loss(self.net, self.decay, batch)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.problem.weights.values(), 1e-3, weight_decay=0.0)

        L.Trainer(callbacks=[LightningTuning(module.problem, hyper_optimizer, val_batches, weight_steps=10)])

    A hyper-step comes after every ``weight_steps`` steps of the optimiser. It runs in the Trainer's precision, on its
    device, and takes all batches of an accumulation. Its numbers go to the Trainer's loggers as ``hyper/val_loss`` and
    so on, which other callbacks can monitor. Its state is in the Trainer's checkpoints. Clipping, precision and
    schedulers of the weights are the Trainer's. `LightningTuning.history` has the rows.

    With manual optimisation it works in the same way. A module that decides itself when to make hyper-steps derives
    from `ManualTuning`.

    Args:
        problem: the two losses. Its model is best a submodule of the LightningModule; ``hyper`` may be one too.
        hyper_optimizer: a torch optimiser of the hyperparameters; ``configure_optimizers`` leaves it out.
        val_batches: a loader or a list of validation batches, taken in turn.
        method: the hypergradient; None means ``Implicit()``.
        settings: other arguments of `Tuner`: weight_steps, warmup_steps, hyper_scheduler, policy, seed, callbacks,
            watch.

    Raises:
        ArgumentError: when training begins: the Trainer's optimiser lacks a weight, holds a hyperparameter or has its
            own weight decay.
    """

    _steps_before = 0
    _step: AbstractContextManager[None] | None = None  # around the optimiser's step

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        steps = trainer.estimated_stepping_batches
        precision: Precision = trainer.precision_plugin
        if trainer.ckpt_path is not None:
            self.warn_without_state(str(trainer.ckpt_path))
        self.begin(
            _optimizer_of(self.problem, trainer.optimizers),
            int(steps) - trainer.global_step if steps != float("inf") else None,
            precision.forward_context,
            lambda batch: trainer.strategy.batch_to_device(precision.convert_input(batch), dataloader_idx=0),
        )
        self._steps_before = trainer.global_step

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer
    ) -> None:
        # Lightning calls this after the backward pass and before clipping.
        if self.tuning is not None and optimizer is self.tuning.tuner.weight_optimizer:
            self._step = self.steps_in_orthants()
            self._step.__enter__()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._leave_orthants()
        if isinstance(pl_module, ManualTuning) or self.tuning is None:
            return
        stepped, self._steps_before = trainer.global_step != self._steps_before, trainer.global_step
        loss = _loss_in(outputs)
        if loss is not None and pl_module.automatic_optimization:
            loss = loss * trainer.accumulate_grad_batches  # by which Lightning has divided it
        row = self.tuning.after_batch(batch, loss, stepped)
        if row is not None:
            self.report(trainer, pl_module, row)

    def report(self, trainer: L.Trainer, pl_module: L.LightningModule, row: dict[str, Any]) -> None:
        """Give the numbers of a hyper-step to the Trainer, and end it if a callback of the tuner asks for that."""
        numbers = numbers_of(row)
        for logger in trainer.loggers:
            logger.log_metrics(numbers, step=trainer.global_step)
        pl_module.log_dict(numbers, logger=False, on_step=True, on_epoch=False)
        assert self.tuning is not None
        if self.tuning.tuner.stopped is not None:
            trainer.should_stop = True

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.end()

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        self._leave_orthants()
        self.end()

    def _leave_orthants(self) -> None:
        step, self._step = self._step, None
        if step is not None:
            step.__exit__(None, None, None)


class ManualTuning:
    """Derive a LightningModule from this too, to make hyper-steps by hand in its ``training_step``.

        class Classifier(ManualTuning, L.LightningModule):
            automatic_optimization = False

            def training_step(self, batch, index):
                ...                      # steps of the weights
                if index % 10 == 9:
                    self.hyper_step(batch)

    The Trainer also gets a `LightningTuning`, which then makes no hyper-steps by itself.
    """

    trainer: Any

    def hyper_step(
        self, train_batch: Any, val_batch: Any = None, loss: Tensor | None = None
    ) -> dict[str, Any]:
        """Make a hyper-step, and return its row of the history.

        Args:
            train_batch: the batch for the curvature and the mixed term.
            val_batch: the batch for the validation loss; None takes the next one of the `LightningTuning`.
            loss: the training loss for the history; None measures it.

        Raises:
            EvaluationError: the Trainer has no `LightningTuning`, or a loss is not finite.
        """
        found = [c for c in self.trainer.callbacks if isinstance(c, LightningTuning)]
        if not found or found[0].tuning is None:
            raise EvaluationError(
                "hyper_step needs a LightningTuning in the callbacks of the Trainer, while it trains; got none. Pass "
                "L.Trainer(callbacks=[LightningTuning(...)])."
            )
        tuning: Any = found[0].tuning
        tuning.tuner.weight_step = self.trainer.global_step
        tuning.losses = [] if loss is None else [loss.detach()]
        row: dict[str, Any] = tuning.hyper_step(train_batch, val_batch)
        module: Any = self
        found[0].report(self.trainer, module, row)
        return row


def _optimizer_of(problem: Problem, optimizers: list[Optimizer]) -> Optimizer:
    """The Trainer's optimiser of the weights."""
    weights = {id(w) for w in problem.weights.values()}
    holding = [o for o in optimizers if any(id(p) in weights for g in o.param_groups for p in g["params"])]
    if len(holding) != 1:
        raise ArgumentError(
            f"configure_optimizers must return one optimiser with the weights of the problem; got {len(holding)}. "
            "Make it with problem.weights.values()."
        )
    return holding[0]


def _loss_in(outputs: Any) -> Tensor | None:
    """The training loss in the outputs of a training step."""
    loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
    return loss if isinstance(loss, Tensor) and loss.numel() == 1 else None
