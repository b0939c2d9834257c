"""Text generation: sampling rules, compiled loops with a key-value cache, and their batching."""

from jaxspeed.data.chat_masks import PromptWithImages
from jaxspeed.generation.decode_programs import SEGMENT
from jaxspeed.generation.generate import Generated, Generation, Generator, Request, TextPiece
from jaxspeed.generation.rollout import Rollout, SampledCompletion
from jaxspeed.generation.sampling_rules import Sampling
from jaxspeed.generation.text import TextTokenizer

__all__ = [
    "SEGMENT",
    "Generated",
    "Generation",
    "Generator",
    "PromptWithImages",
    "Request",
    "Rollout",
    "SampledCompletion",
    "Sampling",
    "TextPiece",
    "TextTokenizer",
]
