"""Which parameters a config quantizes, and by which codec; nothing is compiled."""

import numpy as np
import pytest

from jaxspeed.config import load_config
from jaxspeed.config.explain import explain_config
from jaxspeed.errors import ConfigError
from jaxspeed.placement import Leaf
from jaxspeed.quantization.choose_codecs import codec_rules
from jaxspeed.quantization.codecs import FourBit, RowInt8

pytestmark = pytest.mark.fast

LAYERS = ("layers", 4)


def leaf(path, *dims, trainable=False, **more):
    """Dims are sizes, or (name, size)."""
    pairs = [dim if isinstance(dim, tuple) else (None, dim) for dim in dims]
    names, shape = zip(*pairs, strict=True)
    return Leaf(path, shape, np.dtype("float32"), names, trainable, **more)


LEAVES = [
    leaf("embed/table", ("vocab", 100), ("embed", 64)),
    leaf("blocks/q/kernel", LAYERS, ("embed", 64), ("heads", 2), ("head_dim", 32)),
    leaf("blocks/o/kernel", LAYERS, ("heads", 2), ("head_dim", 32), ("embed", 64)),
    leaf("blocks/q/bias", LAYERS, ("heads", 2), ("head_dim", 32)),
    leaf("blocks/experts/up", LAYERS, ("experts", 8), ("embed", 64), ("mlp", 96)),
    leaf("blocks/norm/scale", LAYERS, ("embed", 64)),
    leaf("blocks/q_norm/gain", LAYERS, ("heads", 2), ("head_dim", 32)),
    leaf("encoder/query/kernel", 64, 2, 32),
    leaf("encoder/out/kernel", 2, 32, 64),
    leaf("encoder/up/kernel", 64, 128),
    leaf("Conv_0/kernel", 3, 64, 64),
    leaf("lm_head/kernel", 64, 100),
    leaf("unembed", 64, 100),
    leaf("top/kernel", 64, 64, trainable=True),
]


def quantized(leaves=LEAVES, **section):
    config = load_config({"model": {"quantize": section}})
    return {rule.pattern: rule.codec for rule in codec_rules(config.quantize, leaves)}


def test_linear_layers_are_quantized_by_the_dims_that_their_products_contract():
    found = quantized()
    assert found == {
        "blocks/q/kernel": FourBit(1, 2),
        "blocks/o/kernel": FourBit(2, 1),
        "blocks/experts/up": FourBit(1, 1),
        "encoder/query/kernel": FourBit(1, 2),
        "encoder/out/kernel": FourBit(2, 1),
        "encoder/up/kernel": FourBit(1, 1),
    }


@pytest.mark.parametrize(
    ("section", "codec"),
    [
        ({"weights": "fp4"}, FourBit(values="fp4")),
        ({"weights": "int8"}, RowInt8()),
        ({"block": 128}, FourBit(block=128)),
        ({"double": False}, FourBit(double=False)),
    ],
    ids=["weights", "int8", "block", "double"],
)
def test_the_codec_is_that_of_the_keys(section, codec):
    assert quantized(**section)["encoder/up/kernel"] == codec


def test_modules_name_what_is_quantized():
    assert set(quantized(modules=["encoder/up", "lm_head"])) == {
        "encoder/up/kernel",
        "lm_head/kernel",
    }
    with pytest.raises(ConfigError, match=r"'embed' covers no weight of a linear layer"):
        quantized(modules=["embed"])
    with pytest.raises(ConfigError, match=r"top/kernel are trained"):
        quantized(modules=["top"])


def test_ranges_of_layers_have_their_own_rule():
    from jaxspeed.placement.codec import codec_of
    from jaxspeed.placement.rows import LayerRange

    ranges = [
        leaf(
            f"blocks/up/kernel/[{a}:{b}]",
            ("layers", b - a),
            64,
            64,
            trainable=on,
            range=LayerRange("blocks/up/kernel", a, b, f"blocks/{a}/up/kernel"),
        )
        for a, b, on in ((0, 3, False), (3, 4, True))
    ]
    config = load_config({"model": {"quantize": {}}})
    rules = codec_rules(config.quantize, ranges)
    assert codec_of(rules, "param", ranges[0].path) == FourBit()
    assert codec_of(rules, "param", ranges[1].path) != FourBit()


def test_a_section_that_names_no_model_goes_with_one_that_is_passed():
    config = load_config({"model": {"quantize": {"weights": "nf4"}}})
    assert config.model is None and config.quantize.weights == "nf4"
    assert load_config(config, ["train_batch_size=8"]).quantize.weights == "nf4"
    given = load_config({"model": {"family": "gpt2", "quantize": {}}})
    assert given.model.family == "gpt2" and given.quantize.double
    assert load_config({}).quantize is None
    deepspeed = {"zero_optimization": {"zero_quantized_nontrainable_weights": True}}
    assert load_config(deepspeed).quantize.weights == "int8"
    (row,) = [r for r in explain_config(deepspeed) if r.key.endswith("nontrainable_weights")]
    assert row.verdict == "approximated"
