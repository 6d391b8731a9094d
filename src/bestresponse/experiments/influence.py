"""The training images that helped and harmed most, as pictures; what they tell of wrong labels and of new trainings."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import bestresponse as br
from bestresponse.influence import self_influence

from . import data, influence_picture
from .classification import Batch, accuracy, output_loss
from .data import Images
from .experiment import Count, Number, Positive, Repeated, Row, Share, Tasks, require

_NOTHING = "nothing"
_SIDES = "helpful", "harmful"
_BATCH = 20  # images in a batch of self-influence, for which each image costs a backward pass of its batch


class InfluencePictures(Repeated):
    """Show the training images that helped and harmed a prediction most, and train again without them.

    A small network learns images of which a share has wrong labels. For each of some digits, a query is the first
    validation image that the network reads wrongly. The picture has the training images whose removal would raise and
    lower the loss of the query most. Then images are removed, and the network is trained on from its weights: the
    table compares the predicted with the actual change of the loss, for the query or, where as many images are
    removed as have wrong labels, for all validation images. The test images are used for the test accuracy only.
    """

    name = "influence"
    cpu = (
        "--data mnist --examples 1000 --validation 1000 --digits 2 3 5 7 9 --shown 6 --removed 10 --width 16 "
        "--seeds 3"
    )
    quick = f"{cpu} --seeds 1"
    paper = f"{cpu} --examples 5000 --width 32"
    figures = ("influence.png",)
    files = ("images.safetensors",)
    by = ("removed",)
    of = ("wrong labels", "predicted", "actual", "test accuracy")
    counted = True

    data: Literal["digits", "mnist"] = "digits"
    """The data set. digits comes with scikit-learn; mnist is read from --data-dir."""
    examples: Count = 200  # Images for training.
    noise: Share = 0.1  # The share of them that gets a wrong label.
    validation: Count = 200  # Images for the queries and the mean loss.
    digits: tuple[Number, ...] = (3, 5, 8)  # The classes of the queries.
    shown: Count = 4  # Images in each half of a row of the picture.
    removed: Count = 4  # Images that are removed for a query.
    width: Count = 8  # Units of the hidden layer.
    decay: Positive = 1e-2  # The decay of all weights.

    def tasks(self, device: torch.device, folder: Path) -> Tasks:
        images = data.load(self.data, self.data_dir)
        images.draw(self.examples, self.validation, seed=self.seed)  # raises if there are too few
        outside = [digit for digit in self.digits if digit >= images.classes]
        require(not outside, f"--digits must be below {images.classes}; got {outside}.")
        wrong = round(self.noise * self.examples)
        require(
            0 < wrong < self.examples, f"--noise must give some images a wrong label; got {self.noise:g}."
        )
        most = max(self.shown, self.removed)
        require(most < self.examples, f"--shown and --removed must be below --examples; got {most}.")
        return [partial(self._rows, images, seed, device, folder) for seed in self.all_seeds()]

    def _rows(self, images: Images, seed: int, device: torch.device, folder: Path) -> Iterator[Row]:
        """Train, and then remove the images that each way names, one way after the other."""
        given = _draw(images, self, seed, device)
        trained = _Trained(given, self, seed)
        yield {"seed": seed, "removed": _NOTHING, **trained.without([], given.val)}
        places = [trained.query(digit) for digit in self.digits]
        queries = [tuple(part[i : i + 1] for part in given.val) for i in places]
        found = br.influence(trained.problem, [given.whole], [*queries, given.val], trained.method())
        scores = found.scores["table"]
        sides = {side: getattr(found, side)(max(self.shown, self.removed)) for side in _SIDES}
        if seed == self.seed:
            _save(folder / self.files[0], given, places, sides, self.shown)
        for q, (digit, query) in enumerate(zip(self.digits, queries, strict=True)):
            for side, ranked in sides.items():
                row = {"seed": seed, "removed": f"the {self.removed} most {side} to an image", "digit": digit}
                names = ranked[q, : self.removed]
                row |= trained.without(names.tolist(), query, scores[q], given.wrong)
                del row["test accuracy"]
                yield row | _labels(given, trained, places[q], ranked[q, : self.shown])
        number = int(given.wrong.sum())
        own = self_influence(
            trained.problem, given.pieces(), trained.method(inverse=True), solve_on=given.whole
        )
        rankings = {
            "most harmful to all": scores[-1],
            "of largest self-influence": -own.scores,
            "of largest training loss": trained.losses(),
            "at random": torch.rand(len(own.scores), generator=torch.Generator().manual_seed(seed)),
        }
        for name, ranking in rankings.items():
            row = {"seed": seed, "removed": f"the {number} {name}"}
            chosen = ranking.topk(number).indices.tolist()
            yield row | trained.without(chosen, given.val, scores[-1], given.wrong)

    def headline(self, table: list[Row], rows: list[Row]) -> Row:
        pairs = [(row["predicted"], row["actual"]) for row in rows if "digit" in row]
        same = sum(predicted * actual > 0 for predicted, actual in pairs)
        own = next(row for row in table if "self-influence" in row["removed"])
        return {
            "changes in the predicted direction": same / len(pairs),
            "wrong labels by self-influence": own["wrong labels"],
        }

    def draw(self, folder: Path, rows: list[Row]) -> None:
        """A row for each query: its image, the images that helped it most, and those that harmed it most."""
        if not (folder / self.files[0]).is_file():
            return
        of_seed = [row for row in rows if row["seed"] == rows[0]["seed"] and "digit" in row]
        pairs = [(of_seed[i], of_seed[i + 1]) for i in range(0, len(of_seed) - 1, 2)]
        if pairs:
            influence_picture.draw(folder / self.figures[0], load_file(folder / self.files[0]), pairs)


@dataclass(frozen=True)
class _Given:
    """Training images by index, image and label, which of the labels are wrong, and the images to measure on."""

    whole: tuple[Tensor, Tensor, Tensor]
    right: Tensor
    wrong: Tensor
    val: Batch
    test: Batch
    classes: int

    def pieces(self) -> list[tuple[Tensor, ...]]:
        """The training images in small batches."""
        return list(zip(*(torch.split(part, _BATCH) for part in self.whole), strict=True))


def _draw(images: Images, config: InfluencePictures, seed: int, device: torch.device) -> _Given:
    (x, y), val = images.draw(config.examples, config.validation, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    wrong = torch.zeros(len(y), dtype=torch.bool)
    wrong[torch.randperm(len(y), generator=generator)[: round(config.noise * len(y))]] = True
    shifted = (y + torch.randint(1, images.classes, y.shape, generator=generator)) % images.classes
    whole = torch.arange(len(y)), x, torch.where(wrong, shifted, y)
    parts = [tuple(part.to(device) for part in batch) for batch in (whole, (y, wrong), val)]
    (y, wrong), test = parts[1], (images.x_test.to(device), images.y_test.to(device))
    return _Given(parts[0], y, wrong, parts[2], test, images.classes)  # type: ignore[arg-type]


class _Decay:
    """decay / 2 · ‖w‖², which knows its curvature, so that the inverse of Kronecker factors has it."""

    def __init__(self, decay: float) -> None:
        self.decay = decay

    def __call__(self, model: nn.Module, *_: Any) -> Tensor:
        return self.decay / 2 * torch.stack([w.square().sum() for w in model.parameters()]).sum()

    forward = __call__

    def curvature_diagonal(self, model: nn.Module) -> dict[str, Tensor]:
        """The diagonal of its Hessian."""
        return {n: torch.full_like(w, self.decay) for n, w in model.named_parameters()}


def _predict(model: nn.Module, weights: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    return model(batch[1]), weights(batch[0])


def _weighted(outputs: tuple[Tensor, Tensor], batch: Any) -> Tensor:
    return (outputs[1] * F.cross_entropy(outputs[0], batch[2], reduction="none")).mean()


class _Trained:
    """The network at the minimum of its training loss, with a weight for each training image."""

    def __init__(self, given: _Given, config: InfluencePictures, seed: int) -> None:
        self.given, decay = given, _Decay(config.decay)
        side = given.whole[1].shape[-1]
        step = 2 if side >= 16 else 1  # half the resolution is enough to read a digit
        pixels = given.whole[1].shape[1] * (side // step) ** 2
        layers = nn.Linear(pixels, config.width), nn.Tanh(), nn.Linear(config.width, given.classes)
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.AvgPool2d(step), nn.Flatten(), *layers).to(given.right.device)
        self.weights = br.hyperparameters.Weights(len(given.right), "clamp").to(given.right.device)
        self.parts = _predict, _weighted, decay

        def train_loss(model: nn.Module, weights: nn.Module, batch: Any) -> Tensor:
            return _weighted(_predict(model, weights, batch), batch) + decay(model)

        def val_loss(model: nn.Module, weights: nn.Module, batch: Batch) -> Tensor:
            return output_loss(model(batch[0]), batch)

        self.problem = br.Problem(self.model, self.weights, train_loss, val_loss)
        self._train()
        self._start = {n: w.clone() for n, w in self.model.state_dict().items()}

    def method(self, inverse: bool = False) -> br.Implicit:
        """Solves with the Gauss-Newton matrix; or the inverse of its Kronecker factors alone."""
        factors, curvature = br.KFAC(*self.parts, steady=0), br.GaussNewton(*self.parts)
        if inverse:
            return br.Implicit(br.solvers.Inverse(factors), curvature)
        return br.Implicit(br.ConjugateGradient(300, tolerance=1e-3, preconditioner=factors), curvature)

    @torch.no_grad()
    def losses(self) -> Tensor:
        """The loss of each training image."""
        _, x, labels = self.given.whole
        return F.cross_entropy(self.model(x), labels, reduction="none").cpu()

    @torch.no_grad()
    def query(self, digit: int) -> int:
        """The first validation image of a digit that the network reads wrongly, else that of largest loss."""
        x, y = self.given.val
        outputs = self.model(x)
        misread = (y == digit) & (outputs.argmax(1) != digit)
        if bool(misread.any()):
            return int(misread.nonzero()[0, 0])
        losses = F.cross_entropy(outputs, y, reduction="none")
        return int(torch.where(y == digit, losses, -1.0).argmax())

    def reads(self, image: Tensor) -> int:
        """The class that the network gives to an image."""
        with torch.no_grad():
            return int(self.model(image[None]).argmax())

    def without(
        self, removed: list[int], batch: Any, scores: Tensor | None = None, wrong: Tensor | None = None
    ) -> Row:
        """Train without some images, and measure: the change of a loss as predicted and as it is, and accuracy."""
        if not removed:
            return {"test accuracy": accuracy(self.model, self.given.test)}
        assert scores is not None
        assert wrong is not None
        before = self._loss(batch)
        table = self.weights.table.data
        table[removed] = 0.0
        self._train(300)
        row = {
            "wrong labels": float(wrong[removed].double().mean()),
            "predicted": -float(scores[removed].sum()),
            "actual": self._loss(batch) - before,
            "test accuracy": accuracy(self.model, self.given.test),
        }
        table.fill_(1.0)
        self.model.load_state_dict(self._start)
        return row

    @torch.no_grad()
    def _loss(self, batch: Batch) -> float:
        return float(self.problem.val_loss(self.model, self.weights, batch))

    def _train(self, steps: int = 1_000) -> None:
        br.cross_validation.Minimise(steps, 1e-9, newton_limit=0)(self.problem, self.given.whole)


def _save(path: Path, given: _Given, places: list[int], sides: dict[str, Tensor], shown: int) -> None:
    """The images of the picture."""
    stored = {side: given.whole[1][ranked[: len(places), :shown]] for side, ranked in sides.items()}
    images = {"queries": given.val[0][places], **stored}
    save_file({name: x[..., 0, :, :].contiguous().cpu() for name, x in images.items()}, path)


def _labels(given: _Given, trained: _Trained, place: int, shown: Tensor) -> Row:
    """What is written above the query and above each of the shown images."""
    query = {"is": int(given.val[1][place]), "read": trained.reads(given.val[0][place])}
    labels = [{"is": int(given.right[i]), "label": int(given.whole[2][i])} for i in shown.tolist()]
    return {"query": query, "labels": labels}
