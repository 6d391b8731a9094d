"""Training on images of which many have random labels, with weights tuned on a few images with right ones."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

import bestresponse as br

from . import data, plots
from .classification import Batch, accuracy, output_loss, squared_norm
from .experiment import Count, NotNegative, Number, Positive, Repeated, Row, Share, Tasks, require

WayName = Literal[
    "right images alone",
    "all images",
    "a weight for each image",
    "a network of the loss",
    "the wrong labels known",
]
_TUNED = ("a weight for each image", "a network of the loss")
_COLOURS = dict(
    zip(get_args(WayName), (plots.GREEN, plots.GREY, plots.PURPLE, plots.RED, plots.ORANGE), strict=True)
)
_MEASUREMENTS = 20


class NoisyLabels(Repeated):
    """Train on images of which a share has random labels, and weigh them by a few images with right labels.

    The ways: training on the right images alone; on all images; with a tuned weight for each image; with weights from
    a tuned network of the image's loss; and on all but the wrong labels, as if they were known. The validation loss is
    that of the right images. Then new weights are trained on the weighted images and the right ones together. The test
    images are used for the table only. Detection is the area under the curve of weights as scores of right labels;
    without weights the scores are the losses, largest last, at the end of training.
    """

    name = "noisy-labels"
    quick = "--data mnist --examples 2000 --right 500 --batch 500 --hyper-steps 100 --steps 1000 --seeds 1"
    cpu = "--data mnist --examples 2000 --right 500 --batch 500 --hyper-steps 300 --steps 3000 --seeds 3"
    paper = f"{cpu} --examples 20000 --noise 0.3 --hyper-steps 1000 --steps 6000"
    figures = ("noisy-labels.png",)
    by = ("way",)
    of = ("at the end", "at best", "trained anew", "detection")
    counted = True

    data: Literal["digits", "mnist"] = "digits"
    """The data set. digits comes with scikit-learn; mnist is read from --data-dir."""
    examples: Count = 600  # Images for training.
    noise: Share = 0.5  # The share of them that gets random labels.
    right: Count = 150  # Further images with right labels, for validation.
    ways: tuple[WayName, ...] = get_args(WayName)  # The rows of the table.
    batch: Count = 200  # Images in a batch.
    width: Count = 200  # Units of the hidden layer.
    decay: NotNegative = 1e-3  # The decay of all weights.
    weight_rate: Positive = 1e-3  # Adam's learning rate for the weights.
    hyper_steps: Count = 60  # Hyper-steps of the two tuned ways.
    weight_steps: Count = 5  # Weight steps before each hyper-step.
    warmup: Number = 100  # Weight steps before the first hyper-step.
    table_rate: Positive = 0.1  # Adam's learning rate for a weight of each image.
    network_rate: Positive = 0.03  # Adam's learning rate for the network of the loss.
    steps: Count = 400  # Weight steps of training anew.

    def tasks(self, device: torch.device, folder: Path) -> Tasks:
        images = data.load(self.data, self.data_dir)
        images.draw(self.examples, self.right, seed=self.seed)  # raises if there are too few
        test = images.x_test.to(device), images.y_test.to(device)
        require(0 < self.noise < 1, f"--noise must be between 0 and 1; got {self.noise:g}.")
        return [
            partial(self._row, _draw(images, self, seed, device), test, seed, way)
            for seed in self.all_seeds()
            for way in self.ways
        ]

    def _row(self, given: "_Given", test: Batch, seed: int, way: WayName) -> Iterator[Row]:
        """Train in one way, and then anew on the images with the weights that were found."""
        torch.manual_seed(seed)
        model, curve = self._network(given), []
        all_steps = self.warmup + self.hyper_steps * self.weight_steps

        def measure(step: int) -> None:
            curve.append((step, accuracy(model, test)))

        if way in _TUNED:
            weights = self._tune(way, model, given, measure)
        else:
            weights = _fixed(way, given)
            self._train(model, given, weights, all_steps, measure, right=not bool(weights.any()))
        losses = _losses(model, given.noisy)
        scores = weights if way in _TUNED else -losses
        row: Row = {"seed": seed, "way": way, "curve": curve, "at the end": curve[-1][1]}
        row |= {"at best": max(value for _, value in curve), "weights": _quantiles(weights, given.wrong)}
        row["detection"] = float(roc_auc_score(~given.wrong.cpu().numpy(), scores.cpu().numpy()))
        torch.manual_seed(seed + 1)
        model = self._network(given)
        self._train(model, given, weights, self.steps, lambda step: None, right=True)
        yield row | {"trained anew": accuracy(model, test)}

    def _network(self, given: "_Given") -> nn.Module:
        size, classes = given.noisy[0][0].numel(), given.classes
        layers = nn.Flatten(), nn.Linear(size, self.width), nn.ReLU(), nn.Linear(self.width, classes)
        return nn.Sequential(*layers).to(given.wrong.device)

    def _tune(
        self, way: WayName, model: nn.Module, given: "_Given", measure: Callable[[int], None]
    ) -> Tensor:
        """Tune the weights while the network trains; the weight of each image at the end."""
        hyper, rate = (
            _weights(way, len(given.wrong)),
            self.table_rate if way == _TUNED[0] else self.network_rate,
        )
        hyper.to(given.wrong.device)

        def train_loss(model: nn.Module, hyper: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
            x, y, index = batch
            losses = F.cross_entropy(model(x), y, reduction="none")
            weighted: Tensor = hyper(index) * losses if way == _TUNED[0] else hyper(losses)
            return weighted.mean() + self.decay / 2 * squared_norm(model)

        def val_loss(model: nn.Module, hyper: nn.Module, batch: Batch) -> Tensor:
            return output_loss(model(batch[0]), batch)

        every = max(1, self.hyper_steps // _MEASUREMENTS)

        def follow(tuner: br.Tuner) -> None:
            if tuner.hyper_step % every == 0 or tuner.hyper_step == self.hyper_steps:
                measure(self.warmup + tuner.hyper_step * self.weight_steps)

        tuner = br.Tuner(
            br.Problem(model, hyper, train_loss, val_loss),
            torch.optim.Adam(model.parameters(), self.weight_rate),
            torch.optim.Adam(hyper.parameters(), rate),
            br.Implicit(curvature=br.Hessian()),
            weight_steps=self.weight_steps,
            warmup_steps=self.warmup,
            callbacks=[follow],
        )
        index = torch.arange(len(given.wrong), device=given.wrong.device)
        tuner.fit(
            _loader(self.batch, *given.noisy, index), _loader(self.batch, *given.right), self.hyper_steps
        )
        if isinstance(hyper, br.hyperparameters.LossWeights):
            return hyper.weights(_losses(model, given.noisy)).detach()
        return hyper.values().detach()

    def _train(
        self,
        model: nn.Module,
        given: "_Given",
        weights: Tensor,
        steps: int,
        measure: Callable[[int], None],
        right: bool = False,
    ) -> None:
        """Train on the weighted images, without those of weight zero, and with ``right`` on the right ones too."""
        kept = weights > 0
        parts = [(given.noisy[0][kept], given.noisy[1][kept], weights[kept])]
        if right:
            parts.append((*given.right, torch.ones_like(given.right[1], dtype=weights.dtype)))
        loader = _loader(self.batch, *(torch.cat(column) for column in zip(*parts, strict=True)))
        optimizer, every = (
            torch.optim.Adam(model.parameters(), self.weight_rate),
            max(1, steps // _MEASUREMENTS),
        )
        step = 0
        while step < steps:
            for images, labels, of_batch in loader:
                losses = F.cross_entropy(model(images), labels, reduction="none")
                loss = (of_batch * losses).mean() + self.decay / 2 * squared_norm(model)
                optimizer.zero_grad()
                torch.autograd.backward(loss)
                optimizer.step()
                step += 1
                if step % every == 0 or step == steps:
                    measure(step)
                if step == steps:
                    break

    def headline(self, table: list[Row], rows: list[Row]) -> Row:
        return {row["way"]: row["trained anew"] for row in table}

    def draw(self, folder: Path, rows: list[Row]) -> None:
        """Test accuracy along the runs; and the weights of images with right and with wrong labels."""
        with plots.panels(folder / self.figures[0], 1, 2, (10.5, 4.0)) as ((left, right),):
            for row in rows:
                first = row["seed"] == rows[0]["seed"]
                steps, values = zip(*row["curve"], strict=True)
                look = {"color": _COLOURS[row["way"]], "label": row["way"] if first else None}
                left.plot(steps, [100 * value for value in values], **look)
            plots.style(left, "weight step", "test accuracy [%]", "along the run; a line for each seed")
            plots.legend_below(left, 3)
            tuned = [row for row in rows if row["way"] in _TUNED and row["seed"] == rows[0]["seed"]]
            for place, row in enumerate(tuned):
                for shift, (name, colour) in enumerate((("right", plots.GREEN), ("wrong", plots.ORANGE))):
                    low, quarter, middle, three, high = row["weights"][name]
                    at = place + 0.25 * (shift - 0.5)
                    right.plot([at, at], [low, high], color=colour, linewidth=1)
                    right.plot([at, at], [quarter, three], color=colour, linewidth=8, label=f"{name} label")
                    right.plot([at], [middle], "o", color="white", markeredgecolor=colour, markersize=5)
            right.set_xlim(-0.6, len(tuned) - 0.4)
            right.set_xticks(range(len(tuned)), [row["way"] for row in tuned])
            plots.style(right, "", "weight / mean weight", "middle 50 % and 90 % of the weights, first seed")
            handles, names = right.get_legend_handles_labels()
            right.legend(handles[:2], names[:2])


@dataclass(frozen=True)
class _Given:
    """Images with some wrong labels, images with right labels, and which of the first are wrong."""

    noisy: Batch
    right: Batch
    wrong: Tensor
    classes: int


def _draw(images: data.Images, config: NoisyLabels, seed: int, device: torch.device) -> _Given:
    (x, y), right = images.draw(config.examples, config.right, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randperm(len(y), generator=generator)[: round(config.noise * len(y))]
    labels = y.clone()
    labels[drawn] = torch.randint(images.classes, (len(drawn),), generator=generator)
    noisy, right = ((part.to(device), labels.to(device)) for part, labels in ((x, labels), right))
    return _Given(noisy, right, (labels != y).to(device), images.classes)


def _weights(way: WayName, number: int) -> br.hyperparameters.Weights | br.hyperparameters.LossWeights:
    if way == _TUNED[0]:
        return br.hyperparameters.Weights(number, "clamp", sparse=False)
    return br.hyperparameters.LossWeights(nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 1)))


def _fixed(way: WayName, given: _Given) -> Tensor:
    """The weights of the images in a way that tunes nothing."""
    if way == "all images":
        return torch.ones(len(given.wrong), device=given.wrong.device)
    return (
        torch.zeros_like(given.wrong, dtype=torch.float32)
        if way == "right images alone"
        else (~given.wrong).float()
    )


def _loader(size: int, *columns: Tensor) -> DataLoader[tuple[Tensor, ...]]:
    """Shuffled batches; each is one lookup of rows."""
    rows = TensorDataset(*columns)
    return DataLoader(
        rows, sampler=BatchSampler(RandomSampler(rows), min(size, len(rows)), False), batch_size=None
    )


@torch.no_grad()
def _losses(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def _quantiles(weights: Tensor, wrong: Tensor) -> dict[str, list[float]]:
    """Five quantiles of the weights relative to their mean, of images with right and with wrong labels."""
    relative, places = weights / weights.mean(), torch.tensor([0.05, 0.25, 0.5, 0.75, 0.95])
    return {
        name: relative[rows].quantile(places.to(relative)).tolist()
        for name, rows in (("right", ~wrong), ("wrong", wrong))
    }
