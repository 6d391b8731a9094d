"""The rows of the comparison of section 5.4."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

from ..curvatures import GaussNewton
from ..hyperparameters import Augmenter, ExampleWeights
from ..methods import Direct, Implicit, Method, Unrolled
from ..problem import Problem
from ..runs import callbacks
from ..solvers import ConjugateGradient, Identity, Neumann
from ..tuner import Tuner
from . import models
from .cells import Cell
from .classification import Batch, val_loss

if TYPE_CHECKING:
    from .augment import Augment

UNTUNED = ("no tuning", "untuned network")
_SHOWN, _SAMPLES = 8, 64
_MEASURED = ("validation_accuracy", "validation_loss", "test_accuracy", "test_loss")


@dataclass(frozen=True)
class Sets:
    """Images and labels to train, validate and test on, and the number of classes."""

    train: Batch
    val: Batch
    test: Batch
    classes: int

    def to(self, device: torch.device) -> "Sets":
        """On a device."""
        train, val, test = ((x.to(device), y.to(device)) for x, y in (self.train, self.val, self.test))
        return Sets(train, val, test, self.classes)


class Learned(nn.Module):
    """What is tuned: a network that changes images, one that weighs them, or both."""

    def __init__(self, augmenter: nn.Module | None, weights: nn.Module | None) -> None:
        super().__init__()
        self.augmenter, self.weights = augmenter, weights

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The images [N, C, H, W], changed, and their weights [N]."""
        changed = x if self.augmenter is None else self.augmenter(x)
        return changed, x.new_ones(len(x)) if self.weights is None else self.weights(x)


class Losses:
    """The losses, with those of training in two parts, as `GaussNewton` wants them.

    Args:
        decay: of the weights.
        beside: whether the images as they are go beside the changed ones.
    """

    def __init__(self, decay: float, beside: bool) -> None:
        self.decay, self.beside = decay, beside

    def predict(self, model: nn.Module, hyper: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Logits [N, classes] and the weights of the examples [N]; twice as many with the images beside."""
        x, weights = hyper(batch[0])
        if self.beside:
            x, weights = torch.cat([x, batch[0]]), weights.repeat(2)
        return model(x), weights

    def output_loss(self, outputs: tuple[Tensor, Tensor], batch: Batch) -> Tensor:
        """The weighted mean of their cross-entropies."""
        logits, weights = outputs
        losses = F.cross_entropy(logits, batch[1].repeat(len(logits) // len(batch[1])), reduction="none")
        return (weights * losses).mean()

    def rest(self, model: nn.Module, hyper: nn.Module, batch: Batch) -> Tensor:
        """½ decay ‖w‖²."""
        return 0.5 * self.decay * torch.stack([w.square().sum() for w in model.parameters()]).sum()

    def train(self, model: nn.Module, hyper: nn.Module, batch: Batch) -> Tensor:
        """The training loss."""
        return self.output_loss(self.predict(model, hyper, batch), batch) + self.rest(model, hyper, batch)


@dataclass(frozen=True)
class ImageCell(Cell):
    """One row of one seed."""

    config: "Augment"
    sets: Sets

    def run(self) -> dict[str, Any]:
        """Train, tune and measure."""
        config = self.config
        problem, losses = self._problem()
        learned = problem.hyper
        tuned = self.name not in UNTUNED
        hyper_steps = (config.steps - config.warmup) // config.weight_steps
        optimizer = torch.optim.SGD(problem.weights.values(), config.weight_rate, momentum=0.9, nesterov=True)
        hyper_optimizer = self._hyper_optimizer(learned, tuned)
        tuner = Tuner(
            problem,
            optimizer,
            hyper_optimizer,
            self._method(losses),
            weight_steps=config.weight_steps,
            warmup_steps=config.warmup,
            weight_scheduler=LambdaLR(optimizer, lambda step: _share(step / config.steps, 0.7, 1.0)),
            hyper_scheduler=LambdaLR(hyper_optimizer, lambda step: _share(step / hyper_steps, 0.6, 0.8)),
            seed=self.seed,
            callbacks=[callbacks.Evaluate(self._measured, max(1, hyper_steps // 30))],
        )
        train = self._batches(self.sets.train, config.batch)
        val = self._batches(self.sets.val, config.validation_batch)
        self.fit(tuner, train, val, hyper_steps, config.save_every)
        ended = tuner.history[-1]
        return {
            "hyperparameters": sum(p.numel() for p in learned.parameters()) if tuned else 0,
            **{name.replace("_", " "): ended[name] for name in _MEASURED},
            **self._changes(learned),
            "seconds": ended["seconds"],
        }

    def _problem(self) -> tuple[Problem, Losses]:
        """The same networks for each row; that of "no tuning" leaves the images as they are."""
        config, (channels, height, width) = self.config, self.sets.train[0].shape[1:]
        model = models.make(config.network, (channels, height, width), self.sets.classes)
        augmenter = weights = None
        if config.learn != "weights":
            initial = 0.0 if self.name == "no tuning" else config.initial
            augmenter = Augmenter(channels, bound=config.bound or None, initial=initial)
        if config.learn != "augmentation":
            weights = ExampleWeights(_scores(channels))
        losses = Losses(config.decay, config.beside)
        model, learned = model.to(self.device), Learned(augmenter, weights).to(self.device)
        return Problem(model, learned, losses.train, val_loss), losses

    def _method(self, losses: Losses) -> Method:
        rate = self.config.weight_rate
        curvature = GaussNewton(losses.predict, losses.output_loss, losses.rest)
        return {
            "no tuning": Direct(),
            "untuned network": Direct(),
            "identity": Implicit(Identity()),
            "3 Neumann": Implicit(Neumann(3, scale=rate)),
            "3 unrolled": Unrolled(3, rate),
            "recycled": Implicit(ConjugateGradient(4, damping=None, recycle=10), warm_start=True),
            "Gauss-Newton": Implicit(curvature=curvature),
        }[self.name]

    def _hyper_optimizer(self, learned: nn.Module, tuned: bool) -> torch.optim.Optimizer:
        config, parameters = self.config, list(learned.parameters())
        rate = config.hyper_rate if tuned else 0.0
        optimizer: torch.optim.Optimizer = torch.optim.SGD(parameters, rate, momentum=0.9)
        if config.optimizer == "rmsprop":
            optimizer = torch.optim.RMSprop(parameters, rate)
        if config.hyper_clip:

            def clip(*_: Any) -> None:
                nn.utils.clip_grad_norm_(parameters, config.hyper_clip)

            optimizer.register_step_pre_hook(clip)
        return optimizer

    def _batches(self, batch: Batch, size: int) -> DataLoader[tuple[Tensor, ...]]:
        generator = torch.Generator().manual_seed(self.seed)
        size = min(size, len(batch[0]))
        return DataLoader(TensorDataset(*batch), size, shuffle=True, drop_last=True, generator=generator)

    def _measured(self, model: nn.Module, _: nn.Module) -> dict[str, float]:
        found = {}
        for name, (x, y) in (("validation", self.sets.val), ("test", self.sets.test)):
            logits = torch.cat([model(part) for part in torch.split(x, 1000)])
            found[f"{name}_accuracy"] = float(logits.argmax(dim=1).eq(y).float().mean())
            found[f"{name}_loss"] = float(F.cross_entropy(logits, y))
        return found

    @torch.no_grad()
    def _changes(self, learned: nn.Module) -> dict[str, float]:
        """How far images are moved, and how far apart two draws are; the images of the figure are saved."""
        x = self.sets.train[0][:_SHOWN]
        samples = torch.stack([learned(x)[0] for _ in range(_SAMPLES)])
        deviation = samples.std(dim=0)
        parts = {"original": x, "first": samples[0], "second": samples[1], "deviation": deviation}
        save_file(
            {name: part.cpu().contiguous() for name, part in parts.items()},
            self.folder / "images.safetensors",
        )
        change = (samples - x).square().mean().sqrt()
        return {"change": float(change), "noise": float(deviation.square().mean().sqrt())}


def _scores(channels: int) -> nn.Module:
    """A small network from images to scores, which begin equal."""
    last = nn.Linear(16, 1)
    nn.init.zeros_(last.weight)
    return nn.Sequential(
        *(nn.Conv2d(channels, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 16, 3, 2, 1), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), last),
    )


def _share(at: float, begin: float, end: float) -> float:
    """One before ``begin``, zero from ``end``, and half a cosine between."""
    through = min(1.0, max(0.0, (at - begin) / (end - begin)))
    return 0.5 * (1.0 + math.cos(math.pi * through))
