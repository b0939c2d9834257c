"""Matrices are computed by owners: the same numbers, at most a device's share of the work."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspeed.config import load_config
from jaxspeed.engine.oom_help import _otherwise as otherwise
from jaxspeed.engine.oom_help import stored_bytes
from jaxspeed.hlo import collectives
from jaxspeed.hlo.cost import cost
from jaxspeed.optim.muon import orthogonalize
from jaxspeed.optim.owners import by_owners, matrices_asked
from jaxspeed.placement import Leaf
from jaxspeed.placement.matrices import view_of
from jaxspeed.placement.mesh import build_mesh
from jaxspeed.placement.owned import Matrices
from jaxspeed.placement.paths import flat_with_paths
from jaxspeed.placement.table import build_table
from jaxspeed.planner.plan import Plan
from jaxspeed.train.build import build_program
from jaxspeed.train_state.state import native_tree
from jaxspeed.user_models.config_model import resolve_model
from tests.engine import tiny
from tests.system.measured import without

SIZES = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 16}
LLAMA = {**SIZES, "num_key_value_heads": 1, "intermediate_size": 20}
MIXTURE = {**LLAMA, "num_experts": 4, "num_experts_per_tok": 2}
MOMENTUM, RATE = 0.95, 0.02


def program(family, stage, mesh, **sections):
    """The program of a small model with Muon, without arrays."""
    optimizer = {"type": "Muon", "params": {"lr": RATE, "ns_method": "standard"}}
    settings = {**tiny.config(stage), "optimizer": optimizer, "mesh": mesh, **sections}
    if family is tiny.Listed:
        return build_program(load_config(settings), tiny.Listed, tiny.squared_error)
    sizes = MIXTURE if "mix" in family else LLAMA
    settings = {"model": {"family": family, "config": sizes}, **settings}
    settings |= {"data": {"source": "synthetic", "seq_len": 8}}
    config = load_config(settings)
    return build_program(config, *resolve_model(config))


def orthogonal(matrix):
    """Five quintic Newton-Schulz iterations, in numpy."""
    x = matrix / (np.linalg.norm(matrix) + 1e-7)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x - 4.7750 * square @ x + 2.0315 * square @ square @ x
    return x


def expected(row, gradients):
    """Muon's update of one leaf after these gradients, matrix by matrix."""
    names = row.leaf.names
    stack = sum(name in ("layers", "stages", "experts") for name in names)
    inner = row.leaf.shape[stack:]
    inputs = np.prod(inner[: 2 if "head_dim" in names[stack:-1] and names[-1] == "embed" else 1])
    average = nesterov = 0
    for gradient in gradients:
        average = MOMENTUM * average + (1 - MOMENTUM) * gradient
        nesterov = MOMENTUM * average + (1 - MOMENTUM) * gradient
    matrices = nesterov.reshape(-1, inputs, np.prod(inner) // inputs)
    scale = max(1, matrices.shape[2] / inputs) ** 0.5
    return -RATE * scale * np.stack([orthogonal(x) for x in matrices]).reshape(row.leaf.shape)


CASES = [
    ("llama", 3, {"data": 8}),
    ("llama", 1, {"data": 4, "tensor": 2}),
    ("llama", 0, {"data": 2, "seq": 2, "tensor": 2}),
    ("llama", 2, {"pipe": 2, "data": 4}),
    ("llama", 1, {"pipe": 2, "data": 2, "tensor": 2}),
    ("llama", 3, {"replica": 2, "data": 4}),
    ("mixtral", 1, {"data": 4, "expert": 2}),
    ("mixtral", 3, {"data": 2, "expert": 2, "tensor": 2}),
    ("mixtral", 0, {"data": 8}),
    (tiny.Listed, 2, {"data": 8}),
    (tiny.Listed, 0, {"replica": 2, "data": 4}),
]


def name(case):
    family, stage, mesh = case
    axes = "-".join(f"{axis}{size}" for axis, size in mesh.items())
    return f"{family if isinstance(family, str) else 'listed'}-{stage}-{axes}"


TYPES = {
    "Muon": {"lr": RATE, "ns_method": "standard"},
    "NorMuon": {"lr": RATE},
    "SOAP": {"lr": RATE, "precondition_frequency": 2, "max_precond_dim": 18},
}


def trained(made, gradients, owned):
    """(the updates by path, the state by parameter) after these gradients, in fp64."""
    table, transform = made.table, made.optimizer.transform
    layout = made.layout if owned else made.layout.over(replace(table, owned=()))

    def update(grads, state, params):
        given = {"placements": table} if owned else {}
        return transform.update(grads, state, params, **given)

    def tree(flat):
        return native_tree(made.model, {path: jnp.asarray(x) for path, x in flat.items()})

    with jax.enable_x64(True):
        params = tree({path: np.zeros(x.shape) for path, x in gradients[0].items()})
        state = jax.tree.map(
            lambda x: x.astype(jnp.float64) if x.dtype == jnp.float32 else x,
            jax.jit(transform.init)(params),
        )
        if owned:
            for group in layout.packed:
                flat = flat_with_paths(state)
                flat |= jax.jit(group.pack)(flat)
                state = jax.tree.unflatten(layout.tree, flat.values())
        steps = tree({path: np.stack([flat[path] for flat in gradients]) for path in gradients[0]})

        def step(carry, grads):
            updates, state = update(grads, carry[1], params)
            return (updates, state), None

        (updates, state), _ = jax.jit(lambda *args: jax.lax.scan(step, *args))(
            (params, state), steps
        )
        state = flat_with_paths(state)
        for group in layout.packed:
            state |= jax.jit(group.unpack)(state[group.first])
    return flat_with_paths(updates), state


def gradients_of(made, steps):
    rng = np.random.default_rng(0)
    rows = [row for row in made.table if row.leaf.trainable]
    return [{row.path: rng.normal(size=row.leaf.shape) for row in rows} for _ in range(steps)]


@pytest.mark.default_cases("llama-1-pipe2-data2-tensor2", "mixtral-1-data4-expert2")
@pytest.mark.parametrize("case", CASES, ids=name)
def test_muons_updates_equal_those_of_numpy(case):
    made = program(*case)
    gradients = gradients_of(made, 2)
    updates, _ = trained(made, gradients, owned=True)
    paths = [path for stack in made.table.owned for path in stack.paths]
    matrices = {"kernel", "w_up", "w_gate", "w_down"}
    assert sorted(paths) == sorted(
        path for path in updates if path.split("/")[-1] in matrices and "head" not in path
    )
    for path in paths:
        want = expected(made.table[path], [flat[path] for flat in gradients])
        np.testing.assert_allclose(updates[path], want, atol=1e-9, err_msg=path)


@pytest.mark.default_cases("NorMuon-mixtral-1-data4-expert2")
@pytest.mark.parametrize("case", CASES, ids=name)
@pytest.mark.parametrize("type_", ["NorMuon", "SOAP"])
def test_updates_and_states_equal_those_of_one_device(type_, case):
    made = program(*case, optimizer={"type": type_, "params": TYPES[type_]})
    assert made.table.owned and made.layout.packed
    gradients = gradients_of(made, 4)
    (ours, after), (plain, state) = (trained(made, gradients, owned) for owned in (True, False))
    for path, want in plain.items():
        np.testing.assert_allclose(ours[path], want, atol=1e-9, err_msg=path)
    for path, want in state.items():
        np.testing.assert_allclose(after[path], want, rtol=1e-6, atol=1e-9, err_msg=path)


def test_tables_and_plans_show_who_computes_matrices_and_what_is_sent():
    made = program(tiny.Listed, 2, {"data": 8})
    for shown in (made.table, Plan(made, None, None)):
        words = " ".join(str(shown).split())  # a plan is narrow: its cells are wrapped
        assert "3 of 16x16 blocks/0/linear" in words and "1 1.02 kB 1.02 kB" in words


@pytest.mark.sampled
def test_another_stage_is_said_to_free_what_it_does():
    tables = {}
    for stage in (1, 3):
        optimizer = {"type": "SOAP", "params": TYPES["SOAP"]}
        built = program("llama", stage, {"data": 8}, optimizer=optimizer)
        tables[stage] = built.table
        for other, table in tables.items():
            assert stored_bytes(otherwise(built, stage=other)) == stored_bytes(table)


def test_a_function_without_placements_asks_for_no_owners():
    x = jnp.ones((4, 4))
    with matrices_asked() as asked:
        by_owners(lambda view, arrays: arrays, {"w": view_of(x.shape, 0, 1)}, {"w": {"update": x}})
    assert not asked


def newton_schulz_flops(rows, columns):
    """Of five iterations of the standard form."""
    small, large = sorted((rows, columns))
    return 5 * (2 * small**2 * large + 2 * small**3 + 2 * small**2 * large)


@pytest.mark.parametrize("mesh", [{"data": 8}, {"data": 4, "tensor": 2}], ids=["data", "tensor"])
def test_a_device_computes_and_sends_its_share(mesh):
    shapes = {f"layers/{i}/up/kernel": (64, 128) for i in range(9)}
    shapes |= {f"layers/{i}/down/kernel": (128, 64) for i in range(9)}
    shapes |= {"stack/kernel": (3, 64, 64), "lone/kernel": (48, 64)}
    names = {2: ("embed", "mlp"), 3: ("layers", "embed", "mlp")}
    leaves = [Leaf(path, shape, jnp.float32, names[len(shape)]) for path, shape in shapes.items()]
    made = build_mesh(mesh, jax.devices())
    table = build_table(leaves, made, stage=3)
    views = {leaf.path: view_of(leaf.shape, leaf.stacked, None) for leaf in leaves}
    table = table.with_owners(
        [{path: Matrices(view, frozenset(), jnp.float32) for path, view in views.items()}]
    )

    def update(arrays):
        arrays = {path: {"update": x} for path, x in arrays.items()}
        return by_owners(
            lambda view, x: {"update": orthogonalize(x["update"], "standard")}, views, arrays, table
        )

    at = {leaf.path: table.sharding(table[leaf.path].opt) for leaf in leaves}
    args = {
        p: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=at[p]) for p, shape in shapes.items()
    }
    text = jax.jit(update).lower(args).compile().as_text()
    counts = {(64, 128): 18, (64, 64): 3, (48, 64): 1}
    share = {shape: -(-count // 8) for shape, count in counts.items()}
    flops = sum(n * newton_schulz_flops(*shape) for shape, n in share.items())
    assert cost(text).flops == flops
    sent = {"all-to-all": 0, "all-gather": 0}
    for c in collectives(text, made):
        sent[c.kind] += c.payload
    several = sum(4 * 64 * shape[1] * 8 * share[shape] for shape in list(counts)[:2])
    assert sent == {"all-to-all": 2 * several // 8, "all-gather": 4 * 48 * 64}


def test_a_save_moves_states_of_owners_by_all_to_alls():
    params = {**TYPES["SOAP"], "max_precond_dim": 16}
    sizes = {**MIXTURE, "hidden_size": 16, "intermediate_size": 32}
    model = {"model": {"family": "mixtral", "config": sizes}}
    mesh = {"data": 2, "expert": 2, "tensor": 2}
    made = program("mixtral", 1, mesh, optimizer={"type": "SOAP", "params": params}, **model)
    groups = [group for group in made.layout.packed if "w_gate" in group.first]

    def kinds():
        found = set()
        for group in groups:
            leaves = {p: made.layout.by_parameter[p] for p in group.paths.values()}
            at = {
                path: made.table.sharding(group.saved(path, leaf).placement)
                for path, leaf in leaves.items()
            }
            stack = made.layout.values[group.first].arrays
            compiled = jax.jit(group.unpack, out_shardings=at).lower(stack).compile()
            found |= {c.kind for c in collectives(compiled.as_text(), made.mesh)}
        return found

    assert kinds() == {"all-to-all"}
    with without("packed"):
        assert kinds() != {"all-to-all"}
