"""Where batches come from: sources, tokenizers, packing, and an order that depends on the seed and
the step alone.

`build` opens what the config's section `data` names; `Feeder` puts its batches on the devices ahead
of the step. A corpus is numbered samples that can be read in any order; which sample comes when is
Grain's business.
"""

from jaxspeed.data.corpus import Corpus, build, tokenize, told_shapes
from jaxspeed.data.feeder import Feeder, Place, placer
from jaxspeed.data.model_limits import Facts, facts
from jaxspeed.data.split import Split
from jaxspeed.data.tokenizer import (
    BPETokenizer,
    ByteTokenizer,
    Tokenizer,
    load_tokenizer,
    read_tokenizer,
)

__all__ = [
    "BPETokenizer",
    "ByteTokenizer",
    "Corpus",
    "Facts",
    "Feeder",
    "Place",
    "Split",
    "Tokenizer",
    "build",
    "facts",
    "load_tokenizer",
    "placer",
    "read_tokenizer",
    "tokenize",
    "told_shapes",
]
