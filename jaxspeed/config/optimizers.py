"""Parameters of optimizers, with DeepSpeed's names and defaults.

Where DeepSpeed's documentation and code disagree, the code is followed: the defaults of its Adam,
Lamb and Lion, torch's SGD and Adagrad, and Muon with Adam for parameters that are no matrices.
NorMuon and SOAP, which it has not, have the keys and defaults of their references.
"""

import re
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from jaxspeed.config.types import (
    Beta,
    Betas,
    Count,
    Flag,
    Natural,
    NonNegative,
    Number,
    Positive,
    Section,
    lower,
)
from jaxspeed.config.verdicts import approximated, harmless, honoured, refused

_TORCH_KERNELS = "A switch of torch's kernels; XLA fuses the update."
_RATE = "The learning rate."
_BETAS = "Decay rates of the moments."
_EPS = "Added to the denominator."
_DECAY = "Weight decay."
_BIAS = "Corrects the bias of moments that start at zero."
_MOMENTUM = "The momentum's decay rate."


class TorchOnly(Section):
    """Options of torch's kernels, and variants that no optimizer here has."""

    fused: Flag | None = harmless(None, _TORCH_KERNELS)
    foreach: Flag | None = harmless(None, _TORCH_KERNELS)
    capturable: Flag = harmless(False, _TORCH_KERNELS)
    differentiable: Flag = harmless(False, _TORCH_KERNELS)
    torch_adam: Flag = approximated(
        False,
        "Optax computes the update. The weight decay is 0.01 by default, as in torch's AdamW.",
        False,
    )
    set_grad_none: Flag = harmless(True, _TORCH_KERNELS)
    fp32_optimizer_states: Flag = harmless(True, _TORCH_KERNELS)
    amsgrad: Flag = refused(False, "DeepSpeed's fused optimizers have no AMSGrad.")
    maximize: Flag = refused(False, "Return the negative loss from loss_fn.")
    max_grad_norm: NonNegative = refused(
        0.0, "Write gradient_clipping at the top level; DeepSpeed refuses this, too."
    )


class AdamParams(TorchOnly):
    """Adam and AdamW: decoupled decay unless `adam_w_mode` is false."""

    lr: NonNegative = honoured(1e-3, _RATE)
    betas: Betas = honoured((0.9, 0.999), _BETAS)
    eps: NonNegative = honoured(1e-8, _EPS)
    weight_decay: NonNegative = honoured(0.0, _DECAY)
    bias_correction: Flag = honoured(True, _BIAS)
    adam_w_mode: Flag = honoured(
        True, "False couples the decay to the gradient, as plain Adam does."
    )


class SgdParams(TorchOnly):
    """Stochastic gradient descent as torch defines it."""

    lr: NonNegative = honoured(1e-3, _RATE)
    momentum: Beta = honoured(0.0, _MOMENTUM)
    dampening: NonNegative = honoured(
        0.0, "The share of the gradient that the momentum leaves out."
    )
    weight_decay: NonNegative = honoured(0.0, _DECAY)
    nesterov: Flag = honoured(False, "Nesterov's momentum.")


class AdagradParams(TorchOnly):
    """Adagrad as torch defines it."""

    lr: NonNegative = honoured(1e-2, _RATE)
    lr_decay: NonNegative = honoured(0.0, "The rate falls with 1 / (1 + (step - 1) lr_decay).")
    weight_decay: NonNegative = honoured(0.0, _DECAY)
    initial_accumulator_value: NonNegative = honoured(
        0.0, "Initial value of Adagrad's sum of squares."
    )
    eps: NonNegative = honoured(1e-10, _EPS)


class LambParams(TorchOnly):
    """LAMB, its trust ratio clipped between `min_coeff` and `max_coeff`."""

    lr: NonNegative = honoured(1e-3, _RATE)
    betas: Betas = honoured((0.9, 0.999), _BETAS)
    eps: NonNegative = honoured(1e-8, _EPS)
    eps_inside_sqrt: Flag = honoured(False, "Adds eps under the square root.")
    weight_decay: NonNegative = honoured(0.0, _DECAY)
    bias_correction: Flag = honoured(True, _BIAS)
    max_coeff: Positive = honoured(10.0, "The largest trust ratio.")
    min_coeff: NonNegative = honoured(0.01, "The smallest trust ratio.")


class LionParams(TorchOnly):
    """Lion: the sign of an interpolated momentum."""

    lr: NonNegative = honoured(1e-3, _RATE)
    betas: Betas = honoured((0.9, 0.999), _BETAS)
    weight_decay: NonNegative = honoured(0.0, _DECAY)


class _TwoRates(TorchOnly):
    """Learning rates of matrices (`muon_lr`) and of the rest (`adam_lr`), by default `lr`."""

    lr: NonNegative | None = honoured(None, _RATE)
    muon_lr: NonNegative | None = honoured(None, "Learning rate of matrices; by default lr.")
    adam_lr: NonNegative | None = honoured(
        None, "Learning rate of other parameters; by default lr."
    )


class MuonParams(_TwoRates):
    """Muon for matrices, AdamW for the rest."""

    momentum: Beta = honoured(0.95, _MOMENTUM)
    weight_decay: NonNegative = honoured(0.0, _DECAY)
    ns_method: Annotated[Literal["gram", "standard"], BeforeValidator(lower)] = honoured(
        "gram", "The form of the Newton-Schulz iteration."
    )
    per_head_muon: Flag = honoured(
        False, "Each attention head's part of a weight of queries, keys or values is a matrix."
    )
    consistent_rms: Positive | None = honoured(
        None, "Scales a matrix's update by this times sqrt(max(in, out)); 0.2 is near AdamW's."
    )
    betas: Betas = honoured((0.9, 0.95), _BETAS)
    eps: NonNegative = honoured(1e-10, _EPS)


class NorMuonParams(_TwoRates):
    """NorMuon for matrices with the keys and defaults of microsoft/dion, AdamW for the rest."""

    mu: Beta = honoured(0.95, _MOMENTUM)
    muon_beta2: Beta = honoured(0.95, "Decay rate of the neurons' second moments.")
    betas: Betas = honoured((0.9, 0.95), _BETAS)
    weight_decay: NonNegative = honoured(0.01, _DECAY)
    epsilon: NonNegative = honoured(1e-8, _EPS)
    nesterov: Flag = honoured(False, "Nesterov's momentum.")
    adjust_lr: Literal["spectral_norm", "rms_norm"] | None = honoured(
        "spectral_norm", "Scales updates by sqrt(out / in), or by 0.2 sqrt(max(in, out))."
    )
    use_gram_newton_schulz: Flag = honoured(False, "The iteration on the Gram matrix.")


class SoapParams(TorchOnly):
    """SOAP for matrices with its authors' keys and defaults, AdamW for the rest."""

    lr: NonNegative = honoured(3e-3, _RATE)
    betas: Betas = honoured((0.95, 0.95), _BETAS)
    shampoo_beta: Annotated[Number, Field(lt=1)] = honoured(
        -1.0, "Decay rate of the preconditioners; that of the second moments if negative."
    )
    eps: Positive = honoured(1e-8, _EPS)
    weight_decay: NonNegative = honoured(0.01, _DECAY)
    precondition_frequency: Count = honoured(10, "Steps between two updates of the eigenbases.")
    max_precond_dim: Natural = honoured(10000, "The largest dim that has an eigenbasis.")


LEAST_SIZE = re.compile(r"min_\d+bit_size")  # the parameter of optimizers with encoded moments
_LEAST = honoured(
    4096,
    "Moments of parameters of fewer elements (per layer of a stack) stay in fp32; those of "
    "embeddings do as well.",
)
_PERCENTILE = refused(100, "Write gradient_clipping at the top level.")
_BLOCKWISE = refused(True, "8-bit moments are quantized in blocks of 256 values.")


class Adam8bitParams(AdamParams):
    """Adam with moments in 8 bits, as in bitsandbytes."""

    min_8bit_size: Count = _LEAST
    percentile_clipping: Natural = _PERCENTILE
    block_wise: Flag = _BLOCKWISE


class AdamW8bitParams(Adam8bitParams):
    """AdamW with moments in 8 bits and bitsandbytes' default weight decay."""

    weight_decay: NonNegative = honoured(0.01, _DECAY)


class Lion8bitParams(LionParams):
    """Lion with its momentum in 8 bits and bitsandbytes' defaults."""

    lr: NonNegative = honoured(1e-4, _RATE)
    betas: Betas = honoured((0.9, 0.99), _BETAS)
    min_8bit_size: Count = _LEAST
    percentile_clipping: Natural = _PERCENTILE
    block_wise: Flag = _BLOCKWISE


OPTIMIZERS: dict[str, type[Section]] = {
    "Adam": AdamParams,
    "AdamW": AdamParams,
    "SGD": SgdParams,
    "Adagrad": AdagradParams,
    "Lamb": LambParams,
    "Lion": LionParams,
    "Muon": MuonParams,
    "NorMuon": NorMuonParams,
    "SOAP": SoapParams,
    "AdamW8bit": AdamW8bitParams,
    "Adam8bit": Adam8bitParams,
    "Lion8bit": Lion8bitParams,
    "PagedAdamW8bit": AdamW8bitParams,
    "PagedAdam8bit": Adam8bitParams,
    "PagedLion8bit": Lion8bitParams,
}

# Rates of matrices and of other parameters where the config has none.
TWO_RATES = {"Muon": (0.02, 3e-4), "NorMuon": (0.01, 3e-4)}

OF_MATRICES = ("Muon", "NorMuon", "SOAP")  # those that need entire matrices

PAGED = "Paged"  # the start of a name: the state is offloaded to host memory

# Names in Hugging Face's Trainer and in axolotl.
TRAINER_OPTIMIZERS = {
    "adamw_8bit": "AdamW8bit",
    "adamw_bnb_8bit": "AdamW8bit",
    "lion_8bit": "Lion8bit",
    "paged_adamw_8bit": "PagedAdamW8bit",
    "paged_lion_8bit": "PagedLion8bit",
}

# DeepSpeed's optimizers that are not built, with the nearest one that is.
UNBUILT_OPTIMIZERS = {"MuAdam": "Adam", "MuAdamW": "AdamW", "MuSGD": "SGD"}

# Those that DeepSpeed 0.19.8 has no more, with the one of which they compressed the messages.
REMOVED_OPTIMIZERS = {"OneBitAdam": "Adam", "ZeroOneAdam": "Adam", "OneBitLamb": "Lamb"}
