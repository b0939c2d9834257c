"""The section `data`: where batches come from."""

from pydantic import Field

from jaxspeed.config.types import Count, Flag, Natural, Positive, Section, Share, Text


class Corpus(Section):
    """One source of samples."""

    source: Text | None = None
    path: Text | None = None
    paths: list[Text] | None = None
    text_field: Text = "text"
    split: Text = "train"
    samples: Count | None = None


class Part(Corpus):
    """One source of a mixture."""

    weight: Positive = 1.0


class Data(Corpus):
    """Sources, how text becomes tokens, and in which order samples come."""

    mixture: list[Part] = Field(default_factory=list)
    tokenizer: Text = "bytes"
    vocab_size: Count | None = None
    seq_len: Count | None = None
    document_masks: Flag = True
    held_out: Share = 0.05
    shuffle: Flag = True
    seed: Natural | None = None
    prefetch: Count = 2
