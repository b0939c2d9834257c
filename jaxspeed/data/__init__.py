"""Input pipeline: sources, tokenizers, packing, shuffling, and prefetching to the devices.

`build` opens the sources of the config's section `data`; `Feeder` puts batches on the devices ahead
of the step. A corpus is a sequence of samples with random access. Their order, by Grain, is a
function of seed and step alone.
"""

from jaxspeed.data.corpus import Corpus, build, known_shapes, tokenize
from jaxspeed.data.feeder import Feeder, placer
from jaxspeed.data.model_limits import ModelLimits, limits_of
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
    "Feeder",
    "ModelLimits",
    "Split",
    "Tokenizer",
    "build",
    "known_shapes",
    "limits_of",
    "load_tokenizer",
    "placer",
    "read_tokenizer",
    "tokenize",
]
