"""Parts from outside: compared with oracles, run by engines, named in options and commands, and refused."""

import ast
import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxpaged.contracts
from jaxpaged import cli
from jaxpaged.checks import InputError
from jaxpaged.config import EngineConfig
from jaxpaged.contracts import samplers, versions
from jaxpaged.contracts.samplers import SamplingOptions
from jaxpaged.engine import capacity
from jaxpaged.engine.door import Door
from jaxpaged.engine.setup import Setup
from jaxpaged.research.lab import sweep, traces
from jaxpaged.research.lab.combination import Combination
from jaxpaged.research.verify import kernels
from jaxpaged.sampling_params import SamplingParams
from pallas_kernels import layouts
from reference import sampler as reference_sampler
from reference.prompts import Prompts
from tests import tiny
from tests.commands.fast import FAST
from tests.engine import test_layouts as of_engine
from tests.lab.tracing import conversations, write
from tests.outsiders import attention, policy, sampler
from tests.tiny_gguf import write_gguf

FOLDER = Path(__file__).parent
OUTSIDERS = "tests.outsiders"
slow = pytest.mark.slow


@pytest.mark.parametrize("name", ["attention", "block_store", "layer_kind", "layout", "policy", "sampler"])
def test_an_outsider_needs_nothing_of_ours_but_the_contracts(name):
    tree = ast.parse((FOLDER / f"{name}.py").read_text())
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    modules |= {each.name for node in ast.walk(tree) if isinstance(node, ast.Import) for each in node.names}
    assert modules <= {"dataclasses", "jax", "jax.numpy", "numpy", "jaxpaged.contracts"}


def test_all_that_the_contracts_name_is_there_and_versions_agree():
    for name in jaxpaged.contracts.__all__:
        assert getattr(jaxpaged.contracts, name) is not None
    assert versions.SERVED["layout"] == layouts.CONTRACTS
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        jaxpaged.contracts.nothing  # noqa: B018


# Oracles


@pytest.mark.parametrize(
    ("function", "op", "without"),
    [
        (attention.decode, "paged_attention_v1", {"quantised", "block_sparse", "head_major"}),
        pytest.param(attention.tiles, "tiled_paged_attention", {"quantised", "head_major"}, marks=slow),
        (attention.ragged, "ragged_paged_attention", {"quantised", "head_major"}),
        (attention.by_callback, "paged_attention_v1", {"quantised", "block_sparse", "head_major"}),
    ],
)
def test_attention_from_outside_equals_the_oracle(function, op, without):
    dtypes = function.support.dtypes
    only = {} if dtypes is None else {"dtype": dtypes}
    terms = kernels.Terms(arrays="jax", without=frozenset(without), only=only)
    its = [case for case in kernels.cases_of(op) if terms.leaves_out(case) is None]
    served = 0
    for case in its[:: 1 + len(its) // 6]:
        try:
            served += kernels.check(function, op, case, terms) is not None
        except kernels.NotServed:
            continue
    assert served


def test_a_sampler_from_outside_draws_from_the_oracles_distribution():
    """Each of many seeds draws once from one row's logits."""
    num, logits = 2000, np.array([0.3, 1.2, -0.5, 2.0, 0.9], np.float32)
    rows = np.broadcast_to(logits, (num, 5))
    filled = SamplingOptions(
        temperature=np.full(num, 0.8, np.float32), top_k=np.full(num, 3, np.int32),
        top_p=np.ones(num, np.float32), min_p=np.zeros(num, np.float32), seed=np.arange(num, dtype=np.uint32),
    )  # fmt: skip
    drawn = np.asarray(jax.jit(sampler.with_noise)(rows, filled, np.full(num, 9, np.int32)))
    want = reference_sampler.probabilities(logits, 0.8, top_k=3)
    share = np.bincount(drawn, minlength=5) / num
    np.testing.assert_allclose(share, want, atol=4 * np.sqrt(0.25 / num))
    assert not share[want == 0].any()


# Engines


def driver(**options):
    return tiny.driver(**tiny.SMALL | options)


@pytest.fixture(scope="module")
def of_outsiders():
    """Make an engine of which attention, sampler and policy are from outside."""
    names = {
        "attention": "attention:BOTH",
        "sampler": "sampler:with_noise",
        "eviction_policy": "policy:FOUND_LAST",
    }
    return driver(**{option: f"{OUTSIDERS}.{name}" for option, name in names.items()})


@slow
def test_an_engine_of_outsiders_gives_the_oracles_tokens_in_any_company(of_outsiders):
    prompts = tiny.prompts([24, 20, 30, 12, 25])
    for _ in range(2):
        answers = tiny.generate(of_outsiders, prompts, tiny.greedy(30))
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer == tiny.reference_answer(tuple(prompt), 30)
    assert of_outsiders.stats.num_preemptions > 0
    several = SamplingParams(n=3, temperature=0.9, seed=5, top_k=20, max_tokens=16, logprobs=0)
    together = of_engine.sampled(of_outsiders, prompts[4], several)
    assert len({tuple(tokens) for tokens, _ in together}) > 1
    for index, got in enumerate(together):
        of_outsiders.reset_prefix_cache()
        one = dataclasses.replace(several, n=1, seed=5 + index)
        assert of_engine.sampled(of_outsiders, prompts[4], one) == [got], "bits depend on the company"
    tiny.assert_nothing_is_held(of_outsiders)


@slow
def test_what_an_engine_says_of_its_parts_are_their_names(of_outsiders):
    assert of_outsiders.state.tables.pool.policy.name == f"{OUTSIDERS}.policy:FOUND_LAST"
    assert str(of_outsiders.setup.attention) == f"{OUTSIDERS}.attention:BOTH"
    assert of_outsiders.setup.has_outsiders


def test_a_filter_that_a_sampler_does_not_obey_is_refused_at_the_door():
    door = tiny_door(samplers.named(f"{OUTSIDERS}.sampler:with_noise"))
    with pytest.raises(
        InputError, match="top_p=0.9 must be 1.0 with sampler='tests.outsiders.sampler:with_n"
    ):
        door.admit([1, 2], SamplingParams(top_p=0.9))
    assert door.admit([1, 2], SamplingParams(top_k=2, temperature=0.5))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"attention": f"{OUTSIDERS}.attention:for_large_heads"},
            r"must serve the model: it does not serve dtype=float32 .served: bfloat16.; head_dim=8 .served",
        ),
        (
            {"attention": f"{OUTSIDERS}.attention:decode", "kv_layout": "fused"},
            "kv_layout=fused \\(served: token_",
        ),
        (
            {"attention": f"{OUTSIDERS}.attention:of_the_future"},
            "declares contract = 2, and this release serves 1",
        ),
        (
            {"attention": f"{OUTSIDERS}.attention:attend"},
            "must be a function under @attention, or an Attention",
        ),
        ({"attention": f"{OUTSIDERS}.nothing:at_all"}, "attention='.*at_all' must be .*: No module named"),
        ({"sampler": f"{OUTSIDERS}.policy:found_last"}, "sampler='.*' must be a function under @sampler"),
        ({"sampler": f"{OUTSIDERS}.sampler:nobody"}, "sampler='.*' must be .*: module .* has no attribute"),
        ({"eviction_policy": f"{OUTSIDERS}.policy:Oracle"}, "eviction_policy='.*' must be .*, not type"),
        ({"kv_layout": f"{OUTSIDERS}.policy:Oracle"}, "kv_layout='.*' must be token_major"),
    ],
)
def test_what_does_not_serve_is_refused_at_the_start_with_the_reason(options, message):
    with pytest.raises(InputError, match=message):
        tiny.driver(**options)


def test_an_option_that_a_function_does_not_compute_is_refused():
    config = EngineConfig(**tiny.DEFAULTS | {"attention": f"{OUTSIDERS}.attention:by_callback"})
    with pytest.raises(InputError, match="does not serve option=sliding_window .served: none"):
        Setup(config, tiny.with_window(21)).check()


def test_a_decode_function_alone_leaves_prompts_to_ours_and_says_so():
    config = EngineConfig(**tiny.DEFAULTS | {"attention": f"{OUTSIDERS}.attention:decode"})
    setup = Setup(config, tiny.CONFIG)
    assert setup.attention.ours(1) is None
    assert setup.attention.ours(32) == Setup(EngineConfig(**tiny.DEFAULTS), tiny.CONFIG).attention
    assert str(setup.attention) == f"{OUTSIDERS}.attention:decode for decode"
    assert setup.attention_reason.startswith("asked for; prompts by ")


def tiny_door(own):
    """Return the door of a tiny engine with a sampler."""
    config = EngineConfig(**tiny.DEFAULTS)
    setup = Setup(config, tiny.CONFIG)
    step_config = dataclasses.replace(setup.step_config(65), sampler=own)
    size = capacity.cache_size(setup)
    return Door(config, tiny.CONFIG, 128, size, step_config)


# Commands


@pytest.mark.nightly
def test_the_command_generates_with_parts_named_on_its_line(tmp_path, capsys):
    model = str(write_gguf(tmp_path / "tiny.gguf"))
    parts = [
        "--attention",
        f"{OUTSIDERS}.attention:by_callback",
        "--sampler",
        f"{OUTSIDERS}.sampler:always_seven",
    ]
    line = ["generate", "--model", model, *FAST, "--prompt", "a", "--max-tokens", "3", "--json", *parts]
    assert cli.main([*line, "--temperature", "1"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[0])["token_ids"] == [7, 7, 7]


@slow
def test_the_laboratory_takes_a_policy_by_its_name(tmp_path):
    trace = traces.read(write(tmp_path / "trace.jsonl", conversations()))
    asked = Combination(f"{OUTSIDERS}.policy:FOUND_LAST", 64, 1600)
    [found] = sweep.sweep(trace, [asked], warmup=0)
    cut, usable = traces.blocks(trace, 64), 1600 // 64
    plain = Prompts(policy.Oracle(usable + 1), usable + 1)
    hits = []
    for r in range(trace.num_requests):
        most = min(int(cut.num_held[r]), usable)
        symbols = cut.symbols[cut.starts[r] : cut.starts[r] + cut.num_findable[r]].tolist()[:most]
        hits.append(plain.send(symbols, min(int(cut.num_lookup[r]), most), most))
    np.testing.assert_array_equal(found.hit_tokens, cut.hit_tokens(np.array(hits), trace.input_lens))
