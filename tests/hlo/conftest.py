"""The mesh that most tests of this folder use, and programs that keep their own names."""

import jax
import pytest
from jax.sharding import Mesh

from tests.hlo.hlo_programs import mesh_of
from tests.support.compiling import as_users_compile  # noqa: F401


@pytest.fixture(autouse=True)
def names_tell_programs_apart():
    """The compilation cache takes programs that differ in named scopes only for one.

    It would hand back the first one's text, with the first one's scopes.
    """
    jax.config.update("jax_compilation_cache_include_metadata_in_key", True)
    yield
    jax.config.update("jax_compilation_cache_include_metadata_in_key", False)


@pytest.fixture(scope="session")
def mesh() -> Mesh:
    """replica 2 x data 2 x tensor 2 of the six axes."""
    return mesh_of(jax.devices(), replica=2, data=2, tensor=2)
