"""Weights of eight sources of text for adapters of a frozen language model: which sources help a new task?"""

from collections.abc import Sequence
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import nn

from .documents import Drawn, Pool, shuffled, take, with_noise
from .experiment import Count, Positive, Row
from .weighed_text import Given, Texts, WeighedText
from .weighing import METHODS, llama, train

WayName = Literal["frozen base", "uniform", "each alone", "helpful ones", "Implicit", "Gauss-Newton"]
_MOST = 200_000  # words of a text that documents are drawn from
_HELPFUL = ("task 1", "task 2", "task, 20 % noise")


class Adapters(WeighedText):
    """Adapt a frozen language model to a task by eight sources of text, of which three are like the task.

    The base is a Llama with random weights that is trained on another text, and frozen in bfloat16. Its adapters (LoRA)
    are trained on the sources: two parts of the task's text and a part with 20 % random words; parts of it
    with shuffled and with reversed words; the base's own text, in order and shuffled; and random words. Half of
    the validation text is for the hypergradients, and the other half chooses a learning rate. The test text is for the
    table only. All ways train on equally many tokens: on a uniform mixture, on each source alone, on the three helpful
    ones, and with tuned weights. "ranked first" is the share of the seeds in which the three have the largest weights.
    """

    name = "adapters"
    quick = (
        "--data ptb --documents 150 --words 2000 --length 64 --width 192 --layers 2 --batch 8 --val-batch 16"
    )
    quick += " --base-steps 100 --steps 60 --warmup 20 --rates 0.3 --weight-rate 3e-3 --test-documents 90"
    cpu = f"{quick} --base-steps 200 --steps 100 --rates 0.1 0.3 --seeds 3"
    paper = f"{cpu} --base-steps 2000 --steps 1000"
    figures = ("adapters.png",)
    of = ("rate", "ranked first", "further tokens", "speed at 5", "speed at 20")
    choosing = get_args(WayName)[-2:]
    packages = (("transformers", "adapters"), ("peft", "adapters"))

    ways: tuple[WayName, ...] = get_args(WayName)
    """The rows of the table. "each alone" has a row for each source."""
    base_steps: Count = 20  # Weight steps of the base.
    base_rate: Positive = 1e-3  # Adam's learning rate for the base.
    rank: Count = 8  # The rank of the adapters of each linear layer.

    def names(self) -> Sequence[str]:
        alone = [f"alone: {name}" for name in self._sources()]
        return [name for way in self.ways for name in (alone if way == "each alone" else [way])]

    def given(self, seed: int) -> Given:
        texts = Texts.load(("python", self._other()), self.data_dir, self.words, self.length, _MOST)
        generator, n = torch.Generator().manual_seed(seed), self.documents
        target, other = texts.in_random_order(generator)
        first, second, third, fourth, fifth = take(target, *[n] * 5)
        sixth, seventh = take(other, n, n)
        sources = [
            first,
            second,
            with_noise(third, 0.2, generator),
            shuffled(fourth, generator),
            fifth.flip(1),
        ]
        sources += [sixth, shuffled(seventh, generator)]
        sources.append(torch.randint(self.words, (n, self.length + 1), generator=generator))
        held_out = texts.held_out(self.test_documents, generator)
        pool = Pool.of(dict(zip(self._sources(), sources, strict=True)), {})
        return Given(pool, *held_out, other[2 * n :])

    def tasks(self, device: torch.device, folder: Path) -> Any:
        self._base = lru_cache(maxsize=1)(self._trained_base)
        return super().tasks(device, folder)

    def row(self, given: Given, way: str, rate: float | None, seed: int) -> Row:
        model = self._adapted(given, seed)
        if way in METHODS:
            assert rate is not None
            _, row = self.tuned(given, model, self.tuning(rate), way, seed)
            first = sorted(row["shares"], key=row["shares"].get, reverse=True)[: len(_HELPFUL)]
            return row | {"ranked first": float(set(first) == set(_HELPFUL))}
        used = {"uniform": self._sources(), "helpful ones": _HELPFUL, "frozen base": self._sources()}
        names = used.get(way, (way.removeprefix("alone: "),))
        weights = given.pool.mixture(float(name in names) for name in self._sources())
        if way != "frozen base":
            batches = Drawn(given.pool, lambda: weights, self.batch, seed)
            train(model, batches, self.steps, self.weight_rate)
        return self.measured(given, model, weights)

    def _other(self) -> str:
        return "ptb" if self.data == "ptb" else "code"

    def _sources(self) -> tuple[str, ...]:
        return (
            *_HELPFUL,
            "task, shuffled",
            "task, reversed",
            "base's text",
            "base's text, shuffled",
            "random words",
        )

    def _adapted(self, given: Given, seed: int) -> nn.Module:
        """A copy of the base with new adapters, as peft makes them."""
        import peft

        base = deepcopy(self._base(given, seed))
        torch.manual_seed(seed)
        settings = peft.LoraConfig(r=self.rank, lora_alpha=2 * self.rank, target_modules="all-linear")
        adapted: nn.Module = peft.get_peft_model(base, settings)
        return adapted

    def _trained_base(self, given: Given, seed: int) -> nn.Module:
        """The base, trained on the other text, in bfloat16."""
        base = llama(seed, self.words, self.width, self.layers, self.length)
        pool = Pool.of({"generic": given.generic}, {})
        weights = pool.mixture([1.0])
        train(base, Drawn(pool, lambda: weights, self.batch, seed), self.base_steps, self.base_rate)
        return base.to(torch.bfloat16)
