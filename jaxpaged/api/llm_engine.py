"""LLMEngine: a model to step by hand. Name and signatures are vLLM's."""

import contextlib
import dataclasses
import functools
import queue
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from jaxpaged.api.arg_utils import EngineArgs
from jaxpaged.api.model import LoadedModel
from jaxpaged.api.outputs import RequestOutput
from jaxpaged.api.prompts import Prompt, with_cut
from jaxpaged.api.streams import Answers
from jaxpaged.api.vllm_methods import VllmMethods
from jaxpaged.checks import check
from jaxpaged.engine.engine import Engine
from jaxpaged.engine.handle import EngineDeadError, Handle, Item, collect, or_raise
from jaxpaged.engine.request import Delta, Request
from jaxpaged.engine.texts import texts
from jaxpaged.lora import LoRARequest
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.vllm_names.methods import VllmClass, check_arguments, missing, not_from_config


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The part of a model's description that scripts ask an engine for."""

    max_model_len: int  # tokens of a prompt with its answer
    vocab_size: int
    path: Path | None = None  # the model's directory or file

    @functools.cached_property
    def hf_config(self) -> Any:
        """The model's config.json as transformers reads it. Raises `InputError` for a .gguf file."""
        from transformers import AutoConfig

        rule = "a directory with a config.json, for hf_config"
        check("model", str(self.path), rule, self.path is not None and self.path.is_dir())
        assert self.path is not None
        return AutoConfig.from_pretrained(self.path)

    @property
    def hf_text_config(self) -> Any:
        """The part of `hf_config` that is about text."""
        return self.hf_config.get_text_config()

    def get_vocab_size(self) -> int:
        return self.vocab_size


@dataclasses.dataclass(frozen=True)
class ParallelConfig:
    """The devices that share an engine's work."""

    data_parallel_size: int
    tensor_parallel_size: int
    data_parallel_rank: int = 0
    pipeline_parallel_size: int = 1


@dataclasses.dataclass(frozen=True)
class VllmConfig:
    """The parts of vLLM's config that scripts read."""

    model_config: ModelConfig
    parallel_config: ParallelConfig


# Methods of `LoadedModel` that vLLM's engine has by the names of its own.
_OF_MODEL = ("get_metrics", "release_kv_cache_memory", "sleep", "wake_up")


class LLMEngine(VllmMethods, metaclass=VllmClass):
    """Engine that takes requests one by one and returns the new parts of their answers at each `step`. For
    one thread.

    The model runs in the engine's own thread, also between two steps: a step gives all that has come since
    the one before, and waits only where nothing has.
    """

    def __init__(self, llm: LoadedModel) -> None:
        self.llm = llm
        self.config, self.profile_directory = llm.config, llm.profile_directory
        self._underway: dict[str, _Underway] = {}
        self._items: queue.SimpleQueue[tuple[str, Item]] = queue.SimpleQueue()
        self._ready: list[RequestOutput] = []  # of a step that raised an error of one request

    @classmethod
    def of(cls, llm: LoadedModel) -> Self:
        """Return an engine of a model that is there already, and that others may go on to use."""
        return cls(llm)

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs,
        usage_context: Any = None,
        stat_loggers: Any = None,
        enable_multiprocessing: bool = False,
    ) -> Self:
        """Load the model of `EngineArgs`. vLLM's other arguments change nothing here. Raises `InputError`."""
        return cls(LoadedModel.from_engine_args(engine_args))

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        **others: Any,
    ) -> str:
        """Queue a prompt, in any of the forms that `LLM.generate` takes, and return `request_id`.

        The id must not be that of a request under way. `arrival_time` and `trace_headers` change nothing;
        `others`, vLLM's further arguments, must ask for nothing.
        Raises `InputError`, and nothing is queued, for what could never run.
        """
        check_arguments("LLMEngine.add_request", others)
        rule = "a string that no request under way has"
        check(
            "request_id", request_id, rule, isinstance(request_id, str) and request_id not in self._underway
        )
        params = with_cut(params, tokenization_kwargs)
        admit = functools.partial(
            self.llm.engine.door.admit, params=params, priority=priority, lora_request=lora_request
        )
        read = functools.partial(self.llm.read_prompt, prompt, admit, without=())
        text, requests = read(tokenization_kwargs=tokenization_kwargs, cuts=getattr(params, "cuts", None))
        put = self._items.put
        handles = self.llm.engine.submit_all(requests, lambda item: put((request_id, item)))
        self._underway[request_id] = _Underway(self.llm, text, requests, handles)
        return request_id

    def step(self) -> list[RequestOutput]:
        """Return an output for each answer that has new tokens, in the form of `SamplingParams.output_kind`.

        Waits until something is, but returns an empty list where no request is unfinished. Raises
        `EngineDeadError` if the engine has stopped; an error of one request alone ends that request, and the
        next step has what others have.
        """
        if self._ready or not self._underway:
            outputs, self._ready = self._ready, []
            return outputs
        stopped = self.llm.engine.stopped
        if stopped is not None and self._items.empty():
            raise EngineDeadError(str(stopped)) from stopped.__cause__
        new: dict[int, tuple[str, list[Delta]]] = {}
        errors: list[Exception] = []
        for request_id, item in self._waiting_items():
            underway = self._underway.get(request_id)
            try:
                delta = or_raise(item)
                if underway is None or delta.request_id not in underway.texts:
                    continue  # of a request that was aborted
                delta = underway.texts[delta.request_id](delta)
            except EngineDeadError:
                raise
            except Exception as error:
                self.abort_request([request_id])
                errors.append(error)
            else:
                new.setdefault(delta.request_id, (request_id, []))[1].append(delta)
        outputs = [
            output
            for request_id, deltas in new.values()
            if request_id in self._underway and (output := self._output(request_id, deltas)) is not None
        ]
        if errors:
            self._ready = outputs
            raise errors[0]
        return outputs

    def abort_request(self, request_ids: str | Iterable[str], internal: bool = False) -> None:
        """Abort requests; no later step returns outputs of them. Others' ids change nothing."""
        for each in [request_ids] if isinstance(request_ids, str) else request_ids:
            underway = self._underway.pop(each, None)
            if underway is not None:
                self.llm.engine.abort(underway.answers.handles)

    def has_unfinished_requests(self) -> bool:
        return bool(self._underway or self._ready)

    @property
    def engine(self) -> Engine:  # type: ignore[override]  # a model that pools has none, and says so
        """The engine that answers. Raises `InputError` for a model that pools."""
        return self.llm.engine

    def get_num_unfinished_requests(self) -> int:
        return len(self._underway)

    @property
    def model_config(self) -> ModelConfig:
        pooling = self.llm.pooling
        if pooling is not None:
            config = pooling.engine.model_config
            return ModelConfig(pooling.engine.max_model_len, config.vocab_size, self.llm.path)
        door = self.llm.engine.door
        return ModelConfig(door.max_model_len, door.model_config.vocab_size, self.llm.path)

    @property
    def vllm_config(self) -> VllmConfig:
        """Sizes of the model and of the engine, as vLLM's scripts read them."""
        config = self.llm.config
        parallel = ParallelConfig(config.data_parallel_size, config.tensor_parallel_size)
        return VllmConfig(self.model_config, parallel)

    @property
    def tokenizer(self) -> Any:
        return self.llm.tokenizer

    def get_tokenizer(self) -> Any:
        """Return the model's tokenizer. Raises `InputError` where there is none."""
        return self.llm.get_tokenizer()

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Read an adapter now: see `LoadedModel.add_lora`."""
        return self.llm.add_lora(lora_request)

    def remove_lora(self, lora_id: int) -> bool:
        """Forget an adapter: see `LoadedModel.remove_lora`."""
        return self.llm.remove_lora(lora_id)

    def list_loras(self) -> set[int]:
        """Return the ids of adapters in the host's memory."""
        return self.llm.list_loras()

    def __getattr__(self, name: str) -> Any:
        """Return a method of the model's that vLLM's engine has, too, or raise `AttributeError`."""
        if name in _OF_MODEL:
            return getattr(self.llm, name)
        raise missing("LLMEngine", name)

    def is_sleeping(self) -> bool:
        """Return whether the engine sleeps."""
        return self.llm.is_sleeping

    def do_log_stats(self) -> None:
        """Do nothing: `LLM.get_metrics` has the numbers."""

    @classmethod
    def from_vllm_config(cls, vllm_config: Any, *args: Any, **options: Any) -> Self:
        """Raise `InputError`: there is no `VllmConfig`."""
        raise not_from_config(cls.__name__)

    def _waiting_items(self) -> list[tuple[str, Item]]:
        """Wait for the next item, and return it with all further items that have come."""
        items = [self._items.get()]
        with contextlib.suppress(queue.Empty):
            while True:
                items.append(self._items.get_nowait())
        return items

    def _output(self, request_id: str, deltas: Sequence[Delta]) -> RequestOutput | None:
        """Return the output after an answer's new tokens, if its kind has one."""
        underway = self._underway[request_id]
        output = underway.answers.output(collect(deltas))
        if output is None:
            return None
        if output.finished:
            del self._underway[request_id]
        return dataclasses.replace(output, request_id=request_id, prompt=underway.prompt)


class _Underway:
    """Request that has not finished: its prompt, if given as text, and its answers so far."""

    def __init__(
        self, llm: LoadedModel, prompt: str | None, requests: Sequence[Request], handles: list[Handle]
    ) -> None:
        self.prompt = prompt
        self.answers = Answers(requests, llm.engine)
        self.answers.handles = handles
        self.texts: dict[int, Callable[[Delta], Delta]] = {
            handle.request_id: texts(llm.tokenizer, handle.request) for handle in handles
        }
