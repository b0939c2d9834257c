"""Models with images against `transformers`: features, logits, loss, gradients, tensors."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxspeed.models import from_pretrained

import jaxspeed
from jaxspeed.generation import PromptWithImages
from jaxspeed.interop import save_pretrained
from jaxspeed.interop.safetensors import TensorFile
from jaxspeed.train import build_program
from tests.interop.test_transformers import bound_model, mutations, read, theirs_by_name

VOCAB, SEQ, IMAGE = 199, 96, 190
TEXT = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": VOCAB,
    "max_position_embeddings": 512, "initializer_range": 0.15,
}  # fmt: skip
CLIP = {
    "model_type": "clip_vision_model", "hidden_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "intermediate_size": 80, "image_size": 16, "patch_size": 4,
    "initializer_range": 0.15, "initializer_factor": 3.0,
}  # fmt: skip
SIGLIP = CLIP | {"model_type": "siglip_vision_model", "vision_use_head": False}
LLAVA = "LlavaForConditionalGeneration"
# name: (configuration class, model class, fields)
CASES = {
    "llava": ("Llava", LLAVA, {
        "text_config": TEXT, "vision_config": CLIP, "image_token_index": IMAGE,
    }),
    "llava, siglip, qwen2, tied": ("Llava", LLAVA, {
        "text_config": TEXT | {"model_type": "qwen2", "tie_word_embeddings": True},
        "vision_config": SIGLIP, "image_token_index": IMAGE, "tie_word_embeddings": True,
        "vision_feature_layer": -1, "vision_feature_select_strategy": "full",
        "projector_hidden_act": "gelu_pytorch_tanh", "multimodal_projector_bias": False,
    }),
    "llava, class token, mistral": ("Llava", LLAVA, {
        "text_config": TEXT | {"model_type": "mistral", "sliding_window": 50},
        "vision_config": CLIP | {"image_size": 18}, "image_token_index": IMAGE,
        "vision_feature_layer": 1, "vision_feature_select_strategy": "full",
    }),
    "smolvlm": ("SmolVLM", "SmolVLMForConditionalGeneration", {
        "text_config": TEXT | {"pad_token_id": None},
        "vision_config": {
            name: x for name, x in SIGLIP.items()
            if name not in ("model_type", "vision_use_head", "initializer_factor")
        } | {"image_size": 104}, "image_token_id": IMAGE, "scale_factor": 13,
    }),
    "gemma3": ("Gemma3", "Gemma3ForConditionalGeneration", {
        "text_config": {
            name: x for name, x in TEXT.items() if name != "model_type"
        } | {
            "head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 20,
            "num_hidden_layers": 3, "pad_token_id": None, "tie_word_embeddings": False,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        "vision_config": SIGLIP | {"patch_size": 2}, "image_token_index": IMAGE,
        "mm_tokens_per_image": 16, "tie_word_embeddings": False, "initializer_range": 0.15,
    }),
}  # fmt: skip
CASES["qwen2.5-vl"] = ("Qwen2_5_VL", "Qwen2_5_VLForConditionalGeneration", {
    "text_config": {name: x for name, x in TEXT.items() if name != "model_type"} | {
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3],
        },
        "bos_token_id": 1, "eos_token_id": 2,
    },
    "vision_config": {
        "depth": 3, "hidden_size": 48, "num_heads": 4, "intermediate_size": 80, "patch_size": 4,
        "window_size": 16, "out_hidden_size": 64, "fullatt_block_indexes": [1],
        "initializer_range": 0.15,
    },
    "image_token_id": IMAGE, "vision_start_token_id": 191, "vision_end_token_id": 192,
    "initializer_range": 0.15,
})  # fmt: skip
GRIDS = ((4, 4), (2, 6), (6, 4), (10, 2))  # patches of a column and a row of the images of a row
OF_IMAGES = ("pixel_values", "token_type_ids", "image_grid_thw", "mm_token_type_ids")
GRID = ("qwen2.5-vl", "llava", "llava, siglip, qwen2, tied", "llava, class token, mistral")
# name: the images of each document of each row
ROWS = {
    "one image": [[1]],
    "several images": [[3]],
    "no image": [[0]],
    "a batch": [[2], [0], [1]],
    "packed rows": [[1, 2], [0, 1]],
}
cases = pytest.mark.parametrize("case", CASES)
# All rows of some families; of the others those with one image and with none.
grid = pytest.mark.parametrize(
    ("images", "case"),
    [
        pytest.param(images, case, id=f"{images}-{case}")
        for images in ROWS
        for case in CASES
        if case in GRID or images in ("one image", "no image", "packed rows")
    ],
)


@pytest.fixture(scope="module")
def folder_of(references, tmp_path_factory):
    """The folder of their model of a case, with random weights."""
    folders = {}

    def of(case):
        if case not in folders:
            folders[case] = tmp_path_factory.mktemp("folder")
            references.call("families.save", case=CASES[case], folder=folders[case])
        return folders[case]

    return of


def is_native(config):
    """Whether images have any size."""
    return not hasattr(config, "tokens_per_image")


def tokens_of(config, first, count):
    """The tokens of some of a row's images."""
    if not is_native(config):
        return [config.tokens_per_image] * count
    return [rows * columns // 4 for rows, columns in GRIDS[first : first + count]]


def documents(config, counts, rng, length):
    """Token ids of a row of documents with so many images each, and the length of each."""
    ids, lengths, first = [], [], 0
    for number, count in enumerate(counts):
        own = length // len(counts) if number + 1 < len(counts) else length - sum(lengths)
        document = rng.integers(3, IMAGE, own)  # their generation takes 0 for padding
        start = 1
        for size in tokens_of(config, first, count):
            document[start : start + size] = IMAGE
            start += size + 1
        first += count
        ids.append(document)
        lengths.append(own)
    return np.concatenate(ids), lengths


def inputs(config, images, seed=0):
    """(arguments of their model, a batch of ours) for rows of documents with images."""
    rng = np.random.default_rng(seed)
    counts = ROWS[images]
    drawn = [documents(config, row, rng, SEQ) for row in counts]
    tokens = np.stack([ids for ids, _ in drawn])
    segments = np.stack([np.repeat(np.arange(len(n)), n) for _, n in drawn]).astype(np.int32)
    positions = np.stack([np.concatenate([np.arange(x) for x in n]) for _, n in drawn])
    same = segments[:, 1:] == segments[:, :-1]
    targets = np.full_like(tokens, -100)
    targets[:, :-1] = np.where(same, tokens[:, 1:], -100)
    labels = np.concatenate([np.full((len(tokens), 1), -100), targets[:, :-1]], axis=1)
    theirs = {"input_ids": tokens, "labels": labels}
    if config.SEES_IMAGES_ENTIRE:
        theirs["token_type_ids"] = (tokens == IMAGE).astype(int)
    batch = {"tokens": tokens, "targets": targets}
    if any(len(row) > 1 for row in counts):
        theirs |= {"attention_mask": masks(config, tokens, segments), "position_ids": positions}
        batch |= {"segment_ids": segments, "positions": positions.astype(np.int32)}
    counts = [sum(row) for row in counts]
    if any(counts) and is_native(config):
        add_native(config, theirs, batch, counts, rng)
        return theirs, batch
    size = None if is_native(config) else config.vision.image_size
    pixels = [rng.normal(size=(n, 3, size or 1, size or 1)).astype(np.float32) for n in counts]
    if any(map(len, pixels)):
        most = max(map(len, pixels))
        padded = [np.concatenate([x, np.zeros((most - len(x), *x.shape[1:]))]) for x in pixels]
        theirs["pixel_values"] = np.concatenate(pixels)
        if config.vision.is_bucketed:
            theirs["pixel_values"] = np.stack(padded).astype(np.float32)
        batch["patches"] = np.stack([patches(x, config.vision.patch_size) for x in padded])
    return theirs, batch


def add_native(config, theirs, batch, counts, rng):
    """Images of several sizes: patches of squares of four, in both layouts; and positions."""
    size, tokens, segments = config.vision.patch_size, batch["tokens"], batch.get("segment_ids")
    drawn = [[rng.normal(size=(h * w, 3, size, size)) for h, w in GRIDS[:n]] for n in counts]
    flat = [x for row in drawn for x in row]
    frames = np.concatenate(flat).astype(np.float32)[:, :, None].repeat(2, axis=2)
    theirs["pixel_values"] = frames.reshape(len(frames), -1)
    theirs["image_grid_thw"] = np.array([(1, *grid) for n in counts for grid in GRIDS[:n]])
    theirs["mm_token_type_ids"] = (tokens == IMAGE).astype(int)
    rows = max(sum(map(len, row)) for row in drawn)
    batch["patches"] = np.zeros((len(tokens), rows, size * size * 3), np.float32)
    batch["patch_places"] = np.full((len(tokens), rows, 3), -1, np.int32)
    for number, row in enumerate(drawn):
        places = [
            (i, 2 * r + y, 2 * c + x)
            for i, (h, w) in enumerate(GRIDS[: len(row)])
            for r in range(h // 2) for c in range(w // 2) for y in range(2) for x in range(2)
        ]  # fmt: skip
        if row:
            values = np.concatenate(row).transpose(0, 2, 3, 1)
            batch["patches"][number, : len(values)] = values.reshape(len(values), -1)
            batch["patch_places"][number, : len(values)] = places
    if segments is not None:
        theirs["position_ids"] = np.stack(
            [native_positions(*row) for row in zip(tokens, segments)], axis=1
        )


def native_positions(tokens, segments):
    """[3, seq]: each text token is one after the largest position before it in its document."""
    positions, image, at, begin = [], 0, 0, 0
    while at < len(tokens):
        if at and segments[at] != segments[at - 1]:
            begin = 0
        if tokens[at] != IMAGE:
            positions.append((begin,) * 3)
            begin, at = begin + 1, at + 1
            continue
        h, w = (n // 2 for n in GRIDS[image])
        positions += [(begin, begin + r, begin + c) for r in range(h) for c in range(w)]
        begin, at, image = begin + max(h, w), at + h * w, image + 1
    return np.array(positions).T


def masks(config, tokens, segments):
    """[batch, 1, seq, seq], added to scores; by kind of layer where images are seen entire."""

    def added(seen):
        return np.where(seen, 0, np.finfo(np.float32).min).astype(np.float32)[:, None]

    distance = np.arange(SEQ)[:, None] - np.arange(SEQ)
    same = segments[:, :, None] == segments[:, None]
    if not config.SEES_IMAGES_ENTIRE:
        return added(same & (distance >= 0))
    begins = np.diff((tokens == IMAGE).astype(int), prepend=0, axis=1) > 0
    image = np.where(tokens == IMAGE, np.cumsum(begins, axis=1), 0)
    of_image = (image[:, :, None] == image[:, None]) & (image > 0)[:, None]
    seen = same & ((distance >= 0) | of_image)
    near = seen & (distance < config.text.sliding_window)
    return {"full_attention": added(seen), "sliding_attention": added(near)}


def patches(images, size):
    """[images, channels, height, width] as rows of patches (row, column, channel)."""
    count = images.shape[2] // size
    images = images[:, :, : count * size, : count * size]
    x = images.reshape(len(images), 3, count, size, count, size).transpose(0, 2, 4, 3, 5, 1)
    return x.reshape(-1, size * size * 3).astype(np.float32)


def context(batch):
    return {name: x for name, x in batch.items() if name != "targets"}


@pytest.mark.default_cases("a batch-llava")
@grid
def test_features_logits_loss_and_gradients_are_theirs(
    references, folder_of, case, images, tmp_path
):
    pretrained = from_pretrained(folder_of(case))
    model, params = read(pretrained)
    arguments, batch = inputs(pretrained.config, images)
    theirs = references.call(
        "families.logits_loss_and_gradients",
        case=CASES[case],
        arguments=arguments,
        folder=tmp_path,
    )
    batch = jax.tree.map(jnp.asarray, batch)

    def loss(params):
        bound = bound_model(model, params)
        total, weight = pretrained.loss(bound, batch)
        return total / weight, bound(**context(batch))

    (mine, logits), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    assert np.abs(theirs["logits"]).max() > 1
    np.testing.assert_allclose(logits, theirs["logits"], atol=1e-4, rtol=0)
    np.testing.assert_allclose(mine, theirs["loss"], atol=1e-4, rtol=0)
    file = TensorFile.open(tmp_path / "model.safetensors")
    for path in pretrained.weights.variables:
        assert not np.asarray(grads.pop(path)).any()
    names = theirs_by_name(pretrained, grads)
    if "patches" not in batch:
        names = {n: x for n, x in names.items() if n in file.tensors or np.abs(x).max()}
    assert names.keys() == file.tensors.keys()
    for name, found in names.items():
        np.testing.assert_allclose(found, file.array(name), atol=1e-4, rtol=0, err_msg=name)
    if "patches" in batch:
        expected = references.call(
            "families.image_features",
            case=CASES[case],
            arguments={n: arguments[n] for n in OF_IMAGES[::2] if n in arguments},
        )
        of_images = [batch[name] for name in ("patches", "patch_places") if name in batch]
        found = jax.jit(lambda p: bound_model(model, p).features(*of_images))(params)
        count = [sum(tokens_of(pretrained.config, 0, sum(row))) for row in ROWS[images]]
        found = np.concatenate([x[:n] for x, n in zip(np.asarray(found), count)])
        np.testing.assert_allclose(found, expected, atol=1e-4, rtol=0)


@pytest.mark.sampled
@cases
def test_tensors_come_back_bitwise(references, folder_of, case, tmp_path):
    folder = folder_of(case)
    arguments, _ = inputs(from_pretrained(folder).config, "one image")

    def differences(folder):
        return references.call(
            "families.differences", case=CASES[case], folder=folder, arguments=arguments
        )

    rest = {"train_batch_size": 8, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    rest["zero_optimization"] = {"stage": 3}
    engine = jaxspeed.initialize(config=rest | {"model": {"pretrained": str(folder)}})
    engine.save_pretrained(tmp_path / "out")
    assert differences(tmp_path / "out") == []
    # And with a config.json of our own.
    program, state = engine.program, engine.state
    sizes = program.source.model.config
    family = {"family": type(sizes).__module__.rpartition(".")[2]}
    family["config"] = dataclasses.asdict(sizes)
    other = jaxspeed.Config(**rest, model=family)
    built = build_program(other, *jaxspeed.user_models.config_model.resolve_model(other))
    save_pretrained(built, state, tmp_path / "again")
    assert differences(tmp_path / "again") == []


@pytest.mark.sampled
@cases
def test_greedy_tokens_are_theirs(references, folder_of, case):
    folder = folder_of(case)
    config = {"train_batch_size": 8, "optimizer": {"type": "SGD"}, "mesh": {"tensor": 2}}
    engine = jaxspeed.initialize(config=config | {"model": {"pretrained": str(folder)}})
    sizes, prompts, theirs, images = from_pretrained(folder).config, [], [], []
    for name in ("one image", "no image", "several images"):
        arguments, batch = inputs(sizes, name)
        of_images = [batch["patch_places"][0]] if "patch_places" in batch else []
        tokens = batch["tokens"][0].tolist()
        prompts.append(PromptWithImages(tokens, batch_patches(batch), *of_images))
        theirs.append(prompts[-1].tokens)
        images.append({n: x for n, x in arguments.items() if n in OF_IMAGES})
    found = engine.generate(prompts, 20, temperature=0)
    expected = references.call(
        "families.greedy_tokens_of_images",
        case=CASES[case],
        prompts=theirs,
        images=images,
        count=20,
    )
    assert [list(mine.tokens) for mine in found] == expected
    assert len({token for mine in found for token in mine.tokens}) > 6


def batch_patches(batch):
    """Those of a batch of one sample."""
    return batch["patches"][0] if "patches" in batch else np.zeros((0, 1), np.float32)


@pytest.mark.sampled
@cases
def test_peft_loads_adapters_of_each_part(references, folder_of, case, tmp_path):
    """With a projector that is trained in full, from ZeRO 3 over tensor 2."""
    folder = folder_of(case)
    arguments, batch = inputs(from_pretrained(folder).config, "one image")
    batch = {name: np.repeat(x, 8, axis=0) for name, x in batch.items()}
    config = {
        "train_batch_size": 8, "optimizer": {"type": "Adam", "params": {"lr": 0.02}},
        "mesh": {"data": 4, "tensor": 2}, "zero_optimization": {"stage": 3},
        "model": {"pretrained": str(folder)},
        "lora": {"r": 3, "init_lora_weights": False, "modules_to_save": ["projector"]},
    }  # fmt: skip
    engine = jaxspeed.initialize(config=config, example_batch=batch)
    before = {path: np.asarray(x) for path, x in engine.parameters.items()}
    engine.train_batch(batch)
    trained = {p for p, x in engine.parameters.items() if (np.asarray(x) != before[p]).any()}
    assert {p.split("/")[0] for p in trained} == {"lora", "projector"}
    assert {p.split("/")[1] for p in trained if p.startswith("lora/")} == {"language", "tower"}
    engine.save_adapter(tmp_path)
    theirs = references.call(
        "families.logits_with_adapter", case=CASES[case], folder=tmp_path, arguments=arguments
    )
    assert theirs["warnings"] == []
    mine = engine.module(**context({name: jnp.asarray(x[:1]) for name, x in batch.items()}))
    np.testing.assert_allclose(mine, theirs["logits"], atol=2e-4, rtol=0)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "case", ["llava", *(pytest.param(c, marks=pytest.mark.full) for c in CASES if c != "llava")]
)
def test_a_mutation_of_any_rule_is_an_error_or_changes_the_logits(references, folder_of, case):
    pretrained = from_pretrained(folder_of(case))
    model, params = read(pretrained)
    _, batch = inputs(pretrained.config, "one image")
    x = context(jax.tree.map(jnp.asarray, batch))
    logits = jax.jit(lambda params: bound_model(model, params)(**x))
    expected, caught = logits(params), 0
    unread = set(pretrained.weights.variables)
    for what, table in mutations(pretrained.weights.table):
        try:
            weights = type(pretrained.weights)(pretrained.weights.folder, table)
            _, changed = read(dataclasses.replace(pretrained, weights=weights))
        except jaxspeed.PretrainedError:
            caught += 1
            continue
        differ = {path for path in params if (changed[path] != params[path]).any()}
        # A key's bias changes no softmax where keys are not rotated.
        unseen = unread | {"tower/blocks/attn/k_proj/bias"}
        assert np.abs(logits(changed) - expected).max() > 1e-3 or differ <= unseen, what
        caught += bool(differ)
    assert caught >= len(pretrained.weights.table.rules)
