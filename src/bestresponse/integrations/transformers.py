"""Tuning in the Trainer of Hugging Face's transformers."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..errors import ArgumentError, EvaluationError, require_package
from ..methods import Method
from ..problem import Problem
from .late import LateTuning, numbers_of

require_package("transformers", "TrainerTuning", "transformers")
require_package("accelerate", "TrainerTuning", "transformers")

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments  # noqa: E402
from transformers.trainer_utils import get_last_checkpoint  # noqa: E402

_FILE = "bestresponse.pt"


class TrainerTuning(LateTuning, TrainerCallback):
    """Makes hyper-steps while a Trainer of Hugging Face trains; it also replaces the Trainer's training loss.

        trainer = Trainer(model, arguments, train_dataset=data)
        tuning = TrainerTuning(trainer, problem, hyper_optimizer, val_batches, weight_steps=10)
        trainer.train()

    In training the Trainer's loss is ``problem.train_loss``; evaluation keeps the Trainer's own. A hyper-step comes
    after every ``weight_steps`` steps of the optimiser, and takes all batches of an accumulation. Whenever the
    Trainer logs, it also logs the last hyper-step, as ``hyper/val_loss`` and so on, without the hyperparameters. Each
    checkpoint of the Trainer gets the file ``bestresponse.pt`` too, from which
    ``trainer.train(resume_from_checkpoint=...)`` continues. Clipping, precision and schedulers of the weights are the
    Trainer's. `TrainerTuning.history` has the rows.

    Args:
        trainer: the Trainer, before it trains; the tuning adds itself to its callbacks.
        problem: the two losses; its batches are those of the Trainer, dicts of tensors.
        hyper_optimizer: a torch optimiser of the hyperparameters.
        val_batches: a loader or a list of validation batches, taken in turn, such as
            ``DataLoader(data, batch_size, collate_fn=trainer.data_collator)``.
        method: the hypergradient; None means ``Implicit()``.
        settings: other arguments of `Tuner`: weight_steps, warmup_steps, hyper_scheduler, policy, seed, callbacks,
            watch.

    Raises:
        ArgumentError: the Trainer changes the training loss itself, or trains copies of the model on several devices;
            when training begins: its optimiser lacks a weight, holds a hyperparameter or has its own weight decay.
    """

    def __init__(
        self,
        trainer: Trainer,
        problem: Problem,
        hyper_optimizer: Optimizer,
        val_batches: Iterable[Any],
        method: Method | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(problem, hyper_optimizer, val_batches, method, **settings)
        _check_trainer(trainer)
        self._trainer = trainer
        self._evaluation_loss, self._train = trainer.compute_loss, trainer.train
        self._seen: list[tuple[Any, Tensor]] = []
        self._unlogged: dict[str, Any] | None = None
        self._checkpoint: str | None = None
        trainer.compute_loss, trainer.train = self._loss, self._train_and_end
        # Else the Trainer takes the loss for a sum over the accumulated batches, and does not divide it.
        trainer.model_accepts_loss_kwargs = trainer.loss_is_scaled_for_ga = False
        trainer.add_callback(self)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        optimizer = kwargs["optimizer"]
        if self._checkpoint is not None:
            self.load_state_dict(_read(self._checkpoint))
        self.begin(
            getattr(optimizer, "optimizer", optimizer),  # accelerate wraps it
            state.max_steps - state.global_step,
            self._trainer.compute_loss_context_manager,
            self._trainer._prepare_inputs,
        )
        if self.weight_steps.holds_weights_at_zero and args.max_grad_norm:
            raise ArgumentError(
                "under a penalty with a kink at zero, such as WeightDecay(power=1), the Trainer must not clip "
                "gradients, since it clips before the penalty's part at zero is known; got "
                f"max_grad_norm={args.max_grad_norm}. Set max_grad_norm=0."
            )

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._step = self.steps_in_orthants()
        self._step.__enter__()

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._step.__exit__(None, None, None)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        assert self.tuning is not None
        seen, self._seen = self._seen, []
        for number, (batch, loss) in enumerate(seen, 1):
            row = self.tuning.after_batch(batch, loss, stepped=number == len(seen))
            self._unlogged = self._unlogged if row is None else row
        self._log(control)
        if self.tuning.tuner.stopped is not None:
            control.should_training_stop = True

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._log(control)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        folder = Path(args.output_dir or ".") / f"checkpoint-{state.global_step}"
        if folder.is_dir():
            torch.save(self.state_dict(), folder / _FILE)

    def _train_and_end(
        self, resume_from_checkpoint: str | bool | None = None, *others: Any, **more: Any
    ) -> Any:
        """The Trainer's ``train``; afterwards the tuning is off, also after an error."""
        folder = resume_from_checkpoint
        self._checkpoint = (
            get_last_checkpoint(self._trainer.args.output_dir) if folder is True else folder or None
        )
        try:
            return self._train(folder, *others, **more)
        finally:
            self.end()

    def _loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The problem's training loss in training, the Trainer's own in evaluation."""
        if not (self._trainer.is_in_train and model.training):
            return self._evaluation_loss(model, inputs, return_outputs=return_outputs)
        loss = self.problem.train_loss(self.problem.model, self.problem.hyper, inputs)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            got = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise EvaluationError(
                f"train_loss must return a scalar tensor; got {got}. Return the mean, or outputs.loss."
            )
        self._seen.append((inputs, loss.detach()))
        return (loss, None) if return_outputs else loss

    def _log(self, control: TrainerControl) -> None:
        """Log the last hyper-step where the Trainer logs."""
        if control.should_log and self._unlogged is not None:
            # Without the summary of the hyperparameters: the Trainer prints what it logs.
            row = {k: v for k, v in self._unlogged.items() if k != "hyperparameters"}
            self._trainer.log(numbers_of(row))
            self._unlogged, control.should_log = None, True  # which `log` has unset


def _check_trainer(trainer: object) -> None:
    if not isinstance(trainer, Trainer):
        raise ArgumentError(
            f"TrainerTuning.trainer must be a transformers.Trainer; got {type(trainer).__name__}."
        )
    if any(isinstance(callback, TrainerTuning) for callback in trainer.callback_handler.callbacks):
        raise ArgumentError("a Trainer takes one TrainerTuning; got a second one. Make a new Trainer.")
    own = {
        "compute_loss_func": trainer.compute_loss_func,
        "label_smoothing_factor": trainer.args.label_smoothing_factor,
        "a compute_loss of its own": type(trainer).compute_loss is not Trainer.compute_loss,
    }
    if changed := [name for name, value in own.items() if value]:
        raise ArgumentError(
            f"the Trainer must leave the training loss to problem.train_loss; got {' and '.join(changed)}. Put it into "
            "train_loss, where it is differentiated."
        )
    if trainer.args.load_best_model_at_end:
        raise ArgumentError(
            "the Trainer must keep weights and hyperparameters together; got load_best_model_at_end=True, which puts "
            "back the weights alone. Leave it out, and pass watch=... or callbacks=[callbacks.KeepBest()] here, whose "
            "restore puts back both."
        )
    if trainer.args.n_gpu > 1:
        raise ArgumentError(
            f"the Trainer must train on one device; got {trainer.args.n_gpu}, which get copies of the model. Set "
            "CUDA_VISIBLE_DEVICES to one of them."
        )


def _read(folder: str | os.PathLike[str]) -> Any:
    """The state of the tuning in a checkpoint of the Trainer."""
    path = Path(folder) / _FILE
    if not path.is_file():
        raise ArgumentError(
            f"a checkpoint to resume from must have been written with a TrainerTuning; {str(folder)!r} has no {_FILE}. "
            "Resume from another one, or train anew."
        )
    return torch.load(path, map_location="cpu", weights_only=True)
