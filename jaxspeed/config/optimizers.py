"""Parameters of optimizers, with DeepSpeed's names and defaults.

Where DeepSpeed's documentation and code disagree, the code is followed: the defaults of its Adam,
Lamb and Lion, torch's SGD and Adagrad, and Muon with Adam for parameters that are no matrices.
"""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from jaxspeed.config.types import (
    Beta,
    Betas,
    Flag,
    NonNegative,
    Opaque,
    Pattern,
    Positive,
    Section,
    Text,
    lower,
)


class TorchOnly(Section):
    """Options of torch's kernels, and variants that no optimizer here has."""

    fused: Flag | None = None
    foreach: Flag | None = None
    capturable: Flag = False
    differentiable: Flag = False
    torch_adam: Flag = False
    set_grad_none: Flag = True
    fp32_optimizer_states: Flag = True
    amsgrad: Flag = False
    maximize: Flag = False
    max_grad_norm: NonNegative = 0.0


class AdamParams(TorchOnly):
    """Adam and AdamW: decoupled decay unless `adam_w_mode` is false."""

    lr: NonNegative = 1e-3
    betas: Betas = (0.9, 0.999)
    eps: NonNegative = 1e-8
    weight_decay: NonNegative = 0.0
    bias_correction: Flag = True
    adam_w_mode: Flag = True


class SgdParams(TorchOnly):
    """Stochastic gradient descent as torch defines it."""

    lr: NonNegative = 1e-3
    momentum: Beta = 0.0
    dampening: NonNegative = 0.0
    weight_decay: NonNegative = 0.0
    nesterov: Flag = False


class AdagradParams(TorchOnly):
    """Adagrad as torch defines it."""

    lr: NonNegative = 1e-2
    lr_decay: NonNegative = 0.0
    weight_decay: NonNegative = 0.0
    initial_accumulator_value: NonNegative = 0.0
    eps: NonNegative = 1e-10


class LambParams(TorchOnly):
    """LAMB, its trust ratio clipped between `min_coeff` and `max_coeff`."""

    lr: NonNegative = 1e-3
    betas: Betas = (0.9, 0.999)
    eps: NonNegative = 1e-8
    eps_inside_sqrt: Flag = False
    weight_decay: NonNegative = 0.0
    bias_correction: Flag = True
    max_coeff: Positive = 10.0
    min_coeff: NonNegative = 0.01


class LionParams(TorchOnly):
    """Lion: the sign of an interpolated momentum."""

    lr: NonNegative = 1e-3
    betas: Betas = (0.9, 0.999)
    weight_decay: NonNegative = 0.0


class MuonParams(TorchOnly):
    """Muon for matrices (`muon_lr`), AdamW for the rest (`adam_lr`); both fall back on `lr`."""

    lr: NonNegative | None = None
    muon_lr: NonNegative | None = None
    adam_lr: NonNegative | None = None
    momentum: Beta = 0.95
    weight_decay: NonNegative = 0.0
    ns_method: Annotated[Literal["gram", "standard"], BeforeValidator(lower)] = "gram"
    betas: Betas = (0.9, 0.95)
    eps: NonNegative = 1e-10


OPTIMIZERS: dict[str, type[Section]] = {
    "Adam": AdamParams,
    "AdamW": AdamParams,
    "SGD": SgdParams,
    "Adagrad": AdagradParams,
    "Lamb": LambParams,
    "Lion": LionParams,
    "Muon": MuonParams,
}

# DeepSpeed's optimizers that are not built, with the nearest one that is.
UNBUILT_OPTIMIZERS = {
    "OneBitAdam": "AdamW",
    "ZeroOneAdam": "AdamW",
    "OneBitLamb": "Lamb",
    "MuAdam": "Adam",
    "MuAdamW": "AdamW",
    "MuSGD": "SGD",
}


class Group(Section):
    """Parameter group, selected by a path pattern; the first match applies."""

    pattern: Pattern
    lr_factor: NonNegative = 1.0
    weight_decay: NonNegative | None = None
    frozen: Flag = False


class OptimizerSection(Section):
    """Optimizer: DeepSpeed's `type` and `params`, and jaxspeed's additional keys."""

    type: Text
    params: Opaque = Field(default_factory=dict)
    groups: list[Group] = Field(default_factory=list)
    exclude_norms_and_biases: Flag = False
    ema_decay: Annotated[Beta, Field(gt=0)] | None = None
    legacy_fusion: Flag = False
