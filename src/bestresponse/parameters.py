"""Which parameters of two modules are weights, and which are hyperparameters."""

import warnings

from torch import nn

from .errors import ArgumentError, BestResponseWarning


def split(model: nn.Module, hyper: nn.Module) -> tuple[dict[str, nn.Parameter], dict[str, nn.Parameter]]:
    """Weights and hyperparameters, distinguished by identity."""
    if not any(module is hyper for module in model.modules()):
        _refuse_shared(model, hyper)
    hyperparameters = {n: p for n, p in hyper.named_parameters() if p.requires_grad}
    if not hyperparameters:
        raise ArgumentError(
            f"hyper must have a trainable parameter; {type(hyper).__name__} has none. "
            "Set requires_grad, or register the hyperparameters as nn.Parameter."
        )
    tuned = {id(p) for p in hyper.parameters()}
    unmade = [n for n, p in model.named_parameters() if isinstance(p, nn.parameter.UninitializedParameter)]
    if unmade:
        raise ArgumentError(
            f"the model's parameters must have their shapes; {unmade[:5]} are lazy and wait for a first batch. "
            "Run the model once before you make the Problem."
        )
    weights = {n: p for n, p in model.named_parameters() if p.requires_grad and id(p) not in tuned}
    if not weights:
        raise ArgumentError(
            f"model must have a trainable parameter that is not a hyperparameter; {type(model).__name__} has "
            "none. Set requires_grad on its weights, or pass only the part to tune as hyper."
        )
    _warn_of_trained_rates(model, {id(w) for w in weights.values()})
    both = [*weights.items(), *hyperparameters.items()]
    complex_ = [n for n, p in both if p.is_complex()]
    if complex_:
        raise ArgumentError(
            f"weights and hyperparameters must be real; got complex {complex_[:5]}. "
            "Store real and imaginary parts as real parameters (torch.view_as_real)."
        )
    if meta := [n for n, p in both if p.is_meta]:
        raise ArgumentError(
            f"weights and hyperparameters must have values; got {meta[:5]} on the meta device, which has none. Make "
            "the Problem after Module.to_empty(device=...) and the initialisation."
        )
    return weights, hyperparameters


def _warn_of_trained_rates(model: nn.Module, weights: set[int]) -> None:
    """Warn of the library's modules in the model whose parameters would be trained as weights."""
    ours = f"{__package__}.hyperparameters"
    trained = [
        name
        for name, module in model.named_modules()
        if type(module).__module__.startswith(ours)
        and any(id(p) in weights for p in module.parameters(recurse=False))
    ]
    if trained:
        warnings.warn(
            f"the model's {trained[:5]} have hyperparameters that are not in hyper, and will be trained as weights, on "
            "the training loss. Put all tuned modules into one submodule of the model, and pass that submodule as "
            "hyper; or freeze them with requires_grad_(False).",
            BestResponseWarning,
            stacklevel=4,
        )


def _refuse_shared(model: nn.Module, hyper: nn.Module) -> None:
    """Raise if hyper, which is not a submodule of model, holds a part of it."""
    modules = {id(m): n or type(m).__name__ for n, m in model.named_modules()}
    parameters = {id(p): n for n, p in model.named_parameters(remove_duplicate=False)}
    shared = [modules[id(m)] for m in hyper.modules() if id(m) in modules]
    shared += [parameters[id(p)] for p in hyper.parameters() if id(p) in parameters]
    if shared:
        raise ArgumentError(
            f"hyper must be a submodule of model or share nothing with it; {type(hyper).__name__} holds "
            f"{list(dict.fromkeys(shared))[:5]} of the model, which would turn weights into hyperparameters. "
            "Keep names, not the module, in hyper, and take the model as an argument of the loss. Put modules with "
            "hyperparameters that run inside the model into one submodule of it, and pass that as hyper: "
            "model.tuned = nn.ModuleDict({...}), Problem(model, model.tuned, ...)."
        )
