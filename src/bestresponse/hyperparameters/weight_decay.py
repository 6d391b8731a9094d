"""Weight decay as a term of the training loss, with one rate for all weights, or for each group, or for each weight."""

import math
from collections.abc import Callable, Mapping, Sequence, Set
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from ..errors import ArgumentError, ArgumentTypeError, EvaluationError, require_number
from .power_penalty import decays_of, diagonal, penalty, slope
from .sharing import Sharing, places, require_coarser, require_sharing, shape_of
from .shrinkage import Shrinkage, as_shrinkage


class WeightDecay(nn.Module):
    """Ω(w, λ) = (1/p) Σ_i exp(λ_i) |w_i|ᵖ, to add to a training loss: ``loss + decay(model)``.

    With p = 2, exp(λ_i) is what torch's optimisers call ``weight_decay``: it adds exp(λ_i) w_i to the
    gradient. The rates are stored as logarithms under the names of the weights: ``log_decay.NAME`` broadcasts against
    the weight; per="global" has one scalar ``log_decay``. With ``around``, these are differences from ``log_centre``,
    which is stored likewise.

    With p = 1 it is the lasso's penalty. A weight stays at zero if the rest of the training gradient is no larger
    than its rate: then it does not respond, and implicit hypergradients leave it out. `Tuner` lets weights stop at
    zero. In your own loop use `orthant_wise`; without it weights step over zero and never stay there. The
    look-ahead steps of `Unrolled`, `Forward` and `Penalty` are plain steps, which step over zero.

    The module stores names and shapes but not the model: pass the model to each call.

    Args:
        model: the model whose trainable parameters are decayed.
        per: which weights share a rate: all ("global"), those of one tensor ("tensor"), of one unit (the same first
            index, "unit"), of one input (the same second index, "input"), or none ("weight"). Of a vector each entry
            is a unit, and its inputs are one. Or a function of a weight's name: the weights for which it returns the
            same name share a rate, ``log_decay.THAT_NAME``. None means "weight", or "global" with p = 1, since the
            lasso has one rate.
        around: which weights share a centre, if any: a value of ``per`` that is coarser. Then λ = centre + difference,
            the differences begin at zero, and shrinkage pulls them to zero. Use it to shrink many rates: the centre
            follows its own hypergradient, the sum over its weights, as a single rate would. The mean of many rates
            does not, since Adam and RMSprop normalise the step of each.
        power: p ≥ 1; 2 is the usual decay, 1 the lasso. Between them |w| is smoothed at zero, over 1e-6.
        initial: the initial decay exp(λ).
        minimum: the lower bound of exp(λ), which `project_` restores after a step.
        maximum: the upper bound.
        exclude: patterns of parameter names to leave out, as in ``["*.bias", "norm*"]``.
        shrinkage: the strength, or a `Shrinkage`, with which `shrink_` pulls the logarithms of the rates towards a
            common value after a step; its ``towards`` is a decay. Use it where many rates overfit the validation data.

    Raises:
        ArgumentError: an argument is out of its range, a pattern matches nothing, or no weight is left to decay.

    Reference: the paper's sections 5.1 and 5.2.
    """

    def __init__(
        self,
        model: nn.Module,
        per: Sharing | None = None,
        power: float = 2,
        initial: float = math.exp(-8),
        minimum: float = math.exp(-14),
        maximum: float = math.exp(3),
        exclude: Sequence[str] = (),
        shrinkage: float | Shrinkage | None = None,
        around: Sharing | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(model, nn.Module):
            raise ArgumentTypeError(f"WeightDecay.model must be a module; got {type(model).__name__}.")
        if per is None:
            per = "global" if power == 1 else "weight"
        require_sharing("WeightDecay.per", per)
        require_sharing("WeightDecay.around", "global" if around is None else around)
        numbers = {"power": power, "initial": initial, "minimum": minimum, "maximum": maximum}
        for label, number in numbers.items():
            require_number(f"WeightDecay.{label}", number)
        if not power >= 1:
            raise ArgumentError(f"WeightDecay.power must be ≥ 1; got {power!r}.")
        if not 0 < minimum <= initial <= maximum < math.inf:
            raise ArgumentError(
                "WeightDecay needs 0 < minimum ≤ initial ≤ maximum; got "
                f"minimum={minimum!r}, initial={initial!r}, maximum={maximum!r}."
            )
        self.per: Sharing = per
        self.around, self.power = around, power
        self.minimum, self.maximum = minimum, maximum
        self.shrinkage = as_shrinkage("WeightDecay.shrinkage", shrinkage, 0.0)
        weights = _included(model, [exclude] if isinstance(exclude, str) else exclude)
        self.names = list(weights)
        start = math.log(initial)
        # The name of the parameter that has the rate of each weight, and of the one with its centre.
        self._places = places("log_decay", per, self.names)
        self._centres = {} if around is None else places("log_centre", around, self.names)
        self._register(self._places, per, weights, start if around is None else 0.0)
        if around is not None:
            self._register(self._centres, around, weights, start)
            require_coarser(self._pairs_of_places(), dict(self.named_parameters()))

    def forward(self, model: nn.Module) -> Tensor:
        """Ω as a scalar.

        Raises:
            EvaluationError: the model lacks a weight, or it has another shape or device.
        """
        return torch.stack([penalty(w, rate, self.power) for w, rate in self._pairs(model).values()]).sum()

    @torch.no_grad()
    def curvature_diagonal(self, model: nn.Module) -> dict[str, Tensor]:
        """∂²Ω/∂w_i² = (p − 1) exp(λ_i) |w_i|^(p−2), by weight; exact, since Ω has no mixed derivatives."""
        pairs = self._pairs(model)
        return {name: diagonal(w, rate, self.power) for name, (w, rate) in pairs.items()}

    @torch.no_grad()
    def rates_at_zero(self, model: nn.Module) -> dict[str, Tensor]:
        """exp(λ_i), by weight, if p = 1: the slope of Ω next to w_i = 0. Empty for other powers, which have no kink."""
        if self.power != 1:
            return {}
        return {name: rate.exp() for name, (_, rate) in self._pairs(model).items()}

    @torch.no_grad()
    def mixed_product(self, model: nn.Module, v: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The product v · ∂²Ω/∂w∂λ, by rate: exp(λ_i) |w_i|^(p−1) sign(w_i) v_i, summed over weights that share a rate.

        ``v`` has tensors by weight; absent weights count as zero.
        """
        total: dict[str, Tensor] = {}
        parameters = dict(self.named_parameters(remove_duplicate=False))
        for name, (w, rate) in self._pairs(model).items():
            if name in v:
                decays, steep = decays_of(rate, w), slope(w, self.power)
                part = decays.mul_(steep) if decays.shape == w.shape else decays * steep.to(decays.dtype)
                part = part.mul_(v[name])
                for at in self._all_places(name):
                    mine = part.sum_to_size(parameters[at].shape).to(parameters[at].dtype)
                    total[at] = total[at] + mine if at in total else mine
        return total

    def shrink_(self, factor: float = 1.0) -> None:
        """Pull the rates towards a common value; call it after each step of them, before `project_` (`Tuner` does)."""
        if self.shrinkage is None:
            return
        decay, rates = self.shrinkage.towards, dict(self.named_parameters())
        towards = None if decay is None else math.log(decay)
        if self._centres:
            self.shrinkage.apply_({n: rates.pop(n) for n in set(self._places.values())}, factor, 0.0)
        if not self._centres or towards is not None:
            self.shrinkage.apply_(rates, factor, towards)

    @torch.no_grad()
    def project_(self) -> None:
        """Restore the bounds of the rates; call it after each step of the rates (`Tuner` does)."""
        low, high = math.log(self.minimum), math.log(self.maximum)
        parameters = dict(self.named_parameters())
        for name in set(self._centres.values()) or parameters:
            parameters[name].clamp_(low, high)
        for place, centre in self._pairs_of_places():
            parameters[place].clamp_(low - parameters[centre], high - parameters[centre])

    def ranges(self) -> dict[str, tuple[float, float]]:
        """The range to search for each parameter: the logarithms of the bounds, or their differences from a centre."""
        low, high = math.log(self.minimum), math.log(self.maximum)
        differences = set(self._places.values()) if self._centres else set()
        apart = (low - high, high - low)
        return {n: apart if n in differences else (low, high) for n, _ in self.named_parameters()}

    @torch.no_grad()
    def values(self) -> dict[str, Tensor]:
        """The decays exp(λ) in plain numbers, by weight; under "all" if all weights share one."""
        if self.per == "global" and not self._centres:
            return {"all": self._rates()[self.names[0]].exp()}
        return {name: rate.exp() for name, rate in self._rates().items()}

    def readable(self, name: str) -> tuple[str, Callable[[Tensor], Tensor]] | None:
        """The decays exp(λ) in the history; differences from a centre stay as they are."""
        if self._centres and name in self._places.values():
            return None
        return name.removeprefix("log_"), torch.exp

    def extra_repr(self) -> str:
        return (
            f"per={self.per!r}, power={self.power}, minimum={self.minimum:.3g}, maximum={self.maximum:.3g}, "
            f"{len(self.names)} tensors"
        )

    def _rates(self) -> dict[str, Tensor]:
        """The logarithmic rate of each decayed weight."""
        known = dict(self.named_parameters(remove_duplicate=False))  # rates may be tied
        rates: dict[str, Tensor] = {name: known[place] for name, place in self._places.items()}
        return {n: rate + known[self._centres[n]] for n, rate in rates.items()} if self._centres else rates

    def _all_places(self, name: str) -> list[str]:
        """The parameters whose sum is the rate of a weight."""
        return [table[name] for table in (self._places, self._centres) if table]

    def _pairs_of_places(self) -> set[tuple[str, str]]:
        """Each parameter of differences with its centre."""
        return {(self._places[name], centre) for name, centre in self._centres.items()}

    def _register(
        self, table: Mapping[str, str], sharing: Sharing, weights: Mapping[str, Tensor], start: float
    ) -> None:
        """Register the parameters of these names, in the order of the weights."""
        seen = set()
        for name, place in table.items():
            if place not in seen:
                seen.add(place)
                _register(self, place, _full(shape_of(sharing, weights[name]), start, weights[name]))

    def _pairs(self, model: nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
        """Each decayed weight with its logarithmic rate."""
        weights = dict(model.named_parameters())
        pairs: dict[str, tuple[Tensor, Tensor]] = {}
        for name, rate in self._rates().items():
            w = weights.get(name)
            if w is None:
                raise EvaluationError(
                    f"WeightDecay needs the weight {name!r} that it was made for; the model has "
                    f"{list(weights)[:5]}. Call it with the model that it was made for, without a wrapper."
                )
            if shape_of(self.per, w) != rate.shape:
                raise EvaluationError(
                    f"WeightDecay has rates of shape {list(rate.shape)} for {name!r}; the model's weight has shape "
                    f"{list(w.shape)}. Make a new WeightDecay(model)."
                )
            if w.device != rate.device:
                raise EvaluationError(
                    f"WeightDecay must be on the model's device, {w.device}; its rates for {name!r} are on "
                    f"{rate.device}. Call decay.to({str(w.device)!r}) before you make the optimiser."
                )
            pairs[name] = (w, rate)
        return pairs


def _included(model: nn.Module, exclude: Sequence[str]) -> dict[str, nn.Parameter]:
    weights = {n: w for n, w in model.named_parameters() if w.requires_grad}
    if not isinstance(exclude, Sequence | Set) or not all(isinstance(pattern, str) for pattern in exclude):
        raise ArgumentTypeError(
            f'WeightDecay.exclude must be a list of patterns of names, as in ["*.bias"]; got {exclude!r}.'
        )
    for pattern in exclude:
        if not any(fnmatchcase(name, pattern) for name in weights):
            raise ArgumentError(
                f"WeightDecay.exclude must match a weight's name; {pattern!r} matches none of {list(weights)[:8]}."
            )
    kept = {n: w for n, w in weights.items() if not any(fnmatchcase(n, p) for p in exclude)}
    if not kept:
        raise ArgumentError(
            f"WeightDecay needs a weight to decay; {type(model).__name__} has {len(weights)} trainable "
            f"tensors, and exclude={list(exclude)} leaves none."
        )
    return kept


def _full(shape: Sequence[int], value: float, like: Tensor) -> nn.Parameter:
    # In half precision the spacing of the logarithms would swallow a step of an optimiser.
    dtype = torch.promote_types(like.dtype, torch.float32)
    return nn.Parameter(torch.full(tuple(shape), value, dtype=dtype, device=like.device))


def _register(root: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Register a parameter under a dotted name, with plain modules for the parts before the dots."""
    *path, leaf = name.split(".")
    for part in path:
        if part not in root._modules:
            root.add_module(part, nn.Module())
        root = root.get_submodule(part)
    root.register_parameter(leaf, parameter)
