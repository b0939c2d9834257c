"""Compiled with all that the compiler optimizes; most tests go without, to compile sooner."""

import jax
import pytest


@pytest.fixture(autouse=True, scope="module")
def as_users_compile():
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)
