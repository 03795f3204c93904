"""Groups of layers, and the sizes of blocks and pools (vLLM 0.33, `v1/core/kv_cache_planning.py`).

All groups take their blocks from one pool. A block means the same bytes in each group: layer i of every group
lies in the same memory. So a block costs as much as the widest group, and belongs to one group at a time.
"""

import bisect
import math
from collections.abc import Sequence
from dataclasses import replace

from .specs import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    cdiv,
)

LayerSpecs = dict[str, AttentionSpec]


def get_kv_cache_groups(
    kv_cache_spec: LayerSpecs, disable_hybrid_kv_cache_manager: bool = False, pack: bool = False
) -> list[KVCacheGroupSpec]:
    """Divide a model's layers into groups that share a block table.

    One spec for all layers makes one group, and so do layers that keep the same tokens with other head
    sizes. Else pages are unified and layers grouped by spec. Without layers there is no group.

    disable_hybrid_kv_cache_manager: keep every token in local layers too, where some layers read all.
    pack: put pages of several sizes side by side into a block, instead of unifying them. vLLM does so in
        layouts whose outermost axis is the block.

    Raises: ValueError when the latter leaves layers of several kinds.
    """
    if not kv_cache_spec:
        return []
    if disable_hybrid_kv_cache_manager:
        kv_cache_spec = promote_local_specs(kv_cache_spec)
    if _have_one_spec(kv_cache_spec):
        return _create_groups(kv_cache_spec, [list(kv_cache_spec)])
    uniform = UniformTypeKVCacheSpecs.from_specs(kv_cache_spec)
    if uniform is not None:
        return [KVCacheGroupSpec(list(kv_cache_spec), uniform)]
    if pack and len({spec.page_size_bytes for spec in kv_cache_spec.values()}) > 1:
        return pack_layers(kv_cache_spec)
    return group_layers(unify_page_sizes(kv_cache_spec))


def _have_one_spec(kv_cache_spec: LayerSpecs) -> bool:
    specs = list(kv_cache_spec.values())
    try:
        specs[0].merge(specs)
    except ValueError:
        return False
    return True


def _create_groups(kv_cache_spec: LayerSpecs, grouped: list[list[str]]) -> list[KVCacheGroupSpec]:
    groups = []
    for names in grouped:
        specs = [kv_cache_spec[name] for name in names]
        groups.append(KVCacheGroupSpec(names, specs[0].merge(specs)))
    return groups


def promote_local_specs(kv_cache_spec: LayerSpecs) -> LayerSpecs:
    """Let window and chunked layers keep every token, in models where other layers do.

    Attention still reads only its window. Blocks get the size of those of full attention, if that is one.
    Where vLLM differs: full layers with two different windows make it raise an error, and one group here.

    Raises: ValueError when layers of several kinds are left.
    """
    if _have_one_spec(kv_cache_spec) or UniformTypeKVCacheSpecs.from_specs(kv_cache_spec):
        return kv_cache_spec
    full = [spec for spec in kv_cache_spec.values() if isinstance(spec, FullAttentionSpec)]
    one_size = full[0].block_size if len({spec.block_size for spec in full}) == 1 else None
    promoted = {
        name: _promote(spec, one_size or spec.block_size) if full else spec
        for name, spec in kv_cache_spec.items()
    }
    if not (_have_one_spec(promoted) or UniformTypeKVCacheSpecs.from_specs(promoted)):
        raise ValueError(f"the layers have specs of several kinds: {set(promoted.values())}")
    return promoted


def _promote(spec: AttentionSpec, block_size: int) -> AttentionSpec:
    if not isinstance(spec, SlidingWindowSpec | ChunkedLocalAttentionSpec):
        return spec
    promoted = FullAttentionSpec(
        block_size,
        spec.num_kv_heads,
        spec.head_size,
        spec.dtype,
        head_size_v=spec.head_size_v,
        sliding_window=spec.sliding_window if isinstance(spec, SlidingWindowSpec) else None,
        attention_chunk_size=(
            spec.attention_chunk_size if isinstance(spec, ChunkedLocalAttentionSpec) else None
        ),
    )
    if spec.page_size_padded is None:
        return promoted
    page_size = max(spec.page_size_padded, promoted.unpadded_page_size_bytes)
    return replace(promoted, page_size_padded=page_size)


def unify_page_sizes(kv_cache_spec: LayerSpecs) -> LayerSpecs:
    """Give all layers pages of the largest one's bytes.

    A smaller page that divides it gets a larger block size: more tokens in the same bytes. One that does not
    divide it is padded, and wastes the difference.
    """
    page_size = max((spec.page_size_bytes for spec in kv_cache_spec.values()), default=0)
    return {name: spec.with_page_size(page_size) for name, spec in kv_cache_spec.items()}


def group_layers(kv_cache_spec: LayerSpecs) -> list[KVCacheGroupSpec]:
    """Group layers by spec, groups of about equal width.

    Layers with one spec make a bucket; buckets whose specs merge are joined. The width of a group is the
    smallest bucket's length, or the largest one's if that is less than 1.5 times as long. A bucket of n
    layers gives ceil(n / width) groups, its layer j going to group j mod their number. Groups that are
    shorter than the widest waste the memory of the layers they lack, see `count_padding_layers`.

    kv_cache_spec: specs of one page size.
    """
    buckets: list[tuple[list[str], list[AttentionSpec]]] = []
    layers: dict[AttentionSpec, list[str]] = {}
    for name, spec in kv_cache_spec.items():
        layers.setdefault(spec, []).append(name)
    for spec, names in layers.items():
        for bucket_names, bucket_specs in buckets:
            try:
                bucket_specs[0].merge([*bucket_specs, spec])
            except ValueError:
                continue
            bucket_names.extend(names)
            bucket_specs.append(spec)
            break
        else:
            buckets.append((list(names), [spec]))

    lengths = [len(names) for names, _ in buckets]
    width = max(lengths) if max(lengths) < 1.5 * min(lengths) else min(lengths)
    grouped = []
    for names, _ in buckets:
        num_groups = cdiv(len(names), width)
        grouped += [names[i::num_groups] for i in range(num_groups)]
    return _create_groups(kv_cache_spec, grouped)


def choose_repeats(repeats: Sequence[int], at_least: int) -> int:
    """Return the d in [at_least, max(repeats)] for which rounding all up to multiples of d adds least.

    The largest of several; `at_least` when that is more than all repeats.
    """
    candidates = range(max(at_least, 1), max(repeats) + 1)
    return min(candidates, key=lambda d: (sum(-n % d for n in repeats), -d), default=at_least)


def pack_layers(kv_cache_spec: LayerSpecs) -> list[KVCacheGroupSpec]:
    """Group layers with pages of several sizes, several pages lying side by side in a block.

    Layers that keep the same tokens make a bucket. One with as many layers of each page size is a pattern,
    one layer of each size, that repeats. Groups get about equal numbers of repeats, see `choose_repeats`; the
    longest pattern of several sizes stays whole. Without any such pattern buckets stay whole, except window
    layers: they are divided so that a group fits the block that the other buckets need.

    Where vLLM differs: it loses layers of a window bucket that is no pattern and must be divided.
    """
    buckets: list[LayerSpecs] = []
    for name, spec in kv_cache_spec.items():
        for bucket in buckets:
            if UniformTypeKVCacheSpecs.from_specs({**bucket, name: spec}):
                bucket[name] = spec
                break
        else:
            buckets.append({name: spec})

    # By bucket: the names of its layers by bytes of their pages.
    pages: list[dict[int, list[str]]] = []
    for bucket in buckets:
        pages.append({})
        for name, spec in bucket.items():
            pages[-1].setdefault(spec.page_size_bytes, []).append(name)
    lengths = [[len(names) for names in by_page.values()] for by_page in pages]
    patterns = [counts for counts in lengths if len(set(counts)) == 1]
    whole = max((counts[0] for counts in patterns if len(counts) > 1), default=0)
    repeats = choose_repeats([counts[0] for counts in patterns], whole) if whole else None

    def is_divisible(index: int) -> bool:
        return repeats is None and isinstance(next(iter(buckets[index].values())), SlidingWindowSpec)

    num_groups = [cdiv(c[0], repeats) if repeats and len(set(c)) == 1 else 1 for c in lengths]
    block_bytes = max(
        sum(
            cdiv(len(names), len(buckets[i]) if is_divisible(i) else num_groups[i]) * page
            for page, names in by_page.items()
        )
        for i, by_page in enumerate(pages)
    )
    groups = []
    for i, bucket in enumerate(buckets):
        if is_divisible(i) and len(pages[i]) == 1:
            pages_per_block = max(block_bytes // next(iter(pages[i])), 1)
            num_groups[i] = cdiv(len(bucket), pages_per_block)
        if num_groups[i] == 1:
            grouped = [list(bucket)]
        else:
            pattern = list(zip(*pages[i].values(), strict=True))
            grouped = [
                [name for repeat in pattern[g :: num_groups[i]] for name in repeat]
                for g in range(num_groups[i])
            ]
        for names in grouped:
            uniform = UniformTypeKVCacheSpecs.from_specs({name: bucket[name] for name in names})
            assert uniform is not None, f"{names} are of one bucket"
            groups.append(KVCacheGroupSpec(names, uniform))
    return groups


def count_padding_layers(groups: Sequence[KVCacheGroupSpec]) -> int:
    """Return the layers by which groups are shorter than the widest one."""
    widths = [len(group.layer_names) for group in groups]
    return max(widths, default=0) * len(widths) - sum(widths)


def resolve_block_sizes(
    groups: Sequence[KVCacheGroupSpec], prefix_match_unit: int | None = None
) -> tuple[int, int]:
    """Return the (scheduler's, hashes') block size in tokens.

    Hits end at multiples of the former: the least common multiple of the groups' block sizes. A request's
    hashes are computed once, every `prefix_match_unit` tokens; by default that is their greatest common
    divisor. One group has one block size for both.

    Raises: ValueError when the unit does not divide a group's block size, or differs from the only one.
    """
    block_sizes = [group.kv_cache_spec.block_size for group in groups]
    if prefix_match_unit is None:
        prefix_match_unit = math.gcd(*block_sizes)
    if any(block_size % prefix_match_unit for block_size in block_sizes):
        raise ValueError(f"{prefix_match_unit=} must divide the block sizes of all groups, {block_sizes}")
    if len(block_sizes) == 1 and prefix_match_unit != block_sizes[0]:
        raise ValueError(f"{prefix_match_unit=} must be the only group's block size, {block_sizes[0]}")
    return math.lcm(*block_sizes), prefix_match_unit


def get_bytes_per_block(groups: Sequence[KVCacheGroupSpec]) -> int:
    """Return the bytes of one block in all layers of the widest group."""

    def width(group: KVCacheGroupSpec) -> int:
        spec = group.kv_cache_spec
        pages = 1 if isinstance(spec, UniformTypeKVCacheSpecs) else len(group.layer_names)
        return pages * spec.page_size_bytes

    return max(map(width, groups), default=0)


def get_kv_cache_config(groups: list[KVCacheGroupSpec], available_memory: int) -> KVCacheConfig:
    """Return a pool of as many blocks as `available_memory` bytes hold; one, the null block, for no group."""
    num_blocks = available_memory // get_bytes_per_block(groups) if groups else 1
    return KVCacheConfig(num_blocks, [], groups)


def max_memory_usage_bytes(
    groups: Sequence[KVCacheGroupSpec], max_in_flight_tokens: int, max_model_len: int
) -> int:
    """Return the most bytes that one request holds: the blocks of all groups, times a block's bytes."""
    num_blocks = sum(
        group.kv_cache_spec.max_admission_blocks_per_request(max_in_flight_tokens, max_model_len)
        for group in groups
    )
    return num_blocks * get_bytes_per_block(groups)


def estimate_max_model_len(
    groups: Sequence[KVCacheGroupSpec], max_in_flight_tokens: int, max_model_len: int, available_memory: int
) -> int:
    """Return the longest request, of at most `max_model_len` tokens, that fits into `available_memory` bytes.

    Zero when one token does not fit.
    """
    # The lengths that fit are the first ones, as the bytes never fall when the length grows.
    return bisect.bisect_right(
        range(1, max_model_len + 1),
        available_memory,
        key=lambda length: max_memory_usage_bytes(groups, max_in_flight_tokens, length),
    )
