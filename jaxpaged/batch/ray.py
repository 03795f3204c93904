"""Batches and servers over many machines, on Ray: the only file that imports it (extra `ray`).

`answer_files` has workers answer files of prompts, and `PartAnswerer` is the class that it gives to
`ray.data`. `application` is a Ray Serve application of several servers, each as `jaxpaged serve` has it,
behind one address: a request goes to the server that has most of its prompt's beginning cached, then to that
with the least to do.
"""

import asyncio
import dataclasses
import logging
import os
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from jaxpaged.api.async_llm import AsyncLLM
from jaxpaged.api.llm import LLM
from jaxpaged.api.model import engine_config
from jaxpaged.batch import prompt_parts
from jaxpaged.batch.prompt_parts import Part
from jaxpaged.checks import check, checked_int, checked_number
from jaxpaged.routing import Key, Router
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.serve import forwarding
from jaxpaged.serve.app import create_app
from jaxpaged.serve.guard import Guard
from jaxpaged.serve.options import ServerOptions
from jaxpaged.serve.replies import ApiError, event

log = logging.getLogger("jaxpaged.batch.ray")
Options = Mapping[str, Any]
RETRY_S = 0.05  # before a request is sent to another replica


class PartAnswerer:
    """A worker of `ray.data.Dataset.map_batches`: loads the model once, and answers the parts it is given.

    A batch has the columns of `prompt_parts.Part`; what comes back are the parts' names and how many rows of
    each were answered now. `options`: those of `LLM`.
    """

    def __init__(
        self, model: str, folder: str, sampling: Options | None = None, *, chat: bool = False, **options: Any
    ) -> None:
        self._llm = LLM(model, **options)
        self._folder, self._sampling, self._chat = Path(folder), sampling or {}, chat

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, list[Any]]:
        names, nums = [], []
        for values in zip(*(batch[name] for name in Part.__dataclass_fields__), strict=True):
            file, *numbers = values
            part = Part(str(file), *map(int, numbers))
            names.append(part.name)
            nums.append(prompt_parts.answer(self._llm, part, self._folder, self._sampling, chat=self._chat))
        return {"part": names, "num_answered": nums}


def answer_files(
    files: Sequence[str | os.PathLike[str]],
    folder: str | os.PathLike[str],
    model: str,
    sampling: Options | None = None,
    *,
    chat: bool = False,
    num_workers: int = 1,
    rows_per_part: int = 512,
    resources: Options | None = None,
    **options: Any,
) -> int:
    """Answer the prompts of files in Parquet or JSON lines, and write a line for each row into the folder.

    All machines must see both under the same paths. A row is what a line of `jaxpaged generate
    --prompts-file` may have; `sampling` has the fields of `SamplingParams` for what rows do not say. Lines
    have file, row (numbered from 0), id, prompt, prompt_token_ids and outputs, or an error; they are in
    the rows' order in files whose names are, each of `rows_per_part` rows. `resources`: what a worker is
    given by Ray, as in {"num_gpus": 1}; `options`: those of `LLM`.

    A worker that dies is replaced, and its part goes on where it was. So does the whole job, called again
    with the same arguments. Returns how many rows were answered now. Raises `InputError`.
    """
    checked_int("num_workers", num_workers, "an int >= 1", 1)
    engine_config({name: value for name, value in options.items() if name not in NOT_THE_ENGINES})
    SamplingParams(**(sampling or {}))
    parts = prompt_parts.cut(files, rows_per_part)
    asked = {"model": str(model), "sampling": dict(sampling or {}), "chat": chat}
    target = prompt_parts.open_folder(folder, parts, asked)
    todo = prompt_parts.missing(target, parts)
    if not todo:
        return 0
    # One part a task, so that a worker that dies gives back one, and all have work to the end.
    answered = ray.data.from_items(
        [dataclasses.asdict(part) for part in todo], override_num_blocks=len(todo)
    ).map_batches(
        PartAnswerer,
        fn_constructor_args=(str(model), str(target), dict(sampling or {})),
        fn_constructor_kwargs={"chat": chat, **options},
        batch_size=1,
        compute=ray.data.ActorPoolStrategy(size=min(num_workers, len(todo)), max_tasks_in_flight_per_actor=2),
        **(resources or {"num_cpus": 1}),
    )
    num_answered = sum(row["num_answered"] for row in answered.iter_rows())
    if left := prompt_parts.missing(target, parts):
        raise RuntimeError(
            f"{len(left)} of {len(parts)} parts were not answered: {left[0].name} is the first"
        )
    return num_answered


# Arguments of `LLM` itself, beside the engine's options.
NOT_THE_ENGINES = ("tokenizer", "skip_tokenizer_init", "revision", "generation_config", "record_trace")


def application(
    model: str,
    server_options: Options | None = None,
    *,
    num_replicas: int = 2,
    resources: Options | None = None,
    max_lead: float = 8,
    router_blocks: int = 2**16,
    **options: Any,
) -> serve.Application:
    """Build the application for `ray.serve.run`: replicas of `jaxpaged serve`, and one that receives and
    forwards.

    `server_options`: fields of `ServerOptions` (host, port and log are Ray's, and every name of the host is
    served unless `allowed_hosts` says which); `options`: those of `LLM`.
    `resources`: what a replica is given by Ray, as in {"num_gpus": 1}. `max_lead` and `router_blocks` are
    `routing.Router`'s limits. Raises `InputError`.

    A request whose replica dies before a byte of its answer was passed on is answered by another; a stream
    that has begun ends with an error.
    """
    checked_int("num_replicas", num_replicas, "an int >= 1", 1)
    checked_number("max_lead", max_lead, "a number >= 0", 0)
    checked_int("router_blocks", router_blocks, "an int >= 1", 1)
    settings = ServerOptions(**{"allowed_hosts": ("*",), **(server_options or {})})
    check("enable_lora_updates", settings.enable_lora_updates, "False: each replica has adapters of its own",
          not settings.enable_lora_updates)  # fmt: skip
    config = engine_config({name: value for name, value in options.items() if name not in NOT_THE_ENGINES})
    max_requests = config.max_num_seqs * config.data_parallel_size + settings.max_queue
    replica = serve.deployment(
        Replica,
        num_replicas=num_replicas,
        max_ongoing_requests=max_requests + 1,  # the replica itself refuses the request beyond
        ray_actor_options=dict(resources or {"num_cpus": 1}),
        request_router_config=RequestRouterConfig(
            request_router_class=PrefixRouter,
            request_router_kwargs={"max_blocks": router_blocks, "max_lead": max_lead},
        ),
    )
    ingress = serve.deployment(
        Ingress, max_ongoing_requests=num_replicas * max_requests + 1, ray_actor_options={"num_cpus": 0}
    )
    return ingress.bind(replica.bind(model, settings, options), settings)


class Replica:
    """Server without a socket: `Ingress` passes requests to it."""

    def __init__(self, model: str, options: ServerOptions, engine_options: Options) -> None:
        self._llm = AsyncLLM(model, **engine_options)
        self._app = create_app(self._llm, model, options)
        self._lifespan: AbstractAsyncContextManager[Any] | None = None

    async def answer(
        self, scope: dict[str, Any], body: bytes, keys: Sequence[Key]
    ) -> AsyncGenerator[list[Message]]:
        """Yield the ASGI messages of an answer. `keys` are for the router."""
        if self._lifespan is None:
            self._lifespan = self._app.router.lifespan_context(self._app)
            await self._lifespan.__aenter__()
        async for messages in forwarding.answered(self._app, scope, body):
            yield messages

    async def check_health(self) -> None:
        """Check that the engine runs: Ray replaces a replica whose check fails."""
        await self._llm.check_health()


class PrefixRouter(RequestRouter):
    """Ray's router by `routing.Router`; it counts what each replica was sent and has not answered."""

    def initialize_state(self, max_blocks: int, max_lead: float) -> None:
        self._router: Router[ReplicaID] = Router(max_blocks, max_lead)
        self._open: dict[ReplicaID, set[str]] = {}

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # where nobody has room
        names = {each.replica_id: each for each in candidate_replicas}
        loads = {name: len(self._open.get(name, ())) for name in names}
        return [[names[name]] for name in self._router.rank(_keys(pending_request), loads)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        self._router.note(replica_id, _keys(pending_request))
        self._open.setdefault(replica_id, set()).add(pending_request.metadata.internal_request_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._open.get(replica_id, set()).discard(internal_request_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._router.keep({each.replica_id for each in replicas})
        self._open = {name: ids for name, ids in self._open.items() if name in self._replicas}


def _keys(request: PendingRequest | None) -> Sequence[Key]:
    """Return the keys with which `Replica.answer` was called."""
    return request.args[2] if request is not None and len(request.args) > 2 else ()


class Ingress:
    """Front end that receives requests, and passes on the replicas' answers."""

    def __init__(self, replicas: DeploymentHandle, options: ServerOptions) -> None:
        self._answer = replicas.options(method_name="answer", stream=True)
        self._app = _AsResponse(Guard(self._forward, options))
        self._timeout_s = options.request_timeout_s

    async def __call__(self, request: Request) -> Response:
        return self._app

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/" or scope["path"].startswith("/page/"):
            error = ApiError(404, "the live page is one server's: there are several replicas here")
            await error.response()(scope, receive, send)
            return
        body = (await receive()).get("body", b"") if scope["method"] in ("POST", "PUT", "PATCH") else b""
        asked = forwarding.portable(scope, scope["state"]["request_id"])
        keys = forwarding.keys(body)
        give_up = time.monotonic() + self._timeout_s
        begun: list[Message] = []  # not passed on before there is a part of the body
        has_begun = is_complete = False
        while True:
            answer = self._answer.remote(asked, body, keys)
            try:
                async for messages in answer:
                    begun += messages
                    is_complete = _ends_an_answer(messages[-1])
                    if has_begun or is_complete or any(message.get("body") for message in begun):
                        has_begun = True
                        for message in begun:
                            await send(message)
                        begun = []
                return
            except (RayActorError, DeploymentUnavailableError) as error:
                log.warning("a replica is gone: %s", error)
                begun = []
                if is_complete:  # what was lost is only that no more would come
                    return
                if has_begun:
                    lost = event(ApiError(503, "the replica that answered is gone").body)
                    await send({"type": "http.response.body", "body": lost, "more_body": False})
                    return
                if time.monotonic() > give_up:
                    gone = ApiError(503, "no replica has lived long enough to answer")
                    await gone.response()(scope, receive, send)
                    return
                await asyncio.sleep(RETRY_S)
            finally:
                answer.cancel()


def _ends_an_answer(message: Message) -> bool:
    """Tell whether an ASGI message is the last of its answer: another would break the client's connection."""
    return message["type"] == "http.response.body" and not message.get("more_body", False)


class _AsResponse(Response):
    """An ASGI application in the place of a response."""

    def __init__(self, app: Any) -> None:
        super().__init__()
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)
