"""Rollouts draw as NumPy does with the same noise, and know the distributions they draw from."""

import json
import logging
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspeed
from jaxspeed.data.tokenizer import ByteTokenizer
from jaxspeed.errors import ConfigError, ModelError
from jaxspeed.generation import Generator, Request, Sampling
from jaxspeed.generation.continuous_batching import GroupShape, Runs
from jaxspeed.generation.decode_programs import Draws, ForwardPrograms
from jaxspeed.generation.rollout import SAMPLED
from jaxspeed.objectives.model_logprobs import ROUTING
from jaxspeed.ops.moe import routing as routing_of_ops
from jaxspeed.train.gather_once import GatherOnce
from tests.generation import plain
from tests.generation.test_generation import PLACEMENTS, SIZES, ZERO3
from tests.generation.test_user_caches import MODELS, VOCAB
from tests.generation.test_user_caches import engine_of as engine_of_user

RNG = np.random.default_rng(5)
PROMPTS = [RNG.integers(1, 256, n).tolist() for n in (3, 1, 30, 17, 16, 40, 9, 5, 21, 2)]
ENDS = [*range(1, 9)]  # drawn after some 32 tokens
MODEL = {**SIZES, "initializer_range": 0.15}
RULES = {"temperature": 0.7, "top_p": 0.8}
LORA = {"lora": {"r": 4, "target_modules": "all-linear"}}
STRATEGIES = {
    **{name: PLACEMENTS[name] for name in ("one device", "data 2", "tensor 2", "ZeRO 3")},
    "ZeRO 3, tensor 2, NF4": {
        **ZERO3, **LORA, "mesh": {"tensor": 2}, "quantize": {"weights": "nf4"},
    },
    "ZeRO 3, bf16": PLACEMENTS["ZeRO 3, bf16"],
    "pipe 2": PLACEMENTS["pipe 2"],
    "seq 2": {"mesh": {"seq": 2}, **ZERO3},
}  # fmt: skip
DEVICES = {"one device": 1, "data 2": 2, "tensor 2": 2}


def engine_of(placement="one device", devices=None):
    config = {
        "model": {"family": "llama", "preset": "tiny", "config": MODEL},
        "train_batch_size": 16,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "run": {"seed": 1, "compilation_cache": False},
        **STRATEGIES[placement],
    }
    count = devices or DEVICES.get(placement, 8)
    return jaxspeed.initialize(config=config, devices=jax.devices()[:count])


@pytest.fixture(scope="module")
def engine():
    """On one device, for tests that change nothing of it."""
    return engine_of()


@pytest.fixture(scope="module")
def rollout(engine):
    return engine.rollout(PROMPTS, 40, generations=3, stop_tokens=ENDS, seed=3, step=7, **RULES)


def drawn_by_numpy(row, noise, temperature, top_p):
    """(the token, its log-probability, which are kept, how far the next candidate is)."""
    z = row.astype(np.float64) / temperature
    order = np.argsort(-z)
    p = np.exp(z - z.max())
    p /= p.sum()
    before = np.cumsum(p[order]) - p[order]
    kept = np.zeros(len(z), bool)
    kept[order[before < top_p]] = True
    scores = np.where(kept, z + noise, -np.inf)
    best, other = np.sort(scores)[:-3:-1]
    token = int(np.argmax(scores))
    return token, np.log(p[token] / p[kept].sum()), kept, best - other


def compare(rollout, logits, *, seed, step, difference):
    """Draw each token again from the logits of its text, wherever rounding does not decide.

    Returns the part of the draws that were compared.
    """
    compared = total = 0
    for row in rollout.completions:
        text = [*rollout.prompts[row.prompt], *row.tokens]
        padded = np.zeros((1, plain.WIDTH), np.int32)
        padded[0, : len(text)] = text
        of_text = np.asarray(logits(padded))[0]
        key = jax.random.key(seed)
        for number in (step, row.prompt, row.generation):
            key = jax.random.fold_in(key, number)
        for i, token in enumerate(row.tokens):
            at = of_text[len(text) - len(row.tokens) + i - 1]
            noise = np.asarray(jax.random.gumbel(jax.random.fold_in(key, i), at.shape))
            wanted, logprob, kept, gap = drawn_by_numpy(at, noise, **RULES)
            z = at / RULES["temperature"]
            total += 1
            if gap < 2 * difference / RULES["temperature"]:
                continue
            compared += 1
            assert token == wanted
            assert (kept == (z >= z.max() - row.thresholds[i])).all()
            assert abs(row.logprobs[i] - logprob) < 1e-5 * max(1, abs(logprob)) + difference
    return compared / total


@pytest.mark.default_cases("one device")
@pytest.mark.parametrize("placement", ["one device", "tensor 2", "ZeRO 3"])
def test_tokens_are_those_of_numpy_with_the_same_noise(placement, engine, rollout):
    if placement != "one device":
        engine = engine_of(placement)
        options = {"generations": 3, "stop_tokens": ENDS, "seed": 3, "step": 7, **RULES}
        rollout = engine.rollout(PROMPTS, 40, **options)
    logits = plain.logits_of(engine, "llama")
    assert compare(rollout, logits, seed=3, step=7, difference=1e-4) > 0.99
    rows = rollout.completions
    assert [(row.prompt, row.generation) for row in rows] == [
        (i, g) for i in range(len(PROMPTS)) for g in range(3)
    ]
    for row in rows:
        assert row.ended_by == ("end" if row.tokens[-1] in ENDS else "tokens")
        assert row.ended_by == "end" or len(row.tokens) == 40
        assert not {*row.tokens[:-1]} & {*ENDS}
    assert 5 < sum(row.ended_by == "end" for row in rows) < 25


def difference_of(engine, rollout, temperature=0.7, **other):
    """How far the trainer's log-probabilities are from the sampler's, per max(1, |log p|)."""
    batch = rollout.batch()
    sampled = batch.pop(SAMPLED)
    counted = batch["targets"] >= 0
    more = -len(sampled) % 8
    batch = {
        name: np.pad(x, ((0, more), *[(0, 0)] * (x.ndim - 1)))
        for name, x in (batch | other).items()
    }
    trained = np.asarray(engine.logprobs(batch, temperature=temperature).logprobs)
    trained = trained[: len(sampled)]
    return (np.abs(trained - sampled) / np.maximum(1, np.abs(sampled)))[counted]


@pytest.mark.default_cases("one device", "ZeRO 3, tensor 2, NF4")
@pytest.mark.parametrize("placement", list(STRATEGIES))
def test_log_probabilities_are_those_of_training(placement, engine, rollout):
    if placement != "one device":
        engine = engine_of(placement)
        rollout = engine.rollout(PROMPTS, 40, generations=3, stop_tokens=ENDS, **RULES)
    apart = difference_of(engine, rollout)
    assert len(apart) > 500
    if "bf16" in placement:
        assert 0 < apart.mean() < 5e-3
    else:
        assert apart.max() < 1e-5


def test_a_check_compares_the_sampler_with_the_trainer(engine, rollout):
    report, apart = engine.check_rollout(rollout), difference_of(engine, rollout)
    assert report.ok and "ok" in str(report)
    assert report.tokens == len(apart) and report.ratios == 0
    # Of batches of another size.
    np.testing.assert_allclose([report.largest, report.mean], [apart.max(), apart.mean()], rtol=0.3)
    other = replace(rollout, sampling=replace(rollout.sampling, temperature=0.8))
    report = engine.check_rollout(other)
    assert not report.ok and report.ratios > 0.05 and "different distributions" in str(report)


def test_rules_on_one_side_are_noticed(engine, rollout):
    assert difference_of(engine, rollout, temperature=0.71).mean() > 1e-3
    no_rule = np.full_like(rollout.batch()["thresholds"], 1e30)
    assert difference_of(engine, rollout, thresholds=no_rule).mean() > 1e-2


@pytest.mark.sampled
def test_a_stale_cache_and_a_wrong_position_are_noticed(engine, monkeypatch):
    options = {"generations": 2, "stop_tokens": ENDS, **RULES}

    def noticed():
        generator = Generator(engine.program)
        request = Request(PROMPTS, 40, Sampling(**RULES), stop_tokens=ENDS)
        return difference_of(engine, generator.rollout(engine.state, request, generations=2))

    assert noticed().max() < 1e-5
    with monkeypatch.context() as patch:  # a refilled row has the keys of the one before
        patch.setattr(ForwardPrograms, "insert", lambda self, caches, *_: caches)
        assert noticed().mean() > 1e-2
    following = ForwardPrograms._call

    def shifted(self, state, caches, batch):
        return following(self, state, caches, {**batch, "positions": batch["positions"] + 1})

    with monkeypatch.context() as patch:
        patch.setattr(ForwardPrograms, "_call", shifted)
        engine_of_shifted = noticed()
    assert engine_of_shifted.mean() > 1e-3
    assert difference_of(engine, engine.rollout(PROMPTS, 40, **options)).max() < 1e-5


def as_bits(rollout):
    return [(*row[:4], row.logprobs.tobytes(), row.ended_by) for row in rollout.completions]


@pytest.mark.default_cases("8-layout0")
@pytest.mark.parametrize(
    ("devices", "layout"), [(8, {}), (2, {}), (2, {"segment": 7, "groups": 3}), (1, {"groups": 2})]
)
def test_bits_are_those_on_one_device_whatever_is_beside_a_row(devices, layout, engine, rollout):
    other = engine_of("data 2", devices)
    options = {"generations": 3, "stop_tokens": ENDS, "seed": 3, "step": 7, **RULES}
    assert as_bits(other.rollout(PROMPTS, 40, **options, **layout)) == as_bits(rollout)


def test_seed_step_prompt_and_generation_decide_the_draws(engine, rollout):
    options = {"stop_tokens": ENDS, **RULES}
    some = engine.rollout(PROMPTS[:2], 40, seed=3, step=7, **options)
    first = {(row.prompt, row.generation): row.tokens for row in rollout.completions}
    assert [row.tokens for row in some.completions] == [first[0, 0], first[1, 0]]
    for changed in ({"seed": 4, "step": 7}, {"seed": 3, "step": 8}):
        other = engine.rollout(PROMPTS[:2], 40, **changed, **options)
        assert other.completions[0].tokens != first[0, 0]
    assert len({first[0, generation] for generation in range(3)}) == 3


def test_a_segment_is_one_program_without_transfers_to_the_host(engine, monkeypatch):
    calls, programs = [], set()
    following = ForwardPrograms.decode

    def decode(self, state, caches, rows, steps, draws):
        calls.append(int(steps))
        programs.add(self)
        return following(self, state, caches, rows, steps, draws)

    monkeypatch.setattr(ForwardPrograms, "decode", decode)
    engine.rollout(PROMPTS[:4], 40, segment=32)
    assert calls == [32, 32]
    engine.generate(PROMPTS[:4], 40)
    assert calls == [32] * 4
    sizes = {program: key for key, program in engine._generator._programs.items()}
    for program in programs:
        text = text_of(engine, program, *sizes[program][:2])
        assert " while(" in text
        assert not re.search(r"(in|out)feed|callback|\b(send|recv)(-done)?\(|xla_ffi_python", text)


def text_of(engine, program, rows, length):
    """The compiled decode program."""
    shape = GroupShape(rows, 1, length, length, 3)
    draws = Draws(np.zeros(2, np.uint32), np.zeros(4, np.int32), Sampling(1.0).rules)
    runs = Runs(GatherOnce(engine.program), engine.state)
    arguments = runs.state, program.fresh(), shape.arrays([]), np.int32(1), draws
    return program._decode.lower(*arguments).compile().as_text()


@pytest.mark.sampled
def test_starts_are_computed_once_for_a_prompt_and_rows_stay_on_their_devices(monkeypatch):
    engine = engine_of("data 2", 4)
    calls = []
    prefill = ForwardPrograms.prefill.func

    def counted(self):
        compiled = prefill(self)

        def call(state, batch):
            calls.append(batch["tokens"].shape)
            return compiled(state, batch)

        call.trace = compiled.trace
        return call

    monkeypatch.setattr(ForwardPrograms, "prefill", property(counted))
    engine.rollout([PROMPTS[2]] * 8, 24, generations=16)  # of 4 x 8 rows
    assert calls == [(32, 32)]
    (programs,) = engine._generator._programs.values()
    caches, sources = programs.fresh(), np.zeros(32, np.int32)
    text = programs.insert.lower(caches, programs.fresh(), sources).compile().as_text()
    assert not re.search(r" (all-\w+|collective-\w+|reduce-scatter)\(", text)


def test_caches_are_freed(engine):
    engine.rollout(PROMPTS, 12)
    shapes = {x.shape for x in jax.live_arrays() if x.ndim == 5}
    assert not [shape for shape in shapes if shape[1] == 8], shapes


@pytest.mark.sampled
def test_no_program_has_a_loop_in_which_parameters_are_gathered(rollout):
    engine = engine_of("ZeRO 3")
    found = []
    for memory in (None, 1):
        generator = Generator(engine.program, once=GatherOnce(engine.program, memory))
        request = Request(PROMPTS, 40, Sampling(**RULES), stop_tokens=ENDS, seed=3)
        found.append(generator.rollout(engine.state, request, generations=3, step=7))
        (programs,) = generator._programs.values()
        assert programs.loops == (memory is None)
    kept, again = ([row.tokens for row in x.completions] for x in found)
    same = sum(a == b for a, b in zip(kept, again, strict=True))
    assert same > 0.9 * len(kept)  # products of gathered weights may be other ones
    assert difference_of(engine, found[1]).max() < 1e-5


def test_a_stop_string_ends_a_text_at_the_token_that_completes_it(engine):
    class Letters:
        end = 7

        def encode(self, text):
            return [ord(c) - 256 for c in text]

        def decode(self, ids):
            return "".join(chr(256 + i) for i in ids)

    options = {"seed": 3, "tokenizer": Letters(), **RULES}
    free = engine.rollout(PROMPTS, 40, **options)
    longest = max(free.completions, key=lambda row: len(row.tokens))
    stop = longest.text[5:8]
    stopped = engine.rollout(PROMPTS, 40, stop=[stop], **options).completions[longest.prompt]
    assert stopped.ended_by == "stop" and stopped.text == longest.text[:5]
    assert stopped.tokens == longest.tokens[:8]
    assert len(stopped.logprobs) == len(stopped.thresholds) == 8
    for row in free.completions:
        ends = row.ended_by == "end"
        assert ends == (row.tokens[-1] == 7)
        assert row.text == Letters().decode(row.tokens[: len(row.tokens) - ends])


def test_long_prompts_are_dropped_and_the_rest_keep_their_numbers(engine, rollout):
    prompts = [PROMPTS[0], RNG.integers(1, 256, 100).tolist(), PROMPTS[2]]
    options = {"stop_tokens": ENDS, "seed": 3, "step": 7, **RULES}
    short = engine.rollout(prompts, 40, **options)
    assert short.dropped == [1]
    assert [row.prompt for row in short.completions] == [0, 2]
    batch = short.batch()
    longest = max(len(prompts[row.prompt]) + len(row.tokens) for row in short.completions)
    assert batch["tokens"].shape == (2, 64 if longest <= 65 else 128)  # a power of two
    for i, row in enumerate(short.completions):
        text = [*prompts[row.prompt], *row.tokens]
        targets = batch["targets"][i]
        here = np.flatnonzero(targets >= 0)
        assert batch["tokens"][i, : len(text) - 1].tolist() == text[:-1]
        assert targets[here].tolist() == list(row.tokens)
        assert (here + 1 == np.arange(len(prompts[row.prompt]), len(text))).all()
        assert (batch[SAMPLED][i, here] == row.logprobs).all()
    with pytest.raises(ConfigError, match="no prompt fits: the shortest has 100 tokens"):
        engine.rollout(prompts[1:2], 40)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"repetition_penalty": 1.1}, "rollout: repetition_penalty"),
        ({"stop": [""]}, "stop: "),
        ({"generations": 0}, "generations: 0"),
        ({"segment": 0}, "segment: 0"),
        ({"block": -1}, "block: -1"),
    ],
    ids=str,
)
def test_an_impossible_rollout_is_refused(options, message, engine):
    with pytest.raises(ConfigError, match=message):
        engine.rollout(PROMPTS, 8, **options)


@pytest.mark.sampled
def test_ends_are_those_of_the_folder_too(engine, tmp_path):
    engine.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": ENDS}))
    config = {
        "model": {"pretrained": str(tmp_path / "model")},
        "train_batch_size": 16,
        "optimizer": {"type": "SGD"},
        "run": {"compilation_cache": False},
    }
    other = jaxspeed.initialize(config=config, devices=jax.devices()[:1])
    options = {"seed": 3, "step": 7, **RULES}
    ended = other.rollout(PROMPTS, 40, **options, tokenizer=ByteTokenizer())
    assert sum(row.tokens[-1] in ENDS for row in ended.completions) > 3
    here = engine.rollout(PROMPTS, 40, stop_tokens=[0, *ENDS], **options)
    assert [row.tokens for row in ended.completions] == [row.tokens for row in here.completions]


@pytest.mark.sampled
def test_an_answer_to_messages_ends_as_their_template_ends_a_turn(engine):
    class WithTemplate(ByteTokenizer):
        beside = {  # noqa: RUF012
            "tokenizer_config.json": json.dumps(
                {"chat_template": "{% for m in messages %}<{{ m['content'] }}>{% endfor %}"}
            ).encode()
        }

    said = [{"role": "user", "content": "hi"}]
    options = {"generations": 16, "tokenizer": WithTemplate(), "seed": 3}
    found = engine.rollout([said, "<hi>"], 40, **options)
    assert [*map(bytes, found.prompts)] == [b"<hi>"] * 2
    stopped = [row for row in found.completions if row.ended_by == "stop"]
    assert stopped
    for row in stopped:
        assert row.tokens[-1] == ord(">") and ">" not in row.text
    with pytest.raises(ConfigError, match="a prompt has messages, and there is no tokenizer"):
        engine.rollout([said], 8)


@pytest.mark.default_cases("nnx")
@pytest.mark.parametrize("name", list(MODELS))
def test_caches_that_take_one_token_of_all_rows_start_together(name, caplog):
    engine = engine_of_user(MODELS[name])
    prompts = [[1 + x % (VOCAB - 1) for x in prompt[:12]] for prompt in PROMPTS]
    request = Request(prompts, 20, Sampling(1.0, top_k=20), stop_tokens=[1, 2], context=48)
    with caplog.at_level(logging.WARNING, "jaxspeed"):
        found = Generator(engine.program).rollout(engine.state, request, generations=2)
    assert caplog.text.count("batches that start together") == 1
    recomputed = Generator(engine.program, cache=False)
    other = recomputed.rollout(engine.state, request, generations=2)
    for row, wanted in zip(found.completions, other.completions, strict=True):
        assert row.tokens == wanted.tokens
        np.testing.assert_allclose(row.logprobs, wanted.logprobs, atol=2e-5)


MIXTURES = {  # how it is placed, devices, and how far the trainer may be from the sampler
    "bf16": ({"bf16": {"enabled": True}}, 1, 0.05),
    "one device": ({}, 1, 1e-5),
    "expert 2": ({"mesh": {"expert": 2}}, 2, 1e-5),
    "ZeRO 3, tensor 2, NF4": (STRATEGIES["ZeRO 3, tensor 2, NF4"], 8, 1e-5),
}


def mixture(placement="one device", devices=1, **sizes):
    config = {
        "model": {"family": "mixtral", "preset": "tiny", "config": {**MODEL, **sizes}},
        "train_batch_size": 16,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "run": {"seed": 1, "compilation_cache": False},
        **(MIXTURES[placement][0] if isinstance(placement, str) else placement),
    }
    return jaxspeed.initialize(config=config, devices=jax.devices()[:devices])


@pytest.mark.default_cases("bf16")
@pytest.mark.parametrize("placement", list(MIXTURES))
def test_the_sampler_s_experts_are_those_of_training(placement):
    _, devices, bound = MIXTURES[placement]
    engine = mixture(placement, devices)
    rollout = engine.rollout(PROMPTS, 40, generations=3, stop_tokens=ENDS, seed=0, **RULES)
    routing = rollout.batch()[ROUTING]
    assert routing.dtype == np.int32 and routing.shape[2:] == (2, 2)
    for row, choices in zip(rollout.completions, routing, strict=True):
        read = len(rollout.prompts[row.prompt]) + len(row.tokens) - 1
        assert ((choices >= 0).all((1, 2)) == (np.arange(len(choices)) < read)).all()
    apart = difference_of(engine, rollout)
    assert apart.max() < bound
    if placement == "bf16":  # another expert of some tokens
        free = replace(
            rollout, completions=[row._replace(routing=None) for row in rollout.completions]
        )
        assert difference_of(engine, free).max() > 3 * apart.max()
    other = np.where(routing < 0, -1, (routing + 1) % 4)
    assert difference_of(engine, rollout, **{ROUTING: other}).mean() > 0.1


def random_choices(rows, seq, routers, k=2):
    draws = np.argsort(np.random.default_rng(3).random((rows, seq, routers, 4)), axis=-1)
    return draws[..., :k].astype(np.int32)


def losses_after_a_step(engine, **arrays):
    tokens = np.random.default_rng(4).integers(1, 256, (16, 17)).astype(np.int32)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], **arrays}
    return [float(engine.train_batch(batch)["loss"]) for _ in range(2)]


@pytest.mark.sampled
def test_a_step_has_the_gradient_of_the_choices_of_its_batch(monkeypatch):
    choices = random_choices(16, 16, 1)
    found = losses_after_a_step(mixture(num_hidden_layers=1), **{ROUTING: choices})
    own = losses_after_a_step(mixture(num_hidden_layers=1))
    monkeypatch.setattr(routing_of_ops, "_largest", lambda values, k: jnp.asarray(choices[:, :, 0]))
    wanted = losses_after_a_step(mixture(num_hidden_layers=1))
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    assert abs(found[0] - own[0]) > 1e-3 and abs(found[1] - own[1]) > 1e-3


@pytest.mark.sampled
def test_choices_are_replayed_wherever_a_step_runs():
    arrays = {ROUTING: random_choices(16, 16, 2)}
    wanted = losses_after_a_step(mixture(), **arrays)
    recomputed = {"parallel": {"remat": "full"}}
    for more, devices in (
        ({"gradient_accumulation_steps": 2}, 2),
        (ZERO3 | {"mesh": {"expert": 2}}, 8),
        ({"mesh": {"seq": 2}}, 2),
        (recomputed, 1),
    ):
        found = losses_after_a_step(mixture(more, devices), **arrays)
        np.testing.assert_allclose(found, wanted, rtol=1e-5, err_msg=str(more))


@pytest.mark.sampled
def test_choices_that_cannot_be_replayed_are_refused():
    with pytest.raises(ConfigError, match="a router has a capacity_factor"):
        mixture(capacity_factor=1.5).rollout(PROMPTS, 8)
    with pytest.raises(ModelError, match=r"routing is \(16, 16, 1, 2\), and the model's routers"):
        losses_after_a_step(mixture(), **{ROUTING: random_choices(16, 16, 1)})
    engine = mixture({"mesh": {"pipe": 2}, "gradient_accumulation_steps": 2}, 2)
    assert ROUTING not in engine.rollout(PROMPTS[:2], 8).batch()
    with pytest.raises(ConfigError, match="routing, which is not replayed over an axis pipe"):
        losses_after_a_step(engine, **{ROUTING: random_choices(16, 16, 2)})
