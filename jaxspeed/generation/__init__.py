"""Text generation: sampling rules, compiled loops with a key-value cache, and their schedule."""

from jaxspeed.generation.decode_programs import SEGMENT
from jaxspeed.generation.generate import Generated, Generation, Generator, Request, TextPiece
from jaxspeed.generation.rollout import Completion, Rollout
from jaxspeed.generation.sampling_rules import Sampling
from jaxspeed.generation.text import TextTokenizer

__all__ = [
    "SEGMENT",
    "Completion",
    "Generated",
    "Generation",
    "Generator",
    "Request",
    "Rollout",
    "Sampling",
    "TextPiece",
    "TextTokenizer",
]
