"""Adapter of a server with OpenAI's interface: completions, and what it tells beside by vLLM's names."""

import json
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from jaxpaged.checks import InputError, shown
from jaxpaged.research.verify.engines.contract import Answer, Ask, Token

WORDS = (
    " river", " stone", " seven", " green", " light", " under", " table", " music", " north", " paper",
    " early", " glass", " water", " quick", " house", " silver",
    " morning", " letter", " garden", " winter", " circle",
    " number", " simple", " golden", " market", " window", " signal", " summer", " yellow", " island",
)  # fmt: skip
GAUGE = re.compile(r"(running|waiting|swapped|deferred|processing|usage|used)", re.IGNORECASE)
NO_GAUGE = re.compile(r"^(process_|python_)|memory|cpu_util", re.IGNORECASE)


@dataclass(frozen=True)
class Facts:
    """Facts about a server that cannot be asked for."""

    key: str | None = None
    model: str | None = None
    token_ids: tuple[int, int] | None = None  # first and last id of prompts; None: prompts are words
    block_size: int = 0
    num_blocks: int = 0
    adapters: tuple[str, ...] = ()  # names of models that are adapters of the first
    events: str | None = None  # ZeroMQ endpoint
    events_replay: str | None = None
    body: str = "{}"  # JSON that is added to each request
    timeout: float = 300.0  # seconds; a first request may wait for a compiler


class ServerAdapter:
    """Server behind a URL. Raises `InputError` where it does not answer, or httpx is missing."""

    is_remote = True

    def __init__(self, url: str, facts: Facts | None = None) -> None:
        facts = facts or Facts()
        try:
            import httpx
        except ImportError as error:
            raise InputError("httpx is missing: pip install 'jaxpaged[verify]'") from error
        try:
            self._more = dict(json.loads(facts.body))
        except (ValueError, TypeError) as error:
            raise InputError(f"body={shown(facts.body)} must be a JSON object") from error
        self._errors: Any = httpx.HTTPError
        root = url.rstrip("/").removesuffix("/v1")
        headers = {"authorization": f"Bearer {facts.key}"} if facts.key else {}
        self._http: Any = httpx.Client(
            base_url=root, headers=headers, timeout=facts.timeout, limits=httpx.Limits(max_connections=64)
        )
        try:
            self.model = facts.model or str(
                self._http.get("/v1/models").raise_for_status().json()["data"][0]["id"]
            )
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, IndexError, TypeError) as error:
            raise InputError(f"url={url!r} does not list its models: {error}") from error
        self._pool = ThreadPoolExecutor(32)
        self.block_size, self.num_blocks, self.adapters = facts.block_size, facts.num_blocks, facts.adapters
        first, last = facts.token_ids or (0, -1)
        self.token_ids: Sequence[Token] = range(first, last + 1) if facts.token_ids else WORDS
        self._follower: Any = None
        if facts.events:
            from jaxpaged.kv_events.follower import Follower

            self._follower = Follower(facts.events, facts.events_replay)
            self._late: list[Any] = self._follower.ask()
            self.events = self._events
        if self._read_gauges():
            self.gauges = self._read_gauges
        self.serves = self._probed()

    def _probed(self) -> frozenset[str]:
        """Ask which fields have an effect: a field that is known is refused with a wrong type."""
        prompt = tuple(self.token_ids[:4])
        plain = self._one(Ask(prompt, 2))
        if plain.error:
            raise InputError(f"the server answers no completion: {plain.error}")
        served = {"abort"} | ({"adapter"} if self.adapters else set())
        if self._status({"cache_salt": {"no": "string"}}) >= 400:
            served.add("salt")
        two = self._one(Ask(prompt, 1, n=2))
        if two.error is None and len(two.tokens) == 2:
            served.add("n")
        if self._one(Ask(prompt, 1, prompt_logprobs=True)).prompt_logprobs:
            served.add("prompt_logprobs")
        return frozenset(served)

    def _status(self, more: Mapping[str, Any]) -> int:
        body = self._body(Ask(tuple(self.token_ids[:4]), 1)) | dict(more)
        return int(self._http.post("/v1/completions", json=body).status_code)

    def _body(self, ask: Ask) -> dict[str, Any]:
        is_text = isinstance(ask.prompt[0], str)
        body: dict[str, Any] = {
            "model": ask.adapter or self.model,
            "prompt": "".join(map(str, ask.prompt)) if is_text else list(ask.prompt),
            "max_tokens": ask.max_tokens,
            "temperature": 0,
            "logprobs": 2,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        if ask.salt is not None:
            body["cache_salt"] = ask.salt
        if ask.n > 1:  # engines refuse several answers at temperature 0
            body |= {"n": ask.n, "temperature": 1, "top_k": 1}
        if ask.prompt_logprobs:
            body["prompt_logprobs"] = 1
        return body | dict(ask.options) | self._more

    def ask(self, asks: Sequence[Ask]) -> list[Answer]:
        """Send requests together."""
        if len(asks) == 1:
            return [self._one(asks[0])]
        return list(self._pool.map(self._one, asks))

    def _one(self, ask: Ask) -> Answer:
        try:
            if ask.abort_after is not None:
                return self._left(ask)
            reply = self._http.post("/v1/completions", json=self._body(ask))
            if reply.status_code != 200:
                return Answer((), error=f"{reply.status_code}: {reply.text[:200]}")
            return self._read(reply.json())
        except self._errors as error:
            return Answer((), error=f"{type(error).__name__}: {error}")
        except (ValueError, KeyError, TypeError, IndexError) as error:
            return Answer((), error=f"the answer is not as OpenAI has it: {type(error).__name__}: {error}")

    def _left(self, ask: Ask) -> Answer:
        """Leave after some chunks of a stream."""
        tokens: list[Token] = []
        with self._http.stream("POST", "/v1/completions", json=self._body(ask) | {"stream": True}) as reply:
            if reply.status_code != 200:
                reply.read()
                return Answer((), error=f"{reply.status_code}: {reply.text[:200]}")
            for line in reply.iter_lines() if ask.abort_after else ():
                if line.startswith("data:") and line[5:].strip() != "[DONE]":
                    for choice in json.loads(line[5:]).get("choices", ()):
                        tokens += _tokens(choice)
                if len(tokens) >= (ask.abort_after or 0):
                    break
        return Answer((tuple(tokens),))

    def _read(self, reply: Mapping[str, Any]) -> Answer:
        choices = sorted(reply["choices"], key=lambda choice: choice.get("index", 0))
        usage = reply.get("usage") or {}
        details, timings = usage.get("prompt_tokens_details") or {}, reply.get("timings") or {}
        logprobs = [(choice.get("logprobs") or {}).get("token_logprobs") for choice in choices]
        of_prompt = choices[0].get("prompt_logprobs") or reply.get("prompt_logprobs")
        return Answer(
            tuple(tuple(_tokens(choice)) for choice in choices),
            None if None in logprobs else tuple(tuple(map(float, each or ())) for each in logprobs),
            margins=_margins(choices),
            prompt_logprobs=None if not of_prompt else _of_prompt(of_prompt),
            cached=details.get("cached_tokens", timings.get("cache_n")),
            num_prompt=usage.get("prompt_tokens"),
        )

    def _read_gauges(self) -> dict[str, float]:
        try:
            reply = self._http.get("/metrics")
        except self._errors:
            return {}
        gauges, kinds = {}, dict(re.findall(r"^# TYPE (\S+) (\w+)", reply.text, re.MULTILINE))
        for line in reply.text.splitlines() if reply.status_code == 200 else ():
            name = re.split(r"[{ ]", line)[0]
            if kinds.get(name) == "gauge" and GAUGE.search(name) and not NO_GAUGE.search(name):
                gauges[line.rpartition(" ")[0]] = float(line.rpartition(" ")[2])
        return gauges

    def _events(self) -> list[Any]:
        """Return the events that have arrived, after a moment without a new one."""
        events, self._late = self._late, []
        while new := self._follower.poll(50):
            events += new
        return events

    def close(self) -> None:
        """Close connections."""
        self._http.close()
        self._pool.shutdown(wait=False)
        if self._follower is not None:
            self._follower.close()


def _tokens(choice: Mapping[str, Any]) -> list[Token]:
    ids = choice.get("token_ids")
    if ids:
        return [int(token) for token in ids]
    texts = (choice.get("logprobs") or {}).get("tokens")
    return list(texts) if texts else [choice["text"]] if choice.get("text") else []


def _margins(choices: Sequence[Mapping[str, Any]]) -> tuple[tuple[float, ...], ...] | None:
    """Return how far each token is ahead of the next likely one."""
    every = []
    for choice in choices:
        tops = (choice.get("logprobs") or {}).get("top_logprobs")
        if not tops:
            return None
        best = [sorted((float(v) for v in (top or {}).values()), reverse=True) for top in tops]
        every.append(tuple(two[0] - two[1] if len(two) > 1 else float("inf") for two in best))
    return tuple(every)


def _of_prompt(places: Sequence[Mapping[str, Any] | None]) -> tuple[float, ...]:
    """Return the best log-probability at each place of a prompt but the first, in vLLM's form."""
    values = [max(float(each["logprob"]) for each in place.values()) for place in places if place]
    return tuple(values)
