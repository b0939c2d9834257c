"""Losses of sampled completions, row by row, in numpy or plain JAX; and rollouts for them."""

from typing import Any

import jax
import numpy as np

IGNORED = -100
Batch = dict[str, np.ndarray]
# Keys of TRL's that act in the loss, at its defaults.
DEFAULTS: dict[str, Any] = {
    "type": "grpo", "loss_type": "dapo", "importance_sampling_level": "token", "epsilon": 0.2,
    "epsilon_high": None, "delta": None, "beta": 0.0, "use_bias_correction_kl": True,
    "temperature": 1.0, "mirror_sampling": True, "sapo_temperature_pos": 1.0,
    "sapo_temperature_neg": 1.05, "importance_sampling_mode": None, "clip_max": 3.0,
    "clip_min": None, "max_completion_length": 512,
}  # fmt: skip


def recorded(rows: int, seq: int, vocab: int, seed: int = 0, *, old: bool = True) -> Batch:
    """A step's batch: skewed lengths, gaps where a tool wrote, rows that are masked."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, vocab, (rows, seq)).astype(np.int32)
    targets = np.full((rows, seq), IGNORED, np.int32)
    for row in range(rows):
        prompt = int(rng.integers(1, 4))
        length = min(int(rng.geometric(0.2)), seq - prompt)
        here = slice(prompt, prompt + length)
        targets[row, here] = rng.integers(0, vocab, length)
        if row % 3 == 1 and length > 3:  # what a tool wrote
            targets[row, prompt + 1 : prompt + 3] = IGNORED
    targets[[2, rows - 1]] = IGNORED

    def logprobs(scale: float) -> np.ndarray:
        return (-np.log(vocab) + rng.normal(0, scale, (rows, seq))).astype(np.float32)

    batch = {
        "tokens": tokens,
        "targets": targets,
        "thresholds": rng.uniform(0.5, 4, (rows, seq)).astype(np.float32),
        "sampled_logprobs": logprobs(0.6),
        "advantages": rng.normal(size=rows).astype(np.float32),
        "row_weights": np.full(rows, 2.5, np.float32),
        "reference_logprobs": logprobs(0.4),
    }
    batch["sampled_logprobs"][0] = np.nan  # a function that samples gave none
    if old:
        batch["old_logprobs"] = logprobs(0.4)
    return batch


def token_logprobs(xp: Any, logits: Any, targets: Any, thresholds: Any, o: dict[str, Any]) -> Any:
    """(log-probabilities [n], entropies [n]) of targets, by what is drawn from."""
    z = logits / o["temperature"]
    z = z - z.max(-1, keepdims=True)
    p = xp.exp(z)
    if thresholds is not None and o["mirror_sampling"]:
        is_target = np.arange(z.shape[-1]) == targets[:, None]
        p = p * ((z >= -thresholds[:, None]) | is_target)
    p = p / p.sum(-1, keepdims=True)
    logp = xp.log(xp.where(p > 0, p, 1))
    return logp[np.arange(len(targets)), targets], -(p * logp).sum(-1)


def plain_loss(xp: Any, logits: Any, batch: Batch, options: dict[str, Any]) -> Any:
    """(loss, metrics) of logits [batch, seq, vocab]."""
    o = {**DEFAULTS, **options}
    stop = jax.lax.stop_gradient if xp is not np else lambda x: x
    high = o["epsilon"] if o["epsilon_high"] is None else o["epsilon_high"]
    losses, seen = [], {name: [] for name in ("entropy", "kl", "low", "high", "diff", "ratio")}
    for row, targets in enumerate(batch["targets"]):
        (at,) = np.nonzero(targets != IGNORED)
        n, advantage = len(at), float(batch["advantages"][row])
        if not batch["row_weights"][row]:
            continue
        thresholds = batch["thresholds"][row, at] if "thresholds" in batch else None
        logp, entropy = token_logprobs(xp, logits[row, at], targets[at], thresholds, o)
        old = batch["old_logprobs"][row, at] if "old_logprobs" in batch else stop(logp)
        sampled = batch["sampled_logprobs"][row, at]
        drift = xp.where(np.isnan(sampled), 0, old - np.nan_to_num(sampled))
        reference = batch["reference_logprobs"][row, at]
        if o["type"] == "rloo":
            ratio = xp.exp((logp - old).sum()).reshape(1)
        elif o["importance_sampling_level"] == "sequence":
            ratio = xp.exp((logp - old).sum() / max(n, 1)).reshape(1)
        else:
            ratio = xp.exp(logp - old)
        bounded = ratio if o["delta"] is None else xp.minimum(ratio, o["delta"])
        kind = o["loss_type"]
        if kind == "cispo":
            loss = -stop(xp.minimum(ratio, o["epsilon_high"])) * advantage * logp
        elif kind == "sapo":
            t = o[f"sapo_temperature_{'pos' if advantage > 0 else 'neg'}"]
            loss = -4 / t / (1 + xp.exp(-t * (ratio - 1))) * advantage
        else:
            clipped = xp.clip(ratio, 1 - o["epsilon"], 1 + high)
            loss = -xp.minimum(bounded * advantage, clipped * advantage)
        correction = xp.exp(drift)
        if (mode := o["importance_sampling_mode"]) is not None:
            correction = xp.exp(drift.sum()).reshape(1) if "sequence" in mode else correction
            low = -np.inf if o["clip_min"] is None else o["clip_min"]
            if "truncate" in mode:
                correction = xp.clip(correction, low, o["clip_max"])
            else:
                inside = (correction >= low) & (correction <= o["clip_max"])
                correction = xp.where(inside, correction, 0)
            loss = loss * correction
        if o["type"] == "rloo":
            seen["kl"] += [*(old - reference)]
        elif o["beta"]:
            kl = xp.exp(reference - logp) - (reference - logp) - 1
            kl = kl * ratio if o["use_bias_correction_kl"] else kl
            loss = loss + o["beta"] * kl
            seen["kl"] += [*(kl + 0 * logp)]
        if o["type"] == "rloo":
            losses.append(loss.sum())
        else:
            total = (loss + 0 * logp).sum()
            losses.append(total / max(n, 1) if kind in ("grpo", "sapo") else total)
        seen["entropy"] += [*entropy]
        seen["low"].append((bounded < 1 - o["epsilon"]) & (advantage < 0))
        most = o["epsilon_high"] if kind == "cispo" else 1 + high
        seen["high"].append((bounded > most) & (advantage > 0))
        seen["diff"] += [*xp.abs(drift)[~np.isnan(sampled)]]
        seen["ratio"] += [*correction]
    return sum(losses) / batch["row_weights"].sum(), seen


def plain_metrics(seen: dict[str, Any], options: dict[str, Any]) -> dict[str, float]:
    """The metrics that a step reports, of what `plain_loss` has seen in numpy."""
    o, mean = {**DEFAULTS, **options}, np.mean
    low, high = ([x for x in seen[side] if len(x)] for side in ("low", "high"))
    metrics = {
        "entropy": mean(seen["entropy"]),
        "sampling/sampling_logp_difference/mean": mean(seen["diff"]),
        "sampling/sampling_logp_difference/max": max(seen["diff"]),
        "sampling/importance_sampling_ratio/mean": mean(seen["ratio"]),
        "sampling/importance_sampling_ratio/min": min(seen["ratio"]),
        "sampling/importance_sampling_ratio/max": max(seen["ratio"]),
    }
    if o["beta"]:
        metrics["kl"] = mean(seen["kl"])
    if o["loss_type"] == "cispo":
        metrics["cispo_clip_ratio"] = np.concatenate(high).mean()
    elif o["loss_type"] != "sapo":
        both = np.concatenate(low).mean(), np.concatenate(high).mean()
        metrics |= {
            "clip_ratio/low_mean": both[0],
            "clip_ratio/high_mean": both[1],
            "clip_ratio/region_mean": sum(both),
            "clip_ratio/low_min": min(x.mean() for x in low),
            "clip_ratio/high_max": max(x.mean() for x in high),
        }
    return {name: float(x) for name, x in metrics.items()}
