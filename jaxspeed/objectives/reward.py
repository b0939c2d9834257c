"""The objective of reward models: the chosen completion of a pair is to have the higher score.

Bradley and Terry's model, with TRL's keys, formula and metrics of 1.16.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient

from jaxspeed.config.objective_options import RewardOptions
from jaxspeed.objectives.completions import of_texts, summed
from jaxspeed.objectives.model_logprobs import head_input
from jaxspeed.objectives.pairs import pair_rows
from jaxspeed.objectives.preference import OfPairs
from jaxspeed.objectives.terms_and_metrics import Max, Mean, Min
from jaxspeed.ops.next_tokens import IGNORED, split_batch


class Reward(OfPairs):
    """A scalar head's scores of pairs of completions: -log sigmoid(chosen - rejected - margin)."""

    Options: Any = RewardOptions
    arrays: ClassVar = {
        "tokens": "[batch, seq], or of one pair a row [batch, 2, seq]",
        "targets": "as tokens, optional: -100 where no completion is predicted",
        **OfPairs.arrays,
        "mask": "as tokens: 0 at the tokens of pairs that do not count",
        "margins": "as tokens fp32, optional: at the first token of a pair, by how much the chosen "
        "one's reward is to be higher; 0 elsewhere",
    }
    drops_long = True
    in_fp32 = ("margins",)
    num_labels = 1
    modules_to_save = ("score",)

    def loss(self, model: Any, batch: Mapping[str, jax.Array], train: bool | None = None) -> Any:
        if "targets" not in batch:  # the last token is an input too
            counted = batch.get("mask", jnp.ones_like(batch["tokens"])) != 0
            batch = {**batch, "targets": jnp.where(counted, batch["tokens"], IGNORED)}
        rows = pair_rows(batch, self.options.pairs_per_row)
        p = split_batch(rows.batch)
        before_head = head_input(model, p, train)
        # The last token that is not padding, as transformers pools it.
        is_text = of_texts({"mask": (p.targets != IGNORED).astype(jnp.int32), **rows.batch})
        if (padding := model.config.pad_token_id) is not None:
            is_text &= p.tokens != padding
        last = -rows.least(jnp.where(is_text, -p.places, 1), 1)
        is_last = is_text & (p.places == rows.spread(last))
        scores = model.token_scores(before_head.hidden)[..., 0]
        rewards = rows.sums(jnp.where(is_last, scores, 0))  # [batch, pairs, 2]
        counted = rows.sums((p.targets != IGNORED).astype(jnp.float32))
        is_pair = jnp.all(counted > 0, axis=-1)
        pairs = is_pair.astype(jnp.float32)

        def of_pairs(values: jax.Array) -> jax.Array:
            return jnp.where(is_pair, values, 0)

        chosen, rejected = rewards[..., 0], rewards[..., 1]
        difference, total = chosen - rejected, chosen + rejected
        excess = difference
        if "margins" in batch:
            excess -= rows.sums(rows.batch["margins"])[..., 0]
        losses = jax.nn.softplus(-excess)
        if (coefficient := self.options.center_rewards_coefficient) is not None:
            losses += coefficient * jnp.square(total)
        means = {
            "mean_reward": Mean(of_pairs(total), 2 * pairs),
            "accuracy": Mean(of_pairs((difference > 0).astype(jnp.float32)), pairs),
            "margin": Mean(of_pairs(difference), pairs),
        }
        terms, metrics = summed({"reward": (of_pairs(losses), pairs)}, means, before_head)
        rewards, both = stop_gradient(rewards), is_pair[..., None]
        metrics["min_reward"] = Min(jnp.min(jnp.where(both, rewards, jnp.inf)))
        metrics["max_reward"] = Max(jnp.max(jnp.where(both, rewards, -jnp.inf)))
        return terms, metrics
