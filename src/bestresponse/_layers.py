"""Convolutions and batch norms whose gradient is cheap to differentiate, in the place of torch's while a pass runs."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from ._batch_norm import normalise
from ._convolution import convolve


@contextmanager
def cheap_layers(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Let torch's own of these layers run so, no subclass and none that was changed, and make them torch's again."""
    changed = [
        (module, type(module))
        for module in modules
        if type(module) in _CHEAP and getattr(type(module), _METHODS[type(module)]) is _STOCK[type(module)]
    ]
    try:
        for module, kind in changed:
            module.__class__ = _CHEAP[kind]
        yield
    finally:
        for module, kind in changed:
            module.__class__ = kind


def _cheap(kind: type, method: str, function: Callable[..., Any]) -> type:
    """A class that differs from ``kind`` in one method; its copies are of ``kind``."""

    def reduced(self: Any, protocol: Any) -> tuple[Any, ...]:
        parts: Any = object.__reduce_ex__(self, protocol)
        return object.__new__, (kind,), *parts[2:]

    return type(kind.__name__, (kind,), {method: function, "__reduce_ex__": reduced})


_METHODS: dict[type, str] = {
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), "_conv_forward"),
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), "forward"),
}
_STOCK = {kind: getattr(kind, method) for kind, method in _METHODS.items()}
_CHEAP = {
    kind: _cheap(kind, method, convolve if method == "_conv_forward" else normalise)
    for kind, method in _METHODS.items()
}
