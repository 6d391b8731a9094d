"""The paper's tables 1 and 2 as measurements: the error and the cost of each method."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from matplotlib.lines import Line2D
from torch import Tensor, nn

import bestresponse as br

from .. import _layout, _tree
from ..diagnostics import measuring
from . import orders, plots, runs, small_problems
from .experiment import Count, LogDecay, Range, Repeated, Row, Tasks, require
from .small_problems import Case

_LONG = 1.0  # seconds
_ROUNDING = 1e-7  # the figure's smallest 1 − cosine
_LABELS = {
    "away": "1 − cosine (at least 1e-7)",
    "time": "time, training gradients",
    "memory": "memory, training gradients",
}
_COLOURS = {
    "implicit": plots.BLUE,
    "through the steps": plots.RED,
    "learned response": plots.GREEN,
    "gradients alone": plots.PURPLE,
    "search": plots.ORANGE,
}
_HYPERNETWORKS: dict[str, Callable[[br.Problem], br.hypernetworks.Hypernetwork]] = {
    "linear hypernetwork": lambda problem: br.hypernetworks.LinearHypernetwork(problem, 0.5),
    "self-tuning network": lambda problem: br.hypernetworks.SelfTuning(problem, 0.5),
}
_SEARCHES = {"random search": "random", "Bayesian optimisation": "tpe"}


@dataclass(frozen=True)
class Contender:
    """A method with its name in the paper.

    Attributes:
        family: its group in the figure.
        at_optimum: whether the weights are at the optimum; otherwise they are the initial ones.
        brief: the same with fewer steps, if memory does not depend on them, to measure memory.
        calls: number of earlier calls at the same weights, for methods with a memory.
    """

    paper: str
    family: str
    method: br.Method
    at_optimum: bool = True
    brief: br.Method | None = None
    calls: int = 0


class Methods(Repeated):
    """Measure the paper's tables 1 and 2: the error and cost of each method, and how memory grows.

    Two problems are small enough for the exact hypergradient: a linear model on a regression set, and softmax
    regression on scikit-learn's digits, each with a decay for each weight. Methods that differentiate training steps
    start from the initial weights, all others from the optimum w*(λ), where learned responses are trained too. Searches
    try values around λ; the direction from λ to the best value counts as their hypergradient. Time and memory are in
    units of a training gradient. The second table has the slopes of log memory against the logarithms of the numbers of
    steps, weights and hyperparameters: 1 means proportional.
    """

    name = "methods"
    cpu = "--seeds 3 --data boston --classes 10 --steps 100 --last 20 --training 2000 --trials 50 --sizes 7"
    paper = (
        "--seeds 5 --data boston --classes 10 --steps 1000 --last 100 --training 10000 --trials 200 --sizes 8"
    )
    figures = ("methods.png", "orders.png")
    by, of = ("problem", "method", "trained"), ("cosine", "relative error", "time", "memory")
    counted = True

    data: Literal["diabetes", "boston"] = "diabetes"
    """The regression set. diabetes comes with scikit-learn; boston is read from --data-dir."""
    classes: Annotated[int, Range(2, 10)] = 3
    """The number of digits, from 0 on; 60 examples of each, half of them for validation."""
    steps: Count = 50  # Steps of all methods that differentiate training steps.
    last: Count = 10  # The last steps, which truncated unrolling differentiates.
    terms: tuple[Count, ...] = (1, 5, 20)  # The numbers of Neumann terms and conjugate-gradient steps.
    training: Count = 500  # Adam's steps for training a hypernetwork.
    trials: Count = 20  # Trials of a search.
    log_decay: LogDecay = -3.0  # λ, the natural logarithm of each decay.
    sizes: Annotated[int, Range(2, 10)] = 3
    """The number of sizes at which memory is measured, each twice the one before."""
    repeats: Count = 3  # The number of timings of each method, of which the median is taken.

    def check(self) -> None:
        super().check()
        require(self.device == "cpu", f"--device must be cpu, to measure memory; got {self.device}.")
        require(self.last <= self.steps, f"--last must be at most --steps; got {self.last}.")

    def tasks(self, device: torch.device, folder: Path) -> Tasks:
        make = partial(small_problems.cases, self.data, self.data_dir, self.classes, self.log_decay)
        measured = [partial(self._rows, case) for seed in self.all_seeds() for case in make(seed)]
        return [*measured, partial(orders.rows, self.sizes)]

    def _contenders(self, case: Case, rate: float) -> Iterator[Contender]:
        """All methods that need no training; ``rate`` is the step size of those that make steps."""
        solvers: dict[str, br.Solver] = {f"Neumann, {n}": br.Neumann(n, rate) for n in self.terms}
        solvers |= {f"conjugate gradient, {n}": br.ConjugateGradient(n, tolerance=0.0) for n in self.terms}
        fisher = br.EmpiricalFisher(case.losses.example_losses, case.problem.hyper)
        family = "implicit"
        yield Contender("exact (Bengio)", family, br.Implicit(br.Exact()))
        yield Contender("empirical Fisher (Larsen et al.)", family, br.Implicit(br.Exact(), fisher))
        yield Contender("T1 − T2 (identity)", family, br.Implicit(br.Identity()))
        for name, solver in solvers.items():
            yield Contender(name, family, br.Implicit(solver))
        yield Contender("recommended here", family, br.Implicit())
        yield Contender("the same, sixth call", family, br.Implicit(), calls=5)
        family, n, brief = "through the steps", self.steps, br.Forward(2, rate)
        yield Contender("unrolled", family, br.Unrolled(n, rate), False)
        yield Contender("truncated unrolled", family, br.Unrolled(n, rate, last=self.last), False)
        yield Contender("DrMAD", family, br.Unrolled(n, rate, trajectory="interpolated"), False)
        yield Contender("forward", family, br.Forward(n, rate), False, brief)
        yield Contender("SAMA", "gradients alone", br.SAMA())
        yield Contender("penalty", "gradients alone", br.Penalty(n, rate, 100.0, br.rules.SGD(0.9)))

    def _rows(self, case: Case) -> Iterator[Row]:
        """A row for each method."""
        problem = case.problem
        optimizer = case.adam_after(self.steps)  # SAMA reads its state
        rate = 1.0 / max(case.largest_curvature(weights) for weights in (case.initial, case.optimum))
        row = partial(_row, case)
        for one in self._contenders(case, rate):
            case.put(case.optimum if one.at_optimum else case.initial)

            def work(method: br.Method = one.method, calls: int = one.calls) -> Tensor:
                if not calls:
                    problem.forget(method)
                return _tree.flatten(
                    br.hypergradient(problem, case.train, case.val, method, weight_optimizer=optimizer).total
                )

            for _ in range(one.calls):
                work()
            memory = partial(work, one.brief or one.method)
            measured = work(), self._seconds(work), measuring.peak_bytes(memory)
            # The step size differs between seeds.
            here = short(one.method).replace(f"={rate:.3g}", "=α")
            yield row(one.paper, one.family, *measured, here=here, trained=0)
        for paper, make in _HYPERNETWORKS.items():
            case.put(case.optimum)
            learned = self._learned(case, make)
            here = f"Direct() of {type(make(problem)).__name__}"
            yield row(paper, "learned response", *learned, here=here, trained=self.training)
        for paper, sampler in _SEARCHES.items():
            case.put(case.initial)
            here = f"search(..., sampler={sampler!r}, trials={self.trials})"
            found = row(paper, "search", *self._searched(case, sampler), None, here=here, trained=0)
            yield found | {"relative error": None}  # a direction has no size
        case.put(case.initial)

    def _learned(
        self, case: Case, make: Callable[[br.Problem], br.hypernetworks.Hypernetwork]
    ) -> tuple[Tensor, float, int]:
        """Hypergradient of a hypernetwork trained around λ (a mean if it is random), seconds, and memory."""
        network = make(case.problem)
        inside = network.problem
        weights = list(inside.weights.values())
        optimizer = torch.optim.Adam(weights, 3e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.training)
        for _ in range(self.training):
            optimizer.zero_grad()
            torch.autograd.backward(inside.train_loss(network, inside.hyper, case.train), inputs=weights)
            optimizer.step()
            schedule.step()
        optimizer.zero_grad()

        def work(seed: int = 0) -> Tensor:
            total = br.hypergradient(inside, case.train, case.val, br.Direct(), seed).total
            names = case.problem.hyperparameters
            return _tree.flatten({n: total[n if n in total else f"hyper.{n}"] for n in names})

        draws = range(100 if isinstance(network, br.hypernetworks.SelfTuning) else 1)
        found = torch.stack([work(seed) for seed in draws]).mean(0)
        return found, self._seconds(work), measuring.peak_bytes(work)

    def _searched(self, case: Case, sampler: str) -> tuple[Tensor, float]:
        """The direction from the best of the values tried around λ to λ, and the seconds."""
        hyperparameters = case.problem.hyperparameters
        middle = _tree.flatten(_tree.detached(hyperparameters))

        def vector(values: Mapping[str, float]) -> Tensor:
            return torch.tensor([values[str(i)] for i in range(len(middle))], dtype=middle.dtype)

        def objective(values: Mapping[str, float]) -> float:
            _tree.write_(hyperparameters, _tree.unflatten(vector(values), hyperparameters))
            return case.solve()

        space = {str(i): (x - 1.0, x + 1.0) for i, x in enumerate(middle.tolist())}
        began = time.perf_counter()
        try:
            best = br.search(objective, space, sampler=sampler, trials=self.trials, seed=case.seed).values
        finally:
            _tree.write_(hyperparameters, _tree.unflatten(middle, hyperparameters))
        return middle - vector(best), time.perf_counter() - began

    def _seconds(self, work: Callable[[], object]) -> float:
        """The median of several timings, or a single one if it takes long."""
        began = time.perf_counter()
        work()
        once = time.perf_counter() - began
        return once if once > _LONG else measuring.seconds({"": work}, self.repeats)[""]

    def table(self, rows: list[Row]) -> list[Row]:
        table = super().table([row for row in rows if row["table"] == 1])
        return [{k: x for k, x in row.items() if k not in ("time ±", "memory ±")} for row in table]

    def headline(self, table: list[Row], rows: list[Row]) -> Row:
        best = [row for row in table if row["method"] == "recommended here"]
        return {f"cosine of the recommended, {row['problem']}": row["cosine"] for row in best}

    def more(self, rows: list[Row]) -> Row:
        here = {row["method"]: row["here"] for row in rows if row["table"] == 1}
        return {"orders": orders.slopes([row for row in rows if row["table"] == 2]), "here": here}

    def note(self, rows: list[Row]) -> str:
        units = "time and memory: in training gradients; trained: training steps beforehand"
        growth = "growth of memory: slopes of log memory against the logarithm of each size"
        return "\n\n".join([_layout.fold(units), growth, _layout.table(self.more(rows)["orders"])])

    def draw(self, folder: Path, rows: list[Row]) -> None:
        """Error, time and memory of each method, and the growth of memory."""
        _draw_errors(folder / self.figures[0], [row for row in rows if row["table"] == 1])
        if grown := [row for row in rows if row["table"] == 2]:
            orders.draw(folder / self.figures[1], grown)


def _row(
    case: Case, method: str, family: str, found: Tensor, seconds: float, used: int | None, **more: Any
) -> Row:
    unit, unit_bytes = case.units
    return {
        **{"table": 1, "problem": case.name, "seed": case.seed, "method": method, "family": family},
        "cosine": torch.cosine_similarity(found, case.exact, dim=0).item(),
        "relative error": float((found - case.exact).norm() / case.exact.norm()),
        "time": seconds / unit,
        "memory": None if used is None else used / unit_bytes,
        **more,
    }


def _draw_errors(path: Path, rows: list[Row]) -> None:
    """A line for each method: the error of its direction, its time, and its memory."""
    rows = [row | {"away": max(1.0 - row["cosine"], _ROUNDING)} for row in rows]
    table = runs.mean_and_deviation(rows, ["problem", "method", "family"], list(_LABELS))
    problems, names = (list(dict.fromkeys(row[key] for row in table)) for key in ("problem", "method"))
    looks = dict(zip(problems, ({"marker": "o"}, {"marker": "s", "markerfacecolor": "white"}), strict=False))
    with plots.panels(path, 1, 3, (9.6, 0.24 * len(names) + 1.4), sharey=True) as ((*axes,),):
        for panel, (quantity, label) in zip(axes, _LABELS.items(), strict=True):
            for row in (row for row in table if row[quantity] is not None):
                look = {"color": _COLOURS[row["family"]], **looks[row["problem"]]}
                panel.plot([row[quantity]], [names.index(row["method"])], markersize=6, **look)
            panel.set_xscale("log")
            plots.style(panel, label, "")
        axes[0].set_yticks(range(len(names)), names, fontsize=8)
        axes[0].invert_yaxis()
        kinds = {name: {"color": "black", **look} for name, look in looks.items()}
        kinds |= {name: {"color": colour, "marker": "o"} for name, colour in _COLOURS.items()}
        handles = [Line2D([], [], linestyle="", label=name, **look) for name, look in kinds.items()]
        plots.legend_below(axes[0], 7, handles)


def short(value: Any) -> str:
    """A method as a user would write it, without default arguments."""
    if not is_dataclass(value) or isinstance(value, type):
        if isinstance(value, nn.Module):
            return type(value).__name__
        text = f"{value:.3g}" if isinstance(value, float) else repr(value)
        return getattr(value, "__name__", text)
    inside = []
    for field in filter(lambda field: field.init, fields(value)):
        text, first = short(getattr(value, field.name)), field is fields(value)[0]
        usual = "False" if field.name == "warm_start" else short(field.default)
        if text != usual or (first and isinstance(field.default, int)):
            inside.append(text if first else f"{field.name}={text}")
    return f"{type(value).__name__}({', '.join(inside)})"
