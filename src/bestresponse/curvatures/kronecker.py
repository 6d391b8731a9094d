"""The two Kronecker factors of one layer: linear, convolutional, or an embedding."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._tree import Tree

# The largest side of a factor, of which the eigenvalues are taken.
LARGEST = 4_096
_FORWARDS = {kind.forward for kind in (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding)}


def supported(module: nn.Module) -> bool:
    """Whether a layer has factors: one of torch's own, with an unchanged forward pass, not too large and not empty."""
    weight = module._parameters.get("weight")
    if (
        type(module).forward not in _FORWARDS
        or "forward" in vars(module)
        or weight is None
        or not weight.numel()
    ):
        return False
    if isinstance(module, nn.Embedding):
        changed = module.sparse or module.scale_grad_by_freq or module.max_norm is not None
        return not changed and weight.shape[1] <= LARGEST
    groups: int = getattr(module, "groups", 1)
    return max(weight[0].numel() + 1, weight.shape[0] // groups) <= LARGEST


class Layer:
    """The block A ⊗ G of one layer, its weight as matrices [groups, out, in], with the bias as a last column.

    A is [groups, in, in]; for an embedding, whose inputs are unit vectors, the diagonal [in]. G is [groups, out, out].
    """

    def __init__(
        self, module: Any, names: Mapping[int, str], uses: Counter[int], inputs: Sequence[Tensor]
    ) -> None:
        self._module = module
        self._embeds = isinstance(module, nn.Embedding)
        self._groups = getattr(module, "groups", 1)
        self.weight = names[id(module.weight)]
        bias = getattr(module, "bias", None)
        own = bias is not None and id(bias) in names and uses[id(bias)] <= uses[id(module.weight)]
        self.bias = names[id(bias)] if own else None
        self.names = [self.weight] if self.bias is None else [self.weight, self.bias]
        self._set_inputs(inputs)
        self.g = module.weight.detach().new_zeros(self._groups, self._out, self._out)

    @torch.no_grad()
    def _set_inputs(self, inputs: Sequence[Tensor]) -> None:
        """A = (1/R) Σ a aᵀ over the inputs of all calls."""
        if self._embeds:
            padding = self._module.padding_idx
            self._counted = [x.reshape(-1) != (-1 if padding is None else padding) for x in inputs]
            indices = torch.cat([x.reshape(-1)[kept] for x, kept in zip(inputs, self._counted, strict=True)])
            counts = torch.bincount(indices, minlength=self._module.num_embeddings)
            self.a = counts.to(self._module.weight.dtype) / max(1, len(indices))
            return
        rows = torch.cat([self._rows(x.to(self._module.weight.dtype)) for x in inputs])
        if self.bias is not None:
            rows = torch.cat([rows, rows.new_ones(*rows.shape[:2], 1)], dim=2)
        rows = rows.transpose(0, 1)
        self.a = rows.mT @ rows / max(1, rows.shape[1])

    @torch.no_grad()
    def add_slopes(self, slopes: Sequence[Tensor | None]) -> None:
        """Add Σ g gᵀ over the rows of all calls to G."""
        for index, slope in enumerate(slopes):
            if slope is None:
                continue
            g = slope.to(self._module.weight.dtype)
            if isinstance(self._module, nn.Linear | nn.Embedding):
                g = g.reshape(1, -1, g.shape[-1])
                g = g[:, self._counted[index]] if self._embeds else g
            else:
                places = g.shape[-(self._module.weight.ndim - 2) :].numel()
                g = g.reshape(-1, self._groups * self._out, places).mT
                g = g.reshape(-1, self._groups, self._out).transpose(0, 1)
            self.g = self.g + g.mT @ g

    @property
    def _out(self) -> int:
        channels: int = self._module.weight.shape[1 if self._embeds else 0]
        return channels // self._groups

    def _rows(self, x: Tensor) -> Tensor:
        """The inputs as rows [R, groups, in]: for a convolution, its patches, by a convolution with unit kernels."""
        if isinstance(self._module, nn.Linear):
            return x.reshape(-1, 1, x.shape[-1])
        conv = self._module
        dimensions = conv.weight.ndim - 2
        padding = conv.padding
        if conv.padding_mode != "zeros":
            x, padding = F.pad(x, conv._reversed_padding_repeated_twice, mode=conv.padding_mode), 0
        x = x.reshape(-1, conv.weight.shape[1], *x.shape[-dimensions:])
        size = conv.weight[0].numel()
        unit = torch.eye(size, dtype=x.dtype, device=x.device).view(size, *conv.weight.shape[1:])
        function = (F.conv1d, F.conv2d, F.conv3d)[dimensions - 1]
        patches = function(x, unit, None, conv.stride, padding, conv.dilation)
        return (
            patches.reshape(-1, self._groups, size, patches.shape[2:].numel())
            .permute(0, 3, 1, 2)
            .flatten(0, 1)
        )

    def scale_(self, weight: float) -> None:
        """Weight both factors, as the first term of a mean."""
        self.a, self.g = self.a * weight, self.g * weight

    def add_(self, other: "Layer") -> None:
        """Add the factors of another batch."""
        self.a, self.g = self.a + other.a, self.g + other.g

    def product(self, v: Tree) -> Tree:
        """G V A."""
        return self._tree(self.g @ self._times_inputs(self._matrix(v)), v)

    def _times_inputs(self, matrix: Tensor) -> Tensor:
        return matrix * self.a if self._embeds else matrix @ self.a

    def _matrix(self, v: Tree) -> Tensor:
        weight = v[self.weight]
        if self._embeds:
            return weight.T.unsqueeze(0)
        matrix = weight.reshape(self._groups, self._out, -1)
        if self.bias is None:
            return matrix
        return torch.cat([matrix, v[self.bias].reshape(self._groups, self._out, 1)], dim=2)

    def _tree(self, matrix: Tensor, like: Tree) -> Tree:
        if self._embeds:
            return {self.weight: matrix[0].T.contiguous()}
        if self.bias is None:
            return {self.weight: matrix.reshape(like[self.weight].shape)}
        return {
            self.weight: matrix[..., :-1].reshape(like[self.weight].shape),
            self.bias: matrix[..., -1].reshape(like[self.bias].shape),
        }

    def spectrum(self, rest: Tree) -> tuple[float, Callable[[Tree, float], Tree]]:
        """The largest eigenvalue of A ⊗ G, and the map (r, δ) ↦ (A ⊗ G + mean(rest) + δ)⁻¹ r."""
        of_g, left = torch.linalg.eigh(self.g)
        of_a, right = (self.a, None) if self._embeds else torch.linalg.eigh(self.a)
        values = of_g.clamp_min(0.0).unsqueeze(2) * of_a.clamp_min(0.0).unsqueeze(-2)
        parts = [rest[n] for n in self.names if n in rest]
        mean = sum(float(x.sum()) for x in parts) / max(1, values.numel())

        def apply(r: Tree, damping: float) -> Tree:
            turned = left.mT @ self._matrix(r)
            turned = turned if right is None else turned @ right
            turned = turned / (values + (mean + damping))
            back = left @ turned
            return self._tree(back if right is None else back @ right.mT, r)

        return float(values.max()), apply
