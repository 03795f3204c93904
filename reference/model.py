"""A whole decoder in NumPy: no batch, and no cache unless one is given. The oracle of engine and families.

Weights come by their role: "embedding.weight", "layers.0.qkv.weight", "layers.0.experts.3.down.bias", ...; a
product's is [out_features, in_features]. Queries, keys and values are one, and so are gate and up.
"""

import statistics
from typing import Any, Protocol

import numpy as np

from . import altup, latent
from .experts import choose, sparse_mixer
from .mixers import mixer
from .parts import Weights, activate, gated, linear, norm
from .ropes import Rope, rope


class Layer(Protocol):
    """Properties in which layers differ."""

    rope: Rope | None
    shares_kv: int | None  # number of an earlier layer, whose K and V it sees; None: its own
    sparsity: float  # share of the gate that is zero, if it is Gaussian
    head_dim: int | None  # coordinates that the layer's heads have, if fewer; the rest of weights is padding
    temperature: Any  # None, or how queries grow with the position
    sliding_window: int | None  # tokens that a token sees, itself among them; None: all before it
    attention_chunk: (
        int | None
    )  # tokens of a chunk of the sequence: a token sees its own alone; None: no chunks
    attends: bool  # whether it has attention
    has_state: bool  # whether it has the config's mixer, beside attention or without it
    feeds: bool  # whether it has a feed-forward part
    norm_place: str | None  # of its norms; None: as the config says
    own: Any  # None, or a kind whose `sees(query, key)` says which positions before it a token sees


class Config(Protocol):
    """Description of a model; `jaxpaged.models.config.ModelConfig` explains each field."""

    layers: tuple[Any, ...]
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int
    tie_word_embeddings: bool
    embedding_scale: float
    embedding_norm: bool
    altup: Any
    layer_inputs: Any
    layer_scale: bool
    num_positions: int | None
    position_offset: int
    norm: str
    norm_eps: float
    norm_offset: float
    norm_place: str
    parallel: bool
    shared_norm: bool
    residual_scale: float
    normed_residual: bool
    factors: Any  # of what goes into parts and comes out
    qk_norm: str | None
    norm_after_rope: bool
    v_norm: bool
    value_scale: float  # `v_head_dim` is in the weights: rows of zeros
    output_gate: str | None
    gate_activation: str
    qkv_clip: float | None
    scale: float
    attention_soft_cap: float | None
    alibi_slopes: tuple[float, ...] | None
    sinks: bool
    activation: str
    gated: bool
    experts: Any
    mixer: Any  # None, or the description of a recurrent mixer
    latent: Any  # None, or the description of latent attention
    logit_divisor: float
    logit_soft_cap: float | None


Routed = dict[str, list[list[int]]]  # by layer's name, each token's experts
KeysAndValues = dict[int, tuple[np.ndarray, np.ndarray]]  # by layer


class Cache(Protocol):
    """Store of K and V of tokens, which may give them back changed."""

    num_tokens: int  # that it has of each layer before the next ones

    def add(self, layer: str, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Add the next tokens' K and V; return those of all tokens."""


def logits(
    config: Config,
    weights: Weights,
    token_ids: list[int],
    cache: Cache | None = None,
    routed: Routed | None = None,
) -> np.ndarray:
    """Return scores of the token after each of `token_ids`: [num_tokens, vocab_size], in the weights' dtype.

    With a cache, only tokens that it does not have are computed, and scored. `routed` takes the experts that
    each layer's router chooses.
    """
    first = cache.num_tokens if cache else 0
    x = embed(config, weights, token_ids, first)
    shared: KeysAndValues = {}
    if config.layer_inputs is not None:
        layer_inputs = altup.layer_inputs(config, weights, token_ids[first:], x)
    if config.altup is not None:
        x = altup.started(config, weights, x)
    for number, kind in enumerate(config.layers):
        name = f"layers.{number}"

        def compute(x: np.ndarray, name: str = name, kind: Layer = kind) -> np.ndarray:
            return layer(config, weights, name, kind, x, cache, shared, routed)

        x = (
            altup.layer(config, weights, name, x, layer_inputs[:, number], compute)
            if config.altup
            else compute(x)
        )
        if config.layer_inputs is not None and config.altup is None:
            x = x + altup.of_inputs(config, weights, name, x, layer_inputs[:, number])
        if config.layer_scale:
            x = x * weights[f"{name}.layer_scale"]
    if config.altup is not None:
        x = altup.joined(config, weights, x)
    x = norm(config, weights, "norm", x)
    head = "embedding" if config.tie_word_embeddings else "lm_head"
    scores = linear(weights, head, x) / x.dtype.type(config.logit_divisor)
    return soft_capped(scores, config.logit_soft_cap)


def generate(
    config: Config,
    weights: Weights,
    prompt: list[int],
    max_tokens: int,
    stop_token_ids: tuple[int, ...] = (),
) -> list[int]:
    """Return the greedy answer: the likeliest token again and again, a stop token included."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(int(np.argmax(logits(config, weights, tokens)[-1])))
        if tokens[-1] in stop_token_ids:
            break
    return tokens[len(prompt) :]


def embed(config: Config, weights: Weights, token_ids: list[int], first: int = 0) -> np.ndarray:
    """Return the embeddings of the tokens from position `first` on."""
    x = weights["embedding.weight"][token_ids[first:]]
    x = x * x.dtype.type(config.embedding_scale)
    if config.num_positions is not None:
        x = x + weights["positions.weight"][np.arange(first, len(token_ids)) + config.position_offset]
    return norm(config, weights, "embedding_norm", x) if config.embedding_norm else x


def layer(
    config: Config,
    weights: Weights,
    name: str,
    kind: Layer,
    x: np.ndarray,
    cache: Cache | None = None,
    shared: KeysAndValues | None = None,
    routed: Routed | None = None,
) -> np.ndarray:
    """Compute a layer: attention or a mixer, or their sum, and a feed-forward block, each added to its input,
    in sequence or in parallel; of a layer that has one of both, that one.
    """
    place = kind.norm_place or config.norm_place
    before, after = place in ("before", "both"), place in ("after", "both")

    def out(part: str, values: np.ndarray) -> np.ndarray:
        values = norm(config, weights, f"{name}.{part}_out_norm", values) if after else values
        return values * values.dtype.type(config.residual_scale)

    normed, attended = x, x
    if kind.attends or kind.has_state:
        normed = norm(config, weights, f"{name}.attention_norm", x) if before else x
        mixed = np.zeros_like(x)
        if kind.has_state:
            assert cache is None, "a cache of K and V has no states"
            mixed = mixed + mixer(config, weights, name, normed)
        if kind.attends and config.latent is not None:
            assert cache is None, "a cache of K and V has no latents"
            mixed = mixed + latent.attention(config, weights, name, kind, normed)
        elif kind.attends:
            given = normed * x.dtype.type(config.factors.attention_in)
            attended = attention(config, weights, name, kind, given, cache, shared)
            mixed = mixed + attended * x.dtype.type(config.factors.attention_out)
        factor = config.factors.mixer_residual if kind.has_state else config.factors.attention_residual
        beside = normed if config.normed_residual else x
        attended = beside * x.dtype.type(factor) + out("attention", mixed)
    if config.altup is not None:
        attended = altup.with_laurel(config, weights, name, attended, normed)
    if not kind.feeds:
        return attended
    given = x if config.parallel else attended
    if config.shared_norm:
        given = normed
    elif before:
        given = norm(config, weights, f"{name}.mlp_norm", given)
    if f"{name}.router.weight" in weights:
        fed = experts(config, weights, name, given, attended, routed)
    else:
        fed = mlp(config, weights, name, given, sparsity=kind.sparsity)
    beside = given if config.normed_residual else attended
    beside = beside * x.dtype.type(config.factors.mlp_residual)
    return beside + out("mlp", fed * x.dtype.type(config.factors.down))


def attention(
    config: Config,
    weights: Weights,
    name: str,
    kind: Layer,
    x: np.ndarray,
    cache: Cache | None = None,
    shared: KeysAndValues | None = None,
) -> np.ndarray:
    """Compute causal attention of `x`, [num_tokens, hidden_size], over itself and the cached tokens before
    it.

    Query heads share kv heads in groups.

    Token i sees token j if j <= i and, with a sliding window, i - j < sliding_window; with chunks, if both
    are in one; with a kind from outside, if that says so. A sink is one more score, of a token without a
    value.
    """
    c, num_tokens, first = config, len(x), cache.num_tokens if cache else 0
    is_sharing = kind.shares_kv is not None
    qkv = linear(weights, f"{name}.q" if is_sharing else f"{name}.qkv", x)
    if c.qkv_clip is not None:
        qkv = qkv.clip(-c.qkv_clip, c.qkv_clip)
    ends = np.cumsum([c.num_q_heads * c.head_dim, c.num_kv_heads * c.head_dim])
    q, k, v = (qkv, qkv[:, :0], qkv[:, :0]) if is_sharing else np.split(qkv, ends, axis=1)
    q, k, v = (y.reshape(num_tokens, -1, c.head_dim)[..., : kind.head_dim] for y in (q, k, v))
    if not c.norm_after_rope:
        q, k = qk_normed(c, weights, name, q, k)
    if kind.rope is not None:
        q, k = (rope(y, kind.rope, c.max_model_len, first) for y in (q, k))
    if c.norm_after_rope:
        q, k = qk_normed(c, weights, name, q, k)
    if c.qk_norm == "plain" and kind.rope is not None:
        q, k = (
            y / np.sqrt(np.mean(y * y, axis=-1, keepdims=True) + y.dtype.type(c.norm_eps)) for y in (q, k)
        )
    if kind.temperature is not None:
        number = (np.arange(first, first + num_tokens) + kind.temperature.offset) // kind.temperature.every
        q = q * (1 + kind.temperature.scale * np.log1p(number)).astype(q.dtype)[:, None, None]
    if c.v_norm:
        v = v / np.sqrt(np.mean(v * v, axis=-1, keepdims=True) + v.dtype.type(c.norm_eps))
    v = v * v.dtype.type(c.value_scale)
    if kind.shares_kv is not None and shared is not None:
        k, v = shared[kind.shares_kv]
    elif cache is not None:
        k, v = cache.add(name, k, v)
    if shared is not None:
        shared[int(name.removeprefix("layers."))] = k, v
    out, group = np.empty_like(q), c.num_q_heads // c.num_kv_heads
    distance = np.subtract.outer(np.arange(first, first + num_tokens), np.arange(first + num_tokens))
    seen = distance >= 0
    if kind.sliding_window is not None:
        seen &= distance < kind.sliding_window
    if kind.attention_chunk is not None:
        chunk = np.arange(first + num_tokens) // kind.attention_chunk
        seen &= np.equal.outer(chunk[first:], chunk)
    if kind.own is not None:
        position = np.arange(first + num_tokens, dtype=np.int32)
        seen &= np.asarray(kind.own.sees(position[first:, None], position[None]))
    for head in range(c.num_q_heads):
        scores = q[:, head] @ k[:, head // group].T * q.dtype.type(c.scale)
        scores = soft_capped(scores, c.attention_soft_cap)
        if c.alibi_slopes is not None:
            scores = scores - q.dtype.type(c.alibi_slopes[head]) * distance.astype(q.dtype)
        scores = np.where(seen, scores, -np.inf)
        sink = weights[f"{name}.sinks"][head] if c.sinks else -np.inf
        top = np.maximum(scores.max(axis=-1, keepdims=True), sink)
        weight = np.exp(scores - top)
        total = weight.sum(axis=-1, keepdims=True) + np.exp(sink - top)
        out[:, head] = weight / total @ v[:, head // group]
    out = np.pad(out, ((0, 0), (0, 0), (0, c.head_dim - out.shape[-1])))
    if c.output_gate is not None:
        out = gated(c, linear(weights, f"{name}.attention_gate", x), out)
    return linear(weights, f"{name}.o", out.reshape(num_tokens, -1))


def qk_normed(
    config: Config, weights: Weights, name: str, q: np.ndarray, k: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return queries and keys, [num_tokens, heads, head_dim]: normed each head by itself, with weights that
    all share or with its own, or all heads as one.
    """
    if config.qk_norm in (None, "plain"):
        return q, k

    def normed(part: str, x: np.ndarray) -> np.ndarray:
        whole = x.reshape(len(x), -1) if config.qk_norm == "all" else x
        weight = weights[f"{name}.{part}_norm.weight"]
        weight = weight[: x.shape[-1]] if config.qk_norm == "head" else weight
        return norm(config, {"norm.weight": weight}, "norm", whole).reshape(x.shape)

    return normed("q", q), normed("k", k) if k.size else k


def mlp(
    config: Config, weights: Weights, name: str, x: np.ndarray, prefix: str = "", sparsity: float = 0.0
) -> np.ndarray:
    """Compute `down(act(gate(x)) * up(x))`, or `down(act(up(x)))`.

    sparsity: the share of a Gaussian below which the gate is zero.
    """
    first, down = f"{name}.{prefix}up", f"{name}.{prefix}down"
    if not config.gated:
        wide = linear(weights, first, x)
        act = xielu(weights, name, wide) if config.activation == "xielu" else activate(config, wide)
        return linear(weights, down, act)
    gate, up = np.split(linear(weights, f"{name}.{prefix}gate_up", x), 2, axis=-1)
    if sparsity:
        gate = altup.sparse(gate, statistics.NormalDist().inv_cdf(sparsity))
    gate = gate * x.dtype.type(config.factors.gate)
    return linear(weights, down, activate(config, gate) * up)


def experts(
    config: Config,
    weights: Weights,
    name: str,
    x: np.ndarray,
    residual: np.ndarray,
    routed: Routed | None = None,
) -> np.ndarray:
    """Return, token by token, the chosen experts' outputs, weighed, and that of one which all tokens have.

    Experts beside a dense part read the residual before its norm, through norms of their own. `routed` takes
    each token's experts, in the order of their scores, under the layer's name.
    """
    e, out, whole = config.experts, np.zeros_like(x), x
    read, factors = x, np.ones(e.num_experts, x.dtype)
    if e.beside:
        read = norm(config, weights, f"{name}.router_norm", residual)
        read = read * x.dtype.type(x.shape[-1] ** -0.5)
        x = norm(config, weights, f"{name}.experts_norm", residual)
        factors = weights[f"{name}.expert_scale"]
    if e.latent_size:
        x = linear(weights, f"{name}.experts_in", x)
        out = np.zeros_like(x)
    scores = soft_capped(linear(weights, f"{name}.router", read), e.router_soft_cap)
    correction = weights[f"{name}.correction"] if e.correction else np.zeros_like(scores[0])
    for token, token_scores in enumerate(scores):
        mix = (
            sparse_mixer(e, token_scores)
            if e.scoring == "sparse_mixer"
            else choose(e, token_scores, correction)
        )
        if routed is not None:
            routed.setdefault(name, []).append([expert for expert, _ in mix])
        for expert, share in mix:
            prefix = f"{name}.experts.{expert}"
            share *= e.scale * factors[expert]
            given = x[token] * x.dtype.type(share) if e.scales_input else x[token]
            if not config.gated:
                wide = activate(config, linear(weights, f"{prefix}.up", given))
            elif e.glu_limit is None:
                gate, up = np.split(linear(weights, f"{prefix}.gate_up", given), 2)
                wide = activate(config, gate) * up
            else:
                gate, up = np.split(linear(weights, f"{prefix}.gate_up", given), 2)
                gate, up = np.minimum(gate, e.glu_limit), up.clip(-e.glu_limit, e.glu_limit)
                wide = gate / (1 + np.exp(-1.702 * gate)) * (up + 1)
            out[token] += x.dtype.type(1 if e.scales_input else share) * linear(
                weights, f"{prefix}.down", wide
            )
    if e.latent_size:
        out = linear(weights, f"{name}.experts_out", out)
    if e.shared_size:
        shared = mlp(config, weights, name, whole, "shared.")
        if e.shared_gate:
            shared = shared / (1 + np.exp(-linear(weights, f"{name}.shared_gate", whole)))
        shared = shared * shared.dtype.type(e.shared_scale)
        if e.beside:
            out = norm(config, weights, f"{name}.experts_out_norm", out)
            shared = norm(config, weights, f"{name}.shared_out_norm", shared)
        out = out + shared
    return out


def xielu(weights: Weights, name: str, x: np.ndarray) -> np.ndarray:
    """Return a parabola above zero and an exponential below, whose steepness each layer has learned."""
    alpha_p, alpha_n, beta, eps = (
        weights[f"{name}.xielu.{each}"] for each in ("alpha_p", "alpha_n", "beta", "eps")
    )
    positive = np.log1p(np.exp(alpha_p)) * x * x
    negative = (beta + np.log1p(np.exp(alpha_n))) * (np.expm1(np.minimum(x, eps)) - x)
    return np.where(x > 0, positive, negative) + beta * x


def soft_capped(scores: np.ndarray, cap: float | None) -> np.ndarray:
    return scores if cap is None else cap * np.tanh(scores / cap)
