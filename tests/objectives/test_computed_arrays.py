"""Arrays that an objective computes in a phase before the step, against a plain loop of Optax."""

import json
import shutil
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
from jaxspeed.cli.main import main
from jaxspeed.data.tokenizer import BPETokenizer, ByteTokenizer
from jaxspeed.errors import BatchError, ConfigError
from jaxspeed.interop.pretrained import refuse_other_tokenizer
from jaxspeed.run import source_of
from tests.adapters.lora_loop import merged

HERE = "tests.objectives.anchored:Anchored"
BATCH, SEQ, VOCAB, STEPS, LR, DEVICES = 16, 16, 64, 3, 0.02, 8
SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
STAGE_3 = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
LORA = {
    "lora": {"r": 2, "lora_alpha": 3, "init_lora_weights": False, "target_modules": "all-linear"}
}
CASES: dict[str, dict[str, Any]] = {
    "stage 3, accumulation 2, adapters": {**STAGE_3, **LORA, "gradient_accumulation_steps": 2},
    "stage 0": {},
    "stage 0, rings": {"parallel": {"data_reduction": "ring"}},
    "stage 3, accumulation 2": {**STAGE_3, "gradient_accumulation_steps": 2},
    "tensor 2, stage 1, accumulation 4": {
        "mesh": {"tensor": 2}, "zero_optimization": {"stage": 1}, "gradient_accumulation_steps": 4,
    },
    "pipe 2, stage 1": {
        "mesh": {"pipe": 2}, "zero_optimization": {"stage": 1}, "gradient_accumulation_steps": 2,
    },
    "pipe 2, adapters": {**LORA, "mesh": {"pipe": 2}, "gradient_accumulation_steps": 2},
    "seq 2, stage 3": {**STAGE_3, "mesh": {"seq": 2}},
}  # fmt: skip


def config(**more: Any) -> dict[str, Any]:
    objective = {"type": HERE, "reference": "each_step" if "lora" in more else "trained"}
    return {
        "model": {"family": "gpt2", "config": SIZES},
        "objective": objective,
        "train_batch_size": BATCH,
        "gradient_clipping": 0,
        "optimizer": {"type": "SGD", "params": {"lr": LR, "momentum": 0.9}},
        "run": {"seed": 1},
        **more,
    }


def batches(steps: int = STEPS, samples: int = BATCH) -> list[dict[str, np.ndarray]]:
    """Tokens, with samples of unequal numbers of tokens that count."""
    rng = np.random.default_rng(0)
    counted = rng.integers(2, SEQ, (steps, samples, 1))
    mask = (np.arange(SEQ + 1) <= counted).astype(np.int32)
    tokens = rng.integers(0, VOCAB, (steps, samples, SEQ + 1)).astype(np.int32)
    return [{"tokens": t, "mask": m} for t, m in zip(tokens, mask, strict=True)]


class PlainLoop:
    """The same training in plain Flax and Optax, on one device."""

    def __init__(self, values: dict[str, Any], reference: dict[str, Any] | None, scale: float):
        model = nnx.jit(lambda: build("gpt2", None, SIZES).factory(nnx.Rngs(0)))()
        self.graph, self.state, self.rest = nnx.split(model, nnx.Param, ...)
        self.reference, self.scale = reference, scale
        self.trained = {
            path: x for path, x in values.items() if path.startswith("lora/") or not scale
        }
        self.fixed = {path: x for path, x in values.items() if path not in self.trained}
        self.optimizer = optax.sgd(LR, momentum=0.9)
        self.opt = self.optimizer.init(self.trained)

    def logprobs(self, values: dict[str, Any], batch: Any) -> jax.Array:
        """log p of the targets [batch, seq]."""
        flat = nnx.to_flat_state(self.state)
        paths = ["/".join(map(str, keys)) for keys, _ in flat]
        state = nnx.from_flat_state(
            [(keys, x.replace(values[path])) for path, (keys, x) in zip(paths, flat, strict=True)]
        )
        logits = nnx.merge(self.graph, state, self.rest)(batch["tokens"][:, :-1])
        logp = jax.nn.log_softmax(logits)
        return jnp.take_along_axis(logp, batch["tokens"][:, 1:, None], 2)[..., 0]

    def loss(self, trained: dict[str, Any], batch: Any) -> tuple[jax.Array, jax.Array]:
        counted = batch["mask"][:, 1:]
        values = self.fixed | trained
        values = merged(values, self.scale) if self.scale else values
        logp = self.logprobs(values, batch)
        of_reference = jax.lax.stop_gradient(
            logp if self.reference is None else self.logprobs(self.reference, batch)
        )
        ratios = (logp - of_reference) * counted
        shift = jax.lax.stop_gradient(ratios.sum() / counted.sum())
        terms = jax.nn.softplus(shift - ratios) * counted
        return terms.sum() / counted.sum(), (of_reference * counted).sum() / counted.sum()

    def step(self, batch: Any) -> tuple[float, float, float]:
        """(loss, mean of the reference's log-probabilities, norm of the gradient)."""
        (loss, mean), grads = jax.jit(jax.value_and_grad(self.loss, has_aux=True))(
            self.trained, batch
        )
        updates, self.opt = self.optimizer.update(grads, self.opt, self.trained)
        self.trained = optax.apply_updates(self.trained, updates)
        return float(loss), float(mean), float(optax.tree.norm(grads))


def plain_loop(engine: Any, reference: dict[str, Any] | None = None) -> PlainLoop:
    """The loop from an engine's parameters; with adapters the reference is the base by default."""
    values = {path: jnp.array(np.asarray(x)) for path, x in engine.parameters.items()}
    base = {path: x for path, x in values.items() if not path.startswith("lora/")}
    adapted = len(base) < len(values)
    return PlainLoop(values, reference or (base if adapted else None), 1.5 * adapted)


def compare(engine: Any, loop: PlainLoop, steps: int = STEPS) -> None:
    """Train both, and compare losses, metrics, gradients and parameters."""
    for batch in batches(steps):
        metrics, (loss, mean, norm) = engine.train_batch(batch), loop.step(batch)
        np.testing.assert_allclose(float(metrics["loss"]), loss, rtol=1e-5)
        np.testing.assert_allclose(float(metrics["reference"]), mean, rtol=1e-5)
        np.testing.assert_allclose(float(metrics["grad_norm"]), norm, rtol=1e-5)
    trained = engine.parameters
    for path, value in loop.trained.items():
        np.testing.assert_allclose(trained[path], value, rtol=1e-5, atol=1e-6, err_msg=path)


@pytest.mark.default_cases("stage 3, accumulation 2, adapters")
@pytest.mark.parametrize("case", CASES)
def test_steps_equal_plain_optax(case):
    engine = jaxspeed.initialize(config=config(**CASES[case]))
    assert [phase.name for phase in engine.program.phases] == ["reference", "shift", "step"]
    loop = plain_loop(engine)
    compare(engine, loop)
    batch = batches(4)[3]
    evaluated = engine.eval_batch(batch)
    np.testing.assert_allclose(
        [float(evaluated[name]) for name in ("loss", "reference")],
        loop.loss(loop.trained, batch),
        rtol=1e-5,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with the weights of another seed."""
    path = tmp_path_factory.mktemp("reference") / "model"
    other = config(run={"seed": 5}, train_batch_size=8)
    jaxspeed.initialize(config=other | {"objective": {"type": "next_token"}}).save_pretrained(path)
    return path


FROZEN: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "stage 3": ({}, {**STAGE_3, "gradient_accumulation_steps": 2}),
    "offload": ({"offload": True}, STAGE_3),
    "stage 0, pipe 2, tensor 2": (
        {"zero_stage": 0},
        {"mesh": {"pipe": 2, "tensor": 2}, "gradient_accumulation_steps": 2},
    ),
    "stage 1, adapters": ({}, {**LORA, "zero_optimization": {"stage": 1}}),
}


def frozen_config(folder: Path, section: Any, **more: Any) -> dict[str, Any]:
    named = str(folder) if not section else {"pretrained": str(folder), **section}
    return config(**more) | {
        "objective": {"type": HERE, "reference_model": named, "reference": "each_step"}
    }


@pytest.mark.default_cases("stage 3")
@pytest.mark.parametrize("case", FROZEN)
def test_a_frozen_model_is_the_reference(case, folder):
    section, more = FROZEN[case]
    engine = jaxspeed.initialize(config=frozen_config(folder, section, **more))
    (frozen,) = engine.program.frozen.values()
    roles = frozen.table.bytes_by_role()
    parameters = 4 * sum(x.size for path, x in engine.parameters.items() if "lora/" not in path)
    assert {role for role, (total, _) in roles.items() if total} == {"param"}
    assert frozen.table.stage == section.get("zero_stage", 3)
    assert bool(frozen.table.host_bytes_by_role()) == section.get("offload", False)
    assert not jax.tree.leaves(frozen.state.opt)
    if not section:
        shards = 8 if case == "stage 3" else 1
        assert roles["param"][1] == pytest.approx(parameters / shards, rel=0.1)
    reference = jaxspeed.initialize(
        config=config(run={"seed": 5}) | {"objective": {"type": "next_token"}}
    )
    values = {path: jnp.array(np.asarray(x)) for path, x in reference.parameters.items()}
    compare(engine, plain_loop(engine, values))


@pytest.mark.sampled
def test_the_reference_of_a_saved_adapter_is_as_it_was_read(tmp_path):
    jaxspeed.initialize(config=config(**LORA)).save_adapter(tmp_path / "adapter")
    adapter = {"lora": {"adapter": str(tmp_path / "adapter")}, **STAGE_3}
    engine = jaxspeed.initialize(config=config(**adapter))
    values = {path: jnp.array(np.asarray(x)) for path, x in engine.parameters.items()}
    compare(engine, plain_loop(engine, merged(values, 1.5)))
    found = engine.check(batches(4)[3])
    assert found.ok, str(found)

    engine.save_checkpoint(tmp_path / "saved")
    engine.wait()
    resumed = jaxspeed.initialize(config=config(**adapter))
    resumed.load_checkpoint(tmp_path / "saved")
    batch = batches(4)[3]
    assert float(resumed.train_batch(batch)["loss"]) == float(engine.train_batch(batch)["loss"])


def test_check_and_compiled_show_the_phases(folder):
    engine = jaxspeed.initialize(config=frozen_config(folder, {}, **STAGE_3))
    batch = batches(1)[0]
    report = engine.compiled(batch)
    assert [report.phase, *report.others] == ["reference", "shift", "step"]
    shapes = engine.program.values(batch)
    assert shapes["model of reference"] == engine.program.frozen["model of reference"].state
    found = engine.check(batch)
    assert found.ok, str(found)
    with pytest.raises(jaxspeed.JaxspeedError, match="several programs here"):
        _ = engine.step
    with_arrays = engine.program.complete(batch)
    assert with_arrays["reference_logprobs"].shape == (BATCH, SEQ)
    given = {**batch, "reference_logprobs": np.zeros((BATCH, SEQ), np.float32)}
    assert float(engine.eval_batch(given)["reference"]) == 0  # what a batch has is not computed


@pytest.mark.parametrize("mode", ["bf16", "torch_autocast"])
def test_arrays_in_fp32_are_not_rounded(mode):
    keys = config(
        **{mode: {"enabled": True, "dtype": "bf16"} if mode != "bf16" else {"enabled": True}}
    )
    engine = jaxspeed.initialize(config=keys)
    batch = batches(1)[0]
    arrays = {
        "reference_logprobs": np.full((BATCH, SEQ), -301.5, np.float32),
        "shift": np.full(BATCH, 301.5, np.float32),
    }
    evaluated = engine.eval_batch(batch | arrays)
    assert float(evaluated["reference"]) == pytest.approx(
        -301.5 * SEQ * BATCH / batch["mask"][:, 1:].sum(), rel=1e-5
    )


def test_what_has_no_reference_is_refused(folder, tmp_path):
    batch = batches(1)[0]
    full = config() | {"objective": {"type": HERE}}
    with pytest.raises(ConfigError, match="full training changes the model"):
        jaxspeed.initialize(config=full)
    by_rewards = {"type": "rloo", "rewards": "a:b", "max_completion_length": 4}
    with pytest.raises(ConfigError, match=r"train without it \(beta: 0\), or train adapters"):
        jaxspeed.initialize(config=full | {"objective": by_rewards})
    saved = {"lora": {**LORA["lora"], "modules_to_save": ["wte"]}}
    with pytest.raises(ConfigError, match="modules_to_save"):
        jaxspeed.initialize(config=full | saved)
    once = full | {"objective": {"type": HERE, "reference": "precompute"}}
    engine = jaxspeed.initialize(config=once)
    for call in (engine.train_batch, engine.eval_batch, engine.check):
        with pytest.raises(BatchError, match=r"lacks reference_logprobs.*engine\.logprobs"):
            call(batch)
    assert [engine.compiled(batch).phase, *engine.compiled(batch).others] == ["shift", "step"]
    logprobs = engine.logprobs(batch).logprobs
    engine.train_batch({**batch, "reference_logprobs": logprobs})
    server = {"parallel": {"data_reduction": "parameter_server", "servers": 4}}
    with pytest.raises(ConfigError, match="parameter_server"):
        jaxspeed.initialize(config=config(**server))
    sizes = {"model": {"family": "gpt2", "config": SIZES | {"vocab_size": 80}}}
    with pytest.raises(ConfigError, match=r"vocabulary of 64 tokens, and .* has 80"):
        jaxspeed.initialize(config=frozen_config(folder, {}, **sizes))


def test_it_trains_and_evaluates_from_the_command_line(tmp_path, capsys):
    path = tmp_path / "config.json"
    keys = config(
        **LORA,
        **STAGE_3,
        mesh={"pipe": 2},
        gradient_accumulation_steps=2,
        data={"source": "synthetic", "seq_len": SEQ, "samples": 64, "held_out": 5 / 64},
        run={"devices": "cpu:8", "steps": STEPS, "seed": 1, "output": str(tmp_path / "run")},
    )
    path.write_text(json.dumps(keys))
    assert main(["train", str(path), "--json"]) == 0, capsys.readouterr().err
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [record for record in map(json.loads, lines) if "loss" in record]
    corpus, engine = source_of(path).corpus(), jaxspeed.initialize(config=str(path))
    loop = plain_loop(engine)

    def with_mask(batch):
        return {"mask": np.ones_like(batch["tokens"]), **batch}

    for step, record in enumerate(steps):
        expected = loop.step(with_mask(corpus.train.batch(step, BATCH)))
        got = [record[name] for name in ("loss", "reference", "grad_norm")]
        np.testing.assert_allclose(got, expected, rtol=1e-5)
    assert len(steps) == STEPS and corpus.held_out.samples == 5  # one batch, of 8

    capsys.readouterr()
    assert main(["eval", str(path), "--json"]) == 0, capsys.readouterr().err
    evaluated = json.loads(capsys.readouterr().out)
    expected = loop.loss(loop.trained, with_mask(corpus.held_out.slice(0, 5)))
    got = [evaluated[name] for name in ("eval_loss", "reference")]
    np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_a_folder_with_another_tokenizer_is_refused(folder, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    weights = from_pretrained(other).weights
    refuse_other_tokenizer(ByteTokenizer(), weights, "x")  # it has none
    trained = BPETokenizer.train(["some words, some more words"] * 9, 270)
    (other / "tokenizer.json").write_bytes(trained.to_bytes())
    refuse_other_tokenizer(trained, weights, "x")
    with pytest.raises(ConfigError, match="another tokenizer than the model that trains"):
        refuse_other_tokenizer(ByteTokenizer(), weights, "x")
