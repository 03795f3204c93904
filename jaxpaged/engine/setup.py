"""An engine's setup: what its options come to for one model on this machine."""

import dataclasses
import functools
import hashlib
import re
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxpaged.checks import InputError, check
from jaxpaged.code_digest import digest_of, trace_anew_if_changed
from jaxpaged.config import AUTO, PREFILL_TILE, EngineConfig
from jaxpaged.contracts import attentions, layer_kinds, processors, samplers
from jaxpaged.contracts.attentions import Attention
from jaxpaged.contracts.host_processors import HostProcessors
from jaxpaged.contracts.processors import Processor
from jaxpaged.contracts.samplers import Sampler
from jaxpaged.engine import draft_costs
from jaxpaged.memory import eviction, kv_cache
from jaxpaged.memory.cache_specs import FULL, CacheSpec, ChunkState, together
from jaxpaged.memory.grouping import Grouping, grouping_of, one_group
from jaxpaged.memory.policies import Policy
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.layer_form import form_of
from jaxpaged.models.load_as import LoadAs
from jaxpaged.models.shards import Shard, Shards
from jaxpaged.parallel.mesh import mesh_of
from jaxpaged.speculation import BY_MODEL, DRAFT_MODEL
from jaxpaged.step import channels, features
from jaxpaged.step.config import DraftCost, StepConfig
from jaxpaged.step.features import Features
from pallas_kernels import layouts, native, support
from pallas_kernels.layouts import Layout
from pallas_kernels.ops import TiledImplementation, choice

# Fraction of the blocks that stays free, as in vLLM, when a request is admitted beside running ones.
WATERMARK = 0.01
# Narrower decode passes, as shares of all rows, and how many rows one must save to be worth its compilation.
SHARES_OF_WIDTHS, LEAST_SAVED = (32, 4, 2), 6
# Scores of tokens that a CPU looks through while they are in its cache.
SCORES_AT_ONCE = 400_000


def resolve_dtype(config: EngineConfig) -> jnp.dtype:
    """Return the dtype of weights and activations; "auto" is float32 on a CPU and bfloat16 on a GPU."""
    if config.dtype == "auto":
        return jnp.dtype("float32" if jax.default_backend() == "cpu" else "bfloat16")
    return jnp.dtype(config.dtype)


@dataclasses.dataclass(frozen=True)
class Setup:
    """The options of an engine and its model, with all that follows from them on this machine.

    Each property is computed when it is first asked for, and kept. Those that refuse options raise
    `InputError`; `check` asks for them before anything is loaded.
    """

    config: EngineConfig
    whole: ModelConfig  # the model; `model_config` describes what one device computes
    draft: ModelConfig | None = None  # the model that drafts
    draft_cost: DraftCost | None = None  # what its drafts cost; None: by its weights

    def __post_init__(self) -> None:
        """Give the model's layers their kinds from outside. Raises `InputError`."""
        object.__setattr__(self, "whole", self.whole.with_kinds(self.kinds) if self.kinds else self.whole)

    @functools.cached_property
    def kinds(self) -> tuple[CacheSpec | None, ...]:
        """Kind from outside of each layer of the model; empty if none is asked for."""
        if self.config.layer_kind is None:
            return ()
        reads_all = tuple(kind.cache_spec == FULL for kind in self.whole.layers)
        return layer_kinds.named(self.config.layer_kind).each(self.whole.num_layers, reads_all)

    def check(self) -> None:
        """Raise `InputError` if the layout, the loop over layers, or the shards do not go with the model, or
        a part from outside cannot be used. What JAX has traced of other code of such parts is dropped.
        """
        self._check_draft()
        self._check_states()
        self._check_latents()
        _ = self.mesh, self.features, self.processors
        if rule := self.layout.why_not_heads(self.whole.num_kv_heads):
            raise InputError(f"kv_layout={self.layout}: {rule}")
        self._check_loop_over_layers()
        _ = self.shards, self.model_config
        self._check_sums()
        names = " ".join(str(getattr(part, "name", part)) for part in self._parts)
        if self.has_outsiders:
            trace_anew_if_changed(names, self.code_digest)

    @functools.cached_property
    def dtype(self) -> jnp.dtype:
        """Dtype of weights and activations."""
        return resolve_dtype(self.config)

    @functools.cached_property
    def mesh(self) -> Mesh | None:
        """Mesh of the devices: replicas by shards. None for one device."""
        size, replicas = self.config.tensor_parallel_size, self.config.data_parallel_size
        return None if size == replicas == 1 else mesh_of(size, replicas, self.config.num_processes)

    @functools.cached_property
    def shards(self) -> tuple[Shard, ...]:
        """Shards of the model under tensor parallelism, one for each device; empty for one device."""
        size = self.config.tensor_parallel_size
        return tuple(self._shard(number) for number in range(size)) if size > 1 else ()

    def _shard(self, number: int) -> Shard:
        config = self.config
        return Shard(self.whole, Shards(config.tensor_parallel_size, config.tensor_parallel_sums), number)

    def shard(self, number: int = 0) -> Shard | None:
        """Return a device's shard; None where one device has all, and sums as it does."""
        return self._shard(number) if self.shards or self.sums_in_pieces else None

    @functools.cached_property
    def sums_in_pieces(self) -> bool:
        """Whether sums are made as another number of devices would make them: also on one device."""
        return isinstance(self.config.tensor_parallel_sums, int)

    def load_as(self, number: int = 0) -> LoadAs:
        """Return the form in which a device's weights are loaded; `number` is that of its shard."""
        shard, loops = self.shard(number), self.config.loop_over_layers
        return LoadAs(self.dtype, self.config.quantization, shard, loops, self.kinds)

    @property
    def draft_load_as(self) -> LoadAs:
        """Form in which the weights of the model that drafts are loaded."""
        drafts = self.config.speculative_config
        return LoadAs(self.dtype, drafts.quantization, loop_over_layers=self.config.loop_over_layers)

    @functools.cached_property
    def model_config(self) -> ModelConfig:
        """Model as one device computes it: narrower than `whole` under tensor parallelism."""
        shard = self.shard()
        return self.whole if shard is None else shard.config

    @functools.cached_property
    def layout(self) -> Layout:
        """Layout of the cache."""
        config = self.config
        try:
            chosen = layouts.choose(
                config.kv_layout,
                config.kv_cache_dtype,
                measures_scales=config.calculate_kv_scales,
                keys_alone=self.whole.latent is not None,
            )
            layouts.check(chosen, config.block_size, self.whole.head_dim, self.dtype)
        except ValueError as error:
            raise InputError(str(error)) from error
        return chosen.on_several() if config.tensor_parallel_size > 1 else chosen

    @functools.cached_property
    def policy(self) -> Policy:
        """Eviction policy of the pool."""
        return eviction.named(self.config.eviction_policy, "eviction_policy")

    @functools.cached_property
    def sampler(self) -> Sampler | None:
        """Sampler from outside; None for ours."""
        return None if self.config.sampler is None else samplers.named(self.config.sampler)

    @functools.cached_property
    def processors(self) -> tuple[Processor, ...]:
        """Logits processors from outside. Raises `InputError`."""
        config = self.config
        found = processors.named(config.logits_processors or (), config.max_num_seqs, self.whole.vocab_size)
        if any(isinstance(each.function, HostProcessors) for each in found):
            rule = "functions under @processor beside drafts, several devices or processes"
            is_alone = self.mesh is None and config.speculative_config is None
            check("logits_processors", config.logits_processors, rule, is_alone)
        return found

    @property
    def attention(self) -> TiledImplementation | Attention:
        """Implementation of attention for prompts and answers, on this machine."""
        return self._attention[0]

    @property
    def attention_reason(self) -> str:
        """Reason for the choice of `attention`, for the log."""
        return self._attention[1]

    @property
    def has_outsiders(self) -> bool:
        """Whether a part that the loop computes with is from outside."""
        is_ours = not (self.sampler or isinstance(self.attention, Attention) or self.kinds or self.processors)
        return not (is_ours and layouts.is_ours(self.layout) and self.policy in eviction.OURS)

    @property
    def _parts(self) -> tuple[object, ...]:
        """Parts that may be from outside."""
        parts = self.layout, self.attention, self.sampler, *self.processors, self.policy
        return *parts, *dict.fromkeys(self.kinds)

    @functools.cached_property
    def code_digest(self) -> str | None:
        """Digest of the code of all parts that may be from outside; None if one cannot be described."""
        return digest_of(*self._parts)

    @functools.cached_property
    def max_model_len(self) -> int:
        """Tokens that a row of the state can hold: at most what the model was made for.

        A request may have fewer where the cache is small: see `capacity.served_len`.
        """
        wanted, most = self.config.max_model_len, self.whole.max_model_len
        if wanted is None or wanted == AUTO:
            return self.whole.default_max_len
        check("max_model_len", wanted, f"at most the model's {most}", wanted <= most)
        return wanted

    @functools.cached_property
    def tiles_per_pass(self) -> int:
        """Prompt tiles in one forward pass: a fixed number, so that a token's bits are fixed, too.

        A wide pass computes long prompts faster, a narrow one wastes less on short ones. It has 16 tokens for
        each row that can run, at least 64, and at most what makes a product efficient (LOG.md: 256 on two CPU
        cores).
        """
        widest = 256 if jax.default_backend() == "cpu" else 512
        tokens = min(max(16 * self.config.max_num_seqs, 64), widest)
        return min(tokens // PREFILL_TILE, self.config.num_prefill_tiles)

    @functools.cached_property
    def grouping(self) -> Grouping:
        """Layers that share a block table."""
        specs, c = self.whole.cache_specs, self.model_config
        weights = c.kv_weights if self.cache_heads != (c.num_kv_heads, c.head_dim) else ()
        if not specs:  # contents are named by the blocks of a group without layers
            grouping = one_group()
        elif self.config.disable_hybrid_kv_cache_manager:
            grouping = one_group(together(specs), len(specs), weights)
        else:
            grouping = grouping_of(specs, weights)
        return grouping if c.mixer is None else grouping.with_states(ChunkState(self.config.block_size))

    @property
    def num_places(self) -> int:
        """Layers in a block of the model that has most of them there."""
        its = 0 if self.draft is None else self.draft.num_kv_layers
        return max(self.grouping.width, its)

    @functools.cached_property
    def cache_heads(self) -> tuple[int, int]:
        """KV heads, and their width, for which the cache's places are made.

        Where layers differ, these are the narrowest layer's, and a wider one takes several places. Layouts
        with scales, shards and attention from outside have places for the widest heads in all layers.
        """
        c, config = self.model_config, self.config
        padded = c.num_kv_heads, c.head_dim
        narrowest, *wider = c.heads_by_size
        if not wider or self.shard() is not None or isinstance(self.attention, Attention):
            return padded
        one = self.layout, config.block_size, self.dtype, narrowest
        return narrowest if all(kv_cache.is_divisible(*one, heads) for heads in wider) else padded

    @functools.cached_property
    def features(self) -> Features:
        """Optional features of the rows and the state. Raises `InputError` for a channel that the
        model has no values for.
        """
        config = self.config
        on = channels.switched_on(config, self.model_config)
        return Features.on(channels=on, **features.switched_on(config))

    def step_config(self, num_blocks: int, more_blocks: Sequence[int] = ()) -> StepConfig:
        """Return the constants of the compiled step over a pool of `num_blocks` blocks.

        more_blocks: of each further size class; see `capacity.more_blocks`.
        """
        config, drafts = self.config, self.config.speculative_config
        watermarks = tuple(int(WATERMARK * number) for number in (num_blocks, *more_blocks))
        return StepConfig(
            max_num_seqs=config.max_num_seqs,
            num_tiles=config.num_prefill_tiles,
            tiles_per_pass=self.tiles_per_pass,
            attention=self.attention,
            sampler=self.sampler,
            processors=self.processors,
            watermark_blocks=watermarks if more_blocks else watermarks[0],
            grouping=self.grouping.of_step,
            reuse_answers=config.reuse_answers,
            decode_widths=self.decode_widths,
            rows_at_once=self.rows_at_once,
            lookup=None if drafts is None else draft_costs.lookup_of(drafts),
            most_drafting=None if drafts is None else draft_costs.most_drafting(drafts),
            draft_cost=self.draft_cost or draft_costs.cost_of(config, self.whole, self.draft),
            logprobs_mode=config.logprobs_mode,
        )

    @property
    def decode_widths(self) -> tuple[int, ...]:
        """Rows of narrower decode passes."""
        if self.config.decode_widths is not None:
            return self.config.decode_widths
        form = form_of(self.dtype, self.config.loop_over_layers)
        # With few numbers in a row, as Gemma 3n's predictions and inputs of layers may have, XLA's own
        # code has other last bits.
        has_few = self.whole.altup is not None or self.whole.layer_inputs is not None
        is_alike = form.own == "native" and self.attention == "native" and not has_few
        if not (is_alike and form.loops and self.whole.has_uniform_parts):
            return ()
        shares = (self.config.max_num_seqs // share for share in SHARES_OF_WIDTHS)
        return tuple(rows for rows in shares if rows > 1 and self.config.max_num_seqs - rows >= LEAST_SAVED)

    @property
    def rows_at_once(self) -> int | None:
        """Number of rows whose tokens are chosen together; None: all."""
        at_once = max(SCORES_AT_ONCE // self.model_config.vocab_size, 1)
        return at_once if jax.default_backend() == "cpu" and at_once < self.config.max_num_seqs else None

    def description(self) -> dict[str, str]:
        """Describe what all processes of an engine must have in common, as texts by their names."""
        fields = {
            # Where a part from outside lies in memory is not what it is.
            f.name: re.sub(r" at 0x[0-9a-f]+", "", repr(getattr(self.config, f.name)))
            for f in dataclasses.fields(self.config)
        }
        del fields["process_id"], fields["distributed_init"]  # these may differ between processes
        if self.has_outsiders:
            fields["code of parts from outside"] = str(self.code_digest)
        return {**fields, "model": hashlib.sha256(repr(self.whole).encode()).hexdigest()[:12]}

    @functools.cached_property
    def _attention(self) -> tuple[TiledImplementation | Attention, str]:
        asked = self.config.attention
        if not isinstance(asked, str) or ":" in asked:
            return self._attention_from_outside(attentions.named(asked))
        return self._attention_of_ours(asked)

    def _attention_from_outside(self, own: Attention) -> tuple[Attention, str]:
        """Return the attention with ours for what it has no function for. Raise `InputError` unless it serves
        the model.
        """
        c = self.model_config
        bounds = {
            name
            for name in ("attention_chunk", "sliding_window")
            if any(getattr(kind, name) is not None for kind in c.attention_kinds)
        }
        bounds |= {"layer_kind"} if any(self.kinds) else set()
        call = attentions.Call(
            dtype=self.dtype,
            head_dim=c.head_dim,
            block_size=self.config.block_size,
            group_size=c.num_q_heads // c.num_kv_heads,
            layout=self.layout,
            platform=jax.default_backend(),
            options=(*sorted(bounds), *c.attention_extras),
        )
        if why := own.support.why_not(call):
            raise InputError(f"attention={own.name!r} must serve the model: {why}")
        rest, why = self._attention_of_ours("auto")
        missing = [name for name in ("decode", "prompts") if not (own.ragged or getattr(own, name))]
        return dataclasses.replace(own, rest=rest), (
            f"asked for; {' and '.join(missing)} by {rest}: {why}" if missing else "asked for"
        )

    def _attention_of_ours(self, asked: str) -> tuple[TiledImplementation, str]:
        wanted: TiledImplementation
        try:
            no_native = native.why_not_cache(self.layout, self.dtype)
        except ValueError as error:
            raise InputError(str(error)) from error
        if asked == "auto":
            wanted = choice.default_tiled_implementation(self.dtype, tile_len=1)
        else:
            wanted = cast(TiledImplementation, asked)
        if why := self._why_not(wanted):
            if asked != "auto":
                raise InputError(f"attention={asked!r} must serve the model: {why}")
            return "xla", why
        if asked != "auto":
            return wanted, "asked for"
        if wanted == "xla":
            if jax.default_backend() != "cpu":
                no_native = None
            return wanted, no_native or "no kernels serve this GPU"
        return wanted, "our kernels serve this GPU" if wanted == "mosaic_gpu" else native.instructions()

    def _why_not(self, implementation: TiledImplementation) -> str | None:
        """Return why an implementation of attention does not serve this setup; None if it does."""
        why = self._why_not_model(implementation, self.model_config)
        if why is None and self.draft is not None:
            return self._why_not_model(implementation, self.draft)
        return why

    def _why_not_model(self, implementation: TiledImplementation, c: ModelConfig) -> str | None:
        window = max((kind.most_seen for kind in c.layers if kind.most_seen is not None), default=None)
        own = next((kind for kind in self.kinds if kind is not None), None)
        if own is not None and implementation != "xla":
            return f"the {implementation} kernel serves no layer_kind from outside, as {own!r}"
        if implementation == "native":
            return native.why_not_cache(self.layout, self.dtype)
        view = self.layout.view()
        numbers = None if view is None else self.layout.arrays(1, 1, 1, 1, self.dtype)[view.k.array].dtype
        try:
            support.refuse_unserved(
                implementation,
                dtype=self.dtype,
                cache_dtype=jnp.dtype(numbers or self.dtype),
                head_dim=c.head_dim,
                block_size=self.config.block_size,
                group_size=c.num_q_heads // c.num_kv_heads,
                options=support.Options(scale=1.0, sliding_window=window, kv_layout=self.layout),
            )
        except NotImplementedError as error:
            return str(error)
        return None

    def _check_states(self) -> None:
        """Raise `InputError` for an option that layers with states, or with one part alone, do not serve."""
        c, mixer = self.config, self.whole.mixer
        if self.whole.has_uniform_parts:
            return
        name = "with layers that lack attention or a feed-forward part"
        if mixer is not None:
            name = f"with layers of {mixer.name}, whose states are no K and V"
        self._require(name, quantization=None, enable_lora=False, layer_kind=None)
        check("tensor_parallel_sums", c.tensor_parallel_sums, f"a text {name}", not self.sums_in_pieces)
        check("loop_over_layers", c.loop_over_layers, f"None or False {name}", not c.loop_over_layers)
        least = 1 if mixer is None else mixer.kernel_size - 1
        rule = f"at least {least}, the tokens that a convolution reads before its own"
        check("block_size", c.block_size, rule, c.block_size >= least)

    def _check_latents(self) -> None:
        """Raise `InputError` for an option that latent attention does not serve."""
        if self.whole.latent is not None:
            self._require("with latent attention, whose heads share one vector a token", enable_lora=False)

    def _require(self, where: str, **values: Any) -> None:
        """Raise `InputError` for an option with another value than this one, the only one that is served."""
        for name, value in values.items():
            given = getattr(self.config, name)
            check(name, given, f"{value} {where}", given == value)

    def _check_sums(self) -> None:
        """Raise `InputError` if XLA would choose orders of sums by the number of heads or columns."""
        by_ours = form_of(self.dtype).own != "xla" and self.attention in ("native", "mosaic_gpu")
        rule = "a text where our own kernels do not compute both products and attention"
        sums = self.config.tensor_parallel_sums
        check("tensor_parallel_sums", sums, rule, not self.sums_in_pieces or by_ours)

    def _check_loop_over_layers(self) -> None:
        """Raise `InputError` if layers cannot be computed in a loop: on a GPU XLA cannot multiply in one."""
        if not self.config.loop_over_layers or jax.default_backend() == "cpu":
            return
        serves = form_of(self.dtype).stacked == "mosaic_gpu" and self.attention == "mosaic_gpu"
        rule = (
            f"None or False with {self.dtype} and attention by {self.attention} on this device: on a GPU a "
            "loop over layers needs our kernels for both, and 16 bits"
        )
        check("loop_over_layers", True, rule, serves)

    def _check_draft(self) -> None:
        """Raise `InputError` if a model or a head is to draft, and it cannot draft for this model."""
        drafts, draft = self.config.speculative_config, self.draft
        if drafts is None or drafts.method not in BY_MODEL:
            return
        of_model = drafts.method == DRAFT_MODEL
        name, its = "speculative_config: method", "model" if of_model else "head"
        rule = f"'ngram' or 'suffix' here: a {its} that drafts "
        check(name, drafts.method, f"{rule}must be given with its config", draft is not None)
        check(name, drafts.method, f"{rule}has one process", self.config.num_processes == 1)
        is_ours = not isinstance(self.attention, Attention)
        check(name, drafts.method, f"{rule}has no attention from outside", is_ours)
        assert draft is not None
        what = f"speculative_config: model={drafts.model!r}"
        vocab_size, longest = self.whole.vocab_size, self.max_model_len
        rule = f"{vocab_size}, the model's own"
        check(f"{what}: vocab_size", draft.vocab_size, rule, draft.vocab_size == vocab_size)
        if of_model:
            rule = f"at least max_model_len={longest}"
            check(f"{what}: max_model_len", draft.max_model_len, rule, draft.max_model_len >= longest)
        else:  # positions beyond those it was made for cost it hits, at most
            check(name, drafts.method, f"{rule}reads one residual", self.whole.altup is None)
        has_latents = self.whole.latent is not None
        rule = f"{has_latents}, as it is of the model"
        drafts_by_latents = draft.latent is not None
        ok = drafts_by_latents == has_latents
        check(f"{what}: latent attention", drafts_by_latents, rule, ok)
        first, reads = self.grouping.specs[0], together(draft.cache_specs)
        rule = f"what a layer of the model keeps, {first!r}, or less"
        check(f"{what}: attention", reads, rule, first in (FULL, reads))
        try:
            layouts.check(self.layout, self.config.block_size, draft.head_dim, self.dtype)
        except ValueError as error:
            raise InputError(f"{what}: {error}") from error
        if why := self.layout.why_not_heads(draft.num_kv_heads):
            raise InputError(f"{what}: kv_layout={self.layout}: {why}")
