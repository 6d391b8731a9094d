"""A network that changes or weights training images, tuned for validation loss: section 5.4."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

import bestresponse as br

from . import data, learned_images, models, plots, runs
from .cells import Cell
from .classification import Batch, val_loss
from .data import Images
from .experiment import Count, NotNegative, Number, Positive, Repeated, Row, Share, require
from .learned_images import Learned, Losses, scores

RowName = Literal[
    "no tuning",
    "untuned network",
    "identity",
    "3 Neumann",
    "3 unrolled",
    "3 conjugate gradient",
    "recycled",
    "Gauss-Newton",
]
_COLOURS = plots.colours(get_args(RowName))
_UNTUNED = ("no tuning", "untuned network")
_IMAGES = "images.safetensors"
_MEASURED = ("validation_accuracy", "validation_loss", "test_accuracy", "test_loss")


class Augment(Repeated):
    """Train a residual network on images that a second network changes at random, and tune the second network.

    There are few training images and many validation images. If a run is stopped, the same command continues it and
    ends with the same numbers.
    """

    name = "augment"
    cpu = (
        "--data mnist --train 200 --validation 4000 --pooling 2 --noise 0.5 --batch 100 --steps 1500 --warmup 100 "
        "--weight-steps 3 --hyper-rate 0.2 --seeds 3"
    )
    paper = (
        "--threads 0 --data cifar10 --network resnet18 --train 40000 --validation 10000 --noise 0 --batch 128 "
        "--validation-batch 128 --steps 60000 --warmup 0 --weight-steps 1 --weight-optimizer adam --weight-rate 1e-4 "
        "--decay 0 --optimizer rmsprop --hyper-rate 1e-2 --hyper-clip 0 --constant-rates --bound 0 --initial 0 "
        "--rows 'no tuning' identity '3 Neumann' '3 unrolled' '3 conjugate gradient' --save-every 500"
    )
    labels = ("data", "learn")
    figures = ("augment.png",)
    by = ("row", "hyperparameters")
    of = ("test accuracy", "validation accuracy", "test loss", "change", "noise", "seconds")

    data: Literal["digits", "mnist", "cifar10"] = "digits"
    """The data set. digits comes with scikit-learn; the others are read from --data-dir."""
    learn: Literal["augmentation", "weights", "both"] = "augmentation"
    """The tuned networks: one that changes the images, one that weights them, or both."""
    network: Literal["resnet8", "resnet18"] = "resnet8"  # The network that is trained.
    train: Count = 100  # Training images.
    validation: Count = 500  # Validation images.
    pooling: Count = 1  # The side in pixels of the squares over which images are averaged.
    noise: NotNegative = 0.3
    """The standard deviation of the noise in validation and test images, in units of the pixels' own. The training
    images have no noise, so the augmentation has to learn it. With 0, as in the paper, there is none anywhere."""
    wrong_labels: Share = 0.0  # The share of training images whose label is drawn at random.
    batch: Count = 50  # Training images in a step.
    validation_batch: Count = 250  # Validation images in a hyper-step.
    steps: Count = 120  # Weight steps in total; an incomplete last hyper-step is left out.
    warmup: Number = 40  # Weight steps before the first hyper-step.
    weight_steps: Count = 5  # Weight steps before each hyper-step.
    weight_optimizer: Literal["sgd", "adam"] = "sgd"  # The optimiser of the weights; SGD has momentum 0.9.
    weight_rate: Positive = 0.03
    """The learning rate of the weights; it falls to zero in the last 30 % of the steps."""
    decay: NotNegative = 5e-3  # The weight decay of the trained network, which is not tuned.
    optimizer: Literal["sgd", "rmsprop"] = "sgd"
    """The optimiser of the hyperparameters; SGD has momentum 0.9."""
    hyper_rate: Positive = 0.1
    """The learning rate of the hyperparameters; it falls to zero between 60 and 80 % of the hyper-steps."""
    constant_rates: bool = False  # Keep both learning rates constant.
    hyper_clip: NotNegative = 0.01
    """The largest norm of a hypergradient; 0 turns clipping off. With a value as small as the default, nearly all
    hypergradients get the same norm."""
    bound: NotNegative = 1.0
    """The largest change of a pixel, in units of the pixels' deviation; 0 removes the bound."""
    initial: NotNegative = 0.1
    """The standard deviation of the initial weights in the augmentation's last layer; 0 gives the identity."""
    beside: bool = False  # Train on the original images too.
    rows: tuple[RowName, ...] = get_args(RowName)
    """The rows of the table. "untuned network" keeps the initial network of the tuned rows. "3 Neumann" is the sum of
    four terms, at three products. "3 unrolled" looks three steps ahead; at a minimum this is a sum of three terms."""
    save_every: Count = 10  # Hyper-steps between two saved states.

    def check(self) -> None:
        super().check()
        require(
            min(self.train, self.batch) >= 2,
            f"--train and --batch must be at least 2, since batch norm needs two images; got {self.train} and "
            f"{self.batch}.",
        )
        require(
            self.warmup + self.weight_steps <= self.steps,
            f"--steps must leave a hyper-step after --warmup; got {self.steps} after {self.warmup}, with "
            f"--weight-steps {self.weight_steps}.",
        )

    def tasks(self, device: torch.device, folder: Path) -> Sequence[Cell]:
        images = data.load(self.data, self.data_dir)
        shape = images.shape[1:]
        message = f"--pooling must leave 4×4 pixels; got {self.pooling} for {shape}."
        require(self.pooling <= min(shape) // 4, message)
        images.draw(self.train, self.validation, seed=self.seed)  # raises if there are too few
        sets = lru_cache(1)(partial(self._sets, images, device))
        make = partial(self._row, sets, images.classes)
        return [Cell(self, name, seed, folder, make) for seed in self.all_seeds() for name in self.rows]

    def _sets(self, images: Images, device: torch.device, seed: int) -> list[Batch]:
        """Training, validation and test images, scaled to deviation 1 in each channel of the training images."""
        (x, y), (x_val, y_val) = images.draw(self.train, self.validation, seed=seed)
        x, x_val, x_test = (F.avg_pool2d(part, self.pooling) for part in (x, x_val, images.x_test))
        scale = x.std(dim=(0, 2, 3), keepdim=True)
        generator = torch.Generator().manual_seed(seed)

        def noisy(part: Tensor) -> Tensor:
            return part / scale + self.noise * torch.randn(part.shape, generator=generator)

        wrong = torch.rand(len(y), generator=generator) < self.wrong_labels
        y = torch.where(wrong, torch.randint(images.classes, y.shape, generator=generator), y)
        parts = (x / scale, y), (noisy(x_val), y_val), (noisy(x_test), images.y_test)
        return [(x.to(device), y.to(device)) for x, y in parts]

    def _row(self, sets: Callable[[int], list[Batch]], classes: int, cell: Cell) -> Row:
        """Train, tune and measure one row for one seed."""
        train, val, test = sets(cell.seed)
        tuned = cell.name not in _UNTUNED
        hyper_steps = (self.steps - self.warmup) // self.weight_steps
        problem, losses = self._problem(cell.name, train[0], classes)
        learned = problem.hyper
        optimizer = self._weight_optimizer(list(problem.weights.values()))
        hyper_optimizer = self._hyper_optimizer(list(learned.parameters()), self.hyper_rate if tuned else 0.0)
        measure = partial(_measured, {"validation": val, "test": test})
        tuner = br.Tuner(
            problem,
            optimizer,
            hyper_optimizer,
            self._methods(losses)[cell.name],
            weight_steps=self.weight_steps,
            warmup_steps=self.warmup,
            weight_scheduler=self._schedule(optimizer, self.steps, 0.7, 1.0),
            hyper_scheduler=self._schedule(hyper_optimizer, hyper_steps, 0.6, 0.8),
            seed=cell.seed,
            callbacks=[br.callbacks.Evaluate(measure, max(1, hyper_steps // 30))],
        )
        train_batches = _batches(train, self.batch, cell.seed)
        val_batches = _batches(val, self.validation_batch, cell.seed)
        cell.fit(tuner, train_batches, val_batches, hyper_steps, self.save_every)
        last = tuner.history[-1]
        return {
            "hyperparameters": sum(p.numel() for p in learned.parameters()) if tuned else 0,
            **{name.replace("_", " "): value for name, value in last.items() if name in _MEASURED},
            **learned_images.changes(learned, train[0], cell.folder / _IMAGES),
            "seconds": last["seconds"],
        }

    def _problem(self, row: str, x: Tensor, classes: int) -> tuple[br.Problem, Losses]:
        """The same networks for each row, except that "no tuning" has the identity for an augmentation."""
        channels, height, width = x.shape[1:]
        model = models.make(self.network, (channels, height, width), classes)
        augmenter = weights = None
        if self.learn != "weights":
            initial = 0.0 if row == "no tuning" else self.initial
            augmenter = br.hyperparameters.Augmenter(channels, bound=self.bound or None, initial=initial)
        if self.learn != "augmentation":
            weights = br.hyperparameters.ExampleWeights(scores(channels))
        losses = Losses(self.decay, self.beside)
        model, learned = model.to(x.device), Learned(augmenter, weights).to(x.device)
        return br.Problem(model, learned, losses.train, val_loss), losses

    def _methods(self, losses: Losses) -> dict[str, br.Method]:
        curvature = br.GaussNewton(losses.predict, losses.output_loss, losses.rest)
        return {
            **dict.fromkeys(_UNTUNED, br.Direct()),
            "identity": br.Implicit(br.Identity()),
            "3 Neumann": br.Implicit(br.Neumann(3, scale=self.weight_rate)),
            "3 unrolled": br.Unrolled(3, self.weight_rate),
            "3 conjugate gradient": br.Implicit(br.ConjugateGradient(3)),
            "recycled": br.Implicit(br.ConjugateGradient(4, damping=None, recycle=10), warm_start=True),
            "Gauss-Newton": br.Implicit(curvature=curvature),
        }

    def _schedule(
        self, optimizer: torch.optim.Optimizer, steps: int, begin: float, end: float
    ) -> LambdaLR | None:
        """A learning rate that falls from the share ``begin`` of the steps to the share ``end``."""
        return (
            None
            if self.constant_rates
            else LambdaLR(optimizer, lambda step: _share(step / steps, begin, end))
        )

    def _weight_optimizer(self, weights: list[nn.Parameter]) -> torch.optim.Optimizer:
        if self.weight_optimizer == "adam":
            return torch.optim.Adam(weights, self.weight_rate)
        return torch.optim.SGD(weights, self.weight_rate, momentum=0.9, nesterov=True)

    def _hyper_optimizer(self, parameters: list[nn.Parameter], rate: float) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = torch.optim.SGD(parameters, rate, momentum=0.9)
        if self.optimizer == "rmsprop":
            optimizer = torch.optim.RMSprop(parameters, rate)

        def clip(*_: Any) -> None:
            nn.utils.clip_grad_norm_(parameters, self.hyper_clip)

        if self.hyper_clip:
            optimizer.register_step_pre_hook(clip)
        return optimizer

    def headline(self, table: list[Row], rows: list[Row]) -> Row:
        return {f"test accuracy, {row['row']}": row["test accuracy"] for row in table}

    def draw(self, folder: Path, rows: list[Row]) -> None:
        """Test accuracy during the runs; for the best row, images, two samples, and the deviation of each pixel."""
        first = [row for row in rows if row["seed"] == self.seed]
        tuned = [row for row in first if row["row"] not in _UNTUNED] or first
        best = max(tuned, key=lambda row: row["validation accuracy"])
        images = folder / best["folder"] / _IMAGES
        shown = self.learn != "weights" and images.is_file()
        size = (10.5 if shown else 6.0, 3.8)
        with plots.panels(folder / self.figures[0], 1, 2 if shown else 1, size) as ((axes, *more),):
            for row in first:
                history = runs.read_rows(folder / row["folder"])
                look = {"color": _COLOURS[row["row"]], "label": row["row"], "linewidth": 1.6}
                plots.curve(axes, history, "weight_step", "test_accuracy", scale=100, **look)
            axes.legend(fontsize=8)
            plots.style(axes, "weight steps", "test accuracy [%]", f"{self.train} training images")
            for panel in more:
                learned_images.show(panel, images, f"learned augmentation, {best['row']}")


def _batches(batch: Batch, size: int, seed: int) -> DataLoader[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(seed)
    size = min(size, len(batch[0]))
    return DataLoader(TensorDataset(*batch), size, shuffle=True, drop_last=True, generator=generator)


def _measured(sets: Mapping[str, Batch], model: nn.Module, _: nn.Module) -> dict[str, float]:
    values = {}
    for name, (x, y) in sets.items():
        logits = torch.cat([model(part) for part in torch.split(x, 1000)])
        values[f"{name}_accuracy"] = float(logits.argmax(dim=1).eq(y).float().mean())
        values[f"{name}_loss"] = float(F.cross_entropy(logits, y))
    return values


def _share(at: float, begin: float, end: float) -> float:
    """1 before ``begin``, 0 after ``end``, and half a cosine between them."""
    progress = min(1.0, max(0.0, (at - begin) / (end - begin)))
    return 0.5 * (1.0 + math.cos(math.pi * progress))
