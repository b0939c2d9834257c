"""Each layout against NumPy's own transposes, in both directions, and the errors of a table."""

import numpy as np
import pytest

import jaxspeed
from jaxspeed.interop import MappingTable, TensorRule
from jaxspeed.interop.mapping import bind, check_tensors

pytestmark = pytest.mark.fast

L, E, H, D, M = 3, 8, 2, 4, 12
rng = np.random.default_rng(0)


def values(*shape):
    return rng.normal(size=shape).astype(np.float32)


def per_layer(made):
    return {f"h.{i}.w": x for i, x in enumerate(made)}


def stacked_linear():
    w = values(L, E, M)
    rule = TensorRule("h.{layer}.w", "w", "out in -> layer in out")
    return [rule], {"w": w}, per_layer([x.T for x in w])


def stacked_without_a_layout():
    w = values(L, E)
    return [TensorRule("h.{layer}.w", "w")], {"w": w}, per_layer(w)


def heads():
    w = values(L, E, H, D)
    rule = TensorRule("h.{layer}.w", "w", "(heads dim) embed -> layer embed heads dim")
    return [rule], {"w": w}, per_layer([x.reshape(E, H * D).T for x in w])


def listed():
    w = [values(E, M) for _ in range(L)]
    rule = TensorRule("h.{i}.w", "blocks/{i}/kernel", "out in -> in out")
    return [rule], {f"blocks/{i}/kernel": x for i, x in enumerate(w)}, per_layer([x.T for x in w])


def fused_equal():
    q, k, v = (values(L, E, H, D) for _ in range(3))
    rule = TensorRule("h.{i}.w", ("q", "k", "v"), "e (part h d) -> i e h d")
    made = [np.concatenate([x[i].reshape(E, H * D) for x in (q, k, v)], 1) for i in range(L)]
    return [rule], {"q": q, "k": k, "v": v}, per_layer(made)


def fused_of_other_sizes():
    q, k, v = values(L, E, 4, D), values(L, E, 2, D), values(L, E, 2, D)
    rule = TensorRule("h.{i}.w", ("q", "k", "v"), "(part h d) e -> i e h d")
    made = [np.concatenate([x[i].reshape(E, -1).T for x in (q, k, v)], 0) for i in range(L)]
    return [rule], {"q": q, "k": k, "v": v}, per_layer(made)


def interleaved():
    gate, up = values(L, E, M), values(L, E, M)
    rule = TensorRule("h.{i}.w", ("gate", "up"), "e (m part) -> i e m")
    made = np.empty((L, E, 2 * M), np.float32)
    made[..., ::2], made[..., 1::2] = gate, up
    return [rule], {"gate": gate, "up": up}, per_layer(made)


def interleaved_of_other_sizes():
    """Falcon's: of each key head its query heads, the key, the value."""
    groups, each = 2, 3
    q = values(L, E, groups * each, D)
    k, v = values(L, E, groups, D), values(L, E, groups, D)
    rule = TensorRule("h.{i}.w", ("q", "k", "v"), "(g part h d) e -> i e (g h) d", {"g": groups})
    made = np.empty((L, groups, each + 2, D, E), np.float32)
    for g in range(groups):
        made[:, g, :each] = q[:, :, g * each : (g + 1) * each].transpose(0, 2, 3, 1)
        made[:, g, each] = k[:, :, g].swapaxes(1, 2)
        made[:, g, each + 1] = v[:, :, g].swapaxes(1, 2)
    return [rule], {"q": q, "k": k, "v": v}, per_layer(made.reshape(L, -1, E))


def experts():
    w = values(L, 5, E, M)
    rule = TensorRule("h.{i}.experts.{x}.w", "w", "m e -> i x e m")
    return [rule], {"w": w}, {f"h.{i}.experts.{x}.w": w[i, x].T for i in range(L) for x in range(5)}


def layers_not_first():
    w = values(E, L, M)
    rule = TensorRule("h.{i}.w", "w", "m e -> e i m")
    return [rule], {"w": w}, per_layer([w[:, i].T for i in range(L)])


def patches():
    w = values(4 * 4 * 3, E)
    rule = TensorRule("w", "w", "embed c p q -> (p q c) embed", {"p": 4, "q": 4})
    return [rule], {"w": w}, {"w": w.reshape(4, 4, 3, E).transpose(3, 2, 0, 1)}


def dims_of_size_one():
    w = values(E)
    return [TensorRule("w", "w", "1 1 embed -> embed")], {"w": w}, {"w": w[None, None]}


CASES = [
    stacked_linear, stacked_without_a_layout, heads, listed, fused_equal, fused_of_other_sizes,
    interleaved, interleaved_of_other_sizes, experts, layers_not_first, patches, dims_of_size_one,
]  # fmt: skip


def some_blocks(shape):
    """The whole, and blocks that together are the whole: halves of each dim."""
    yield [tuple(slice(0, n) for n in shape)]
    for dim, n in enumerate(shape):
        if n > 1:
            cuts = [(0, n // 2), (n // 2, n)]
            yield [
                tuple(slice(*(cut if d == dim else (0, s))) for d, s in enumerate(shape))
                for cut in cuts
            ]


@pytest.mark.parametrize("case", CASES)
def test_a_layout_is_numpys_in_both_directions_and_by_blocks(case):
    rules, parameters, tensors = case()
    bound = bind(MappingTable(rules), {path: x.shape for path, x in parameters.items()})
    assert bound.tensors == {name: x.shape for name, x in tensors.items()}
    for path, x in parameters.items():
        for blocks in some_blocks(x.shape):
            written = {name: t.copy() for name, t in tensors.items()}
            for piece in bound.pieces[path]:
                before = written[piece.tensor].copy()
                piece.write(written[piece.tensor], blocks[0], np.full_like(x[blocks[0]], np.nan))
                inside = np.isnan(written[piece.tensor])
                assert inside.sum() <= x[blocks[0]].size
                np.testing.assert_array_equal(before[~inside], written[piece.tensor][~inside])
            for index in blocks:
                read = np.full([i.stop - i.start for i in index], np.nan, np.float32)
                for piece in bound.pieces[path]:
                    piece.read(tensors[piece.tensor], index, read)
                    piece.write(written[piece.tensor], index, x[index])
                np.testing.assert_array_equal(read, x[index])
            for name, t in tensors.items():
                np.testing.assert_array_equal(written[name], t)


def refused(rules, parameters, *words):
    with pytest.raises(jaxspeed.PretrainedError) as found:
        bind(MappingTable(rules), parameters)
    for word in words:
        assert word in str(found.value), found.value


def test_parameters_without_a_rule_are_listed_with_the_nearest():
    rules = [TensorRule("a.{i}.w", "blocks/mlp/up/kernel")]
    parameters = {"blocks/mlp/upp/kernel": (2, 3), "norm/scale": (3,)}
    refused(rules, parameters, "blocks/mlp/upp/kernel has no rule (nearest: blocks/mlp/up/kernel",
            "norm/scale has no rule")  # fmt: skip


@pytest.mark.parametrize(
    "rules, words",
    [
        ([TensorRule("a", "w"), TensorRule("b", "w")], ["w has two rules: 'a' and 'b'"]),
        ([TensorRule("a", "w"), TensorRule("a", "v")], ["tensor a has two rules"]),
        ([TensorRule("a", ("w", "x"))], ["the model has w but not x"]),
        ([TensorRule("a", "w", "a b c -> a b c")], ["has 3 dims, the parameter (2, 6)"]),
        ([TensorRule("a", "w", "a b")], ["has no '->'"]),
        ([TensorRule("a", "w", "a c -> a b")], ["two sides have different dims"]),
        ([TensorRule("a", "w", "a a -> a a")], ["a is 2 and 6"]),
        ([TensorRule("a", "w", "a b c -> a (b c)")], ["the factors (b c) of 6 are unknown"]),
        ([TensorRule("a", "w", "a b c -> a (b c)", {"b": 4})], ["the factors (b c) of 6"]),
        ([TensorRule("a", "w", "a [b] -> a b")], ["is not understood"]),
        ([TensorRule("a.{i}", "w", "a b -> a b")], ["two sides have different dims"]),
    ],
)
def test_a_table_that_does_not_fit_is_one_error(rules, words):
    refused([*rules, TensorRule("v", "v")][: 1 + len(rules)], {"w": (2, 6), "v": (3,)}, *words)


def test_parts_that_do_not_fit_together_are_refused():
    rules = [TensorRule("a", ("w", "v"), "e (part m) -> e m")]
    refused(rules, {"w": (2, 6), "v": (3, 6)}, "which do not fit together")


def test_missing_surplus_and_misshaped_tensors_come_in_one_error():
    table = MappingTable(
        [TensorRule("a.{i}.kernel", "w"), TensorRule("b", "v")], ignored=["a.{i}.mask"]
    )
    bound = bind(table, {"w": (2, 6), "v": (3,)})
    there = {"a.0.kernel": (6,), "a.1.kernl": (6,), "b": (4,), "a.1.mask": (1,)}
    with pytest.raises(jaxspeed.PretrainedError) as found:
        check_tensors(bound, there, "here")
    text = str(found.value)
    assert "a.1.kernel is missing (nearest: a.1.kernl)" in text
    assert "a.1.kernl [6] is left over (nearest: a.1.kernel)" in text
    assert "b has shape [4], expected [3]" in text
    assert "mask" not in text


def test_a_prefix_may_be_absent():
    table = MappingTable([TensorRule("m.a", "w"), TensorRule("head", "v")], ["m.b"], prefix="m.")
    bound = bind(table, {"w": (2,), "v": (2,)})
    assert check_tensors(bound, {"m.a": (2,), "head": (2,)}, "")["m.a"] == "m.a"
    assert check_tensors(bound, {"a": (2,), "b": (2,), "head": (2,)}, "")["m.a"] == "a"
