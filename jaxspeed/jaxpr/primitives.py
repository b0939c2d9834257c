"""Primitives by class, under the names that a traced program gives them.

A class says what the operations are, not what a reader makes of them: readers compose their own
sets from these.
"""

# -- what runs programs: `traverse.bodies` opens these ---------------------------------------------

INLINED = ("jit", "pjit", "closed_call", "core_call")
CHECKPOINTS = ("checkpoint", "remat2")
# Functions with a derivative of their own: what is written into one pass would miss the other.
OWN_DERIVATIVE = ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr")
CALLS = (*INLINED, *CHECKPOINTS, *OWN_DERIVATIVE)
LOOPS = ("scan", "while")
CONTROL = (*LOOPS, "cond")

# -- what computes ---------------------------------------------------------------------------------

KERNELS = ("pallas_call", "tpu_custom_call")
CUDNN_ATTENTION = "dot_product_attention"  # with these letters the names of its passes begin
PRODUCTS = frozenset({"dot_general", "conv_general_dilated"})
REDUCTIONS = frozenset(
    {
        "reduce", "reduce_sum", "reduce_prod", "reduce_max", "reduce_min",
        "reduce_and", "reduce_or", "reduce_xor",
    }
)  # fmt: skip
ARG_REDUCTIONS = frozenset({"argmax", "argmin"})
CUMULATIVE = frozenset({"cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"})
WINDOWED = frozenset(
    {"reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min"}
)
SCATTERS = frozenset(
    {"scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max"}
)
# Each element of the result is made of the operands' elements at its own index.
ELEMENTWISE = frozenset(
    """abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp
    convert_element_type copy copy_p cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor
    ge gt integer_pow is_finite le lgamma log log1p logistic lt max min mul ne neg nextafter not or
    pow reduce_precision rem round rsqrt select_n sign sin sinh sqrt square stop_gradient sub tan
    tanh xor""".split()  # noqa: SIM905
)
RANDOM_BITS = frozenset({"random_bits", "threefry2x32", "rng_bit_generator"})
RANDOM = RANDOM_BITS | {"rng_uniform", "random_gamma"}

# -- what only moves -------------------------------------------------------------------------------

# Parts of an array, or arrays of parts.
SLICES = frozenset({"slice", "dynamic_slice", "dynamic_update_slice"})
JOINS = frozenset({"concatenate", "split", "pad"})
# The same elements in the same order, under another shape.
RESHAPES = frozenset({"reshape", "squeeze", "expand_dims"})
# The operand itself, as far as its elements go.
IDENTITIES = frozenset({"copy", "name", "stop_gradient"})
CASTS = frozenset({"convert_element_type", "copy"})
# Each result is the operand of its place.
PAIRWISE = frozenset({"optimization_barrier", "device_put"})
CONSTRAINT = "sharding_constraint"

# -- what devices send each other, in a region that is manual over mesh axes -----------------------

COLLECTIVES = frozenset(
    {
        "psum", "psum2", "psum_invariant", "pmax", "pmin", "pbroadcast", "all_gather",
        "all_gather_invariant", "reduce_scatter", "psum_scatter", "all_to_all", "ppermute",
    }
)  # fmt: skip

# -- what no dim goes through ----------------------------------------------------------------------

# Operands and results may be of equal shape, and yet no dim of them goes through.
OPAQUE_TO_DIMS = frozenset(
    {
        "fft", "cholesky", "triangular_solve", "eigh", "lu", "qr", "svd", "schur", "hessenberg",
        "tridiagonal", "tridiagonal_solve", "householder_product", "custom_linear_solve",
        "shard_map", "pallas_call", "pure_callback", "io_callback", "ffi_call",
        "custom_partitioning", "all_gather", "all_to_all", "ppermute",
    }
)  # fmt: skip
