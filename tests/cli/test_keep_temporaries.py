"""`jaxspeed train --keep-temporaries`: what glibc does with its settings."""

import argparse
import os
import subprocess
import sys

import pytest

from jaxspeed.cli import train
from jaxspeed.errors import ConfigError

# A product of 100 MB between two others. Other threads of the client may map theirs at some call.
CODE = """
import resource, jax, jax.numpy as jnp
x = jnp.ones((5000, 4))
product = jax.jit(lambda x: jnp.exp(x @ x.T) @ x)
faults = []
for _ in range(8):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    product(x).block_until_ready()
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(min(faults[1:]))
"""


@pytest.mark.sampled
def test_a_step_with_kept_temporaries_maps_no_pages():
    try:
        train._check_kept(argparse.Namespace(engine="local"))
    except ConfigError as why:
        pytest.skip(str(why))
    assert faults_with(train.KEEP_TEMPORARIES) < 100
    if "[always]" not in train._text(train._HUGE_PAGES_SETTING):
        assert faults_with("") > 10_000


def faults_with(setting):
    environment = {**os.environ, "GLIBC_TUNABLES": setting, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", CODE]
    child = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return int(child.stdout)
