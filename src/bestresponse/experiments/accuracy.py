"""How right each method is, and what it costs: the paper's table 1, measured."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .. import _tree
from .._tree import Tree
from ..curvatures import EmpiricalFisher, Hessian
from ..diagnostics import measuring
from ..hypernetworks import Hypernetwork, LinearHypernetwork, SelfTuning
from ..hyperparameters import WeightDecay
from ..methods import SAMA, Direct, Forward, Implicit, Method, Penalty, Unrolled, hypergradient, rules
from ..problem import Problem
from ..search import search
from ..solvers import ConjugateGradient, Exact, Identity, Neumann
from ..solvers.direct import dense
from . import classification, data, regression

if TYPE_CHECKING:
    from .methods import Methods

_LONG = 1.0  # seconds
_NEWTON_STEPS = 60
_PRECISION = 1e-12


@dataclass(frozen=True)
class Case:
    """A problem with its batches, the losses that methods ask for beside them, and the weights to begin with."""

    name: str
    problem: Problem
    train: tuple[Tensor, Tensor]
    val: tuple[Tensor, Tensor]
    example_loss: Callable[..., Tensor]
    initial: Tree

    @cached_property
    def optimum(self) -> Tree:
        """w*(λ)."""
        self.put(self.initial)
        self.solve()
        return _tree.copy(self.problem.weights)

    def put(self, weights: Tree) -> None:
        """Set the weights."""
        _tree.write_(self.problem.weights, weights)

    def solve(self) -> float:
        """Train the weights until the gradient is rounding, by Newton's method; returns the validation loss.

        The systems are definite, and conjugate gradient solves them. A step that does not make the convex training
        loss smaller is halved, unless it is rounding.
        """
        problem = self.problem
        solver = ConjugateGradient(max_steps=400, tolerance=1e-8)
        with problem.undisturbed() as passes:
            for _ in range(_NEWTON_STEPS):
                gradient = dict(zip(problem.weights, self.gradient(), strict=True))
                if _tree.norm(gradient) < _PRECISION:
                    break
                step = solver.solve(Hessian().linearise(passes, self.train), gradient).x
                before, factor = self._train_loss(), 1.0
                self._move(step, -1.0)
                while not self._train_loss() <= before + 1e-12 and factor > 1e-6:
                    factor /= 2
                    self._move(step, factor)
        with torch.no_grad():
            return problem.val_loss(problem.model, problem.hyper, self.val).item()

    @torch.no_grad()
    def _train_loss(self) -> float:
        return self.problem.train_loss(self.problem.model, self.problem.hyper, self.train).item()

    @torch.no_grad()
    def _move(self, step: Tree, factor: float) -> None:
        for name, w in self.problem.weights.items():
            w.add_(step[name], alpha=factor)

    def gradient(self) -> Sequence[Tensor]:
        """One training gradient: the unit of time and memory."""
        problem = self.problem
        loss = problem.train_loss(problem.model, problem.hyper, self.train)
        return torch.autograd.grad(loss, list(problem.weights.values()))


def cases(config: "Methods", seed: int) -> list[Case]:
    """Both problems, in float64."""
    torch.manual_seed(seed)
    x, y = data.load_table(config.data, config.data_dir)
    digits = data.load("digits")
    ((images, labels),) = digits.draw(len(digits.x_train), seed=seed)
    chosen = (labels < config.classes).nonzero()[: 60 * config.classes, 0]
    images, labels = images[chosen], labels[chosen]
    return [
        _case(config, config.data, x, y, 1, regression, squared_errors),
        _case(
            config,
            "digits",
            images.flatten(1).double(),
            labels,
            config.classes,
            classification,
            cross_entropies,
        ),
    ]


def _case(
    config: "Methods", name: str, x: Tensor, y: Tensor, outputs: int, losses: Any, example_loss: Any
) -> Case:
    order = torch.randperm(len(x))
    train, val = ((x[rows], y[rows]) for rows in order.chunk(2))
    model = nn.Linear(x.shape[1], outputs, dtype=torch.float64)
    decay = WeightDecay(model, initial=math.exp(config.log_decay))
    problem = Problem(model, decay, losses.train_loss, losses.val_loss)
    return Case(name, problem, train, val, example_loss, _tree.copy(problem.weights))


def squared_errors(model: nn.Module, hyper: nn.Module, batch: regression.Batch) -> Tensor:
    """The squared error of each example."""
    error: Tensor = model(batch[0]).squeeze(1) - batch[1]
    return error.square()


def cross_entropies(model: nn.Module, hyper: nn.Module, batch: classification.Batch) -> Tensor:
    """The cross-entropy of each example."""
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


@dataclass(frozen=True)
class Contender:
    """A method as the paper names it.

    Attributes:
        paper: the paper's name.
        family: what it has in common with others, for the figure.
        method: how the hypergradient is computed.
        at: where the weights are: "optimum" or "start".
        brief: the same with fewer steps, where memory does not depend on them; None is the method itself.
        calls: earlier calls at the same place, for methods that remember.
    """

    paper: str
    family: str
    method: Method
    at: str = "optimum"
    brief: Method | None = None
    calls: int = 0


def contenders(config: "Methods", case: Case, rate: float) -> Iterator[Contender]:
    """Every method that needs no training of its own; ``rate`` is the step size of all that make steps."""
    fisher = EmpiricalFisher(case.example_loss, case.problem.hyper)
    yield Contender("exact (Bengio)", "implicit", Implicit(Exact()))
    yield Contender("empirical Fisher (Larsen et al.)", "implicit", Implicit(Exact(), fisher))
    yield Contender("T1 − T2 (identity)", "implicit", Implicit(Identity()))
    for terms in config.terms:
        yield Contender(f"Neumann, {terms}", "implicit", Implicit(Neumann(terms, rate)))
    for terms in config.terms:
        solver = ConjugateGradient(terms, tolerance=0.0)
        yield Contender(f"conjugate gradient, {terms}", "implicit", Implicit(solver))
    yield Contender("recommended here", "implicit", Implicit())
    yield Contender("the same, sixth call", "implicit", Implicit(), calls=5)
    family, at = "through the steps", "start"
    yield Contender("unrolled", family, Unrolled(config.steps, rate), at)
    yield Contender("truncated unrolled", family, Unrolled(config.steps, rate, last=config.last), at)
    yield Contender("DrMAD", family, Unrolled(config.steps, rate, trajectory="interpolated"), at)
    yield Contender("forward", family, Forward(config.steps, rate), at, Forward(2, rate))
    yield Contender("SAMA", "gradients alone", SAMA())
    penalty = Penalty(config.steps, rate, 100.0, rules.SGD(0.9))
    yield Contender("penalty", "gradients alone", penalty)


def rows(config: "Methods", case: Case, seed: int) -> Iterator[dict[str, Any]]:
    """A row for each method."""
    problem = case.problem
    optimizer = _begun_adam(case, config.steps)
    rate = 1.0 / max(_largest_curvature(case, weights) for weights in (case.initial, case.optimum))
    case.put(case.optimum)
    exact = hypergradient(problem, case.train, case.val, Implicit(Exact())).total
    unit = measuring.seconds({"": case.gradient}, 200)[""]
    unit_bytes = measuring.peak_bytes(case.gradient)
    start = {"table": 1, "problem": case.name, "seed": seed}

    def row(
        paper: str, family: str, found: Tree, seconds: float, used: int | None, **more: Any
    ) -> dict[str, Any]:
        cost = {"time": seconds / unit, "memory": None if used is None else used / unit_bytes}
        return start | {"method": paper, "family": family, **_compared(found, exact), **cost, **more}

    for one in contenders(config, case, rate):
        case.put(case.optimum if one.at == "optimum" else case.initial)

        def work(method: Method = one.method, calls: int = one.calls) -> Tree:
            if not calls:
                problem.forget(method)
            return hypergradient(problem, case.train, case.val, method, weight_optimizer=optimizer).total

        for _ in range(one.calls):
            work()
        found = work()
        seconds = _seconds(work, config.repeats)
        used = measuring.peak_bytes(partial(work, one.brief or one.method))
        # The step size is another for each seed.
        here = short(one.method).replace(f"={rate:.3g}", "=α")
        yield row(one.paper, one.family, found, seconds, used, here=here, trained=0)
    for paper, make in HYPERNETWORKS.items():
        case.put(case.optimum)
        found, seconds, used = _learned(config, case, make)
        here = f"{short(Direct())} of {make(problem).__class__.__name__}"
        yield row(paper, "learned response", found, seconds, used, here=here, trained=config.training)
    for paper, sampler in SEARCHES.items():
        case.put(case.initial)
        found, seconds = _searched(config, case, sampler, seed)
        here = f"search(..., sampler={sampler!r}, trials={config.trials})"
        # A direction has no size.
        yield row(paper, "search", found, seconds, None, here=here, trained=0) | {"relative error": None}
    case.put(case.initial)


HYPERNETWORKS: Mapping[str, Callable[[Problem], Hypernetwork]] = {
    "linear hypernetwork": lambda problem: LinearHypernetwork(problem, 0.5),
    "self-tuning network": lambda problem: SelfTuning(problem, 0.5),
}
SEARCHES = {"random search": "random", "Bayesian optimisation": "tpe"}


def _compared(found: Tree, exact: Tree) -> dict[str, float]:
    one, other = _tree.flatten(found), _tree.flatten(exact)
    return {
        "cosine": torch.cosine_similarity(one, other, dim=0).item(),
        "relative error": float((one - other).norm() / other.norm()),
    }


def _begun_adam(case: Case, steps: int) -> torch.optim.Adam:
    """Adam after some steps from the initial weights, for the method that looks at its state."""
    case.put(case.initial)
    optimizer = torch.optim.Adam(case.problem.weights.values(), 1e-2)
    for _ in range(steps):
        for w, g in zip(case.problem.weights.values(), case.gradient(), strict=True):
            w.grad = g
        optimizer.step()
    optimizer.zero_grad()
    return optimizer


def _largest_curvature(case: Case, weights: Tree) -> float:
    problem = case.problem
    case.put(weights)
    with problem.undisturbed() as passes:
        matrix = dense(Hessian().linearise(passes, case.train), _tree.detached(problem.weights))
    return float(torch.linalg.eigvalsh(matrix)[-1])


def _learned(
    config: "Methods", case: Case, make: Callable[[Problem], Hypernetwork]
) -> tuple[Tree, float, int]:
    """The hypergradient of a hypernetwork trained around λ, a mean where it is random; its seconds and memory."""
    network = make(case.problem)
    inside = network.problem
    optimizer = torch.optim.Adam(inside.weights.values(), 3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, config.training)
    for _ in range(config.training):
        optimizer.zero_grad()
        loss = inside.train_loss(network, inside.hyper, case.train)
        loss.backward(inputs=list(inside.weights.values()))  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
    optimizer.zero_grad()

    def work(seed: int = 0) -> Tree:
        total = hypergradient(inside, case.train, case.val, Direct(), seed).total
        return {n: total.get(n, total.get(f"hyper.{n}")) for n in case.problem.hyperparameters}  # type: ignore[misc]

    draws = [_tree.flatten(work(seed)) for seed in range(100 if isinstance(network, SelfTuning) else 1)]
    found = _tree.unflatten(torch.stack(draws).mean(0), case.problem.hyperparameters)
    return found, _seconds(work, config.repeats), measuring.peak_bytes(work)


def _searched(config: "Methods", case: Case, sampler: str, seed: int) -> tuple[Tree, float]:
    """The negative of the direction from λ to the best of the values tried around it; and the seconds."""
    hyperparameters = case.problem.hyperparameters
    middle = _tree.flatten(_tree.detached(hyperparameters))

    @torch.no_grad()
    def write(vector: Tensor) -> None:
        for name, value in _tree.unflatten(vector, hyperparameters).items():
            hyperparameters[name].copy_(value)

    def objective(values: Mapping[str, float]) -> float:
        write(torch.tensor([values[str(i)] for i in range(len(middle))], dtype=middle.dtype))
        return case.solve()

    space = {str(i): (x - 1.0, x + 1.0) for i, x in enumerate(middle.tolist())}
    began = time.perf_counter()
    try:
        best = search(objective, space, sampler=sampler, trials=config.trials, seed=seed).values
    finally:
        write(middle)
    seconds = time.perf_counter() - began
    towards = torch.tensor([best[str(i)] for i in range(len(middle))], dtype=middle.dtype) - middle
    return _tree.unflatten(-towards, hyperparameters), seconds


def _seconds(work: Callable[[], object], repeats: int) -> float:
    """The median of several times; what takes long is timed once."""
    began = time.perf_counter()
    work()
    once = time.perf_counter() - began
    return once if once > _LONG else measuring.seconds({"": work}, repeats)[""]


def short(value: Any) -> str:
    """A method as it would be written, without what is so by default."""
    if not is_dataclass(value) or isinstance(value, type):
        if isinstance(value, nn.Module):
            return type(value).__name__
        text = f"{value:.3g}" if isinstance(value, float) else repr(value)
        return getattr(value, "__name__", text)
    inside = []
    for field in fields(value):
        if not field.init:
            continue
        text = short(getattr(value, field.name))
        usual = "False" if field.name == "warm_start" else short(field.default)
        first = field is fields(value)[0]
        if text != usual or (first and isinstance(field.default, int)):
            inside.append(text if first else f"{field.name}={text}")
    return f"{type(value).__name__}({', '.join(inside)})"
