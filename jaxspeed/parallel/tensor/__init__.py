"""Tensor parallelism: what a traced program says of its dims, and where it must communicate.

A parameter's row says which of its dims is cut over `tensor`. From there dims are followed through
the traced program (`follow`, by the rules of `primitives`, into `classes`): each product with a cut
dim is found.
"""
