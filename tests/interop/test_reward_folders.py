"""Reward models in Hugging Face's folders: from a language model's, back, and in transformers."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxspeed.models import build, from_pretrained
from safetensors.numpy import load_file

import jaxspeed
from jaxspeed.errors import ConfigError, JaxspeedError, PretrainedError
from jaxspeed.user_models.config_model import resolve_model
from tests.interop import folders

END = 7
LORA = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "down_proj"]}
TOKENS = np.array([[3, 9, 4, 5, END, 1, 2, 8], [6, 2, END, 11, 5, END, END, END]])


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A language model's folder, with an end token and no padding."""
    config = folders.LLAMA | {"eos_token_id": [END, 3], "initializer_range": 0.3}
    return folders.folder(tmp_path_factory.mktemp("base"), config, folders.llama_tensors())


def engine_of(folder, **more):
    config = {
        "model": {"pretrained": str(folder)},
        "objective": {"type": "reward"},
        "train_batch_size": 8,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "run": {"seed": 1},
        **more,
    }
    return jaxspeed.initialize(config=config)


def batch():
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, folders.VOCAB, (8, 12))
    segments = np.repeat([1, 2, 3, 4, 0], [3, 3, 2, 2, 2])[None].repeat(8, 0)
    positions = np.concatenate([*map(np.arange, (3, 3, 2, 2, 2))])[None].repeat(8, 0)
    arrays = {"tokens": tokens, "segment_ids": segments, "positions": positions}
    return {name: x.astype(np.int32) for name, x in arrays.items()}


def test_a_language_models_folder_gets_a_new_head_and_keeps_the_rest(base, tmp_path):
    engine = engine_of(base)
    tensors, found = load_file(base / "model.safetensors"), engine.parameters
    np.testing.assert_array_equal(found["embed/table"], tensors["model.embed_tokens.weight"])
    assert "head/table" not in found
    kernel = np.asarray(found["score/kernel"])
    assert kernel.shape == (folders.EMBED, 1) and 0.15 < kernel.std() < 0.5
    fresh = engine_of(base, model={"family": "llama", "config": sizes_of(base)})
    np.testing.assert_array_equal(kernel, fresh.parameters["score/kernel"])
    engine.train_batch(batch())
    engine.save_pretrained(tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["architectures"] == ["LlamaForSequenceClassification"]
    assert (written["pad_token_id"], len(written["id2label"])) == (END, 1)
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert exported.keys() == {*tensors, "score.weight"} - {"lm_head.weight"}
    again = engine_of(tmp_path / "out").parameters
    for path, x in engine.parameters.items():
        np.testing.assert_array_equal(again[path], x, err_msg=path)


def sizes_of(folder):
    config = from_pretrained(folder).config
    return {n: x for n, x in vars(config).items() if x is not None and n != "global_layers"}


def scores_of(folder, tokens):
    """The scores of a folder's classifier, in plain Flax."""
    found = from_pretrained(folder)
    engine = jaxspeed.initialize(
        model=found, config={"train_batch_size": 8, "optimizer": {"type": "SGD"}}
    )
    program = engine.program
    params = {path: jnp.asarray(np.asarray(x)) for path, x in engine.parameters.items()}
    bound = program.model.bind(params, engine.state.variables, train=False, step=0, micro=0)
    return np.asarray(bound(jnp.asarray(tokens)))


def test_transformers_pools_the_same_token_of_an_export(references, base, tmp_path):
    """Padding is the end token: of texts that end with it, the token before."""
    engine = engine_of(base)
    engine.train_batch(batch())
    engine.save_pretrained(tmp_path / "out")
    theirs = references.call("adapter_files.scores", folder=tmp_path / "out", tokens=TOKENS)
    assert abs(theirs[0, 0] - theirs[1, 0]) > 1e-2
    np.testing.assert_allclose(scores_of(tmp_path / "out", TOKENS), theirs, atol=1e-5)


def test_adapters_are_loaded_by_peft_with_their_head(references, base, tmp_path):
    engine = engine_of(base, lora=LORA)
    before = np.asarray(engine.parameters["score/kernel"])
    for _ in range(3):
        engine.train_batch(batch())
    assert np.abs(np.asarray(engine.parameters["score/kernel"]) - before).max() > 1e-3
    engine.save_adapter(tmp_path / "adapter")
    written = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (written["task_type"], written["modules_to_save"]) == ("SEQ_CLS", ["score"])
    engine.save_pretrained(tmp_path / "merged", merge=True)
    theirs = references.call(
        "adapter_files.scores", folder=base, tokens=TOKENS, adapter=tmp_path / "adapter", pad=END
    )
    np.testing.assert_allclose(scores_of(tmp_path / "merged", TOKENS), theirs, atol=1e-5)
    again = engine_of(base, lora={"adapter": str(tmp_path / "adapter")}).parameters
    for path, x in engine.parameters.items():
        np.testing.assert_allclose(again[path], x, rtol=1e-6, err_msg=path)


FAMILIES = {
    "t5": {"family": "t5"},
    "bert": {"family": "bert"},
    "vit": {"family": "vit"},
    "mlp": {"family": "mlp"},
    "granite": {"family": "granite"},
}
REFUSED = {
    **{
        name: (section, f"model: {name} has no scores of sequences in place of its head")
        for name, section in FAMILIES.items()
    },
    "labels": (
        {"family": "gpt2", "config": {"num_labels": 3}},
        "model: num_labels is 3, and 1 is needed",
    ),
    "factory": (
        {"factory": "tests.objectives.ranking:scored"},
        'objective.type: found "reward" with model.factory. A reward model is',
    ),
}


@pytest.mark.parametrize(("section", "message"), REFUSED.values(), ids=REFUSED)
def test_a_model_without_a_scalar_head_is_one_error(section, message):
    config = {"model": section, "objective": {"type": "reward"}, "train_batch_size": 8}
    with pytest.raises(JaxspeedError) as refused:
        resolve_model(jaxspeed.Config.load(config))
    assert message in str(refused.value)


def test_a_folder_with_other_labels_and_a_model_beside_the_config_are_refused(base, tmp_path):
    config = json.loads((base / "config.json").read_text())
    labels = {str(i): str(i) for i in range(4)}
    config |= {"architectures": ["LlamaForSequenceClassification"], "id2label": labels}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(PretrainedError, match="has 4 labels, and 1 are set"):
        from_pretrained(tmp_path, labels=1)
    loaded = jaxspeed.Config.load({"objective": {"type": "reward"}, "train_batch_size": 8})
    for model in (from_pretrained(base), from_pretrained(base, {"num_labels": 2}), lambda rngs: 0):
        with pytest.raises(ConfigError, match=r"from_pretrained\(FOLDER, \{\"num_labels\": 1\}\)"):
            resolve_model(loaded, model)
    model, loss = resolve_model(loaded, from_pretrained(base, {"num_labels": 1}))
    assert model.config.num_labels == 1 and loss.__self__.num_labels == 1


def test_the_padding_of_a_new_head_is_the_folders_own_or_its_end_token(base, tmp_path):
    def padding(**fields):
        (tmp_path / "config.json").write_text(json.dumps(folders.LLAMA | fields))
        return from_pretrained(tmp_path, {"num_labels": 1}).config.pad_token_id

    folders.write(tmp_path / "model.safetensors", folders.llama_tensors())
    assert padding() is None
    assert padding(eos_token_id=END) == END
    assert padding(eos_token_id=END, pad_token_id=0) == 0
    assert from_pretrained(base, {"num_labels": 1, "pad_token_id": 4}).config.pad_token_id == 4


def test_every_decoder_has_a_head_of_scores_in_place_of_its_own():
    for name in ("gpt2", "gemma", "falcon", "mixtral", "deepseek", "gpt_oss"):
        built = build(name, "tiny", labels=5)
        shapes = jax.eval_shape(lambda built=built: flat(built.factory))
        assert shapes["score/kernel"].shape == (built.config.hidden_size, 5)
        assert "head/table" not in shapes and built.objective == "classification"


def flat(factory):
    from flax import nnx

    state = nnx.state(factory(nnx.Rngs(0)), nnx.Param)
    return {"/".join(map(str, path)): x.get_value() for path, x in nnx.to_flat_state(state)}
