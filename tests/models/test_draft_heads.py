"""Heads that draft: their arithmetic."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.memory import features
from jaxpaged.models.drafting import eagle3
from jaxpaged.models.drafting.head import Head
from jaxpaged.models.load_as import LoadAs
from jaxpaged.models.weights import StoredWeights, by_role, random_weights
from reference import draft_head
from tests import tiny, tiny_head
from tests.models.test_decoder import batch_of

VARIANT = {
    "norm_before_residual": True,
    "norm_before_fc": True,
    "norm_output": True,
    "attention_bias": True,
}


@pytest.mark.parametrize("said", [{}, VARIANT], ids=["plain", "variant"])
def test_a_head_computes_what_the_numpy_head_does(said):
    config = tiny_head.config(**said)
    tensors = random_weights(config, eagle3.NAMES, 1)
    head = Head(StoredWeights(config, eagle3.NAMES, tensors, LoadAs(jnp.dtype("float32"))), tiny_head.CHOSEN)
    by_roles = by_role(config, eagle3.NAMES, tensors)
    rng = np.random.default_rng(2)
    n, width = 16, tiny.CONFIG.hidden_size
    taps = [rng.standard_normal((n, width), np.float32) for _ in range(3)]
    embedded = rng.standard_normal((n, width), np.float32)

    @jax.jit
    def run(head, embedded, taps):
        cache, _ = features.taken(head.create_cache(5, 4))
        batch = batch_of(np.array([3, 1, 4, 2]), np.arange(n, dtype=np.int32), n, 4)
        given = head.features(taps[0], taps)
        hidden, own, _ = head(embedded, given, jnp.arange(n), cache, batch)
        return given, hidden, own, head.logits(hidden, lambda x: x)

    given, hidden, own, logits = map(np.asarray, run(head, embedded, taps))
    want = draft_head.features(config, by_roles, taps)
    np.testing.assert_allclose(given, want, atol=1e-5)
    want_hidden, want_own = draft_head.entries(config, by_roles, embedded, want)
    np.testing.assert_allclose(hidden, want_hidden, atol=2e-5)
    np.testing.assert_allclose(own, want_own, atol=2e-5)
    scores = want_hidden @ by_roles["lm_head.weight"].T
    np.testing.assert_allclose(logits[:, tiny_head.CHOSEN], scores, atol=2e-5)
    assert np.isneginf(np.delete(logits, tiny_head.CHOSEN, axis=1)).all()
