"""Losses of models that are sharded along the sequence by the passes, without an engine."""

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxspeed.jaxpr.evaluate import as_function
from jaxspeed.jaxpr.traverse import bodies
from jaxspeed.placement.batch_dims import batch_specs, sequence_dims
from jaxspeed.placement.mesh import build_mesh
from jaxspeed.sequence_parallel import SequenceSettings
from jaxspeed.tensor_parallel import REPLICATED, ActivationLayout
from jaxspeed.traced_loss import passes
from jaxspeed.traced_loss.loss_program import LossProgram

Loss = Callable[[Any, Any], jax.Array]  # (parameters by path, batch) -> a scalar


def mesh_of(**sizes: int) -> Any:
    """A mesh of the first devices."""
    count = int(np.prod(list(sizes.values())))
    return build_mesh(sizes, jax.devices()[:count])


def traced(loss: Loss, params: Mapping[str, Any], batch: Any, settings: SequenceSettings) -> Any:
    closed = jax.make_jaxpr(loss)(params, batch)
    inputs = iter(closed.jaxpr.invars)
    of_params = {path: next(inputs) for path in sorted(params)}
    arrays = [next(inputs) for _ in jax.tree.leaves(batch)]
    dims = zip(arrays, sequence_dims(batch, settings.dims), strict=True)
    positions = {v: dim for v, dim in dims if dim is not None}
    return LossProgram(closed, of_params, arrays, None, positions=positions)


class Sharded:
    """A loss and its gradients, sharded over a mesh with `seq`.

    `specs` are those of parameters that `tensor` shards.
    """

    def __init__(
        self,
        loss: Loss,
        params: Mapping[str, Any],
        batch: Any,
        mesh: Any,
        specs: Mapping[str, P] | None = None,
        activations: ActivationLayout = REPLICATED,
        **how: Any,
    ):
        self.settings = SequenceSettings(**how)
        specs = dict.fromkeys(params, P()) | dict(specs or {})
        self.mesh, self.given = mesh, (dict(params), batch)
        with jax.set_mesh(mesh):
            self.traced = self.first_passes(traced(loss, params, batch, self.settings))
            context = passes.PartContext(mesh, specs, activations, None, sequence=self.settings)
            self.program = passes.after_split(self.traced, context)
            closed = self.program.closed

            def run(params: Any, batch: Any) -> jax.Array:
                args = [*(params[path] for path in sorted(params)), *jax.tree.leaves(batch)]
                return as_function(closed.jaxpr, closed.consts)(*args)[0]

            def at(spec: P) -> NamedSharding:
                return NamedSharding(mesh, spec)

            of_batch = batch_specs(batch, self.settings.dims, mesh.shape)
            given = {path: at(spec) for path, spec in specs.items()}, jax.tree.map(at, of_batch)
            step = jax.jit(jax.value_and_grad(run), in_shardings=given, out_shardings=at(P()))
            self.step = step

    def first_passes(self, program: LossProgram) -> LossProgram:
        """The loss after what is done before a pipeline splits it."""
        return program

    @cached_property
    def compiled(self) -> Any:
        with jax.set_mesh(self.mesh):
            return self.step.lower(*self.given).compile()

    def __call__(self) -> tuple[jax.Array, dict[str, jax.Array]]:
        with jax.set_mesh(self.mesh):
            return self.compiled(*jax.device_put(self.given, self.compiled.input_shardings[0]))


def constrained(jaxpr: Any) -> list[tuple[tuple[int, ...], P]]:
    """(shape, spec) of all constraints of a program."""
    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "sharding_constraint":
            found.append((eqn.outvars[0].aval.shape, eqn.params["sharding"].spec))
        for body in bodies(eqn):
            found += constrained(body.jaxpr)
    return found


def assert_as_on_one_device(sharded: Sharded, loss: Loss) -> None:
    """Loss to 1e-6, gradients to 1e-5 of their largest element, and rounding.

    The gradient of the bias of keys is rounding alone: what scores are shifted by does not count.
    """
    ours, grads = sharded()
    params, batch = sharded.given
    theirs, expected = jax.jit(jax.value_and_grad(loss))(params, jax.tree.map(jnp.asarray, batch))
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    largest = {path: float(np.abs(grad).max()) for path, grad in expected.items()}
    for path, grad in expected.items():
        atol = 1e-5 * largest[path] + 2e-7 * max(largest.values())
        np.testing.assert_allclose(grads[path], grad, rtol=1e-5, atol=atol, err_msg=path)
