"""Service of a pooling model, which its routes share: the model, its queue, and the queue's bound."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from jaxpaged.checks import shown
from jaxpaged.pooling.llm import Pooling
from jaxpaged.serve.options import ServerOptions
from jaxpaged.serve.replies import ApiError


class PoolingService:
    """For one event loop. The model is asked in one thread: requests take turns, in the order in which they
    come.
    """

    adapters: dict[str, Any] = {}  # noqa: RUF012 - a pooling model has none
    is_running = True

    def __init__(self, pooling: Pooling, model_name: str, options: ServerOptions) -> None:
        self.pooling, self.options = pooling, options
        self.model_names = options.served_model_names or (model_name,)
        self.root, self.created = model_name, self.now()
        self.max_model_len = pooling.engine.max_model_len
        self.is_stopping = asyncio.Event()
        self.metrics = PoolingMetrics(self.model_names[0])
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pooling")
        self.open_requests: set[asyncio.Future[Any]] = set()

    @property
    def llm(self) -> "PoolingService":
        """Service itself: `/health` looks at its `is_running`."""
        return self

    @staticmethod
    def now() -> int:
        return int(time.time())

    def check_model(self, name: str | None) -> str:
        """Return the name to answer with. Raises `ApiError` for a model that is not here."""
        if name and name not in self.model_names:
            raise ApiError(404, f"the model {shown(name)} does not exist", param="model")
        return name or self.model_names[0]

    async def run[T](self, ask: Callable[[], list[T]]) -> list[T]:
        """Ask the model in its thread. Raises what `ask` does, and `ApiError` where there is no room or no
        time.
        """
        if self.is_stopping.is_set():
            raise ApiError(503, "the server stops")
        if len(self.open_requests) > self.options.max_queue:
            raise ApiError(429, "the queue is full", headers={"retry-after": "1"})
        loop = asyncio.get_running_loop()
        asked = asyncio.ensure_future(loop.run_in_executor(self._thread, ask))
        self.open_requests.add(asked)
        self.metrics.running.set(len(self.open_requests))
        try:
            async with asyncio.timeout(self.options.request_timeout_s):
                outputs = await asked
        except TimeoutError:
            raise ApiError(504, f"no answer within {self.options.request_timeout_s:g} s") from None
        except asyncio.CancelledError:
            if self.is_stopping.is_set():
                raise ApiError(503, "the server stops: the answer was not complete in time") from None
            raise
        finally:
            self.open_requests.discard(asked)
            self.metrics.running.set(len(self.open_requests))
        self.metrics.note(outputs)
        return outputs

    def give_up(self, error: ApiError) -> None:
        """End all waiting requests, because the server stops."""
        for asked in self.open_requests:
            asked.cancel()

    def shutdown(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


class PoolingMetrics:
    """/metrics of a pooling model, under vLLM's names."""

    def __init__(self, model_name: str) -> None:
        self._registry = CollectorRegistry()
        labels = {"model_name": model_name, "engine": "0"}

        def made(kind: Any, name: str, words: str) -> Any:
            return kind(f"vllm:{name}", words, [*labels], registry=self._registry).labels(**labels)

        self.running = made(Gauge, "num_requests_running", "Requests that run or wait.")
        self._tokens = made(Counter, "prompt_tokens", "Tokens of texts.")
        self._texts = made(Counter, "request_success", "Texts that were answered.")

    def note(self, outputs: list[Any]) -> None:
        self._texts.inc(len(outputs))
        self._tokens.inc(sum(len(out.prompt_token_ids) for out in outputs))

    def text(self) -> bytes:
        return generate_latest(self._registry)
