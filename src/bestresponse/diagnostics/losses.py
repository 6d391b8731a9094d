"""Tests of the two losses: finite, repeatable, in the right mode, and means over the batch."""

from typing import Any

import torch
from torch import Tensor

from ..batches import Batches, mapped
from ..errors import named
from .findings import Bench

_NOISE = 1e-6


def examine(bench: Bench) -> None:
    """Run each loss three times from the same state, and on the batch repeated twice and three times."""
    bench.topic, problem = "losses", bench.problem
    with problem.undisturbed(bench.seed) as passes:
        train = [float(passes.train_loss(bench.train).detach()) for _ in range(3)]
        with passes.validating():
            val = [float(passes.val_loss(bench.val).detach()) for _ in range(3)]
            switched = [n or "the model" for n, m in problem.model.named_modules() if m.training]
    bench.val_loss = val[0]
    bench.add("ok", f"finite: train_loss {train[0]:.4g}, val_loss {val[0]:.4g}.")
    if switched and problem.val_mode == "eval":
        bench.add(
            "warning",
            f"val_loss switches {named(switched)} to training mode. Do not change the mode in the loss, or construct "
            'Problem with val_mode="as_is".',
        )
    bench.topic = "repeatability"
    _repeatable(bench, "train_loss", train)
    _repeatable(bench, "val_loss", val)
    bench.topic = "scale"
    _scale(bench, "train_loss", bench.train)
    _scale(bench, "val_loss", bench.val)


def _repeatable(bench: Bench, name: str, values: list[float]) -> None:
    if max(values) - min(values) <= _NOISE * max(map(abs, values)):
        bench.add("ok", f"{name} gives the same value in each pass.")
        return
    bench.add(
        "error",
        f"{name} must give the same value twice from the same weights and random state; got {values[0]:.6g} and "
        f"{values[1]:.6g}. Use torch's global generator, which each pass restores. Do not count passes or edit weights "
        "in the loss.",
    )


def _scale(bench: Bench, name: str, batch: Any) -> None:
    """Find out whether a loss is a sum over the batch: if so, each repetition of the batch adds the same amount."""
    try:
        with bench.problem.undisturbed(bench.seed) as passes, passes.eval_mode():
            batches = (batch, _repeated(batch, 2), _repeated(batch, 3))
            once, twice, thrice = (float(getattr(passes, name)(b).detach()) for b in batches)
    except Exception:  # the batch cannot be repeated, or the loss does not accept it
        bench.add("note", f"{name} may be a mean or a sum: it cannot be computed on the repeated batch.")
        return
    if twice - once > 1e-3 * abs(once) and abs(thrice - 2.0 * twice + once) < 1e-2 * (twice - once):
        bench.add(
            "error" if name == "train_loss" else "warning",
            f"{name} must be a mean over the batch; it looks like a sum: {once:.4g} for the batch, {twice:.4g} for the "
            "batch repeated twice. With a sum, a regulariser has less effect in a larger batch. Use the mean.",
        )


def _repeated(batch: Any, times: int) -> Any:
    """A batch of tensors of one length, concatenated with itself."""
    lengths: set[int] = set()

    def again(x: Tensor) -> Tensor:
        lengths.update(x.shape[:1])
        return torch.cat([x] * times) if x.ndim else x

    longer = None if isinstance(batch, Batches) else mapped(batch, again)
    if len(lengths) != 1:
        raise ValueError("a batch of tensors of one length is needed")
    return longer
