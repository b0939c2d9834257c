"""Text generation: sampling rules, compiled programs with a key-value cache, and their loop."""

from jaxspeed.generation.generate import Generated, Generation, Generator, Request, TextPiece
from jaxspeed.generation.sampling_rules import Sampling
from jaxspeed.generation.text import TextTokenizer

__all__ = [
    "Generated",
    "Generation",
    "Generator",
    "Request",
    "Sampling",
    "TextPiece",
    "TextTokenizer",
]
