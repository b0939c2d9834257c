"""Deviceless compilation for NVIDIA GPUs, without a GPU or its driver.

A topology's devices have no memories (`default_memory()` is UNIMPLEMENTED in jax 0.11.2 to 0.12.0),
so a sharding on them silently drops the memory kind of an offloaded array. So the program is traced
and lowered on simulated CPU devices, which have `pinned_host`, and the lowered module is compiled
by the topology's compile-only client. Where both work, they report exactly the same bytes. All uses
of JAX internals for this are in this file.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxspeed.errors import JaxspeedError
from jaxspeed.hardware.targets import Target
from jaxspeed.ops import gpu


def target_config(target: Target) -> str:
    """A GPU's GpuTargetConfigProto in text form, as in XLA's gpu_specs."""
    chip = target.chip
    spec: Mapping[str, Any] = chip.compiler or {}
    major, minor = chip.capability or gpu.NEWEST
    return f"""
gpu_device_info {{
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  core_count: {spec["cores"]}  fpus_per_core: {spec["fpus"]}  clock_rate_ghz: {spec["clock"]}
  threads_per_warp: 32
  threads_per_block_limit: 1024  threads_per_core_limit: {spec["threads"]}
  registers_per_block_limit: 65536  registers_per_core_limit: 65536
  shared_memory_per_block: 49152  shared_memory_per_block_optin: {spec["shared_optin"]}
  shared_memory_per_core: {spec["shared"]}  l2_cache_size: {spec["l2"]}
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  device_memory_size: {chip.memory}  memory_bandwidth: {int(chip.bandwidth)}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {{ major: 13 minor: 0 patch: 0 }}
device_description_str: "{chip.kind}"
"""


@dataclass(frozen=True)
class Executable:
    """The client's executable, with the interface of `jax.stages.Compiled` that reports use."""

    loaded: Any
    input_shardings = ()  # unknown here; the text has them

    def memory_analysis(self) -> Any:
        return self.loaded.get_compiled_memory_stats()

    def as_text(self) -> str:
        return "\n\n".join(module.to_string() for module in self.loaded.hlo_modules())


def compile_lowered(lowered: Any, target: Target) -> Executable:
    """Compile a step lowered on simulated devices with `lowering_platforms=("cuda",)`."""
    try:
        from jax._src import compiler
        from jax._src.lib import xla_client
        from jax.experimental import topologies

        described = topologies.get_topology_desc(
            platform="cuda",
            topology_name=target.chip.name,
            target_config=target_config(target),
            topology=f"1x{target.count // target.node}x{target.node}",
        )
        devices: list[Any] = list(described.devices)
        options = compiler.get_compile_options(
            num_replicas=1,
            num_partitions=len(devices),
            device_assignment=np.array([[device.id for device in devices]]),
        )
        # As in JAX's compile: given shardings are fixed, others are left to the compiler.
        compile_args, build = lowered._lowering.compile_args, options.executable_build_options
        build.allow_spmd_sharding_propagation_to_parameters = _left_open(
            compile_args["in_shardings"]
        )
        build.allow_spmd_sharding_propagation_to_output = _left_open(compile_args["out_shardings"])
        module, client = lowered.compiler_ir("stablehlo"), devices[0].client
        where = xla_client.DeviceList(tuple(devices))
    except (ImportError, AttributeError, KeyError, TypeError) as error:
        raise JaxspeedError(
            f"compiling for absent GPUs is not supported with jax {jax.__version__} "
            f"({type(error).__name__}: {error}); it works with 0.11.2 to 0.12"
        ) from error
    return Executable(client.compile(module, where, options))


def _left_open(shardings: Iterable[Any]) -> list[bool]:
    return [type(sharding).__name__ == "UnspecifiedValue" for sharding in shardings]
