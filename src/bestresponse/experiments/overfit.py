"""Overfit a small validation set by tuning a weight decay for every weight: the paper's section 5.2."""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from ..curvatures import GaussNewton
from ..errors import ArgumentError
from ..hyperparameters import WeightDecay
from ..methods import Implicit, Method, Unrolled
from ..problem import Problem
from ..runs import callbacks
from ..solvers import ConjugateGradient, Identity, Neumann
from ..tuner import Tuner
from . import data, models, plots, runs
from .classification import Batch, output_loss, predict, train_loss, val_loss
from .options import Options, Preset

METHODS: dict[str, Callable[[int, float, nn.Module], Method]] = {
    "implicit": lambda terms, scale, decay: Implicit(),
    "gauss-newton": lambda terms, scale, decay: Implicit(
        curvature=GaussNewton(predict, output_loss, rest=decay)
    ),
    "neumann": lambda terms, scale, decay: Implicit(Neumann(terms, scale)),
    "neumann-auto": lambda terms, scale, decay: Implicit(Neumann(terms)),
    "conjugate-gradient": lambda terms, scale, decay: Implicit(ConjugateGradient(terms)),
    "identity": lambda terms, scale, decay: Implicit(Identity()),
    "unrolled": lambda terms, scale, decay: Unrolled(terms, scale),
}

_CURVE_IMAGES = 1_000


@dataclass(kw_only=True)
class Overfit(Options):
    """Tune a weight decay for every weight until the validation set is learnt by heart.

    With as many hyperparameters as weights, gradient descent on 50 validation examples reaches 100 % on
    them, as training does on its own 50, while the test error stays far higher (the paper's section 5.2,
    figure 5). The table's last columns compare this run's time for a weight step (hyper-steps included) and
    its peak memory with those of plain training.
    """

    data: Literal["digits", "mnist", "cifar10"] = "digits"
    """The data set. digits comes with scikit-learn; the others are read from --data-dir."""
    model: Literal["linear", "mlp", "lenet", "alexnet", "resnet44"] = "mlp"
    """The network. mlp has one hidden layer as wide as the input."""
    method: Literal[
        "implicit", "gauss-newton", "neumann", "neumann-auto", "conjugate-gradient", "identity", "unrolled"
    ] = "implicit"
    """How hypergradients are computed. implicit is the recommended one, on the Hessian; gauss-newton the same on
    the Gauss-Newton matrix; neumann is the paper's."""
    terms: int = 20
    """Neumann terms, conjugate-gradient steps or unrolled steps, for the methods that have them."""
    scale: float = 0.1
    """The step α of neumann and unrolled."""
    steps: int = 1800
    """Hyper-steps to make."""
    weight_steps: int = 1
    """Weight steps before each hyper-step."""
    train_size: int = 50
    """Training examples, all in one batch."""
    val_size: int = 50
    """Validation examples, all in one batch."""
    weight_rate: float = 1e-4
    """Adam's learning rate for the weights."""
    hyper_rate: float = 1e-2
    """RMSprop's learning rate for the logarithms of the decays."""
    initial_log_decay: float = -8.0
    """The natural logarithm of each decay at the start."""
    save_every: int = 0
    """Hyper-steps between two saves of the whole run into run.pt, in the run's folder; 0 saves nothing."""
    resume: bool = False
    """Go on from run.pt of the run's folder, up to --steps hyper-steps in all."""


PRESETS: dict[Preset, Overfit] = {
    "smoke": Overfit(),
    "cpu": Overfit(preset="cpu", threads=0, data="mnist", steps=1500),
    "paper": Overfit(
        preset="paper", threads=0, data="cifar10", model="alexnet", steps=20_000, save_every=500
    ),
}


def run(config: Overfit) -> Path:
    """Run the experiment and return its folder.

    An interrupt ends it early with every file whole, and is then passed on.

    Raises:
        ArgumentError: an option is out of its range, or two of them do not go together.
    """
    device = _checked(config)
    images = data.load(config.data, config.data_dir)
    train, val = (
        _to(device, batch) for batch in images.draw(config.train_size, config.val_size, seed=config.seed)
    )
    test = _to(device, (images.x_test, images.y_test))
    make = _maker(config, images, device)
    del images
    folder = config.out or Path("runs") / f"overfit-{config.data}-{config.model}"
    record = runs.Run(folder, "overfit", config, figures=["errors.png"], resume=config.resume)
    plain_seconds, plain_bytes = _plain_training(make(), train, config)

    problem = make()
    method = METHODS[config.method](config.terms, config.scale, problem.hyper)
    measure = callbacks.Evaluate(
        lambda model, _: _errors(model, train, val, test), max(1, config.steps // 50)
    )
    tuner = Tuner(
        problem,
        torch.optim.Adam(problem.weights.values(), config.weight_rate),
        torch.optim.RMSprop(problem.hyperparameters.values(), config.hyper_rate),
        method,
        weight_steps=config.weight_steps,
        seed=config.seed,
        callbacks=[measure, callbacks.JSONLines(record.metrics), callbacks.Progress()],
    )
    if config.save_every:
        tuner.callbacks.append(callbacks.Checkpoint(record.state, config.save_every))
    if config.resume:
        tuner.load(record.state)
    peak = runs.Peak(device).begin()
    interrupted = False
    try:
        tuner.fit([train], [val], max(0, config.steps - tuner.hyper_step))
    except KeyboardInterrupt:
        interrupted = True
        print(
            f"\ninterrupted after {tuner.hyper_step} of {config.steps} hyper-steps; every row before is written"
        )
    row = _final_row(problem, tuner, (train, val, test), plain_seconds, plain_bytes, peak.read())
    headline = {"validation error": row["validation error"], "test error": row["test error"]}
    if any("test_error" in row for row in tuner.history):
        draw(folder, runs.read_config(folder), runs.read_rows(folder))
    record.finish(headline, [row], config.seed, interrupted=interrupted, hyper_steps=tuner.hyper_step)
    if interrupted:
        raise KeyboardInterrupt
    return record.folder


def _checked(config: Overfit) -> torch.device:
    """The device; raises for options that cannot be run, before anything is written."""
    positive = ("steps", "weight_steps", "train_size", "val_size", "weight_rate", "hyper_rate")
    device = config.begin(positive, ("save_every",), ("initial_log_decay",))
    if config.seeds != 1:
        raise ArgumentError(
            f"overfit makes one run, so --seeds must be 1; got {config.seeds}. Use `reproduce overfit-all`."
        )
    # Raises for terms out of their range.
    METHODS[config.method](config.terms, config.scale, WeightDecay(nn.Linear(1, 1)))
    return device


def _maker(config: Overfit, images: data.Images, device: torch.device) -> Callable[[], Problem]:
    """A function that makes the problem, each time with the same initial weights."""
    shape, classes = images.shape, images.classes

    def make() -> Problem:
        torch.manual_seed(config.seed)
        model = models.make(config.model, shape, classes).to(device)
        decay = WeightDecay(model, initial=math.exp(config.initial_log_decay))
        return Problem(model, decay, train_loss, val_loss)

    return make


def _plain_training(problem: Problem, batch: Batch, config: Overfit) -> tuple[float, int | None]:
    """Seconds of a weight step, and peak memory, with the decays held constant."""
    optimizer = torch.optim.Adam(problem.weights.values(), config.weight_rate)
    weights = list(problem.weights.values())
    peak = runs.Peak(batch[0].device).begin()
    seconds: list[float] = []
    began = time.perf_counter()
    while len(seconds) < 3 or (len(seconds) < 50 and time.perf_counter() - began < 2.0):
        start = time.perf_counter()
        optimizer.zero_grad()
        torch.autograd.backward(train_loss(problem.model, problem.hyper, batch), inputs=weights)
        optimizer.step()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:]), peak.read()


def _errors(model: nn.Module, train: Batch, val: Batch, test: Batch) -> dict[str, float]:
    """Errors in eval mode; the test set's on its first images, which is enough for a curve."""
    return {
        "train_error": _error(model, train),
        "val_error": _error(model, val),
        "test_error": _error(model, (test[0][:_CURVE_IMAGES], test[1][:_CURVE_IMAGES])),
    }


@torch.no_grad()
def _error(model: nn.Module, batch: Batch) -> float:
    pieces = zip(torch.split(batch[0], 500), torch.split(batch[1], 500), strict=True)
    wrong = sum(int((model(x).argmax(dim=1) != y).sum()) for x, y in pieces)
    return wrong / len(batch[1])


def _final_row(
    problem: Problem,
    tuner: Tuner,
    batches: tuple[Batch, Batch, Batch],
    plain_seconds: float,
    plain_bytes: int | None,
    tuned_bytes: int | None,
) -> dict[str, Any]:
    problem.model.eval()
    train, val, test = (_error(problem.model, batch) for batch in batches)
    times = [0.0, *(row["seconds"] for row in tuner.history)]
    steps = [after - before for before, after in pairwise(times)]
    per_step = statistics.median(steps) / tuner.weight_steps if steps else math.nan
    memory = None  # too small to be told from noise
    if tuned_bytes is not None and plain_bytes is not None and plain_bytes > 16 * 2**20:
        memory = tuned_bytes / plain_bytes
    row = {
        "train error": train,
        "validation error": val,
        "test error": test,
        "weights": sum(w.numel() for w in problem.weights.values()),
        "hyperparameters": sum(p.numel() for p in problem.hyperparameters.values()),
        "time / plain": per_step / plain_seconds,
    }
    return row if memory is None else {**row, "memory / plain": memory}


def _to(device: torch.device, batch: Batch) -> Batch:
    return batch[0].to(device), batch[1].to(device)


def draw(folder: Path, config: dict[str, Any], rows: list[dict[str, Any]]) -> list[Path]:
    """Training, validation and test error against hyper-steps: the paper's figure 5."""
    if not measured(rows):
        raise ArgumentError(f"{folder} must hold rows with errors to draw; it has none. Has the run begun?")
    path = folder / "errors.png"
    with plots.panels(path) as axes:
        title = f"{config.get('model')} on {config.get('data')}, a weight decay for each weight"
        draw_errors(axes[0, 0], rows, title)
        axes[0, 0].legend(frameon=False)
    return [path]


def draw_errors(axes: Any, rows: list[dict[str, Any]], title: str) -> None:
    """The three curves of one run."""
    shown = measured(rows)
    curves = (
        ("test_error", "test", plots.RED, "-"),
        ("val_error", "validation (tuned on)", plots.BLUE, "-"),
        ("train_error", "training", plots.GREY, "--"),
    )
    for key, label, colour, line in curves:
        steps = [row["hyper_step"] for row in shown]
        axes.plot(steps, [100 * row[key] for row in shown], line, color=colour, label=label, linewidth=1.8)
    plots.style(axes, "hyper-steps", "error [%]", title)
    axes.set_ylim(-2, 102)
    axes.set_xlim(left=0)


def measured(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows in which the errors were measured."""
    return [row for row in rows if {"hyper_step", "train_error", "val_error", "test_error"} <= row.keys()]
