"""Steps of GRPO and RLOO equal plain Flax and Optax, on any mesh; what they are refused with."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jaxspeed.models import build

import jaxspeed
from jaxspeed.config import Config
from jaxspeed.errors import ConfigError
from jaxspeed.train import build_program
from jaxspeed.user_models.config_model import resolve_model
from tests.adapters.lora_loop import merged
from tests.moe.small_models import MIXTRAL
from tests.objectives.plain_policy import (
    IGNORED,
    Batch,
    plain_loss,
    plain_metrics,
    recorded,
    token_logprobs,
)
from tests.objectives.plain_preferences import SIZES, VOCAB, PlainLoop
from tests.support.reference import slice_of_each_rank

ROWS, SEQ, LR = 16, 16, 0.02
GPT2 = {"family": "gpt2", "config": SIZES | {"vocab_chunk": 24}}
LORA = {"r": 2, "lora_alpha": 3, "init_lora_weights": False, "target_modules": "all-linear"}
OBJECTIVES: dict[str, dict[str, Any]] = {
    "dapo": {"type": "grpo", "temperature": 0.7, "epsilon_high": 0.3},
    "grpo": {
        "type": "grpo", "loss_type": "grpo", "importance_sampling_level": "sequence", "beta": 0.2,
    },
    "cispo": {
        "type": "grpo", "loss_type": "cispo", "epsilon_high": 1.4, "beta": 0.1,
        "importance_sampling_mode": "sequence_truncate",
    },
    "rloo": {"type": "rloo", "beta": 0.1},
}  # fmt: skip
SETTINGS: dict[str, dict[str, Any]] = {
    "stage 0": {"zero_optimization": {"stage": 0}},
    "stage 0, accumulation 2": {"gradient_accumulation_steps": 2},
    "stage 3, accumulation 2": {
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "gradient_accumulation_steps": 2,
    },
    "tensor 2": {"mesh": {"tensor": 2}, "zero_optimization": {"stage": 1}},
    "expert 2": {"mesh": {"expert": 2}, "model": MIXTRAL, "gradient_accumulation_steps": 2},
    "pipe 2": {"mesh": {"pipe": 2}, "gradient_accumulation_steps": 2},
    "seq 2": {"mesh": {"seq": 2}, "zero_optimization": {"stage": 3}},
    "adapters": {"lora": LORA, "zero_optimization": {"stage": 3}},
    "NF4": {"lora": LORA, "model": {**GPT2, "quantize": {"weights": "nf4"}}},
}  # fmt: skip
DEFAULT = [("dapo", "stage 3, accumulation 2")]
CASES = [
    (name, setting)
    for number, setting in enumerate(SETTINGS)
    for i, name in enumerate(OBJECTIVES)
    if i == number % 4 or setting in ("tensor 2", "adapters") or (name, setting) in DEFAULT
]


def config(objective: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "model": GPT2,
        "objective": {"rewards": "module:reward", **objective},
        "train_batch_size": ROWS,
        "gradient_clipping": 0,
        "optimizer": {"type": "SGD", "params": {"lr": LR, "momentum": 0.9}},
        "run": {"seed": 1},
        **more,
    }


class PolicyLoop(PlainLoop):
    """Steps of SGD with momentum on rows of completions."""

    def __init__(
        self, factory: Any, values: Any, options: dict[str, Any], scale: float, mixes: bool
    ):
        super().__init__(factory, values, lambda *_: 0.0, LR, scale)
        self.options, self.mixes = options, mixes

    def logits(self, trained: Any, batch: Batch) -> Any:
        values = self.fixed | trained
        return self.model(merged(values, self.scale) if self.scale else values)(batch["tokens"])

    def reference(self, batch: Batch) -> np.ndarray:
        """The log-probabilities of the model without its adapters."""
        o = {"temperature": 1.0, "mirror_sampling": True, **self.options}
        logits = np.asarray(jax.jit(lambda: self.model(self.fixed)(batch["tokens"]))(), np.float64)
        flat = batch["targets"].reshape(-1)
        at = flat != IGNORED
        logprobs = np.zeros(len(flat), np.float32)
        logprobs[at] = token_logprobs(
            np, logits.reshape(len(flat), -1)[at], flat[at], batch["thresholds"].reshape(-1)[at], o
        )[0]
        return logprobs.reshape(batch["targets"].shape)

    def policy_step(
        self, batch: Batch, micro: list[Batch]
    ) -> tuple[float, float, dict[str, float]]:
        """(loss, norm of the gradient, metrics)."""

        def loss(trained: Any) -> Any:
            logits = self.logits(trained, batch)
            total = plain_loss(jnp, logits, batch, self.options)[0]
            if self.mixes:
                model = self.model(self.fixed | trained)
                auxiliary = [model.hidden_and_auxiliary(part["tokens"])[1] for part in micro]
                total += sum(auxiliary) / len(micro)
            return total, logits

        (total, logits), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(self.trained)
        updates, self.opt = self.optimizer.update(grads, self.opt, self.trained)
        self.trained = optax.apply_updates(self.trained, updates)
        seen = plain_loss(np, np.asarray(logits, np.float64), batch, self.options)[1]
        metrics = plain_metrics(seen, self.options)
        return float(total), float(optax.tree.norm(grads)), metrics


@pytest.mark.default_cases(*("-".join(case) for case in DEFAULT))
@pytest.mark.parametrize(("name", "setting"), CASES)
def test_a_step_equals_plain_optax(name, setting, tmp_path):
    objective, more = OBJECTIVES[name], SETTINGS[setting]
    if objective.get("beta") and "lora" not in more:
        # It is there, and not read: the batch has the reference's log-probabilities.
        folder, model = tmp_path / "model", {"model": more.get("model", GPT2)}
        jaxspeed.initialize(config=config({"type": "grpo"}, **model)).save_pretrained(folder)
        objective = {**objective, "reference_model": str(folder)}
    engine = jaxspeed.initialize(config=config(objective, **more))
    model = more.get("model", GPT2)
    factory = build(model["family"], model.get("preset"), model["config"]).factory
    values = {path: jnp.array(np.asarray(x)) for path, x in engine.parameters.items()}
    loop = PolicyLoop(factory, values, OBJECTIVES[name], 1.5 * ("lora" in more), model is MIXTRAL)
    parts, ranks = engine.program.batch.accumulation, engine.program.ranks
    batch = recorded(ROWS, SEQ, VOCAB)
    passed = dict(batch)
    if "lora" in more and objective.get("beta"):  # computed in a phase before the step
        batch["reference_logprobs"] = loop.reference(batch)
        del passed["reference_logprobs"]
    micro = [
        {n: slice_of_each_rank(x, i, parts, ranks) for n, x in batch.items()} for i in range(parts)
    ]
    loss, norm, expected = loop.policy_step(batch, micro)
    metrics = engine.train_batch(passed)
    np.testing.assert_allclose(
        (float(metrics["loss"]), float(metrics["grad_norm"])),
        (loss, norm),
        rtol=1e-5,
        atol=1e-6,  # advantages of either sign cancel in the loss
    )
    for key, value in expected.items():
        np.testing.assert_allclose(float(metrics[key]), value, rtol=1e-5, atol=1e-6, err_msg=key)
    trained = engine.parameters
    for path, value in loop.trained.items():
        np.testing.assert_allclose(trained[path], value, rtol=1e-5, atol=1e-6, err_msg=path)


@pytest.mark.default_cases("dapo")
@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_loss_is_proved_to_be_a_sum_over_rows(name):
    objective = OBJECTIVES[name]
    loaded = Config.load(config(objective, lora=LORA, gradient_accumulation_steps=2))
    program = build_program(loaded, *resolve_model(loaded))
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), recorded(ROWS, SEQ, VOCAB)
    )
    reduction = program.in_mesh(
        lambda: program.gradients.reduction(program.state.variables, shapes, 0)
    )()
    assert reduction == ("step", "the loss is a weighted sum over samples")


@pytest.mark.sampled
def test_full_training_has_the_folder_that_it_began_with_as_reference(tmp_path):
    folder, grpo = tmp_path / "model", {"type": "grpo", "beta": 0.2}
    jaxspeed.initialize(config=config({"type": "grpo"})).save_pretrained(folder)
    named = {"model": {"pretrained": str(folder)}}
    batch = recorded(ROWS, SEQ, VOCAB, old=False)
    del batch["reference_logprobs"]
    engines = [
        jaxspeed.initialize(config=config({**grpo, **keys}, **more))
        for keys, more in (({}, named), ({"reference_model": str(folder)}, {}))
    ]
    by_default, by_name = ([float(e.train_batch(batch)["kl"]) for _ in "12"] for e in engines)
    assert by_default[0] == pytest.approx(0, abs=1e-6)  # it is the reference
    assert by_default[1] > 1e-6
    assert by_name == pytest.approx(by_default, rel=1e-5, abs=1e-7)
    with pytest.raises(ConfigError, match=r"name a folder \(reference_model\), train without it"):
        jaxspeed.initialize(config=config(grpo))
    warm = {**named, "run": {"seed": 1, "init_from": "runs/other"}}
    with pytest.raises(ConfigError, match=r"name a folder \(reference_model\), train without it"):
        jaxspeed.initialize(config=config(grpo, **warm))


@pytest.mark.sampled
def test_a_step_holds_the_sampler_against_the_trainer():
    """Equal log-probabilities, and not with a rule of sampling on one side alone."""
    rules = {"temperature": 0.7, "top_p": 0.8}
    engine = jaxspeed.initialize(config=config({"type": "grpo", **rules}, mesh={"tensor": 2}))
    prompts = [[1, 2, 3], [4], [5, 6], [7, 8, 9, 10]]

    def difference(**changed: Any) -> tuple[float, float]:
        rollout = engine.rollout(prompts, 12, generations=4, stop_tokens=[0], **rules | changed)
        batch = rollout.batch() | {
            "advantages": np.ones(ROWS, np.float32),
            "row_weights": np.ones(ROWS, np.float32),
        }
        mirrored, without = (
            float(engine.eval_batch(x)["sampling/sampling_logp_difference/max"])
            for x in (batch, {name: x for name, x in batch.items() if name != "thresholds"})
        )
        return mirrored, without

    exact, without_top_p = difference()
    assert exact <= 1e-5 and without_top_p > 0.05
    assert difference(temperature=1.0)[0] > 0.05
    assert difference(top_p=None)[0] <= 1e-5  # thresholds come with the tokens


class Block(nnx.Module):
    def __init__(self, wide: int, rngs: nnx.Rngs):
        self.up, self.down = nnx.Linear(8, wide, rngs=rngs), nnx.Linear(wide, 8, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(jax.nn.gelu(self.up(x)))


class UnlikeBlocks(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCAB, 8, rngs=rngs)
        self.narrow = nnx.List([Block(8, rngs) for _ in range(2)])
        self.wide = nnx.List([Block(16, rngs) for _ in range(2)])

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for block in (*self.narrow, *self.wide):
            x = block(x)
        return self.embed.attend(x)


@pytest.mark.sampled
def test_stages_of_unlike_blocks_are_refused():
    keys = config({"type": "grpo"}, mesh={"pipe": 2}, gradient_accumulation_steps=2)
    del keys["model"]
    with pytest.raises(ConfigError, match=r"mesh\.pipe: .*unlike blocks"):
        jaxspeed.initialize(UnlikeBlocks, config=keys, example_batch=recorded(ROWS, SEQ, VOCAB))


def test_models_that_do_not_sample_are_refused():
    loaded = Config.load(config({"type": "grpo"}, model={"family": "t5", "preset": "tiny"}))
    with pytest.raises(ConfigError, match=r"objective\.type: found \"grpo\". It trains language"):
        resolve_model(loaded)
