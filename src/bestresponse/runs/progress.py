"""How far a run has come: a bar in a terminal, plain lines elsewhere."""

import sys
import time
from typing import Any

from .run import Run

_SECONDS = 30.0


class Bar:
    """A progress bar in a terminal or a notebook; elsewhere a line every ten per cent, or after thirty seconds.

    Args:
        total: how many there are; 0 if unknown.
        unit: what they are.
        begun: how many were done before.
        shown: whether anything is shown at all.
    """

    def __init__(self, total: int, unit: str, begun: int = 0, shown: bool = True) -> None:
        self._total, self._unit, self._done, self._shown = total, unit, begun, shown
        self._began = self._last = time.monotonic()
        self._text = ""
        self._first: tuple[int, float] | None = None
        self._bar: Any = None
        if shown and (sys.stderr.isatty() or "ipykernel" in sys.modules):
            # Imported only for a bar: in a notebook without ipywidgets, the import itself warns.
            from tqdm.auto import tqdm

            self._bar = tqdm(total=total or None, initial=begun, unit=unit, dynamic_ncols=True)

    def advance(self, number: int = 1, text: str | None = None) -> None:
        """So many more are done; the text stands beside the bar, from now on."""
        tenth, self._done = self._tenth(), self._done + number
        self._text = self._text if text is None else text
        now = time.monotonic()
        self._first = self._first or (self._done, now)
        if self._bar is not None:
            self._bar.set_postfix_str(self._text, refresh=False)
            self._bar.update(number)
        elif self._shown and (self._tenth() > tenth or now - self._last >= _SECONDS):
            self._last = now
            of = f" of {self._total}" if self._total else ""
            made = f"{self._done}{of} {self._unit}s, {self._times(now)}"
            print(f"{made}: {self._text}" if self._text else made, file=sys.stderr, flush=True)

    def _times(self, now: float) -> str:
        """The time until now, and the time left at the speed since the first step, which may include a warm-up."""
        assert self._first is not None
        made, left = self._done - self._first[0], self._total - self._done
        text = _duration(now - self._began)
        if made <= 0 or left <= 0:
            return text
        return f"{text}, {_duration((now - self._first[1]) * left / made)} left"

    def _tenth(self) -> int:
        return 10 * self._done // self._total if self._total else 0

    def close(self) -> None:
        """Leave the bar as it stands."""
        if self._bar is not None:
            self._bar.close()


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


class Progress:
    """A callback that shows the losses, that of the watch too, the norm of the hypergradient and the time left.

    In a terminal or a notebook it is a bar. Elsewhere it writes a line every ten per cent of the hyper-steps, or after
    thirty seconds, to standard error.
    """

    def __init__(self) -> None:
        self._bar: Bar | None = None
        self._watched = ""

    def __call__(self, tuner: Run) -> None:
        if self._bar is None:
            shown = tuner.problem.group.rank == 0
            self._bar = Bar(tuner.last_hyper_step, "hyper-step", tuner.hyper_step - 1, shown)
        row = tuner.history[-1]
        losses = f"train={row['train_loss']:.3g}, val={row['val_loss']:.3g}"
        if "watch_loss" in row:
            self._watched = f", watch={row['watch_loss']:.3g}"
        self._bar.advance(text=f"{losses}{self._watched}, |dL/dλ|={row['hypergradient_norm']:.2g}")

    def close(self) -> None:
        """Leave the bar as it stands."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
