"""Mixed precision: dtypes of the placement table's roles, from the config."""

import re
from typing import Any

import jax.numpy as jnp

from jaxspeed.config import Config
from jaxspeed.placement.rows import Precision

DTYPES = {"fp32": jnp.float32, "fp16": jnp.float16, "bf16": jnp.bfloat16}


def compute_dtype(config: Config) -> Any:
    """Dtype to which floating parameters and inputs are cast; None: no cast."""
    no_cast = config.compute_dtype == "fp32" or config.autocasts
    return None if no_cast else DTYPES[config.compute_dtype]


def dtype_named(name: str | None) -> Any:
    """The dtype of a config's name; None: of none."""
    return DTYPES[name] if name else None


def keeps_fp32(name: str, path: str) -> bool:
    """Whether a name of `data_types.keep_in_fp32_modules` covers a parameter or variable.

    As transformers matches them: `*` is any text, and the name may stand anywhere. The path is
    dotted, as in torch, where Flax's kernel, scale and embedding are weight.
    """
    dotted = path.replace("/", ".")
    as_in_torch = re.sub(r"\.(kernel|scale|embedding)$", ".weight", dotted)
    pattern = ".*".join(map(re.escape, name.replace("/", ".").split("*")))
    return any(re.search(pattern, each) for each in (dotted, as_in_torch))


def precision_of(config: Config) -> Precision:
    """Dtype of each role.

    Gradients accumulate in fp32 unless `data_types.grad_accum_dtype` sets another dtype: the sum of
    many micro-batches does not fit 8 bits of mantissa.
    """
    compute = compute_dtype(config)
    no_masters = (config.bf16.enabled and config.bf16.bf16_master_weights_and_grads) or (
        config.fp16.enabled and config.fp16.fp16_master_weights_and_grads
    )
    wanted = config.data_types.grad_accum_dtype
    grad = dtype_named(wanted) or (compute if no_masters else None)
    opt = jnp.bfloat16 if config.bf16.enabled and config.bf16.bf16_optimizer_states else None
    return Precision(compute, grad, no_masters, opt)
