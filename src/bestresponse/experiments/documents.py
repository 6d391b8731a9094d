"""Documents from several sources for a language model, and batches that are drawn by the weights of documents."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import bestresponse as br

from .experiment import require

_ROUND = 50  # batches that `Drawn` gives before its end


@dataclass(frozen=True)
class Pool:
    """Documents of equal length, and the source of each.

    Attributes:
        words: int64 [N, length + 1].
        source: int64 [N], the number of each document's source.
        names: the sources.
        spoilt: bool [N], documents that are no text.
    """

    words: Tensor
    source: Tensor
    names: tuple[str, ...]
    spoilt: Tensor

    @classmethod
    def of(cls, sources: dict[str, Tensor], spoilt: dict[str, Tensor]) -> "Pool":
        """The pool of named sources, [N_s, length + 1] each, of which some have ``spoilt`` documents."""
        source = torch.cat([torch.full((len(words),), s) for s, words in enumerate(sources.values())])
        flags = [
            spoilt.get(name, torch.zeros(len(words), dtype=torch.bool)) for name, words in sources.items()
        ]
        return cls(torch.cat(list(sources.values())), source, tuple(sources), torch.cat(flags))

    def mixture(self, shares: Iterable[float]) -> Tensor:
        """The weight of each document, [N], if the sources have these shares."""
        return (torch.tensor(list(shares)) / self.source.bincount())[self.source]

    def shares(self, weights: Tensor) -> dict[str, float]:
        """The share of each source in the sum of the documents' weights [N]."""
        totals = torch.zeros(len(self.names)).index_add(0, self.source, weights)
        return dict(zip(self.names, (totals / totals.sum()).tolist(), strict=True))


class PoolWeights(nn.Module):
    """The weight of a document: that of its source, times its own with ``documents``."""

    def __init__(self, pool: Pool, documents: bool) -> None:
        super().__init__()
        self.sources = br.hyperparameters.Weights(len(pool.names), "softmax", per=pool.source)
        self.documents = br.hyperparameters.Weights(len(pool.words), sparse=False) if documents else None
        self.index = torch.arange(len(pool.words))

    def forward(self, index: Tensor) -> Tensor:
        weights: Tensor = self.sources(index)
        return weights if self.documents is None else weights * self.documents(index)

    @torch.no_grad()
    def all(self) -> Tensor:
        """The weights of all documents, [N]."""
        weights: Tensor = self(self.index)
        return weights


class Drawn:
    """Batches of documents, drawn in proportion to their present weights without repetition within a batch.

    A batch is (words [B, length + 1], index [B], the weights [B] at the time of the draw).
    """

    def __init__(self, pool: Pool, weights: Callable[[], Tensor], batch: int, seed: int) -> None:
        self.pool, self.weights, self.batch = pool, weights, batch
        self.generator = torch.Generator().manual_seed(seed)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        for _ in range(_ROUND):
            weights = self.weights()
            index = torch.multinomial(weights, self.batch, generator=self.generator)
            yield self.pool.words[index], index, weights[index]


def tokenizer(texts: Iterable[list[str]], size: int) -> Any:
    """A Hugging Face tokenizer with a token for each of the most frequent words of the texts."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel(unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.WordLevelTrainer(vocab_size=size, special_tokens=["<unk>"], show_progress=False)
    words.train_from_iterator((" ".join(text) for text in texts), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")


def documents(text: list[str], encode: Any, length: int) -> Tensor:
    """A text cut into documents of ``length`` + 1 tokens; the remainder is dropped."""
    tokens = torch.tensor(encode(" ".join(text), verbose=False)["input_ids"])
    return tokens[: len(tokens) // (length + 1) * (length + 1)].view(-1, length + 1)


def take(stack: Tensor, *counts: int, option: str = "--documents") -> list[Tensor]:
    """So many documents for each part, from the first on; an option says how many."""
    require(
        sum(counts) <= len(stack),
        f"{option} must leave enough text; {sum(counts)} documents of {stack.shape[1]} tokens are needed, and there "
        f"are {len(stack)}. Use fewer, or a smaller --length.",
    )
    return list(torch.split(stack[: sum(counts)], list(counts)))


def shuffled(words: Tensor, generator: torch.Generator) -> Tensor:
    """Each document with its words in random order."""
    order = torch.rand(words.shape, generator=generator).argsort(1)
    return words.gather(1, order)


def with_noise(words: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """A share of the words replaced by words from other places of these documents."""
    drawn = words.flatten()[torch.randint(words.numel(), words.shape, generator=generator)]
    return torch.where(torch.rand(words.shape, generator=generator) < share, drawn, words)
