"""Distillation: a student learns the next-token distributions of a frozen teacher.

Keys and defaults are those of TRL's DistillationConfig of 1.16. The teacher's hidden states are
computed before the step; its logits, like the student's, in chunks of the vocabulary. On-policy,
the texts are completions that the student samples while it trains.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxspeed import ops
from jaxspeed.config.rollout_options import DistillOptions
from jaxspeed.errors import ModelError
from jaxspeed.objectives.base_objective import Objective
from jaxspeed.objectives.computed_arrays import ComputedArrays
from jaxspeed.objectives.model_logprobs import head_input
from jaxspeed.objectives.named import NextToken
from jaxspeed.objectives.padding import without_weight
from jaxspeed.objectives.terms_and_metrics import Mean, Terms
from jaxspeed.ops.next_tokens import IGNORED

HIDDEN, HEAD, SOFT_CAP = "teacher_hidden", "teacher_head", "teacher_soft_cap"


class Distill(Objective):
    """The divergence of a student's next-token distributions from a frozen teacher's."""

    Options: Any = DistillOptions
    arrays: ClassVar = {
        **NextToken.arrays,
        HIDDEN: "[batch, seq, embed of the teacher], computed: the input of its head",
    }

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        if self.options.on_policy:
            self.records = "prompts"

    def computed(self) -> Sequence[ComputedArrays]:
        return [
            ComputedArrays(
                "teacher", (HIDDEN,), teacher_hidden, self.options.teacher, extra=teacher_head
            )
        ]

    def loss(
        self,
        model: Any,
        batch: Mapping[str, jax.Array],
        extra: Any = None,
        train: bool | None = None,
    ) -> Any:
        if not hasattr(model, "head_weight"):
            raise ModelError(
                "distill reads the student's head in chunks: it needs a model of a family, not one "
                "that returns logits"
            )
        o = self.options
        p = ops.split_batch(batch)
        student = head_input(model, p, train)
        counted, soft_cap = p.targets != IGNORED, model.logit_soft_cap
        by_token = ops.linear_divergence(
            student.hidden,
            model.head_weight,
            batch[HIDDEN],
            extra[HEAD],
            beta=o.beta,
            temperature=o.temperature,
            counted=counted,
            student_soft_cap=soft_cap,
            teacher_soft_cap=extra.get(SOFT_CAP),
            chunk=model.vocab_chunk,
        )
        tokens = jnp.sum(counted.astype(jnp.float32))
        terms = Terms(divergence=(jnp.sum(by_token.divergence), tokens))
        if o.labels_weight:
            labels = ops.linear_cross_entropy(
                student.hidden,
                model.head_weight,
                p.targets,
                ignore_index=IGNORED,
                soft_cap=soft_cap,
                chunk=model.vocab_chunk,
            )
            terms["cross_entropy"] = (*labels, o.labels_weight)
        if student.auxiliary is not None:
            terms["aux_loss"] = (student.auxiliary, None)
        return terms, {"entropy": Mean(jnp.sum(by_token.entropy), tokens), **student.metrics}

    without_weight = staticmethod(without_weight)


def teacher_hidden(model: Any, batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """The input of the teacher's head, [batch, seq, embed]."""
    if not hasattr(model, "head_weight"):
        raise ModelError("objective.teacher is no language model with a head of its own")
    return {HIDDEN: head_input(model, ops.split_batch(batch), train=False).hidden}


def teacher_head(model: Any) -> dict[str, jax.Array]:
    """The teacher's head [vocab, embed], and the bound of its logits if they have one."""
    cap = model.logit_soft_cap
    return {HEAD: model.head_weight, **({} if cap is None else {SOFT_CAP: jnp.float32(cap)})}
