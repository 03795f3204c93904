"""Messages as vLLM's followers read them, on sockets, and options that make no sense."""

import threading

import pytest

from jaxpaged.checks import InputError
from jaxpaged.config import EngineConfig
from jaxpaged.kv_events import messages
from jaxpaged.kv_events.follower import Follower, tell
from jaxpaged.kv_events.messages import AllBlocksCleared, BlockRemoved, BlockStored
from jaxpaged.kv_events.options import KVEvents
from jaxpaged.kv_events.publisher import Publisher, for_replica
from jaxpaged.routing import Router, keys_of_tokens
from tests import tiny

zmq = pytest.importorskip("zmq")

EVENTS = [
    AllBlocksCleared(),
    BlockRemoved([2**64 - 1], group_idx=0),
    BlockStored(
        [7, 2**40], None, [1, 2, 3, 96], 2, 5, "GPU", "poet", [("poet", "s"), ("poet",)], 0, "full_attention"
    ),
]
# The same by msgspec 0.22 and classes with the fields of those of vLLM 0.28, at 1.5 s, of replica 1.
GOLDEN = (
    "93cb3ff80000000000009381a474797065b0416c6c426c6f636b73436c656172656484a474797065ac426c6f636b52656d6f"
    "766564ac626c6f636b5f68617368657391cfffffffffffffffffa66d656469756da3475055a967726f75705f696478008ba4"
    "74797065ab426c6f636b53746f726564ac626c6f636b5f6861736865739207cf0000010000000000b1706172656e745f626c"
    "6f636b5f68617368c0a9746f6b656e5f6964739401020360aa626c6f636b5f73697a6502a76c6f72615f696405a66d656469"
    "756da3475055a96c6f72615f6e616d65a4706f6574aa65787472615f6b6579739292a4706f6574a17391a4706f6574a96772"
    "6f75705f69647800b26b765f63616368655f737065635f6b696e64ae66756c6c5f617474656e74696f6e01"
)


def test_bytes_are_those_of_vllm():
    assert messages.encode(1.5, EVENTS, 1).hex() == GOLDEN
    assert messages.decode(bytes.fromhex(GOLDEN)) == (1.5, EVENTS, 1)
    for torn in (b"", bytes.fromhex(GOLDEN)[:40], b"\x93\xc0\xc0\xc0", b"\x92\x01\x91\x81\xa4type\xa1X"):
        with pytest.raises(ValueError, match="no batch of events"):
            messages.decode(torn)


def test_a_follower_gets_all_in_order_and_asks_for_what_it_missed(tmp_path):
    endpoint, replays = (f"ipc://{tmp_path}/{name}" for name in ("events", "replays"))
    options = KVEvents(
        enable_kv_cache_events=True, endpoint=endpoint, replay_endpoint=replays, topic="kv", buffer_steps=50
    )
    publisher, published = Publisher(options), []

    def publish():
        number = len(published)
        published.append(BlockStored([number + 1], number or None, [number], 1))
        publisher.publish(published[-1:])

    publish()
    first, other = followers = [Follower(endpoint, replays, topic) for topic in ("kv", "other")]
    try:
        found = first.ask()
        while len(found) == 1:  # until it is connected
            publish()
            found += first.poll(100)
        while len(published) < 60:
            publish()
        while len(found) < 60:
            found += first.poll(1000)
        # What was sent before it was connected came in a replay.
        assert found == published
        assert first.num_missed == 0
        assert other.poll() == []
        # One who comes late gets what is kept, once, and counts what is not.
        followers.append(late := Follower(endpoint, replays, "kv"))
        assert late.ask() == published[-50:]
        assert late.num_missed == 10
        assert late.ask() == []
        # What makes no sense disturbs nobody.
        stranger = zmq.Context.instance().socket(zmq.DEALER)
        stranger.connect(replays)
        for frames in ((b"",), (b"", b"", b""), (b"x" * 9,)):
            stranger.send_multipart(frames)
        stranger.close(linger=1000)
        followers.append(later := Follower(endpoint, replays, "kv"))
        assert later.ask() == published[-50:]
    finally:
        for follower in followers:
            follower.close()
        publisher.close()
    with pytest.raises(InputError, match="ipc:///nowhere/at/all cannot be used"):
        Publisher(KVEvents(endpoint="ipc:///nowhere/at/all"))


def test_what_waits_to_be_sent_is_bounded(tmp_path, monkeypatch):
    """A publisher that cannot send, and room for three batches beside the one that it is at."""
    endpoint, replays = (f"ipc://{tmp_path}/{name}" for name in ("events", "replays"))
    options = KVEvents(endpoint=endpoint, replay_endpoint=replays, max_queue_size=3)
    begun, may_go, encode = threading.Event(), threading.Event(), messages.encode

    def slow(*its):
        begun.set()
        assert may_go.wait(60)
        return encode(*its)

    monkeypatch.setattr(messages, "encode", slow)
    publisher, follower = Publisher(options), Follower(endpoint, replays)
    batches = [[BlockRemoved([number])] for number in range(7)]
    publisher.publish(batches[0])
    assert begun.wait(60)
    for batch in batches[1:6]:  # two of them are lost
        publisher.publish(batch)
    may_go.set()
    found = []
    while len(found) < 4:
        found += follower.ask()
    publisher.publish(batches[6])
    while len(found) < 5:
        found += follower.ask()
    assert [event.block_hashes for event in found] == [[0], [1], [2], [3], [6]]
    assert follower.num_missed == 2
    follower.close()
    publisher.close()


def test_an_engine_tells_over_sockets_and_ends_with_them(tmp_path):
    endpoint, replays = (f"ipc://{tmp_path}/{name}" for name in ("events", "replays"))
    told = {"enable_kv_cache_events": True, "endpoint": endpoint, "replay_endpoint": replays}
    prompts, router, follower = tiny.prompts([70, 100]), Router(1), Follower(endpoint, replays)
    keys = [keys_of_tokens(prompt, 8) for prompt in prompts]

    def cached():
        tell(router, "one", follower.poll(10) + follower.ask())
        return [router.num_cached("one", its) for its in keys]

    with tiny.engine(kv_events_config=told) as engine:
        engine.submit(prompts[0], tiny.greedy(2)).result()
        engine.submit(prompts[1], tiny.greedy(2)).result()
        tiny.until(lambda: cached() == [8, 12])
        assert engine.reset_prefix_cache()
        tiny.until(lambda: cached() == [0, 0])
        engine.submit(prompts[1], tiny.greedy(2)).result()
        tiny.until(lambda: cached() == [0, 12])
    # The addresses are free again, and who follows them sees that another engine begins with nothing.
    with tiny.engine(kv_events_config=told) as engine:
        for _ in range(300):  # until the follower is connected
            engine.submit(prompts[0], tiny.greedy(2)).result()
            engine.reset_prefix_cache()
            if cached() == [0, 0]:
                break
        engine.submit(prompts[0], tiny.greedy(2)).result()
        tiny.until(lambda: cached() == [8, 0])
    follower.close()


def test_addresses_of_replicas():
    assert for_replica("tcp://*:5557", 0) == "tcp://*:5557"
    assert [for_replica(each, 2) for each in ("tcp://*:5557", "inproc://cache")] == [
        "tcp://*:5559",
        "inproc://cache_dp2",
    ]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("{", "kv_events_config='{' must be None or a mapping"),
        ({"enable": True}, "key='enable' must be one of enable_kv_cache_events"),
        ({"publisher": "kafka"}, "publisher='kafka' must be one of zmq, null"),
        ({"endpoint": "5557"}, "endpoint='5557' must be an address such as"),
        ({"buffer_steps": 0}, "buffer_steps=0 must be an int >= 1"),
        ({"topic": 3}, "topic=3 must be a string"),
    ],
)
def test_senseless_options_are_refused(value, message):
    with pytest.raises(InputError, match=message.replace("{", r"\{")):
        EngineConfig(kv_events_config=value)


def test_options_that_ask_for_nothing_are_none():
    assert EngineConfig(kv_events_config={"publisher": "zmq"}).kv_events_config is None
    assert EngineConfig(kv_events_config='{"enable_kv_cache_events": true}').kv_events_config == KVEvents(
        enable_kv_cache_events=True
    )
    with pytest.raises(InputError, match="must be None without enable_prefix_caching"):
        EngineConfig(kv_events_config={"enable_kv_cache_events": True}, enable_prefix_caching=False)
