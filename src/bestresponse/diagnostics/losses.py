"""Checks of the two losses: what they depend on, and whether they are functions of it."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .. import _tree
from ..errors import named
from ..passes import graph
from ..runs.requirements import check_weight_optimizer
from ..verification.twin import tensors_of
from .findings import Bench, repeated

_NOISE = 1e-6


def examine(bench: Bench, weight_optimizer: Any = None) -> None:
    """Look at values, dependence, repeatability, scale and captured parameters."""
    with bench.errors_told("losses"):
        _dependence(bench)
    if bench.failed("losses"):
        return
    with bench.errors_told("repeatability"):
        _repeatability(bench)
    for name, batch in (("train_loss", bench.train), ("val_loss", bench.val)):
        _scale(bench, name, batch)
    _captured(bench)
    if weight_optimizer is not None:
        with bench.errors_told("weight optimiser"):
            check_weight_optimizer(bench.problem, weight_optimizer)
            bench.say(
                "ok", "weight optimiser", "it holds every weight, no hyperparameter, and no decay of its own."
            )


def _dependence(bench: Bench) -> None:
    problem = bench.problem
    hyper = problem.hyperparameters
    with problem.undisturbed(bench.seed) as passes:
        train = passes.train_loss(bench.train)
        of_train = graph.leaves(train)
        val = passes.val_loss(bench.val)
        of_val = graph.leaves(val)
    with problem.undisturbed(bench.seed) as passes, passes.eval_mode():
        if problem.val_mode == "eval":
            problem.val_loss(problem.model, problem.hyper, bench.val)
        switched = [n or "the model" for n, m in problem.model.named_modules() if m.training]
    if switched and problem.val_mode == "eval":
        bench.say(
            "warning",
            "losses",
            f"val_loss switches {named(switched)} to training mode, with masks and running statistics of training. "
            'Leave the mode to Problem, or make it with val_mode="as_is".',
        )
    bench.say("ok", "losses", f"finite: train_loss {float(train):.4g}, val_loss {float(val):.4g}.")
    if not any(id(w) in of_val for w in problem.weights.values()):
        bench.say(
            "error",
            "losses",
            "val_loss must depend on a weight; it reaches none, so that nothing comes through the weights. Compute "
            "it from the model that is passed in; or use Direct().",
        )
    unreached = [n for n, w in problem.weights.items() if id(w) not in of_train]
    if len(unreached) == len(problem.weights):
        bench.say(
            "error",
            "losses",
            "train_loss must depend on the weights; it reaches none of them. Compute it from the model that is "
            "passed in, without detach() or no_grad().",
        )
    elif unreached:
        bench.say(
            "warning",
            "losses",
            f"train_loss does not reach the weights {named(unreached)}: they have no best response. Freeze "
            "them, or look for a branch that is not taken.",
        )
    lost = [n for n, p in hyper.items() if id(p) not in of_train | of_val]
    if lost:
        bench.say(
            "error",
            "hyperparameters",
            f"{named(lost)} reach neither loss, so that their hypergradient would be zero. Use them in a loss "
            "through the argument hyper, or freeze them with requires_grad_(False)."
            + (
                ""
                if problem.model.training
                else " The model is in eval mode, which turns dropout off: model.train()."
            ),
        )
    direct = [n for n, p in hyper.items() if id(p) in of_val]
    if not direct:
        text = (
            "the game is pure-response: val_loss does not read them, so that all comes through the weights."
        )
    elif not any(id(p) in of_train for p in hyper.values()):
        bench.direct_only = True
        text = "train_loss reads none of them: all of the hypergradient is direct, and Direct() gives it."
    else:
        text = f"val_loss itself reads {named(direct)}: the hypergradient has a direct part."
    bench.say("note", "hyperparameters", text)


def _repeatability(bench: Bench) -> None:
    """Run each loss twice from the same state, and see that no pass edits the weights."""
    problem = bench.problem
    tensors = tensors_of(problem)
    kept = _tree.copy(tensors)
    try:
        for name, batch in (("train_loss", bench.train), ("val_loss", bench.val)):
            with problem.undisturbed(bench.seed) as passes:
                values = [float(getattr(passes, name)(batch).detach()) for _ in range(3)]
            spread = max(values) - min(values)
            if spread > _NOISE * max(map(abs, values)):
                bench.say(
                    "error",
                    "repeatability",
                    f"{name} must give the same value twice from the same weights and random state; got "
                    f"{values[0]:.6g} and {values[1]:.6g}. A mask or augmentation is drawn from a generator of "
                    "its own, or something is counted: draw from torch's global generator, which each pass puts back.",
                )
        edited = [n for n, x in tensors.items() if not torch.equal(x.detach(), kept[n])]
        if edited:
            bench.say(
                "error",
                "repeatability",
                f"a pass must leave weights and hyperparameters as they are; one edits {named(edited)}, which "
                "autograd does not see. Compute the changed values in the forward pass, or constrain them after "
                "the step.",
            )
    finally:
        restore(tensors, kept)
    if not bench.failed("repeatability"):
        bench.say(
            "ok", "repeatability", "both losses are functions of weights and random state: passes agree."
        )


def restore(tensors: Mapping[str, Tensor], kept: Mapping[str, Tensor]) -> None:
    """Put values back where they have changed; elsewhere a write would only spoil the caller's pending graphs."""
    changed = {n: x for n, x in tensors.items() if not torch.equal(x.detach(), kept[n])}
    _tree.write_(changed, kept)


def _scale(bench: Bench, name: str, batch: Any) -> None:
    """Whether a loss is a sum over the batch: that of the batch twice and three times is larger by equal steps."""
    try:
        batches = [batch, repeated(batch, 2), repeated(batch, 3)]
        with bench.problem.undisturbed(bench.seed) as passes, passes.eval_mode():
            values = [] if batches[1] is None else [float(getattr(passes, name)(b).detach()) for b in batches]
    except Exception:  # a loss that takes no such batch
        values = []
    if not values:
        bench.say(
            "note", "scale", f"whether {name} is a mean was not looked at: no batch of tensors of one length."
        )
        return
    first, second = values[1] - values[0], values[2] - values[1]
    if first > 1e-3 * abs(values[0]) and abs(second - first) < 1e-2 * first:
        bench.say(
            "error" if name == "train_loss" else "warning",
            "scale",
            f"{name} must be a mean over the batch; it looks like a sum: {values[0]:.4g} for the batch, "
            f"{values[1]:.4g} for the batch twice. A regulariser then weighs less in a larger batch. Use the mean.",
        )


def _captured(bench: Bench) -> None:
    """Whether the losses read weights past their argument model, as methods that put others in their place can't."""
    problem = bench.problem
    copies = {n: w.detach().clone().requires_grad_() for n, w in problem.weights.items()}
    for name, batch in (("train_loss", bench.train), ("val_loss", bench.val)):
        try:
            with problem.undisturbed(bench.seed) as passes:
                getattr(passes, name)(batch, copies)
        except Exception as error:  # theirs too: some losses take no other tensors
            bench.say(
                "warning",
                "captured parameters",
                f"{error} Implicit, Penalty and SAMA work as it is; Unrolled, Forward and hypernetworks do not.",
            )
            return
