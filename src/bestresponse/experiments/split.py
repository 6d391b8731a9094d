"""How much data to use for validation, for one hyperparameter and for many: the paper's figure 7."""

import math
import statistics
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from scipy.stats import t as student
from torch import nn

import bestresponse as br

from . import data, plots
from .classification import Batch, accuracy, set_to_zero, train_loss, val_loss
from .data import Images
from .experiment import Count, LogDecay, Positive, Repeated, Row, Tasks, require

Per = Literal["global", "weight"]
_KINDS: dict[Per, tuple[str, str]] = {
    "global": ("one decay", plots.BLUE),
    "weight": ("a decay for each weight", plots.RED),
}
_NINE = "--shares 0.1 0.2 0.3 0.4 0.5 0.6 0.7 0.8 0.9"


class Split(Repeated):
    """Split a fixed number of examples into training and validation data, and tune weight decay on each split.

    The model is softmax regression, with one decay for all weights or one for each. The test accuracy is measured for
    the weights at the end of tuning, and after retraining on all examples with the tuned decays (the paper's figure 7).
    """

    name = "split"
    cpu = f"--threads 0 --data mnist --examples 500 --seeds 5 {_NINE}"
    paper = f"--threads 0 --data mnist --examples 60000 --steps 300 {_NINE}"
    figures = ("split.png",)
    by, of = ("per", "share"), ("accuracy", "retrained accuracy", "validation accuracy")
    counted = True

    data: Literal["digits", "mnist"] = "digits"
    """The data set. digits comes with scikit-learn; mnist is read from --data-dir."""
    examples: Count = 200  # Training and validation examples together.
    shares: tuple[float, ...] = (0.1, 0.5, 0.9)  # The shares of the examples that are for validation.
    steps: Count = 60  # Hyper-steps.
    weight_steps: Count = 10  # Weight steps before each hyper-step.
    weight_rate: Positive = 0.03  # Adam's learning rate for the weights.
    hyper_rate: Positive = 0.1
    """RMSprop's learning rate for the logarithms of the decays; it decays to zero along a cosine."""
    initial_log_decay: LogDecay = -4.0  # The natural logarithm of each decay at the start.

    def check(self) -> None:
        super().check()
        for share in self.shares:
            leaves = 0 < share < 1 and 0 < round(share * self.examples) < self.examples
            rule = "--shares must leave examples for training and for validation"
            require(leaves, f"{rule}; got {share} of {self.examples}.")

    def tasks(self, device: torch.device, folder: Path) -> Tasks:
        images = data.load(self.data, self.data_dir)
        images.draw(self.examples, seed=self.seed)  # raises if there are too few
        test = images.x_test.flatten(1).to(device), images.y_test.to(device)
        return [
            partial(self._tune, images, test, seed, per, share)
            for seed in self.all_seeds()
            for per in _KINDS
            for share in self.shares
        ]

    def _tune(self, images: Images, test: Batch, seed: int, per: Per, share: float) -> Iterator[Row]:
        """Tune with the first examples as validation data, and retrain on all of them."""
        ((x, y),) = images.draw(self.examples, seed=seed)
        whole = x.flatten(1).to(test[0].device), y.to(test[0].device)
        size = round(share * self.examples)
        val, train = ((whole[0][rows], whole[1][rows]) for rows in (slice(size), slice(size, None)))
        model = nn.Linear(whole[0].shape[1], images.classes, device=whole[0].device, dtype=whole[0].dtype)
        set_to_zero(model)
        decay = br.hyperparameters.WeightDecay(model, per=per, initial=math.exp(self.initial_log_decay))
        problem = br.Problem(model, decay, train_loss, val_loss)
        optimizer = torch.optim.RMSprop(decay.parameters(), self.hyper_rate)
        tuner = br.Tuner(
            problem,
            torch.optim.Adam(problem.weights.values(), self.weight_rate),
            optimizer,
            br.Implicit(),
            weight_steps=self.weight_steps,
            hyper_scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.steps),
        )
        tuner.fit([train], [val], self.steps)
        row = {"seed": seed, "per": per, "share": share}
        row |= {"accuracy": accuracy(model, test), "validation accuracy": accuracy(model, val)}
        losses = tuner.retrain([whole], self.steps * self.weight_steps, set_to_zero)
        yield row | {"retrained accuracy": accuracy(model, test), "retrained loss": losses[-1]}

    def headline(self, table: list[Row], rows: list[Row]) -> Row:
        best: Row = {}
        for per, (kind, _) in _KINDS.items():
            of_kind = [row for row in table if row["per"] == per]
            for key in ("accuracy", "retrained accuracy"):
                best[f"best share, {kind}, {key}"] = max(of_kind, key=lambda row: row[key])["share"]
        return best

    def draw(self, folder: Path, rows: list[Row]) -> None:
        """Test accuracy against the share, as in the paper's figure 7; solid lines after retraining on all data."""
        rows = [row | {"share [%]": 100 * row["share"]} for row in rows]
        with plots.panels(folder / self.figures[0]) as ((axes,),):
            for per, (kind, colour) in _KINDS.items():
                of_kind = [row for row in rows if row["per"] == per]
                for key, line, words in (
                    ("retrained accuracy", "o-", "retrained on all"),
                    ("accuracy", "o--", "end of tuning"),
                ):
                    look = {"color": colour, "label": f"{kind}, {words}", "markersize": 4}
                    plots.curve(axes, of_kind, "share [%]", key, line, 100, _interval, **look)
            title = f"{self.examples} examples of {self.data}"
            if len({row["seed"] for row in rows}) > 1:
                title += "; bands: 95 % intervals of the mean over seeds"
            plots.style(axes, "examples for validation [%]", "test accuracy [%]", title)
            axes.legend(fontsize=8)


def _interval(values: Sequence[float]) -> tuple[float, float]:
    """A 95 % interval of the mean."""
    mean, number = statistics.fmean(values), len(values)
    half = float(student.ppf(0.975, number - 1)) * statistics.stdev(values) / math.sqrt(number)
    return mean - half, mean + half
