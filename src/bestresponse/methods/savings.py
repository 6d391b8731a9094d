"""What needs less memory, for messages."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..batches import Batches


def savings(own: str, train_batch: Any) -> str:
    """What lowers the memory of a hypergradient, as a sentence.

    Args:
        own: what the method advises; may be empty.
        train_batch: the training batch.
    """
    pieces = "Batches of smaller pieces, one of whose graphs is held at a time with recompute=True"
    if isinstance(train_batch, Batches):
        pieces = "smaller Batches" if train_batch.recompute else "Batches(..., recompute=True)"
    model = "torch.utils.checkpoint in the model, with use_reentrant=False"
    return f"What needs less: {'; '.join(filter(None, (own, pieces, model)))}."


def bytes_of(tensors: Mapping[str, Tensor], copies: float) -> dict[Any, int]:
    """The size of so many copies of the tensors, by device."""
    sizes: dict[Any, int] = {}
    for x in tensors.values():
        sizes[x.device] = sizes.get(x.device, 0) + x.numel() * x.element_size()
    return {device: int(copies * size) for device, size in sizes.items()}
