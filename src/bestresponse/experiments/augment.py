"""A network that changes training images, or weighs them, tuned for validation loss: section 5.4."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from safetensors.torch import load_file
from torch import Tensor

from ..errors import ArgumentError
from . import data, plots, runs
from .augment_rows import UNTUNED, ImageCell, Sets
from .cells import check_rows
from .options import Options, Preset

Row = Literal[
    "no tuning", "untuned network", "identity", "3 Neumann", "3 unrolled", "recycled", "Gauss-Newton"
]
ROWS: tuple[Row, ...] = get_args(Row)
_COLOURS = dict(
    zip(
        ROWS,
        (plots.GREY, "#b8b8b8", plots.ORANGE, plots.GREEN, plots.PURPLE, plots.BLUE, plots.RED),
        strict=True,
    )
)


@dataclass(kw_only=True)
class Augment(Options):
    """Train a residual network on images that a second network changes at random, and tune that one.

    Few images to train on, many to validate on, and a schedule that ends. The same command again goes on where it was
    stopped, and ends with the same numbers.
    """

    data: Literal["digits", "mnist", "cifar10"] = "digits"
    """The data set. digits comes with scikit-learn; the others are read from --data-dir."""
    learn: Literal["augmentation", "weights", "both"] = "augmentation"
    """What is tuned: a network that changes the images, one that weighs them, or both."""
    network: Literal["resnet8", "resnet18"] = "resnet8"
    """What is trained."""
    train: int = 100
    """Training images."""
    validation: int = 500
    """Validation images."""
    pooling: int = 1
    """Images are averaged over squares of so many pixels a side."""
    noise: float = 0.3
    """The deviation of the noise in validation and test images, in units of the pixels' own; the training images
    have none, and what is tuned has to find it. 0 leaves all of them alike, as in the paper."""
    wrong_labels: float = 0.0
    """The share of training images with a label drawn at random."""
    batch: int = 50
    """Training images in a step."""
    validation_batch: int = 250
    """Validation images in a hyper-step."""
    steps: int = 120
    """Weight steps in all; the last ones that are too few for a hyper-step are not made."""
    warmup: int = 40
    """Weight steps before the first hyper-step."""
    weight_steps: int = 5
    """Weight steps before each hyper-step."""
    weight_rate: float = 0.03
    """The learning rate of SGD with momentum 0.9, which falls to zero in the last 30 % of the steps."""
    decay: float = 5e-3
    """The weights' own decay, which is not tuned."""
    optimizer: Literal["sgd", "rmsprop"] = "sgd"
    """Of the hyperparameters; SGD has momentum 0.9. The rate falls to zero from 60 to 80 % of the hyper-steps."""
    hyper_rate: float = 0.1
    """Its learning rate."""
    hyper_clip: float = 0.01
    """The largest norm of a hypergradient; 0 leaves it. So small a one gives nearly all of them the same length."""
    bound: float = 1.0
    """The largest change of a pixel, in units of the pixels' deviation; 0 leaves it free."""
    initial: float = 0.1
    """The standard deviation of the weights of the augmentation's last layer at the start; 0 is the identity."""
    beside: bool = False
    """Train on the images as they are, too, beside the changed ones."""
    rows: tuple[Row, ...] = ROWS
    """The rows of the table; an untuned network stays as the others begin. "3 Neumann" is the sum of four terms at
    three products, and "3 unrolled" looks three steps ahead, which at a minimum is a sum of three."""
    save_every: int = 10
    """Hyper-steps between two saved states."""


PRESETS: dict[Preset, Augment] = {
    "smoke": Augment(),
    "cpu": Augment(
        preset="cpu",
        data="mnist",
        train=200,
        validation=4000,
        pooling=2,
        noise=0.5,
        batch=100,
        steps=1500,
        warmup=100,
        weight_steps=3,
        hyper_rate=0.2,
        seeds=3,
    ),
    "paper": Augment(
        preset="paper",
        threads=0,
        data="cifar10",
        network="resnet18",
        train=40_000,
        validation=10_000,
        noise=0.0,
        batch=128,
        validation_batch=128,
        steps=60_000,
        warmup=0,
        weight_steps=1,
        weight_rate=0.1,
        decay=5e-4,
        optimizer="rmsprop",
        hyper_rate=1e-2,
        hyper_clip=1.0,
        initial=0.0,
        seeds=3,
        save_every=500,
    ),
}


def run(config: Augment) -> Path:
    """Run the experiment and return its folder.

    Raises:
        ArgumentError: an option is out of its range, or there are not so many images.
    """
    sizes = ("train", "validation", "pooling", "batch", "validation_batch", "steps", "weight_steps")
    device = config.begin(
        (*sizes, "weight_rate", "hyper_rate", "save_every"),
        ("noise", "wrong_labels", "warmup", "decay", "hyper_clip", "bound", "initial"),
    )
    check_rows(config.rows)
    if min(config.train, config.batch) < 2:
        raise ArgumentError(
            f"--train and --batch must be 2 at least, since batch norm needs two images; got {config.train} and "
            f"{config.batch}."
        )
    if config.warmup + config.weight_steps > config.steps:
        raise ArgumentError(
            f"--steps must leave a hyper-step after --warmup; got {config.steps} after {config.warmup}, with "
            f"--weight-steps {config.weight_steps}."
        )
    if config.wrong_labels > 1:
        raise ArgumentError(f"--wrong-labels must be a share, at most 1; got {config.wrong_labels}.")
    images = data.load(config.data, config.data_dir)
    if config.pooling > min(images.shape[1:]) // 4:
        raise ArgumentError(f"--pooling must leave 4×4 pixels; got {config.pooling} for {images.shape[1:]}.")
    images.draw(config.train, config.validation, seed=config.seed)  # raises where there are not so many
    folder = config.out or Path("runs") / f"augment-{config.data}-{config.learn}"
    record = runs.Run(folder, "augment", config, figures=["augment.png"])
    for seed in config.all_seeds():
        drawn = sets(config, images, seed).to(device)
        for name in config.rows:
            record.write(ImageCell(config, device, name, seed, folder, drawn).result())
    rows = runs.read_rows(folder)
    values = ["test accuracy", "validation accuracy", "test loss", "change", "noise", "seconds"]
    table = runs.mean_and_deviation(rows, ["row", "hyperparameters"], values)
    draw(folder, runs.read_config(folder), rows)
    headline = {f"test accuracy, {row['row']}": row["test accuracy"] for row in table}
    record.finish(headline, table, config.seed, folders=[row["folder"] for row in rows])
    return folder


def sets(config: Augment, images: data.Images, seed: int) -> Sets:
    """Training, validation and test images, with deviation one in each channel of the training images."""
    (x, y), (x_val, y_val) = images.draw(config.train, config.validation, seed=seed)
    x, x_val, x_test = (F.avg_pool2d(part, config.pooling) for part in (x, x_val, images.x_test))
    scale = x.std(dim=(0, 2, 3), keepdim=True)
    generator = torch.Generator().manual_seed(seed)

    def noisy(part: Tensor) -> Tensor:
        return part / scale + config.noise * torch.randn(part.shape, generator=generator)

    wrong = torch.rand(len(y), generator=generator) < config.wrong_labels
    y = torch.where(wrong, torch.randint(images.classes, y.shape, generator=generator), y)
    return Sets((x / scale, y), (noisy(x_val), y_val), (noisy(x_test), images.y_test), images.classes)


def draw(folder: Path, config: dict[str, Any], rows: list[dict[str, Any]]) -> list[Path]:
    """Test accuracy along the runs; and of the best row images, two samples, and each pixel's deviation."""
    path = folder / "augment.png"
    first = [row for row in rows if row["seed"] == config["seed"]]
    tuned = [row for row in first if row["row"] not in UNTUNED] or first
    best = max(tuned, key=lambda row: row["validation accuracy"])
    shown = config["learn"] != "weights" and (folder / best["folder"] / "images.safetensors").is_file()
    with plots.panels(path, 1, 2 if shown else 1, (10.5 if shown else 6.0, 3.8)) as axes:
        for row in first:
            history = [r for r in runs.read_rows(folder / row["folder"]) if "test_accuracy" in r]
            at = [r["weight_step"] for r in history]
            line = [100 * r["test_accuracy"] for r in history]
            axes[0, 0].plot(at, line, color=_COLOURS[row["row"]], label=row["row"], linewidth=1.6)
        axes[0, 0].legend(frameon=False, fontsize=8)
        plots.style(axes[0, 0], "weight steps", "test accuracy [%]", f"{config['train']} images to train on")
        if shown:
            parts = load_file(folder / best["folder"] / "images.safetensors")
            _show(axes[0, 1], parts, best["row"])
    return [path]


def _show(axes: Axes, parts: dict[str, Tensor], name: str) -> None:
    """Rows of images as one picture, a line each for the originals, two samples and the deviation."""
    x = parts["original"]
    low, high = x.min(), x.max()
    lines = [(parts[key] - low) / (high - low) for key in ("original", "first", "second")]
    lines.append(parts["deviation"] / parts["deviation"].max().clamp(min=1e-12))
    grid = torch.cat(
        [torch.cat([F.pad(image, (1, 1, 1, 1), value=1.0) for image in line], 2) for line in lines], 1
    )
    grid = grid.clamp(0.0, 1.0)
    picture = grid[0] if len(grid) == 1 else grid.permute(1, 2, 0)
    axes.imshow(picture.numpy(), cmap="gray", vmin=0.0, vmax=1.0, interpolation="nearest")
    side = x.shape[2] + 2
    largest = float(parts["deviation"].max())
    words = ("image", "sample", "sample", f"deviation\n(white: {largest:.2g})")
    axes.set_yticks([side * (i + 0.5) for i in range(4)], words, fontsize=8)
    axes.set_xticks([])
    axes.set_title(f"learned augmentation, {name}", fontsize=10)
