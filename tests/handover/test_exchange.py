"""Blocks out of one engine and into another: the same answers, and nothing else changes."""

import contextlib
import dataclasses
import json
import os
import re
import socket
import subprocess
import sys
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load, save

from jaxpaged.checks import InputError
from jaxpaged.handover import exchange, programs
from jaxpaged.handover.blocks import BlockFormat, Blocks
from jaxpaged.handover.transport import SocketTransport
from jaxpaged.memory import kv_cache, transfer
from jaxpaged.models import lora
from jaxpaged.models.families.llama import NAMES
from jaxpaged.models.load_as import LoadAs
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.step import loop, recent
from pallas_kernels.layouts import LAYOUTS
from tests import tiny
from tests.layouts import EACH, HEAD_DIM, NUM_HEADS, block_size_of

SCORED = SamplingParams(max_tokens=8, temperature=0, logprobs=2)
ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0)
PROMPT, OTHER, NEVER_ASKED = tiny.prompts([50, 64, 40])
PROGRAMS = (
    programs.locate_blocks,
    programs.read_blocks,
    programs.adopt_blocks,
    programs.write_blocks,
    programs.digest,
)
BESIDE = loop.submit, loop.write_tokens, loop.report, recent.scores, loop.abort


def num_compiled(programs=PROGRAMS):
    return [program.num_compiled() for program in programs]


def answer(engine, prompt, **options):
    """Return an answer's tokens and scores, and the number of prompt tokens found in the cache."""
    found = engine.submit(prompt, SCORED, **options).result()
    return (found.token_ids, found.scores), found.num_hit_tokens


@pytest.fixture(scope="module")
def here():
    with tiny.engine() as engine:
        yield engine


@pytest.fixture(scope="module")
def blocks(here):
    before = num_compiled()
    here.submit(PROMPT, ONE_TOKEN).result()
    assert num_compiled() == before, "who does not export compiles nothing for it"
    return here.export_blocks(PROMPT)


def test_prompts_computed_here_are_answered_there(here, blocks):
    with tiny.engine() as there:
        assert blocks.num_blocks == 6
        answer(there, NEVER_ASKED[:9])
        before = num_compiled(BESIDE)
        assert there.adopt_blocks(Blocks.from_bytes(blocks.to_bytes())) == 6
        found, num_hit_tokens = answer(there, PROMPT)
        assert num_hit_tokens == 48
        assert found == answer(here, PROMPT)[0]
        assert found[0] == tiny.reference_answer(tuple(PROMPT), 8)
        assert there.adopt_blocks(blocks) == 6, "there already"

        # From device to device; salts by their names, for their numbers are each engine's own.
        there.submit(OTHER, ONE_TOKEN, cache_salt="first here").result()
        want = answer(here, OTHER, cache_salt="mine")[0]
        assert here.hand_over(there, OTHER, "nobody's") == 0
        assert here.hand_over(there, OTHER, "mine") == 8
        assert answer(there, OTHER, cache_salt="mine") == (want, 56), "one token is left to compute"
        assert answer(there, OTHER)[1] == 0
        assert num_compiled(BESIDE) == before, "the state is what it was to all programs"

        assert there.adopt_blocks(here.export_blocks(NEVER_ASKED)) == 0
        with pytest.raises(InputError, match=r"^prompt token=97 must be a token id"):
            here.export_blocks([97])
        assert there.snapshot().state.status == 0
        tiny.check_invariants(there.snapshot().state.tables)


def test_what_an_answer_made_is_not_exported(here):
    """An answer's tokens belong to no prompt."""
    prompt = PROMPT[:20]
    found = here.submit(prompt, tiny.greedy(30)).result().token_ids
    assert here.export_blocks(prompt + found).num_blocks == 2


def test_blocks_of_another_format_are_refused(here, blocks):
    for name, value in (
        ("block_size", 16),
        ("groups", "SlidingWindow(window=8) in layers 0, 1"),
        ("layout", "Fused()"),
        ("dtype", "bfloat16"),
        ("num_layers", 3),
        ("num_kv_heads", 1),
        ("head_dim", 16),
        ("reuse_answers", True),
        ("model", "another"),
        ("tensor_parallel_size", 2),
    ):
        other = dataclasses.replace(
            blocks, block_format=dataclasses.replace(blocks.block_format, **{name: value})
        )
        rule = f"blocks: {name}={value!r} must be {getattr(blocks.block_format, name)!r}, as this engine's"
        with pytest.raises(InputError, match=f"^{re.escape(rule)}$"):
            here.adopt_blocks(other)
    assert {field.name for field in dataclasses.fields(BlockFormat)} == set(
        dataclasses.asdict(blocks.block_format)
    )
    short = dataclasses.replace(blocks, arrays={name: x[:-1] for name, x in blocks.arrays.items()})
    with pytest.raises(InputError, match=r"^blocks: arrays="):
        here.adopt_blocks(short)
    for options, rule in (
        ({"enable_prefix_caching": False}, r"^enable_prefix_caching=False must be True to export"),
        ({"data_parallel_size": 2}, r"^data_parallel_size=2 must be 1 to export or adopt blocks: make an"),
        ({"kv_cache_dtype": "fp8", "calculate_kv_scales": True}, r"^calculate_kv_scales=True must be False"),
    ):
        driver = tiny.driver_of(here)
        config = dataclasses.replace(driver.config, **options)
        cache = driver.state.kv_cache
        measured = dataclasses.replace(cache, shared={"k_scale": jnp.zeros((2, 2))})
        its = driver.door.model_config, driver.setup.grouping, driver.device.params
        with pytest.raises(InputError, match=rule):
            exchange.describe_format(config, *its, measured)


def test_blocks_of_other_sums_are_of_another_model(here, blocks):
    """Their last bits may differ."""
    driver = tiny.driver_of(here)
    config = dataclasses.replace(driver.config, tensor_parallel_sums=2)
    described = driver.door.model_config, driver.setup.grouping, driver.device.params, driver.state.kv_cache
    assert exchange.describe_format(driver.config, *described) == blocks.block_format
    assert exchange.describe_format(config, *described).model != blocks.block_format.model


def test_room_for_adapters_is_no_other_model(here, blocks):
    driver, model = tiny.driver_of(here), tiny.load(LoadAs(jnp.dtype("float32")))
    lora.make_room(model, NAMES, num_adapters=2, rank=4)
    config = dataclasses.replace(tiny.CONFIG, eos_token_ids=(3,), max_model_len=64)
    its = config, driver.setup.grouping, nnx.state(model), driver.state.kv_cache
    assert exchange.describe_format(driver.config, *its) == blocks.block_format


def test_the_digest_knows_every_bit_and_its_place():
    def words(*arrays):
        return tuple(np.asarray(programs.digest([jnp.asarray(x) for x in arrays])).tolist())

    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((2, 5, 7), np.float32)
    changed, swapped = x.copy(), x[:, [1, 0, 2, 3, 4, 5, 6]]
    changed[3, 2] = np.nextafter(changed[3, 2], np.float32(9))
    each = {words(*its) for its in ((x, y), (changed, y), (swapped, y), (y, x), (x.T, y), (x, y, 0 * y))}
    assert len(each) == 6
    assert words(x, y) == words(x.copy(), y)


@pytest.mark.slow
def test_every_layouts_blocks_travel_whole():
    for name in EACH:
        layout = LAYOUTS[name]
        sizes = 2, 7, block_size_of(layout), NUM_HEADS, HEAD_DIM, jnp.dtype("float32")
        empty = kv_cache.create(*sizes, layout=layout)
        rng = np.random.default_rng(0)
        full = {
            its: rng.integers(0, 64, x.nbytes, np.uint8).view(x.dtype).reshape(x.shape)
            for its, x in empty.blocks.items()
        }
        source = dataclasses.replace(empty, blocks={its: jnp.asarray(x) for its, x in full.items()})
        there, here = jnp.array([3, 6, 2]), jnp.array([5, 0, 1])
        block_format = BlockFormat(
            sizes[2], "one", repr(layout), "float32", 2, NUM_HEADS, HEAD_DIM, False, "tiny"
        )
        read = {its: np.asarray(x) for its, x in transfer.read(source, there).items()}
        token_ids, present = np.zeros((3, sizes[2]), np.int32), np.ones((1, 3), bool)
        sent = Blocks(block_format, token_ids, present, None, read)
        assert sent.num_bytes == 3 * sum(x.nbytes for x in full.values()) // 7
        got = Blocks.from_bytes(sent.to_bytes())
        assert got.block_format == block_format
        target = transfer.write(empty, here, transfer.placed(got.arrays, empty))
        for its, x in target.blocks.items():
            want = np.zeros_like(full[its])
            for a, b in ((3, 5), (2, 1)):
                index = (slice(None),) * empty.axis
                want[(*index, b)] = full[its][(*index, a)]
            assert np.asarray(x).tobytes() == want.tobytes(), name


def test_what_fails_on_the_way_leaves_an_engine_that_finds_nothing_wrong(blocks, monkeypatch):
    """Chunk by chunk, while others run in a pool with little room; and then no room at all."""
    block_bytes = blocks.num_bytes // blocks.num_blocks
    monkeypatch.setattr(exchange, "CHUNK_BYTES", 2 * block_bytes)
    driver = tiny.driver()
    first = tiny.generate(driver, [PROMPT], tiny.greedy(1))
    driver.reset_prefix_cache()

    def broken():
        yield from list(exchange.cut(blocks.arrays, [6], driver.state.kv_cache))[:1]
        raise OSError("the line is cut")

    long = tiny.prompts([100] * 4, seed=1)
    tiny.submit(driver, long, tiny.greedy(16))
    for _ in range(4):
        driver.turn(2)
    running = [place for _, place in driver.rows.taken()]
    assert driver.stats.num_running == 4, "with 13 or 14 of 64 blocks each"
    with pytest.raises(OSError, match="the line is cut"):
        driver.exchange.adopt(blocks, broken())
    tiny.check_invariants(driver.state.tables)
    prompt = np.array(PROMPT, np.int32)
    assert not driver.exchange.locate(prompt, None).present.any()
    assert driver.exchange.adopt_blocks(blocks) == 6
    tiny.check_invariants(driver.state.tables)
    assert driver.exchange.export_blocks(prompt, None).to_bytes() == blocks.to_bytes()
    longer = np.arange(15 * 8, dtype=np.int32).reshape(15, 8)
    arrays = {name: np.repeat(x[:1], 15, 0) for name, x in blocks.arrays.items()}
    its = {"token_ids": longer, "present": np.ones((1, 15), bool), "arrays": arrays}
    assert driver.exchange.adopt_blocks(dataclasses.replace(blocks, **its)) == 0
    assert driver.exchange.locate(prompt, None).present.sum() == 6, "and nothing gave way to it"
    tiny.drain(driver)
    for place in running:
        its_prompt = tuple(place.request.prompt_token_ids.tolist())
        assert place.answer == tiny.reference_answer(its_prompt, 16)
    assert tiny.generate(driver, [PROMPT], tiny.greedy(1)) == first
    tiny.assert_nothing_is_held(driver)


def test_bytes_that_are_no_blocks_are_refused(blocks):
    data = blocks.to_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    [name], [said] = header["__metadata__"], map(json.loads, header["__metadata__"].values())

    def with_metadata(text, its_name=name):
        written = json.dumps(header | {"__metadata__": {its_name: text}}).encode()
        return len(written).to_bytes(8, "little") + written + data[8 + length :]

    def with_said(its_name=name, **changes):
        return with_metadata(json.dumps(said | changes), its_name)

    assert Blocks.from_bytes(with_said()).to_bytes() == data
    kind = said["kind"]
    for wrong in (
        b"",
        b"\xff" * 100,
        data[: len(data) // 2],
        with_said(its_name="another"),
        with_said(kind=kind | {"block_size": "8"}),
        with_said(kind=kind | {"block_size": 4}),
        with_said(kind={}),
        with_said(kind=[]),
        with_said(cache_salt=7),
        with_said(cache_salt=""),
        with_said(arrays={}),
        with_said(arrays={"k": ["object", [2]], "v": ["float32", [2]]}),
        with_said(arrays={"k": ["float32", [-1]], "v": ["float32", [2]]}),
        with_said(arrays={"nothing": ["float32", [2]]}),
        with_said(arrays={"k": ["m8[s/0]", [2]], "v": ["float32", [2]]}),  # which ends a process in NumPy
        with_said(arrays={"k": ["float32", 2], "v": ["float32", [2]]}),
        with_said(classes=[0, 1]),
        with_said(classes=7),
        with_said(classes=[[0]]),
        with_metadata("[" * 100_000 + "]" * 100_000),
        with_metadata(json.dumps(said)[:-1] + ', "more": ' + "[" * 5000 + "]" * 5000 + "}"),
        *(
            save(load(data) | changed, metadata={name: json.dumps(said)})
            for changed in (
                {"token_ids": np.array(7, np.int32)},
                {"present": np.ones((1, 5), bool)},
                {"present": np.ones((2, 6), bool)},  # of more blocks than came
                {"present": np.zeros((1, 6), bool)},
                {"present": np.ones((1, 6), np.int8)},
                {"present": np.ones((0, 6), bool)},
            )
        ),
    ):
        with pytest.raises(InputError, match=r"^blocks"):
            Blocks.from_bytes(wrong)


def test_a_socket_carries_blocks_in_their_order(blocks):
    its = {"token_ids": blocks.token_ids[:0], "present": blocks.present[:, :0]}
    empty = dataclasses.replace(blocks, **its, arrays={n: x[:0] for n, x in blocks.arrays.items()})
    ours, theirs = socket.socketpair()
    sender, receiver = SocketTransport(ours), SocketTransport(theirs)
    sent = tiny.start(lambda: [sender.send(each) for each in (blocks, empty)])
    assert [receiver.receive().to_bytes() for _ in range(2)] == [blocks.to_bytes(), empty.to_bytes()]
    sent.result()
    sender.close()
    assert receiver.receive() is None
    receiver.close()
    for wrong, error, why in (
        (
            (1000).to_bytes(8, "big") + b"half",
            ConnectionError,
            r"996 bytes before the end of a message of 1000",
        ),
        (b"half", ConnectionError, r"4 bytes before the end of a message of 8"),
        ((2**40).to_bytes(8, "big"), InputError, r"must have at most most_bytes="),
    ):
        ours, theirs = socket.socketpair()
        ours.sendall(wrong)
        ours.close()
        with theirs, pytest.raises(error, match=why):
            SocketTransport(theirs).receive()


def test_a_message_takes_memory_only_for_what_has_come():
    ours, theirs = socket.socketpair()
    ours.sendall((2**32).to_bytes(8, "big") + b"little")
    ours.close()
    tracemalloc.start()
    with theirs, pytest.raises(ConnectionError, match=r"of a message of 4294967296$"):
        SocketTransport(theirs).receive()
    assert tracemalloc.get_traced_memory()[1] < 2**23
    tracemalloc.stop()


KEY = b"a secret of both ends"


def both_ends(ours, theirs, our_key=KEY, their_key=KEY):
    """Make a transport of each end at once, for each waits for the other."""
    made = tiny.start(lambda: SocketTransport(theirs, key=their_key))
    return SocketTransport(ours, key=our_key), made.result()


@contextlib.contextmanager
def keyed_pair(our_key=KEY, their_key=KEY):
    """Make both ends of a connection as transports, each with a key, and their sockets."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        made = tiny.start(lambda: SocketTransport(theirs, key=their_key))  # each waits for the other
        try:
            yield SocketTransport(ours, key=our_key), made.result(), ours
        finally:
            ours.close()
            made.exception()


def test_both_ends_ask_for_the_key(blocks):
    with keyed_pair() as (sender, receiver, _):
        sent = tiny.start(lambda: [sender.send(blocks) for _ in range(2)])
        assert [receiver.receive().to_bytes() for _ in range(2)] == [blocks.to_bytes()] * 2
        sent.result()
        sender._channel._num_sent = 1  # the second message once more, in the place of a third
        sent = tiny.start(sender.send, blocks)
        with pytest.raises(ConnectionError, match=r"^a message was not made with the channel's key$"):
            receiver.receive()
        sent.result()
    with keyed_pair() as (_, receiver, ours):
        ours.sendall((3).to_bytes(8, "big") + b"abc" + bytes(32))
        with pytest.raises(ConnectionError, match=r"^a message was not made with the channel's key$"):
            receiver.receive()
    with (
        pytest.raises(ConnectionError, match=r"^the other end does not have this end's key$"),
        keyed_pair(their_key=b"another secret of one"),
    ):
        pass
    ours, theirs = socket.socketpair()
    with ours, theirs:  # what is sent back proves nothing
        tiny.start(lambda: theirs.sendall(theirs.recv(100)))
        with pytest.raises(ConnectionError, match=r"has sent back this end's nonce$"):
            SocketTransport(ours, key=KEY)
        with pytest.raises(InputError, match=r"^key='...' must be at least 16 bytes$"):
            SocketTransport(ours, key=b"short")


THERE = """
import json, socket, sys
import jax, numpy as np
from jaxpaged.handover import exchange
from jaxpaged.handover.transport import SocketTransport
from jaxpaged.memory import transfer
from tests import tiny
from tests.handover.test_exchange import PROMPT, answer, on_a_mesh

transport = SocketTransport(socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=60))
with tiny.engine() as engine:
    blocks = transport.receive()
    num_adopted = engine.adopt_blocks(blocks)
    (token_ids, scores), num_hit_tokens = answer(engine, PROMPT)
    transport.send(engine.export_blocks(PROMPT))
    on_a_mesh(blocks, tiny.driver_of(engine).state.kv_cache)
transport.close()
print(json.dumps([num_adopted, num_hit_tokens, token_ids, [score.logprob for score in scores]]))
"""


def on_a_mesh(blocks, cache):
    """Put the same blocks into a cache whose heads lie on two devices."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[2:4]), ("model",))
    cut = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, None, None, "model"))
    [size] = {x.shape[3] for x in cache.blocks.values()}
    assert size == cache.num_kv_heads
    empty = {name: jax.device_put(jnp.zeros_like(x), cut) for name, x in cache.blocks.items()}
    cache = dataclasses.replace(cache, blocks=empty)
    chunks = transfer.placed(
        {n: jax.device_put(x, jax.devices()[1]) for n, x in blocks.arrays.items()}, cache
    )
    ids = np.arange(1, 1 + blocks.num_blocks, dtype=np.int32)
    cache = programs.write_blocks(cache, ids, chunks)
    for name, x in programs.read_blocks(cache, ids).items():
        assert cache.blocks[name].sharding == cut
        assert np.array_equal(x, blocks.arrays[name])


@pytest.mark.slow
def test_another_process_answers(here, blocks):
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(300)
        command = [sys.executable, "-c", THERE, str(server.getsockname()[1])]
        flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "PYTHONPATH": os.getcwd()}
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | flags)
        try:
            connection, _ = server.accept()
            connection.settimeout(300)
            with contextlib.closing(SocketTransport(connection)) as transport:
                transport.send(blocks)
                assert transport.receive().to_bytes() == blocks.to_bytes()
            printed = child.communicate(timeout=300)[0]
        finally:
            child.kill()
    (token_ids, scores), _ = answer(here, PROMPT)
    assert json.loads(printed) == [6, 48, token_ids, [score.logprob for score in scores]]
