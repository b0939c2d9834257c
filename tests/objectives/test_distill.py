"""Distillation equals plain Flax and Optax on one device, under every strategy."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jaxspeed.models import build, from_pretrained

import jaxspeed
from jaxspeed.errors import ConfigError
from tests.adapters.lora_loop import merged

BATCH, SEQ, VOCAB, LR, DEVICES = 16, 16, 64, 0.02, 8
SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "vocab_chunk": 24,
}
TEACHER = SIZES | {"hidden_size": 24, "num_hidden_layers": 4}
STAGE_3 = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
LORA = {
    "lora": {"r": 2, "lora_alpha": 3, "init_lora_weights": False, "target_modules": "all-linear"}
}


def config(folder: Any, objective: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return {
        "model": {"family": "gpt2", "config": SIZES},
        "objective": {"type": "distill", "teacher": str(folder), **(objective or {})},
        "train_batch_size": BATCH,
        "gradient_clipping": 0,
        "optimizer": {"type": "SGD", "params": {"lr": LR}},
        "run": {"seed": 1},
        **more,
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A teacher that is wider and deeper than the student."""
    path = tmp_path_factory.mktemp("teacher") / "model"
    keys = config("") | {"objective": {"type": "next_token"}, "run": {"seed": 5}}
    engine = jaxspeed.initialize(config=keys | {"model": {"family": "gpt2", "config": TEACHER}})
    engine.save_pretrained(path)
    return path


def batch_of(seed: int = 0) -> dict[str, np.ndarray]:
    """Tokens, with samples of unequal numbers of tokens that count."""
    rng = np.random.default_rng(seed)
    counted = rng.integers(2, SEQ, (BATCH, 1))
    mask = (np.arange(SEQ + 1) <= counted).astype(np.int32)
    return {"tokens": rng.integers(0, VOCAB, (BATCH, SEQ + 1)).astype(np.int32), "mask": mask}


class Plain:
    """A model of plain Flax with parameters by path."""

    def __init__(self, sizes: dict[str, Any]):
        model = nnx.jit(lambda: build("gpt2", None, sizes).factory(nnx.Rngs(0)))()
        self.graph, self.state, self.rest = nnx.split(model, nnx.Param, ...)

    def logits(self, values: dict[str, Any], batch: Any) -> jax.Array:
        flat = nnx.to_flat_state(self.state)
        state = nnx.from_flat_state(
            [(keys, x.replace(values["/".join(map(str, keys))])) for keys, x in flat]
        )
        return nnx.merge(self.graph, state, self.rest)(batch["tokens"][:, :-1])


def values_of(engine: Any) -> dict[str, jax.Array]:
    return {path: jnp.array(np.asarray(x)) for path, x in engine.parameters.items()}


def teacher_logits(folder: Path, batch: Any) -> np.ndarray:
    frozen = {"train_batch_size": BATCH, "optimizer": {"type": "SGD", "params": {"lr": 0}}}

    engine = jaxspeed.initialize(from_pretrained(folder), config=frozen)
    return np.asarray(Plain(TEACHER).logits(values_of(engine), batch))


def divergence(student: Any, teacher: Any, beta: float, temperature: float, xp: Any) -> Any:
    """The generalized Jensen-Shannon divergence by token, from all logits."""

    def log_softmax(x: Any) -> Any:
        x = x / temperature
        x = x - x.max(-1, keepdims=True)
        return x - xp.log(xp.exp(x).sum(-1, keepdims=True))

    log_s, log_t = log_softmax(student), log_softmax(teacher)
    s, t = xp.exp(log_s), xp.exp(log_t)
    if beta == 0:
        return (t * (log_t - log_s)).sum(-1)
    if beta == 1:
        return (s * (log_s - log_t)).sum(-1)
    log_m = xp.log((1 - beta) * s + beta * t)
    return (beta * t * (log_t - log_m) + (1 - beta) * s * (log_s - log_m)).sum(-1)


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "stage 3, accumulation 2, labels": (
        {"beta": 0.5, "temperature": 2.0, "labels_weight": 0.3},
        {**STAGE_3, "gradient_accumulation_steps": 2},
    ),
    "tensor 2, stage 1, reverse": (
        {},
        {"mesh": {"tensor": 2}, "zero_optimization": {"stage": 1}},
    ),
    "stage 0, forward": ({"beta": 0.0}, {}),
    "stage 2, accumulation 4": (
        {"beta": 0.1, "labels_weight": 1.0},
        {"zero_optimization": {"stage": 2}, "gradient_accumulation_steps": 2},
    ),
    "pipe 2, stage 1": (
        {"beta": 0.5},
        {"mesh": {"pipe": 2}, "zero_optimization": {"stage": 1}, "gradient_accumulation_steps": 2},
    ),
    "pipe 2, tensor 2": (
        {"labels_weight": 0.3},
        {"mesh": {"pipe": 2, "tensor": 2}, "gradient_accumulation_steps": 2},
    ),
    "seq 2, stage 3": ({"beta": 0.5}, {**STAGE_3, "mesh": {"seq": 2}}),
    "adapters, stage 3": ({"beta": 0.5}, {**STAGE_3, **LORA}),
    "adapters, tensor 2": ({}, {"mesh": {"tensor": 2}, **LORA}),
}


@pytest.mark.default_cases("stage 3, accumulation 2, labels")
@pytest.mark.parametrize("case", CASES)
def test_a_step_equals_plain_optax(case, folder):
    options, more = CASES[case]
    engine = jaxspeed.initialize(config=config(folder, options, **more))
    assert [phase.name for phase in engine.program.phases] == ["teacher", "step"]
    values, batch = values_of(engine), batch_of()
    scale = 1.5 * ("lora" in more)
    trained = {path: x for path, x in values.items() if path.startswith("lora/") or not scale}
    fixed = {path: x for path, x in values.items() if path not in trained}
    plain, of_teacher = Plain(SIZES), teacher_logits(folder, batch)
    counted = batch["mask"][:, 1:]

    def loss(trained: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
        both = fixed | trained
        logits = plain.logits(merged(both, scale) if scale else both, batch)
        beta, temperature = options.get("beta", 1.0), options.get("temperature", 1.0)
        by_token = divergence(logits, of_teacher, beta, temperature, jnp)
        labels = optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:])
        mean, labels = (jnp.sum(x * counted) / counted.sum() for x in (by_token, labels))
        return mean + options.get("labels_weight", 0) * labels, mean

    (total, mean), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(trained)
    evaluated = engine.eval_batch(batch)
    metrics = engine.train_batch(batch)
    named = "divergence" if "labels_weight" in options else "loss"
    for found in (metrics, evaluated):
        np.testing.assert_allclose(float(found["loss"]), total, rtol=1e-5)
        np.testing.assert_allclose(float(found[named]), mean, rtol=1e-5)
    np.testing.assert_allclose(float(metrics["grad_norm"]), optax.tree.norm(gradients), rtol=1e-5)
    after = engine.parameters
    for path, x in trained.items():
        np.testing.assert_allclose(
            after[path], x - LR * gradients[path], rtol=1e-5, atol=1e-6, err_msg=path
        )


@pytest.mark.sampled
def test_completions_that_the_student_samples_are_what_it_learns_on(folder):
    options = {"on_policy": True, "temperature": 1.5, "top_p": 0.9, "beta": 0.5}
    engine = jaxspeed.initialize(config=config(folder, options, mesh={"tensor": 2}))
    assert engine.program.traced_loss.loss_fn.__self__.records == "prompts"
    prompts = [[1, 2, 3], [4], [5, 6], [7, 8, 9, 10]]
    rollout = engine.rollout(prompts, 8, generations=4, stop_tokens=[0], temperature=1.5, top_p=0.9)
    batch = rollout.batch()
    whole = {"tokens": np.pad(batch["tokens"], ((0, 0), (0, 1)))}  # the last token is no input
    student = np.asarray(Plain(SIZES).logits(values_of(engine), whole))
    by_token = divergence(student, teacher_logits(folder, whole), 0.5, 1.5, np)
    counted = batch["targets"] != -100
    expected = (by_token * counted).sum() / counted.sum()
    np.testing.assert_allclose(float(engine.train_batch(batch)["loss"]), expected, rtol=1e-5)


@pytest.mark.sampled
def test_check_and_the_phases_of_a_step(folder):
    """`check` compares with one device and with plain Flax; the teacher's head is no state."""
    engine = jaxspeed.initialize(config=config(folder, {"beta": 0.5}, mesh={"tensor": 2}))
    batch = batch_of()
    report = engine.compiled(batch)
    assert [report.phase, *report.others] == ["teacher", "step"]
    found = engine.check(batch)
    assert found.ok, str(found)


def test_a_quantized_teacher_is_the_teacher_of_its_decoded_weights(folder):
    teacher = {"pretrained": str(folder), "quantize": {"weights": "int8"}}
    found = [
        jaxspeed.initialize(config=config(folder, {"beta": 0.0, **of})).eval_batch(batch_of())
        for of in ({}, {"teacher": teacher})
    ]
    exact, near = (float(x["loss"]) for x in found)
    assert near != exact and near == pytest.approx(exact, rel=0.05)


def test_another_vocabulary_is_refused_before_the_run(folder):
    sizes = {"model": {"family": "gpt2", "config": SIZES | {"vocab_size": 80}}}
    with pytest.raises(ConfigError, match=r"teacher.*vocabulary of 64 tokens, and .* has 80"):
        jaxspeed.initialize(config=config(folder, **sizes))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"teacher": None}, "objective.teacher"),
        ({"beta": 1.5}, "objective.beta"),
        ({"temperature": 0.0}, "objective.temperature"),
        ({"teachr": "x"}, "teachr"),
    ],
)
def test_keys_that_cannot_be_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        jaxspeed.Config.load(config("folder", options))
