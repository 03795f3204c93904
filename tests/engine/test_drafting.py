"""A model that drafts: what is refused, and what it adds to the sizes of an engine."""

import dataclasses
from pathlib import Path

import pytest

from jaxpaged.api.draft import draft_of
from jaxpaged.checks import InputError
from jaxpaged.config import EngineConfig
from jaxpaged.engine import capacity
from jaxpaged.engine.drafted import Draft
from jaxpaged.engine.handle import collect
from jaxpaged.engine.setup import Setup
from jaxpaged.models import loading
from jaxpaged.models.drafting.description import DraftHead
from jaxpaged.models.families.llama import NAMES
from jaxpaged.models.weights import by_role
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.step.config import ByGrammar, DraftCost
from reference import model as reference_model
from tests import tiny, tiny_lora
from tests.engine.fuzz_settings import SETTINGS
from tests.tiny_gguf import write_gguf

BY_MODEL = {"speculative_config": {"method": "draft_model", "model": "tiny"}}


def setup(draft=tiny.CONFIG, model=tiny.CONFIG, **options):
    return Setup(EngineConfig(**tiny.DEFAULTS | BY_MODEL | options), model, draft)


@pytest.mark.parametrize(
    ("its", "message"),
    [
        (
            setup(None),
            "method='draft_model' must be 'ngram' or 'suffix' here: a model that drafts must be given",
        ),
        (
            setup(dataclasses.replace(tiny.CONFIG, vocab_size=96)),
            "speculative_config: model='tiny': vocab_size=96 must be 97, the model's own",
        ),
        (
            setup(dataclasses.replace(tiny.CONFIG, max_model_len=64)),
            "model='tiny': max_model_len=64 must be at least max_model_len=128",
        ),
        (
            setup(model=tiny.with_window(20)),
            r"attention=FullAttention\(\) must be what a layer of the model keeps, SlidingWindow\(window=2",
        ),
        (
            setup(tensor_parallel_size=2, num_processes=2, distributed_init="127.0.0.1:1"),
            "method='draft_model' must be 'ngram' or 'suffix' here: a model that drafts has one process",
        ),
    ],
)
def test_a_model_that_cannot_draft_is_refused(its, message):
    with pytest.raises(InputError, match=message):
        its.check()


def test_a_shorter_context_of_the_engine_is_enough_for_a_shorter_draft():
    setup(dataclasses.replace(tiny.CONFIG, max_model_len=64), max_model_len=64).check()
    setup(tiny.with_window(20), tiny.with_window(20)).check()


def test_a_block_has_both_models_keys_and_values():
    wide = dataclasses.replace(tiny.CONFIG, num_kv_heads=6, layers=tiny.CONFIG.layers[:1])
    own, its, both = (
        capacity.bytes_per_block(each)
        for each in (setup(None), Setup(EngineConfig(**tiny.DEFAULTS), wide), setup(wide))
    )
    assert both == own + its
    assert capacity.weight_bytes(setup(wide)) > capacity.weight_bytes(setup(None))


def test_on_a_cpu_a_model_drafts_for_one_answer_at_a_time():
    def most(**drafts):
        return setup(speculative_config=drafts).step_config(9).most_drafting

    assert most(model="tiny") == 1
    assert most(model="tiny", disable_by_batch_size=3) == 3
    assert most(method="ngram") is None
    assert most(method="suffix", disable_by_batch_size=2) == 2


def test_what_drafts_cost_follows_from_the_weights_that_a_token_reads():
    """SmolLM2 as its own draft, and a head for it: a layer of thirty, and scores of all tokens."""
    served = smollm2(num_layers=30)

    def cost(draft=None, **options):
        return Setup(EngineConfig(**options), served, draft).step_config(9).draft_cost

    assert cost() is None
    assert cost(speculative_config={"method": "grammar"}, structured_outputs_mib=1) is None
    assert cost(speculative_config={}) == DraftCost(8)
    assert cost(speculative_config={}, quantization="int4") == DraftCost(16)
    itself = {"model": "x", "quantization": "int4"}
    assert cost(served, speculative_config=itself) == DraftCost(8, 16, 80)
    assert cost(served, speculative_config=itself, quantization="int4") == DraftCost(16, 64, 80)
    alike = {"draft_head": DraftHead(kind="mtp", given_size=576, num_choices=49152, own_lm_head=False)}
    head = dataclasses.replace(smollm2(num_layers=1), **alike)
    assert cost(head, speculative_config={"method": "mtp"}) == DraftCost(8, 16, 4)


def smollm2(num_layers):
    """Return a model of SmolLM2's sizes, or its first layers."""
    return dataclasses.replace(
        tiny.CONFIG,
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_q_heads=9,
        num_kv_heads=3,
        head_dim=64,
        layers=tiny.CONFIG.layers[:1] * num_layers,
    )


def test_drafts_of_forced_text_alone_need_room_for_automata():
    drafts = {"speculative_config": {"method": "grammar"}}
    assert setup(None, structured_outputs_mib=1, **drafts).step_config(9).lookup == ByGrammar(7)
    with pytest.raises(InputError, match="structured_outputs_mib=0 must be at least 1 for drafts by method="):
        setup(None, structured_outputs_mib=0, **drafts).check()
    assert setup(None, **drafts).config.structured_outputs_mib == 64


def test_the_drafting_model_is_found_by_its_name(tmp_path):
    """Another tokenizer would draft other tokens than it means."""
    served = loading.open_checkpoint(write_gguf(tmp_path / "tiny.gguf"))

    def draft(**said):
        return draft_of(EngineConfig(speculative_config=said), served)

    found = draft(model=str(served.path))
    assert found is not None
    assert found.config == served.config
    assert draft(method="ngram") is None
    with pytest.raises(InputError, match="speculative_config: quantization='int9' must be None or one"):
        draft(model=str(served.path), quantization="int9")
    with pytest.raises(InputError, match="speculative_config: model='nowhere' must be"):
        draft(model="nowhere")
    other = dataclasses.replace(served, tokenizer=Other())
    with pytest.raises(InputError, match="must be one with the served model's tokenizer"):
        draft_of(EngineConfig(speculative_config={"model": str(served.path)}), other)


@pytest.mark.slow
def test_a_row_drafts_on_while_others_fork():
    """The slots of its drafts have hidden states of their own, which no leader's may take the place of."""
    driver = SETTINGS["swap, drafts by itself"](Path())
    first, second = tiny.prompts([9, 20], seed=3)
    [alone] = tiny.generate(driver, [first], tiny.greedy(40))
    [number] = tiny.submit(driver, [first], tiny.greedy(40))
    deltas = []
    for turn in range(40):
        if turn % 2 and driver.has_work:  # two answers to another prompt begin in the same step
            several = SamplingParams(max_tokens=1, n=2, seed=turn)
            for each in tiny.numbered(driver.door.admit([turn, *second], several)):
                driver.add(each)
        deltas += [delta for delta in driver.turn(max_steps=1) if delta.request_id == number]
    assert collect(deltas).token_ids == alone
    assert collect(deltas).drafts.num_accepted_draft_tokens > 10


@pytest.mark.slow
def test_an_adapter_and_new_weights_change_the_answers_and_not_the_drafts(tmp_path):
    drafts = {"model": "tiny", "num_speculative_tokens": 3}
    itself = Draft(tiny.CONFIG, tiny.load, cost=tiny.CHEAP)
    driver = tiny.driver(**tiny_lora.LORA, speculative_config=drafts, draft=itself)
    [prompt] = tiny.prompts([9], seed=2)

    def ask(seed=None):
        adapter = None if seed is None else tiny_lora.request(tmp_path, seed)
        [request] = tiny.numbered(driver.door.admit(prompt, tiny.greedy(24), lora_request=adapter))
        driver.add(request)
        found = tiny.drain(driver)[request.request_id]
        counts = found.drafts
        assert counts.num_draft_tokens > 0
        return found.token_ids, counts.num_accepted_draft_tokens == counts.num_draft_tokens

    assert ask() == (tiny_lora.reference_answer(None, prompt, 24), True)
    assert ask(0) == (tiny_lora.reference_answer(0, prompt, 24), False)
    driver.lifecycle.update_weights(driver.lifecycle.read_names(tiny.weights(seed=7).items()))
    new = by_role(tiny.CONFIG, NAMES, tiny.weights(seed=7))
    assert ask() == (reference_model.generate(tiny.CONFIG, new, prompt, 24), False)
    assert ask(0) == (reference_model.generate(tiny.CONFIG, tiny_lora.merged(0, 7), prompt, 24), False)
    tiny.assert_nothing_is_held(driver)


class Other:
    """A tokenizer of one token."""

    def get_vocab(self):
        return {"a": 0}
