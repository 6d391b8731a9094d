"""Overfit a small validation set by tuning a weight decay for every weight: the paper's section 5.2."""

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from matplotlib.axes import Axes
from torch import nn

import bestresponse as br

from .. import _layout
from . import cost, data, models, plots, runs
from .classification import Batch, error, output_loss, predict, train_loss, val_loss
from .experiment import Count, Experiment, LogDecay, Number, Positive, Row, Tasks

METHODS: dict[str, Callable[[int, float, nn.Module], br.Method]] = {
    "implicit": lambda terms, scale, decay: br.Implicit(curvature=br.Hessian()),
    "gauss-newton": lambda terms, scale, decay: br.Implicit(
        curvature=br.GaussNewton(predict, output_loss, rest=decay)
    ),
    "neumann": lambda terms, scale, decay: br.Implicit(br.Neumann(terms, scale)),
    "neumann-auto": lambda terms, scale, decay: br.Implicit(br.Neumann(terms)),
    "conjugate-gradient": lambda terms, scale, decay: br.Implicit(br.ConjugateGradient(terms)),
    "identity": lambda terms, scale, decay: br.Implicit(br.Identity()),
    "unrolled": lambda terms, scale, decay: br.Unrolled(terms, scale),
}
_MEASURED = ("train_error", "val_error", "test_error")
_SMALL = 16 * 2**20  # bytes; a smaller difference may be noise
_STATUS = ("interrupted", "hyper_steps")


class Overfit(Experiment):
    """Tune a weight decay for every weight until the validation set is overfitted.

    With as many hyperparameters as weights, training error and validation error, each on 50 examples, reach zero, while
    the test error stays far higher (the paper's section 5.2, figure 5). The last columns of the table compare the CPU
    time of a weight step (hyper-steps included) and the peak memory with those of plain training.
    """

    name = "overfit"
    cpu = "--threads 0 --data mnist --steps 1500"
    paper = (
        "--threads 0 --data cifar10 --model alexnet --method neumann --terms 3 --scale 1e-4 --steps 20000 "
        "--save-every 500"
    )
    labels = ("data", "model")
    figures = ("errors.png",)
    writes_history = True

    data: Literal["digits", "mnist", "cifar10"] = "digits"
    """The data set. digits comes with scikit-learn; the others are read from --data-dir."""
    model: Literal["linear", "mlp", "lenet", "alexnet", "resnet44"] = "mlp"
    """The network. mlp has one hidden layer as wide as the input."""
    method: Literal[
        "implicit", "gauss-newton", "neumann", "neumann-auto", "conjugate-gradient", "identity", "unrolled"
    ] = "implicit"
    """The method of the hypergradients: implicit is the recommended one, with the Hessian; gauss-newton is the same
    with the Gauss-Newton matrix; neumann is the paper's."""
    terms: int = 20
    """The number of Neumann terms, conjugate-gradient steps or unrolled steps, depending on the method."""
    scale: float = 0.1  # The step α of neumann and unrolled.
    steps: Count = 1800  # Hyper-steps.
    weight_steps: Count = 1  # Weight steps before each hyper-step.
    train_size: Count = 50  # Training examples, all in one batch.
    val_size: Count = 50  # Validation examples, all in one batch.
    test_size: Number = 0  # Test examples, for the figure and for the table; 0 means all.
    weight_rate: Positive = 1e-4  # Adam's learning rate for the weights.
    hyper_rate: Positive = 1e-2  # RMSprop's learning rate for the logarithms of the decays.
    initial_log_decay: LogDecay = -8.0  # The natural logarithm of each decay at the start.
    save_every: Number = 0
    """Hyper-steps between two saves of the whole run into run.pt in its folder; 0 turns saving off."""
    resume: bool = False  # Continue from run.pt in the run's folder, up to --steps hyper-steps in total.

    def resumes(self) -> bool:
        return self.resume

    def tasks(self, device: torch.device, folder: Path) -> Tasks:
        # Raises if --terms or --scale is out of range.
        METHODS[self.method](self.terms, self.scale, br.hyperparameters.WeightDecay(nn.Linear(1, 1)))
        images = data.load(self.data, self.data_dir)
        drawn = images.draw(self.train_size, self.val_size, seed=self.seed)
        size = self.test_size or None
        test = images.x_test[:size], images.y_test[:size]
        batches = [(x.to(device), y.to(device)) for x, y in (*drawn, test)]
        make = partial(self._problem, images.shape, images.classes, device)
        make()  # raises if the network does not fit the images
        return [partial(self._tune, make, batches, folder)]

    def _problem(self, shape: models.Shape, classes: int, device: torch.device) -> br.Problem:
        """A new problem, always with the same initial weights."""
        torch.manual_seed(self.seed)
        model = models.make(self.model, shape, classes).to(device)
        decay = br.hyperparameters.WeightDecay(model, initial=math.exp(self.initial_log_decay))
        return br.Problem(model, decay, train_loss, val_loss)

    def _tune(self, make: Callable[[], br.Problem], batches: list[Batch], folder: Path) -> Iterator[Row]:
        """Tune and measure the costs; after an interrupt, all files are still written."""
        train, val, test = batches
        copy, device = make(), train[0].device
        plain = torch.optim.Adam(copy.weights.values(), self.weight_rate)
        pace = cost.Pace(copy, plain, train, max(1, self.steps // 50))
        plain_bytes = cost.peak_bytes(device, lambda: pace.steps(3))
        problem = make()
        tuner = self._tuner(problem, pace, batches, folder)
        interrupted = False

        def tune() -> None:
            nonlocal interrupted
            try:
                tuner.fit([train], [val], max(0, self.steps - tuner.hyper_step))
            except KeyboardInterrupt:
                interrupted = True

        tuned_bytes = cost.peak_bytes(device, tune)
        written = len(runs.read_rows(folder)) if (folder / "metrics.jsonl").is_file() else 0
        if interrupted:
            print(f"\ninterrupted after {written} of {self.steps} hyper-steps; their rows are written")
        problem.model.eval()
        row: Row = _errors(problem.model, {"train error": train, "validation error": val, "test error": test})
        row["weights"] = sum(w.numel() for w in problem.weights.values())
        row["hyperparameters"] = sum(p.numel() for p in problem.hyperparameters.values())
        row["time / plain"] = pace.ratio()
        if tuned_bytes is not None and plain_bytes is not None and plain_bytes > _SMALL:
            row["memory / plain"] = tuned_bytes / plain_bytes
        yield row | {"interrupted": interrupted, "hyper_steps": written}

    def _tuner(self, problem: br.Problem, pace: cost.Pace, batches: list[Batch], folder: Path) -> br.Tuner:
        """The tuner with its callbacks, in the saved state with --resume."""
        train, val, test = batches
        shown = {"train_error": train, "val_error": val, "test_error": test}
        tuner = br.Tuner(
            problem,
            torch.optim.Adam(problem.weights.values(), self.weight_rate),
            torch.optim.RMSprop(problem.hyperparameters.values(), self.hyper_rate),
            METHODS[self.method](self.terms, self.scale, problem.hyper),
            weight_steps=self.weight_steps,
            seed=self.seed,
            callbacks=[
                pace,
                br.callbacks.Evaluate(lambda model, _: _errors(model, shown), max(1, self.steps // 25)),
                br.callbacks.JSONLines(folder / "metrics.jsonl"),
                br.callbacks.Progress(),
                pace.begin,
            ],
        )
        if self.save_every:
            tuner.callbacks.append(br.callbacks.Checkpoint(folder / "run.pt", self.save_every))
        if self.resume:
            tuner.load(folder / "run.pt")
        return tuner

    def table(self, rows: list[Row]) -> list[Row]:
        kept = [{name: value for name, value in row.items() if name not in _STATUS} for row in rows]
        return [{"network": f"{self.model}, {self.data}"} | row for row in kept]

    def headline(self, table: list[Row], rows: list[Row]) -> Row:
        return {name: table[0][name] for name in ("validation error", "test error")}

    def more(self, rows: list[Row]) -> Row:
        return {name: rows[0][name] for name in _STATUS}

    def note(self, rows: list[Row]) -> str:
        return _layout.fold(cost.NOTE)

    def draw(self, folder: Path, rows: list[Row]) -> None:
        """Training, validation and test error against hyper-steps, as in the paper's figure 5."""
        if not any(row.keys() >= {*_MEASURED} for row in rows):
            return
        with plots.panels(folder / self.figures[0]) as ((axes,),):
            draw_errors(axes, rows, f"{self.model} on {self.data}, a weight decay for each weight")
            axes.legend()


def _errors(model: nn.Module, batches: Mapping[str, Batch]) -> dict[str, float]:
    return {name: error(model, batch) for name, batch in batches.items()}


def draw_errors(axes: Axes, rows: list[Row], title: str) -> None:
    """Draw the three error curves of one run."""
    for key, label, colour, line in (
        ("test_error", "test", plots.RED, "-"),
        ("val_error", "validation (tuned on)", plots.BLUE, "-"),
        ("train_error", "training", plots.GREY, "--"),
    ):
        plots.curve(axes, rows, "hyper_step", key, line, 100, color=colour, label=label)
    plots.style(axes, "hyper-steps", "error [%]", title)
    axes.set_ylim(-2, 102)
    axes.set_xlim(left=0)
