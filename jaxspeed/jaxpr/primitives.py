"""Primitives by class, under the names that a traced program gives them."""

PRODUCTS = frozenset({"dot_general", "conv_general_dilated"})
REDUCTIONS = frozenset(
    {
        "reduce", "reduce_sum", "reduce_prod", "reduce_max", "reduce_min",
        "reduce_and", "reduce_or", "reduce_xor",
    }
)  # fmt: skip
ARGUMENTS = frozenset({"argmax", "argmin"})
CUMULATIVE = frozenset({"cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"})
WINDOWED = frozenset(
    {"reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min"}
)
SCATTERS = frozenset(
    {"scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max"}
)
# Parts of an array, or arrays of parts.
SLICES = frozenset({"slice", "dynamic_slice", "dynamic_update_slice"})
JOINS = frozenset({"concatenate", "split", "pad"})
# The same elements in the same order, under another shape; or in another order of dims.
RESHAPES = frozenset({"reshape", "squeeze", "expand_dims"})
# The operand itself, as far as its elements go.
IDENTITIES = frozenset({"copy", "name", "stop_gradient"})
# Each result is the operand of its place.
PAIRWISE = frozenset({"optimization_barrier", "device_put"})
COLLECTIVES = frozenset(
    {
        "psum", "psum2", "psum_invariant", "pmax", "pmin", "pbroadcast", "all_gather",
        "all_gather_invariant", "reduce_scatter", "psum_scatter", "all_to_all", "ppermute",
    }
)  # fmt: skip
# Operands and results may be of equal shape, and yet no dim of them goes through.
OPAQUE_TO_DIMS = frozenset(
    {
        "fft", "cholesky", "triangular_solve", "eigh", "lu", "qr", "svd", "schur", "hessenberg",
        "tridiagonal", "tridiagonal_solve", "householder_product", "custom_linear_solve",
        "shard_map", "pallas_call", "pure_callback", "io_callback", "ffi_call",
        "custom_partitioning", "all_gather", "all_to_all", "ppermute",
    }
)  # fmt: skip
