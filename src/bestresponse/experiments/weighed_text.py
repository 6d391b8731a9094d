"""What the two experiments with weighed text have in common: options, choice of a learning rate, table and figure."""

import statistics
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from ..errors import require_package
from . import plots, runs, text
from .cells import Cell
from .documents import Pool, PoolWeights, documents, take, tokenizer
from .experiment import Count, Number, Positive, Repeated, Row, Tasks, require
from .weighing import METHODS, Tuning, perplexity

_COLOURS = (plots.BLUE, plots.ORANGE, plots.GREEN, plots.PURPLE, plots.GREY)
_PERPLEXITIES = ("test perplexity", "choice perplexity")


@dataclass(frozen=True)
class Given:
    """The sources, and further documents of the target.

    Attributes:
        pool: the documents to train on.
        val: the documents of the hypergradients.
        choice: the documents by which a learning rate or a mixture is chosen.
        test: the documents of the table.
        generic: documents for training a base model.
    """

    pool: Pool
    val: Tensor
    choice: Tensor
    test: Tensor
    generic: Tensor


@dataclass(frozen=True)
class Texts:
    """Documents of the target's text and of another text, [N, length + 1] each."""

    target: Tensor
    other: Tensor
    val: Tensor
    test: Tensor

    @classmethod
    def load(cls, names: tuple[str, str], folder: Path | None, words: int, length: int, most: int) -> "Texts":
        """Two texts by their names; of each, at most so many words."""
        target, other = (text.parts(name, folder) for name in names)
        texts = target[0][:most], other[0][:most], target[1], target[2]
        encode = tokenizer(texts[:2], words)
        return cls(*(documents(part, encode, length) for part in texts))

    def in_random_order(self, generator: torch.Generator) -> list[Tensor]:
        """The documents to train on, of the target and of the other text."""
        return [part[torch.randperm(len(part), generator=generator)] for part in (self.target, self.other)]

    def held_out(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """So many documents each for hypergradients, for choices and for the test."""
        val = self.val[torch.randperm(len(self.val), generator=generator)]
        option = "--test-documents"
        first, second = take(val, count, count, option=option)
        return first, second, take(self.test, count, option=option)[0]


class WeighedText(Repeated):
    """An experiment that trains a language model on sources of text, some ways with tuned weights of the sources."""

    counted = True
    by = ("way",)
    packages: ClassVar[tuple[tuple[str, str], ...]] = (("transformers", "transformers"),)  # with their extras
    choosing: ClassVar[tuple[str, ...]]  # the ways that choose the shares of the sources

    data: Literal["python", "ptb"] = "python"
    """The text. python is what comes with Python, its help texts and the code of its library, and needs no files; with
    ptb the Penn TreeBank is one of the two texts."""
    documents: Count = 40  # Documents of each source.
    test_documents: Count = 60  # Documents for the test, and for each half of the validation text.
    words: Count = 300  # Size of the vocabulary.
    length: Count = 16  # Words of a document.
    width: Count = 16  # Features of the transformer, a multiple of 16.
    layers: Count = 1  # Its layers.
    batch: Count = 4  # Documents in a batch.
    val_batch: Count = 8  # Documents in a validation batch.
    steps: Count = 20  # Weight steps of each row.
    warmup: Number = 10  # Weight steps before the first hyper-step.
    weight_steps: Count = 5  # Weight steps before each hyper-step.
    weight_rate: Positive = 1e-3  # Adam's learning rate for the weights.
    rates: tuple[Positive, ...] = (0.1,)
    """Adam's learning rates for the scores of the sources. The first seed tries all, and the others take the best."""

    @abstractmethod
    def names(self) -> Sequence[str]:
        """The ways of the table, in order; a tuned way has the name of a method."""

    @abstractmethod
    def given(self, seed: int) -> Given:
        """The documents of a seed."""

    @abstractmethod
    def row(self, given: Given, way: str, rate: float | None, seed: int) -> Row:
        """Train in one way; a tuned way has a learning rate."""

    def tasks(self, device: torch.device, folder: Path) -> Tasks:
        for package, extra in self.packages:
            require_package(package, f"reproduce {self.name}", extra)
        require(device.type == "cpu", f"--device must be cpu for {self.name}; got {self.device!r}.")
        require(self.width % 16 == 0, f"--width must be a multiple of 16; got {self.width}.")
        require(
            self.batch <= self.documents,
            f"--batch must be at most --documents, {self.documents}, for a source alone; got {self.batch}.",
        )
        rest = self.steps - self.warmup
        require(
            rest > 0 and rest % self.weight_steps == 0,
            f"--steps must be --warmup plus a multiple of --weight-steps; got {self.steps}, {self.warmup} and "
            f"{self.weight_steps}.",
        )
        given, cells = cache(self.given), []
        given(self.seed)  # raises if the text is too short

        def row(way: str, rate: float | None, cell: Cell) -> Row:
            if way in METHODS and rate is None:
                rate = self._best_rate(way, cell)
            return {"way": way, "rate": rate, **self.row(given(cell.seed), way, rate, cell.seed)}

        for seed in self.all_seeds():
            for way in self.names():
                for rate in self.rates if way in METHODS and seed == self.seed else (None,):
                    title = way if rate is None else f"{way} at {rate:g}"
                    cells.append(Cell(self, title, seed, folder, partial(row, way, rate), ("ways",)))
        return cells

    def _best_rate(self, way: str, cell: Cell) -> float:
        """The rate that is best on the first seed, by validation text that no hypergradient has seen."""
        tried = [replace(cell, name=f"{way} at {rate:g}", seed=self.seed) for rate in self.rates]
        rows = [runs.read_json(cell.folder / "row.json")["row"] for cell in tried]
        return float(min(rows, key=lambda row: row["choice perplexity"])["rate"])

    def tuning(self, rate: float, document_rate: float = 0.0) -> Tuning:
        """How the weights are tuned."""
        sizes = self.batch, self.val_batch, self.steps, self.warmup, self.weight_steps
        return Tuning(*sizes, self.weight_rate, rate, document_rate)

    def measured(self, given: Given, model: nn.Module, weights: Tensor) -> Row:
        """The perplexities of a trained model, and the shares of the sources."""
        found: Row = {
            n: perplexity(model, w) for n, w in zip(_PERPLEXITIES, (given.test, given.choice), strict=True)
        }
        return found | {"shares": given.pool.shares(weights)}

    def tuned(
        self, given: Given, model: nn.Module, tuning: Tuning, way: str, seed: int
    ) -> tuple[PoolWeights, Row]:
        """Train with tuned weights: the module of the weights, and the row."""
        hyper, clock = tuning.run(model, given.pool, given.val, way, seed)
        speeds = {f"speed at {every}": clock.speed(every) for every in (5, 20)}
        row = self.measured(given, model, hyper.all())
        return hyper, row | speeds | {"further tokens": tuning.further()}

    def chosen(self, rows: list[Row]) -> dict[str, list[Row]]:
        """The rows of each way, without those of rates that are not the best."""
        kept: dict[str, list[Row]] = {}
        for row in rows:
            kept.setdefault(row["way"], []).append(row)
        for way, of_way in kept.items():
            first = [row for row in of_way if row["seed"] == self.seed]
            best = min(first, key=lambda row: row["choice perplexity"]) if first else None
            kept[way] = [row for row in of_way if row["seed"] != self.seed or row is best]
        return kept

    def table(self, rows: list[Row]) -> list[Row]:
        table = []
        for of_way in self.chosen(rows).values():
            (line,) = runs.mean_and_deviation(of_way, self.by, _PERPLEXITIES)
            shares = {
                "shares of the sources [%]": " / ".join(f"{100 * x:.0f}" for x in _shares(of_way).values())
            }
            table.append(line | shares | _means(of_way, self.of))
        return table

    def headline(self, table: list[Row], rows: list[Row]) -> Row:
        return {row["way"]: row["test perplexity"] for row in table}

    def draw(self, folder: Path, rows: list[Row]) -> None:
        """Test perplexities; and the shares of the sources."""
        place, shape = folder / self.figures[0], (1, 2, (12.0, 4.4))
        with plots.panels(place, *shape, width_ratios=(1, 2)) as ((left, right),):
            self._draw_perplexities(left, rows)
            self._draw_shares(right, rows)

    def _draw_shares(self, axes: Any, rows: list[Row]) -> None:
        """A bar for the share of each source, in each way that chooses them; a line at the uniform share."""
        kept = {way: of_way for way, of_way in self.chosen(rows).items() if way in self.choosing}
        for number, (way, of_way) in enumerate(kept.items()):
            shares = _shares(of_way)
            at = [place + 0.8 * ((number + 0.5) / len(kept) - 0.5) for place in range(len(shares))]
            axes.bar(at, list(shares.values()), 0.8 / len(kept), label=way, color=_COLOURS[number])
        sources = list(rows[0]["shares"])
        axes.set_xticks(range(len(sources)), [s.replace(", ", ",\n") for s in sources], fontsize=7)
        axes.axhline(1 / len(sources), color="black", linewidth=0.8, linestyle="--")
        plots.style(axes, "", "share of the source", "weights at the end, mean over the seeds")
        axes.legend(fontsize=8)

    def _draw_perplexities(self, axes: Any, rows: list[Row]) -> None:
        """A point for each seed's test perplexity, in each way; an arrow if it is far above the best."""
        kept = self.chosen(rows)
        most = 1.6 * min(row["test perplexity"] for row in rows)
        for place, of_way in enumerate(kept.values()):
            for value in (row["test perplexity"] for row in of_way):
                marker = "o" if value < most else ">"
                axes.plot([min(value, most)], [place], marker, color=plots.BLUE, markersize=5)
        axes.set_yticks(range(len(kept)), list(kept), fontsize=8)
        axes.invert_yaxis()
        plots.style(axes, "test perplexity", "", "a point for each seed")


def _shares(rows: list[Row]) -> dict[str, float]:
    """The mean share of each source over rows."""
    return {source: statistics.fmean(row["shares"][source] for row in rows) for source in rows[0]["shares"]}


def _means(rows: list[Row], names: Sequence[str]) -> Row:
    """The mean of each column over the rows that have it."""
    found = {name: [row[name] for row in rows if row.get(name) is not None] for name in names}
    return {name: statistics.fmean(values) if values else None for name, values in found.items()}
