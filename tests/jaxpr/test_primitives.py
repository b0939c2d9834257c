"""The table of primitives has each one of JAX in a class, or this file has it without a rule."""

import importlib
import re
import sys
from collections.abc import Iterator
from types import ModuleType

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import Primitive
from jax.extend.core import primitives as public

from jaxspeed.jaxpr import dim_relations, primitives, sample_independence
from jaxspeed.jaxpr.primitives import CUDNN_ATTENTION, TWO_PASSES
from jaxspeed.jaxpr.sample_independence import Analysis
from jaxspeed.jaxpr.sample_values import SampleKind, samples

pytestmark = pytest.mark.fast

# They define primitives; `import jax` imports a part of them.
KERNELS = ("jax._src.pallas.mpmd", "jax._src.pallas.pallas_call", "jax._src.tpu_custom_call")
INSIDE = re.compile("pallas|mosaic|thunky")  # modules of what is in kernels alone
OTHERS = (
    *("jax._src." + name for name in ("buffer_callback", "compute_on", "cudnn.fusion")),
    *("jax._src." + name for name in ("custom_partitioning", "random.philox2x32")),
    *("jaxspeed.ops." + name for name in ("attention_call", "token_order", "moe.grouped_products")),
)

UNRULED = {
    "matrices": """
    cholesky_update eig geqp3 geqrf lu_pivots_to_permutation ormqr scaled_dot scaled_matmul
    scaled_matmul_wrapper symmetric_product""",
    "selections and random bits": """
    approx_top_k select_and_scatter iota_2x32_shape philox2x32 philox4x32 threefry4x32""",
    "programs that are not entered": """
    call_exported call_hi_primitive call_hi_primitive_linearized composite cudnn_fusion
    custom_jvp_call_jaxpr custom_lin linear_call remat_opt run_state xla_metadata_call""",
    "collectives that begin and end apart, and what is varying or unreduced over a mesh axis": """
    all_gather_done all_gather_reduced all_gather_reduced_start all_gather_start all_to_all_done
    all_to_all_start ppermute_done ppermute_start precv preduced psend reduce_scatter_done
    reduce_scatter_start reduced_vary_cast reduced_vary_cast_p unreduced_pmax unreduced_pmin
    unreduced_psum unreduced_reduce_scatter vary_unreduced_cast vary_unreduced_cast_p""",
    "references to arrays": """
    accum_grad_in_ref addupdate broadcast_to create_linear empty_ref free_ref freeze get new_ref
    pin swap unpin with_memory_space_constraint""",
    "layout, order, and programs of symbolic shapes": """
    after_all create_token dce_sink dim_as_value dimension_size empty empty2 from_edtype
    layout_constraint platform_index program_order relayout shape_assertion stage tie to_edtype
    unreachable xla_metadata_value""",
    "effects": """
    buffer_callback check debug_callback debug_print inspect_sharding""",
}
WITHOUT_RULE = set(" ".join(UNRULED.values()).split())
# The others are in all versions that are supported.
OF_ONE_VERSION = {"pbroadcast_dynamic", "polynomial", "program_order", "reduced_vary_cast"}
OF_ONE_VERSION |= {"reduced_vary_cast_p", "vary_unreduced_cast", "vary_unreduced_cast_p"}
# Names that are none of a primitive: of a function, and the first part of several.
NAMES_OF_OTHERS = {TWO_PASSES, CUDNN_ATTENTION}


def constants(module: ModuleType) -> Iterator[str]:
    """The names in a module's constants."""
    for key, value in vars(module).items():
        if key.isupper():
            yield from {value} if isinstance(value, str) else value


CLASSED = {*constants(primitives)} - NAMES_OF_OTHERS


@pytest.fixture(scope="module")
def of_jax() -> set[str]:
    """The primitives that a traced program may have, without those of kernels alone."""
    for name in (*KERNELS, *OTHERS):
        importlib.import_module(name)
    modules = [
        vars(module)
        for name, module in list(sys.modules.items())
        if name in KERNELS
        or (name.startswith(("jax._src.", "jaxspeed.")) and not INSIDE.search(name))
    ]
    found = (x for module in modules for x in list(module.values()))
    names = {x.name for x in found if isinstance(x, Primitive)}
    assert {x.name for x in vars(public).values() if isinstance(x, Primitive)} <= names
    return {name for name in names if not name.startswith(CUDNN_ATTENTION)}


def test_each_primitive_has_its_class_or_none(of_jax):
    unknown = of_jax - CLASSED - WITHOUT_RULE
    assert not unknown, (
        f"JAX {jax.__version__} has {sorted(unknown)}: put each into its class in "
        "jaxspeed/jaxpr/primitives.py, with the rules that its class has, or into WITHOUT_RULE here"
    )
    assert not CLASSED & WITHOUT_RULE


def test_each_name_is_one_of_jax(of_jax):
    gone = (CLASSED | WITHOUT_RULE) - of_jax - OF_ONE_VERSION
    assert not gone, (
        f"JAX {jax.__version__} has no {sorted(gone)}: if no supported version has it, delete it "
        "from jaxspeed/jaxpr/primitives.py and here; else put it into OF_ONE_VERSION"
    )
    assert OF_ONE_VERSION - of_jax, "each is in both versions, or in none"


def test_what_has_a_rule_has_a_class():
    assert {*dim_relations.RULES, *sample_independence._PROGRAMS} <= CLASSED


@pytest.mark.parametrize("name", sorted(WITHOUT_RULE))
def test_without_a_rule_samples_mix(name):
    (eqn,) = jax.make_jaxpr(jax.lax.add)(*[jax.ShapeDtypeStruct((4, 3), jnp.float32)] * 2).eqns
    eqn = eqn.replace(primitive=Primitive(name))
    (found,) = Analysis((4, 4), frozenset())._equation(eqn, eqn, [samples(0)] * 2)
    assert found.kind is SampleKind.MIXED
