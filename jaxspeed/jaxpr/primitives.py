"""Names of JAX primitives, by class.

A class states a property of the operations; consumers compose their sets from the classes.
"""

# -- with inner programs, which `traverse.bodies` lists --------------------------------------------

INLINED = ("jit", "pjit", "closed_call", "core_call", "eval_jaxpr")  # the last from jax 0.12
CHECKPOINTS = ("checkpoint", "remat2")
# Custom derivatives: an equation inserted into one pass would be missing in the other.
CUSTOM_DERIVATIVE = ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr")
CUSTOM_BATCHING = ("custom_vmap_call",)  # a Mosaic GPU kernel is in one
# One attention of a model over a sequence axis: `ops/attention_call.py`. Passes do not enter it.
ATTENTION = "attention_call"
# The function of `ops/two_passes.py` with a derivative of its own: that of what it computes.
TWO_PASSES = "jaxspeed_attention"
CALLS = (*INLINED, *CHECKPOINTS, *CUSTOM_DERIVATIVE, *CUSTOM_BATCHING, ATTENTION)
LOOPS = ("scan", "while")
CONTROL = (*LOOPS, "cond")

# -- computation -----------------------------------------------------------------------------------

# Of Pallas; Mosaic GPU's are of the second name.
PALLAS = ("pallas_call", "mpmd_map")
KERNELS = (*PALLAS, "tpu_custom_call")
CUDNN_ATTENTION = "dot_product_attention"  # prefix of the names of its passes
PRODUCTS = frozenset({"dot_general", "conv_general_dilated"})
# Of rows sorted by expert with the experts' weights: `ops/moe/grouped_products.py`. The second is
# the gradient of the first one's weights; a traced loss has the first alone.
GROUPED_PRODUCT, GROUPED_GRADIENT = "grouped_product", "grouped_gradient"
GROUPED_PRODUCTS = frozenset({GROUPED_PRODUCT, GROUPED_GRADIENT})
RAGGED_PRODUCTS = GROUPED_PRODUCTS | {"ragged_dot", "ragged_dot_general"}
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
# Each element of the result is computed from the operands' elements at the same index.
ELEMENTWISE = frozenset(
    """abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp
    convert_element_type copy copy_p cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor
    ge gt integer_pow is_finite le lgamma log log1p log2 logistic lt max min mul ne neg nextafter
    not one_minus_square or pow reduce_precision rem round rsqrt select_n sign sin sinh sqrt square
    stop_gradient sub tan tanh xor""".split()  # noqa: SIM905
)
RANDOM_BITS = frozenset({"random_bits", "threefry2x32", "rng_bit_generator"})
RANDOM = RANDOM_BITS | {"rng_uniform", "random_gamma"}

# -- data movement ---------------------------------------------------------------------------------

# Subarrays, and arrays assembled from several.
SLICES = frozenset({"slice", "dynamic_slice", "dynamic_update_slice"})
JOINS = frozenset({"concatenate", "split", "pad"})
# The same elements in the same order, under another shape.
RESHAPES = frozenset({"reshape", "squeeze", "expand_dims"})
# A dim of tokens in another order: `ops/token_order.py`.
TOKEN_ORDER = "token_order"
# The elements of the operand, unchanged.
IDENTITIES = frozenset({"copy", "name", "stop_gradient"})
CASTS = frozenset({"convert_element_type", "copy"})
# Result i is operand i.
PAIRWISE = frozenset({"optimization_barrier", "device_put"})
CONSTRAINT = "sharding_constraint"

# -- collectives, in a region that is manual over mesh axes ----------------------------------------

COLLECTIVES = frozenset(
    {
        "psum", "psum2", "psum_invariant", "pmax", "pmin", "pbroadcast", "all_gather",
        "all_gather_invariant", "reduce_scatter", "psum_scatter", "all_to_all", "ragged_all_to_all",
        "ppermute",
    }
)  # fmt: skip

# -- opaque to dim propagation ---------------------------------------------------------------------

# No dim is propagated, even between operands and results of equal shape.
OPAQUE_TO_DIMS = frozenset(
    {
        "fft", "cholesky", "triangular_solve", "eigh", "lu", "qr", "svd", "schur", "hessenberg",
        "tridiagonal", "tridiagonal_solve", "householder_product", "custom_linear_solve",
        "shard_map", *PALLAS, "pure_callback", "io_callback", "ffi_call",
        "custom_partitioning", "all_gather", "all_to_all", "ppermute",
    }
)  # fmt: skip
