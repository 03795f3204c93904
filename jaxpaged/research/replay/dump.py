"""The file: an engine's state without K and V, and what came later, as .npz with a JSON header."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np

import jaxpaged
from jaxpaged.checks import InputError, check, checked_int, is_int, shown
from jaxpaged.code_digest import digest_of, trace_anew_if_changed
from jaxpaged.contracts import attentions, samplers
from jaxpaged.contracts.attentions import Attention
from jaxpaged.contracts.samplers import Sampler
from jaxpaged.engine.driver import Driver
from jaxpaged.engine.engine import Engine
from jaxpaged.engine.request_encoding import filled, row_values
from jaxpaged.memory import eviction, kv_cache, policies, prefix_cache
from jaxpaged.memory.block_table import BlockTables
from jaxpaged.memory.grouping import Grouping
from jaxpaged.memory.kv_cache import KVCache
from jaxpaged.memory.policies import Policy
from jaxpaged.step.config import StepConfig
from jaxpaged.step.state import EngineState, HostPool, Rows, create_state, create_tables, empty_rows
from jaxpaged.untrusted import dtype_named, read_json, read_npz
from pallas_kernels import layouts
from pallas_kernels.ops import TiledImplementation

VERSION = 7  # version of the file's format


@dataclass(frozen=True)
class Event:
    """Event from outside, after `num_steps` steps: a request, or a request's abort."""

    num_steps: int  # made since the dump
    request: Rows | None = None  # NumPy arrays of one line, as `Door.write` fills it; as long as its tokens
    abort: int | None = None  # an arrival


@dataclass(frozen=True)
class Dump:
    """Contents of a dump file."""

    state: EngineState  # NumPy arrays; of K and V only shapes and types
    step_config: StepConfig
    vocab_size: int
    events: tuple[Event, ...]  # events of one moment are in the order of arrival
    answers: dict[int, list[int]]  # by arrival number: the known first tokens of each answer
    made_with: dict[str, str]  # versions


def report(engine: Engine | Driver, path: str | os.PathLike[str]) -> None:
    """Write how an engine stands between two runs, with the requests that wait for a row. From any thread.

    It goes on as if nothing had been. One that has stopped, by an error too, can still be written, unless the
    error was in the run itself and took the state with it: then JAX says that an array has been deleted.
    """
    shot = engine.snapshot()
    events = []
    for queued in shot.queue:
        token_ids = queued.token_ids
        values = row_values(queued.request, engine.config, shot.vocab_size, len(token_ids))
        values["token_ids"] = token_ids
        events.append(Event(0, filled(empty_rows(1, len(token_ids), shot.vocab_size), [values])))
    dump(shot.state, path, step_config=shot.step_config, vocab_size=shot.vocab_size, events=events)


def dump(
    state: EngineState,
    path: str | os.PathLike[str],
    *,
    step_config: StepConfig,
    vocab_size: int,
    events: Sequence[Event] = (),
    answers: Mapping[int, Sequence[int]] | None = None,
) -> None:
    """Write a state, without K and V, and the later events as .npz: arrays by name, and a JSON header."""
    cache, kv = state.tables.pool.prefix_cache, state.kv_cache
    check(
        "hash_fn",
        cache and cache.hash_fn,
        "prefix_cache.hash_block: no other can be written down",
        cache is None or cache.hash_fn is prefix_cache.hash_block,
    )
    requests = [event.request for event in events if event.request is not None]
    header = {
        "version": VERSION,
        "made_with": {"jaxpaged": jaxpaged.__version__, "jax": jax.__version__},
        "step_config": _words_of(step_config),
        "vocab_size": vocab_size,
        "sizes": {
            "num_rows": state.tables.max_seqs,
            "max_model_len": state.rows.token_ids.shape[1],
            "max_blocks_per_seq": state.tables.max_blocks_per_seq,
            "block_size": state.tables.block_size,
            "num_groups": state.tables.num_groups,
            "device": _pool_sizes(state.tables),
            "host": state.host and _pool_sizes(state.host.tables),
        },
        "kv": {
            "num_layers": kv.num_layers,
            "num_kv_heads": kv.num_kv_heads,
            "head_dim": kv.head_dim,
            "dtype": str(kv.dtype),
            "layout": layouts.words(kv.layout),
            "states": {name: [*x.shape[1:], x.dtype.name] for name, x in kv.states.items()},
        },
        "num_requests": len(requests),
        "events": [
            {"num_steps": e.num_steps, "abort": e.abort, "has_request": e.request is not None} for e in events
        ],
        "answers": {str(arrival): [*map(int, tokens)] for arrival, tokens in (answers or {}).items()},
    }
    # The tokens of all requests one after the other, for rows are much longer than most of them.
    tokens = [line.token_ids[0, : line.num_tokens[0]] for line in requests]
    requests = [replace(line, token_ids=line.token_ids[:, :0]) for line in requests]
    lines = jax.tree.map(lambda *each: np.concatenate(each), *requests) if requests else None
    arrays = {"header": np.array(json.dumps(header))}
    arrays["request_tokens"] = np.concatenate([np.zeros(0, np.int32), *tokens])
    for tree in ({"state": without_layers(state)}, {"requests": lines}):
        for keys, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
            arrays[_name(keys)] = np.asarray(leaf)
    with open(path, "wb") as file:
        np.savez_compressed(file, allow_pickle=False, **arrays)


def load(
    path: str | os.PathLike[str],
    layout: str | None = None,
    *,
    policy: Any = None,
    attention: Any = None,
    sampler: Any = None,
) -> Dump:
    """Read a file of `dump`; the file may be untrusted.

    layout, policy, attention, sampler: "package.module:Name", where those of the state are not ours. A file's
        own words for them import nothing. Without the attention or the sampler, ours stands in its place:
        steps are decided without them.

    Raises `InputError`, one sentence, for a file that is none, is damaged, or announces more than it has.
    """
    name = os.fspath(path)
    try:
        return _read(read_npz(path), Outsiders(layout, policy, attention, sampler))
    except InputError as error:
        raise InputError(f"dump {name!r}: {error}") from error
    except OSError as error:
        raise InputError(f"dump {name!r} cannot be read: {error.strerror or error}") from error
    except Exception as error:  # values of any type where others belong
        raise InputError(f"dump {name!r} must be a file that jaxpaged's replay wrote, undamaged") from error


class Outsiders(NamedTuple):
    """The parts from outside that a user names for a file."""

    layout: str | None = None
    policy: Any = None
    attention: Any = None
    sampler: Any = None


def _words_of(config: StepConfig) -> dict[str, Any]:
    """Return the fields of a step's configuration, parts from outside by their names."""
    words = {field.name: getattr(config, field.name) for field in fields(config)}
    for name in ("attention", "sampler"):
        words[name] = getattr(words[name], "name", words[name])
    words["grouping"] = config.grouping.words()
    # A file has none of the latter two: snapshots with drafts or processors are refused.
    for name in ("sampler", "lookup", "processors"):
        if not words[name]:
            del words[name]
    return words


def _step_config(words: Mapping[str, Any], given: Outsiders) -> StepConfig:
    """Return the configuration that a file's words mean, with the parts that the user has named."""
    replaced: dict[str, Any] = {"attention": words["attention"], "sampler": None}
    replaced["grouping"] = Grouping.of_words(words["grouping"])
    if replaced["attention"] not in get_args(TiledImplementation):
        replaced["attention"] = "xla" if given.attention is None else _anew(attentions.named(given.attention))
    if words.get("sampler") is not None and given.sampler is not None:
        replaced["sampler"] = _anew(samplers.named(given.sampler))
    return StepConfig(**{**words, **replaced})


def _anew[P: (Attention, Sampler, Policy)](part: P) -> P:
    """Return the part, after dropping JAX's traces of a former version of its code."""
    trace_anew_if_changed(part.name, digest_of(part))
    return part


def _policy(name: Any, given: Any) -> Policy:
    """Return the policy that a file's word names among ours, or the one that the user has named.

    Raises `InputError` if the file names one from outside and the user none.
    """
    known = policies.POLICIES | eviction.EVICTION_POLICIES
    if name in known:
        return known[name]
    if given is None:
        raise InputError(
            f"its policy {shown(name)} is not one of ours: name it with --policy, to have it imported"
        )
    return _anew(eviction.named(given))


def _read(arrays: Mapping[str, np.ndarray], given: Outsiders) -> Dump:
    header = read_json(str(arrays["header"]))
    version = header["version"]
    check("version", version, f"{VERSION}, the one that this jaxpaged reads", version == VERSION)

    def fill(tree: Any) -> Any:
        """Return the arrays with the names and shapes of `tree`."""

        def array(keys: Any, want: Any) -> np.ndarray:
            got = arrays[_name(keys)]
            if (got.shape, got.dtype) != (want.shape, want.dtype):
                raise ValueError(f"{_name(keys)} is {got.dtype}{got.shape}, not {want.dtype}{want.shape}")
            return got

        return jax.tree_util.tree_map_with_path(array, tree)

    sizes, num_requests = header["sizes"], header["num_requests"]
    step_config = _step_config(header["step_config"], given)
    rule = "the number of groups of the step's layers"
    check("num_groups", sizes["num_groups"], rule, sizes["num_groups"] == step_config.grouping.num_groups)
    sizes["vocab_size"] = vocab_size = header["vocab_size"]
    _check_sizes(sizes, num_requests, arrays)
    kv = header["kv"] | {"layout": _layout(header["kv"]["layout"], given.layout)}
    for place in ("device", "host"):
        if sizes[place] is not None:
            sizes[place]["policy"] = _policy(sizes[place]["policy"], given.policy)
    sizes["classes"] = step_config.grouping.classes
    state = fill({"state": jax.eval_shape(lambda: _new_state(**sizes, kv={}))})["state"]
    with_kv = jax.eval_shape(lambda: _new_state(**sizes, kv=kv))
    requests: Iterator[Rows] = iter(())
    if num_requests:
        requests = _lines(
            fill({"requests": empty_rows(num_requests, 0, vocab_size)})["requests"], arrays["request_tokens"]
        )
    return Dump(
        state=put_kv(state, with_kv.kv_cache, with_kv.host and with_kv.host.kv_cache),
        step_config=step_config,
        vocab_size=vocab_size,
        events=tuple(
            Event(e["num_steps"], next(requests) if e["has_request"] else None, e["abort"])
            for e in header["events"]
        ),
        answers={int(arrival): tokens for arrival, tokens in header["answers"].items()},
        made_with=header["made_with"],
    )


def _check_sizes(sizes: Mapping[str, Any], num_requests: Any, arrays: Mapping[str, np.ndarray]) -> None:
    """Check a header's sizes against the arrays that are there, before arrays of these sizes are made."""
    of_rows = sizes["num_rows"], sizes["max_model_len"]
    shape = arrays["state.rows.token_ids"].shape
    check("num_rows, max_model_len", of_rows, f"{shape}, as its array has them", of_rows == shape)
    words = arrays["state.rows.rules.stop_tokens"].shape[1]
    checked_int("vocab_size", sizes["vocab_size"], f"an int of at most {32 * words}", 1, 32 * words)
    rule = "the number of its arrays' lines"
    lines = len(arrays["requests.phase"]) if num_requests else 0
    check("num_requests", num_requests, rule, is_int(num_requests) and num_requests == lines)


def _layout(words: Mapping[str, Any], given: str | None) -> layouts.Layout:
    """Return the layout that a file's words name among ours, or the one that the user has named.

    Raises `InputError` if the file names one from outside and the user none.
    """
    named = words["kv_layout"]
    if named not in layouts.LAYOUTS and given is None:
        raise InputError(
            f"its layout {shown(named)} is not one of ours: name it with --layout, to have it imported"
        )
    return layouts.choose(**{**words, "kv_layout": named if given is None else given})


def _lines(requests: Rows, tokens: np.ndarray) -> Iterator[Rows]:
    """Yield each request with its own tokens, which `tokens` holds one after the other."""
    if len(tokens) != sum(requests.num_tokens):
        raise ValueError(f"request_tokens has {len(tokens)} tokens, not {sum(requests.num_tokens)}")
    lines = (jax.tree.map(lambda array, i=i: array[i : i + 1], requests) for i in range(len(requests.phase)))
    for line, token_ids in zip(lines, np.split(tokens, np.cumsum(requests.num_tokens)[:-1]), strict=True):
        yield replace(line, token_ids=token_ids[None])


def _new_state(
    *,
    num_rows: int,
    max_model_len: int,
    vocab_size: int,
    max_blocks_per_seq: int,
    block_size: int,
    num_groups: int,
    classes: tuple[int, ...],
    device: dict[str, Any],
    host: dict[str, Any] | None,
    kv: dict[str, Any],
) -> EngineState:
    """Create a state of the sizes in a header; without K and V if the header lacks their shapes."""

    def tables(
        num_blocks: int, policy: Policy, has_prefix_cache: bool, more_blocks: Sequence[int] = ()
    ) -> BlockTables:
        return create_tables(
            num_blocks,
            num_rows,
            max_blocks_per_seq,
            block_size,
            prefix_caching=has_prefix_cache,
            policy=policy,
            num_groups=num_groups,
            classes=classes,
            more_blocks=tuple(more_blocks),
        )

    def arrays(num_blocks: int, more_blocks: Sequence[int] = (), **_: Any) -> KVCache:
        if not kv:
            return no_layers(num_blocks, block_size)
        sizes = kv | {"num_blocks": num_blocks, "block_size": block_size, "dtype": dtype_named(kv["dtype"])}
        states = sizes.pop("states", {})  # older dumps have none
        cache = kv_cache.create(**sizes)
        if not states:
            return cache
        arrays = {name: (tuple(shape), dtype_named(dtype)) for name, (_, *shape, dtype) in states.items()}
        return kv_cache.with_states(cache, arrays, next(iter(states.values()))[0], *more_blocks)

    pool = None if host is None else HostPool(tables(**host), arrays(**host))
    return create_state(tables(**device), arrays(**device), max_model_len, vocab_size, pool)


def _pool_sizes(tables: BlockTables) -> dict[str, Any]:
    pool = tables.pool
    num_blocks, *more_blocks = (queue.num_blocks for queue in pool.queues)
    sizes = {
        "num_blocks": num_blocks,
        "policy": pool.policy.name,
        "has_prefix_cache": pool.prefix_cache is not None,
    }
    return sizes | ({"more_blocks": more_blocks} if more_blocks else {})


def no_layers(num_blocks: int, block_size: int) -> KVCache:
    return kv_cache.create(0, num_blocks, block_size, 1, 1, jnp.dtype("float32"))


def without_layers(state: EngineState) -> EngineState:
    """Return the state with a cache of no layers, which takes no memory and can still be swapped."""
    tables, host = state.tables, state.host
    device = no_layers(tables.pool.queues[0].num_blocks, tables.block_size)
    swapped = None if host is None else no_layers(host.tables.pool.queues[0].num_blocks, tables.block_size)
    return put_kv(state, device, swapped)


def kv_of(state: EngineState) -> tuple[KVCache, KVCache | None]:
    """Return the device's cache and the host's."""
    return state.kv_cache, None if state.host is None else state.host.kv_cache


def put_kv(state: EngineState, device: KVCache, host: KVCache | None) -> EngineState:
    pool = state.host
    if pool is not None and host is not None:
        pool = replace(pool, kv_cache=host)
    return replace(state, kv_cache=device, host=pool)


def _name(keys: Any) -> str:
    return jax.tree_util.keystr(keys, simple=True, separator=".")
