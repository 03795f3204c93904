"""Program of each process in `test_processes.py`: process 0 prints answers as JSON lines."""

import dataclasses
import json
import sys
import time
from pathlib import Path

import jax
import numpy as np
from safetensors.numpy import load_file

from jaxpaged import LLM, BeamSearchParams, LoRARequest, SamplingParams
from jaxpaged.engine.device import Device
from jaxpaged.engine.grammars import Grammars
from jaxpaged.engine.services import events
from jaxpaged.engine.setup import Setup
from jaxpaged.grammar import recursive
from reference import kv_events as reference
from tests import tiny, tiny_recursive

GOLDENS = Path(__file__).parents[1] / "goldens"
PROMPTS = [[5, 6, 7, 8, 9] * n for n in (1, 4, 9, 6)]
POET = LoRARequest("poet", 1, GOLDENS / "lora/llama")


TOLD = {"kv_events_config": {"enable_kv_cache_events": True, "publisher": "null"}}


class Listener:
    """The oracle of a follower of process 0."""

    def __init__(self, driver):
        self.driver, self.plain, self.num_events = driver, reference.Follower(), 0
        vars(driver.events)["_listen"] = self.hear

    def hear(self, rank, told):
        for event in told:
            self.plain.apply({"type": type(event).__name__, **dataclasses.asdict(event)})
            self.num_events += 1

    def is_right(self):
        """Tell whether it knows what the device has."""
        cache = self.driver.state.tables.pool.prefix_cache
        names = "last", "generation", "parent", "token_ids"
        its = [np.asarray(getattr(cache, name)).tolist() for name in names]
        labels = vars(self.driver.events.trees[0])["_labels"].items()
        labels = {number: label.extra_keys(is_first=True) for number, label in labels}
        return self.plain.known == reference.findable(*its, labels)


def say(**what):
    print(json.dumps(what), flush=True)


def came(is_so):
    """Tell whether something is so in a while."""
    for _ in range(100):
        if is_so():
            return True
        time.sleep(0.05)
    return False


def ask(llm):
    events.MOST_CHANGES = 3
    heard = Listener(tiny.driver_of(llm.engine))

    def answers(*adapters):
        params = SamplingParams(max_tokens=24, temperature=0)
        told = llm.generate(PROMPTS, params, lora_request=list(adapters), use_tqdm=False)
        return [answer.outputs[0].token_ids for answer in told]

    plain, adapted = answers(None, None, None, None), answers(POET, None, POET, None)
    long = SamplingParams(max_tokens=100, ignore_eos=True, logprobs=0)
    handle, other = (llm.engine.submit(PROMPTS[i], long) for i in (0, 1))
    first = next(iter(handle))
    handle.abort()
    last, other_tokens = handle.result(), other.result().token_ids
    llm.pause_generation("keep")
    table = "model.embed_tokens.weight"
    version = llm.update_weights({table: -load_file(GOLDENS / "families/llama/model.safetensors")[table]})
    llm.resume_generation()
    updated = answers(POET, None, POET, None)
    llm.sleep(level=1)
    llm.wake_up()
    awake = answers(POET, None, POET, None)
    llm.sleep(level=2)
    llm.wake_up()  # reads the files
    say(
        followed=followed(llm),
        answers=plain,
        adapted=adapted,
        aborted=[first.finish_reason.name, last.finish_reason.name, len(last.token_ids) < 100],
        other=other_tokens,
        updated=[updated, updated != adapted, awake == updated, version],
        read_anew=answers(None, None, None, None) == plain,
        swapped=llm.engine.stats.num_preemptions > 0,
        told=[came(heard.is_right), heard.num_events > 20],
        free=llm.reset_prefix_cache(),
        forgotten=not heard.plain.known,
    )


def followed(llm):
    """Return answers of a recursive grammar, of which a beam search finds two; none without llguidance.

    Process 0 alone follows them; their masks go to all devices.
    """
    if not recursive.is_installed():
        return []
    door, config = llm.engine.door, llm.engine.config
    model_config = dataclasses.replace(door.model_config, eos_token_ids=(tiny_recursive.END,))
    grammars = Grammars(tiny_recursive.compiled, model_config.vocab_size, config.arena_words)
    llm.engine.door = dataclasses.replace(door, grammars=grammars, model_config=model_config)
    asked = {"max_tokens": 12, **tiny_recursive.asking("sum")}
    told = llm.generate(PROMPTS[:2], SamplingParams(temperature=0, **asked), use_tqdm=False)
    [search] = llm.beam_search(PROMPTS[:1], BeamSearchParams(beam_width=2, **asked), use_tqdm=False)
    llm.engine.door = door
    beams = [its.tokens[len(PROMPTS[0]) :] for its in search.sequences]
    return [*(its.outputs[0].token_ids for its in told), *beams]


def differing(state):
    """Return the state with another number on the last device that this process has."""
    rows = state.rows
    parts = [shard.data for shard in rows.salt.addressable_shards]
    parts[-1] = parts[-1].at[..., -1].set(7)
    salt = jax.make_array_from_single_device_arrays(rows.salt.shape, rows.salt.sharding, parts)
    return dataclasses.replace(state, rows=dataclasses.replace(rows, salt=salt))


def differ_in_the_end(follow):
    """Make the calls of process 0, and come to another state with the last one of `ask`."""

    def following(device, name, arrays):
        follow(device, name, arrays)
        if name == "forget_prefixes":
            device._state = differing(device.state)

    return following


def tells_that_it_begins(setup, check=Setup.check):
    """Print a line once all processes have agreed, before the engine does anything else."""
    say(begins=True)
    return check(setup)


def fails(*_):
    """Raise an error when the others have begun."""
    time.sleep(0.5)
    raise OSError("no such file")


def main(arguments):
    options = json.loads(arguments)
    begins = {"tells": tells_that_it_begins, "fails": fails}
    Setup.check = begins.get(options.pop("begins", ""), Setup.check)
    if options.pop("differs", False):
        Device.follow = differ_in_the_end(Device.follow)
    is_brief = options.pop("brief", False)
    llm = LLM(
        GOLDENS / "families/llama",
        skip_tokenizer_init=True,
        generation_config="vllm",
        num_blocks=1 + 8,  # too few for all at once
        preemption_mode="swap",
        num_host_blocks=1 + 8,
        enable_lora=True,
        max_num_seqs=4,
        max_model_len=128,
        max_num_batched_tokens=64,
        structured_outputs_mib=1,
        **TOLD,
        **options,
    )
    if is_brief:
        say(free=llm.reset_prefix_cache())
    else:
        ask(llm)
    if sys.stdin.readline() == "more\n":
        llm.engine.submit(np.array(PROMPTS[0]), SamplingParams(max_tokens=100, ignore_eos=True))
        say(more=True)
        while True:
            llm.generate(PROMPTS, SamplingParams(max_tokens=100, ignore_eos=True), use_tqdm=False)


if __name__ == "__main__":
    main(sys.argv[1])
