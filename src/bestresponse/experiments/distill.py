"""Distillation of a data set into one image for each class: the paper's section 5.3, figure 6."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

import bestresponse as br

from ..errors import ArgumentError
from . import data, distilled_set, readers, runs, softmax
from .classification import Batch, set_to_zero, squared_norm
from .data import Images
from .distilled_set import Recipe
from .experiment import Count, NotNegative, Number, Positive, Repeated, Row, Tasks
from .tuned_images import Mixtures, TunedImages, reading_loss

_PENALTIES = {"digits": 0.01, "mnist": 0.01, "cifar10": 0.1, "cifar100": 0.1}
_STRIP = 5
_RANDOM_DRAWS = 10


class Distill(Repeated):
    """Tune every pixel of one image per class, so that a classifier trained on them alone does well on real data.

    The classifier is softmax regression with an ℓ2 penalty. By default its training problem is solved exactly before
    each hyper-step. With a few gradient steps from the last weights instead, information would leak into the weights,
    and a new classifier trained on the same images would be far worse. The accuracies of the table are those of new
    classifiers, trained from zero until they converge on the file distilled.safetensors (with --learned-rate: by its
    recipe).
    """

    name = "distill"
    cpu = "--threads 0 --data mnist --steps 450 --pixel-rate 0.015"
    paper = "--threads 0 --data mnist --start noise --closeness 0 --steps 1000"
    figures = ("distilled.png", "iterations.png")
    files = ("snapshots.safetensors", "distilled.safetensors", "distilled.json")
    by, of = ("training set",), ("test accuracy", "gradient norm")
    writes_history = True

    data: Literal["digits", "mnist", "cifar10", "cifar100"] = "digits"
    """The data set. digits comes with scikit-learn; the others are read from --data-dir."""
    per_class: Count = 1  # Distilled images for each class.
    validation: Number = 0  # Labelled images of the training set in the validation loss; 0 means all of them.
    steps: Count = 150  # Hyper-steps.
    pixel_rate: Positive = 0.05
    """Adam's learning rate for the pixels, in units of the data's deviation; it decays to zero along a cosine. With
    --start mixtures, also that of the logarithms of the weights."""
    penalty: NotNegative = 0.0  # The classifier's ℓ2 penalty; 0 means 0.01, and 0.1 for CIFAR.
    solver_steps: Count = 60  # Conjugate-gradient steps of each hypergradient, starting at the last solution.
    start: Literal["means", "mixtures", "noise", "black"] = "means"
    """The initial images: class means, noise, or black. With mixtures, an image is the sum of a mean of its class's
    original images, whose weights are tuned, and a tuned difference, which begins at zero."""
    within_range: bool = False
    """Keep each pixel within the range of the training set, so that an image can be saved as one."""
    readers: bool = False
    """Train two networks on the training set, and count the distilled images that they read as their class."""
    smoothness: NotNegative = 0.0
    """The weight of the mean squared difference between neighbouring pixels in the validation loss."""
    closeness: NotNegative = 0.5
    """The weight of the mean squared distance from the initial images, or from the mixtures, in the validation loss. It
    keeps details that the classifier does not need recognisable."""
    readability: NotNegative = 0.0
    """The weight of a loss in the validation loss: that of four networks, trained on the training set, that read the
    images, as they are and shifted by a pixel. They are others than those of --readers."""
    soft_labels: bool = False  # Tune the labels too, as probabilities.
    learned_rate: bool = False
    """Train the classifier by --inner-steps steps of gradient descent from zero, and tune their learning rate too."""
    inner_steps: Count = 20  # Steps of gradient descent with --learned-rate.

    def tasks(self, device: torch.device, folder: Path) -> Tasks:
        images = data.load(self.data, self.data_dir)
        if self.validation:
            for seed in self.all_seeds():
                self._check(
                    images, images.draw(self.validation, seed=seed)[0][1]
                )  # raises if there are too few
        smallest, number = images.y_train.bincount(minlength=images.classes).min(dim=0)
        if smallest < self.per_class:
            raise ArgumentError(
                f"--per-class must be at most the images of a class; got {self.per_class}, and "
                f"{images.names[int(number)]!r} has {int(smallest)}."
            )
        of_seeds = [partial(self._distil, seed, images, device, folder) for seed in self.all_seeds()]
        return [*of_seeds, partial(self._comparisons, images)]

    def _check(self, images: Images, drawn: Tensor) -> None:
        """Raise if mixtures lack images of a class among those drawn."""
        counts = drawn.bincount(minlength=images.classes).tolist()
        if self.start == "mixtures" and 0 in counts:
            raise ArgumentError(
                f"--start mixtures needs an image of each class; --validation {self.validation} draws none of "
                f"{images.names[counts.index(0)]!r}. Raise it, or take --start means."
            )

    def _distil(self, seed: int, images: Images, device: torch.device, folder: Path) -> Iterator[Row]:
        """Tune and save the images; the test accuracy of a new classifier, and of the tuner's own."""
        x, y = images.x_train, images.y_train
        if self.validation:
            x, y = images.draw(self.validation, seed=seed)[0]
        parts = (x, y), (images.x_test, images.y_test)
        val, test = ((x.flatten(1).to(device), y.to(device)) for x, y in parts)
        tuned, labels = self._tuned(seed, images, x, y)
        tuned = tuned.to(device)
        networks = readers.others(images, seed, device) if self.readability else []
        model = nn.Linear(val[0].shape[1], images.classes, device=device, dtype=val[0].dtype)
        exact = softmax.ExactSoftmax(tuned.penalty)
        solver = br.ConjugateGradient(self.solver_steps)
        method: br.Method = br.Implicit(solver, warm_start=True, estimate_error=False)
        if self.learned_rate:
            method = br.Unrolled(self.inner_steps, lambda tuned: tuned.rate())
        optimizer = torch.optim.Adam(tuned.parameters(), self.pixel_rate)

        def measure(*_: nn.Module) -> dict[str, float]:
            value = tuned.test_accuracy(model, test)
            return {"test_accuracy": value, "inner_gradient_norm": exact.gradient_norm}

        keep = _Snapshots(self, tuned, seed)
        tuner = br.Tuner(
            br.Problem(model, tuned, _train_loss, partial(self._val_loss, networks)),
            (lambda problem, _: set_to_zero(problem.model)) if self.learned_rate else exact,
            optimizer,
            method,
            hyper_scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.steps),
            seed=seed,
            callbacks=[
                br.callbacks.Evaluate(measure, max(1, self.steps // 50)),
                keep,
                br.callbacks.JSONLines(folder / "metrics.jsonl"),
                br.callbacks.Progress(),
            ],
        )
        tuner.fit([None], [val], self.steps)
        place = folder if seed == self.seed else folder / f"seed-{seed}"
        place.mkdir(exist_ok=True)
        save_file(keep.snapshots, place / "snapshots.safetensors")
        distilled_set.save(place, tuned.finished(), tuned.recipe(), self.data, images)
        w, gradient_norm = distilled_set.train_on(place)
        anew = softmax.accuracy(w, images.x_test, images.y_test)
        yield _row("distilled, trained anew", anew, gradient_norm)
        yield _row("distilled, as it ran along", tuned.test_accuracy(model, test))
        if self.readers:
            for reader, accuracy_of, number in readers.read(images, tuned.finished()[0].cpu(), labels, seed):
                yield {
                    "training set": f"all, for the reader {reader}",
                    "test accuracy": accuracy_of,
                    "read": number,
                }

    def _tuned(self, seed: int, images: Images, x: Tensor, y: Tensor) -> tuple[TunedImages, Tensor]:
        """The hyperparameters, with mixtures of the images x, and the classes of the distilled images."""
        inputs, labels = self._first_images(seed, images)
        classes = images.classes if self.soft_labels else None
        limits = _range(images) if self.within_range else None
        inner_steps = self.inner_steps if self.learned_rate else None
        penalty = self.penalty or _PENALTIES[self.data]
        if self.start != "mixtures":
            if limits is not None:
                inputs = inputs.clamp(*limits)
            distilled = br.hyperparameters.DistilledData(inputs, labels, classes, bounds=limits)
            return TunedImages(distilled, penalty, inner_steps), labels
        distilled = br.hyperparameters.DistilledData(inputs, labels, classes)
        return TunedImages(distilled, penalty, inner_steps, Mixtures(x, y, labels, seed), limits), labels

    def _val_loss(
        self, networks: list[nn.Module], model: nn.Module, tuned: TunedImages, batch: Batch
    ) -> Tensor:
        loss = F.cross_entropy(model(batch[0]), batch[1])
        x: Tensor = tuned()[0]
        if self.smoothness:
            rough = x.diff(dim=-1).square().mean() + x.diff(dim=-2).square().mean()
            loss = loss + self.smoothness * rough
        if self.closeness:
            loss = loss + self.closeness * tuned.apart()
        if self.readability:
            loss = loss + self.readability * reading_loss(networks, x, tuned.distilled.labels)
        return loss

    def _first_images(self, seed: int, images: Images) -> tuple[Tensor, Tensor]:
        """The initial images and their labels, class by class.

        If a class has several images, each starts as the mean of a part of the class: equal images would stay equal.
        """
        labels = torch.arange(images.classes).repeat_interleave(self.per_class)
        generator = torch.Generator().manual_seed(seed)
        size, dtype = (len(labels), *images.shape), images.x_train.dtype
        if self.start == "mixtures":  # the differences from them
            return torch.zeros(size, dtype=dtype), labels
        if self.start == "noise":
            return 0.1 * torch.randn(size, generator=generator, dtype=dtype), labels
        if self.start == "black":
            return _range(images)[0].expand(size), labels
        means = []
        for number in range(images.classes):
            of_class = images.x_train[images.y_train == number]
            order = torch.randperm(len(of_class), generator=generator)
            means += [of_class[rows].mean(dim=0) for rows in order.tensor_split(self.per_class)]
        return torch.stack(means), labels

    def _comparisons(self, images: Images) -> Iterator[Row]:
        """Classifiers trained from zero on as many random images, on the class means, and on the whole training set.

        The penalty for the whole set is chosen on a held-out tenth of it.
        """
        classes, recipe = images.classes, Recipe(self.penalty or _PENALTIES[self.data])
        x, y, test = images.x_train, images.y_train, (images.x_test, images.y_test)
        labels = torch.arange(classes).repeat_interleave(self.per_class)
        generator = torch.Generator().manual_seed(self.seed)
        for _ in range(_RANDOM_DRAWS):
            order = torch.randperm(len(y), generator=generator)
            picked = torch.cat([order[y[order] == c][: self.per_class] for c in range(classes)])
            w, gradient_norm = recipe.train(x[picked], labels, classes)
            yield _row("random images", softmax.accuracy(w, *test), gradient_norm)
        means = torch.stack([x[y == c].mean(dim=0) for c in range(classes)])
        w, gradient_norm = recipe.train(means, torch.arange(classes), classes)
        yield _row("class means", softmax.accuracy(w, *test), gradient_norm)
        order = torch.randperm(len(y), generator=generator)
        held, kept = order[: len(y) // 10], order[len(y) // 10 :]

        def held_out_accuracy(penalty: float) -> float:
            w, _ = softmax.fit(x[kept], y[kept], classes, penalty, steps=50)
            return softmax.accuracy(w, x[held], y[held])

        best = max((1e-3, 1e-2, 1e-1), key=held_out_accuracy)
        w, gradient_norm = softmax.fit(x, y, classes, best, steps=200)
        yield _row(f"all {len(y):,} images", softmax.accuracy(w, *test), gradient_norm)

    def table(self, rows: list[Row]) -> list[Row]:
        of = (*self.of, "read") if self.readers else self.of
        return runs.mean_and_deviation(rows, self.by, of)

    def headline(self, table: list[Row], rows: list[Row]) -> Row:
        return {"test accuracy": table[0]["test accuracy"]}

    def draw(self, folder: Path, rows: list[Row]) -> None:
        distilled_set.draw(folder, *(folder / name for name in self.figures))


def _range(images: Images) -> tuple[Tensor, Tensor]:
    """The lowest and the highest value of each channel in the training set, [C, 1, 1] each."""
    x = images.x_train
    return x.amin(dim=(0, 2, 3))[:, None, None], x.amax(dim=(0, 2, 3))[:, None, None]


def _row(name: str, accuracy: float, gradient_norm: float | None = None) -> Row:
    return {"training set": name, "test accuracy": accuracy, "gradient norm": gradient_norm}


class _Snapshots:
    """A callback that keeps the images of the first ten classes at some steps, and adds the seed to the history."""

    def __init__(self, config: Distill, tuned: TunedImages, seed: int) -> None:
        self._config, self._tuned, self._seed = config, tuned, seed
        self.snapshots = {"0": self._first_ten()}

    def __call__(self, tuner: br.Tuner) -> None:
        step, steps = tuner.hyper_step, self._config.steps
        tuner.history[-1]["seed"] = self._seed
        if step == steps or step % max(1, round(steps / _STRIP)) == 0:
            self.snapshots[str(step)] = self._first_ten()

    def _first_ten(self) -> Tensor:
        images: Tensor = self._tuned()[0].detach()[: 10 * self._config.per_class]
        return images.cpu().clone()


def _train_loss(model: nn.Module, tuned: TunedImages, batch: None) -> Tensor:
    (inputs, targets), squares = tuned(), squared_norm(model)
    return F.cross_entropy(model(inputs.flatten(1)), targets) + tuned.penalty / 2 * squares
