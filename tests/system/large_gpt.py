"""GPTs of 13 and 40 billion parameters on one device: what a step of Adam needs of its memory.

Run as a file, it compiles for one H100 that is not there, with `jax[cuda13]` installed and neither
a GPU nor its driver: the step is lowered for CUDA on a simulated device, whose memories JAX knows,
and handed to the compile-only client of the topology, whose devices tell of none (jax 0.10.2 and
0.12.0). This leans on JAX's inner parts.
"""

import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SEQUENCE, MICRO_BATCH = 2048, 4
SIZES = {
    "13b": {"hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 40},
    "40b": {"hidden_size": 8192, "num_hidden_layers": 50, "num_attention_heads": 64},
}
CONFIG = {
    "train_micro_batch_size_per_gpu": MICRO_BATCH,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    "bf16": {"enabled": True},
    "parallel": {"remat": "full"},
    "zero_optimization": {
        "offload_param": {"device": "cpu"},
        "offload_optimizer": {"device": "cpu"},
    },
}
# The fields of an H100 SXM, as XLA publishes them (xla/tools/hlo_opt/gpu_specs).
H100 = """
gpu_device_info {
  cuda_compute_capability { major: 9 }
  core_count: 132  fpus_per_core: 128  threads_per_warp: 32  clock_rate_ghz: 1.98
  threads_per_block_limit: 1024  threads_per_core_limit: 2048
  registers_per_block_limit: 65536  registers_per_core_limit: 65536
  shared_memory_per_block: 49152  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472  l2_cache_size: 52428800
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  device_memory_size: 84929347584  memory_bandwidth: 3352320000000
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
runtime_version { major: 13 minor: 0 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


def step_of(size: str, devices: Sequence[Any]) -> tuple[Any, tuple[Any, Any], int]:
    """(the step, what it is called with, how many parameters)."""
    import math

    import jax
    import jax.numpy as jnp
    from jaxspeed.models import gpt2

    from jaxspeed.config import Config
    from jaxspeed.train.build import build_program

    config = gpt2.Config(**SIZES[size], max_position_embeddings=SEQUENCE)
    model = lambda rngs: gpt2.build(config, rngs)  # noqa: E731
    program = build_program(Config.load(CONFIG), model, gpt2.loss, devices=devices)
    shape = program.batch.train, SEQUENCE + 1
    batch = program.abstract_batch({"tokens": jax.ShapeDtypeStruct(shape, jnp.int32)})
    count = sum(math.prod(row.leaf.shape) for row in program.table)
    return program.step, (program.state, batch), count


def _figures(memory: Any, parameters: int) -> dict[str, int]:
    return {
        "parameters": parameters,
        "device": memory.argument_size_in_bytes + memory.temp_size_in_bytes,
        "host": memory.host_argument_size_in_bytes + memory.host_temp_size_in_bytes,
    }


def on_tpu(devices: Sequence[Any], size: str) -> dict[str, int]:
    """Bytes of one device and of its host."""
    step, args, parameters = step_of(size, devices[:1])
    return _figures(step.lower(*args).compile().memory_analysis(), parameters)


def on_h100(size: str) -> dict[str, int]:
    """The same of one H100."""
    import jax
    import numpy as np
    from jax._src import compiler
    from jax._src.lib import xla_client
    from jax.experimental import topologies

    step, args, parameters = step_of(size, jax.devices("cpu"))
    lowered = step.trace(*args).lower(lowering_platforms=("cuda",))
    described = topologies.get_topology_desc(
        platform="cuda", topology_name="h100", target_config=H100, topology="1x1x1"
    )
    (device,) = described.devices
    options = compiler.get_compile_options(
        num_replicas=1, num_partitions=1, device_assignment=np.array([[device.id]])
    )
    module, devices = lowered.compiler_ir("stablehlo"), xla_client.DeviceList((device,))
    compiled = device.client.compile(module, devices, options)
    return _figures(compiled.get_compiled_memory_stats(), parameters)


def cuda_environment() -> dict[str, str]:
    """What a process needs to compile for a GPU that is not there."""
    flags = "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"
    found = importlib.util.find_spec("nvidia")
    places = found.submodule_search_locations or () if found else ()
    tools = (path.parents[1] for place in places for path in Path(place).glob("*/bin/ptxas"))
    if root := next(tools, None):
        flags += f" --xla_gpu_cuda_data_dir={root}"
    return {
        "CUDA_VISIBLE_DEVICES": "-1",
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "JAX_PLATFORMS": "",
        "XLA_FLAGS": flags,
    }


if __name__ == "__main__":
    os.environ.update(cuda_environment())
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    print(json.dumps(on_h100(sys.argv[1])))
