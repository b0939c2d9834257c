"""DeepSpeed's other names and forms are read as DeepSpeed reads them; unknown keys are ignored,
or are errors with the key that is meant."""

import pytest

from jaxspeed.config import Config, examine, explain_config, fix_config
from jaxspeed.config.suggestions import suggest
from jaxspeed.config.tree import VOCABULARY, read
from jaxspeed.errors import ConfigError
from jaxspeed.near_words import closest

pytestmark = pytest.mark.fast

# The names of DeepSpeedZeroConfig's fields, of which the ones with stage3_ are aliases.
FIELDS = {
    "prefetch_bucket_size": 7,
    "param_persistence_threshold": 7,
    "model_persistence_threshold": 7,
    "max_live_parameters": 7,
    "max_reuse_distance": 7,
    "gather_16bit_weights_on_model_save": True,
    "module_granularity_threshold": 7,
    "use_all_reduce_for_fetch_params": True,
    "allgather_sequential": True,
}


@pytest.mark.parametrize("name", FIELDS)
def test_a_zero_key_may_lack_its_prefix(name):
    tree = {"zero_optimization": {"stage": 3, name: FIELDS[name]}}
    assert getattr(Config.load(tree).zero_optimization, f"stage3_{name}") == FIELDS[name]
    (row,) = [r for r in explain_config(tree) if r.key == f"zero_optimization.{name}"]
    assert row.verdict != "refused"
    both = {"zero_optimization": {name: FIELDS[name], f"stage3_{name}": FIELDS[name]}}
    with pytest.raises(ConfigError, match="Keep one of the two"):
        Config.load(both)


TAKEN = {
    "a stage as a flag": ({"zero_optimization": True}, "zero_optimization.stage", 1),
    "no stage as a flag": ({"zero_optimization": False}, "zero_optimization.stage", 0),
    "a stage as text": ({"zero_optimization": {"stage": "2"}}, "zero_optimization.stage", 2),
    "a size as text": (
        {"zero_optimization": {"stage3_param_persistence_threshold": "1e5"}},
        "zero_optimization.stage3_param_persistence_threshold",
        100_000,
    ),
    "a flag as text": ({"bf16": {"enabled": "true"}}, "bf16.enabled", True),
    "a flag as a number": ({"fp16": {"enabled": 0}}, "fp16.enabled", False),
    "a scale as text": ({"fp16": {"loss_scale": "128"}}, "fp16.loss_scale", 128.0),
    "no least scale of a fixed one": (
        {"fp16": {"enabled": True, "loss_scale": 8, "min_loss_scale": 0}},
        "fp16.min_loss_scale",
        0,
    ),
    "no warm-up": (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1, "warmup_num_steps": 0}}},
        "scheduler.params.warmup_num_steps",
        0,
    ),
    "an unknown curve": (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1, "warmup_type": "cos"}}},
        "scheduler.params.warmup_type",
        "log",
    ),
    "never print": ({"steps_per_print": float("inf")}, "steps_per_print", None),
    "never print, as text": ({"steps_per_print": "inf"}, "steps_per_print", None),
    "offload device auto": (
        {"zero_optimization": {"offload_optimizer": {"device": "auto"}}},
        "zero_optimization.offload_optimizer.device",
        "none",
    ),
    "stage auto": ({"zero_optimization": {"stage": "auto"}}, "zero_optimization.stage", 0),
    "amp auto": ({"amp": {"enabled": "auto", "opt_level": "auto"}}, "amp.enabled", "auto"),
    "node-local storage": (
        {"checkpoint": {"use_node_local_storage": True}},
        "checkpoint.use_node_local_storage",
        True,
    ),
    "parallel writes": (
        {"checkpoint": {"parallel_write": {"pipeline_stage": True}}},
        "checkpoint.parallel_write.pipeline_stage",
        True,
    ),
    "torch's compiler": (
        {"compile": {"enabled": True, "backend": "inductor", "disable": False}},
        "compile.enabled",
        True,
    ),
    "DeepCompile": ({"compile": {"deepcompile": True, "passes": ["z3"]}}, "compile.passes", ["z3"]),
    "the parser's options": (
        {
            "tensor_parallel": {
                "dtype": "bf16",
                "tp": {"tp_size": 2, "tp_grain_size": 64},
                "injection_policy_tuple": None,
                "keep_module_on_host": False,
                "kernel_inject": False,
            }
        },
        "tensor_parallel.tp.tp_grain_size",
        64,
    ),
    "an optimizer without a rate": ({"optimizer": {"type": "AdamW"}}, "optimizer.params.lr", 1e-3),
    "techniques that are off": (
        {
            "compression_training": {
                "layer_reduction": {"enabled": False, "keep_number_layer": 5},
                "weight_quantization": {"shared_parameters": {}, "different_groups": {}},
            }
        },
        "compression_training.layer_reduction.enabled",
        False,
    ),
}


@pytest.mark.parametrize("name", TAKEN)
def test_what_deepspeed_takes_is_taken(name):
    tree, path, value = TAKEN[name]
    assert read(Config.load(tree), path) == value
    assert all(row.verdict != "refused" for row in explain_config(tree))


@pytest.mark.parametrize("name", ["a stage as text", "an unknown curve", "a stage as a flag"])
def test_what_is_read_otherwise_than_written_is_noted(name):
    tree, path, _ = TAKEN[name]
    assert any(note.startswith(path.rpartition(".")[0]) for note in Config.load(tree).notes)


def test_numbers_as_text_are_wrong_where_deepspeed_does_not_coerce():
    with pytest.raises(ConfigError, match="Write 8 without quotes"):
        Config.load({"train_batch_size": "8"})


@pytest.mark.parametrize("key", ["min_loss_scale", "loss_scale_window"])
def test_a_bound_of_the_dynamic_scale_is_not_0(key):
    with pytest.raises(ConfigError, match=rf"fp16\.{key}: found 0"):
        Config.load({"fp16": {"enabled": True, key: 0}})
    assert Config.load({"fp16": {"enabled": True, "loss_scale": 8, key: 0}})
    assert Config.load({"fp16": {"enabled": False, key: 0}})


# -- unknown keys ----------------------------------------------------------------------------------

IGNORED = {
    "msamp": {"enabled": True},
    "comment": "mine",
    "warmup": 10,
    "launcher": "pdsh",
    "checkpointing": {"enabled": True},
    "memory_optimization": {"enable_memory_logging": True},
    "monitor_config": {"enabled": True},
    "comms_config": {"verbose": False},
    "zero3_init_flag": True,
    "seed": 42,
    "split": "969, 30, 1",
    "backend": "nccl",
}


@pytest.mark.parametrize("key", IGNORED)
def test_an_unknown_key_is_ignored_as_by_deepspeed(key):
    tree = {"train_batch_size": 8, key: IGNORED[key]}
    config = Config.load(tree)
    assert f"{key}: Ignored, as by DeepSpeed." in config.notes
    rows = [row for row in explain_config(tree) if row.key.partition(".")[0] == key]
    assert {row.verdict for row in rows} == {"ignored"}
    assert all("DeepSpeed ignores it too." in row.sentence for row in rows)
    for strictly in (lambda: Config.load(tree, strict=True), lambda: Config(**tree, strict=True)):
        with pytest.raises(ConfigError, match=f"{key}: found an unknown key"):
            strictly()


@pytest.mark.parametrize(
    "tree",
    [
        {"pipeline": {"pipeline_parallel_size": 4, "partition_method": "type:transformer"}},
        {"flops_profiler": {"enabled": False, "end_profile_step": 5}},
        {"activation_checkpointing": {"checkpoint_every": 3}},
        {"elasticity": {"enabled": False, "jobs": 3}},
    ],
)
def test_unknown_keys_are_ignored_in_sections_that_deepspeed_does_not_check(tree):
    assert Config.load(tree).notes


@pytest.mark.parametrize(
    "tree",
    [
        {"zero_optimization": {"frobnicate": 1}},
        {"fp16": {"frobnicate": 1}},
        {"tensorboard": {"frobnicate": 1}},
        {"optimizer": {"type": "Adam", "params": {"lr": 1, "frobnicate": 1}}},
        {"mesh": {"frobnicate": 1}},
        {"run": {"frobnicate": 1}},
        {"data": {"mixture": [{"source": "stdlib", "frobnicate": 1}]}},
    ],
)
def test_unknown_keys_are_errors_in_strict_sections(tree):
    with pytest.raises(ConfigError, match="frobnicate: found an unknown key"):
        Config.load(tree)


def test_jaxspeeds_key_of_an_ignored_name_is_named():
    (row,) = [row for row in explain_config({"seed": 1}) if row.key == "seed"]
    assert "run.seed" in row.sentence or "data.seed" in row.sentence


MEANT = {
    "train_batch_sise": (8, 'Did you mean "train_batch_size"?'),
    "trian_batch_size": (8, 'Did you mean "train_batch_size"?'),
    "train_micro_batch_size": (8, 'Did you mean "train_micro_batch_size_per_gpu"?'),
    "max_grad_norm": (1.0, '"gradient_clipping"'),
    "zero_optimization.gradient_clipping": (1.0, '"gradient_clipping"'),
    "gradient_accumulation_dtype": ("fp32", '"data_types.grad_accum_dtype"'),
    "bf16.loss_scale": (0, "remove the key"),
    "flash_attention": (True, "remove the key"),
    "fp16.dynamic_loss_scale": (True, "A loss_scale of 0 is dynamic"),
    "bfp16": ({"enabled": True}, '"bf16"'),
    "zero_optimisation": ({"stage": 2}, '"zero_optimization"'),
}


def with_key(path, value):
    tree = {"optimizer": {"type": "AdamW", "params": {}}}
    *parents, last = path.split(".")
    node = tree
    for part in parents:
        node = node.setdefault(part, {})
    node[last] = value
    return tree


@pytest.mark.parametrize("path", MEANT)
def test_a_key_that_resembles_another_is_an_error_that_names_it(path):
    value, hint = MEANT[path]
    tree = with_key(path, value)
    found = [problem for problem in examine(tree).problems if problem.path == path]
    assert len(found) == 1
    assert hint in found[0].works


MISPLACED = {
    "offload_optimizer": ({"device": "cpu"}, "zero_optimization.offload_optimizer"),
    "stage3_max_live_parameters": (1, "zero_optimization.stage3_max_live_parameters"),
    "optimizer.weight_decay": (0.1, "optimizer.params.weight_decay"),
    "optimizer.lr": (0.1, "optimizer.params.lr"),
    "lr": (0.1, "optimizer.params.lr"),
    "stage": (2, "zero_optimization.stage"),
}


@pytest.mark.parametrize("path", MISPLACED)
def test_a_misplaced_key_is_ignored_as_by_deepspeed_with_its_place(path):
    value, place = MISPLACED[path]
    tree = with_key(path, value)
    config = Config.load(tree)
    note = f"{path}: Ignored, as by DeepSpeed. It has an effect only as {place}."
    assert note in config.notes
    assert read(config, place) != value
    (row, *_) = [row for row in explain_config(tree) if row.key.startswith(path)]
    assert row.verdict == "ignored" and f"only as {place}" in row.sentence
    with pytest.raises(ConfigError, match=f'{path}: found an unknown key.*"{place}"'):
        Config.load(tree, strict=True)
    fixed, _ = fix_config(tree)
    assert Config.load(fixed, strict=True)
    assert read(fixed, place) == value and read(fixed, path) is None


# Names that resemble a known one by their letters, and mean something else.
@pytest.mark.parametrize("name", ["warmup", "comment", "checkpointing", "msamp", "split", "name"])
def test_names_of_something_else_resemble_nothing(name):
    assert suggest(name, {"enabled": True}) is None


@pytest.mark.parametrize(
    ("word", "choices", "near"),
    [
        ("bfp16", ["fp32", "fp16", "bf16"], "bf16"),  # one letter from both, and begins as one
        ("fp61", ["fp32", "fp16", "bf16"], "fp16"),
        ("interleave", ["1f1b", "interleaved"], "interleaved"),
        ("WarmupRL", ["WarmupLR", "WarmupDecayLR"], "WarmupLR"),
        ("config.json", ["ds_config.json"], None),
        ("cosine", ["OneCycle"], None),
        ("train_steps", ["train_batch_size"], None),
        ("column", ["row", "columns_of"], None),
    ],
)
def test_a_suggestion_is_one_of_which_the_word_is_a_typo(word, choices, near):
    assert closest(word, choices) == near


def test_nothing_is_suggested_that_would_be_refused():
    assert suggest("sparse_gradient", False) is not None
    assert suggest("sparse_gradient", True) is None
    assert suggest("sparse_atention", {"mode": "fixed"}) is None


def test_a_parameter_is_only_suggested_for_an_optimizer_that_has_it():
    with_momentum = {"optimizer": {"type": "SGD"}}
    assert suggest("optimizer.momentum", 0.9, with_momentum) is not None
    assert suggest("optimizer.momentum", 0.9, {"optimizer": {"type": "AdamW"}}) is None


def test_each_letter_left_out_of_a_long_key_is_noticed():
    for path, key in VOCABULARY.items():
        if "." not in path and len(path) > 8 and key.verdict == "honoured":
            assert suggest(path[:-2] + path[-1], key, {}) is not None, path


# -- comments and commas ---------------------------------------------------------------------------


def test_json_may_have_comments(tmp_path):
    path = tmp_path / "ds_config.json"
    path.write_text(
        '{  // a comment\n "train_batch_size": 8, # another, with a "quote\n'
        ' /* over\n lines, */ "zero_optimization": {"stage": 2},\n'
        ' "tensorboard": {"output_path": "a//b#c,]/*d*/", "job_name": "x,}"}\n}\n'
    )
    config = Config.load(path)
    assert config.train_batch_size == 8
    assert config.zero_optimization.stage == 2
    assert config.tensorboard.output_path == "a//b#c,]/*d*/"
    assert config.tensorboard.job_name == "x,}"


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ('{"train_batch_size": 8,\n,}', "line 2, column 1: a comma without an item before it"),
        ("{,}", "line 1, column 2"),
        ('{"zero_optimization": {"stage": 1,\n /* b */ ,}}', "line 2, column 10"),
        ('{"strict": false},', "Extra data"),
    ],
)
def test_a_comma_that_hjson_refuses_is_an_error(text, place, tmp_path):
    path = tmp_path / "ds_config.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=place):
        Config.load(path)


def test_a_last_comma_is_an_error_beside_all_others(tmp_path):
    path = tmp_path / "ds_config.json"
    path.write_text('{"train_batch_sise": 8,\n "tensorboard": {"job_name": "x,}"},\n}')
    with pytest.raises(ConfigError) as caught:
        Config.load(path)
    assert "line 2, column 36: found a comma after the last item. Remove it" in str(caught.value)
    assert 'Did you mean "train_batch_size"?' in str(caught.value)


def test_an_error_keeps_its_place_behind_comments(tmp_path):
    path = tmp_path / "ds_config.json"
    path.write_text('{\n // one\n /* two\n */ "a": 1,\n "b": ]\n}')
    with pytest.raises(ConfigError, match="line 5, column 7"):
        Config.load(path)


def test_json_may_lack_quotes(tmp_path):
    path = tmp_path / "ds_config.json"
    path.write_text(
        '{\n train_batch_size: 8,\n "tensorboard": {"output_path": /home/me/a-1e-5 } # here\n}'
    )
    config = Config.load(path)
    assert (config.train_batch_size, config.tensorboard.output_path) == (8, "/home/me/a-1e-5")
