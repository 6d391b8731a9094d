"""Losses of several folds in one batched computation."""

import copy
from collections.abc import Hashable, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..curvatures import Automatic, Hessian
from ..methods import Direct, Implicit, Method, Unrolled
from ..passes import graph, random_state
from ..passes.forms import second_derivatives
from ..passes.substitution import Loss, Losses, places

# A model, the module of hyperparameters, and a batch: the arguments of a loss.
Fold = tuple[nn.Module, nn.Module, Any]

# Forms that save less than batching does.
_SMALL_FORMS = ("cross_entropy", "gelu", "linear")
# By how much the values of losses that are computed batched and in turn may differ, in units of the precision.
_ROUNDING = 1e4


def runs_joined(method: Method) -> bool:
    """Whether a method gives each fold its own answer if it runs on the joined losses of all folds.

    Each fold has its own solver. Outside the solver, no number may depend on the weights of several folds.
    """
    if type(method) is Implicit:
        assert method.solver is not None
        wants, exact = method.solver.wants, type(method.curvature) in (Hessian, Automatic)
        return exact and wants.preconditioner is None and not wants.fresh_batches
    if type(method) is Unrolled:  # a setting that is a function may return a dict by weight
        settings = [getattr(x, f.name) for x in (method, method.rule) for f in fields(x)]
        return not any(callable(x) for x in settings)
    return type(method) is Direct


def alike(batches: Sequence[Any]) -> list[list[int]]:
    """The numbers of the folds, grouped by the shapes of their batches."""
    groups: dict[Hashable, list[int]] = {}
    for number, batch in enumerate(batches):
        groups.setdefault(_layout(batch, number), []).append(number)
    return list(groups.values())


def _layout(batch: Any, number: int) -> Hashable:
    """The properties that two batches must share to be stacked; ``number`` for a batch that can't be stacked."""
    leaves, spec = pytree.tree_flatten(batch)
    found: list[Hashable] = [str(spec)]
    for x in leaves:
        if type(x) in (Tensor, nn.Parameter) and x.layout == torch.strided:
            found.append((x.shape, x.dtype, x.device))
        elif x is None or isinstance(x, int | float | str):
            found.append((type(x), x))
        else:
            return number
    return tuple(found)


def together(loss: Loss, folds: Sequence[Fold], names: Sequence[str]) -> Tensor:
    """The losses of several folds, [K], by vmap over their stacked weights and batches of equal shapes."""
    models, hypers, batches = zip(*folds, strict=True)
    parameters = [dict(model.named_parameters()) for model in models]
    weights = {name: torch.stack([own[name] for own in parameters]) for name in names}
    flat, spec = zip(*map(pytree.tree_flatten, batches), strict=True)
    stacked = [torch.stack(xs) if isinstance(xs[0], Tensor) else xs[0] for xs in zip(*flat, strict=True)]
    root = Losses(models[0], hypers[0])
    where = places(root, {name: parameters[0][name] for name in names})

    def one(weights: dict[str, Tensor], leaves: list[Any]) -> Tensor:
        placed = {place: weights[name] for place, name in where.items()}
        batch = pytree.tree_unflatten(leaves, spec[0])
        value: Tensor = torch.func.functional_call(root, placed, (loss, batch), tie_weights=False)
        return value

    dims = [0 if isinstance(x, Tensor) else None for x in stacked]
    losses: Tensor = torch.func.vmap(one, in_dims=(0, dims), randomness="different")(weights, stacked)
    return losses


def runs_batched(loss: Loss, folds: Sequence[Fold], names: Sequence[str]) -> bool:
    """Whether a loss runs batched with its second derivatives, and has the values that it has in turn.

    Not if it uses a form of this library, such as that of convolutions: torch's own has slower second derivatives. And
    not if a module keeps something from a pass, such as a count or an activation. Copies of two folds show it.
    """
    before = random_state.snapshot()
    try:
        *models, hyper = copy.deepcopy((folds[0][0], folds[1][0], folds[0][1]))
        pair = [(model, hyper, batch) for model, (_, _, batch) in zip(models, folds, strict=False)]
        modules = (models[0], hyper)
        kept = [_numbers(m) for m in modules]
        with torch.enable_grad(), second_derivatives():
            losses = together(loss, pair, names)
            drawn = not random_state.same(before, random_state.snapshot())
            if [_numbers(m) for m in modules] != kept or any(map(_keeps_tensors_of_vmap, modules)):
                return False
            _differentiate_twice(losses.sum(), [p for m in models for p in m.parameters() if p.requires_grad])
            values = torch.stack([loss(*fold) for fold in pair])
            if any(map(_is_form, graph.nodes([values]))):
                return False
    except Exception:  # whatever vmap, the model or the loss raises: then the folds run in turn
        return False
    finally:
        random_state.restore(before)
    smallest = torch.finfo(values.dtype).tiny
    near = _ROUNDING * torch.finfo(values.dtype).eps * values.abs().clamp(min=smallest)
    return drawn or bool(((losses - values).abs() <= near).all())


def _differentiate_twice(loss: Tensor, weights: Sequence[Tensor]) -> None:
    """A product with the Hessian."""
    gradient = torch.autograd.grad(loss, weights, create_graph=True, allow_unused=True)
    curved = [g for g in gradient if g is not None and g.requires_grad]
    if curved:
        torch.autograd.grad(curved, weights, [torch.ones_like(g) for g in curved], allow_unused=True)


def _numbers(root: nn.Module) -> list[dict[str, Any]]:
    """The attributes of modules that are numbers or texts."""
    return [
        {name: x for name, x in vars(module).items() if isinstance(x, int | float | str)}
        for module in root.modules()
    ]


def _keeps_tensors_of_vmap(root: nn.Module) -> bool:
    """Whether an attribute of a module holds a tensor that vmap made."""
    kept = (x for module in root.modules() for x in pytree.tree_leaves(vars(module)))
    return any(isinstance(x, Tensor) and torch._C._functorch.is_batchedtensor(x) for x in kept)


def _is_form(node: Any) -> bool:
    """Whether a node of the graph belongs to a form of this library that matters for the time."""
    module = getattr(getattr(node, "_forward_cls", None), "__module__", "")
    return module.startswith(random_state.__package__) and not module.endswith(_SMALL_FORMS)
