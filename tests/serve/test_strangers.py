"""Tests of strangers: which clients, host names and sites are served, and that keys learn nothing of each
other.
"""

import pytest

from jaxpaged import InputError
from jaxpaged.engine.door import Salts
from jaxpaged.serve.hosts import Hosts, host_of
from jaxpaged.serve.options import ServerOptions
from tests.serve.test_guards import through

HEALTH = ("GET", "/health")


def named(*hosts):
    return [(*HEALTH, {"headers": [("host", host) for host in each]}) for each in hosts]


def statuses(replies):
    return [reply.status_code for reply in replies]


def test_on_loopback_only_this_machine_s_names_are_served(llm):
    """A page whose own name was made to stand for 127.0.0.1 sends that name."""
    ours = [
        "localhost",
        "LOCALHOST:8000",
        "127.0.0.1:80",
        "[::1]:8000",
        "10.0.0.7",
        "a.localhost",
        "me.local:1",
    ]
    strange = [
        "evil.example",
        "evil.example:8000",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "x:y",
        "",
    ]
    asked = named(*([each] for each in ours + strange))
    replies = through(llm, asked, allowed_hosts=("me.local",))
    assert statuses(replies) == [200] * len(ours) + [403] * len(strange)
    assert replies[-3].json()["error"]["type"] == "PermissionDeniedError"
    assert "host='127.0.0.1.evil.example' must be a name of this server" in replies[-3].text
    assert statuses(through(llm, named(["localhost", "localhost"]))) == [403]


@pytest.mark.parametrize(
    ("options", "is_served"),
    [
        ({}, False),
        ({"host": "::1"}, False),
        ({"host": "localhost"}, False),
        ({"host": "0.0.0.0"}, True),
        ({"host": "0.0.0.0", "allowed_hosts": ("api.example",)}, False),
        ({"host": "0.0.0.0", "allowed_hosts": ("SOME.example",)}, True),
        ({"allowed_hosts": ("*",)}, True),
    ],
)
def test_elsewhere_names_are_checked_where_there_are_some(options, is_served):
    assert Hosts(ServerOptions(**options)).serve("some.example:8000") == is_served


def test_a_host_is_told_from_its_port():
    told = {"A.b.": "a.b", "a:80": "a", "[::1]": "::1", "[::1]:80": "::1", "a:": "a"}
    assert {header: host_of(header) for header in told} == told
    for wrong in ("", ":80", "a:b", "a b", "[::1", "::1", "user@a", "a/b", "a:80:80"):
        assert host_of(wrong) is None


def test_no_other_site_reads_unless_it_may(llm):
    """vLLM lets all of them."""
    asked = [(*HEALTH, {"headers": {"origin": "https://a.example"}})]
    preflight = {"origin": "https://a.example", "access-control-request-method": "POST"}
    asked.append(("OPTIONS", "/v1/completions", {"headers": preflight}))
    name = "access-control-allow-origin"
    for origins, told in (((), None), (("https://a.example",), "https://a.example"), (("*",), "*")):
        for reply in through(llm, asked, allowed_origins=origins):
            assert reply.headers.get(name) == told
    for reply in through(llm, asked, allowed_origins=("https://b.example",)):
        assert name not in reply.headers


def test_the_page_s_events_are_behind_the_key(llm):
    """Events show how long each request is; the page itself asks for the key."""
    asked = [("GET", "/page/events", {}), ("GET", "/", {})]
    assert statuses(through(llm, asked, api_keys=("one",))) == [401, 200]


def test_keys_share_no_cached_prefix(llm):
    """A salt that the client chooses does not change that; the holder of a key finds its own prefix."""
    prompt = [*range(20, 84)]

    def ask(key, **more):
        headers = {"authorization": f"Bearer {key}"}
        body = {"prompt": prompt, "max_tokens": 1} | more
        return ("POST", "/v1/completions", {"json": body, "headers": headers})

    def cached(asked, *keys):
        llm.engine.reset_prefix_cache()
        replies = through(llm, asked, api_keys=keys)
        return [reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"] for reply in replies]

    asked = [ask("a"), ask("b"), ask("a"), ask("a", cache_salt="s"), ask("b", cache_salt="s")]
    asked += [ask("b", cache_salt="s")]
    assert cached(asked, "a", "b") == [0, 0, 56, 0, 0, 56]
    assert cached([ask("a"), ask("a")], "a") == [0, 56]
    assert cached([ask("a", cache_salt="s"), ask("a"), ask("a", cache_salt="s")], "a") == [0, 0, 56]


def test_a_salt_is_bounded_and_only_its_digest_is_kept(llm):
    for salt in ("", "x" * 1025, 7):
        with pytest.raises(
            InputError, match="cache_salt=.* must be None or a string of 1 to 1024 characters"
        ):
            llm.engine.door.admit([1], llm.llm.get_default_sampling_params(), cache_salt=salt)
    salts = Salts()
    numbers = [salts.number("x" * 1000 + str(i)) for i in range(100)]
    assert numbers == [salts.number("x" * 1000 + str(i)) for i in range(100)]
    assert max(len(key) for key in salts._numbers) == 32
    told = {salts.number(*each) for each in ((None, 1), ("", 1), ("1=", 0), ("=", 1), ("1:", 0), ("a", 2))}
    assert len(told) == 6
    assert salts.number("\udc80") != salts.number("\udc81")
