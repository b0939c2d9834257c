"""Where batches come from: sources, tokenizers, packing, order."""
