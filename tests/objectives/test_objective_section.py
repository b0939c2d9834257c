"""The section `objective` and `model.loss`: what they name, and what is refused."""

import inspect

import pytest
from jaxspeed.models import FAMILIES, build, family

import jaxspeed
from jaxspeed.config.objective_keys import OBJECTIVES
from jaxspeed.data import ModelLimits
from jaxspeed.errors import ConfigError, JaxspeedError, ModelError
from jaxspeed.objectives import objective_of
from jaxspeed.user_models.config_model import resolve_model
from tests.objectives import ranking

pytestmark = pytest.mark.fast

HERE = "tests.objectives.ranking"
GPT2 = {"family": "gpt2", "preset": "tiny"}
FACTORY = {"factory": f"{HERE}:scored"}
OWN = {"type": f"{HERE}:Ranking"}


def config(**keys):
    return {"train_batch_size": 8, **keys}


REFUSED = {
    "misspelt name": (
        {"objective": {"type": "next_tokens"}},
        'objective.type: found "next_tokens". Needs one of next_token, masked, classification, '
        'span_corruption, dpo, cpo, orpo, kto, reward, distill, grpo, rloo, or package.module:Name. Did you '
        'mean "next_token"?',
    ),
    "no name": ({"objective": {"beta": 1}}, "objective.type: found nothing."),
    "no module": (
        {"objective": {"type": "nowhere:Ranking"}},
        "objective.type: found \"nowhere:Ranking\". It cannot be imported: No module named",
    ),
    "not in the module": (
        {"objective": {"type": f"{HERE}:Rank"}},
        "It cannot be imported: AttributeError: module",
    ),
    "no objective": (
        {"objective": {"type": f"{HERE}:Pairs"}},
        "Needs a class that subclasses jaxspeed.Objective and defines loss(self, model, batch).",
    ),
    "without a loss": (
        {"objective": {"type": "jaxspeed:Objective"}},
        "Needs a class that subclasses jaxspeed.Objective and defines loss(self, model, batch).",
    ),
    "misspelt option": (
        {"objective": {**OWN, "betta": 2}},
        'objective.betta: found an unknown key, set to 2. Did you mean "beta"?',
    ),
    "option out of bounds": (
        {"objective": {**OWN, "beta": 0}},
        "objective.beta: found 0. Needs a number that is more than 0",
    ),
    "option of an objective without any": (
        {"objective": {"type": "next_token", "beta": 1}, "model": GPT2},
        "objective.beta: found an unknown key, set to 1. Keys of objective: type.",
    ),
    "of families, for a factory": (
        {"objective": {"type": "masked"}, "model": FACTORY},
        'objective.type: found "masked" with model.factory. It is an objective of families',
    ),
    "and model.loss": (
        {"objective": OWN, "model": {**FACTORY, "loss": f"{HERE}:plain_loss"}},
        "objective: found \"tests.objectives.ranking:Ranking\", while model.loss is set. Both set "
        "the loss: remove one.",
    ),
    "model.loss of a family": (
        {"model": {**GPT2, "loss": f"{HERE}:plain_loss"}},
        "model.loss: found \"tests.objectives.ranking:plain_loss\". It is a factory's loss; that "
        "of a family model is its objective.",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("keys", "message"), REFUSED.values(), ids=REFUSED)
def test_a_wrong_objective_is_refused_with_all_other_problems(keys, message):
    with pytest.raises(ConfigError) as refused:
        jaxspeed.Config.load(config(**keys, gradient_clipping="no"))
    assert message in str(refused.value) and "gradient_clipping" in str(refused.value)


def test_a_module_that_fails_is_named_with_its_error(tmp_path, monkeypatch):
    (tmp_path / "failing_module.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="cannot be imported: ZeroDivisionError: division"):
        jaxspeed.Config.load(config(objective={"type": "failing_module:Ranking"}))


def test_its_own_keys_are_explained():
    def rows(objective):
        return {r.key: r for r in jaxspeed.explain_config(config(objective=objective))}

    beta = rows({**OWN, "beta": 2})["objective.beta"]
    assert (beta.verdict, beta.sentence) == ("honoured", "Multiplies the difference of scores.")
    beta = rows({"type": f"{HERE}:Rank", "beta": 2})["objective.beta"]
    assert beta.verdict == "refused" and "objective.type is refused" in beta.sentence


def test_the_objective_is_the_one_that_is_named():
    _, loss = resolve_model(jaxspeed.Config.load(config(model=GPT2, objective=OWN)))
    assert type(objective_of(loss)) is ranking.Ranking


def test_the_loss_of_a_factory_is_the_one_that_is_named():
    model = {**FACTORY, "loss": f"{HERE}:plain_loss"}
    _, loss = resolve_model(jaxspeed.Config.load(config(model=model)))
    assert loss is ranking.plain_loss


def test_options_have_their_defaults_and_the_values_of_the_config():
    for keys, beta in (({}, 1.0), ({"beta": 3}, 3.0)):
        loaded = jaxspeed.Config.load(config(model=GPT2, objective={**OWN, **keys}))
        _, loss = resolve_model(loaded)
        assert objective_of(loss).options.beta == beta


DEFAULTS = {"t5": "span_corruption", "bert": "masked", "modernbert": "masked"}
DEFAULTS |= dict.fromkeys(("vit", "mlp", "llama_classifier"), "classification")


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_has_its_own_loss_by_the_name_of_an_objective(name):
    expected = DEFAULTS.get(name, "next_token")
    assert build(name).objective == expected
    for keys in ({}, {"objective": {"type": expected}}):
        _, loss = resolve_model(jaxspeed.Config.load(config(model={"family": name}, **keys)))
        assert loss.__wrapped__ is family(name).loss
        assert inspect.signature(loss) == inspect.signature(family(name).loss)
        kind = type(objective_of(loss))
        assert OBJECTIVES[expected].endswith(f":{kind.__name__}") and kind.arrays
    other = "masked" if expected != "masked" else "next_token"
    loaded = jaxspeed.Config.load(config(model={"family": name}, objective={"type": other}))
    message = f'objective.type: found "{other}". The model has {expected}'
    with pytest.raises(ConfigError, match=message):
        resolve_model(loaded)


def test_an_encoder_with_labels_classifies():
    assert build("bert", "tiny-classifier").objective == "classification"


def loss_fn(model, batch):
    return 0.0


PIPELINE = jaxspeed.PipelineModule([lambda x: x], loss_fn=lambda outputs, labels: 0.0)
TWICE = {
    "loss_fn and an objective": (
        {"model": GPT2, "objective": OWN}, {"loss_fn": loss_fn},
        r"objective: given twice, to initialize\(loss_fn=...\) and in the config",
    ),
    "loss_fn and model.loss": (
        {"model": {**FACTORY, "loss": f"{HERE}:plain_loss"}}, {"loss_fn": loss_fn},
        r"model.loss: given twice, to initialize\(loss_fn=...\) and in the config",
    ),
    "the loss of a PipelineModule": (
        {"objective": OWN}, {"model": PIPELINE},
        r"objective: given twice, to PipelineModule\(..., loss_fn=...\) and in the config",
    ),
    "of families, for a model of one's own": (
        {"objective": {"type": "next_token"}}, {"model": ranking.scored},
        'objective.type: found "next_token". The model is of no family',
    ),
}  # fmt: skip


@pytest.mark.parametrize(("keys", "arguments", "message"), TWICE.values(), ids=TWICE)
def test_a_loss_that_is_given_twice_is_refused(keys, arguments, message):
    with pytest.raises(JaxspeedError, match=message):
        resolve_model(jaxspeed.Config.load(config(**keys)), **arguments)


def test_a_factory_without_a_loss_says_how_to_name_one():
    with pytest.raises(ModelError, match=r"Name one as model\.loss, or an objective"):
        resolve_model(jaxspeed.Config.load(config(model=FACTORY)))


def test_a_model_that_is_passed_has_the_objective_of_the_config():
    model, loss = resolve_model(jaxspeed.Config.load(config(objective=OWN)), ranking.scored)
    assert type(objective_of(loss)) is ranking.Ranking and model is not ranking.scored


def test_samples_with_other_arrays_than_the_familys_are_read_as_they_are():
    limits = ModelLimits(sample="tokens", seq_len=8)
    assert limits.with_arrays({"tokens", "mask"}) == limits
    for names in ({"pairs"}, {"tokens", "score"}, ()):
        assert limits.with_arrays(names) == ModelLimits(sample=None, seq_len=8)
