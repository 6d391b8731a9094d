"""The data sets of the paper, from a folder of files or from scikit-learn."""

import gzip
import lzma
import os
import struct
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..errors import ArgumentError, Error

Array = npt.NDArray[Any]

VARIABLE = "BESTRESPONSE_DATA"
# The errors that a damaged file causes in its reader.
_DAMAGED = (ValueError, KeyError, EOFError, OSError, struct.error, zipfile.BadZipFile, lzma.LZMAError)
_TEN = tuple("0123456789")
_CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


class MissingDataError(Error, FileNotFoundError):
    """A data file is missing; the message has its name and its source."""


@dataclass(frozen=True)
class Images:
    """Labelled images, scaled so that each channel of the training set has mean 0 and deviation 1.

    Attributes:
        x_train, x_test: float32 [N, C, H, W].
        y_train, y_test: int64 [N].
        names: the names of the classes.
        mean, deviation: scale of each channel, in the units of the files: a pixel is deviation · x + mean.
    """

    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor
    names: tuple[str, ...]
    mean: tuple[float, ...]
    deviation: tuple[float, ...]

    @property
    def classes(self) -> int:
        """The number of classes."""
        return len(self.names)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an image."""
        channels, height, width = self.x_train.shape[1:]
        return channels, height, width

    def draw(self, *sizes: int, seed: int) -> list[tuple[Tensor, Tensor]]:
        """Disjoint random batches (x, y) of the training set, of the given sizes."""
        number, wanted = len(self.x_train), sum(sizes)
        if wanted > number:
            raise ArgumentError(
                f"the training set has {number} examples; got a request for {wanted}. Ask for fewer."
            )
        order = torch.randperm(number, generator=torch.Generator().manual_seed(seed))
        pieces = torch.split(order[:wanted], list(sizes))
        return [(self.x_train[rows], self.y_train[rows]) for rows in pieces]


def load(name: str, folder: str | Path | None = None) -> Images:
    """A data set by name: "digits", "mnist", "cifar10" or "cifar100" (by its fine labels).

    Args:
        name: the name of the set.
        folder: the folder of the files; None means the one in the variable BESTRESPONSE_DATA.

    Raises:
        MissingDataError: a file is missing.
    """
    if name == "digits":
        return _digits()
    folder = folder_of(folder)
    with reading(name, folder):
        archive = find(folder, f"{name}_subset.npz", f"{name}.npz")
        return _from_archive(archive) if archive else _READERS[name](folder)


def load_table(name: str, folder: str | Path | None = None) -> tuple[Tensor, Tensor]:
    """A regression set by name: features [N, D] and targets [N], each scaled to mean 0 and deviation 1.

    Boston is included only because the paper uses it: scikit-learn removed it, since its column B rests on a racist
    premise.

    Args:
        name: "diabetes", which comes with scikit-learn, or "boston": StatLib's file ``boston`` as it is, or
            ``boston_housing.csv``: 506 lines below a line of column names, with the target last.
        folder: the folder of the file; None means the one in the variable BESTRESPONSE_DATA.

    Raises:
        MissingDataError: the file is missing.
    """
    if name == "diabetes":
        from sklearn.datasets import load_diabetes

        features, targets = load_diabetes(return_X_y=True)
    else:
        folder = folder_of(folder)
        source, names = "http://lib.stat.cmu.edu/datasets/boston", ("boston_housing.csv", "boston")
        path = required("Boston housing", "boston (or boston_housing.csv)", folder, source, *names)
        with reading(name, folder):
            table = _boston(path)
        features, targets = table[:, :-1], table[:, -1]
    x, y = (torch.from_numpy(np.asarray(values, np.float64)) for values in (features, targets))
    return (x - x.mean(0)) / x.std(0), (y - y.mean()) / y.std()


def _boston(path: Path) -> Array:
    """506 rows of 14 numbers. StatLib's file starts with 22 lines of text, and has each row on two lines."""
    if path.suffix == ".csv":
        return np.loadtxt(path, delimiter=",", skiprows=1, ndmin=2)
    numbers = " ".join(path.read_text(encoding="latin-1").splitlines()[22:]).split()
    return np.asarray(numbers, np.float64).reshape(-1, 14)


@contextmanager
def reading(name: str, folder: Path | None) -> Iterator[None]:
    """Turn a reader's error about a damaged file into an ArgumentError."""
    try:
        yield
    except Error:
        raise
    except _DAMAGED as error:
        raise ArgumentError(
            f"the files of {name} in {folder} must be whole; one cannot be read: {type(error).__name__}: {error}. "
            "Download it again."
        ) from error


def folder_of(folder: str | Path | None) -> Path | None:
    """The folder of data files: the given one, or the one in the variable."""
    named = folder if folder is not None else os.environ.get(VARIABLE)
    return Path(named) if named else None


def find(folder: Path | None, *names: str) -> Path | None:
    """The first of the named files that exists in the folder."""
    paths = [] if folder is None else [folder / name for name in names]
    return next((path for path in paths if path.is_file()), None)


def required(data: str, label: str, folder: Path | None, source: str, *names: str) -> Path:
    """The first of the named files that exists in the folder; else an error with the file's label and source."""
    if path := find(folder, *names):
        return path
    looked = f"the folder {folder}" if folder else f"no folder: neither --data-dir nor {VARIABLE} is set"
    raise MissingDataError(
        f"{data} needs the file {label}; looked in {looked}. Get it from {source} and pass its folder as --data-dir "
        f"or {VARIABLE}."
    )


def _digits() -> Images:
    """Scikit-learn's 1,797 digits of 8×8 pixels; a fixed random third is the test set."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    images, labels = images[order].reshape(-1, 1, 8, 8), labels[order]
    return _scaled((images[:1198], labels[:1198]), (images[1198:], labels[1198:]), _TEN)


def _mnist(folder: Path | None) -> Images:
    source, arrays = "https://ossci-datasets.s3.amazonaws.com/mnist/", []
    for part, kind in product(("train", "t10k"), ("images-idx3", "labels-idx1")):
        name = f"{part}-{kind}-ubyte"
        label = f"{name}.gz (one of four IDX files, gzipped or not; or mnist.npz instead)"
        names = (name, f"{name}.gz", name.replace("-idx", ".idx"))
        arrays.append(_read_idx(required("MNIST", label, folder, source, *names)))
    x, y, x_test, y_test = arrays
    return _scaled((x, y), (x_test, y_test), _TEN)


def _cifar10(folder: Path | None) -> Images:
    names = [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]
    paths = [_cifar_file("CIFAR-10", "batches-bin", name, folder) for name in names]
    *parts, test = (_read_cifar(path, labels=1) for path in paths)
    x, y = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return _scaled((x, y), test, _CIFAR10)


def _cifar100(folder: Path | None) -> Images:
    names = ("train.bin", "test.bin", "fine_label_names.txt")
    train, test, labels = (_cifar_file("CIFAR-100", "binary", name, folder) for name in names)
    classes = tuple(labels.read_text(encoding="utf-8").split())
    return _scaled(_read_cifar(train, labels=2), _read_cifar(test, labels=2), classes)


def _cifar_file(data: str, end: str, name: str, folder: Path | None) -> Path:
    inside = f"{data.lower()}-{end}/{name}"  # the path in the archive
    source = f"https://www.cs.toronto.edu/~kriz/{data.lower()}-binary.tar.gz"
    return required(data, f"{inside} (of the unpacked binary version)", folder, source, name, inside)


_READERS = {"mnist": _mnist, "cifar10": _cifar10, "cifar100": _cifar100}


def _from_archive(path: Path) -> Images:
    """A numpy archive with x_train, y_train, x_test, y_test; images as [N, H, W] or [N, H, W, C] bytes."""
    with np.load(path, allow_pickle=False) as archive:
        (x, y), test = ((archive[f"x_{part}"], archive[f"y_{part}"]) for part in ("train", "test"))
        stored = archive["class_names"].tolist() if "class_names" in archive.files else _TEN
    names = tuple(name.decode() if isinstance(name, bytes) else str(name) for name in stored)
    return _scaled((x, y), test, names, channels_last=True)


def _read_idx(path: Path) -> Array:
    """An IDX file (LeCun's format): two zero bytes, type, rank, big-endian sizes, data bytes."""
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    zero, kind, rank = struct.unpack(">HBB", content[:4])
    shape = struct.unpack(f">{rank}I", content[4 : 4 + 4 * rank])
    values = np.frombuffer(content, np.uint8, offset=4 + 4 * rank)
    if zero or kind != 8 or values.size != np.prod(shape):
        raise ArgumentError(
            f"{path} must be an IDX file of bytes; got type {kind}, sizes {shape} and {values.size} bytes. "
            "Download it again."
        )
    return values.reshape(shape)


def _read_cifar(path: Path, labels: int) -> tuple[Array, Array]:
    """CIFAR's binary version: records of one or two label bytes, the fine label last, and 3 × 32 × 32 bytes."""
    values, size = np.fromfile(path, np.uint8), labels + 3072
    if values.size == 0 or values.size % size:
        raise ArgumentError(
            f"{path} must hold records of {size:,} bytes (the binary version of CIFAR); got {values.size} bytes. "
            "Download it again."
        )
    records = values.reshape(-1, size)
    return records[:, labels:].reshape(-1, 3, 32, 32), records[:, labels - 1]


def _scaled(
    train: tuple[Array, Array], test: tuple[Array, Array], names: tuple[str, ...], channels_last: bool = False
) -> Images:
    for x, y in (train, test):
        if not len(x) or y.shape != (len(x),) or int(y.max()) >= len(names):
            raise ArgumentError(
                f"images need one label each, below {len(names)}; got {len(x)} images and labels "
                f"{list(y.shape)} up to {y.max() if y.size else None}. Check the files and the class names."
            )
    x_train, x_test = (_as_tensor(x, channels_last) for x, _ in (train, test))
    y_train, y_test = (torch.from_numpy(y.astype(np.int64)) for _, y in (train, test))
    deviation, mean = torch.std_mean(x_train, dim=(0, 2, 3), keepdim=True)
    for part in (x_train, x_test):
        part.sub_(mean).div_(deviation)
    scale = (tuple(x.flatten().tolist()) for x in (mean, deviation))
    return Images(x_train, y_train, x_test, y_test, names, *scale)


def _as_tensor(x: Array, channels_last: bool) -> Tensor:
    """float32 [N, C, H, W]."""
    if x.ndim == 3:
        x = x[:, None]
    elif channels_last:
        x = x.transpose(0, 3, 1, 2)
    return torch.from_numpy(np.ascontiguousarray(x, dtype=np.float32))
