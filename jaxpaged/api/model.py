"""Loaded models: files, tokenizer and engine of one model, with what every way to ask it needs."""

import dataclasses
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from flax import nnx

from jaxpaged.api import tokens
from jaxpaged.api.arg_utils import EngineArgs
from jaxpaged.api.draft import draft_of
from jaxpaged.api.metrics_reader import Metric, read_metrics
from jaxpaged.api.prompts import (
    Prompt,
    split_prompt,
    template_text,
    tokenization,
)
from jaxpaged.api.vllm_methods import VllmMethods
from jaxpaged.checks import InputError, check, checked_bool, checked_choice, shown
from jaxpaged.config import EngineConfig
from jaxpaged.engine import gpu_flags, machine
from jaxpaged.engine.adapters import Adapters
from jaxpaged.engine.device import CALL_CLASSES
from jaxpaged.engine.engine import Engine
from jaxpaged.engine.setup import resolve_dtype
from jaxpaged.handover.blocks import Blocks
from jaxpaged.lora import LoRARequest
from jaxpaged.models import loading, overrides
from jaxpaged.models.decoder import Decoder
from jaxpaged.models.load_as import LoadAs
from jaxpaged.parallel.processes import join
from jaxpaged.pooling.head import OF_HEAD, is_for_pooling
from jaxpaged.pooling.head import read as read_head
from jaxpaged.pooling.llm import Pooling
from jaxpaged.sampling_params import SamplingParams
from jaxpaged.text import templates
from jaxpaged.text.conversations import Message
from jaxpaged.vllm_names import options as vllm_options
from jaxpaged.vllm_names.methods import check_arguments, missing, profile_directory
from pallas_kernels import native

if TYPE_CHECKING:
    from jaxpaged.research.learn.learner import Learner


DUMMY = "dummy"  # load format of weights that are drawn; the others say what the files are anyway
LOAD_FORMATS = "auto", "hf", "safetensors", "gguf", DUMMY
# What `LLM.collective_rpc` does, by vLLM's names of a worker's methods.
RELOAD, CONFIGURE = "reload_weights", "update_config"


@dataclasses.dataclass
class Source:
    """Source of a model's weights: its files, or random numbers until those are wanted."""

    files: loading.Checkpoint
    drawn: loading.Checkpoint | None

    @property
    def now(self) -> loading.Checkpoint:
        """Checkpoint from which weights are loaded."""
        return self.drawn or self.files

    def model(self, load_as: LoadAs) -> Decoder:
        """Load the model in this form. Raises `InputError`."""
        return self.now.model(load_as)


class LoadedModel(VllmMethods):
    """Base of `LLM`: a model that is loaded once, its tokenizer, and the engine that answers.

    `model`: "smollm2", a directory with a Hugging Face config and safetensors, a .gguf file, or a hub id (of
    which `revision` is one). `tokenizer`: a directory or hub id with another tokenizer than the model's;
    `skip_tokenizer_init`: have none, for token ids only. `generation_config`: "auto" takes the model's own
    sampling defaults, "vllm" `SamplingParams`'. `chat_template`: a file, or a text, in place of the model's.
    `record_trace`: a file for a trace of the requests, without any text, for `jaxpaged lab` (see
    `engine.recording`). `runner`: "generate", "pooling" for vectors, classes and scores in place of answers,
    or "auto": what the model's files are made for; `pooler_config` and `hf_overrides` say how, where the
    files do not (see `jaxpaged.pooling.head`). `hf_overrides`, `rope_scaling` and `rope_theta` stand in place
    of fields of the model's config.json, as in vLLM (see `jaxpaged.models.overrides`). `options`: the fields
    of `EngineConfig`, and those of vLLM's options that change nothing. `load_format`: "dummy" draws random
    weights by `seed`, for which a config is enough; other values are vLLM's for files. With `num_processes`,
    every process makes the same: process 0 has the model to ask, the others work for it and raise
    `SystemExit` when it ends. Raises `InputError`, a `ValueError`, for a user's mistake.
    """

    pooling: Pooling | None = None  # of a model that pools; None: it answers

    def __init__(
        self,
        model: str | os.PathLike[str] = loading.SMOLLM2,
        *,
        tokenizer: str | os.PathLike[str] | None = None,
        skip_tokenizer_init: bool = False,
        revision: str | None = None,
        generation_config: str | None = "auto",
        chat_template: str | os.PathLike[str] | None = None,
        record_trace: str | os.PathLike[str] | None = None,
        runner: str | None = "auto",
        pooler_config: Any = None,
        hf_overrides: Mapping[str, Any] | None = None,
        rope_scaling: Mapping[str, Any] | None = None,
        rope_theta: float | None = None,
        load_format: str | None = "auto",
        **options: Any,
    ) -> None:
        self.config = engine_config(options)
        self.profile_directory = profile_directory(options.get("profiler_config"))
        self.model_name = str(model)
        load_format = checked_choice("load_format", load_format or "auto", LOAD_FORMATS)
        runner = checked_choice("runner", runner or "auto", ("auto", "generate", "pooling"))
        checked_bool("skip_tokenizer_init", skip_tokenizer_init)
        source = checked_choice("generation_config", generation_config or "auto", ("auto", "vllm"))
        self.chat_template = None if chat_template is None else template_text(chat_template)
        gpu_flags.set_defaults(self.config)
        c = self.config
        processes = None
        if c.distributed_init is not None:
            processes = join(c.distributed_init, c.num_processes, c.process_id, CALL_CLASSES)
        native.prepare(resolve_dtype(c))
        said = overrides.gathered(hf_overrides, rope_scaling, rope_theta)
        of_head = {name: said.pop(name) for name in OF_HEAD if name in said}
        checkpoint = loading.open_checkpoint(model, revision=revision, tokenizer=tokenizer, overrides=said)
        self.path = checkpoint.path
        self._source = Source(checkpoint, checkpoint.drawn(c.seed) if load_format == DUMMY else None)
        checkpoint = self._source.now
        if runner == "pooling" or (runner == "auto" and is_for_pooling(checkpoint.path)):
            machine.keep_on_disk(c.keep_programs)
            self.tokenizer = checkpoint.tokenizer
            self.pooling = Pooling(c, checkpoint, read_head(checkpoint, pooler_config, of_head))
            return
        for name, value in {"pooler_config": pooler_config, **of_head}.items():
            check(name, value, "None unless runner is 'pooling'", not value)
        try:
            self._default_params = SamplingParams(**checkpoint.sampling_defaults if source == "auto" else {})
        except InputError as error:
            raise InputError(f"model={str(checkpoint.path)!r}: generation_config.json: {error}") from error
        machine.keep_on_disk(c.keep_programs)
        self._described = checkpoint.config, checkpoint.module_names
        self.tokenizer = None if skip_tokenizer_init else checkpoint.tokenizer
        draft = draft_of(self.config, checkpoint)
        self.engine = Engine(
            self.config,
            checkpoint.config,
            self._source.model,
            self.tokenizer,
            record_trace=record_trace,
            shapes=checkpoint.abstract,
            adapter_names=checkpoint.module_names,
            processes=processes,
            draft=draft,
        )

    def __getattr__(self, name: str) -> Any:
        """Raise `InputError` where a model that pools is asked to answer."""
        if name in ("engine", "_default_params") and self.pooling is not None:
            raise InputError("runner='pooling' must be 'generate' for a model to answer")
        raise missing("LLM", name)

    def collective_rpc(
        self, method: Any, timeout: float | None = None, args: Sequence[Any] = (), kwargs: Any = None
    ) -> list[None]:
        """Do the work of vLLM's workers for two methods, and return a list of one None.

        "update_config" with {"load_config": {"load_format": "auto"}} lets later loads read the model's files,
        after `load_format="dummy"`. "reload_weights" loads them: it waits for what is in flight, and forgets
        cached prefixes. Raises `InputError` for any other call: there are no workers.
        """
        said = [*args, *(kwargs or {}).values()]
        if method == CONFIGURE and said == [{"load_config": {"load_format": "auto"}}]:
            self._source.drawn = None
        elif method == RELOAD and not said:
            self.engine.sleep(2, "wait")
            self.engine.wake_up()
        else:
            rule = f"{RELOAD!r}, or {CONFIGURE!r} with {{'load_config': {{'load_format': 'auto'}}}}"
            what = f"collective_rpc: method={shown(method)} must be {rule}: there are no workers"
            raise InputError(f"{what}; use the methods of LLM, such as update_weights")
        return [None]

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """Load the model of `EngineArgs`. Raises `InputError`."""
        check("engine_args", engine_args, "an EngineArgs", isinstance(engine_args, EngineArgs))
        return cls(**engine_args.options())

    def get_tokenizer(self) -> Any:
        """Return the model's tokenizer, one of transformers'. Raises `InputError` where there is none."""
        check("tokenizer", self.tokenizer, "there: the model has none", self.tokenizer is not None)
        return self.tokenizer

    def get_metrics(self) -> list[Metric]:
        """Return the engine's metrics as of now, by vLLM's names: gauges, counters and vectors."""
        return read_metrics(self.engine, self.model_name)

    def get_default_sampling_params(self) -> SamplingParams:
        """Return a copy of the sampling parameters that `generate` and `chat` take by default."""
        return self._default_params.clone()

    def learner(self) -> "Learner":
        """Return a `Learner`, which computes log-probabilities with this engine's bits, and their gradients.

        It holds no weights: give it `weights`, or others of that form. Raises `InputError` for a model
        without gradients: quantised, or on several devices.
        """
        from jaxpaged.research.learn.learner import Learner

        return Learner(self.config, *self._described)

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Read an adapter now, not when it is first asked for; `InputError` if it is not for the model.

        With `load_inplace` it is read anew, and takes the place of what its id had.
        """
        if getattr(lora_request, "load_inplace", False):
            self._adapters.renew(lora_request)
        else:
            self._adapters.get(lora_request)
        return True

    def update_lora(self, lora_request: LoRARequest, adapter: Any) -> None:
        """Replace the adapter with the same id by a trained one; nothing is read, and nothing compiled.

        adapter: by role, a and b of all layers, as `Learner.adapter` gives them. They are copied.

        Requests that come later have it; those under way keep what they have, in an adapter slot of its own.
        An id that is not there yet is added. Raises `InputError`, and changes nothing, for other roles,
        shapes or dtypes than the engine's.
        """
        self._adapters.renew(lora_request, adapter)

    def remove_lora(self, lora_int_id: int) -> bool:
        """Forget an adapter; False if it is not there. Requests under way keep it to their end."""
        return self._adapters.remove(lora_int_id)

    def list_loras(self) -> set[int]:
        """Return the ids of the adapters in the host's memory."""
        return self._adapters.ids()

    @property
    def _adapters(self) -> Adapters:
        adapters = self.engine.door.adapters
        check("enable_lora", self.config.enable_lora, "True for adapters", adapters is not None)
        assert adapters is not None
        return adapters

    def export_blocks(self, prompt: Prompt) -> Blocks:
        """Return K and V that are cached of a prompt, from its beginning on: see `Engine.export_blocks`.

        Answer the prompt with `max_tokens=1` before, to have all of it.
        """
        return self.read_prompt(prompt, self.engine.export_blocks)[1]

    def adopt_blocks(self, blocks: Blocks) -> int:
        """Make blocks that another engine has computed available to prompts: see `Engine.adopt_blocks`."""
        return self.engine.adopt_blocks(blocks)

    @property
    def weight_version(self) -> int:
        """Version of the weights: 0 for those that were loaded, then as `update_weights` says."""
        return self.engine.weight_version

    @property
    def weights(self) -> nnx.State:
        """Weights as the engine keeps them: packed for its kernels, without adapters.

        The arrays are the engine's own, not copies. They must not be donated, nor deleted.
        """
        return self.engine.weights

    def update_weights(self, weights: Any = None, *, version: int | None = None, **others: Any) -> int:
        """Put new weights in the place of old ones, all or none, and return their version.

        weights: a mapping of names to arrays, with mappings inside or without, or an iterable of pairs. The
            names are those of Hugging Face's model, or of roles such as "layers.0.qkv.weight"; any of them
            may be left out. Arrays are NumPy's, JAX's, or others' that have `__dlpack__`. Their shapes are
            the model's; their types, any floats, become the engine's. Or a state like `weights`, all of it,
            whose arrays are shared without a copy where they lie as the engine's do.
        version: the new version, above the present one; None: the next.

        No program is compiled, and what does not change is not copied. All cached prefixes are forgotten.
        Requests under way go on with the new weights: their K and V are computed anew, their tokens stay,
        and `CompletionOutput.weight_versions` says which weights sampled each. Adapters stay. Quantised
        weights are quantised as they were when the model was loaded. Raises `InputError`, and changes
        nothing, for names, shapes or types that are not the model's, and while a beam search runs.
        """
        check_arguments("LLM.update_weights", others)
        return self.engine.update_weights(weights, version)

    @property
    def is_paused(self) -> bool:
        """Whether requests wait for `resume_generation`."""
        return self.engine.is_paused

    def pause_generation(self, mode: str = "abort", *, clear_cache: bool = True) -> None:
        """Pause all requests until `resume_generation`; new requests wait.

        mode: "abort" ends what is in flight, with the tokens that it has; "wait" waits until it has ended;
            "keep" freezes it: it goes on when generation is resumed.
        clear_cache: forget all cached prefixes; without effect with "keep".
        """
        self.engine.pause(mode, clear_cache=clear_cache)

    def resume_generation(self) -> None:
        """Resume paused requests. Raises `InputError` while the engine sleeps."""
        self.engine.resume()

    @property
    def is_sleeping(self) -> bool:
        """Whether the engine sleeps; True until all that `sleep` took is there again."""
        return self.engine.is_sleeping

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Pause generation, and give memory back to others; the compiled programs stay.

        level: 0 gives nothing back. 1 drops the cache, and keeps the weights in the host's memory: on a CPU
            they stay where they are. 2 drops both.
        mode: what becomes of requests in flight, as in `pause_generation`. Kept ones are computed anew.
        """
        self.engine.sleep(level, mode)

    def wake_up(self, tags: Collection[str] | None = None) -> None:
        """Take memory again, and resume generation when all is there.

        tags: "weights", "kv_cache", "scheduling", or several; None: all. Weights that level 2 dropped are
            read from the model's files, and are a new version. Or `update_weights` brings all of them before.
        """
        self.engine.wake_up(tags)

    def release_kv_cache_memory(self) -> None:
        """Give back the memory of K and V, and keep the weights; `wake_up(tags=["kv_cache"])` takes it again.

        Raises `InputError` unless generation is paused, and all memory is there.
        """
        self.engine.release_kv_cache()

    def render_chat(
        self,
        conversation: Sequence[Message],
        *,
        chat_template: str | None = None,
        content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        cuts: str | None = None,
    ) -> dict[str, Any]:
        """Return the prompt, as text and as token ids, that the chat template makes of a conversation.

        Options are those of `chat`; `cuts`: as `tokenize` takes it. Raises `InputError`.
        """
        text = templates.render(
            self.tokenizer,
            conversation,
            chat_template=self.chat_template if chat_template is None else chat_template,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            content_format=content_format,
            kwargs=kwargs,
        )
        # The template writes the special tokens itself: none are added.
        return {"prompt": text, "prompt_token_ids": self.tokenize(text, add_special_tokens=False, cuts=cuts)}

    def read_prompt[T](
        self,
        prompt: Any,
        admit: Callable[..., T],
        *,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        cuts: str | None = None,
        without: Collection[str] = ("continue_from", "kv_cache_ttl"),
    ) -> tuple[str | None, T]:
        """Return a prompt's text, if it was given as text, and the result of `admit` on its token ids, its
        salt and its further fields. `without`: fields that the prompt must not have. `cuts`: as `tokenize`
        takes it. Raises `InputError`.
        """
        text, token_ids, salt = split_prompt(prompt)
        more = {}
        for name in ("continue_from", "kv_cache_ttl") if isinstance(prompt, Mapping) else ():
            if (value := prompt.get(name)) is not None:
                check(name, value, "left out here", name not in without)
                more[name] = value
        if token_ids is None:
            token_ids = self.tokenize(str(text), cuts=cuts, **tokenization(tokenization_kwargs))
        return text, admit(token_ids, cache_salt=salt, **more)

    def tokenize(self, text: str, *, add_special_tokens: bool = True, cuts: str | None = None) -> list[int]:
        """Return the token ids of a prompt. Raises `InputError`.

        A text too long for any model's context is refused without being read whole. With `cuts`, "left" or
        "right", so much is cut off at that end that the rest surely has as many tokens as the context.
        """
        max_model_len = self.engine.door.max_model_len
        return tokens.encode(
            self.tokenizer, text, max_model_len, add_special_tokens=add_special_tokens, cuts=cuts
        )


def engine_config(options: Mapping[str, Any]) -> EngineConfig:
    """Return the config of `LLM`'s options. Raises `InputError`."""
    return EngineConfig(**vllm_options.translated(options, tuple(EngineConfig.__dataclass_fields__)))
