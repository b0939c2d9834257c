"""Low-rank adapters (LoRA, DoRA) of any model's weights.

`products` computes what an equation that reads an adapted weight gives.
"""
