"""Each family computes the formula of its paper."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxspeed import models
from tests.models import reference

TOKENS = np.random.default_rng(0).integers(0, 256, (2, 17))


def make(family, preset="tiny", seed=0, **overrides):
    """(built, model) with weights five times the published spread, so that every part matters."""
    built = models.build(family, preset, overrides)
    model = built.factory(nnx.Rngs(seed))
    state = nnx.state(model, nnx.Param)
    rng = np.random.default_rng(seed)
    noise = jax.tree.map(lambda x: x + 0.1 * rng.normal(size=x.shape).astype(x.dtype), state)
    nnx.update(model, noise)
    return built, model


def close(found, wanted, tolerance):
    found = np.asarray(found, np.float64)
    assert np.linalg.norm(found - wanted) <= tolerance * np.linalg.norm(wanted)


@pytest.mark.default_cases("llama-llama_logits")
@pytest.mark.parametrize(
    ("family", "logits"),
    [("gpt2", reference.gpt2_logits), ("llama", reference.llama_logits)],
)
def test_logits_equal_numpy_in_fp64(family, logits):
    _, model = make(family)
    found = jax.jit(lambda m, t: m(t))(model, TOKENS)
    for row in range(2):
        close(found[row], logits(model, TOKENS[row]), 1e-6)


@pytest.mark.default_cases("llama")
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_the_loss_is_the_mean_log_likelihood_of_the_next_token(family):
    built, model = make(family, vocab_chunk=100)
    total, weight = built.loss(model, {"tokens": TOKENS})
    logits = np.asarray(model(TOKENS[:, :-1]), np.float64)
    likelihood = np.take_along_axis(reference.softmax(logits), TOKENS[:, 1:, None], -1)
    assert weight == 32
    assert float(total) == pytest.approx(-np.log(likelihood).sum(), rel=1e-6)


def test_vit_equals_numpy_in_fp64():
    _, model = make("vit")
    p, eps = reference.parameters(model), model.config.layer_norm_eps
    image = np.random.default_rng(1).normal(size=(32, 32, 3)).astype(np.float32)
    patches = [
        image[8 * i : 8 * i + 8, 8 * j : 8 * j + 8].reshape(-1) for i in range(4) for j in range(4)
    ]
    x = np.stack(patches) @ p["patches/kernel"] + p["patches/bias"]
    x = np.concatenate([p["class_token"][None], x]) + p["positions"]
    erf = np.vectorize(__import__("math").erf)
    for w in reference.layers(p):
        h = reference.layer_norm(x, w["attn_norm/scale"], w["attn_norm/bias"], eps)
        q, k, v = (
            np.einsum("se,ehd->shd", h, w[f"attn/{n}_proj/kernel"]) + w[f"attn/{n}_proj/bias"]
            for n in "qkv"
        )
        shares = reference.softmax(np.einsum("ihd,jhd->hij", q, k) / 4)  # sqrt of head_dim 16
        out = np.einsum("hij,jhd->ihd", shares, v)
        x = x + np.einsum("shd,hde->se", out, w["attn/o_proj/kernel"]) + w["attn/o_proj/bias"]
        h = reference.layer_norm(x, w["mlp_norm/scale"], w["mlp_norm/bias"], eps)
        up = h @ w["mlp/up/kernel"] + w["mlp/up/bias"]
        up = up * (1 + erf(up / np.sqrt(2))) / 2
        x = x + up @ w["mlp/down/kernel"] + w["mlp/down/bias"]
    x = reference.layer_norm(x, p["norm/scale"], p["norm/bias"], eps)
    close(model(image[None])[0], x[0] @ p["head/kernel"] + p["head/bias"], 1e-6)


def test_mlp_equals_numpy_and_takes_classes_or_real_targets():
    built, model = make("mlp")
    p = reference.parameters(model)
    x = np.random.default_rng(2).normal(size=(5, 16)).astype(np.float32)
    h = np.maximum(x @ p["input/kernel"] + p["input/bias"], 0)
    for w in reference.layers(p):
        h = h + np.maximum(h @ w["linear/kernel"] + w["linear/bias"], 0)
    wanted = h @ p["head/kernel"] + p["head/bias"]
    close(model(x), wanted, 1e-6)

    labels = np.array([0, 1, 2, 3, 0])
    total, weight = built.loss(model, {"x": x, "y": labels})
    shares = reference.softmax(wanted)[np.arange(5), labels]
    assert weight == 5
    assert float(total) == pytest.approx(-np.log(shares).sum(), rel=1e-5)
    total, weight = built.loss(model, {"x": x, "y": np.zeros((5, 4), np.float32)})
    assert weight == 5
    assert float(total) == pytest.approx((wanted**2).mean(-1).sum(), rel=1e-5)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_token_changes_nothing_before_it(family):
    _, model = make(family)
    changed = TOKENS.copy()
    changed[:, 9] = (changed[:, 9] + 1) % 256
    one, other = np.asarray(model(TOKENS)), np.asarray(model(changed))
    np.testing.assert_array_equal(one[:, :9], other[:, :9])
    assert np.all(np.abs(one[:, 9:] - other[:, 9:]).max(-1) > 0)


@pytest.mark.parametrize("family", [pytest.param("gpt2", marks=pytest.mark.full), "llama"])
def test_packed_documents_give_the_losses_of_each_alone(family):
    built, model = make(family)
    first, second = TOKENS[:1, :9], TOKENS[1:, :8]
    packed = {
        "tokens": np.concatenate([first, second], axis=1),
        "segment_ids": np.repeat([[1, 2]], [9, 8], axis=1),
        "positions": np.concatenate([np.arange(9), np.arange(8)])[None],
    }
    loss = jax.jit(built.loss)
    total, weight = loss(model, packed)
    alone = [loss(model, {"tokens": t}) for t in (first, second)]
    assert weight == 8 + 7
    assert float(total) == pytest.approx(sum(float(t) for t, _ in alone), rel=1e-5)


def test_a_classifier_scores_the_last_token_before_padding_or_of_the_mask():
    built, model = make("llama_classifier")
    tokens = np.maximum(TOKENS, 1)
    padded, lengths = tokens.copy(), np.array([[9], [17]])
    padded[np.arange(17) >= lengths] = 0
    scores = np.asarray(model(padded), np.float64)
    close(scores[0], np.asarray(model(tokens[:1, :9]), np.float64)[0], 1e-6)
    np.testing.assert_array_equal(model(tokens, mask=np.arange(17) < lengths), scores)
    labels = np.array([2, -100])
    total, weight = built.loss(model, {"tokens": padded, "labels": labels})
    assert weight == 1
    assert float(total) == pytest.approx(-np.log(reference.softmax(scores)[0, 2]), rel=1e-5)
    *_, found = built.loss(model, {"tokens": padded, "labels": scores.argmax(-1)}, train=False)
    assert found["accuracy"] == 1
    real = np.ones((2, 3), np.float32)
    total, weight = built.loss(model, {"tokens": padded, "labels": real})
    assert weight == 2
    assert float(total) == pytest.approx(((scores - 1) ** 2).mean(-1).sum(), rel=1e-5)


def test_padding_changes_nothing_in_bert():
    built, model = make("bert")
    mask = np.arange(17) < [[9], [17]]
    padded = np.where(mask, TOKENS, 0)
    alone, seen = model(TOKENS[:1, :9]), model(padded, mask=mask)
    close(seen[0, :9], np.asarray(alone, np.float64)[0], 1e-6)
    labels = np.where(mask & (np.arange(17) % 4 == 0), TOKENS, -100)
    total, weight = built.loss(model, {"tokens": padded, "mask": mask, "labels": labels})
    assert weight == 3 + 5
    likelihood = np.log(reference.softmax(np.asarray(seen, np.float64)))
    wanted = -np.take_along_axis(likelihood, TOKENS[..., None], -1)[..., 0][labels >= 0].sum()
    assert float(total) == pytest.approx(wanted, rel=1e-5)


def test_a_reward_models_loss_is_the_squared_error_of_its_score():
    built, model = make("llama_classifier", "tiny-reward")
    rewards = np.array([0.5, -2.0], np.float32)
    scores = np.asarray(model(TOKENS), np.float64)[:, 0]
    total, weight = built.loss(model, {"tokens": TOKENS, "labels": rewards})
    assert weight == 2
    assert float(total) == pytest.approx(((scores - rewards) ** 2).sum(), rel=1e-5)


def test_masked_and_given_targets_are_what_counts():
    built, model = make("gpt2")
    mask = np.zeros((2, 17), int)
    mask[0, 3] = 1  # token 3 counts as a target
    total, weight = built.loss(model, {"tokens": TOKENS, "mask": mask})
    targets = np.full((2, 16), -100)
    targets[0, 2] = TOKENS[0, 3]
    same, one = built.loss(model, {"tokens": TOKENS[:, :-1], "targets": targets})
    assert weight == one == 1
    assert float(total) == pytest.approx(float(same), rel=1e-6)


@pytest.mark.parametrize("family", [pytest.param("gpt2", marks=pytest.mark.full), "llama"])
def test_parameters_in_bf16_make_a_model_in_bf16(family):
    _, model = make(family)
    exact = np.asarray(model(TOKENS), np.float64)
    state = nnx.state(model, nnx.Param)
    nnx.update(model, jax.tree.map(lambda x: x.astype(jnp.bfloat16), state))
    assert model.hidden(TOKENS).dtype == jnp.bfloat16
    found = np.asarray(model(TOKENS), np.float64)
    # About ten roundings of 2^-9 a layer on the residual stream and the weights, two layers.
    assert np.linalg.norm(found - exact) <= 20 * 2.0**-9 * np.linalg.norm(exact)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_logits_equal_transformers(references, family):
    """The same weights in Hugging Face's code."""
    _, model = make(family)
    case, weights = hugging_face(family, model)
    wanted = references.call("families.logits_with", case=case, weights=weights, tokens=TOKENS)
    close(model(TOKENS), wanted.astype(np.float64), 1e-5)


def hugging_face(family, model):
    """(a case of references/families.py, this model's weights by the names of transformers)."""
    c, p = model.config, reference.parameters(model)
    weights = {}
    if family == "gpt2":
        fields = {
            "vocab_size": c.vocab_size,
            "n_positions": c.max_position_embeddings,
            "n_embd": c.hidden_size,
            "n_layer": c.num_hidden_layers,
            "n_head": c.num_attention_heads,
        }
        case = ("GPT2", "GPT2LMHeadModel", fields)
        weights |= {"transformer.wte.weight": p["embed/table"], "lm_head.weight": p["embed/table"]}
        weights |= {"transformer.wpe.weight": p["positions/table"]}
        weights |= {f"transformer.ln_f.{n}": p[f"norm/{m}"] for n, m in NORM}
        for i, w in enumerate(reference.layers(p)):
            at, e = f"transformer.h.{i}.", c.hidden_size
            for ours, name in (("attn_norm", "ln_1"), ("mlp_norm", "ln_2")):
                weights |= {f"{at}{name}.{n}": w[f"{ours}/{m}"] for n, m in NORM}
            qkv = [w[f"attn/{n}_proj/kernel"].reshape(e, -1) for n in "qkv"]
            biases = [w[f"attn/{n}_proj/bias"].reshape(-1) for n in "qkv"]
            weights[f"{at}attn.c_attn.weight"] = np.concatenate(qkv, axis=1)
            weights[f"{at}attn.c_attn.bias"] = np.concatenate(biases)
            weights[f"{at}attn.c_proj.weight"] = w["attn/o_proj/kernel"].reshape(-1, e)
            weights[f"{at}attn.c_proj.bias"] = w["attn/o_proj/bias"]
            for ours, name in (("up", "c_fc"), ("down", "c_proj")):
                weights[f"{at}mlp.{name}.weight"] = w[f"mlp/{ours}/kernel"]
                weights[f"{at}mlp.{name}.bias"] = w[f"mlp/{ours}/bias"]
    else:
        fields = {
            "vocab_size": c.vocab_size,
            "hidden_size": c.hidden_size,
            "intermediate_size": c.intermediate_size,
            "num_hidden_layers": c.num_hidden_layers,
            "num_attention_heads": c.num_attention_heads,
            "num_key_value_heads": c.num_key_value_heads,
            "max_position_embeddings": c.max_position_embeddings,
            "rms_norm_eps": c.rms_norm_eps,
            "rope_theta": c.rope_theta,
            "tie_word_embeddings": False,
        }
        case = ("Llama", "LlamaForCausalLM", fields)
        weights |= {
            "model.embed_tokens.weight": p["embed/table"],
            "lm_head.weight": p["head/table"],
        }
        weights |= {"model.norm.weight": p["norm/scale"]}
        for i, w in enumerate(reference.layers(p)):
            at, e = f"model.layers.{i}.", c.hidden_size
            weights[f"{at}input_layernorm.weight"] = w["attn_norm/scale"]
            weights[f"{at}post_attention_layernorm.weight"] = w["mlp_norm/scale"]
            for n in "qkv":
                kernel = w[f"attn/{n}_proj/kernel"].reshape(e, -1)
                weights[f"{at}self_attn.{n}_proj.weight"] = kernel.T
            out = w["attn/o_proj/kernel"].reshape(-1, e)
            weights[f"{at}self_attn.o_proj.weight"] = out.T
            for n in ("gate", "up", "down"):
                weights[f"{at}mlp.{n}_proj.weight"] = w[f"mlp/{n}/kernel"].T
    return case, {name: value.astype(np.float32) for name, value in weights.items()}


NORM = (("weight", "scale"), ("bias", "bias"))
