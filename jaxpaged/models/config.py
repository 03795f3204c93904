"""The description of a decoder: all that makes one model's arithmetic another's. Families fill it in."""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Literal

from jaxpaged.checks import InputError, check, checked_bool, checked_choice, checked_int, checked_number
from jaxpaged.memory.cache_specs import FULL, CacheSpec, ChunkedLocal, SlidingWindow
from jaxpaged.models.drafting.description import DraftHead
from jaxpaged.models.latents import Latent
from jaxpaged.models.mixers.description import Mixer
from jaxpaged.models.ropes import DynamicScaling, LongScaling, Rope, Temperature

ROTARY_MULTIPLE = 2  # RoPE rotates pairs
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "xielu")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerKind:
    """The properties in which one layer may differ from the next: its parts, and what each does.

    A layer has attention, the model's mixer, or both side by side; behind these, or alone, a feed-forward
    part.

    A layer without a bound is full: a token sees all tokens up to itself. A sliding layer shows the last
    `sliding_window` tokens, the token itself among them. A chunked layer cuts each sequence into chunks of
    `attention_chunk` tokens, from position 0 on; a token sees its own chunk up to itself. A layer of a kind
    from outside shows what that says.
    """

    rope: Rope | None = None  # None: no rotary embedding
    sliding_window: int | None = None  # tokens
    attention_chunk: int | None = None  # tokens
    own: CacheSpec | None = None  # kind from outside, in place of a window or chunks
    temperature: Temperature | None = None
    shares_kv: int | None = None  # number of the earlier layer whose K and V it sees; None: its own
    sparsity: float = 0.0  # share of a feed-forward part's numbers below which all are zero, if Gaussian
    # Sizes in which the layer has less than the widest. Its weights are padded with zeros, its KV heads by
    # repeating them. None: as wide as the model says.
    head_dim: int | None = None
    num_q_heads: int | None = None
    num_kv_heads: int | None = None
    intermediate_size: int | None = None
    v_is_k: bool = False  # whether values are the keys' product, before its norm
    attends: bool = True  # whether it has attention, and keeps K and V
    has_state: bool = False  # whether it has the model's mixer, and keeps a state
    feeds: bool = True  # whether it has a feed-forward part
    norm_place: Literal["before", "after", "both"] | None = None  # of its norms; None: as the model says

    @property
    def parts(self) -> tuple[bool, bool, bool]:
        """Return whether it has attention, a mixer and a feed-forward part."""
        return self.attends, self.has_state, self.feeds

    @property
    def attention(self) -> "LayerKind":
        """Return what bounds attention alone: layers with equal bounds need the same tokens."""
        return LayerKind(
            sliding_window=self.sliding_window, attention_chunk=self.attention_chunk, own=self.own
        )

    @property
    def most_seen(self) -> int | None:
        """Return the most tokens that a token sees, itself among them; None: all up to itself."""
        return self.cache_spec.most_kept(1)

    @property
    def cache_spec(self) -> CacheSpec:
        """Tokens that the layer must keep in the cache."""
        if self.own is not None:
            return self.own
        if self.attention_chunk is not None:
            return ChunkedLocal(self.attention_chunk)
        return FULL if self.sliding_window is None else SlidingWindow(self.sliding_window)


STATE = LayerKind(attends=False, has_state=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experts:
    """A feed-forward part of which a router chooses, for each token, `num_chosen` of `num_experts`.

    Scores are a softmax or a sigmoid of the router's output; a chosen expert's score is its weight. The
    sparse mixer chooses two, one after the other: the weight of each is a softmax over those whose score is
    within a share of twice `jitter` of the best that is left.
    """

    num_experts: int
    num_chosen: int
    renormalise: bool  # whether the chosen experts' weights are scaled to sum to 1
    router_bias: bool = False
    bias: bool = False
    glu_limit: float | None = None  # clamp of gate and up, with gate * sigmoid(1.702 gate) * (up + 1)
    scoring: Literal["softmax", "sigmoid", "sparse_mixer"] = "softmax"
    jitter: float = 0.0
    correction: bool = False  # whether a bias per expert is added to scores for the choice only
    ranks_logits: bool = False  # whether that bias is added to the router's output, before the sigmoid
    router_soft_cap: float | None = None  # of the router's output
    num_groups: int = 1  # groups of neighbouring experts
    group_best: int = 2  # experts of a group whose scores add up to the group's: its highest
    num_chosen_groups: int = 1  # number of best groups from which experts are chosen
    scale: float = 1.0  # factor of the final weights
    shared_size: int = 0  # width of the expert that all tokens share; 0: none
    shared_gate: bool = False  # whether a sigmoid gate scales the shared expert's output
    shared_scale: float = 1.0  # factor of the shared expert's output
    latent_size: int = 0  # width that a product before the experts makes, and another takes back; 0: none
    scales_input: bool = False  # whether an expert's weight scales its input, not its output
    # Whether they read the residual, not the shared expert's input, through norms of their own, and each
    # has a factor of its weight.
    beside: bool = False
    dense_layers: tuple[int, ...] = ()  # numbers of the layers with an ordinary feed-forward part
    dense_size: int = 0  # width of that feed-forward part


@dataclasses.dataclass(frozen=True, kw_only=True)
class AltUp:
    """Several streams of the residual, of which a layer computes the first, and a shortcut of a low rank."""

    num_streams: int
    scaled: bool  # whether the first stream is scaled before it weighs the layer's own inputs
    laurel_rank: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class InputTable:
    """Inputs of each layer, `width` numbers each, looked up by tokens below `vocab_size`."""

    width: int
    vocab_size: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Factors:
    """Factors of what goes into parts of each layer, of what comes out, and of the residuals beside them."""

    attention_in: float = 1.0
    attention_out: float = 1.0
    gate: float = 1.0  # of a feed-forward part, before its activation
    down: float = 1.0  # of a feed-forward part's output
    attention_residual: float = 1.0  # in layers with attention and no mixer
    mixer_residual: float = 1.0  # in layers with a mixer
    mlp_residual: float = 1.0

    def __post_init__(self) -> None:
        """Check that all are positive. Raises `InputError`."""
        for field in dataclasses.fields(self):
            name, value = f"model config: factor {field.name}", getattr(self, field.name)
            checked_number(name, value, "a number > 0", 0, above=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder. What is not said is as in Llama."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int  # width of the feed-forward part, or of one expert
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int  # positions the model was trained for, or its RoPE is scaled for
    layers: tuple[LayerKind, ...]
    eos_token_ids: tuple[int, ...] = ()

    # Embeddings.
    tie_word_embeddings: bool = False
    embedding_scale: float = 1.0
    embedding_norm: bool = False
    altup: AltUp | None = None
    layer_inputs: InputTable | None = None
    layer_scale: bool = False  # whether each layer's output is multiplied by a number of its own
    num_positions: int | None = None  # rows of a table of learned positions
    position_offset: int = 0  # the row of position 0

    # Norms before attention and feed-forward, after them, or both.
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float = 1e-6
    norm_offset: float = 0.0  # constant that is added to the weights
    norm_bias: bool = False
    norm_place: Literal["before", "after", "both"] = "before"

    # Residual: feed-forward after attention, or parallel to it, with a shared or its own norm.
    parallel: bool = False
    shared_norm: bool = False
    residual_scale: float = 1.0
    normed_residual: bool = False  # whether the residual beside a part is what the norm before it gives
    factors: Factors = Factors()  # of parts; those of a mixer are in its description

    # Attention.
    qkv_bias: bool = False
    o_bias: bool = False
    # Norm of queries and keys: per head with shared or own weights, or over all heads together; or "plain",
    # per head without weights, in layers with RoPE only.
    qk_norm: Literal["head", "each", "all", "plain"] | None = None
    norm_after_rope: bool = False  # whether RoPE comes before the norm of queries and keys
    v_norm: bool = False  # per head, without weights
    value_scale: float = 1.0
    v_head_dim: int | None = None  # coordinates of values, if fewer than keys have: the rest are zeros
    output_gate: Literal["head", "element"] | None = None  # of attention's output, by the layer's input
    gate_activation: Literal["sigmoid", "softplus"] = "sigmoid"
    qkv_clip: float | None = None
    attention_scale: float | None = None  # None: 1 / sqrt(head_dim)
    attention_soft_cap: float | None = None
    alibi_slopes: tuple[float, ...] | None = None
    sinks: bool = False

    # Feed-forward.
    activation: str = "silu"
    gated: bool = True
    mlp_bias: bool = False
    experts: Experts | None = None

    # Latent attention: then KV heads are one, as wide as a token's vector in the cache.
    latent: Latent | None = None
    mixer: Mixer | None = None  # of layers with states

    # Logits.
    lm_head_bias: bool = False
    logit_divisor: float = 1.0
    logit_soft_cap: float | None = None

    draft_head: DraftHead | None = None  # of a head that drafts; None: the decoder is a whole model

    def __post_init__(self) -> None:
        """Check all fields, which come from files. Raises `InputError` for what no model can be."""
        for name in _SIZES:
            # Without feed-forward parts there is no width of theirs.
            least = 0 if name == "intermediate_size" and not self.feeding_layers else 1
            value = checked_int(f"model config: {name}", getattr(self, name), f"an int >= {least}", least)
            self._set(name, value)
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None:
                self._set(name, checked_number(f"model config: {name}", value, "a number > 0", 0, above=True))
        for name in _FLAGS:
            checked_bool(f"model config: {name}", getattr(self, name))
        checked_choice("model config: activation", self.activation, ACTIVATIONS)
        if self.num_q_heads % self.num_kv_heads:
            raise InputError(
                f"model config: num_q_heads={self.num_q_heads} must be a multiple of "
                f"num_kv_heads={self.num_kv_heads}"
            )
        if self.v_head_dim is not None:
            checked_int(
                "model config: v_head_dim", self.v_head_dim, "an int of [1, head_dim]", 1, self.head_dim
            )
        check("model config: layers", self.layers, "at least one", len(self.layers) > 0)
        if (self.mixer is not None) != bool(self.state_layers):
            raise InputError("model config: layers with states must have a mixer, and only they")
        rule = "attention, a mixer or a feed-forward part"
        check("model config: a layer's parts", None, rule, all(any(kind.parts) for kind in self.layers))
        is_whole = all(kind.feeds and (kind.attends or kind.has_state) for kind in self.layers)
        is_whole = is_whole and all(kind.norm_place is None for kind in self.layers)
        rule = "False where a layer has one part alone, or norms in other places"
        for name in ("parallel", "shared_norm"):
            check(f"model config: {name}", getattr(self, name), rule, is_whole or not getattr(self, name))
        is_plain = len(self.layers_normed("before")) == self.num_layers and not self.parallel
        rule = "False where norms come after parts alone, or parts are parallel"
        is_allowed = is_plain or not self.normed_residual
        check("model config: normed_residual", self.normed_residual, rule, is_allowed)
        for number, kind in enumerate(self.layers):
            if kind not in self.layers[:number]:
                self._check_kind(kind)
            if kind.shares_kv is not None:
                self._check_shared(number, kind.shares_kv)
        if self.altup is not None:
            rule = "an int >= 2"
            checked_int("model config: altup_num_inputs", self.altup.num_streams, rule, 2)
            check("model config: layer_inputs", None, "there with AltUp", self.layer_inputs is not None)
        if self.experts is not None:
            self._check_experts(self.experts)
        if self.latent is not None:
            cache_size, is_one = (self.num_kv_heads, self.head_dim), (1, self.latent.width)
            check(
                "model config: KV heads and their width",
                cache_size,
                f"{is_one} for latents",
                cache_size == is_one,
            )
        untied = not (self.lm_head_bias and self.tie_word_embeddings)
        check("model config: lm_head_bias", self.lm_head_bias, "False with a tied embedding", untied)
        rule = f"a token id, an int in [0, {self.vocab_size})"
        for token in self.eos_token_ids:
            checked_int("model config: eos_token_id", token, rule, 0, self.vocab_size - 1)
        ids = tuple(sorted({int(token) for token in self.eos_token_ids}))
        self._set("eos_token_ids", ids)

    def _check_experts(self, e: Experts) -> None:
        """Check that the choice can be made, and that the dense layers exist. Raises `InputError`."""
        rule = f"an int in [1, {e.num_experts}], the number of experts"
        checked_int("model config: experts a token", e.num_chosen, rule, 1, e.num_experts)
        if e.scoring == "sparse_mixer":
            check("model config: experts a token", e.num_chosen, "2 for a sparse mixer", e.num_chosen == 2)
        rule = f"a divisor of {e.num_experts}, the number of experts"
        groups = checked_int("model config: groups of experts", e.num_groups, rule, 1, e.num_experts)
        check("model config: groups of experts", groups, rule, e.num_experts % groups == 0)
        size = e.num_experts // groups
        enough = groups == 1 or size >= e.group_best
        check("model config: groups of experts", groups, "of two or more experts", enough)
        rule = f"an int in [1, {groups}], the number of groups"
        chosen = checked_int("model config: groups a token", e.num_chosen_groups, rule, 1, groups)
        rule = f"an int in [1, {chosen * size}], the number of experts in the chosen groups"
        checked_int("model config: experts a token", e.num_chosen, rule, 1, chosen * size)
        for name, factor in {"experts' weights": e.scale, "the shared expert": e.shared_scale}.items():
            checked_number(f"model config: factor of {name}", factor, "a number > 0", 0, above=True)
        rule = f"different ints in [0, {self.num_layers}), and not those of all layers"
        numbers = set(e.dense_layers)
        some = len(numbers) == len(e.dense_layers) and numbers < {*self.feeding_layers}
        check("model config: dense layers", list(e.dense_layers), rule, some)
        if e.dense_layers:
            checked_int("model config: width of dense layers", e.dense_size, "an int >= 1", 1)
        check("model config: activation", self.activation, "another with experts", self.activation != "xielu")

    def _check_kind(self, kind: LayerKind) -> None:
        for name in ("sliding_window", "attention_chunk"):
            if getattr(kind, name) is not None:
                checked_int(f"model config: {name}", getattr(kind, name), "None or an int >= 1", 1)
        if kind.temperature is not None:
            checked_int("model config: floor_scale", kind.temperature.every, "an int >= 1", 1)
        is_one = kind.sliding_window is None or kind.attention_chunk is None
        check("model config: attention_chunk", kind.attention_chunk, "None beside a sliding_window", is_one)
        for name in ("head_dim", "num_kv_heads", "intermediate_size"):
            size, maximum = getattr(kind, name), getattr(self, name)
            if size is not None:
                rule = f"an int, and a divisor of {maximum}, that of the widest layers"
                checked_int(f"model config: a layer's {name}", size, rule, 1, maximum)
                check(f"model config: a layer's {name}", size, rule, maximum % size == 0)
        if kind.num_q_heads is not None:
            rule = f"a multiple of {self.num_kv_heads}, the KV heads, and at most {self.num_q_heads}"
            name = "model config: a layer's num_q_heads"
            num_q_heads = checked_int(name, kind.num_q_heads, rule, 1, self.num_q_heads)
            check(name, num_q_heads, rule, num_q_heads % self.num_kv_heads == 0)
        if kind.rope is None:
            return
        checked_number("model config: rope_theta", kind.rope.theta, "a number > 0", 0, above=True)
        dim = kind.rope.dim
        head_dim = kind.head_dim or self.head_dim
        name = "head_dim" if dim == head_dim else "the rotated part of head_dim"
        rule = f"even and at most {head_dim}"
        check(f"model config: {name}", dim, rule, dim % ROTARY_MULTIPLE == 0 and 0 < dim <= head_dim)
        scaling = kind.rope.scaling
        if isinstance(scaling, LongScaling):
            for factors in (scaling.short_factors, scaling.long_factors):
                rule = f"{dim // 2} numbers, one for each pair"
                check("model config: a longrope factor list", factors, rule, len(factors) == dim // 2)

    def _check_shared(self, number: int, source: int) -> None:
        """Check that a layer shares K and V of one before it that has its own, and sees the same tokens."""
        rule = f"an earlier layer with K and V of its own that sees the same tokens as layer {number}"
        ok = 0 <= source < number and self.layers[source].shares_kv is None
        ok = ok and self.layers[source].attention == self.layers[number].attention
        ok = ok and self.heads_of(source) == self.heads_of(number)
        check("model config: the layer whose K and V are shared", source, rule, ok)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @property
    def default_max_len(self) -> int:
        """Return how long sequences are where nobody says: so long that they are as well served as before a
        scaling that depends on the length, as for LongRoPE in vLLM.
        """
        ropes = [kind.rope.scaling for kind in self.layers if kind.rope is not None]
        shorter = [
            scaling.original_max_len for scaling in ropes if isinstance(scaling, LongScaling | DynamicScaling)
        ]
        return min([self.max_model_len, *shorter])

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def state_layers(self) -> tuple[int, ...]:
        """Return the numbers of the layers with states."""
        return tuple(i for i, kind in enumerate(self.layers) if kind.has_state)

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Return the numbers of the layers with attention."""
        return tuple(i for i, kind in enumerate(self.layers) if kind.attends)

    @property
    def mixing_layers(self) -> tuple[int, ...]:
        """Return the numbers of the layers with attention or a mixer."""
        return tuple(i for i, kind in enumerate(self.layers) if kind.attends or kind.has_state)

    @property
    def feeding_layers(self) -> tuple[int, ...]:
        """Return the numbers of the layers with a feed-forward part."""
        return tuple(i for i, kind in enumerate(self.layers) if kind.feeds)

    @property
    def has_uniform_parts(self) -> bool:
        """Return whether all layers have attention and a feed-forward part, nothing else, and norms in the
        same places.
        """
        return all(kind.parts == (True, False, True) and kind.norm_place is None for kind in self.layers)

    def layers_normed(self, place: Literal["before", "after"]) -> tuple[int, ...]:
        """Return the numbers of the layers with norms before their parts, or after them."""
        places = (kind.norm_place or self.norm_place for kind in self.layers)
        return tuple(i for i, each in enumerate(places) if each in (place, "both"))

    @property
    def attention_part(self) -> "ModelConfig | None":
        """Return the layers with attention, without mixers and experts: what attention must know; None: no
        layer has it.
        """
        if self.has_uniform_parts:
            return self
        attends = [kind for kind in self.layers if kind.attends]
        layers = tuple(dataclasses.replace(kind, has_state=False, norm_place=None) for kind in attends)
        return dataclasses.replace(self, layers=layers, mixer=None, experts=None) if layers else None

    @property
    def _kv_owners(self) -> tuple[int, ...]:
        """Return the numbers of the layers with K and V of their own."""
        kinds = enumerate(self.layers)
        return tuple(i for i, kind in kinds if kind.shares_kv is None and kind.attends)

    def heads_of(self, layer: int) -> tuple[int, int]:
        """Return how many KV heads a layer has, and how many coordinates each of its heads."""
        kind = self.layers[layer]
        return kind.num_kv_heads or self.num_kv_heads, kind.head_dim or self.head_dim

    def heads_in(self, num_kv_heads: int, head_dim: int) -> tuple[tuple[int, int], ...]:
        """Return `heads_of` all layers in a cache made for such heads; empty if it has the decoder's own."""
        if (num_kv_heads, head_dim) == (self.num_kv_heads, self.head_dim):
            return ()
        return tuple(self.heads_of(i) for i, kind in enumerate(self.layers) if kind.attends)

    @property
    def heads_by_size(self) -> tuple[tuple[int, int], ...]:
        """Return the different heads of layers, those with least K and V first; each must divide the next."""
        attends = [i for i, kind in enumerate(self.layers) if kind.attends]
        different = sorted(dict.fromkeys(map(self.heads_of, attends)), key=math.prod)
        sizes = [math.prod(heads) for heads in different]
        divides = all(b % a == 0 for a, b in itertools.pairwise(sizes))
        return tuple(different) if different and divides else ((self.num_kv_heads, self.head_dim),)

    @property
    def kv_weights(self) -> tuple[int, ...]:
        """Return how many times as much K and V layers with their own have as the narrowest; see
        `heads_by_size`.
        """
        owners = self._kv_owners
        least = math.prod(self.heads_by_size[0])
        return tuple(math.prod(self.heads_of(i)) // least for i in owners)

    @property
    def kv_layers(self) -> tuple[int, ...]:
        """Return for each layer the number, among those with K and V of their own, of the one it sees."""
        owners, kinds = self._kv_owners, enumerate(self.layers)
        kv_owners = [i if kind.shares_kv is None else kind.shares_kv for i, kind in kinds if kind.attends]
        return tuple(map(owners.index, kv_owners))

    @property
    def num_kv_layers(self) -> int:
        """Return how many layers have K and V of their own: those of the cache."""
        return len(self._kv_owners)

    @property
    def cache_sizes(self) -> tuple[int, int, int]:
        """Layers of a cache of the model's own, KV heads and their width."""
        return self.num_kv_layers, self.num_kv_heads, self.head_dim

    @property
    def widest_mlp(self) -> int:
        """Return the largest width of a feed-forward part."""
        e = self.experts
        return max(self.intermediate_size, *((e.shared_size, e.dense_size) if e is not None else (0,)))

    @property
    def attention_kinds(self) -> tuple[LayerKind, ...]:
        """Return what bounds the attention of each layer: full, sliding or chunked."""
        return tuple(kind.attention for kind in self.layers if kind.attends)

    @property
    def sliding_window(self) -> int | None:
        """The widest window: blocks that have left it are of no use to any layer. None if one sees all.

        A chunk counts as a window of its length: no token of it sees more.
        """
        ranges = [kind.most_seen for kind in self.layers if kind.attends]
        return (
            max((tokens for tokens in ranges if tokens is not None), default=None)
            if None not in ranges
            else None
        )

    def with_kinds(self, kinds: Sequence[CacheSpec | None]) -> "ModelConfig":
        """Return the model with these kinds from outside, one for each layer; None leaves a layer as it is.

        A layer that shares another's K and V must have its kind.
        """
        layers = tuple(
            layer
            if given_kind is None
            else dataclasses.replace(layer, own=given_kind, sliding_window=None, attention_chunk=None)
            for layer, given_kind in zip(self.layers, kinds, strict=True)
        )
        return self if layers == self.layers else dataclasses.replace(self, layers=layers)

    @property
    def cache_specs(self) -> tuple[CacheSpec, ...]:
        """Tokens that each layer with K and V of its own must keep in the cache."""
        return tuple(self.layers[i].cache_spec for i in self._kv_owners)

    @property
    def scale(self) -> float:
        """The factor of attention's dot products."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    @property
    def attention_extras(self) -> tuple[str, ...]:
        """Names of attention's features beside windows, as `ops.tiled_paged_attention` has them."""
        extras = {
            "soft_cap": self.attention_soft_cap is not None,
            "alibi_slopes": self.alibi_slopes is not None,
            "sinks": self.sinks,
        }
        return tuple(name for name, has in extras.items() if has)


_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_q_heads",
    "num_kv_heads",
    "head_dim",
    "max_model_len",
)
_POSITIVE = (
    "embedding_scale",
    "value_scale",
    "norm_eps",
    "residual_scale",
    "qkv_clip",
    "attention_scale",
    "attention_soft_cap",
    "logit_divisor",
    "logit_soft_cap",
)
_FLAGS = (
    "tie_word_embeddings",
    "embedding_norm",
    "layer_scale",
    "norm_bias",
    "parallel",
    "shared_norm",
    "normed_residual",
    "qkv_bias",
    "o_bias",
    "sinks",
    "gated",
    "mlp_bias",
    "norm_after_rope",
    "v_norm",
    "lm_head_bias",
)


def uniform(
    num_layers: int, *, rope: Rope | None, sliding_window: int | None = None
) -> tuple[LayerKind, ...]:
    """Return layers that are all of one kind."""
    return (LayerKind(rope=rope, sliding_window=sliding_window),) * num_layers
