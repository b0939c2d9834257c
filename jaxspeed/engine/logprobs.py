"""Log-probabilities of the tokens of a batch, by an engine's model or by its base."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from jaxspeed.engine.calls import Calls
from jaxspeed.errors import BatchError, ConfigError
from jaxspeed.objectives.model_logprobs import ROUTING, THRESHOLDS, model_logprobs
from jaxspeed.train.array_program import array_program, refuse_unknown_base
from jaxspeed.train.gather_once import GatherOnce
from jaxspeed.train.program import Program
from jaxspeed.user_models.batch_checks import shapes_text
from jaxspeed.user_models.config_model import family_objective

# As in models/language.py.
ARRAYS = "tokens", "targets", "segment_ids", "positions", "mask", THRESHOLDS, ROUTING


class Logprobs(NamedTuple):
    """Log-probabilities of the targets of a batch, sharded as the batch is.

    Each array but `sums` is [batch, seq], 0 (or False) where the target does not count; None if it
    was not requested.

    Attributes:
      logprobs: fp32.
      entropy: of the softmax, in nats.
      is_top: whether the target is the most likely token.
      mean_logit: over the vocabulary, divided by the temperature as the others are.
      counted: which targets count.
      sums: fp32 [batch], of `logprobs`: of a row of packed documents, those of all of them.
    """

    logprobs: jax.Array
    entropy: jax.Array | None
    is_top: jax.Array | None
    mean_logit: jax.Array | None
    counted: jax.Array
    sums: jax.Array


class LogprobPrograms:
    """The compiled programs of one program's model.

    Raises:
      ConfigError: its model gives no log-probabilities of next tokens.
    """

    def __init__(self, program: Program, call: Calls) -> None:
        self.program, self._call = program, call
        self._compiled = dict[Any, Any]()
        if not program.in_this_process:
            raise ConfigError(
                "engine.logprobs: the model is in other processes, on Ray; load a checkpoint of it "
                "into an engine without parameter_server"
            )
        kind = family_objective(program.config, program.source.model)
        if kind not in (None, "next_token"):
            raise ConfigError(
                f"engine.logprobs: this model is trained for {kind}; log-probabilities are of "
                "decoders, which predict each next token"
            )

    def __call__(
        self,
        state: Any,
        batch: Any,
        once: GatherOnce | None,
        reference: bool,
        requests: Mapping[str, Any],
    ) -> Logprobs:
        """Compute them; `once` is how the parameters of the state are gathered."""
        if reference:
            refuse_unknown_base(self.program)
        arrays = _arrays(batch)
        if reference:  # its routers choose for themselves
            arrays.pop(ROUTING, None)
        placed = self._call.place(arrays, "logprobs", None)
        key = reference, once is not None, *requests.items()
        if key not in self._compiled:

            def computed_arrays(model: Any, batch: Any) -> dict[str, jax.Array]:
                result = model_logprobs(model, batch, train=False, **requests)
                values = {k: x for k, x in result.of_tokens._asdict().items() if x is not None}
                sums = result.of_tokens.logprobs.sum(-1)
                return {**values, "counted": result.counted, "sums": sums}

            self._compiled[key] = array_program(
                self.program, computed_arrays, adapters=not reference, once=once
            )
        self._call.compile_together(self._compiled[key], state, placed)
        computed = self._call(self._compiled[key], state, placed)
        return Logprobs(**dict.fromkeys(Logprobs._fields) | computed)


def _arrays(batch: Any) -> dict[str, Any]:
    """The arrays of a language model's batch that are read."""
    tokens = batch.get("tokens") if isinstance(batch, Mapping) else None
    if getattr(tokens, "ndim", 0) != 2:
        raise BatchError(
            "engine.logprobs: a batch has tokens [batch, seq + 1], or tokens and targets [batch, "
            f"seq]; this one is {shapes_text(batch)}"
        )
    return {name: batch[name] for name in ARRAYS if name in batch}
