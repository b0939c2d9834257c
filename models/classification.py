"""Classifiers' loss: cross-entropy, and in evaluation the share of correct labels."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxspeed import ops


def objective(config: Any) -> str:
    return "classification"


def label_loss(scores: jax.Array, labels: jax.Array, train: bool | None) -> Any:
    """(sum, weight) of integer `labels` [batch] as `class_loss`.

    With one score, or real labels [batch, classes], of the mean of squared errors.
    """
    scores = scores.astype(jnp.promote_types(scores.dtype, jnp.float32))
    if scores.shape[-1] > 1 and jnp.issubdtype(labels.dtype, jnp.integer):
        return class_loss(scores, labels, train)
    error = scores - labels.reshape(scores.shape).astype(scores.dtype)
    return jnp.sum(jnp.mean(jnp.square(error), axis=-1)), jnp.asarray(len(scores), scores.dtype)


def class_loss(logits: jax.Array, labels: jax.Array, train: bool | None, **options: Any) -> Any:
    """(sum, weight) of the cross-entropy of `labels` [batch]; labels of -100 do not count.

    In evaluation (`train` is False) a dict with the `accuracy` comes third. `options` are those of
    `ops.cross_entropy`.
    """
    total, weight = ops.cross_entropy(logits, labels, **options)
    if train is not False:
        return total, weight
    correct = jnp.sum(jnp.argmax(logits, axis=-1) == labels, dtype=weight.dtype)
    return total, weight, {"accuracy": correct / weight}
