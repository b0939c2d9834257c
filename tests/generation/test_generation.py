"""Generation with a cache gives the tokens of a plain loop without one, however it is sharded.

Tests of other claims take a family and a placement that are initialized here already.
"""

import logging
import math

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxspeed
from jaxspeed import models
from jaxspeed.config import Config
from jaxspeed.errors import ConfigError
from jaxspeed.generation import Generator, Request, Sampling
from jaxspeed.generation.generate import short_start
from jaxspeed.train.build import build_program
from jaxspeed.train.gather_once import GatherOnce
from jaxspeed.user_models.config_model import resolve_model
from tests.generation import plain
from tests.support.covering import covering

RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(1, 256, n).tolist() for n in (3, 30, 17)]
SIZES = {"num_hidden_layers": 2, "initializer_range": 0.3}  # a wide spread of logits
FAMILIES = {
    "gpt2": ("gpt2", {}),
    "llama": ("llama", {}),
    "mistral": ("llama", {"sliding_window": 8}),
    "qwen2": ("llama", {"qkv_bias": True, "tie_word_embeddings": True}),
    "qwen3": ("llama", {"qk_norm": True, "head_dim": 24}),
    "gemma2": ("gemma", {"sliding_window": 8, "tie_word_embeddings": False}),
    "gemma3": ("gemma", {"preset": "tiny3", "sliding_window": 8, "tie_word_embeddings": False}),
    "one key head": ("llama", {"num_key_value_heads": 1}),
}
COMPOSED = {  # of the parts in models/blocks.py
    "phi3": ("phi3", {"sliding_window": 8}),
    "granite": ("granite", {"embedding_multiplier": 1.0, "tie_word_embeddings": False}),
    "smollm3": ("smollm3", {"unrotated_layers": (1,), "tie_word_embeddings": False}),
    "ministral": ("ministral", {"sliding_window": 8}),
    "olmo2": ("olmo2", {}),
    "glm": ("glm4", {"output_norms": False}),
    "glm4": ("glm4", {}),
    "gemma1": ("gemma1", {"tie_word_embeddings": False}),
    "gpt_neox": ("gpt_neox", {}),
    "qwen2, windowed in part": ("llama", {"sliding_window": 8, "global_layers": (0,)}),
    "cohere": ("cohere", {"logit_scale": 0.5, "tie_word_embeddings": False}),
    "cohere2": ("cohere", {"preset": "tiny2", "sliding_window": 8, "tie_word_embeddings": False}),
    "starcoder2": ("starcoder2", {"sliding_window": 8, "tie_word_embeddings": False}),
    "exaone4": (
        "exaone4", {"sliding_window": 8, "global_layers": (1,), "tie_word_embeddings": False},
    ),
    "olmo3": ("olmo2", {"sliding_window": 8, "global_layers": (1,)}),
    "seed_oss": ("seed_oss", {}),
    "arcee": ("arcee", {}),
    "falcon": ("falcon", {"tie_word_embeddings": False}),
    "falcon, one key head, alibi": (
        "falcon", {"preset": "tiny-7b", "alibi": True, "tie_word_embeddings": False},
    ),
    "falcon, alibi": ("falcon", {"preset": "tiny-rw", "tie_word_embeddings": False}),
    "gpt2, scaled by layers": (
        "gpt2", {"activation_function": "relu", "scale_attn_by_inverse_layer_idx": True},
    ),
    "mixtral": ("mixtral", {"sliding_window": 8}),
    "deepseek": ("deepseek", {"num_hidden_layers": 3}),
    "gpt_oss": ("gpt_oss", {"sliding_window": 8}),
}  # fmt: skip
FAMILIES |= COMPOSED
ZERO3 = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
PLACEMENTS = {
    "one device": {},
    "data 2": {},
    "tensor 2": {"mesh": {"tensor": 2}},
    "ZeRO 3": ZERO3,
    "ZeRO 3, tensor 2": {"mesh": {"tensor": 2}, **ZERO3},
    "sequence parallel": {
        "mesh": {"tensor": 2},
        "parallel": {"sequence_parallel_activations": True},
    },
    "ZeRO 3, bf16": {**ZERO3, "bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True}},
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
    "pipe 2": {"mesh": {"pipe": 2}, "gradient_accumulation_steps": 2},
    "offloaded": {
        "zero_optimization": {**ZERO3["zero_optimization"], "offload_param": {"device": "cpu"}},
        "bf16": {"enabled": True},
    },
}
DEVICES = {"one device": 1, "data 2": 2, "tensor 2": 2}


def config_of(family, placement, **sizes):
    name, own = FAMILIES[family]
    own = {"preset": "tiny", **SIZES, **own, **sizes}
    return {
        "model": {"family": name, "preset": own.pop("preset"), "config": own},
        "train_batch_size": 16,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "run": {"seed": 1, "compilation_cache": False},
        **PLACEMENTS[placement],
    }


def engine_of(family, placement="one device", **sizes):
    devices = jax.devices()[: DEVICES.get(placement, 8)]
    return jaxspeed.initialize(config=config_of(family, placement, **sizes), devices=devices)


@pytest.fixture(scope="module")
def gpt2_engine():
    """On one device, for tests that change nothing of it."""
    return engine_of("gpt2")


def tokens_of(found):
    return [each.tokens for each in found]


DEFAULT = [
    ("gpt2", "data 2"),
    ("mistral", "ZeRO 3, tensor 2"),
    ("qwen3", "ZeRO 3, bf16"),
    ("gemma2", "one device"),
    ("glm4", "ZeRO 3, tensor 2"),
    ("deepseek", "ZeRO 3, tensor 2"),
]
SHORT = ["ZeRO 3, tensor 2"]  # 500 tokens are drawn on one device, below
SOME = ("one device", *SHORT)
EVERY = [(f, p) for f in FAMILIES for p in (SOME if f in COMPOSED else PLACEMENTS)]


@pytest.mark.default_cases("mistral, ZeRO 3, tensor 2")
@pytest.mark.parametrize(
    ("family", "placement"),
    [
        pytest.param(*case, marks=() if case in DEFAULT else pytest.mark.full, id=", ".join(case))
        for case in EVERY
    ],
)
def test_tokens_are_those_of_a_plain_loop(family, placement):
    engine = engine_of(family, placement)
    found = tokens_of(engine.generate(PROMPTS, 24, temperature=0))
    if placement != "autocast":  # rounds operands that plain Flax does not
        assert found == plain.greedy(engine, FAMILIES[family][0], PROMPTS, 24)
    assert len({token for row in found for token in row}) > 15  # no repeated token
    if placement != "one device":
        return
    recomputed = Generator(engine.program, cache=False)
    drawn = Sampling(0.9, top_k=20, repetition_penalty=1.2)
    request = Request(PROMPTS, 24, drawn, seed=5)
    with_cache = tokens_of(Generator(engine.program).start(engine.state, request).finish())
    assert with_cache == tokens_of(recomputed.start(engine.state, request).finish())
    request = Request(PROMPTS, 24, Sampling(0))
    assert found == tokens_of(recomputed.start(engine.state, request).finish())


@pytest.mark.sampled
@pytest.mark.parametrize("placement", covering(["one device", "ZeRO 3, tensor 2"], SHORT))
def test_short_prompts_are_read_token_by_token(placement, caplog):
    engine = engine_of("mistral", placement)
    prompts = [prompt[:n] for prompt, n in zip(PROMPTS, (2, 4, 1))]
    with jax.log_compiles(), caplog.at_level(logging.DEBUG):
        found = tokens_of(engine.generate(prompts, 24, temperature=0))
        compiled = [r.getMessage() for r in caplog.records if "Compiling" in r.getMessage()]
    assert any("jit(decode)" in m for m in compiled)
    assert not any("jit(prefill)" in m for m in compiled)
    assert found == plain.greedy(engine, "llama", prompts, 24)
    request = Request(prompts, 24, Sampling(0.9, repetition_penalty=1.2), seed=5)
    drawn = tokens_of(Generator(engine.program).start(engine.state, request).finish())
    recomputed = Generator(engine.program, cache=False).start(engine.state, request).finish()
    assert drawn == tokens_of(recomputed)


@given(st.integers(0, 10_000))
def test_short_prompts_add_at_most_an_eighth_to_the_calls(tokens):
    longest = short_start(tokens)
    assert 1 <= longest <= 16
    assert longest == 1 or (longest - 1) / tokens <= 1 / 8


def lowered(generation, caches):
    """The decode program of a request, for its first group."""
    batching = generation.batching
    rows = batching._shape.arrays([])
    args = (batching._runs.state, caches, rows, np.int32(1), batching._draws)
    return batching._programs._decode.lower(*args)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "placement",
    covering(
        ["ZeRO 3", "ZeRO 3, bf16", "offloaded", "pipe 2"],
        ["ZeRO 3, bf16", "offloaded", "pipe 2"],  # the next test is in fp32
    ),
)
def test_parameters_are_gathered_once_for_all_tokens_where_they_fit(placement):
    engine = engine_of("qwen3", placement)
    request = Request(PROMPTS, 12, Sampling(0))
    found, gathers = {}, {}
    for memory in (None, 1):
        generator = Generator(engine.program, once=GatherOnce(engine.program, memory))
        generation = generator.start(engine.state, request)
        found[memory] = tokens_of(generation.finish())
        if placement != "pipe 2":
            (programs,) = generator._programs.values()
            text = lowered(generation, programs.fresh()).compile().as_text()
            gathers[memory] = text.count(" all-gather(")
            # In a loop, XLA would gather the parameters of all units before it.
            assert programs.loops == (" while(" in text and memory is None)
    assert found[None] == found[1] == plain.greedy(engine, "llama", PROMPTS, 12)
    if gathers:
        assert gathers[None] < gathers[1], gathers


def test_parameters_are_gathered_again_for_each_request():
    engine = engine_of("mistral", "ZeRO 3, tensor 2")
    for _ in range(2):
        found = tokens_of(engine.generate(PROMPTS, 12, temperature=0))
        assert found == plain.greedy(engine, "llama", PROMPTS, 12)
        engine.parameters = {
            path: np.asarray(x) * np.linspace(0.5, 2, x.shape[-1], dtype=np.float32)
            for path, x in engine.parameters.items()
        }


@pytest.mark.parametrize("placement", ["ZeRO 3", "ZeRO 3, bf16", "ZeRO 3, tensor 2"])
def test_parameters_are_gathered_once_in_at_most_half_of_the_memory(placement):
    config = Config.load(config_of("llama", placement))
    program = build_program(config, *resolve_model(config))
    tensor = program.mesh.shape["tensor"]
    state = gathered = 0
    for row in program.table:
        for kept in (row.param, row.master, row.grad):
            shards = kept.sharding(program.mesh).shard_shape(row.shape(kept)) if kept else (0,)
            state += math.prod(shards) * (kept.dtype.itemsize if kept else 0)
        split = tensor if "tensor" in str(row.read.spec) else 1
        gathered += math.prod(row.leaf.shape) * row.read.dtype.itemsize // split
    rest = jax.tree.leaves((program.state.opt, program.state.variables))
    rest += jax.tree.leaves((program.state.step, program.state.skipped, program.state.loss_scale))
    state += sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in rest)
    least = 2 * (state + gathered)
    assert GatherOnce(program, least).table is not program.table
    assert GatherOnce(program, least - 2 - state // 100).table is program.table


@pytest.mark.sampled
def test_a_text_longer_than_the_context_is_continued_from_its_last_half():
    engine = engine_of("gpt2", max_position_embeddings=32)
    prompts = [*PROMPTS[:2], RNG.integers(1, 256, 90).tolist()]
    found = tokens_of(engine.generate(prompts, 50, temperature=0))
    assert found == plain.greedy(engine, "gpt2", prompts, 50, context=32)


@pytest.mark.sampled
def test_500_tokens_compile_one_decode_step(caplog):
    engine = engine_of("llama", max_position_embeddings=1024)
    with jax.log_compiles(), caplog.at_level(logging.DEBUG):
        engine.generate([[1, 2, 3]], 500, temperature=0.7)
        compiled = [r.getMessage() for r in caplog.records if "Compiling" in r.getMessage()]
        counts = {n: sum(f"jit({n})" in m for m in compiled) for n in ("prefill", "decode")}
        assert counts == {"prefill": 0, "decode": 1}
        traced = [r.getMessage() for r in caplog.records if "tracing" in r.getMessage()]
        assert sum("decode" in message for message in traced) == 1, traced
        caplog.clear()
        # Other values, prompts and seeds of the same shape compile nothing.
        engine.generate([[4, 5, 6, 7]], 499, temperature=0.3, seed=9)
        again = [r.getMessage() for r in caplog.records if "Compiling" in r.getMessage()]
        assert not [m for m in again if "jit(prefill)" in m or "jit(decode)" in m]


@pytest.mark.default_cases("False-prompts2-2-names2")
@pytest.mark.parametrize(
    ("cache", "prompts", "tokens", "names"),
    [
        (True, PROMPTS, 2, ["gather", "prefill", "decode"]),
        (True, [[1, 2], [3]], 8, ["gather", "fresh", "decode"]),
        (False, PROMPTS, 2, ["gather", "decode"]),
    ],
)
def test_programs_compile_before_the_first_token_is_asked_for(
    cache, prompts, tokens, names, caplog
):
    engine = engine_of("mistral", "ZeRO 3, tensor 2", max_position_embeddings=1024)
    with jax.log_compiles(), caplog.at_level(logging.DEBUG):
        generator = Generator(engine.program, cache=cache)
        generation = generator.start(engine.state, Request(prompts, tokens, Sampling(0.7)))
        batching = generation.batching
        batching._runs._gather_compiled()
        batching._runs._compiled()
        batching._programs._fresh_compiled()
        batching._programs._decode_compiled()
        before = [r.getMessage() for r in caplog.records if "Compiling jit(" in r.getMessage()]
        caplog.clear()
        generation.finish()
        after = [r.getMessage() for r in caplog.records if "Compiling jit(" in r.getMessage()]
    assert all(any(f"jit({name})" in m for m in before) for name in names), before
    assert not after


def test_the_cache_is_sharded_as_the_model_is():
    engine = engine_of("mistral", "ZeRO 3, tensor 2")
    generator = Generator(engine.program)
    generation = generator.start(engine.state, Request(PROMPTS, 4, Sampling(0)))
    next(iter(generation))
    caches = generation.batching._groups[0].caches
    assert set(caches) == {"blocks/attn/key_cache", "blocks/attn/value_cache"}
    for cache in caches.values():  # [layers, sequences, key heads, length, head_dim]
        assert cache.shape == (2, 4, 2, 64, 16)
        assert cache.sharding.shard_shape(cache.shape) == (2, 1, 1, 64, 16)
    bf16 = engine_of("qwen3", "ZeRO 3, bf16")
    generation = Generator(bf16.program).start(bf16.state, Request(PROMPTS, 4, Sampling(0)))
    next(iter(generation))
    caches = generation.batching._groups[0].caches
    assert {x.dtype.name for x in caches.values()} == {"bfloat16"}


def test_a_decode_step_neither_copies_the_cache_nor_moves_it_between_devices():
    sizes = {"max_position_embeddings": 512, "num_hidden_layers": 8, "head_dim": 64}
    engine = engine_of("llama", "tensor 2", **sizes)
    generator = Generator(engine.program)
    generation = generator.start(engine.state, Request([[1, 2]] * 4, 500, Sampling(0)))
    next(iter(generation))
    caches = generation.batching._groups[0].caches
    compiled = lowered(generation, caches).compile()
    lines = compiled.as_text().splitlines()
    gathered = [line for line in lines if " all-gather(" in line or "all-to-all(" in line]
    assert not [line for line in gathered if ",512," in line or "[512," in line], gathered
    size = sum(x.addressable_shards[0].data.nbytes for x in caches.values())
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= size  # donated
    assert memory.temp_size_in_bytes < size / 3  # a layer at a time


def test_a_seed_decides_and_a_prompt_draws_the_same_in_any_batch(gpt2_engine):
    engine = gpt2_engine
    rules = {"temperature": 1.0, "top_p": 0.95}
    first = engine.generate(PROMPTS, 20, seed=3, **rules)
    assert engine.generate(PROMPTS, 20, seed=3, **rules) == first
    other = engine.generate(PROMPTS, 20, seed=4, **rules)
    assert all(a.tokens != b.tokens for a, b in zip(first, other, strict=True))
    same = engine.generate([PROMPTS[0]] * 2, 20, seed=3, **rules)
    assert same[0] == first[0]
    assert same[0].tokens != same[1].tokens  # each prompt has numbers of its own


def test_a_repetition_penalty_keeps_tokens_of_the_prompt_away(gpt2_engine):
    engine = gpt2_engine
    found = engine.generate(PROMPTS, 24, temperature=0, repetition_penalty=1e6)
    for prompt, each in zip(PROMPTS, found, strict=True):
        assert len({*each.tokens}) == 24 and not {*prompt} & {*each.tokens}


class Letters:
    """Tokens are letters from chr(256) on; 7 ends a document."""

    end = 7

    def encode(self, text):
        return [ord(c) - 256 for c in text]

    def decode(self, ids):
        return "".join(chr(256 + i) for i in ids)


def test_texts_end_at_a_stop_string_at_the_document_or_after_the_tokens(gpt2_engine):
    engine, letters = gpt2_engine, Letters()
    prompts = [letters.decode(p) for p in PROMPTS]
    options = {"temperature": 0, "tokenizer": letters}
    whole = engine.generate(prompts, 24, **options)
    assert {each.ended_by for each in whole} == {"tokens"}
    stop = whole[1].text[5:8]
    assert stop not in whole[1].text[:7] and stop not in whole[0].text
    stopped = engine.generate(prompts, 24, stop=[stop], **options)
    assert stopped[1].ended_by == "stop" and stopped[1].text == whole[1].text[:5]
    assert stopped[1].tokens == whole[1].tokens[:8]
    assert stopped[0] == whole[0]  # the others go on
    letters.end = whole[0].tokens[3]
    ended = engine.generate(prompts[:1], 24, **options)[0]
    assert ended == (whole[0].text[:3], whole[0].tokens[:3], "end")
    letters.end = 7
    pieces = [*engine.stream(prompts, 24, stop=[stop], **options)]
    texts = ["".join(p.text for p in pieces if p.prompt == i) for i in range(3)]
    assert texts[1:] == [each.text for each in stopped[1:]]


def test_generation_after_training_uses_the_new_parameters():
    engine = engine_of("gpt2", "data 2")
    before = engine.generate(PROMPTS, 8, temperature=0)
    batch = {"tokens": np.tile(np.arange(1, 34, dtype=np.int32), (16, 1))}
    for _ in range(3):
        engine.train_batch(batch)
    after = tokens_of(engine.generate(PROMPTS, 8, temperature=0))
    assert after == plain.greedy(engine, "gpt2", PROMPTS, 8) != tokens_of(before)


def test_a_model_that_takes_no_tokens_is_refused(gpt2_engine):
    config = {"model": {"family": "mlp", "preset": "tiny"}, "train_batch_size": 8}
    config["optimizer"] = {"type": "SGD", "params": {"lr": 0.1}}
    engine = jaxspeed.initialize(config=config, devices=jax.devices()[:1])
    with pytest.raises(jaxspeed.JaxspeedError):
        engine.generate([[1, 2]], 4)
    with pytest.raises(ConfigError, match="top-k: 0"):
        gpt2_engine.generate([[1, 2]], 4, top_k=0)


def test_every_language_family_is_generated_from():
    def makes_text(family):
        named = hasattr(family, "language") or hasattr(family, "mixture")
        return named or family.loss is models.family("llama").loss

    own = {name for name in models.FAMILIES if makes_text(models.family(name))}
    with_encoders = {"t5"}  # tests/models/test_t5.py
    with_scores = {"llama_classifier"}  # in place of a head
    assert own - with_encoders - with_scores == {family for family, _ in FAMILIES.values()}
