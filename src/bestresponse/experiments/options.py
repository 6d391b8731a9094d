"""The options that all experiments share."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from ..errors import ArgumentError

Preset = Literal["smoke", "cpu", "paper"]


@dataclass(kw_only=True)
class Options:
    """What every experiment is told."""

    preset: Preset = "smoke"
    """Where the other options begin: smoke takes under a minute and no data files, and shows that all runs, no more;
    cpu takes minutes on two cores with real data (augment and lstm an hour); paper is the paper's whole setting."""
    seeds: int = 1
    """How many seeds to run; the table has the mean and the standard deviation over them."""
    seed: int = 0
    """The first seed. It draws the examples and the initial weights."""
    device: str = "cpu"
    """Where to compute: cpu, cuda, ..."""
    threads: int = 1
    """Processor threads for torch; 0 leaves torch's choice. For networks as small as those of smoke, a second one
    costs more than it gives."""
    data_dir: Path | None = None
    """The folder of data files; also the environment variable BESTRESPONSE_DATA. docs/reproducing.md says which
    files of each data set."""
    out: Path | None = None
    """The folder to write to; by default a name under runs/. An earlier run's files there are replaced; augment and
    lstm go on with its rows where their options are the same."""

    def all_seeds(self) -> Iterator[int]:
        """Each seed, in turn."""
        yield from range(self.seed, self.seed + self.seeds)

    def begin(
        self,
        positive: Sequence[str] = (),
        not_negative: Sequence[str] = (),
        log_decays: Sequence[str] = (),
        several: bool = True,
    ) -> torch.device:
        """Check the options before anything is written, set the threads, and return the device.

        Args:
            positive: the names of the options that must be above zero.
            not_negative: those that must not be below it.
            log_decays: logarithms of decays, which must be within the bounds of `WeightDecay`.
            several: whether the experiment takes several seeds.

        Raises:
            ArgumentError: an option is out of its range, or the device is not here.
        """
        for name in ("seeds", *positive):
            self._require(name, "positive and finite", getattr(self, name) > 0)
        for name in ("threads", *not_negative):
            self._require(name, "≥ 0 and finite", getattr(self, name) >= 0)
        for name in log_decays:
            self._require(name, "between -14 and 3", -14 <= getattr(self, name) <= 3)
        if not several:
            self._require("seeds", "1, since it makes one run", self.seeds == 1)
        try:
            device = torch.empty(0, device=self.device).device
        except (RuntimeError, AssertionError) as error:
            reason = str(error).splitlines()[0]
            raise ArgumentError(
                f"--device must name a device that is here; got {self.device!r}: {reason}"
            ) from error
        if self.threads:
            torch.set_num_threads(self.threads)
        return device

    def _require(self, name: str, required: str, holds: bool) -> None:
        value = getattr(self, name)
        if not (holds and math.isfinite(value)):
            raise ArgumentError(f"--{name.replace('_', '-')} must be {required}; got {value}.")
