"""/metrics after known traffic: every sum is what was asked for and answered."""

import json
import logging
from types import SimpleNamespace

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from jaxpaged.config import EngineConfig
from jaxpaged.engine.stats import Stats
from jaxpaged.serve.metrics import Metrics
from tests import tiny
from tests.serve.conftest import soon


def samples(served):
    """Return each sample's value by its name; with more labels than all samples have, by those, too."""
    made = {}
    for family in text_string_to_metric_families(served.http.get("/metrics").text):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
            made[(sample.name, *labels.values())] = sample.value
    return made


def test_known_traffic_is_counted_to_the_token(served, caplog, monkeypatch):
    served.wait_for_silence()
    soon(served.llm.engine.reset_prefix_cache)
    monkeypatch.setattr(logging.getLogger("jaxpaged.serve"), "propagate", True)
    caplog.set_level(logging.INFO, "jaxpaged.serve")
    before = samples(served)
    prompts = tiny.prompts([40, 40, 9], seed=8)
    answered = []
    for body in (
        {"prompt": prompts[0], "max_tokens": 6},
        {"prompt": prompts[0], "max_tokens": 6},  # all but the last of its full blocks are found again
        {"prompt": [prompts[1], prompts[2]], "max_tokens": 11, "n": 2, "seed": 1},
        {"prompt": prompts[2], "max_tokens": 1, "stream": True},
        {"prompt": prompts[2], "max_tokens": 8, "stop_token_ids": [*range(97)]},
    ):
        reply = served.http.post("/v1/completions", json=body | {"ignore_eos": True})
        answered.append(reply.json() if "stream" not in body else None)
    served.wait_for_silence()
    after = samples(served)

    def more(*name):
        return after[name] - before.get(name, 0.0)

    usage = [each["usage"] for each in answered if each]
    assert more("vllm:prompt_tokens_total") == sum(u["prompt_tokens"] for u in usage) + 9 == 147
    assert more("vllm:generation_tokens_total") == sum(u["completion_tokens"] for u in usage) + 1
    assert sum(u["completion_tokens"] for u in usage) == 6 + 6 + 44 + 1
    cached = [u["prompt_tokens_details"]["cached_tokens"] for u in usage]
    assert cached[:2] == [0, 32]
    assert more("vllm:prompt_tokens_cached_total") == sum(cached) + 8
    assert more("vllm:prefix_cache_hits_total") == sum(cached) + 8
    assert more("vllm:request_success_total", "length") == 7
    assert more("vllm:request_success_total", "stop") == 1
    assert more("vllm:request_success_total", "abort") == 0
    for name, count in (
        ("time_to_first_token_seconds", 8),
        ("e2e_request_latency_seconds", 8),
        ("request_queue_time_seconds", 8),
        ("request_prefill_time_seconds", 8),
        ("request_decode_time_seconds", 8),
        ("request_inference_time_seconds", 8),
        ("request_generation_tokens", 8),
        ("request_prompt_tokens", 6),
        ("request_params_n", 6),
        ("request_params_max_tokens", 6),
        ("request_time_per_output_token_seconds", 6),
    ):
        assert more(f"vllm:{name}_count") == count, name
        assert more(f"vllm:{name}_bucket", "+Inf") == count, name
    assert more("vllm:request_prompt_tokens_sum") == 147
    assert more("vllm:request_generation_tokens_sum") == 58
    assert more("vllm:request_params_n_sum") == 8
    assert more("vllm:request_params_max_tokens_sum") == 6 + 6 + 11 + 11 + 1 + 8
    # All tokens but those that came with an answer's first.
    assert more("vllm:inter_token_latency_seconds_count") <= 58 - 8
    assert (
        abs(more("vllm:inter_token_latency_seconds_sum") - more("vllm:request_decode_time_seconds_sum"))
        < 1e-6
    )
    computed = more("vllm:iteration_tokens_total_sum")
    assert abs(computed - (147 - sum(cached) - 8 + 58)) < 1e-6
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert after[(f"vllm:{name}",)] == 0
    [info] = [key for key in after if key[0] == "vllm:cache_config_info"]
    assert set(info[1:]) == {"8", "65", "True"}

    lines = [record.fields for record in caplog.records if record.name == "jaxpaged.serve"]
    assert len(lines) == 5
    assert [line["completion_tokens"] for line in lines] == [6, 6, 44, 1, 1]
    assert [line["finished"] for line in lines][2:] == [{"length": 4}, {"length": 1}, {"stop": 1}]
    for line in lines:
        assert line["given_up"] is None
        assert 0 <= line["queue_s"] <= line["ttft_s"] <= line["e2e_s"] < 30
        json.dumps(line)


@pytest.mark.parametrize("has_begun", [True, False])
def test_who_was_aborted_is_in_no_number_of_requests_but_by_the_reason(served, brake, has_begun):
    """Tokens count whatever becomes of them; a client that goes is in no histogram of requests."""
    served.wait_for_silence()
    before, hold = samples(served), brake(served.llm.engine)
    asked = {"prompt": [5, 6, 7], "max_tokens": 100, "ignore_eos": True, "stream": True}
    with served.http.stream("POST", "/v1/completions", json=asked):
        soon(lambda: served.service.num_open == 1)
        if has_begun:
            [run] = served.service.open_runs
            soon(lambda: run.num_completion_tokens > 0, lambda: hold.allow(1))
    soon(lambda: not served.service.open_runs)
    hold.off()
    served.wait_for_silence()
    after = samples(served)
    more = {name: after[name] - before.get(name, 0.0) for name in after}
    assert more[("vllm:request_success_total", "abort")] == 1
    counts = {name[0]: n for name, n in more.items() if name[0].startswith(("vllm:request", "vllm:e2e"))}
    counts = {name: n for name, n in counts.items() if name.endswith("_count")}
    assert len(counts) >= 8
    assert not any(counts.values()), counts
    assert more[("vllm:prompt_tokens_total",)] == (3 if has_begun else 0)
    assert (more[("vllm:generation_tokens_total",)] > 0) == has_begun


def test_what_runs_and_waits_is_told_while_it_does(served, brake):
    hold = brake(served.llm.engine)
    asking = [
        tiny.start(
            served.http.post, "/v1/completions", json={"prompt": [i], "max_tokens": 30, "ignore_eos": True}
        )
        for i in range(6)
    ]
    soon(lambda: served.service.num_open == 6)
    soon(lambda: served.llm.engine.stats.num_running == 4, lambda: hold.allow(1))
    now = samples(served)
    assert now[("vllm:num_requests_running",)] == 4
    assert now[("vllm:num_requests_waiting",)] == 2
    stats = served.llm.engine.stats
    assert now[("vllm:kv_cache_usage_perc",)] == 1 - stats.num_free_blocks / 64 >= 4 / 64
    assert served.http.get("/load").json() == {"server_load": 6}
    hold.off()
    assert all(each.result(30).status_code == 200 for each in asking)


def test_drafts_are_counted_under_vllms_names():
    config = EngineConfig(speculative_config={"num_speculative_tokens": 3})
    stats = Stats(
        num_blocks=9, num_drafts=5, num_draft_tokens=14, num_accepted_tokens=6, num_accepted_at=(4, 2, 0)
    )
    size = SimpleNamespace(block_size=8, num_blocks=10)
    engine = SimpleNamespace(stats=stats, config=config, cache_size=size)
    text = generate_latest(Metrics("tiny", engine).registry).decode()
    found = {
        (sample.name.removeprefix("vllm:spec_decode_num_"), sample.labels.get("position")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "spec_decode" in sample.name
    }
    assert found == {
        ("drafts_total", None): 5,
        ("draft_tokens_total", None): 14,
        ("accepted_tokens_total", None): 6,
        ("accepted_tokens_per_pos_total", "0"): 4,
        ("accepted_tokens_per_pos_total", "1"): 2,
        ("accepted_tokens_per_pos_total", "2"): 0,
    }
