"""Four settings in which weights and many hyperparameters move together; the comparisons of methods share them.

Each is a function of the seed that returns a `Setting`. "mlp" and "cnn": a weight decay for each weight on 1,000
training and 1,000 validation images of MNIST, batches of 128. "softmax": the same for softmax regression on 300 and 300
of scikit-learn's digits, full batches. "lstm": a dropout rate for each unit and hidden-to-hidden weight of a
two-layer LSTM on the first 20,000 words of the Penn TreeBank.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn

import bestresponse as br
from bestresponse.experiments import data, language, text
from bestresponse.experiments.classification import Batch, output_loss, predict, train_loss, val_loss


class Shuffled:
    """Shuffled batches of 128, the last one smaller; a new order for each epoch."""

    def __init__(self, pair: Batch, generator: torch.Generator) -> None:
        self.pair, self.generator = pair, generator

    def __iter__(self) -> Iterator[Batch]:
        order = torch.randperm(len(self.pair[0]), generator=self.generator)
        for rows in torch.split(order, 128):
            yield self.pair[0][rows], self.pair[1][rows]


@dataclass
class Setting:
    """A problem with its data and the optimiser of its weights.

    Attributes:
        train, val: the collections of batches to train and to tune on.
        val_whole, test: the batches over which `loss` is the mean, for measuring.
        weight_optimizer: made for the problem's weights.
        split: predict, loss and rest of the Gauss-Newton matrix.
        hyper_steps, weight_steps: of the run, and before each hyper-step.
        clip: the largest norm of a training gradient.
    """

    problem: br.Problem
    train: Any
    val: Any
    val_whole: Sequence[Any]
    test: Sequence[Any]
    weight_optimizer: torch.optim.Optimizer
    split: tuple[Any, Any, Any]
    hyper_steps: int
    weight_steps: int = 5
    clip: float | None = None

    @torch.no_grad()
    def loss(self, batches: Sequence[Any]) -> float:
        """The mean validation loss over batches, in eval mode."""
        model, mode = self.problem.model, self.problem.model.training
        model.eval()
        values = [float(self.problem.val_loss(model, self.problem.hyper, batch)) for batch in batches]
        model.train(mode)
        return sum(values) / len(values)

    @torch.no_grad()
    def accuracy(self) -> float | None:
        """The share of test examples classified correctly; None where the outputs are words."""
        if not isinstance(self.test[0][1], torch.Tensor) or self.test[0][1].ndim > 1:
            return None
        model, mode = self.problem.model, self.problem.model.training
        model.eval()
        found = sum(int((model(x).argmax(1) == y).sum()) for x, y in self.test)
        model.train(mode)
        return found / sum(len(y) for _, y in self.test)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))


def cnn() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 5, stride=2), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Conv2d(8, 16, 3, stride=2), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten()),
        *(nn.Dropout(0.3), nn.Linear(400, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 10)),
    )


def of_images(
    network: Callable[[], nn.Module], seed: int, folder: Path | None, hyper_steps: int, per: Any = "weight"
) -> Setting:
    images = data.load("mnist", folder)
    train, val = images.draw(1_000, 1_000, seed=seed)
    torch.manual_seed(seed)
    model = network()
    decay = br.hyperparameters.WeightDecay(model, per=per)
    problem = br.Problem(model, decay, train_loss, val_loss)
    generator = torch.Generator().manual_seed(seed)
    return Setting(
        problem,
        Shuffled(train, generator),
        Shuffled(val, generator),
        [val],
        list(zip(images.x_test.split(2_000), images.y_test.split(2_000), strict=True)),
        torch.optim.Adam(problem.weights.values(), 1e-3),
        (predict, output_loss, decay),
        hyper_steps,
    )


def of_digits(seed: int, per: Any = "weight") -> Setting:
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(seed))
    x, y = torch.tensor(digits.data, dtype=torch.float32) / 16.0, torch.tensor(digits.target)
    train, val, test = ((x[rows], y[rows]) for rows in (order[:300], order[300:600], order[600:]))
    torch.manual_seed(seed)
    model = nn.Linear(64, 10, bias=False)
    # Plain gradient descent of 0.5 diverges for a decay above 4.
    decay = br.hyperparameters.WeightDecay(model, per=per, initial=math.exp(-5.0), maximum=2.0)
    problem = br.Problem(model, decay, train_loss, val_loss)
    descent = torch.optim.SGD(problem.weights.values(), 0.5)
    return Setting(problem, [train], [val], [val], [test], descent, (predict, output_loss, decay), 300)


def of_words(seed: int, folder: Path | None, many: bool = True) -> Setting:
    corpus = text.load("ptb", folder, 2_000, 20_000)
    torch.manual_seed(seed)
    rates = language.Regulariser(64, many, penalties=not many)
    model = language.LanguageModel(len(corpus.words), 64, 20, rates=rates)
    problem = br.Problem(model, model.rates, language.train_loss, language.val_loss)
    train, val, test = (text.sequences(words, 20, 20) for words in (corpus.train, corpus.val, corpus.test))
    descent = torch.optim.SGD(problem.weights.values(), 20.0)
    split = (
        lambda m, h, b: m(b[0])[0].flatten(0, 1),
        br.losses.CrossEntropy(lambda b: b[1].flatten()),
        None,
    )
    return Setting(problem, train, val, val, test, descent, split, 100, 10, 0.25)


SETTINGS: dict[str, Callable[[int, Path | None], Setting]] = {
    "mlp": lambda seed, folder: of_images(mlp, seed, folder, 600),
    "cnn": lambda seed, folder: of_images(cnn, seed, folder, 250),
    "softmax": lambda seed, folder: of_digits(seed),
    "lstm": of_words,
}
FEW: dict[str, Callable[[int, Path | None], Setting]] = {
    "mlp": lambda seed, folder: of_images(mlp, seed, folder, 600, "global"),
    "cnn": lambda seed, folder: of_images(cnn, seed, folder, 250, "global"),
    "softmax": lambda seed, folder: of_digits(seed, "global"),
    "lstm": lambda seed, folder: of_words(seed, folder, False),
}
