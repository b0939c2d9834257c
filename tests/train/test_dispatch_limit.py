"""On simulated devices the calls do not run ahead so far that XLA's CPU client can lock up."""

from types import SimpleNamespace

import jax
import pytest

from jaxspeed.train import dispatch_limit
from tests.engine import tiny


@pytest.mark.parametrize("what", ["train_batch", "eval_batch"])
def test_no_more_than_a_few_calls_are_under_way(what, monkeypatch):
    waited_for = []
    monkeypatch.setattr(dispatch_limit.jax, "block_until_ready", waited_for.append)
    engine = tiny.engine()
    sent = [getattr(engine, what)(tiny.batch()) for _ in range(dispatch_limit.MOST_IN_FLIGHT + 5)]
    assert [id(m) for m in waited_for] == [id(m["loss"]) for m in sent[:5]]
    jax.device_get(sent)


def test_real_devices_are_not_waited_for(monkeypatch):
    monkeypatch.setattr(dispatch_limit.jax, "block_until_ready", lambda _: pytest.fail("waited"))
    unbounded = dispatch_limit.DispatchLimit(SimpleNamespace(platform="tpu"))
    for step in range(10 * dispatch_limit.MOST_IN_FLIGHT):
        unbounded.sent(step)
