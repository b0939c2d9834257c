"""The shapes of a batch, without the data."""

from collections.abc import Sequence

import jax

from jaxspeed.config.data import Corpus, Data
from jaxspeed.data.corpus import build
from jaxspeed.data.model_limits import Facts


def told_shapes(data: Data, reads: Facts, samples: int) -> dict[str, jax.ShapeDtypeStruct] | None:
    """Those of a batch of so many samples, where what the model reads tells them.

    None where the samples are the user's own (or the model is), so that one has to be read.
    """
    sources: Sequence[Corpus] = data.mixture or [data]
    own = any(":" in (each.source or "") for each in sources)
    if own or reads.sample is None:
        return None
    made = {"source": "synthetic", "samples": 1, "mixture": [], "held_out": 0.0}
    first = build(data.model_copy(update=made), **vars(reads), seed=0).train.batch(0, 1)
    return {
        name: jax.ShapeDtypeStruct((samples, *x.shape[1:]), x.dtype) for name, x in first.items()
    }
