"""Primitives by class, named as they are in a jaxpr.

A class holds what the operations are, not what a reader makes of them: readers compose their own
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
PRODUCTS = ("dot_general", "conv_general_dilated")
REDUCTIONS = (
    "reduce", "reduce_sum", "reduce_prod", "reduce_max", "reduce_min", "reduce_and", "reduce_or",
    "reduce_xor",
)  # fmt: skip
ARG_REDUCTIONS = ("argmax", "argmin")
CUMULATIVE = ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
WINDOWED = ("reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min")
SCATTERS = ("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max")
# Each element of the result is made of the operands' elements at its own index.
ELEMENTWISE = frozenset(
    """abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp
    convert_element_type copy copy_p cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor
    ge gt integer_pow is_finite le lgamma log log1p logistic lt max min mul ne neg nextafter not or
    pow reduce_precision rem round rsqrt select_n sign sin sinh sqrt square stop_gradient sub tan
    tanh xor""".split()  # noqa: SIM905
)
RANDOM_BITS = ("random_bits", "threefry2x32", "rng_bit_generator")
RANDOM = (*RANDOM_BITS, "rng_uniform", "random_gamma")

# -- what only moves -------------------------------------------------------------------------------

RESHAPES = ("reshape", "squeeze", "expand_dims")  # the same elements in the same order
SLICES = ("slice", "dynamic_slice", "dynamic_update_slice")
CASTS = ("convert_element_type", "copy")
IDENTITIES = ("name", "copy", "stop_gradient")  # the operand, as it is
PAIRWISE = ("optimization_barrier", "device_put")  # each result is the operand of its place
CONSTRAINT = "sharding_constraint"

# -- what devices send each other, in a region that is manual over mesh axes -----------------------

ALL_REDUCES = ("psum", "psum2", "psum_invariant", "pmax", "pmin", "pbroadcast")
ALL_GATHERS = ("all_gather", "all_gather_invariant")
REDUCE_SCATTERS = ("reduce_scatter", "psum_scatter")
COLLECTIVES = (*ALL_REDUCES, *ALL_GATHERS, *REDUCE_SCATTERS, "all_to_all", "ppermute")

# -- what no dim goes through, though operands and results may be of equal shape -------------------

OPAQUE_TO_DIMS = frozenset(
    {
        "fft", "cholesky", "triangular_solve", "eigh", "lu", "qr", "svd", "schur", "hessenberg",
        "tridiagonal", "tridiagonal_solve", "householder_product", "custom_linear_solve",
        "shard_map", "pallas_call", "pure_callback", "io_callback", "ffi_call",
        "custom_partitioning", "all_gather", "all_to_all", "ppermute",
    }
)  # fmt: skip
