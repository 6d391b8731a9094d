"""The outputs that a loss is a function of, in any structure, and the loss's Hessian with respect to them."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from ..errors import EvaluationError
from ..passes import graph

_DENSE = 2**26


def listed(outputs: Any, owner: str = "a curvature") -> list[Any]:
    """The outputs of predict as a list, also from nested collections; raises if there is no tensor among them."""
    values = list(_leaves(outputs))
    if not any(isinstance(x, Tensor) for x in values):
        raise EvaluationError(
            f"{owner}.predict must return a tensor, or a tuple, list or dict of tensors; got "
            f"{type(outputs).__name__}."
        )
    return values


def _inside(outputs: Any) -> list[Any] | None:
    """The parts of a collection; None for anything else."""
    if isinstance(outputs, Mapping):
        return list(outputs.values())
    return list(outputs) if isinstance(outputs, Sequence) and not isinstance(outputs, str | bytes) else None


def _leaves(outputs: Any) -> Iterator[Any]:
    parts = _inside(outputs)
    if parts is None:
        yield outputs
    else:
        for part in parts:
            yield from _leaves(part)


def with_graph(outputs: Any, owner: str) -> list[Tensor]:
    """The tensors among the outputs that have a derivative; raises if there are none."""
    moving = [x for x in listed(outputs, owner) if depends(x)]
    if not moving:
        raise EvaluationError(
            f"the outputs of {owner}.predict must depend on the weights by a graph; got detached ones. "
            "Look for detach(), no_grad() or .data in it."
        )
    return moving


def depends(output: Any) -> bool:
    """Whether an output has a derivative; other outputs (masks, indices, constants) are passed on unchanged."""
    return isinstance(output, Tensor) and output.requires_grad


def refilled(outputs: Any, tensors: Iterable[Tensor]) -> Any:
    """The same structure with other tensors where there is a derivative."""
    return _refilled(outputs, iter(tensors))


def _refilled(outputs: Any, following: Iterator[Tensor]) -> Any:
    parts = _inside(outputs)
    if parts is None:
        return next(following) if depends(outputs) else outputs
    values = [_refilled(part, following) for part in parts]
    if all(a is b for a, b in zip(values, parts, strict=True)):
        return outputs
    if isinstance(outputs, Mapping):
        other: Any = copy(outputs)
        for key, value in zip(outputs, values, strict=True):
            other[key] = value
        return other
    return type(outputs)(*values) if hasattr(outputs, "_fields") else type(outputs)(values)


def filled(values: Sequence[Tensor | None], like: Sequence[Tensor]) -> list[Tensor]:
    """Zeros in the places of None."""
    return [torch.zeros_like(x) if value is None else value for value, x in zip(values, like, strict=True)]


def output_hessian(
    loss: Any, outputs: Any, moving: Sequence[Tensor], batch: Any
) -> Callable[[list[Tensor]], list[Tensor]]:
    """The map u ↦ H u: the loss's own if it has one; otherwise by autograd with the outputs as arguments."""
    leaves = [x.detach().requires_grad_() for x in moving]
    if hasattr(loss, "output_hessian"):
        own = loss.output_hessian(refilled(outputs, [x.detach() for x in leaves]), batch)
        live = [depends(x) for x in listed(outputs)]
        return lambda pushed: list(compress(listed(own(refilled(outputs, pushed))), live))
    again = loss(refilled(outputs, leaves), batch)
    slopes = torch.autograd.grad(again, leaves, create_graph=True, allow_unused=True)
    graph.inspect_gradient(s for s in slopes if s is not None)
    slopes_graph = graph.edges({str(i): s for i, s in enumerate(slopes) if s is not None and s.requires_grad})

    def product(pushed: list[Tensor]) -> list[Tensor]:
        named = {i: pushed[int(i)] for i in slopes_graph}
        return filled(graph.vector_product(slopes_graph, leaves, named, True), leaves)

    return product


def output_root(
    loss: Any, outputs: Any, moving: Sequence[Tensor], wanted: Sequence[bool], batch: Any
) -> tuple[int, int, Callable[[Tensor], list[Tensor]]]:
    """The number N of examples, the number D of outputs of each, and the map ξ ↦ S ξ of [N, D] with S Sᵀ = H.

    The loss must be a sum over the examples, the first dimension of all outputs: H has a
    block for each. Only ``wanted`` outputs count. The loss's own root is used if it has one; otherwise the root comes
    from the eigenvalues of the blocks.
    """
    if hasattr(loss, "output_root") and isinstance(outputs, Tensor):
        own = loss.output_root(outputs.detach(), batch)
        examples = len(outputs) if outputs.ndim > 1 else 1
        return examples, outputs.numel() // max(1, examples), lambda xi: [own(xi.view_as(outputs))]
    weigh = output_hessian(loss, outputs, moving, batch)
    live = list(compress(moving, wanted))
    lengths = {len(x) if x.ndim else 1 for x in live}
    if len(lengths) > 1:
        raise EvaluationError(
            f"KFAC needs outputs whose first dimension counts the examples; got {[list(x.shape) for x in live]}."
        )
    examples = lengths.pop()
    widths = [x.numel() // examples for x in live]
    size = sum(widths)
    if examples * size * size > _DENSE:
        raise EvaluationError(
            f"KFAC keeps the Hessian of the loss for each example, at most {_DENSE:,} numbers; got {examples} × {size} "
            "outputs. Give the loss a method output_root, as losses.CrossEntropy has, and samples=1; or take "
            "GaussNewton."
        )

    def split(u: Tensor) -> list[Tensor]:
        return [p.reshape(x.shape) for p, x in zip(torch.split(u, widths, dim=1), live, strict=True)]

    def product(u: Tensor) -> Tensor:
        given = iter(split(u))
        pushed = [next(given) if w else torch.zeros_like(x) for x, w in zip(moving, wanted, strict=True)]
        return torch.cat([x.reshape(examples, -1) for x in compress(weigh(pushed), wanted)], dim=1)

    like = live[0].detach().new_zeros(examples, size)
    columns = [like.index_fill(1, torch.tensor(c, device=like.device), 1.0) for c in range(size)]
    # Half precision has no eigenvalues.
    wide = torch.promote_types(like.dtype, torch.float32)
    blocks = torch.stack([product(column).to(wide) for column in columns], dim=2)
    rounding = _check_blocks(blocks, lambda u: product(u.to(like.dtype)).to(wide))
    values, vectors = torch.linalg.eigh((blocks + blocks.mT) / 2)
    if not float(values.min()) >= -rounding:
        raise EvaluationError(
            "KFAC needs a loss that is convex in the outputs, as cross-entropy and squared error are; got a "
            f"curvature of {float(values.min()):.3g}. Use Hessian."
        )
    roots = vectors * values.clamp_min(0.0).sqrt().unsqueeze(1)
    return examples, size, lambda xi: split((roots @ xi.to(wide).unsqueeze(2)).squeeze(2).to(like.dtype))


def root_columns(
    loss: Any, samples: int | None, outputs: Any, moving: Sequence[Tensor], wanted: Sequence[bool], batch: Any
) -> Iterator[list[Tensor]]:
    """Columns of S: one for each output, with a random sign for each example; or sums of all with random signs.

    The signs make the square of the sum over the examples an unbiased estimate of the sum of squares.
    """
    examples, size, root = output_root(loss, outputs, moving, wanted, batch)
    like = next(compress(moving, wanted))
    generator = torch.Generator().manual_seed(0)
    for number in range(samples or size):
        width = size if samples else 1
        signs = 2.0 * torch.randint(2, (examples, width), generator=generator) - 1.0
        xi = torch.zeros(examples, size)
        xi[:, slice(None) if samples else slice(number, number + 1)] = signs
        yield root(xi.to(like.device, like.dtype) / (samples or 1) ** 0.5)


def _check_blocks(blocks: Tensor, product: Callable[[Tensor], Tensor]) -> float:
    """Raise if the Hessian is more than its blocks, beyond rounding, even for saturated outputs."""
    rounding = 1e-2 * float(blocks.abs().max()) + 1e3 * torch.finfo(blocks.dtype).eps / len(blocks)
    ones = torch.ones_like(blocks[:, 0])
    generator = torch.Generator().manual_seed(0)
    random = torch.randn(ones.shape, generator=generator, dtype=ones.dtype).to(ones.device)
    for probe in (ones, random):
        apart = product(probe) - (blocks @ probe.unsqueeze(2)).squeeze(2)
        if not float(apart.abs().max()) <= rounding * max(1.0, float(probe.abs().max())):
            raise EvaluationError(
                "KFAC needs a loss that is a sum over examples, the first dimension of the outputs; got one whose "
                "Hessian couples them. Use GaussNewton."
            )
    return rounding
