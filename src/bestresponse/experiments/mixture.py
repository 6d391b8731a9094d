"""Weights of six sources of text, and of each document, for a language model that has little text of its kind."""

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from sklearn.metrics import roc_auc_score
from torch import nn

from .documents import Drawn, Pool, take, with_noise
from .experiment import Count, Positive, Row
from .weighed_text import Given, Texts, WeighedText
from .weighing import METHODS, llama, perplexity, train

WayName = Literal[
    "uniform", "target alone", "search by proxies", "Implicit", "Gauss-Newton", "SAMA", "Penalty"
]
_HALF = "like the target, half random"
_MOST = 200_000  # words of a text that documents are drawn from


class Mixture(WeighedText):
    """Train a language model on a mixture of sources, of which only one is like the test text.

    The sources: the target's text; other text like it, of which 30 % of the words are random; other text like it, of
    which every second document is random words; another text; more of it, of which 30 % of the words are random; and
    random words. Half of the validation text is for the hypergradients. The other half is for choices: of a learning
    rate, or of a mixture by small models. The test text is for the table only. All ways train on equally many tokens.
    "further tokens" are those of hyper-steps or of small models, in these units. "speed" is tokens a second, with a
    hyper-step after five or twenty weight steps, in units of plain training. "detection" is the area under the curve of
    the documents' own weights, as scores of text, within the source of which half is random.
    """

    name = "mixture"
    quick = (
        "--data ptb --documents 300 --words 2000 --length 48 --width 176 --layers 2 --batch 8 --val-batch 16"
    )
    quick += " --steps 100 --warmup 50 --rates 0.3 --proxies 4 --test-documents 200"
    cpu = f"{quick} --steps 150 --rates 0.15 0.5 --proxies 8 --seeds 3"
    paper = f"{cpu} --documents 500 --words 10000 --steps 2000"
    figures = ("mixture.png",)
    choosing = get_args(WayName)[2:]
    of = ("rate", "further tokens", "speed at 5", "speed at 20", "detection")

    ways: tuple[WayName, ...] = get_args(WayName)  # The rows of the table.
    document_rate: Positive = 0.1  # Adam's learning rate for the scores of documents.
    proxies: Count = 2
    """Mixtures that the search tries, each on a model of one layer and half the width."""

    def names(self) -> Sequence[str]:
        return self.ways

    def given(self, seed: int) -> Given:
        names = ("ptb", "python") if self.data == "ptb" else ("python", "code")
        texts = Texts.load(names, self.data_dir, self.words, self.length, _MOST)
        generator, n = torch.Generator().manual_seed(seed), self.documents
        target, other = texts.in_random_order(generator)
        first, second, third = take(target, n, n, n)
        fourth, fifth = take(other, n, n)
        noise, more = torch.randint(self.words, (2, n, self.length + 1), generator=generator)
        spoilt = torch.arange(n) % 2 == 0
        sources = {
            "target": first,
            "like the target, 30 % noise": with_noise(second, 0.3, generator),
            _HALF: torch.where(spoilt[:, None], more, third),
            "another text": fourth,
            "another text, 30 % noise": with_noise(fifth, 0.3, generator),
            "random words": noise,
        }
        held_out = texts.held_out(self.test_documents, generator)
        return Given(Pool.of(sources, {_HALF: spoilt}), *held_out, texts.other)

    def row(self, given: Given, way: str, rate: float | None, seed: int) -> Row:
        if way in METHODS:
            assert rate is not None
            return self._tuned(given, way, rate, seed)
        shares, further = [1.0] * 6, 0.0
        if way == "target alone":
            shares = [1.0] + [0.0] * 5
        elif way == "search by proxies":
            shares, further = self._search(given, seed), float(self.proxies)
        model, weights = self._model(seed), given.pool.mixture(shares)
        train(model, Drawn(given.pool, lambda: weights, self.batch, seed), self.steps, self.weight_rate)
        return self.measured(given, model, weights) | {"further tokens": further}

    def _tuned(self, given: Given, way: str, rate: float, seed: int) -> Row:
        tuning, model = self.tuning(rate, self.document_rate), self._model(seed)
        hyper, row = self.tuned(given, model, tuning, way, seed)
        half = given.pool.source == given.pool.names.index(_HALF)
        assert hyper.documents is not None
        scores, order = hyper.documents.values().detach()[half], ~given.pool.spoilt[half]
        return row | {"detection": float(roc_auc_score(order.numpy(), scores.numpy()))}

    def _search(self, given: Given, seed: int) -> list[float]:
        """The best of several mixtures for a small model; the first one is uniform."""
        torch.manual_seed(seed)
        drawn = torch.distributions.Dirichlet(torch.ones(6)).sample(torch.Size([self.proxies - 1]))

        def value(shares: list[float]) -> float:
            model, weights = self._model(seed, small=True), given.pool.mixture(shares)
            batches = Drawn(given.pool, lambda: weights, self.batch, seed)
            train(model, batches, self.steps, 3 * self.weight_rate)
            return perplexity(model, given.choice)

        return min([[1.0] * 6, *drawn.tolist()], key=value)

    def _model(self, seed: int, small: bool = False) -> nn.Module:
        """A Llama whose larger initial weights shorten the first plateau of the loss; ``small`` is that of a proxy."""
        width, layers = (self.width // 2, 1) if small else (self.width, self.layers)
        return llama(seed, self.words, width, layers, self.length, initializer_range=0.05)
