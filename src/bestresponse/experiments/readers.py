"""Networks trained on original images that read distilled ones: a measure of whether those look like their class."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import models
from .classification import accuracy
from .data import Images

_STEPS, _BATCH, _RATE = 1000, 128, 1e-3
_OTHERS = 2
_OFFSET = 1000  # of the seeds of other networks


def read(images: Images, distilled: Tensor, labels: Tensor, seed: int) -> Iterator[tuple[str, float, int]]:
    """For two kinds of network: its name, its test accuracy, and how many distilled images it reads as their class.

    Each distilled image is stretched to the range of the original images first, as a viewer would show it.
    """
    shown = stretched(distilled, images)
    for name in _kinds(images):
        reader = _trained(name, images, seed)
        with torch.no_grad():
            right = reader(shown).argmax(dim=1) == labels
        yield name, accuracy(reader, (images.x_test, images.y_test)), int(right.sum())


def others(images: Images, seed: int, device: torch.device) -> list[nn.Module]:
    """Networks of the same kinds that begin at other weights and see other batches, for a loss of reading."""
    seeds = range(seed + _OFFSET, seed + _OFFSET + _OTHERS)
    networks = [_trained(name, images, number) for name in _kinds(images) for number in seeds]
    return [network.requires_grad_(False).to(device) for network in networks]


def _kinds(images: Images) -> tuple[str, str]:
    return "lenet" if images.shape[1] >= 28 else "resnet8", "mlp"


def stretched(x: Tensor, images: Images) -> Tensor:
    """Images [N, C, H, W], each scaled so that its smallest and largest value are those of the training set."""
    low, high = images.x_train.min(), images.x_train.max()
    least, most = x.amin(dim=(1, 2, 3), keepdim=True), x.amax(dim=(1, 2, 3), keepdim=True)
    return low + (high - low) * (x - least) / (most - least).clamp_min(1e-12)


def _trained(name: str, images: Images, seed: int) -> nn.Module:
    """The network after a thousand Adam steps on the training set, in eval mode."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = models.make(name, images.shape, images.classes)
        optimizer = torch.optim.Adam(model.parameters(), _RATE)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, _STEPS)
        for _ in range(_STEPS):
            rows = torch.randint(len(images.y_train), (_BATCH,))
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images.x_train[rows]), images.y_train[rows])
            torch.autograd.backward(loss)
            optimizer.step()
            schedule.step()
    return model.eval()
