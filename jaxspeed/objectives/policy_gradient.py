"""Objectives of completions that the model itself has sampled, with their rewards: GRPO and RLOO.

Their keys, defaults, formulas and metrics are those of TRL's configs of 1.16. A batch holds
completions, a row each, of one or several groups or of parts of them: advantages and what sums are
divided by are computed on the host (`rewards/advantages.py`), of all completions of a rollout.

Log-probabilities of the model that trains, of the one that sampled and of the reference are those
of the distribution that tokens were drawn from: with the temperature, and with the thresholds of
top_p, top_k and min_p, unless `mirror_sampling` is false.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import stop_gradient

from jaxspeed.config.rollout_options import GrpoOptions, PolicyOptions, RlooOptions
from jaxspeed.objectives.base_objective import Objective, Records
from jaxspeed.objectives.computed_arrays import ComputedArrays
from jaxspeed.objectives.model_logprobs import THRESHOLDS, ModelLogprobs, model_logprobs
from jaxspeed.objectives.padding import IGNORED, Batch
from jaxspeed.objectives.preference import REFERENCE
from jaxspeed.objectives.terms_and_metrics import Max, Mean, Min, Terms

OLD, SAMPLED = "old_logprobs", "sampled_logprobs"
ADVANTAGES, WEIGHTS = "advantages", "row_weights"


class Scored(NamedTuple):
    """What models say of the completions of a batch; [batch, seq], 0 where nothing counts."""

    by_model: ModelLogprobs
    counted: jax.Array  # bool
    policy: jax.Array
    old: jax.Array  # those of the model that sampled, computed as the policy's are
    drift: jax.Array  # old minus the sampler's; 0 also where the sampler gave none (NaN)
    has_sampled: jax.Array  # bool: counted, and the sampler gave one

    @property
    def log_ratio(self) -> jax.Array:
        return self.policy - self.old


class OfRollouts(Objective):
    """What objectives of sampled completions share."""

    arrays: ClassVar = {
        "tokens": "[batch, seq]: prompts and completions, without the last token",
        "targets": "[batch, seq]: the next tokens; -100 where they are not of the model, or of a "
        "completion that is left out",
        THRESHOLDS: "[batch, seq] fp32, optional: of the distributions that were drawn from",
        SAMPLED: "[batch, seq] fp32: those of the sampler; NaN where it gave none",
        ADVANTAGES: "[batch] fp32",
        WEIGHTS: "[batch] fp32: of a completion, in what the loss is divided by",
        OLD: "[batch, seq] fp32, optional: of the model that sampled; by default that which trains",
        REFERENCE: "[batch, seq] fp32: the reference's, with a beta; computed if it is absent",
    }
    in_fp32: ClassVar[tuple[str, ...]] = (THRESHOLDS, SAMPLED, ADVANTAGES, WEIGHTS, OLD, REFERENCE)
    records: Records = "prompts"

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self.dropout = not self.options.disable_dropout

    def computed(self) -> Sequence[ComputedArrays]:
        if not self.options.beta:
            return ()
        how: dict[str, Any] = {"model": "reference", "by_sample": True}
        return [ComputedArrays("reference", (REFERENCE,), self.reference_logprobs, **how)]

    def reference_logprobs(
        self, model: Any, batch: Mapping[str, jax.Array]
    ) -> dict[str, jax.Array]:
        """The log-probabilities of a batch's targets by the reference, [batch, seq]."""
        return {REFERENCE: self._logprobs(model, batch, False).of_tokens.logprobs}

    def scored(self, model: Any, batch: Mapping[str, jax.Array], train: bool | None) -> Scored:
        """Compute the log-probabilities of a batch."""
        by_model = self._logprobs(model, batch, train, entropy=True)
        counted, policy = by_model.counted, by_model.of_tokens.logprobs
        old = jnp.where(counted, batch[OLD], 0) if OLD in batch else stop_gradient(policy)
        has_sampled = counted & ~jnp.isnan(batch[SAMPLED])
        drift = jnp.where(has_sampled, old - batch[SAMPLED], 0)
        return Scored(by_model, counted, policy, old, drift, has_sampled)

    def _logprobs(
        self, model: Any, batch: Mapping[str, jax.Array], train: bool | None, **requests: Any
    ) -> ModelLogprobs:
        o = self.options
        if not o.mirror_sampling:
            batch = {name: x for name, x in batch.items() if name != THRESHOLDS}
        return model_logprobs(model, batch, train=train, temperature=o.temperature, **requests)

    @staticmethod
    def without_weight(batch: Batch, padding: np.ndarray) -> Batch:
        """The batch, in which the rows that are True are no completions."""
        targets = np.where(padding[:, None], IGNORED, batch["targets"])
        return {**batch, "targets": targets, WEIGHTS: np.where(padding, 0, batch[WEIGHTS])}


class Grpo(OfRollouts):
    """Group relative policy optimization: completions against the others of their prompt."""

    Options: Any = GrpoOptions

    def loss(self, model: Any, batch: Mapping[str, jax.Array], train: bool | None = None) -> Any:
        o: GrpoOptions = self.options
        s = self.scored(model, batch, train)
        advantages = batch[ADVANTAGES][:, None]
        tokens, log_ratio, drift = over_positions(
            [s.counted.astype(jnp.float32), s.log_ratio, s.drift]
        )
        tokens = jnp.maximum(tokens, 1)
        by_sequence, is_row = (
            o.importance_sampling_level == "sequence",
            (batch[WEIGHTS] > 0)[:, None],
        )
        ratio = jnp.exp((log_ratio / tokens)[:, None] if by_sequence else s.log_ratio)
        clipped_by = is_row if by_sequence else s.counted
        metrics = Tally(s, clipped_by)

        kl: Any = 0.0
        if o.beta:
            # Schulman's k3, which is at least 0
            to_reference = jnp.where(s.counted, batch[REFERENCE] - s.policy, 0)
            kl = jnp.exp(to_reference) - to_reference - 1
            if o.use_bias_correction_kl:
                kl = kl * ratio
            metrics.mean("kl", kl, s.counted)

        if o.loss_type == "cispo":
            assert o.epsilon_high is not None
            losses = -stop_gradient(jnp.minimum(ratio, o.epsilon_high)) * advantages * s.policy
            is_high = (ratio > o.epsilon_high) & (advantages > 0)
            metrics.mean("cispo_clip_ratio", is_high, clipped_by)
        elif o.loss_type == "sapo":
            pos, neg = o.sapo_temperature_pos, o.sapo_temperature_neg
            steepness = jnp.where(advantages > 0, pos, neg)
            gate = jax.nn.sigmoid(steepness * (ratio - 1)) * 4 / steepness
            losses = -gate * advantages
        else:
            bounded = ratio if o.delta is None else jnp.minimum(ratio, o.delta)
            losses = clipped(ratio, bounded, advantages, o)
            metrics.clipped(bounded, advantages, o)

        if o.importance_sampling_mode is None:
            metrics.corrections(jnp.exp(s.drift), s.counted)
        else:
            of_sequence = o.importance_sampling_mode.startswith("sequence")
            correction = correction_of(drift[:, None] if of_sequence else s.drift, o)
            metrics.corrections(correction, is_row if of_sequence else s.counted)
            losses = losses * correction

        losses = jnp.where(s.counted, losses + o.beta * kl, 0)
        (of_rows,) = over_positions([losses])
        if o.loss_type in ("grpo", "sapo"):
            of_rows = of_rows / tokens
        return metrics.with_loss(of_rows, batch[WEIGHTS])


class Rloo(OfRollouts):
    """REINFORCE with a leave-one-out baseline."""

    Options: Any = RlooOptions

    def loss(self, model: Any, batch: Mapping[str, jax.Array], train: bool | None = None) -> Any:
        o: RlooOptions = self.options
        s = self.scored(model, batch, train)
        is_row, advantages = (batch[WEIGHTS] > 0)[:, None], batch[ADVANTAGES][:, None]
        (log_ratio,) = over_positions([s.log_ratio])
        ratio = jnp.exp(log_ratio)[:, None]
        metrics = Tally(s, is_row)
        metrics.clipped(ratio, advantages, o)
        metrics.corrections(jnp.exp(s.drift), s.counted)
        if o.beta:  # it is in the rewards
            metrics.mean("kl", s.old - batch[REFERENCE], s.counted)
        losses = jnp.where(is_row, clipped(ratio, ratio, advantages, o), 0)
        return metrics.with_loss(losses[:, 0], batch[WEIGHTS])


def clipped(ratio: jax.Array, bounded: jax.Array, advantages: jax.Array, o: PolicyOptions) -> Any:
    """PPO's loss: of the ratio and the clipped one that which gains less."""
    low, high = clip_range(o)
    return -jnp.minimum(bounded * advantages, jnp.clip(ratio, low, high) * advantages)


def clip_range(o: PolicyOptions) -> tuple[float, float]:
    """The bounds of ratios."""
    return 1 - o.epsilon, 1 + (o.epsilon if o.epsilon_high is None else o.epsilon_high)


def correction_of(drift: jax.Array, o: GrpoOptions) -> jax.Array:
    """The ratio of the model that sampled to the sampler, truncated or masked."""
    ratio = jnp.exp(drift)
    low = -jnp.inf if o.clip_min is None else o.clip_min
    if str(o.importance_sampling_mode).endswith("truncate"):
        return jnp.clip(ratio, low, o.clip_max)
    return jnp.where((ratio < low) | (ratio > o.clip_max), 0, ratio)


def over_positions(values: Sequence[jax.Array], reduce: Any = jnp.sum) -> list[jax.Array]:
    """[batch] of values [batch, seq] or [batch, 1], in one reduction."""
    seq = max(x.shape[1] for x in values)
    reduced = iter(reduce(jnp.stack([x for x in values if x.shape[1] == seq]), axis=-1))
    return [next(reduced) if x.shape[1] == seq else x[:, 0] for x in values]


class Tally:
    """The metrics of a batch.

    Values and what counts of them are [batch, seq], or [batch, 1] of sequences; they are reduced
    together (two independent collectives can deadlock the simulated devices of XLA:CPU).
    """

    def __init__(self, s: Scored, clipped_by: jax.Array) -> None:
        self._scored, self._clipped_by = s, clipped_by
        self._means = dict[str, tuple[Any, Any]]()
        self._least = dict[str, Any]()  # of what counts; inf elsewhere
        self._largest = dict[str, Any]()  # -inf elsewhere
        self.mean("entropy", s.by_model.of_tokens.entropy, s.counted)
        difference, name = jnp.abs(s.drift), "sampling/sampling_logp_difference"
        self.mean(f"{name}/mean", difference, s.has_sampled)
        self._largest[f"{name}/max"] = difference

    def mean(self, name: str, values: Any, counted: jax.Array) -> None:
        """Add a mean of values."""
        values = jnp.where(counted, values, 0).astype(jnp.float32)
        self._means[name] = stop_gradient(values), counted.astype(jnp.float32)

    def clipped(self, ratio: jax.Array, advantages: jax.Array, o: PolicyOptions) -> None:
        """Add how many ratios are clipped, on either side."""
        (least, most), name = clip_range(o), "clip_ratio"
        low, high = (ratio < least) & (advantages < 0), (ratio > most) & (advantages > 0)
        for side, which in (("low", low), ("high", high), ("region", low | high)):
            self.mean(f"{name}/{side}_mean", which, self._clipped_by)
        self._least[f"{name}/low_min"] = self._shares(low, jnp.inf)
        self._largest[f"{name}/high_max"] = self._shares(high, -jnp.inf)

    def _shares(self, which: jax.Array, of_none: float) -> jax.Array:
        """The share of each row that counts, [batch, 1]."""
        by = self._clipped_by
        total, count = over_positions([(which & by).astype(jnp.float32), by.astype(jnp.float32)])
        return jnp.where(count > 0, total / jnp.maximum(count, 1), of_none)[:, None]

    def corrections(self, ratio: jax.Array, counted: jax.Array) -> None:
        """Add the ratio of the model that sampled to the sampler."""
        name, ratio = "sampling/importance_sampling_ratio", stop_gradient(ratio)
        self.mean(f"{name}/mean", ratio, counted)
        self._least[f"{name}/min"] = jnp.where(counted, ratio, jnp.inf)
        self._largest[f"{name}/max"] = jnp.where(counted, ratio, -jnp.inf)

    def with_loss(self, of_rows: jax.Array, weights: jax.Array) -> tuple[Terms, dict[str, Any]]:
        """The result of a loss function, from the losses and weights of rows, [batch]."""
        leaves, tree = jax.tree.flatten(self._means)
        means, scored = over_positions(leaves), self._scored.by_model
        total, weight, *means = jnp.sum(jnp.stack([of_rows, weights, *means]), axis=1)
        metrics: dict[str, Any] = {
            name: Mean(*parts) for name, parts in jax.tree.unflatten(tree, means).items()
        }
        signed = [*self._least.values(), *(-x for x in self._largest.values())]
        least = jnp.min(jnp.stack(over_positions(signed, jnp.min)), axis=1)
        metrics |= zip(self._least, map(Min, least))
        metrics |= zip(self._largest, map(Max, -least[len(self._least) :]))
        loss = Terms(policy=(total, weight))
        if scored.auxiliary is not None:
            loss["aux_loss"] = scored.auxiliary, None
        of_router = {n: x for n, x in scored.metrics.items() if n != "auxiliary_loss"}
        return loss, {**metrics, **of_router}
