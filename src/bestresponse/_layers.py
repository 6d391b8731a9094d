"""Convolutions and batch norms whose gradient is cheap to differentiate, in the place of torch's while a pass runs."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ._batch_norm import normalise
from ._convolution import convolve


@contextmanager
def cheap_layers() -> Iterator[None]:
    """Let them run so in all modules, and put torch's own back when the last of such contexts ends.

    The class's method is replaced and not the module's: so a module keeps its type, and its copies are like any other.
    """
    _count(1)
    try:
        yield
    finally:
        _count(-1)


def _count(change: int) -> None:
    global _depth
    with _lock:
        _depth += change
        for kind, method, torchs, ours in _FORMS:
            now, then = (torchs, ours) if _depth else (ours, torchs)
            if vars(kind)[method] is now:  # and not one that somebody else has put there
                setattr(kind, method, then)


def _form(kind: type, method: str, function: Callable[..., Any]) -> tuple[type, str, Any, Any]:
    torchs = vars(kind)[method]

    def ours(self: Any, *arguments: Any, **named: Any) -> Any:
        return function(self, torchs, *arguments, **named)

    return kind, method, torchs, ours


_lock, _depth = threading.Lock(), 0
_FORMS = [
    form
    for form in (
        *(_form(kind, "_conv_forward", convolve) for kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d)),
        _form(_BatchNorm, "forward", normalise),
    )
    if form[2].__module__ == form[0].__module__  # and not changed before
]
