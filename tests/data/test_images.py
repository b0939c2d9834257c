"""Images of records: their pixels, their places in tokens and batches, and what is refused."""

import base64
import dataclasses
import io
import json
import logging

import numpy as np
import pytest
from jaxspeed.models.image_processors import (
    BICUBIC,
    BILINEAR,
    HALF,
    FixedImages,
    NativeImages,
    TiledImages,
    cropped,
    patches_of,
    read_fixed,
    read_native,
    read_tiled,
)
from PIL import Image

from jaxspeed.config.run_sections import Data
from jaxspeed.data import corpus as corpora
from jaxspeed.data.model_limits import ModelLimits
from jaxspeed.errors import DataError
from jaxspeed.vision.images import pixels_of, source_of

SIDE, PATCH, ID = 16, 4, 255
FIXED = FixedImages("<image>", "<image>", ID, 3, PATCH, (SIDE,), (SIDE, SIDE))
CLIP = {"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}}
SQUARE = {"size": {"height": SIDE, "width": SIDE}}
SETTINGS = {
    "CLIPImageProcessor": CLIP,
    "LlavaImageProcessor": CLIP | {"do_pad": True},
    "SiglipImageProcessor": SQUARE | {"resample": BICUBIC},
    "Gemma3ImageProcessor": SQUARE,
}
MODES = ("RGB", "L", "P", "RGBA", "LA", "1", "CMYK")


def drawn(number):
    """An image of an odd size and one of the modes, with gradients and an edge."""
    rng = np.random.default_rng(number)
    width, height = rng.integers(2, 90, 2)
    x = rng.integers(0, 256, (height, width, 4), dtype=np.uint8)
    x[: height // 2, :, 1] = np.linspace(0, 255, width).astype(np.uint8)
    image = Image.fromarray(x, "RGBA")
    mode = MODES[number % len(MODES)]
    if mode in ("CMYK", "1"):
        image = image.convert("RGB")
    return image.convert(mode)


def saved(folder, number):
    image, exif = drawn(number), Image.Exif()
    if image.mode in ("RGB", "L"):
        exif[0x0112] = 1 + number % 8
        path = folder / f"{number}.jpg"
        image.save(path, quality=95, exif=exif)
    else:
        path = folder / f"{number}.{'tiff' if image.mode == 'CMYK' else 'png'}"
        image.save(path)
    return path


def processor_of(kind, settings):
    values = {"image_processor_type": kind, **settings}
    if kind in ("SiglipImageProcessor", "Gemma3ImageProcessor"):
        values = {"image_mean": HALF, "image_std": HALF, "resample": BILINEAR} | values
    return read_fixed(values, FIXED)


@pytest.mark.parametrize("kind", SETTINGS)
def test_pixel_values_are_theirs(references, tmp_path, kind):
    files = [saved(tmp_path, number) for number in range(20)]
    theirs = references.call(
        "images.pixel_values", kind=kind, settings=SETTINGS[kind], files=[str(f) for f in files]
    )
    processor = processor_of(kind, SETTINGS[kind])
    for file, expected in zip(files, theirs):
        values = processor.values(pixels_of(source_of(file, "here")))
        np.testing.assert_allclose(
            values.transpose(2, 0, 1), expected, atol=1e-5, rtol=0, err_msg=file.name
        )


TILED = TiledImages("<image>", "<image>", ID, 4, PATCH, SIDE, 4 * SIDE)


@pytest.mark.parametrize("divided", [True, False])
def test_tiles_are_theirs(references, tmp_path, divided):
    """And their number is known from the size alone."""
    files = [saved(tmp_path, number) for number in range(20)]
    settings = {
        "size": {"longest_edge": 3 * SIDE}, "max_image_size": {"longest_edge": SIDE},
        "do_image_splitting": divided,
    }  # fmt: skip
    kind, paths = "Idefics3ImageProcessor", [str(f) for f in files]
    theirs = references.call("images.pixel_values", kind=kind, settings=settings, files=paths)
    processor, counts = read_tiled({"image_processor_type": kind, **settings}, TILED), set()
    for file, expected in zip(files, theirs):
        source = source_of(file, "here")
        values = np.stack(processor.values(pixels_of(source)))
        np.testing.assert_allclose(
            values.transpose(0, 3, 1, 2), expected, atol=1e-5, rtol=0, err_msg=file.name
        )
        expansion = processor.expansion(source.width, source.height)
        assert expansion.tokens == TILED.tokens * len(values)
        assert expansion.text.count("<image>") == expansion.tokens
        assert expansion.rows == len(processor.patches(pixels_of(source)))
        counts.add(len(values))
    assert len(counts) > 2 if divided else counts == {1}


NATIVE = NativeImages("<|image_pad|>", "<|image_pad|>", ID, PATCH, 2, 256, 2048)


def test_patches_of_images_of_any_size_are_theirs(references, tmp_path):
    files = [saved(tmp_path, number) for number in range(20)]
    settings = {
        "patch_size": PATCH, "merge_size": 2, "temporal_patch_size": 2,
        "size": {"shortest_edge": 256, "longest_edge": 2048},
    }  # fmt: skip
    theirs = references.call("images.patches", settings=settings, files=[str(f) for f in files])
    processor = read_native({"image_processor_type": "Qwen2VLImageProcessor", **settings}, NATIVE)
    sizes = set()
    for file, (expected, grid) in zip(files, theirs):
        source = source_of(file, "here")
        found = processor.patches(pixels_of(source)).reshape(-1, PATCH, PATCH, 3)
        frames = expected.reshape(len(expected), 3, 2, PATCH, PATCH)
        for frame in range(2):
            np.testing.assert_allclose(
                found.transpose(0, 3, 1, 2), frames[:, :, frame], atol=1e-5, rtol=0,
                err_msg=file.name,
            )  # fmt: skip
        assert processor.grid(source.width, source.height) == tuple(grid[0, 1:])
        assert processor.expansion(source.width, source.height).rows == len(expected)
        sizes.add(len(expected))
    assert len(sizes) > 8


def test_places_and_positions_are_those_that_the_model_computes(tmp_path):
    """Of packed conversations with images of several sizes."""
    from jaxspeed.models import qwen2_5_vl

    sizes = [[(40, 20), (16, 50)], [], [(30, 30)]]
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 200, (3, 90))
    for row, images in enumerate(sizes):
        at = 3
        for size in images:
            count = NATIVE.expansion(*size).tokens
            tokens[row, at : at + count] = ID
            at += count + 2
    is_image = tokens == ID
    rows = np.where(is_image, np.cumsum(is_image, axis=1) - 1, -1).astype(np.int32)
    segments = np.where(np.arange(90) < [[70], [40], [1]], 1, 2)
    most = max(sum(NATIVE.expansion(*size).rows for size in images) for images in sizes)
    batch = {
        "tokens": tokens, "image_rows": rows, "segment_ids": segments,
        "patches": np.zeros((3, most, NATIVE.patch), np.float32),
    }  # fmt: skip
    beside = NATIVE.beside(batch, sizes)
    model = qwen2_5_vl.QwenVL.__new__(qwen2_5_vl.QwenVL)
    object.__setattr__(model, "config", qwen2_5_vl.PRESETS["tiny"])
    found = qwen2_5_vl.QwenVL.positions_of(model, rows, beside["patch_places"], segments)
    np.testing.assert_array_equal(found, beside["image_positions"])


MUTATIONS = {
    "resample": BILINEAR, "scale": 1 / 256, "mean": HALF, "std": HALF, "crop": None,
    "size": (SIDE + 1,), "padded": True,
}  # fmt: skip


@pytest.mark.parametrize("field", MUTATIONS)
def test_each_step_changes_pixel_values(field):
    values = vars(FIXED) | {field: MUTATIONS[field]}
    pixels = np.asarray(drawn(7).convert("RGB"))
    before, after = FIXED.values(pixels), FixedImages(**values).values(pixels)
    assert before.shape != after.shape or np.abs(before - after).max() > 1e-3


def test_patches_are_row_by_row():
    values = np.arange(2 * 3 * 3, dtype=np.float32).reshape(2, 3, 3)
    (first,) = patches_of(values, 2)
    np.testing.assert_array_equal(first, values[:, :2].reshape(-1))


def test_the_middle_of_a_small_image_is_padded():
    pixels = np.ones((3, 2, 3), np.uint8)
    middle = cropped(pixels, (3, 5))
    np.testing.assert_array_equal(middle[0, :, 0], [0, 0, 1, 1, 0])


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"do_resize": False}, "do_resize is false"),
        ({"image_processor_type": "ViTImageProcessor"}, "'ViTImageProcessor'"),
        ({"crop_size": {"height": 20, "width": 20}}, "rows is 25, and the model's is 16"),
        ({"size": {}}, "KeyError"),
        ({"image_mean": [1.0]}, "1 numbers for 3 colours"),
    ],
)
def test_settings_that_are_not_supported_are_named(changed, why):
    with pytest.raises(Exception, match=why):
        read_fixed({"image_processor_type": "CLIPImageProcessor", **CLIP, **changed}, FIXED)


# -- records ---------------------------------------------------------------------------------------


def built(folder, records, **data):
    """The corpus of records in a file."""
    file = folder / "records.jsonl"
    file.write_text("\n".join(map(json.dumps, records)))
    section = Data.model_validate(
        {
            "source": "jsonl", "path": str(file), "seq_len": 96, "held_out": 0, "shuffle": False,
            "chat_template": "chatml", **data,
        }
    )  # fmt: skip
    return corpora.build(section, sample="tokens", vocab_size=256, images=FIXED, seed=0)


def turns(content, answer="a cat"):
    return [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]


@pytest.fixture
def cat(tmp_path):
    path = tmp_path / "cat.png"
    drawn(0).convert("RGB").save(path)
    return path


def test_all_forms_of_a_record_with_an_image_are_one(tmp_path, cat):
    url = f"data:image/png;base64,{base64.b64encode(cat.read_bytes()).decode()}"
    text = {"type": "text", "text": "What?"}
    forms = [
        {"messages": turns([{"type": "image", "image": "cat.png"}, text])},
        {"messages": turns([{"type": "image", "path": str(cat)}, text])},
        {"messages": turns([{"type": "image_url", "image_url": {"url": url}}, text])},
        {"messages": turns([{"type": "image"}, text]), "images": ["cat.png"]},
        {"messages": turns("What?"), "images": [{"path": str(cat)}]},
        {"messages": turns("<image>\nWhat?"), "image": "cat.png"},
        {
            "conversations": [
                {"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "a cat"},
            ],
            "image": "cat.png",
        },
        {
            "prompt": [{"role": "user", "content": "What?"}],
            "completion": [{"role": "assistant", "content": "a cat"}],
            "images": ["cat.png"],
        },
    ]  # fmt: skip
    rows = []
    for form in forms:
        (row,) = [{n: x[0] for n, x in built(tmp_path, [form]).train.slice(0, 1).items()}]
        rows.append(row)
    first = rows[0]
    assert first["tokens"].tolist().count(ID) == FIXED.tokens
    np.testing.assert_array_equal(first["patches"], FIXED.patches(pixels_of(source_of(cat, ""))))
    for row in rows[1:]:
        assert row.keys() == first.keys()
        for name, x in row.items():
            np.testing.assert_array_equal(x, first[name], err_msg=name)


def test_the_loss_counts_the_answer_alone(tmp_path, cat):
    (record,) = [{"file_name": "cat.png", "text": "a cat"}]
    batch = built(tmp_path, [record]).train.slice(0, 1)
    tokens, mask = batch["tokens"][0], batch["mask"][0]
    assert bytes(tokens[mask == 1].tolist()) == b"a cat<|im_end|>\n"


def test_rows_of_features_follow_the_images_of_packed_conversations(tmp_path, cat):
    drawn(9).convert("RGB").save(tmp_path / "dog.png")
    both = turns([{"type": "image", "image": "dog.png"}, {"type": "image", "image": "cat.png"}])
    records = [{"messages": both}, {"file_name": "cat.png", "text": "x"}, {"messages": turns("?")}]
    corpus = built(tmp_path, [records[0], {"messages": turns("a")}], seq_len=200)
    captions = built(tmp_path, [records[1]] * 3, seq_len=300)
    batch = corpus.train.slice(0, 1)
    rows, is_image = batch["image_rows"][0], batch["tokens"][0] == ID
    assert rows[is_image].tolist() == [0, 1, 2, 3, 4, 5]
    assert (rows[~is_image] == -1).all()
    dog, own = (
        FIXED.patches(pixels_of(source_of(tmp_path / f"{n}.png", ""))) for n in ("dog", "cat")
    )
    np.testing.assert_array_equal(batch["patches"][0], np.concatenate([dog, own]))
    assert captions.train.samples == 1
    np.testing.assert_array_equal(captions.train.slice(0, 1)["patches"][0], np.tile(own, (3, 1)))


def test_a_part_of_a_batch_is_that_of_all(tmp_path, cat):
    corpus = built(tmp_path, [{"file_name": "cat.png", "text": "x"}] * 4, packing=False)
    batch = corpus.train.batch(0, 4)
    part = corpus.train.batch(0, 4, np.array([1, 3]), slice(5, 40))
    for name, x in part.items():
        wanted = batch[name][[1, 3]]
        np.testing.assert_array_equal(x, wanted if name == "patches" else wanted[:, 5:40])


def test_conversations_without_images_are_padded_beside_others(tmp_path, cat):
    (tmp_path / "text.jsonl").write_text(json.dumps({"messages": turns("?")}))
    (tmp_path / "seen.jsonl").write_text(json.dumps({"file_name": "cat.png", "text": "x"}))
    mixture = [
        {"source": "jsonl", "path": str(tmp_path / f"{name}.jsonl"), "weight": 1}
        for name in ("text", "seen")
    ]
    section = Data.model_validate(
        {"mixture": mixture, "seq_len": 96, "held_out": 0, "chat_template": "chatml"}
    )
    corpus = corpora.build(section, sample="tokens", vocab_size=256, images=FIXED, seed=0)
    batch = corpus.train.slice(0, 2)
    assert not batch["patches"][0].any() and batch["patches"][1].any()
    assert (batch["image_rows"][0] == -1).all()


def test_an_image_is_never_cut(tmp_path, cat, caplog):
    long = {"messages": turns(["x" * 150, {"type": "image", "image": "cat.png"}, "y" * 80])}
    short = {"file_name": "cat.png", "text": "x"}
    with caplog.at_level(logging.WARNING):
        corpus = built(
            tmp_path, [{"messages": turns("a")}, long, {"messages": short and turns("b")}]
        )
    assert corpus.conversations.dropped == 1
    assert "line 2, image 1: its conversation is left out: it is longer than data.seq_len 96" in (
        caplog.text
    )


def test_a_bound_of_patches_divides_what_is_packed(tmp_path, cat):
    captions = [{"file_name": "cat.png", "text": "x"}] * 4
    corpus = built(tmp_path, captions, seq_len=300, patches=2 * FIXED.rows)
    assert corpus.train.samples == 2
    assert corpus.train.slice(0, 1)["patches"].shape[1] == 2 * FIXED.rows
    with pytest.raises(DataError, match="not one training sample"):
        built(tmp_path, captions, patches=FIXED.rows - 1)


def refused(folder, record, *words):
    with pytest.raises(DataError) as error:
        built(folder, [{"messages": turns("fine")}, record])
    text = str(error.value)
    assert "1 of 2 records cannot be used" in text and "line 2" in text
    for word in words:
        assert word in text, text


def image(value):
    return {"messages": turns([{"type": "image", "image": value}])}


def test_images_that_are_none_are_named_with_their_row(tmp_path):
    refused(tmp_path, image("absent.png"), "absent.png", "does not exist")
    (tmp_path / "video.mp4").write_bytes(b"\0\0\0\x18ftypmp42" + bytes(64))
    refused(tmp_path, image("video.mp4"), "video.mp4", "is none of PNG, JPEG")
    Image.new("RGB", (1, 1)).save(tmp_path / "dot.png")
    refused(tmp_path, image("dot.png"), "1 x 1 pixels")
    refused(tmp_path, image("https://a.b/c.png"), "is not downloaded")
    refused(tmp_path, image(7), "a int, not a path")
    refused(tmp_path, image("data:image/png;base64,?"), "no base64")
    (tmp_path / "half.png").write_bytes(png(90)[:20])
    refused(tmp_path, image("half.png"), "half.png")
    video = {"messages": turns([{"type": "video", "video": "v.mp4"}])}
    refused(tmp_path, video, 'content of type "video"', "reads text and images")


def png(side):
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (side, side, 3), np.uint8)).save(
        buffer, "PNG"
    )
    return buffer.getvalue()


def test_a_bomb_is_refused_before_it_is_decoded(tmp_path):
    with Image.new("1", (20_000, 10_000)) as bomb:
        bomb.save(tmp_path / "bomb.png")
    refused(tmp_path, image("bomb.png"), "bomb.png", "more than 89,478,485")
    with Image.new("1", (10_000, 10_000)) as bomb:
        bomb.save(tmp_path / "large.png")
    with pytest.warns(Image.DecompressionBombWarning):
        refused(tmp_path, image("large.png"), "10,000 x 10,000 pixels")


def test_an_image_that_is_truncated_is_named_when_it_is_decoded(tmp_path):
    (tmp_path / "half.png").write_bytes(png(90)[:9000])
    corpus = built(tmp_path, [{"file_name": "half.png", "text": "x"}])
    with pytest.raises(DataError, match=r"records.jsonl, line 1, image 1: .*half.png"):
        corpus.train.slice(0, 1)


def test_places_without_images_and_images_without_places_are_named(tmp_path, cat):
    place = {"type": "image"}
    refused(tmp_path, {"messages": turns([place])}, "a place without an image")
    more = {"messages": turns([place]), "images": ["cat.png", "cat.png"]}
    refused(tmp_path, more, "an image without a place")
    refused(tmp_path, {"messages": turns("see <image> there")}, "stands for an image: 0")


PROCESSORS = {
    "LLaVA": (
        ["LlavaProcessor", "CLIPImageProcessorPil"],
        CLIP,
        {
            "patch_size": PATCH, "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        },
        {"image_token": "<image>"},
        dataclasses.replace(FIXED, token_id=256, tokens=16),
    ),
    "Idefics 3": (
        ["Idefics3Processor", "Idefics3ImageProcessorPil"],
        {"size": {"longest_edge": 2 * SIDE}, "max_image_size": {"longest_edge": SIDE}},
        {"image_seq_len": 4},
        {
            "image_token": "<image>", "fake_image_token": "<fake_token_around_image>",
            "global_image_token": "<global-img>", "end_of_utterance_token": "<end_of_utterance>",
        },
        dataclasses.replace(TILED, token_id=256, longest=2 * SIDE),
    ),
    "Gemma 3": (
        ["Gemma3Processor", "Gemma3ImageProcessorPil"],
        SQUARE,
        {"image_seq_length": 5},
        {
            "boi_token": "<start_of_image>", "image_token": "<image_soft_token>",
            "eoi_token": "<end_of_image>",
        },
        FixedImages(
            "<start_of_image>", "<image_soft_token>", 257, 5, PATCH, (SIDE, SIDE),
            before="\n\n<start_of_image>", after="<end_of_image>\n\n",
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", PROCESSORS)
def test_tokens_are_theirs(references, tmp_path, cat, family):
    """And a template of parts, a tokenizer that knows the token, and text around images."""
    names, settings, fields, special, processor = PROCESSORS[family]
    references.call(
        "images.save_processor",
        names=names,
        settings=settings,
        fields=fields,
        special=special,
        folder=tmp_path,
    )
    picture, text = {"type": "image", "path": str(cat)}, {"type": "text", "text": "Who is this?"}
    said = [{"type": "text", "text": "a cat"}]
    talks = [
        [{"role": "user", "content": content}, {"role": "assistant", "content": said}]
        for content in ([picture, text], [text, picture, text, picture], [text])
    ]
    records = [{"messages": talk} for talk in talks]
    theirs = references.call("images.tokens", folder=str(tmp_path), messages=talks)
    file = tmp_path / "talks.jsonl"
    file.write_text("\n".join(map(json.dumps, records)))
    section = Data.model_validate(
        {"source": "jsonl", "path": str(file), "tokenizer": str(tmp_path), "seq_len": 400}
        | {"held_out": 0, "shuffle": False, "packing": False}
    )
    built_corpus = corpora.build(section, sample="tokens", images=processor, seed=0)
    batch = built_corpus.train.slice(0, 3)
    for ids, mask, expected in zip(batch["tokens"], batch["mask"], theirs):
        assert ids[: len(expected)].tolist() == expected
        answer = built_corpus.tokenizer.spell(ids[mask == 1])
        assert answer == "a cat<|im_end|>\n"


def test_the_shapes_of_a_plan_are_those_of_batches(tmp_path, cat):
    """But for the number of patches, which the sample with most decides."""
    corpus = built(tmp_path, [{"file_name": "cat.png", "text": "x"}] * 2, packing=False)
    source = {"source": "jsonl", "path": str(tmp_path / "records.jsonl")}
    section = Data.model_validate({**source, "seq_len": 96, "chat_template": "chatml"})
    limits = ModelLimits(sample="tokens", vocab_size=256, images=FIXED)
    known = corpora.known_shapes(section, limits, 2)
    read = {name: (x.shape, x.dtype) for name, x in corpus.train.slice(0, 2).items()}
    expected = {name: (x.shape, x.dtype) for name, x in known.items()}
    assert expected.pop("patches") == ((2, 97 // 3 * 16, 48), np.float32)
    assert read.pop("patches") == ((2, 16, 48), np.float32)
    assert read == expected
