"""Parity compiles a program for each point of its grid, and runs it ten times."""

import jax
import pytest


@pytest.fixture(autouse=True)
def quick_compiles():
    """Without LLVM's optimizer, which is half of a compile and changes no program's meaning: how
    XLA partitions it is as ever."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
