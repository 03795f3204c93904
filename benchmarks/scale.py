"""A MODEL, not a measurement: what a decoder takes and gives on groups of GPUs, and on many groups.

The tables of docs/research/scale.md: `python -m benchmarks.scale` prints them. A group is a few GPUs that
share one copy of the weights (tensor parallel); groups are copies of each other, each with its own requests.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jaxpaged.research.lab.serving import roofline
from jaxpaged.research.lab.serving.roofline import USED, Roofline

BYTES = 2  # of a number, in bfloat16


@dataclass(frozen=True)
class Model:
    """A dense decoder of Llama's kind, in bfloat16."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int

    @property
    def num_params(self) -> int:
        width = (2 * self.num_q_heads + 2 * self.num_kv_heads) * self.head_dim
        layer = self.hidden_size * (width + 3 * self.intermediate_size + 2)
        return self.num_layers * layer + 2 * self.vocab_size * self.hidden_size + self.hidden_size

    @property
    def weight_bytes(self) -> int:
        return BYTES * self.num_params

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V for a token, over all layers."""
        return 2 * BYTES * self.num_layers * self.num_kv_heads * self.head_dim

    @property
    def num_sums(self) -> int:
        """Over a group's GPUs, in a step: behind attention's and the feed-forward's last products."""
        return 2 * self.num_layers


@dataclass(frozen=True)
class Link:
    """Links between GPUs: bytes per second in each direction at once, and the least seconds a sum takes."""

    bytes: float
    latency: float


LLAMA_70B = Model(8192, 28672, 80, 64, 8, 128, 128_256)
H200 = roofline.GPUS["h200"]
# The makers' bandwidths; the seconds are assumptions, of what collective libraries reach.
NVLINK = Link(roofline.NVLINK_BYTES, roofline.NVLINK_SECONDS)
INFINIBAND = Link(400e9 / 8, 30e-6)
NODE = 8  # GPUs, each with a network link of its own
# A sum over several nodes goes round in eight rings, each over another GPU's link.
NETWORK = Link(NODE * INFINIBAND.bytes, INFINIBAND.latency)


@dataclass(frozen=True)
class Group:
    """GPUs that share one copy of the weights, each with its share of the heads, and so of K and V."""

    model: Model
    num_gpus: int
    gpu: Roofline = H200

    @property
    def link(self) -> Link:
        """The slowest on the way round."""
        return NVLINK if self.num_gpus <= NODE else NETWORK

    @property
    def cache_tokens(self) -> int:
        """Tokens for whose K and V there is room beside the weights; 0 where even those do not fit."""
        room = USED * self.gpu.memory * self.num_gpus - self.model.weight_bytes
        return max(0, int(room / self.model.kv_bytes))

    def rows(self, context: int) -> int:
        """Return how many requests of `context` tokens each fit into the cache."""
        return self.cache_tokens // context

    def sum_bytes(self, num_tokens: int) -> float:
        """Return the bytes that a GPU sends in one sum, by a ring or by recursive halving and doubling."""
        share = (self.num_gpus - 1) / self.num_gpus
        return 2 * share * num_tokens * self.model.hidden_size * BYTES

    def sum_seconds(self, num_tokens: int) -> float:
        """Return the seconds of all sums of a step over `num_tokens` tokens, none hidden behind compute."""
        if self.num_gpus == 1:
            return 0.0
        each = max(self.link.latency, self.sum_bytes(num_tokens) / self.link.bytes)
        return self.model.num_sums * each

    def step_seconds(self, num_rows: int, context: int) -> float:
        """Return the seconds of a step that decodes one token for each row, each with `context` tokens."""
        m = self.model
        read = (m.weight_bytes + num_rows * context * m.kv_bytes) / self.gpu.bytes
        attention = 4 * m.num_layers * m.num_q_heads * m.head_dim * context
        compute = num_rows * (2 * m.num_params + attention) / self.gpu.flops
        return max(read, compute) / self.num_gpus + self.sum_seconds(num_rows)

    def prompt_seconds(self, num_tokens: int, context: int) -> float:
        """Return the seconds to compute prompt tokens, each behind half of `context` tokens on average."""
        m = self.model
        attention = 4 * m.num_layers * m.num_q_heads * m.head_dim * context / 2
        compute = num_tokens * (2 * m.num_params + attention) / self.gpu.flops
        read = m.weight_bytes / self.gpu.bytes
        return max(read, compute) / self.num_gpus + self.sum_seconds(num_tokens)


# The load of the tables: prompts and answers of so many tokens, on average with half of the answer there.
PROMPT, ANSWER = 2048, 256
CONTEXT = PROMPT + ANSWER // 2
CHUNK = 2048  # prompt tokens computed in one step
ROWS = 256  # that decode together in a group, where so many fit
GROUP = NODE

# The host's part. What a submitted request is on its way to the device: 4 bytes a prompt token; two sets of
# tokens, a bit each; `MAX_EDITS` tokens with value and length; some 200 bytes of options.
EDITS = 1024
RUN_SECONDS = 0.1  # of a run, between two of which requests are submitted
# From one host to another; measured between two processes on one machine, by gloo, it was 7 to 17 ms. In k
# rounds 2**k hosts have heard.
BROADCAST_SECONDS = 0.012
# Of a host's core, for a request and for each of its tokens, from the door to text: assumptions.
REQUEST_SECONDS, TOKEN_SECONDS = 200e-6, 5e-6


def request_bytes(model: Model, prompt: int) -> int:
    return 4 * prompt + 2 * 4 * -(-model.vocab_size // 32) + 12 * EDITS + 200


def request_seconds(group: Group) -> float:
    """Return the seconds of a group's time that a request takes beside `rows` others: its prompt, and its
    share of the decoding steps.
    """
    rows = min(ROWS, group.rows(CONTEXT))
    return prompt_share(group) + ANSWER * group.step_seconds(rows, CONTEXT) / rows


def prompt_share(group: Group) -> float:
    """Return the part of `request_seconds` that the prompt takes."""
    return PROMPT / CHUNK * group.prompt_seconds(CHUNK, PROMPT)


def table(head: Sequence[str], lines: Iterable[Sequence[object]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in rows)


def memory_table(model: Model = LLAMA_70B) -> str:
    def line(num_gpus: int) -> list[str]:
        group = Group(model, num_gpus)
        fits = group.cache_tokens > 0
        return [
            str(num_gpus),
            f"{model.weight_bytes / num_gpus / 1e9:.1f} GB",
            f"{model.kv_bytes / num_gpus / 1e3:.1f} kB",
            f"{group.cache_tokens / 1e3:,.0f} thousand" if fits else "does not fit",
            *(f"{group.rows(context):,}" if fits else "" for context in (CONTEXT, 8192, 131_072)),
        ]

    head = ["GPUs a group", "weights a GPU", "K, V of a token a GPU", "tokens a group"]
    return table([*head, f"rows of {CONTEXT:,}", "of 8,192", "of 131,072"], map(line, (1, 2, 4, 8)))


def decode_table(model: Model = LLAMA_70B) -> str:
    group = Group(model, GROUP)

    def line(num_rows: int) -> list[str]:
        step, sums = group.step_seconds(num_rows, CONTEXT), group.sum_seconds(num_rows)
        return [
            f"{num_rows:,}",
            f"{(step - sums) * 1e3:.2f}",
            f"{group.sum_bytes(num_rows) / 1e3:,.0f} kB",
            f"{sums * 1e3:.2f}",
            f"{step * 1e3:.2f}",
            f"{num_rows / step:,.0f}",
            f"{num_rows / step / GROUP:,.0f}",
        ]

    head = ["rows", "reading, computing, ms", "sent a sum", "160 sums, ms", "step, ms", "tokens/s", "a GPU"]
    return table(head, map(line, (1, 8, 32, 128, 256, 512, 1024)))


def width_table(model: Model = LLAMA_70B) -> str:
    """Return the table of groups of several widths. Beyond a node of eight GPUs, sums go over the network."""

    def line(num_gpus: int) -> list[str]:
        group = Group(model, num_gpus)
        rows = min(ROWS, group.rows(CONTEXT))
        step, prompt = group.step_seconds(rows, CONTEXT), group.prompt_seconds(CHUNK, PROMPT)
        return [
            f"{num_gpus}, {'NVLink' if group.link is NVLINK else 'InfiniBand'}",
            f"{rows}",
            f"{step * 1e3:.2f}",
            f"{group.sum_seconds(rows) * 1e3:.2f}",
            f"{rows / step / num_gpus:,.0f}",
            f"{prompt * 1e3:.0f}",
            f"{group.sum_seconds(CHUNK) * 1e3:.0f}",
            f"{CHUNK / prompt / num_gpus:,.0f}",
        ]

    head = ["GPUs a group", "rows", "step, ms", "sums in it, ms", "answer tokens/s a GPU"]
    head += [f"{CHUNK:,} prompt tokens, ms", "sums in it, ms", "prompt tokens/s a GPU"]
    return table(head, map(line, (2, 4, 8, 16, 32)))


def fleet_table(model: Model = LLAMA_70B) -> str:
    """Return the table of many groups of eight GPUs, under the load of `PROMPT` and `ANSWER` tokens."""
    group = Group(model, GROUP)
    each, size = request_seconds(group), request_bytes(model, PROMPT)

    def line(num_gpus: int) -> list[str]:
        num_hosts, requests = num_gpus // GROUP, num_gpus / GROUP / each
        sent = requests * size
        broadcast = math.ceil(math.log2(num_hosts)) * BROADCAST_SECONDS
        core = requests * (REQUEST_SECONDS + ANSWER * TOKEN_SECONDS)
        return [
            f"{num_gpus:,}",
            f"{num_hosts:,}",
            f"{requests:,.1f}",
            f"{requests * PROMPT:,.0f}",
            f"{requests * ANSWER:,.0f}",
            f"{requests * RUN_SECONDS:,.0f}, {sent * RUN_SECONDS / 1e6:,.1f} MB",
            f"{broadcast * 1e3:.0f}",
            f"{core:.2f}",
        ]

    head = ["GPUs", "groups, hosts", "requests/s", "prompt tokens/s", "answer tokens/s"]
    head += ["submitted a run", "broadcast, ms a run", "cores, if one host told all"]
    return table(head, map(line, (8, 64, 1024)))


def transfer_table(model: Model = LLAMA_70B) -> str:
    """Return the table of ways to get a prompt's K and V from another group, beside computing them."""
    group = Group(model, GROUP)
    compute = prompt_share(group)
    ways = [
        ("NVLink, each GPU its heads", GROUP * NVLINK.bytes),
        ("InfiniBand, each GPU its heads", GROUP * INFINIBAND.bytes),
        ("InfiniBand, one GPU for all", INFINIBAND.bytes),
        ("100 Gb/s Ethernet, a host", 100e9 / 8),
        ("a socket on one core, 2 GB/s", 2e9),
    ]

    def line(name: str, speed: float) -> list[str]:
        seconds = PROMPT * model.kv_bytes / speed
        return [name, f"{speed / 1e9:,.1f}", f"{seconds * 1e3:,.1f}", f"{compute / seconds:.2f}"]

    head = ["way", "GB/s", f"{PROMPT:,} tokens, ms", "times as fast as computing them"]
    return table(head, (line(*way) for way in ways))


def split_table(model: Model = LLAMA_70B) -> str:
    """Return the table of a decoding row's step times, with and without a chunk of a prompt."""
    group = Group(model, GROUP)
    rows = min(ROWS, group.rows(CONTEXT))
    step = group.step_seconds(rows, CONTEXT)

    def line(prompt: int, answer: int) -> list[str]:
        prefill = prompt / CHUNK * group.prompt_seconds(CHUNK, prompt)
        decode = answer * group.step_seconds(rows, prompt + answer // 2) / rows
        return [
            f"{prompt:,} : {answer:,}",
            f"{prefill / (prefill + decode):.0%}",
            f"{(prefill + decode) * rows / answer * 1e3:.1f}",
            f"{decode * rows / answer * 1e3:.1f}",
        ]

    chunks = [
        [f"{chunk:,}", f"{(step + group.prompt_seconds(chunk, PROMPT)) * 1e3:.1f}"]
        for chunk in (128, 512, 2048)
    ]
    head = ["prompt : answer", "share of time for prompts", "ms a token, together", "ms a token, apart"]
    load = table(head, (line(*each) for each in ((512, 512), (2048, 256), (8192, 256))))
    return load + "\n\n" + table(["prompt tokens in a step", f"step with {rows} rows, ms"], chunks)


TABLES = {
    "memory": memory_table,
    "decode": decode_table,
    "width": width_table,
    "fleet": fleet_table,
    "transfer": transfer_table,
    "split": split_table,
}


def main() -> None:
    for name, make in TABLES.items():
        print(f"<!-- {name} -->\n{make()}\n")


if __name__ == "__main__":
    main()
