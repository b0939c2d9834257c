"""The table of JAX's primitives, by class, for all analyses of traced programs.

A class states a property of operations; an analysis composes its sets of classes. Samples and
tokens mix in a primitive of no class. `tests/jaxpr/test_primitives.py` holds the table against JAX.
"""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# -- with inner programs, which `traverse.bodies` lists --------------------------------------------

INLINED = ("jit", "eval_jaxpr")  # the second from jax 0.12
CHECKPOINTS = ("remat2",)
PLAIN_CALLS = (*INLINED, *CHECKPOINTS)
# Custom derivatives: an equation inserted into one pass would be missing in the other.
CUSTOM_DERIVATIVE = ("custom_jvp_call", "custom_vjp_call")
CUSTOM_BATCHING = ("custom_vmap_call",)  # a Mosaic GPU kernel is in one
# One attention of a model over a sequence axis: `ops/attention_call.py`. Passes do not enter it.
ATTENTION = "attention_call"
# The function of `ops/two_passes.py` with a derivative of its own: that of what it computes.
TWO_PASSES = "jaxspeed_attention"
CALLS = (*PLAIN_CALLS, *CUSTOM_DERIVATIVE, *CUSTOM_BATCHING, ATTENTION)
LOOPS = ("scan", "while")
CONTROL = (*LOOPS, "cond")
ENTERED = (*PLAIN_CALLS, *CONTROL)
MANUAL_REGION = "shard_map"
LINEAR_SOLVE = "custom_linear_solve"

# -- computation -----------------------------------------------------------------------------------

# Of Pallas; Mosaic GPU's are of the second name.
PALLAS = ("pallas_call", "mpmd_map")
KERNELS = (*PALLAS, "tpu_custom_call")
CUDNN_ATTENTION = "dot_product_attention"  # prefix of the names of its passes
PRODUCTS = _names("dot_general conv_general_dilated")
# Of rows sorted by expert with the experts' weights: `ops/moe/grouped_products.py`. The second is
# the gradient of the first one's weights; a traced loss has the first alone.
GROUPED_PRODUCT, GROUPED_GRADIENT = "grouped_product", "grouped_gradient"
GROUPED_PRODUCTS = frozenset({GROUPED_PRODUCT, GROUPED_GRADIENT})
RAGGED_PRODUCTS = GROUPED_PRODUCTS | {"ragged_dot_general"}
# One element of several, or what stands for any number of equal ones.
EXTREMA = _names("reduce_max reduce_min reduce_and reduce_or")
REDUCTIONS = EXTREMA | _names("reduce reduce_sum reduce_prod reduce_xor")
ARG_REDUCTIONS = _names("argmax argmin")
CUMULATIVE = _names("cumsum cumprod cummax cummin cumlogsumexp")
WINDOW_REDUCTIONS = _names("reduce_window reduce_window_sum reduce_window_max reduce_window_min")
WINDOW_SELECTIONS = _names("select_and_scatter_add select_and_gather_add")  # derivatives of maxima
ADDS_INTO = "scatter-add"
SCATTERS = _names("scatter scatter-sub scatter-mul scatter-min scatter-max") | {ADDS_INTO}
# Each element of the result is computed from the operands' elements at the same index.
ADDITIONS = _names("add add_any sub")
COMPARISONS = _names("eq ne lt le gt ge")
ELEMENTWISE = (
    ADDITIONS
    | COMPARISONS
    | _names(
        """abs acos acosh and asin asinh atan atan2 atanh cbrt ceil clamp convert_element_type copy
        cos cosh digamma div erf erf_inv erfc exp exp2 expm1 floor integer_pow is_finite lgamma log
        log1p log2 logistic max min mul neg nextafter not one_minus_square or pow reduce_precision
        rem round rsqrt select_n sign sin sinh sqrt square stop_gradient tan tanh xor"""
    )
)
# Also element-wise; passes and kernels do not meet them.
MORE_ELEMENTWISE = _names(
    """bessel_i0e bessel_i1e bitcast_convert_type clz complex conj eq_to igamma igamma_grad_a
    igammac imag le_to lt_to mulhi polygamma polynomial population_count real
    regularized_incomplete_beta shift_left shift_right_arithmetic shift_right_logical zeros_like
    zeta"""
)
RANDOM_BITS = _names("random_bits threefry2x32 rng_bit_generator")
RANDOM = RANDOM_BITS | {"rng_uniform", "random_gamma"}
# Of random keys; the leading dims are those of keys and seeds.
KEYS = _names("random_split random_fold_in random_seed random_wrap random_unwrap random_clone")
# Of the matrices in the last two dims, for each index of the others.
OF_MATRICES = _names("cholesky triangular_solve lu qr eigh svd")

# -- data movement ---------------------------------------------------------------------------------

# Subarrays, and arrays assembled from several.
SLICES = _names("slice dynamic_slice dynamic_update_slice")
JOINS = _names("concatenate split pad")
# The same elements in the same order, under another shape.
RESHAPES = _names("reshape squeeze")
LAYOUTS = _names("transpose broadcast_in_dim rev stack unstack")
# A dim of tokens in another order: `ops/token_order.py`.
TOKEN_ORDER = "token_order"
# The elements of the operand, unchanged.
IDENTITIES = _names("copy name stop_gradient")
CASTS = _names("convert_element_type copy")
# Result i is operand i.
PAIRWISE = _names("optimization_barrier device_put")
CONSTRAINT = "sharding_constraint"
# The same elements, in another dtype or place.
SAME = CASTS | {"reduce_precision", "name", CONSTRAINT, "reshard"}
# Each is like no other: analyses name it.
SINGLE = _names("compute_on gather iota sort tile top_k")

# -- collectives, in a region that is manual over mesh axes ----------------------------------------

COLLECTIVES = {
    **dict.fromkeys(("psum", "psum_invariant", "pmax", "pmin", "pbroadcast"), "all-reduce"),
    **dict.fromkeys(("all_gather", "all_gather_invariant"), "all-gather"),
    "reduce_scatter": "reduce-scatter",
    **dict.fromkeys(("all_to_all", "ragged_all_to_all"), "all-to-all"),
    "ppermute": "collective-permute",
}
# What communicates nothing.
PLACES = _names("axis_index pvary")
# Of elements at the same index on each device: the all-reduces, in parts too.
IN_PLACE = _names(
    """psum psum_done psum_invariant psum_invariant_start pmax pmin pbroadcast pbroadcast_dynamic
    pvary"""
)

# -- algebra ---------------------------------------------------------------------------------------

MULTIPLICATIONS = PRODUCTS | {"mul"}
SUMS = _names("reduce_sum dot_general")
# f(c x, c y) = c f(x, y) for c > 0, or does not depend on c.
_MOVES = LAYOUTS | (SCATTERS - {"scatter-mul"}) | SLICES | JOINS | RESHAPES
HOMOGENEOUS = (SAME | ADDITIONS | COMPARISONS | _MOVES) | _names(
    """gather neg abs max min select_n clamp real imag sign sort reduce_max reduce_min cumsum cummax
    cummin reduce_window_sum"""
)
# Linear in all operands together; of others `sample_rules.is_linear` decides by operand.
LINEAR = (SAME | RESHAPES) | _names(
    """neg real imag reduce_sum cumsum transpose broadcast_in_dim rev slice split unstack psum
    psum_invariant"""
)

# -- opaque to dim propagation ---------------------------------------------------------------------

# No dim is propagated, even between operands and results of equal shape.
OPAQUE_TO_DIMS = (OF_MATRICES | {MANUAL_REGION, *PALLAS, LINEAR_SOLVE}) | _names(
    """fft schur hessenberg tridiagonal tridiagonal_solve householder_product pure_callback
    io_callback ffi_call custom_partitioning all_gather all_to_all ppermute"""
)
