"""Weights that a kink of the training loss holds: they stay if λ moves a little, and are left out of the system.

A training loss with a term Σ r_i |w_i| has two slopes at w_i = 0. With the gradient g of all other terms, w_i = 0 is a
minimum, and stays one when λ moves, if |g_i| ≤ r_i. For a term r ‖w_G‖ of a group G of weights the condition is
‖S(g_G)‖ ≤ r, with S(g)_i = sign(g_i) max(|g_i| − r_i, 0) for the terms of single weights in the group. Torch takes the
derivatives of |w| and ‖w‖ at zero as zero, so its gradient of the whole loss is g there. The rates r are the
gradients with respect to the outputs of the nodes in the loss's graph that compute absolute values and norms of
weights.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from .. import _tree
from .._tree import Tree
from ..hyperparameters.orthant import fitting, joint_rates
from ..passes import graph
from ..problem import Problem
from .squares_at_zero import refuse_squares, zeros_of

# Functions that move each entry of their arguments to one other place.
_VIEWS = (
    "Alias|AsStrided|Cat|Clone|Permute|ReshapeAlias|Select|Slice|Split|SplitWithSizes|Squeeze|Stack|T|ToCopy|Transpose|"
    "Unbind|UnsafeView|Unsqueeze|View"
)
# Functions where each entry of the result is at most one entry of an argument, possibly with its sign changed.
_ENTRIES = (
    f"{_VIEWS}|ConstantPadNd|Diagonal|Embedding|Expand|Flip|Gather|Index|IndexSelect|MaskedFill|MaskedSelect|Neg|"
    "Repeat|Roll|Tril|Triu"
)
_SCALINGS, _SHIFTS = ("Mul", "Div"), ("Add", "Sub", "Rsub")
# The share by which the rates of a loss and of its penalties may differ.
_ROUNDING = 1e-2


@dataclass
class Group:
    """Groups of weights whose norms are terms of the loss.

    Attributes:
        members: the number of its group for each weight, by name; 0 for those in none of these groups.
        rates: the rate of its group for each weight, likewise.
    """

    members: Tree
    rates: Tree


@dataclass
class Kinks:
    """The kinks of a loss where weights lie.

    Attributes:
        gradient: g, for the tensors with such weights.
        rates: r, the rates of single weights, zero for weights on no kink.
        groups: the kinks of norms.
    """

    gradient: Tree = field(default_factory=dict)
    rates: Tree = field(default_factory=dict)
    groups: list[Group] = field(default_factory=list)

    def add(self, group: Group) -> None:
        """Add a group; rates of equal groups add up."""
        for number, own in enumerate(self.groups):
            same = own.members.keys() == group.members.keys()
            if same and all(torch.equal(m, group.members[n]) for n, m in own.members.items()):
                rates = {n: r + group.rates[n] for n, r in own.rates.items()}
                self.groups[number] = Group(own.members, rates)
                return
        self.groups.append(group)

    def held(self) -> dict[str, Tensor]:
        """The weights that do not respond: masks by name, for the tensors with such weights."""
        beyond = {n: (g.abs() - self.rates[n]).clamp(min=0) for n, g in self.gradient.items()}
        masks = {n: (beyond[n] == 0) & (r > 0) for n, r in self.rates.items()}
        for group in self.groups:
            largest = max(int(m.max()) for m in group.members.values())
            squares: Any = 0
            for name, m in group.members.items():
                of_tensor = beyond[name].new_zeros(largest + 1)
                squares = squares + of_tensor.index_add_(0, m.reshape(-1), beyond[name].square().reshape(-1))
            for name, m in group.members.items():
                of_group = group.rates[name]
                masks[name] |= (m > 0) & (of_group > 0) & (squares.sqrt()[m] <= of_group)
        return {n: mask for n, mask in masks.items() if bool(mask.any())}


def mean(parts: Iterable[tuple[Kinks, float]]) -> Kinks:
    """The kinks of the weighted mean of several losses."""
    total = Kinks()
    for part, weight in parts:
        for into, more in ((total.gradient, part.gradient), (total.rates, part.rates)):
            for name, x in more.items():
                into[name] = into[name] + weight * x if name in into else weight * x
        for group in part.groups:
            total.add(Group(group.members, {n: weight * r for n, r in group.rates.items()}))
    return total


def of_loss(problem: Problem, loss: Tensor, nodes: Sequence[Any] | None = None) -> Kinks:
    """The kinks of a training loss where weights lie, from its graph, which is kept, and whose nodes may be known.

    If there are any, this costs one gradient. It warns if a combination of weights lies on a kink, and raises where
    autograd loses the curvature of a smooth function of an absolute value.
    """
    nodes = list(graph.nodes([loss])) if nodes is None else nodes
    found = [kink for node in nodes if (kink := _kink(problem, node)) is not None]
    zeros = [(node, zero) for node in nodes if (zero := zeros_of(node)) is not None]
    if not (found or zeros):
        return Kinks()
    names = sorted({name for kink in found for name in kink.names})
    weights = [problem.weights[n] for n in names]
    edges: list[Any] = [
        GradientEdge(n, 0) for n in (*(kink.node for kink in found), *(node for node, _ in zeros))
    ]
    slopes = torch.autograd.grad(loss, [*weights, *edges], retain_graph=True, allow_unused=True)
    last = len(slopes) - len(zeros)
    refuse_squares(loss, zeros, slopes[last:])
    kinks = Kinks(rates={n: torch.zeros_like(w) for n, w in zip(names, weights, strict=True)})
    for name, w, g in zip(names, weights, slopes, strict=False):
        kinks.gradient[name] = torch.zeros_like(w) if g is None else _tree.dense(g)
    for kink, slope in zip(found, slopes[len(names) : last], strict=True):
        if slope is None:
            continue
        rates = {n: x.abs() for n, x in kink.pulled(problem, slope.clamp(min=0)).items()}
        if kink.groups is None:
            for name, rate in rates.items():
                kinks.rates[name] += rate
        else:
            members = {n: x.round().long() for n, x in kink.pulled(problem, kink.groups).items()}
            kinks.add(Group(members, rates))
    _compare(problem, kinks)
    return kinks


@dataclass
class _Kink:
    """An absolute value or norm of weights, at zero.

    Attributes:
        node: its node in the graph.
        standing: where its argument is at zero.
        names: the weights in the argument.
        groups: for a norm, the numbers of the groups at zero, from 1 on, in the shape of its value; else None.
    """

    node: Any
    standing: Tensor
    names: set[str]
    groups: Tensor | None

    def pulled(self, problem: Problem, of_value: Tensor) -> Tree:
        """The change of the weights' entries for a change of the value, where the argument is at zero."""
        following, number = self.node.next_functions[0]
        of_argument = _spread(self.node, of_value, self.standing) * self.standing
        if hasattr(following, "variable"):
            return dict.fromkeys(self.names, of_argument)
        pulled = torch.autograd.grad(
            [GradientEdge(following, number)],
            [problem.weights[n] for n in self.names],
            [of_argument],
            retain_graph=True,
            allow_unused=True,
        )
        dense = [None if x is None else _tree.dense(x) for x in pulled]
        return {n: x for n, x in zip(self.names, dense, strict=True) if x is not None}


def _kink(problem: Problem, node: Any) -> _Kink | None:
    """The kink of a node, if it has one where weights lie."""
    kind = _kind(node)
    order = node._saved_ord if kind == "LinalgVectorNorm" else 1
    if kind not in ("Abs", "LinalgVectorNorm") or order not in (1, 2) or node.next_functions[0][0] is None:
        return None
    path = _path(node.next_functions[0][0], {id(w): n for n, w in problem.weights.items()})
    if path is None or (order == 2 and not path.views):
        return None
    standing, groups = node._saved_self.detach() == 0, None
    if order == 2:
        at_zero = node._saved_result.detach() == 0
        groups = at_zero.reshape(-1).cumsum(0).view(at_zero.shape) * at_zero
        groups = groups.to(node._saved_self.dtype)
        standing = _spread(node, at_zero, standing)
    if not bool(standing.any()):
        return None
    if path.combined:
        what = "abs" if kind == "Abs" else "a norm"
        problem.warn_once(
            ("kink", *sorted(path.names)),
            f"train_loss takes {what} of sums or differences of the weights {sorted(path.names)[:5]} where they are "
            "exactly zero: their hypergradient is that of a smooth loss, which is wrong if the kink holds them "
            "there. Make each combination a separate weight, and take abs of that weight.",
        )
        return None
    return _Kink(node, standing, path.names, groups)


@dataclass
class _Path:
    """The operations between a node and the weights: only views, or more, such as combinations of weights."""

    names: set[str] = field(default_factory=set)
    views: bool = True
    combined: bool = False


def _path(start: Any, weights: Mapping[int, str]) -> _Path | None:
    """The path from the argument of an absolute value to the weights; None unless the argument is their entries."""
    path, pending, seen = _Path(), [start], set()
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            path.names |= {weights[id(node.variable)]} if id(node.variable) in weights else set()
            continue
        kind, following = _kind(node), [f for f, _ in node.next_functions if f is not None]
        if kind in _SCALINGS:
            following = [f for f in following if _reaches(f, weights)]
            if len(following) > 1:
                return None
        elif kind in _SHIFTS:
            path.combined = path.combined or len(following) > 1
            following = [f for f in following if _reaches(f, weights)]
        elif not re.fullmatch(_ENTRIES, kind):
            return None
        path.views = path.views and re.fullmatch(_VIEWS, kind) is not None
        pending += following
    return path if path.names else None


def _reaches(start: Any, weights: Mapping[int, str]) -> bool:
    """Whether a node depends on a weight."""
    pending, seen = [start], {start}
    while pending:
        node = pending.pop()
        if hasattr(node, "variable") and id(node.variable) in weights:
            return True
        following = {f for f, _ in node.next_functions if f is not None} - seen
        seen |= following
        pending += following
    return False


def _kind(node: Any) -> str:
    """The name of an operation: ``Abs`` of ``AbsBackward0``."""
    return re.sub(r"Backward\d*$", "", str(node.name()))


def _spread(node: Any, value: Tensor, like: Tensor) -> Tensor:
    """The value of a norm for each entry of its argument; that of abs as it is."""
    dims = node._saved_dim if _kind(node) == "LinalgVectorNorm" else None
    if dims and not node._saved_keepdim:
        # Dimensions from the end appear as unsigned numbers.
        for d in sorted((d - 2**64 if d >= 2**63 else d) % like.ndim for d in dims):
            value = value.unsqueeze(d)
    return value.expand_as(like)


def _compare(problem: Problem, kinks: Kinks) -> None:
    """Warn if penalties enter the training loss with another factor than `orthant_wise` assumes."""
    declared = joint_rates(problem.model, fitting(problem.hyper, problem.model)[0])
    other = [
        name
        for name, rate in declared.items()
        if name in kinks.rates
        and bool((((kinks.rates[name] - rate).abs() > _ROUNDING * rate) & (kinks.rates[name] > 0)).any())
    ]
    if other:
        problem.warn_once(
            "rates at zero",
            f"train_loss must add a penalty with a kink, such as WeightDecay(power=1), once and with a factor of one; "
            f"the slopes at zero of {other[:5]} differ from the penalty's rates. Hypergradients take those of "
            "train_loss, and are right; orthant_wise, and Tuner with it, would hold too many weights at zero, or too "
            "few. Put the factor into the rates.",
        )
