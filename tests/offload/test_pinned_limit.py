"""The pool of pinned memory that a backend has."""

from jaxspeed.offload import GPU_LIMIT, pinned_limit


def test_a_gpus_pool_is_64_gib_unless_the_environment_says_so():
    assert pinned_limit("cuda", {}) == pinned_limit("gpu", {}) == 64 << 30
    assert pinned_limit("gpu", {GPU_LIMIT: "200"}) == 200 << 30
    assert pinned_limit("tpu", {}) is None
    assert pinned_limit("cpu", {GPU_LIMIT: "200"}) is None
