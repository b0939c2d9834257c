"""An objective of a user's own with computed arrays: of a reference, and a mean of the batch."""

from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from pydantic import Field

import jaxspeed
from jaxspeed.objectives import ComputedArrays, FrozenModelSection, Mean, model_logprobs


class Anchored(jaxspeed.Objective):
    """softplus(shift - (log p - log q)) by token: p of the model, q of the reference."""

    class Options(jaxspeed.Objective.Options):
        reference_model: FrozenModelSection | None = Field(None, description="A folder.")
        reference: Literal["each_step", "precompute", "trained"] = "each_step"

    arrays = {  # noqa: RUF012
        "tokens": "[batch, seq + 1]",
        "mask": "as tokens, optional",
        "reference_logprobs": "[batch, seq], computed",
        "shift": "[batch], computed: the mean of log p - log q in the global batch",
    }
    in_fp32 = ("reference_logprobs", "shift")

    def computed(self) -> Sequence[ComputedArrays]:
        reference = self.options.reference
        return (
            ComputedArrays(
                "reference",
                ("reference_logprobs",),
                reference_logprobs,
                "trained" if reference == "trained" else "reference",
                once=reference == "precompute",
                by_sample=True,
            ),
            ComputedArrays("shift", ("shift",), shift),
        )

    def loss(self, model: Any, batch: Any) -> Any:
        scored = model_logprobs(model, batch)
        ratios = scored.of_tokens.logprobs - batch["reference_logprobs"]
        terms = jax.nn.softplus(batch["shift"][:, None] - ratios)
        counted = scored.counted
        metrics = {"reference": Mean(batch["reference_logprobs"].sum(), counted.sum())}
        return (terms * counted).sum(), counted.sum(), metrics

    def without_weight(self, batch: Any, padding: np.ndarray) -> Any:
        mask = batch.get("mask", np.ones_like(batch["tokens"]))
        return {**batch, "mask": np.where(padding[:, None], 0, mask)}


def reference_logprobs(model: Any, batch: Any) -> dict[str, jax.Array]:
    return {"reference_logprobs": model_logprobs(model, batch, train=False).of_tokens.logprobs}


def shift(model: Any, batch: Any) -> dict[str, jax.Array]:
    scored = model_logprobs(model, batch, train=False)
    ratios = jnp.where(scored.counted, scored.of_tokens.logprobs - batch["reference_logprobs"], 0)
    mean = ratios.sum() / scored.counted.sum()
    return {"shift": jnp.full(len(batch["tokens"]), mean)}


class Renamed(Anchored):
    """The same, by another name."""
