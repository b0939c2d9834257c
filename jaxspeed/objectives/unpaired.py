"""KTO: completions that are desirable or not, against a reference and an estimate of the KL."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxspeed.config.objective_options import KtoOptions
from jaxspeed.objectives.completions import completions, summed, token_metrics
from jaxspeed.objectives.computed_arrays import ComputedArrays
from jaxspeed.objectives.pair_losses import kto
from jaxspeed.objectives.preference import REFERENCE, AgainstReference
from jaxspeed.objectives.terms_and_metrics import Mean, Metric

MISMATCHED = "mismatched_ratios"


class Kto(AgainstReference):
    """Kahneman-Tversky optimization: log-ratios of single completions against the mean of all."""

    Options: Any = KtoOptions
    arrays: ClassVar = {
        **AgainstReference.arrays,
        "segment_ids": "as tokens: 2 p + 1 is the labelled completion of record p, 2 p + 2 the "
        "mismatched one, each after the prompt; 0 is padding",
        "desirable": "as tokens: 1 or -1 at the first token of a record; 0 elsewhere",
        MISMATCHED: "[batch, 2] fp32: sum of the log-ratios of mismatched ones, and their number; "
        "computed if it is absent",
        "kl": "[batch] fp32: the step's estimate of the KL; computed if it is absent",
    }
    in_fp32 = (REFERENCE, MISMATCHED, "kl")
    records = "unpaired"

    def computed(self) -> Sequence[ComputedArrays]:
        kl = (
            ComputedArrays("mismatched", (MISMATCHED,), self.mismatched, by_sample=True),
            ComputedArrays("kl", ("kl",), kl_of_batch),
        )
        return [*super().computed(), *(kl if self.options.loss_type == "kto" else ())]

    def mismatched(self, model: Any, batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Sum of log pi(y' | x) - log ref(y' | x) and number of the mismatched y' of each row."""
        c = completions(model, batch, self.options.pairs_per_row, False, statistics=False)
        ratios, records = c.log_ratios(batch[REFERENCE])[..., 1], c.tokens[..., 1] > 0
        return {MISMATCHED: jnp.stack([ratios.sum(-1), records.sum(-1)], axis=-1)}

    def loss(self, model: Any, batch: Mapping[str, jax.Array], train: bool | None = None) -> Any:
        o = self.options
        c = completions(model, batch, o.pairs_per_row, train)
        sign = c.firsts(batch["desirable"])  # [batch, records]
        counts = (c.tokens[..., 0] > 0) & (sign != 0)
        ratio = c.log_ratios(batch[REFERENCE])[..., 0]
        with_kl = o.loss_type == "kto"
        kl = batch["kl"][:, None] if with_kl else jnp.zeros((len(sign), 1))
        weight = jnp.where(sign > 0, o.desirable_weight, o.undesirable_weight)

        def mean(values: jax.Array, which: jax.Array = counts) -> Metric:
            return Mean(jnp.where(which, values, 0), which.astype(jnp.float32))

        loss = mean(weight * kto(ratio, sign, kl, o.beta))
        sides = {"chosen": counts & (sign > 0), "rejected": counts & (sign < 0)}
        metrics = {
            f"{name}/{side}": mean(values, which)
            for name, values in (("rewards", o.beta * ratio), ("logps", c.logps[..., 0]))
            for side, which in sides.items()
        }
        metrics["rewards/margins"] = metrics["rewards/chosen"] - metrics["rewards/rejected"]
        if with_kl:
            metrics["kl"] = mean(jnp.broadcast_to(kl, ratio.shape))
        labelled = jnp.arange(2) == 0  # and not the mismatched completion
        of_tokens = token_metrics(c, *(which[..., None] & labelled for which in sides.values()))
        del of_tokens["mean_token_accuracy"]  # half of the completions are not to be imitated
        return summed({"kto": (loss.value, loss.weight)}, metrics | of_tokens, c.scored)


def kl_of_batch(model: Any, batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """The mean log-ratio of the mismatched completions of the global batch, at least 0."""
    total, records = jnp.sum(batch[MISMATCHED], axis=0)
    mean = total / jnp.maximum(records, 1)
    return {"kl": jnp.full(len(batch["tokens"]), jnp.maximum(mean, 0))}
