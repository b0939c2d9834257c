"""Log-probabilities of a batch's targets are those of the model's logits in plain JAX."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

import jaxspeed
from jaxspeed import models
from jaxspeed.config import Config
from jaxspeed.engine.calls import Calls
from jaxspeed.engine.logprobs import LogprobPrograms
from jaxspeed.errors import BatchError, ConfigError, ModelError
from jaxspeed.train import array_program as programs
from jaxspeed.train.array_program import array_program
from jaxspeed.train.build import build_program
from jaxspeed.user_models.config_model import resolve_model

VOCAB, ROWS, SEQ = 250, 16, 32  # the vocabulary is not a multiple of the devices
SIZES = {"num_hidden_layers": 2, "vocab_size": VOCAB, "initializer_range": 0.1}
REQUESTS = {"temperature": 0.7, "entropy": True, "is_top": True, "mean_logit": True}
LORA = {"lora": {"r": 4, "lora_dropout": 0.1, "target_modules": "all-linear"}}
DORA = {"lora": {"r": 4, "use_dora": True, "target_modules": "all-linear"}}


def zero(stage: int, **more: Any) -> dict[str, Any]:
    section = {"stage": stage, "stage3_param_persistence_threshold": 0, **more}
    return {"zero_optimization": section}


def staged(stage: int, **mesh: int) -> dict[str, Any]:
    return {"mesh": {"pipe": 2, **mesh}, "gradient_accumulation_steps": 2, **zero(stage)}


STRATEGIES: dict[str, tuple[str, dict[str, Any]]] = {
    "ZeRO 3, tensor 2, seq 2": ("llama", {**zero(3), "mesh": {"tensor": 2, "seq": 2}}),
    "pipe 2, ZeRO 1": ("gpt2", staged(1)),
    "ZeRO 0": ("llama", zero(0)),
    "ZeRO 1, rings": ("llama", {**zero(1), "parallel": {"data_reduction": "ring"}}),
    "ZeRO 2, offload": ("llama", zero(2, offload_optimizer={"device": "cpu"})),
    "ZeRO 3, offload": ("llama", zero(3, offload_param={"device": "cpu"})),
    "ZeRO 3, bf16": ("llama", {**zero(3), "bf16": {"enabled": True}}),
    "ZeRO 3, expert 2": ("mixtral", {**zero(3), "mesh": {"expert": 2}}),
    "tensor 2, biased experts": ("deepseek", {**zero(1), "mesh": {"tensor": 2}}),
    "pipe 2, seq 2": ("llama", staged(1, seq=2)),
    "pipe 2, tensor 2, ZeRO 3": ("gpt2", staged(3, tensor=2)),
    "seq 4, zig-zag": (
        "llama", {"mesh": {"seq": 4}, "parallel": {"sequence": {"layout": "zigzag"}}},
    ),
    "seq 2, tiles": ("llama", {"mesh": {"seq": 2}, "parallel": {"sequence_tiles": 4}}),
    "parameter server": (
        "llama", {"parallel": {"data_reduction": "parameter_server", "servers": 4}},
    ),
    "remat": ("llama", {**zero(3), "parallel": {"remat": "full"}}),
}  # fmt: skip
ADAPTED = {
    "ZeRO 3": {**zero(3), **LORA},
    "ZeRO 3, tensor 2, DoRA, NF4": {
        **zero(3), **DORA, "mesh": {"tensor": 2}, "quantize": {"weights": "nf4"},
    },
    "pipe 2": {**staged(1), **LORA},
    "int8": {**zero(2), **LORA, "quantize": {"weights": "int8"}},
}  # fmt: skip


def config(family: str = "llama", quantize: Any = None, **more: Any) -> dict[str, Any]:
    layers = {"num_hidden_layers": 3} if family == "deepseek" else {}
    model = {"family": family, "preset": "tiny", "config": SIZES | layers}
    return {
        "model": model if quantize is None else {**model, "quantize": quantize},
        "train_batch_size": ROWS,
        "optimizer": {"type": "SGD", "params": {"lr": 0.01}},
        "run": {"seed": 1, "compilation_cache": False},
        **more,
    }


def tokens(seed: int = 0) -> dict[str, np.ndarray]:
    return {"tokens": np.random.default_rng(seed).integers(0, VOCAB, (ROWS, SEQ + 1))}


def plain_logits(engine: Any) -> Any:
    """logits(tokens) of a model of the base's parameters, in plain Flax on one device."""
    section = engine.config.model
    factory = models.build(section.family, section.preset, section.config).factory
    graph, state = nnx.split(nnx.eval_shape(lambda: factory(nnx.Rngs(0))))
    values = {path: np.asarray(x) for path, x in engine.parameters.items()}
    variables = engine.state.variables
    for keys, variable in nnx.to_flat_state(state):
        path = "/".join(map(str, keys))
        dtype = engine.placements[path].read.dtype if path in values else None
        variable.set_value(jnp.asarray(values.get(path, variables.get(path)), dtype))
    model = nnx.merge(graph, jax.device_put(state, jax.devices()[0]))
    return jax.jit(lambda tokens: model(tokens))


def formula(logits: jax.Array, targets: np.ndarray) -> dict[str, np.ndarray]:
    """From logits that are divided by the temperature, in fp64."""
    logits = np.asarray(logits, np.float64)
    shifted = logits - logits.max(-1, keepdims=True)
    log_p = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return {
        "logprobs": np.take_along_axis(log_p, targets[..., None], axis=-1)[..., 0],
        "entropy": -(np.exp(log_p) * log_p).sum(-1),
        "is_top": logits.argmax(-1) == targets,
        "mean_logit": logits.mean(-1),
    }


def assert_close(found: Any, expected: np.ndarray, bound: float = 1e-5) -> None:
    error = np.abs(np.asarray(found, np.float64) - expected)
    assert error.max() <= bound * max(1, np.abs(expected).max()), error.max()


def assert_formula(found: Any, logits: jax.Array, targets: np.ndarray) -> None:
    expected = formula(logits / REQUESTS["temperature"], targets)
    for name in ("logprobs", "entropy", "mean_logit"):
        assert_close(getattr(found, name), expected[name])
    np.testing.assert_array_equal(found.is_top, expected["is_top"])
    assert_close(found.sums, expected["logprobs"].sum(-1))
    assert np.all(found.counted)


@pytest.mark.default_cases("ZeRO 3, tensor 2, seq 2", "pipe 2, ZeRO 1")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_they_are_those_of_the_logits(strategy):
    family, more = STRATEGIES[strategy]
    engine, batch = jaxspeed.initialize(config=config(family, **more)), tokens()
    before = jax.tree.map(np.asarray, engine.state.variables)
    found = engine.logprobs(batch, **REQUESTS)
    logits, targets = plain_logits(engine)(batch["tokens"][:, :-1]), batch["tokens"][:, 1:]
    if "bf16" in strategy:
        assert_close(found.logprobs, formula(logits / 0.7, targets)["logprobs"], 1e-2)
    else:
        assert_formula(found, logits, targets)
    if engine.program.on_one_mesh:
        samples, *positions = found.logprobs.sharding.spec
        assert positions == ["seq"] * ("seq" in strategy)
        assert found.sums.sharding.spec == PartitionSpec(samples)
    for path, x in before.items():  # the experts' counts
        np.testing.assert_array_equal(engine.state.variables[path], x)


@pytest.mark.default_cases("ZeRO 3")
@pytest.mark.parametrize("strategy", ADAPTED)
def test_the_reference_is_the_base_without_adapters(strategy):
    engine, batch = jaxspeed.initialize(config=config(**ADAPTED[strategy])), tokens()
    rng = np.random.default_rng(1)
    engine.parameters = {
        path: rng.normal(size=x.shape).astype(np.float32) / 10
        for path, x in engine.parameters.items()
        if path.startswith("lora/")
    }
    reads, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
    found = engine.logprobs(batch, reference=True, **REQUESTS)
    assert_formula(found, plain_logits(engine)(reads), targets)
    merged = engine.module(jnp.asarray(reads))
    assert_formula(engine.logprobs(batch, **REQUESTS), merged, targets)
    assert np.abs(merged - plain_logits(engine)(reads)).max() > 0.1
    with engine.evaluating():
        assert_close(engine.logprobs(batch, True, **REQUESTS).sums, np.asarray(found.sums))


def test_packed_documents_are_those_of_each_alone():
    """Targets of a mask, of the first tokens of documents and of -100 do not count."""
    engine = jaxspeed.initialize(config=config(**zero(3)))
    rows, lengths = tokens()["tokens"], (13, SEQ + 1 - 13)
    spans = [slice(0, 13), slice(13, SEQ + 1)]
    segments = np.repeat([1, 2], lengths)[None].repeat(ROWS, 0)
    positions = np.concatenate([np.arange(n) for n in lengths])[None].repeat(ROWS, 0)
    mask = np.ones_like(rows)
    mask[:, 20:25] = 0
    packed = {"tokens": rows, "segment_ids": segments, "positions": positions, "mask": mask}
    found = engine.logprobs(packed)
    expected, logits = np.zeros((ROWS, SEQ)), plain_logits(engine)
    for span in spans:
        document = rows[:, span]
        values = formula(logits(document[:, :-1]), document[:, 1:])["logprobs"]
        expected[:, span.start : span.stop - 1] = values
    expected *= mask[:, 1:]
    assert_close(found.logprobs, expected)
    assert_close(found.sums, expected.sum(-1))
    counted = mask[:, 1:].astype(bool)
    counted[:, 12] = False  # the first token of the second document
    np.testing.assert_array_equal(found.counted, counted)
    assert found.entropy is found.is_top is found.mean_logit is None

    targets = np.where(counted, rows[:, 1:], -100)
    of_inputs = {name: packed[name][:, :-1] for name in ("tokens", "segment_ids", "positions")}
    same = engine.logprobs({**of_inputs, "targets": targets})
    np.testing.assert_array_equal(same.logprobs, found.logprobs)
    with pytest.raises(BatchError, match=r"tokens \[batch, seq \+ 1\].*\[16, 2, 33\]"):
        engine.logprobs({"tokens": np.stack([rows, rows], 1)})
    with pytest.raises(ConfigError, match="no section lora"):
        engine.logprobs(packed, reference=True)


# -- models of a user's own ------------------------------------------------------------------------


class Bigrams(nnx.Module):
    """Logits of the next token from the last one alone."""

    def __init__(self, rngs: nnx.Rngs, width: int = VOCAB):
        self.table = nnx.Embed(VOCAB, width, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, tokens):
        return self.dropout(self.table(tokens))


def own_loss(model, batch):
    return jnp.mean(model(batch["tokens"][:, :-1]))


def own_engine(model: Any) -> Any:
    return jaxspeed.initialize(
        model, own_loss, {"train_batch_size": 8, "optimizer": {"type": "SGD"}, **zero(3)}
    )


def test_a_model_of_your_own_returns_logits():
    engine, batch = own_engine(Bigrams), {"tokens": tokens()["tokens"]}
    logits = np.asarray(engine.parameters["table/embedding"])[batch["tokens"][:, :-1]]
    found = engine.logprobs(batch, **REQUESTS)  # without dropout
    assert_formula(found, logits, batch["tokens"][:, 1:])
    with pytest.raises(ModelError, match="segment_ids, which the model does not take"):
        engine.logprobs({**batch, "segment_ids": np.ones_like(batch["tokens"])})
    scores = own_engine(lambda rngs: Scores(rngs=rngs))
    with pytest.raises(ModelError, match=r"returned \(16, 32\).*returns logits \[batch, seq"):
        scores.logprobs(batch)


class Scores(Bigrams):
    def __call__(self, tokens):
        return super().__call__(tokens)[..., 0]


# -- refusals --------------------------------------------------------------------------------------


def program_of(family: str, **more: Any) -> Any:
    section = {"model": {"family": family, "preset": "tiny"}, "train_batch_size": 8, **more}
    loaded = Config.load({**section, "optimizer": {"type": "SGD"}})
    return build_program(loaded, *resolve_model(loaded))


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("t5", "span_corruption"),
        ("bert", "masked"),
        ("llama_classifier", "classification"),
        ("vit", "classification"),
    ],
)
def test_models_that_predict_no_next_tokens_are_refused(family, kind):
    program = program_of(family)
    with pytest.raises(ConfigError, match=f"engine.logprobs: this model is trained for {kind}"):
        LogprobPrograms(program, Calls(program))


@pytest.mark.parametrize("beside", [{"modules_to_save": ["norm"]}, {"bias": "all"}])
def test_a_base_that_is_trained_beside_its_adapters_is_no_reference(beside):
    program = program_of("gpt2", lora={"r": 2, "target_modules": ["q_proj"], **beside})
    with pytest.raises(ConfigError, match="trained beside them"):
        array_program(program, lambda model, batch: {}, adapters=False)


# -- the sharding of arrays ------------------------------------------------------------------------


def test_arrays_are_sharded_like_the_batch_whatever_they_are_computed_from(monkeypatch):
    """Without the constraint, what is the same for all samples is replicated."""

    def spec() -> Any:
        program = own_engine(Bigrams).program

        def same(model: Any, batch: Any) -> dict[str, jax.Array]:
            mean = jnp.mean(model(batch["tokens"][:, :-1]))
            return {"mean": jnp.broadcast_to(mean, len(batch["tokens"]))}

        batch = program.abstract_batch({"tokens": np.zeros((8, 5), np.int32)})
        compiled = array_program(program, same).lower(program.state, batch).compile()
        return compiled.output_shardings["mean"].spec

    assert spec() == PartitionSpec("data")
    monkeypatch.setattr(programs, "constrain", lambda x, at, site: x)
    assert spec() != PartitionSpec("data")
