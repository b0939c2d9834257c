"""Checkpoints of DeepSpeed and torch, read: each value and count is what was written."""

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

import jaxspeed
from jaxspeed.errors import CheckpointError, PretrainedError
from jaxspeed.interop import HFForm, MappingTable, TensorRule
from jaxspeed.interop.exporting import export
from jaxspeed.interop.torch_runs import read_torch_run
from tests.interop import torch_files as files

SHAPES = {"a.weight": (5, 3), "b.bias": (7,), "c.weight": (4, 6), "d.scale": ()}
FORMATS = {
    "stage 1": lambda folder, values: files.deepspeed(folder, 1, values),
    "stage 2, 3 ranks": lambda folder, values: files.deepspeed(folder, 2, values, 3),
    "stage 3": lambda folder, values: files.deepspeed(folder, 3, values),
    "stage 3, 4 ranks": lambda folder, values: files.deepspeed(folder, 3, values, 4),
    "universal": files.universal,
    "dcp": files.dcp,
    "dcp, 4 ranks": lambda folder, values: files.dcp(folder, values, 4),
}


def random_values(shapes=SHAPES, seed=0):
    draw = np.random.default_rng(seed)
    return {
        key: {name: np.asarray(draw.random(shape, np.float32)) for name, shape in shapes.items()}
        for key in ("", "exp_avg", "exp_avg_sq")
    }


def assert_has(run, values):
    for key, of_key in values.items():
        tensors = run.moments[key] if key else run.parameters
        for name, x in of_key.items():
            tensor = tensors[name] if name in tensors else tensors[f"model.{name}"]
            assert tensor.shape == x.shape
            np.testing.assert_array_equal(tensor.array(), x, err_msg=f"{key} {name}")


@pytest.mark.fast
@pytest.mark.parametrize("name", FORMATS)
def test_each_format_has_the_values_that_were_written(tmp_path, name):
    values = random_values()
    run = read_torch_run(FORMATS[name](tmp_path / "run", values))
    assert_has(run, values)
    assert run.updates == 5
    if name.startswith("dcp"):
        assert (run.steps, run.skipped, run.position, run.samples) == (5, 0, 6, None)
    else:
        assert (run.steps, run.skipped, run.position, run.samples) == (7, 2, 5, 56)
    assert not run.files.inert


@pytest.mark.fast
def test_a_dynamic_loss_scale_is_read_with_its_window(tmp_path):
    scaler = files.scaler(
        dynamic=True, cur_scale=4096.0, cur_iter=7, last_overflow_iter=3, cur_hysteresis=2
    )
    run = read_torch_run(files.deepspeed(tmp_path, 2, random_values(), loss_scaler=scaler))
    assert run.scaler == {"scale": 4096.0, "good_steps": 3, "hysteresis_left": 2}


@pytest.mark.fast
def test_what_is_not_read_is_counted_by_its_class(tmp_path):
    state = files.Call(files.Global("numpy.random._pickle", "__randomstate_ctor"), ("MT19937",))
    run = read_torch_run(files.deepspeed(tmp_path, 1, random_values(), client=state))
    assert dict(run.files.inert) == {"numpy.random._pickle.__randomstate_ctor": 1}


REFUSED = {
    "a rank is missing": (
        "zero_pp_rank_1_mp_rank_00_optim_states.pt",
        None,
        r"files of 1 of 2 ranks",
    ),
    "the first rank is missing": (
        "zero_pp_rank_0_mp_rank_00_optim_states.pt",
        None,
        r"only.*\[1\]",
    ),
    "tensor ranks": ("mp_rank_01_model_states.pt", files.counts(module={}), "ds_to_universal"),
    "experts": ("expp_rank_0_mp_rank_00_optim_states.pt", {}, "expert ranks.*ds_to_universal"),
}


@pytest.mark.fast
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_read_is_refused_with_what_would_work(tmp_path, case):
    name, content, says = REFUSED[case]
    path = files.deepspeed(tmp_path, 1, random_values()) / "saved" / name
    if content is None:
        path.unlink()
    else:
        path.write_bytes(files.saved(content))
    with pytest.raises(PretrainedError, match=says):
        read_torch_run(tmp_path)


@pytest.mark.fast
def test_half_of_a_checkpoint_is_refused(tmp_path):
    values = random_values()
    there = files.deepspeed(tmp_path / "stage 1", 1, values) / "saved"
    for path in there.glob("*optim_states.pt"):
        path.unlink()
    with pytest.raises(PretrainedError, match=r"lacks \*_optim_states.pt"):
        read_torch_run(there)
    there = files.universal(tmp_path / "universal", values)
    (there / "zero" / "a.weight" / "fp32.pt").unlink()
    model = files.counts(module={n: files.Tensor(x) for n, x in values[""].items()})
    (there / "mp_rank_00_model_states.pt").write_bytes(files.saved(model))
    with pytest.raises(PretrainedError, match=r"zero/a\.weight lacks fp32\.pt"):
        read_torch_run(there)


@pytest.mark.fast
def test_partitions_of_stage_3_over_fewer_ranks_are_refused(tmp_path):
    """As MiCS has them: with the size of another partition all offsets would be other ones."""
    here = files.deepspeed(tmp_path / "of 2", 3, random_values(), 2) / "saved"
    there = files.deepspeed(tmp_path / "of 4", 3, random_values(), 4) / "saved"
    for rank in range(4):
        name = "zero_pp_rank_{}_mp_rank_00_optim_states.pt"
        content = (here / name.format(rank % 2)).read_bytes()
        old, new = (files.text("partition_count") + files.text(n) for n in (2, 4))
        assert old in content
        (there / name.format(rank)).write_bytes(content.replace(old, new))
    with pytest.raises(PretrainedError, match="partitions are not those of 4 ranks"):
        read_torch_run(there)


@pytest.mark.fast
def test_frozen_parameters_of_stage_3_are_in_the_models_states(tmp_path):
    values = random_values()
    frozen = {name: values[""].pop(name) for name in ("b.bias", "c.weight")}
    trained = {key: {n: of[n] for n in values[""]} for key, of in values.items()}
    files.deepspeed(tmp_path, 3, trained, 4, frozen=frozen)
    run = read_torch_run(tmp_path)
    assert_has(run, trained | {"": trained[""] | frozen})
    (tmp_path / "saved" / "zero_pp_rank_3_mp_rank_00_model_states.pt").unlink()
    with pytest.raises(PretrainedError, match="model's states of 3 of 4 ranks"):
        read_torch_run(tmp_path)


@pytest.mark.fast
def test_other_folders_are_refused(tmp_path):
    with pytest.raises(PretrainedError, match=r"is no folder$"):
        read_torch_run(tmp_path / "absent")
    (files.deepspeed(tmp_path / "untold", 3, random_values()) / "latest").unlink()
    with pytest.raises(PretrainedError, match=r"name one of its folders: saved$"):
        read_torch_run(tmp_path / "untold")
    (tmp_path / "iter_0000100").mkdir()
    with pytest.raises(PretrainedError, match=r"is no folder of a checkpoint.*Megatron"):
        read_torch_run(tmp_path)
    values = {"": {"optimizer.distributed.gbuf_idx_0.param": np.zeros(3, np.float32)}}
    with pytest.raises(PretrainedError, match="Megatron's flat buffers"):
        read_torch_run(files.dcp(tmp_path / "megatron", values))
    by_number = {"": {"a": np.zeros(3, np.float32)}, "exp_avg": {"0": np.zeros(3, np.float32)}}
    with pytest.raises(PretrainedError, match="get_optimizer_state_dict"):
        read_torch_run(files.dcp(tmp_path / "numbers", by_number))


# -- into a state ----------------------------------------------------------------------------------

LAYERS = 2
TABLE = MappingTable([
    TensorRule("layers.{i}.up.weight", "up/kernel", "out in -> i in out"),
    TensorRule("layers.{i}.up.bias", "up/bias"),
    TensorRule("head.weight", "head/kernel", "out in -> in out"),
])  # fmt: skip
TORCH = {
    **{f"layers.{i}.up.weight": (8, 4) for i in range(LAYERS)},
    **{f"layers.{i}.up.bias": (8,) for i in range(LAYERS)},
    "head.weight": (3, 4),
}


def model():
    def init(rng):
        keys = jax.random.split(rng, 2)
        return {
            "up": {
                "kernel": jax.random.normal(keys[0], (LAYERS, 4, 8)),
                "bias": jax.numpy.zeros((LAYERS, 8)),
            },
            "head": {"kernel": jax.random.normal(keys[1], (4, 3))},
        }

    def apply(params, x):
        for i in range(LAYERS):
            x = (x @ params["up"]["kernel"][i] + params["up"]["bias"][i])[:, :4]
        return x @ params["head"]["kernel"]

    return init, apply


def engine(**config):
    def loss(apply, batch):
        return jax.numpy.mean((apply(batch["x"]) - 1.0) ** 2)

    config = {
        "train_batch_size": 8,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 20}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "mesh": {"data": 8},
    } | config
    of = config.pop("model", None) or model()
    return jaxspeed.initialize(model=of, loss_fn=loss, config=config)


def state_values(engine):
    """{canonical name: value} of parameters and moments, unpadded."""
    adam = engine.state.opt[0]
    moments = {"exp_avg": adam.mu, "exp_avg_sq": adam.nu}
    masters = engine.state.master or engine.state.params
    flat = {"": {path: np.asarray(x) for path, x in masters.items()}}
    for key, tree in moments.items():
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        flat[key] = {"/".join(k.key for k in path): np.asarray(x) for path, x in leaves}
    return flat


def as_here(values):
    """A checkpoint's values by the paths of the model, written out."""
    stack = lambda of, name: np.stack([of[f"layers.{i}.up.{name}"] for i in range(LAYERS)])  # noqa: E731
    return {
        key: {
            "up/kernel": stack(of, "weight").transpose(0, 2, 1),
            "up/bias": stack(of, "bias"),
            "head/kernel": of["head.weight"].T,
        }
        for key, of in values.items()
    }


@pytest.fixture(scope="module")
def eight_ranks():
    return engine()


@pytest.mark.parametrize("name", ["stage 1", "dcp"])
def test_a_state_has_the_masters_moments_and_counts_of_a_run(tmp_path, eight_ranks, name):
    values = random_values(TORCH)
    eight_ranks.import_run(FORMATS[name](tmp_path / "run", values), TABLE)
    expected = as_here(values)
    for key, of_key in state_values(eight_ranks).items():
        for path, x in of_key.items():
            inside = tuple(map(slice, expected[key][path].shape))
            np.testing.assert_array_equal(x[inside], expected[key][path], err_msg=f"{key} {path}")
    adam, *_, rate = eight_ranks.state.opt
    assert int(adam.count) == 5
    assert int(rate.count) == (6 if name == "dcp" else 5)
    assert int(eight_ranks.state.step) == (5 if name == "dcp" else 7)
    assert int(eight_ranks.state.skipped) == (0 if name == "dcp" else 2)
    eight_ranks.train_batch({"x": np.ones((8, 4), np.float32)})


SCALED = MappingTable([
    TensorRule("w.weight", "w/kernel", "out in -> in out", scale=4.0), TensorRule("d", "scale"),
])  # fmt: skip


def scaled(**config):
    """A model with a parameter without dims, and one of which the tensor is a multiple."""

    def init(rng):
        return {"w": {"kernel": jax.numpy.ones((4, 6))}, "scale": jax.numpy.ones(())}

    def apply(params, x):
        return x @ params["w"]["kernel"] * params["scale"]

    return engine(model=(init, apply), **config)


@pytest.mark.parametrize(
    ("kind", "keys", "field", "power"),
    [("AdamW", ("exp_avg", "exp_avg_sq"), "nu", 2), ("Adagrad", ("sum",), "sum_of_squares", 2)],
)
def test_moments_of_scalars_and_multiples_and_their_count(tmp_path, kind, keys, field, power):
    drawn = random_values({"w.weight": (6, 4), "d": ()})
    values = {"": drawn[""]} | dict.fromkeys(keys, drawn["exp_avg_sq"])
    ours = scaled(optimizer={"type": kind, "params": {"lr": 1e-2}})
    ours.import_run(files.dcp(tmp_path / "run", values), SCALED)
    state = next(x for x in ours.state.opt if hasattr(x, field))
    moment = getattr(state, field)
    expected = drawn["exp_avg_sq"]
    np.testing.assert_array_equal(np.asarray(moment["scale"]), expected["d"])
    kernel = np.asarray(moment["w"]["kernel"])[:4, :6]
    np.testing.assert_array_equal(kernel, expected["w.weight"].T * 4.0**power)
    kernel = np.asarray(ours.state.params["w/kernel"])[:4, :6]
    np.testing.assert_array_equal(kernel, drawn[""]["w.weight"].T / 4.0)
    # The position of the learning rate, 6, is another count.
    assert int(state.count if kind == "AdamW" else state.step) == 5
    ours.save_checkpoint(tmp_path / "saved")
    ours.wait()
    form = HFForm(SCALED, None, ())
    export(tmp_path / "saved", tmp_path / "exported", moments=True, form=form)
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    there = {f"state.{n}.{k}": x for k in keys for n, x in values[k].items()} | values[""]
    steps = {f"state.{n}.step": np.float32(5) for n in values[""]}
    assert exported.keys() == there.keys() | steps.keys()
    for name, x in (there | steps).items():
        np.testing.assert_array_equal(exported[name], x, err_msg=name)


@pytest.mark.sampled
def test_masters_that_are_rounded_are_noted(tmp_path, caplog):
    bf16 = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    ours = engine(bf16=bf16)
    ours.import_run(files.dcp(tmp_path / "run", random_values(TORCH)), TABLE)
    assert "params/up/kernel was rounded from float32 to bfloat16" in caplog.text


@pytest.mark.sampled
def test_masters_and_the_loss_scale_of_a_run_in_fp16(tmp_path):
    values = random_values(TORCH)
    scaler = files.scaler(
        dynamic=True, cur_scale=4096.0, cur_iter=7, last_overflow_iter=3, cur_hysteresis=2
    )
    ours = engine(fp16={"enabled": True, "loss_scale": 0})
    ours.import_run(files.deepspeed(tmp_path, 3, values, loss_scaler=scaler), TABLE)
    assert [float(x) for x in ours.state.loss_scale] == [4096.0, 3, 2]
    expected = as_here(values)[""]
    for path, x in state_values(ours)[""].items():
        np.testing.assert_array_equal(x[tuple(map(slice, expected[path].shape))], expected[path])
    ours.train_batch({"x": np.ones((8, 4), np.float32)})


def test_another_optimizer_or_model_is_refused_before_the_state_is_freed(tmp_path, eight_ranks):
    values = random_values(TORCH)
    momentum = {"": values[""], "momentum_buffer": values["exp_avg"]}
    cases = {
        "momentum_buffer, and that of the config needs exp_avg": momentum,
        "has no state, and that of the config needs exp_avg": {"": values[""]},
        "layers.1.up.bias is missing": {
            k: {n: x for n, x in v.items() if n != "layers.1.up.bias"} for k, v in values.items()
        },
        r"head.weight has shape \[4, 4\]": {
            k: v | {"head.weight": np.zeros((4, 4), np.float32)} for k, v in values.items()
        },
        "max_exp_avg_sq, and that of the config needs": values
        | {"max_exp_avg_sq": values["exp_avg_sq"]},
    }
    for number, (says, of) in enumerate(cases.items()):
        folder = files.deepspeed(tmp_path / str(number), 1, of)
        with pytest.raises((CheckpointError, PretrainedError), match=says):
            eight_ranks.import_run(folder, TABLE)
    late = files.deepspeed(tmp_path / "late", 1, values, global_steps=1 << 40)
    with pytest.raises(PretrainedError, match=r"late.*is damaged"):
        eight_ranks.import_run(late, TABLE)
    damaged = files.dcp(tmp_path / "damaged", values)
    (damaged / "__1_0.distcp").write_bytes(bytes((damaged / "__1_0.distcp").stat().st_size))
    with pytest.raises(PretrainedError, match=r"no archive of torch\.save"):
        eight_ranks.import_run(damaged, TABLE)
    twice = files.dcp(tmp_path / "twice", values | {"": values[""] | {
        f"ema.{name}": x for name, x in values["exp_avg"].items()}})  # fmt: skip
    with pytest.raises(PretrainedError, match=r"several prefixes: model\., model\.ema\."):
        eight_ranks.import_run(twice, TABLE)
    with pytest.raises(PretrainedError, match="needs a mapping table"):
        eight_ranks.import_run(files.deepspeed(tmp_path / "plain", 1, values))
    eight_ranks.train_batch({"x": np.ones((8, 4), np.float32)})
