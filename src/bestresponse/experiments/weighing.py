"""Training language models on weighed documents, with fixed weights or with weights that are tuned along the way."""

import math
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import bestresponse as br

from .documents import Drawn, Pool, PoolWeights

Batch = tuple[Tensor, Tensor, Tensor]


def predict(model: Any, hyper: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """Logits, and the relative weights of the documents."""
    return logits(model, batch[0]), hyper(batch[1]) / batch[2]


def output_loss(outputs: tuple[Tensor, Tensor], batch: Batch) -> Tensor:
    """The mean of the weighted losses."""
    return (outputs[1] * losses(outputs[0], batch[0])).mean()


def train_loss(model: Any, hyper: Any, batch: Batch) -> Tensor:
    """The training loss of weighed documents.

    A document counts w / w′, where w is its weight and w′ is the weight by which it was drawn. So the value is that of
    the drawn documents, and the derivative is that of the weighted mean over all documents.
    """
    return output_loss(predict(model, hyper, batch), batch)


def _nothing(model: Any, hyper: Any, batch: Batch) -> float:
    """What the training loss adds to the loss of the outputs."""
    return 0.0


METHODS: dict[str, Callable[[], br.Method]] = {
    "Implicit": br.Implicit,
    "Gauss-Newton": lambda: br.Implicit(
        br.ConjugateGradient(2, damping=None),
        br.GaussNewton(predict, output_loss, _nothing),
        warm_start=True,
    ),
    "SAMA": br.SAMA,
    "Penalty": lambda: br.Penalty(1, 0.1, multiplier=10.0),
}


@dataclass
class Clock:
    """CPU time of weight steps and of hyper-steps in one run, without the first hyper-step, which verifies."""

    every: int
    warmup: int
    ends: list[float] = field(default_factory=list)

    def __call__(self, *_: Any) -> None:
        """Note the end of a weight step."""
        self.ends.append(time.process_time())

    def speed(self, every: int) -> float | None:
        """Tokens a second with a hyper-step after ``every`` weight steps, divided by those without hyper-steps."""
        took = [after - before for before, after in zip(self.ends, self.ends[1:], strict=False)]
        first = self.warmup + self.every
        steps = [t for k, t in enumerate(took, 1) if (k - self.warmup) % self.every or k < first]
        both = [t for k, t in enumerate(took, 1) if k > first and (k - self.warmup) % self.every == 0]
        if not steps or not both:
            return None
        step = statistics.median(steps)
        return every * step / (every * step + max(0.0, statistics.median(both) - step))


def llama(seed: int, words: int, width: int, layers: int, length: int, **more: Any) -> nn.Module:
    """Hugging Face's Llama from a configuration, with random weights and four heads; ``more`` goes to its settings."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    settings = LlamaConfig(
        vocab_size=words,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=length,
        tie_word_embeddings=True,
        use_cache=False,
        **more,
    )
    model: nn.Module = LlamaForCausalLM(settings)
    return model


def logits(model: Any, words: Tensor) -> Tensor:
    """The logits of all words but the first, from those before them."""
    found: Tensor = model(input_ids=words[:, :-1]).logits
    return found.to(torch.promote_types(found.dtype, torch.float32))  # a base may be in bfloat16


def losses(outputs: Tensor, words: Tensor) -> Tensor:
    """The mean cross-entropy of each document, [N]."""
    each = F.cross_entropy(outputs.flatten(0, 1), words[:, 1:].flatten(), reduction="none")
    return each.view(len(words), -1).mean(1)


@torch.no_grad()
def perplexity(model: nn.Module, words: Tensor) -> float:
    """Exp of the mean cross-entropy of documents."""
    was = model.training
    model.eval()
    found = torch.cat([losses(logits(model, part), part) for part in torch.split(words, 64)])
    model.train(was)
    return math.exp(min(float(found.double().mean()), 700.0))


def train(model: nn.Module, batches: Drawn, steps: int, rate: float) -> None:
    """Train by Adam on documents that are drawn by fixed weights."""
    optimizer = torch.optim.Adam([w for w in model.parameters() if w.requires_grad], rate)
    step = 0
    while step < steps:
        for words, _, _ in batches:
            loss = losses(logits(model, words), words).mean()
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            step += 1
            if step == steps:
                return


@dataclass(frozen=True)
class Tuning:
    """How weights of documents are tuned while a model trains.

    Attributes:
        batch, val_batch: documents in a batch.
        steps: weight steps in all; warmup: those before the first hyper-step.
        every: weight steps before each hyper-step.
        weight_rate: Adam's learning rate for the model.
        rate: Adam's learning rate for the scores of the sources.
        document_rate: the same for the documents.
    """

    batch: int
    val_batch: int
    steps: int
    warmup: int
    every: int
    weight_rate: float
    rate: float
    document_rate: float = 0.0

    @property
    def hyper_steps(self) -> int:
        """The number of hyper-steps."""
        return (self.steps - self.warmup) // self.every

    def further(self) -> float:
        """The documents of all hyper-steps, divided by those of all weight steps."""
        return self.hyper_steps * (self.batch + self.val_batch) / (self.steps * self.batch)

    def run(
        self, model: nn.Module, pool: Pool, val: Tensor, method: str, seed: int
    ) -> tuple[PoolWeights, Clock]:
        """Train the model and tune the weights; the weights at the end, and what the steps cost."""
        hyper = PoolWeights(pool, self.document_rate > 0)
        problem = br.Problem(model, hyper, train_loss, _val_loss)
        optimizer = torch.optim.Adam(problem.weights.values(), self.weight_rate)
        clock = Clock(self.every, self.warmup)
        optimizer.register_step_post_hook(clock)
        groups: list[dict[str, Any]] = [{"params": hyper.sources.parameters(), "lr": self.rate}]
        if hyper.documents is not None:
            # Without momentum, a step moves the documents of its batch only.
            alone = {"lr": self.document_rate, "betas": (0.0, 0.9)}
            groups.append({"params": hyper.documents.parameters(), **alone})
        tuner = br.Tuner(
            problem,
            optimizer,
            torch.optim.Adam(groups),
            METHODS[method](),
            weight_steps=self.every,
            warmup_steps=self.warmup,
            seed=seed,
        )
        order = torch.Generator().manual_seed(seed)
        val_batches: Iterable[Tensor] = DataLoader(
            val,  # type: ignore[arg-type]
            min(self.val_batch, len(val)),
            shuffle=True,
            drop_last=True,
            generator=order,
        )
        tuner.fit(Drawn(pool, hyper.all, self.batch, seed), val_batches, self.hyper_steps)
        return hyper, clock


def _val_loss(model: Any, hyper: Any, words: Tensor) -> Tensor:
    return losses(logits(model, words), words).mean()
