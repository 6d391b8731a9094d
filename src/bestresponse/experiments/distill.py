"""A data set distilled into one image for each class: the paper's section 5.3, figure 6."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from ..errors import ArgumentError
from ..hyperparameters import DistilledData
from ..methods import Implicit, Method, Unrolled
from ..problem import Problem
from ..runs import callbacks
from ..solvers import ConjugateGradient
from ..tuner import Tuner
from . import data, distilled_set, runs, softmax
from .distilled_set import Recipe, draw
from .options import Options, Preset

Batch = tuple[Tensor, Tensor]

_PENALTIES = {"digits": 0.01, "mnist": 0.01, "cifar10": 0.1, "cifar100": 0.1}
_STRIP = 5
_FILES = [
    "distilled.png",
    "iterations.png",
    "snapshots.safetensors",
    "distilled.safetensors",
    "distilled.json",
]
_RANDOM_DRAWS = 10


@dataclass(kw_only=True)
class Distill(Options):
    """Tune every pixel of one image a class, so that a classifier trained on them alone does well on real data.

    The classifier is softmax regression with an ℓ2 penalty. By default its training problem is solved exactly before
    each hyper-step: with a few steps of gradient descent from weights that are carried along, information leaks
    into them, and a new classifier trained on the same images is far worse. The accuracies of the table are
    those of classifiers trained anew, from zero until they converge, on the file distilled.safetensors (with
    --learned-rate: by its recipe).
    """

    data: Literal["digits", "mnist", "cifar10", "cifar100"] = "digits"
    """The data set. digits comes with scikit-learn; the others are read from --data-dir."""
    per_class: int = 1
    """Distilled images for each class."""
    validation: int = 0
    """Labelled images of the training set in the validation loss; 0 means all of them."""
    steps: int = 150
    """Hyper-steps."""
    pixel_rate: float = 0.05
    """Adam's learning rate for the pixels, in units of the data's deviation; it falls to zero along a cosine."""
    penalty: float = 0.0
    """The classifier's ℓ2 penalty; 0 means 0.01, and 0.1 for CIFAR."""
    solver_steps: int = 60
    """Conjugate-gradient steps of each hypergradient, from the last solution."""
    start: Literal["means", "noise"] = "means"
    """The images to begin with: the means of each class, or noise."""
    smoothness: float = 0.0
    """The weight of the images' mean squared difference between neighbouring pixels in the validation loss."""
    closeness: float = 0.5
    """The weight of the images' mean squared distance from the first ones in the validation loss, which keeps
    recognisable what the classifier does not need."""
    soft_labels: bool = False
    """Tune the labels too, as probabilities."""
    learned_rate: bool = False
    """Train the classifier by --inner-steps steps of gradient descent from zero, and tune their learning rate too."""
    inner_steps: int = 20
    """Steps of gradient descent with --learned-rate."""


PRESETS: dict[Preset, Distill] = {
    "smoke": Distill(),
    "cpu": Distill(preset="cpu", threads=0, data="mnist", steps=450, pixel_rate=0.015),
    "paper": Distill(preset="paper", threads=0, data="mnist", steps=1000, start="noise", seeds=3),
}


class _Tuned(nn.Module):
    """What is tuned: the data, and the learning rate of the training on them."""

    def __init__(self, distilled: DistilledData, learned_rate: bool) -> None:
        super().__init__()
        self.distilled = distilled
        self.log_rate = nn.Parameter(torch.tensor(math.log(0.1))) if learned_rate else None

    def forward(self) -> tuple[Tensor, Tensor]:
        batch: tuple[Tensor, Tensor] = self.distilled()
        return batch

    def rate(self) -> Tensor:
        """The learning rate of the steps from zero."""
        assert self.log_rate is not None
        return self.log_rate.exp()

    def recipe(self, config: Distill) -> Recipe:
        """How a classifier is to be trained on the data as they are."""
        if self.log_rate is None:
            return Recipe(_penalty(config))
        return Recipe(_penalty(config), config.inner_steps, self.rate().item())


def run(config: Distill) -> Path:
    """Run the experiment and return its folder."""
    positive = ("per_class", "steps", "pixel_rate", "solver_steps", "inner_steps")
    device = config.begin(positive, ("validation", "penalty", "smoothness", "closeness"))
    images = data.load(config.data, config.data_dir)
    _refuse_too_few(config, images)
    test = images.x_test.flatten(1).to(device), images.y_test.to(device)
    folder = config.out or Path("runs") / f"distill-{config.data}"
    record = runs.Run(folder, "distill", config, figures=_FILES)
    rows: list[dict[str, Any]] = []
    for seed in config.all_seeds():
        place = folder if seed == config.seed else folder / f"seed-{seed}"
        place.mkdir(exist_ok=True)
        running = _distil(config, seed, images, test, record, place)
        w, gradient_norm = distilled_set.train_on(place)
        anew = softmax.accuracy(w, images.x_test, images.y_test)
        rows.append(_row("distilled, trained anew", anew, gradient_norm))
        rows.append(_row("distilled, as it ran along", running))
    rows += _comparisons(config, images)
    table = runs.mean_and_deviation(rows, ["training set"], ["test accuracy", "gradient norm"])
    draw(folder, runs.read_config(folder), runs.read_rows(folder))
    record.finish({"test accuracy": table[0]["test accuracy"]}, table, config.seed)
    return folder


def _row(name: str, accuracy: float, gradient_norm: float | None = None) -> dict[str, Any]:
    return {"training set": name, "test accuracy": accuracy, "gradient norm": gradient_norm}


def _penalty(config: Distill) -> float:
    return config.penalty or _PENALTIES[config.data]


def _validation(config: Distill, seed: int, images: data.Images, device: torch.device) -> Batch:
    x, y = images.x_train.flatten(1), images.y_train
    if config.validation:
        x, y = images.draw(config.validation, seed=seed)[0]
    return x.flatten(1).to(device), y.to(device)


def _refuse_too_few(config: Distill, images: data.Images) -> None:
    if config.validation:
        images.draw(config.validation, seed=config.seed)  # raises where there are not so many
    smallest, number = images.y_train.bincount(minlength=images.classes).min(dim=0)
    if smallest < config.per_class:
        raise ArgumentError(
            f"--per-class must be at most the images of a class; got {config.per_class}, and "
            f"{images.names[int(number)]!r} has {int(smallest)}."
        )


def _first_images(config: Distill, seed: int, images: data.Images) -> tuple[Tensor, Tensor]:
    """The images to begin with and their labels, class by class.

    Several of a class begin as the means of parts of it, since equal ones would stay equal.
    """
    labels = torch.arange(images.classes).repeat_interleave(config.per_class)
    generator = torch.Generator().manual_seed(seed)
    if config.start == "noise":
        return (
            0.1 * torch.randn(len(labels), *images.shape, generator=generator, dtype=images.x_train.dtype),
            labels,
        )
    means = []
    for number in range(images.classes):
        of_class = images.x_train[images.y_train == number]
        order = torch.randperm(len(of_class), generator=generator)
        means += [of_class[rows].mean(dim=0) for rows in order.tensor_split(config.per_class)]
    return torch.stack(means), labels


def _distil(
    config: Distill, seed: int, images: data.Images, test: Batch, record: runs.Run, folder: Path
) -> float:
    """Tune and save; the test accuracy of the classifier that ran along."""
    val = _validation(config, seed, images, test[0].device)
    first, labels = _first_images(config, seed, images)
    distilled = DistilledData(first, labels, images.classes if config.soft_labels else None)
    tuned = _Tuned(distilled, config.learned_rate).to(val[0].device)
    model = nn.Linear(val[0].shape[1], images.classes, device=val[0].device, dtype=val[0].dtype)
    problem = Problem(model, tuned, *_losses(config, distilled.inputs.detach().clone()))
    exact = softmax.ExactSoftmax(_penalty(config))
    method: Method = Implicit(ConjugateGradient(config.solver_steps), warm_start=True, estimate_error=False)
    if config.learned_rate:
        method = Unrolled(config.inner_steps, lambda tuned: tuned.rate())
    optimizer = torch.optim.Adam(tuned.parameters(), config.pixel_rate)
    watch = _Watch(config, seed, tuned, exact, test, record)
    tuner = Tuner(
        problem,
        _set_to_zero if config.learned_rate else exact,
        optimizer,
        method,
        hyper_scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, config.steps),
        seed=seed,
        callbacks=[watch, callbacks.Progress()],
    )
    tuner.fit([None], [val], config.steps)
    save_file(watch.snapshots, folder / "snapshots.safetensors")
    inputs, targets = tuned()
    distilled_set.save(
        folder,
        inputs,
        targets,
        tuned.recipe(config),
        data=config.data,
        classes=images.names,
        mean=images.mean,
        deviation=images.deviation,
    )
    return watch.accuracy(model)


class _Watch:
    """Writes a row for each hyper-step, with the test accuracy now and then, and keeps images for the strip."""

    def __init__(
        self,
        config: Distill,
        seed: int,
        tuned: _Tuned,
        exact: softmax.ExactSoftmax,
        test: Batch,
        record: runs.Run,
    ) -> None:
        self._config, self._seed, self._tuned = config, seed, tuned
        self._exact, self._test, self._record = exact, test, record
        self.snapshots: dict[str, Tensor] = {}
        self._keep(0)

    def __call__(self, tuner: Tuner) -> None:
        step, steps = tuner.hyper_step, self._config.steps
        row = {"seed": self._seed, **tuner.history[-1]}
        if step == steps or step % max(1, steps // 50) == 0:
            row["test_accuracy"] = self.accuracy(tuner.problem.model)
            row["inner_gradient_norm"] = None if self._config.learned_rate else self._exact.gradient_norm
        self._record.write(row)
        if step == steps or step % max(1, round(steps / _STRIP)) == 0:
            self._keep(step)

    def accuracy(self, model: nn.Module) -> float:
        """Of the present classifier; where a learned rate starts from zero each time, of one after its steps."""
        x, y = self._test
        if self._config.learned_rate:
            inputs, targets = (part.detach() for part in self._tuned())
            w, _ = self._tuned.recipe(self._config).train(
                inputs, targets, int(model.get_parameter("bias").numel())
            )
            return softmax.accuracy(w, x, y)
        with torch.no_grad():
            return float(model(x).argmax(dim=1).eq(y).float().mean())

    def _keep(self, step: int) -> None:
        """The images of the first ten classes."""
        images = self._tuned.distilled.inputs.detach()[: 10 * self._config.per_class]
        self.snapshots[str(step)] = images.cpu().clone()


def _set_to_zero(problem: Problem, batch: object) -> None:
    with torch.no_grad():
        for w in problem.weights.values():
            w.zero_()


def _losses(config: Distill, first: Tensor) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    penalty = _penalty(config)

    def train_loss(model: nn.Module, tuned: nn.Module, batch: None) -> Tensor:
        inputs, targets = tuned()
        squares = torch.stack([w.square().sum() for w in model.parameters()]).sum()
        return F.cross_entropy(model(inputs.flatten(1)), targets) + penalty / 2 * squares

    def val_loss(model: nn.Module, tuned: nn.Module, batch: Batch) -> Tensor:
        loss = F.cross_entropy(model(batch[0]), batch[1])
        x: Tensor = tuned()[0]
        if config.smoothness:
            rough = x.diff(dim=-1).square().mean() + x.diff(dim=-2).square().mean()
            loss = loss + config.smoothness * rough
        if config.closeness:
            loss = loss + config.closeness * (x - first).square().mean()
        return loss

    return train_loss, val_loss


def _comparisons(config: Distill, images: data.Images) -> list[dict[str, Any]]:
    """As many random images, the class means, and the whole training set, each by training from zero.

    The penalty on the whole set is chosen on a tenth of it that is held out.
    """
    classes, recipe, rows = images.classes, Recipe(_penalty(config)), []
    labels = torch.arange(classes).repeat_interleave(config.per_class)
    generator = torch.Generator().manual_seed(config.seed)
    for _ in range(_RANDOM_DRAWS):
        order = torch.randperm(len(images.y_train), generator=generator)
        picked = [order[images.y_train[order] == c][: config.per_class] for c in range(classes)]
        w, gradient_norm = recipe.train(images.x_train[torch.cat(picked)], labels, classes)
        rows.append(_row("random images", softmax.accuracy(w, images.x_test, images.y_test), gradient_norm))
    means = torch.stack([images.x_train[images.y_train == c].mean(dim=0) for c in range(classes)])
    w, gradient_norm = recipe.train(means, torch.arange(classes), classes)
    rows.append(_row("class means", softmax.accuracy(w, images.x_test, images.y_test), gradient_norm))
    order = torch.randperm(len(images.y_train), generator=generator)
    held, kept = order[: len(order) // 10], order[len(order) // 10 :]
    x, y = images.x_train, images.y_train

    def held_out_accuracy(penalty: float) -> float:
        w, _ = softmax.fit(x[kept], y[kept], classes, penalty, steps=50)
        return softmax.accuracy(w, x[held], y[held])

    best = max((1e-3, 1e-2, 1e-1), key=held_out_accuracy)
    w, gradient_norm = softmax.fit(x, y, classes, best, steps=200)
    rows.append(
        _row(f"all {len(y):,} images", softmax.accuracy(w, images.x_test, images.y_test), gradient_norm)
    )
    return rows
