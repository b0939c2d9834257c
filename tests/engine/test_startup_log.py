"""Before its first step a pipeline logs the parameters that every stage holds, and a remedy."""

import pytest
from flax import nnx

from tests.support.awkward.base import WIDTH
from tests.train.cases import regression, squared_error
from tests.train.parity import run


class Broken(nnx.Module):
    """One list, in whose middle stands a layer of another kind."""

    def __init__(self, rngs):
        def blocks():
            return [nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(4)]

        self.layers = nnx.List([*blocks(), nnx.LayerNorm(WIDTH, rngs=rngs), *blocks()])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Two(nnx.Module):
    def __init__(self, rngs):
        def blocks():
            return nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(4)])

        self.first, self.second = blocks(), blocks()

    def __call__(self, x):
        for layer in [*self.first, *self.second]:
            x = layer(x)
        return x


class WideHead(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(4)])
        self.head = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)

    def __call__(self, x):
        for layer in self.blocks:
            x = layer(x)
        return self.head(x)[..., :WIDTH]


class OneList(Two):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.first, self.second = nnx.List([*self.first, *self.second]), nnx.List([])


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (
            Broken,
            (
                "51% of",
                "the 4 blocks",
                "(layers/0 to layers/3)",
                "layers/5/kernel",
                "of another kind",
            ),
        ),
        (Two, ("50% of", "the 4 blocks", "They repeat too", "parallel.units")),
        (WideHead, ("33% of", "head/kernel", "If one has a vocabulary dim")),
        (OneList, ()),
    ],
)
def test_parameters_replicated_over_stages_are_logged(model, words, caplog):
    with caplog.at_level("WARNING", "jaxspeed"):
        run(regression(model, squared_error), 0, 2, steps=0, mesh={"pipe": 2, "data": 4})
    warnings = [r.getMessage() for r in caplog.records if "every stage holds" in r.getMessage()]
    assert len(warnings) == bool(words)
    assert all(each in warning for warning in warnings for each in words)
