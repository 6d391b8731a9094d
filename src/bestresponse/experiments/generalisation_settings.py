"""The settings of the experiment `generalisation`: data, models, and few and many hyperparameters."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bestresponse as br

from ..hyperparameters import ConcreteDropout, Shrinkage, WeightDecay
from ..hyperparameters.sharing import Sharing
from . import classification, data, language, regression, text
from .image_regularisers import ImageRegularisers
from .language import LanguageModel, Regulariser
from .text import Corpus
from .tuned_models import Convex, Data, Network, Setting, decays


@dataclass(frozen=True, kw_only=True)
class Images(Network):
    """A network on labelled images: a multilayer perceptron with decays, or a convolutional one with more.

    Attributes:
        load: a function of the seed that draws the examples for training and validation, and those for the test.
        network: makes the network.
        convolutional: tune a decay for each tensor, label smoothing and augmentation, in place of a decay for each
            weight.
    """

    load: Callable[[int], tuple[Data, Data]]
    network: Callable[[], nn.Module]
    convolutional: bool = False

    def data(self, seed: int) -> tuple[Data, Data]:
        return self.load(seed)

    def model(self) -> nn.Module:
        return self.network()

    def few(self, model: nn.Module, size: int) -> nn.Module:
        decay = WeightDecay(model, per="global", initial=5e-4, exclude=["*.bias"])
        return ImageRegularisers(decay) if self.convolutional else decay

    def many(self, model: nn.Module, size: int, few: nn.Module | None, strength: float) -> nn.Module:
        per: Sharing = "tensor" if self.convolutional else "weight"
        around: Sharing = "global" if self.convolutional else "tensor"
        start = few.decay if isinstance(few, ImageRegularisers) else few
        decay = decays(model, per, around, 5e-4, start, strength, ["*.bias"])
        if not self.convolutional:
            return decay
        return ImageRegularisers(decay, few if isinstance(few, ImageRegularisers) else None, 10, strength)

    def train_loss(self, model: Any, hyper: Any, batch: Any) -> Tensor:
        if isinstance(hyper, ImageRegularisers):
            return hyper.train_loss(model, batch)
        return classification.train_loss(model, hyper, batch)

    def val_loss(self, model: Any, hyper: Any, batch: Any) -> Tensor:
        return classification.val_loss(model, hyper, batch)

    @torch.no_grad()
    def example_losses(self, model: nn.Module, examples: Data) -> Tensor:
        x, y = examples
        logits = torch.cat([model(part) for part in torch.split(x, 500)])
        return F.cross_entropy(logits, y, reduction="none")


@dataclass(frozen=True, kw_only=True)
class Text(Network):
    """An LSTM language model with dropout: a rate for each place, or for each unit and each recurrent weight.

    Attributes:
        corpus: reads the text.
        units: units of each layer.
        length: words in a sequence.
        words: words for training and validation; the validation text follows the training text.
    """

    corpus: Callable[[], Corpus]
    units: int
    length: int = 20
    words: int

    def data(self, seed: int) -> tuple[Data, Data]:
        """A stretch of the training text that begins elsewhere for each seed, and the test text."""
        corpus = self.corpus()
        begin = seed * self.words % max(1, len(corpus.train) - self.words + 1)
        return (corpus.train[begin : begin + self.words],), (corpus.test,)

    def model(self) -> nn.Module:
        return LanguageModel(len(self.corpus().words), self.units, self.batch)

    def few(self, model: nn.Module, size: int) -> nn.Module:
        return self._rates(many=False)

    @torch.no_grad()
    def many(self, model: nn.Module, size: int, few: nn.Module | None, strength: float) -> nn.Module:
        rates = self._rates(many=True)
        if isinstance(few, Regulariser):
            start = dict(few.named_parameters())
            for name, p in rates.named_parameters():
                p.fill_(float(start[name]))
        for module in rates.modules():
            if isinstance(module, ConcreteDropout) and strength:
                module.shrinkage = Shrinkage(strength)
        return rates

    def _rates(self, many: bool) -> Regulariser:
        return Regulariser(self.units, many, penalties=False)

    def problem(self, model: nn.Module, hyper: nn.Module) -> br.Problem:
        model.rates = hyper
        return super().problem(model, hyper)

    def batches(self, examples: Data) -> Iterable[Any]:
        return text.sequences(examples[0], self.batch, self.length)

    def train_loss(self, model: Any, hyper: Any, batch: Any) -> Tensor:
        return language.train_loss(model, hyper, batch)

    def val_loss(self, model: Any, hyper: Any, batch: Any) -> Tensor:
        return language.val_loss(model, hyper, batch)

    @torch.no_grad()
    def example_losses(self, model: nn.Module, examples: Data) -> Tensor:
        """The loss of each word, with the state carried through the text."""
        model.eval()
        state, losses = None, []
        for words, following in text.sequences(examples[0], self.batch, self.length):
            logits, state, _, _ = model(words, state)
            losses.append(F.cross_entropy(logits.flatten(0, 1), following.flatten(), reduction="none"))
        model.train()
        return torch.cat(losses)


def drawn(name: str, number: int, seed: int) -> tuple[Data, Data]:
    """This many random examples of a table, and all others for the test."""
    x, y = _table(name)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    first, others = order[:number], order[number:]
    return (x[first], y[first]), (x[others], y[others])


def images(name: str, folder: Path | None, number: int, flat: bool, seed: int) -> tuple[Data, Data]:
    """This many random images of the training set, and the test set; those of CIFAR-10 at half of their resolution."""
    found = _images(name, folder)
    ((x, y),) = found.draw(min(number, len(found.x_train)), seed=seed)
    pair = (x, y), (found.x_test, found.y_test)
    return tuple((x.flatten(1) if flat else x, y) for x, y in pair)  # type: ignore[return-value]


@cache
def _images(name: str, folder: Path | None) -> data.Images:
    found = data.load(name, folder)
    if name != "cifar10":
        return found
    return replace(found, x_train=F.avg_pool2d(found.x_train, 2), x_test=F.avg_pool2d(found.x_test, 2))


@cache
def _table(name: str) -> tuple[Tensor, Tensor]:
    """Features with mean 0 and deviation 1, and targets or classes."""
    if name == "diabetes":
        return data.load_table(name)
    from sklearn import datasets

    features, labels = getattr(datasets, "load_" + name.replace("-", "_"))(return_X_y=True)
    x = torch.from_numpy(features).double()
    return (x - x.mean(0)) / x.std(0).clamp(min=1e-3), torch.from_numpy(labels).long()


def perceptron(inputs: int, units: int) -> nn.Module:
    """One hidden layer."""
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, units), nn.ReLU(), nn.Linear(units, 10))


def convolutional(channels: int, width: int) -> nn.Module:
    """Three convolutions with pooling, and the mean over the image."""
    sizes = [channels, width, 2 * width, 4 * width]
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(sizes[-1], 10))


def settings(folder: Path | None, stand_ins: bool) -> dict[str, Setting]:
    """All settings by name.

    Args:
        folder: the folder of the data files.
        stand_ins: whether data that comes with packages stands in for the files, at sizes of seconds.
    """
    made = [*_tables(), *_mnist(folder, stand_ins), _cifar(folder, stand_ins), _ptb(folder, stand_ins)]
    if stand_ins:
        made = [replace(x, folds=2, watches=2) if isinstance(x, Convex) else x for x in made]
    return {setting.name: setting for setting in made}


def _tables() -> list[Setting]:
    sizes = {
        "diabetes": (221, 10, 1),
        "breast-cancer": (284, 30, 2),
        "wine": (89, 13, 3),
        "digits": (300, 64, 10),
    }
    return [
        Convex(
            name=name,
            seconds=20 if name == "digits" else 8,
            load=partial(drawn, name, number),
            losses=regression if name == "diabetes" else classification,
            inputs=inputs,
            outputs=outputs,
        )
        for name, (number, inputs, outputs) in sizes.items()
    ]


def _mnist(folder: Path | None, stand_ins: bool) -> list[Setting]:
    """Softmax regression and a perceptron, each on two numbers of images."""
    found: list[Setting] = []
    inputs = 64 if stand_ins else 784
    for number in (500, 2000):
        load = partial(
            images, "digits" if stand_ins else "mnist", folder, number // 5 if stand_ins else number, True
        )
        found += [
            Convex(
                name=f"softmax-{number}",
                seconds=25,
                load=load,
                inputs=inputs,
                outputs=10,
                dtype=torch.float32,
                folds=3,
                watches=2,
            ),
            Images(
                name=f"mlp-{number}",
                seconds=25,
                load=load,
                network=partial(perceptron, inputs, 64),
                steps=20 if stand_ins else 300,
            ),
        ]
    return found


def _cifar(folder: Path | None, stand_ins: bool) -> Setting:
    name, number, channels, width = ("digits", 100, 1, 4) if stand_ins else ("cifar10", 3000, 3, 12)
    return Images(
        name="cnn",
        seconds=80,
        load=partial(images, name, folder, number, False),
        network=partial(convolutional, channels, width),
        convolutional=True,
        steps=10 if stand_ins else 1000,
        weight_steps=5,
        batch=64,
    )


def _ptb(folder: Path | None, stand_ins: bool) -> Setting:
    name, vocabulary, words = ("python", 60, 2_000) if stand_ins else ("ptb", 1000, 40_000)
    return Text(
        name="lstm",
        seconds=60,
        corpus=partial(_text, name, folder, vocabulary),
        units=6 if stand_ins else 64,
        words=words,
        steps=10 if stand_ins else 800,
        rate=1e-2,
        batch=20,
    )


@cache
def _text(name: str, folder: Path | None, words: int) -> Corpus:
    corpus = text.load(name, folder, words)
    return replace(corpus, test=corpus.test[:20_000])
