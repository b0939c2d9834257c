"""Cheap functions whose backward pass recomputes everything from their inputs.

JAX saves what each operation's derivative reads: of a norm of 16-bit activations two fp32 arrays of
their size, of `silu(gate) * up` three arrays besides its inputs. XLA fuses the recomputation with
what reads it. (A compiler that fuses cannot undo the residuals of a loop: they are its results.)
"""

import functools
from collections.abc import Callable
from typing import Any

import jax


def saves_inputs(fn: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """A function of arrays with only its inputs as residuals, if the first has 16 bits.

    In fp32 it is `fn` itself, which has a forward-mode derivative too.
    """
    of_inputs = jax.custom_vjp(fn)
    of_inputs.defvjp(lambda *args: (fn(*args), args), lambda args, ct: jax.vjp(fn, *args)[1](ct))

    @functools.wraps(fn)
    def run(*args: Any) -> jax.Array:
        return (fn if args[0].dtype.itemsize > 2 else of_inputs)(*args)

    return run
