"""Clear messages for torch's own errors that have a known cause."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils.checkpoint import CheckpointError

from ..errors import Error, EvaluationError, OutOfMemoryError
from .graph import COMPILED, second_derivative_error

_CAUSES = (
    (
        "backward through the graph a second time",
        "each pass must compute everything again from weights and hyperparameters; a module or a function keeps a "
        "tensor with the graph of an earlier pass. Compute it in each call, or keep it detached.",
    ),
    (
        "modified by an inplace operation",
        "tensors that the backward pass needs must not change; one is edited in place after it was "
        "used. Replace the edit by an operation that makes a new tensor, or edit a clone. Where each pass moves a "
        "frozen parameter or an attribute that a derivative needs, move it outside the losses, or use a single "
        "batch and Hessian() ({error}).",
    ),
    (
        "Sparse",
        "weights must have dense gradients; an operation of a loss has a sparse one ({error}). Within a hypergradient "
        "nn.Embedding and nn.EmbeddingBag have dense ones automatically; call functions such as F.embedding with "
        "sparse=False.",
    ),
    (
        "Inference tensors",
        "batches and constants must be tensors that autograd can use; one was made in torch.inference_mode ({error}). "
        "Make it outside, under torch.no_grad() if you like, or clone it outside.",
    ),
    (
        "meta tensor",
        "losses need values; a tensor on the meta device has none ({error}). Make parameters, buffers and batches on "
        "a device with memory (Module.to_empty, then load or initialise).",
    ),
)


@contextmanager
def foreign_errors_told(savings: str = "Use smaller batches.") -> Iterator[None]:
    """Replace torch's errors by clear messages where the cause is known; ``savings`` is advice if memory runs out."""
    try:
        yield
    except Error:
        raise
    except (RuntimeError, MemoryError) as error:  # NotImplementedError is a RuntimeError
        if _is_shortage(error):
            got = (str(error) or type(error).__name__).splitlines()[0].rstrip(".")
            raise OutOfMemoryError(f"a pass needs more memory than there is: {got}. {savings}") from error
        told = _told(error)
        if told is None:
            raise
        raise told from error


def _is_shortage(error: BaseException) -> bool:
    """Whether memory ran out, on a GPU or elsewhere."""
    signs = ("DefaultCPUAllocator: ", "not enough memory", "Storage size calculation overflowed")
    of_torch = isinstance(error, torch.OutOfMemoryError) or any(sign in str(error) for sign in signs)
    return of_torch or isinstance(error, MemoryError)


def _told(error: RuntimeError | MemoryError) -> EvaluationError | None:
    text = str(error)
    if "donated buffers" in text or "aot_autograd" in text:
        return second_derivative_error(COMPILED, f"torch.compile made it: {text}")
    if "selective activation checkpoint" in text:
        return second_derivative_error("a selective checkpoint", "it can be differentiated once only")
    if isinstance(error, CheckpointError) or "torch.utils.checkpoint" in text:
        return EvaluationError(
            "a checkpointed part must compute the same when the backward pass runs it again; torch.utils.checkpoint "
            f"met something else ({text}). Let it depend only on its arguments and the random state, keep "
            "preserve_rng_state=True, and remove anything that changes from call to call; or turn the checkpoint off."
        )
    if "appears to not have been used in the graph" in text:
        return EvaluationError(
            "this method replaces the weights by other tensors while a loss runs; a function of the model "
            f"computes again in its backward pass, with the weights themselves ({text.splitlines()[0]}). Use "
            "Implicit(), or write that backward with what save_for_backward keeps."
        )
    for sign, meaning in _CAUSES:
        if sign in text:
            return EvaluationError(meaning.format(error=text.splitlines()[0]))
    return None
