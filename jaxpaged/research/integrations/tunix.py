"""Rollouts for Tunix: the only file that imports it (extra `tunix`).

ClusterConfig(rollout_engine=functools.partial(JaxpagedRollout, llm=llm), ...)
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tunix.rl.rollout import base_rollout

from jaxpaged.api.llm import LLM
from jaxpaged.checks import InputError, check
from jaxpaged.research.integrations.tunix_weights import from_tunix, under_lora
from jaxpaged.sampling_params import SamplingParams

PARALLEL = ("tensor_parallel_size", "data_parallel_size")


class JaxpagedRollout(base_rollout.BaseRollout):
    """Rollout worker of Tunix over an engine that is there already.

    llm: engine with the actor's model. It takes the actor's weights at once, and after each update.
    lora_alpha: alpha of the actor's LoRA rule, if it has one: its factors are merged into the weights.

    Tunix gives the other arguments. Prompts are encoded as Tunix's own samplers do, by its tokenizer. Padding
    tokens before a prompt are left out, which Tunix's learner masks. Raises `InputError` if the engine cannot
    do what `rollout_config` asks for.
    """

    def __init__(
        self,
        rollout_actor: Any,
        tokenizer: Any,
        mesh: Any = None,
        rollout_config: Any = None,
        *,
        llm: LLM,
        lora_alpha: float | None = None,
    ) -> None:
        check("llm", llm, "a jaxpaged.LLM that generates", isinstance(llm, LLM) and llm.pooling is None)
        self._llm, self._tokenizer, self._alpha = llm, tokenizer, lora_alpha
        if rollout_config is not None:
            self._sampling(rollout_config, 0, {})
        weights = nnx.state(rollout_actor, nnx.Param)
        self._base = under_lora(weights)
        self.update_params(weights)

    def generate(self, prompts: list[Any], rollout_config: Any, **kwargs: Any) -> Any:
        """Answer prompts, each a text or token ids, as `rollout_config` says.

        The answer to prompt i is drawn by the config's seed + i, if it has one. Answers end at `eos_tokens`,
        or else at the tokenizer's, and have that token. `kwargs` are further fields of `SamplingParams`.
        """
        ids = [self._encoded(prompt) for prompt in prompts]
        params = [self._sampling(rollout_config, i, kwargs) for i in range(len(ids))]
        answers = [output.outputs[0] for output in self._llm.generate(ids, params, use_tqdm=False)]
        logprobs = None
        if rollout_config.return_logprobs:
            logprobs = [
                np.array(
                    [
                        logprobs[token].logprob
                        for logprobs, token in zip(a.logprobs or (), a.token_ids, strict=True)
                    ]
                ).astype(np.float32)
                for a in answers
            ]
        return base_rollout.RolloutOutput(
            text=[
                a.text if params_of.detokenize else self._decoded(a)
                for a, params_of in zip(answers, params, strict=True)
            ],
            logits=None,
            tokens=[np.array(answer.token_ids, np.int32) for answer in answers],
            left_padded_prompt_tokens=self._padded(ids, rollout_config.max_prompt_length),
            logprobs=logprobs,
        )

    def get_per_token_logps(self, prompt_tokens: Any, completion_tokens: Any) -> jax.Array:
        """Return the log-probabilities of completions, as `LLM.score` gives them: [batch, length] float32.

        Prompts are padded on the left, completions on the right; padding has 0.
        """
        prompts, completions = np.asarray(prompt_tokens), np.asarray(completion_tokens)
        pad, logprobs = self.pad_id(), np.zeros(completions.shape, np.float32)
        ends = [_num_before_padding(row, pad) for row in completions]
        if pad == self.eos_id():  # one of them may be an answer's last token
            ends = [min(end + 1, completions.shape[1]) for end in ends]
        rows = [row for row, end in enumerate(ends) if end]
        starts = [prompts.shape[1] - _num_before_padding(row[::-1], pad) for row in prompts]
        asked = [prompts[row, starts[row] :].tolist() for row in rows]
        scores = self._llm.score(
            asked, [completions[row, : ends[row]].tolist() for row in rows], use_tqdm=False
        )
        for row, score in zip(rows, scores, strict=True):
            logprobs[row, : ends[row]] = score.logprobs
        return jnp.asarray(logprobs)

    def update_params(self, params: Any, filter_types: tuple[Any, ...] | None = None) -> None:
        """Put the actor's new parameters into the engine: all, or those of the filter's types."""
        self._llm.update_weights(from_tunix(params, base=self._base, lora_alpha=self._alpha))

    def pad_id(self) -> int:
        return int(self._tokenizer.pad_id())

    def eos_id(self) -> int:
        return int(self._tokenizer.eos_id())

    def model(self) -> None:
        """Return None: the engine has weights of its own, so that Tunix sends it the actor's weights."""

    def _sampling(self, config: Any, index: int, more: dict[str, Any]) -> SamplingParams:
        """Return a prompt's sampling parameters. Raises `InputError`."""
        engine_config = self._llm.config
        for name in PARALLEL:
            asked, has = getattr(config, name, -1), getattr(engine_config, name)
            check(f"rollout_config.{name}", asked, f"-1, or the engine's {has}", asked in (-1, has))
        tells = config.return_logprobs
        params = SamplingParams(
            **{
                "max_tokens": config.max_tokens_to_generate,
                "temperature": config.temperature,
                "top_p": config.top_p,
                "top_k": config.top_k,
                "seed": None if config.seed is None else _seed(config.seed) + index,
                "stop_token_ids": list(config.eos_tokens or [self.eos_id()]),
                "ignore_eos": True,
                "logprobs": 0 if tells else None,
                "detokenize": False,
            }
            | more
        )
        check("n", params.n, "1: Tunix repeats its prompts", params.n == 1)
        plain = (params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1, 0, 0)
        mode = engine_config.logprobs_mode
        rule = "'processed_logprobs' for log-probabilities of a rollout" + (
            ", or 'raw_logprobs'" if plain else ""
        )
        fits = mode == "processed_logprobs" or (plain and mode == "raw_logprobs")
        check("logprobs_mode", mode, rule, fits or not tells)
        return params

    def _encoded(self, prompt: Any) -> list[int]:
        """Return a prompt's token ids, without padding before them."""
        if isinstance(prompt, str):
            bos = self._tokenizer.bos_id()
            prompt = self._tokenizer.dedup_bos_ids([*([bos] if bos else []), *self._tokenizer.encode(prompt)])
        ids, pad = list(map(int, prompt)), self.pad_id()
        return ids[next((i for i, token in enumerate(ids) if token != pad), 0) :]

    def _decoded(self, answer: Any) -> str:
        """Return an answer's text without the token that ended it."""
        ids = answer.token_ids[:-1] if answer.finish_reason == "stop" else answer.token_ids
        return str(self._tokenizer.decode(list(ids)))

    def _padded(self, ids: list[list[int]], length: int | None) -> np.ndarray:
        """Return prompts padded on the left to a length; longer ones to the next power of 2."""
        longest = max(map(len, ids))
        if length is None or length < longest:
            length = 1 << (longest - 1).bit_length()
        padded = np.full((len(ids), length), self.pad_id(), np.int32)
        for row, prompt_ids in zip(padded, ids, strict=True):
            row[length - len(prompt_ids) :] = prompt_ids
        return padded


def _num_before_padding(row: np.ndarray, pad: int) -> int:
    """Return how many tokens of a row lie before the padding at its end."""
    others = np.flatnonzero(row != pad)
    return int(others[-1]) + 1 if len(others) else 0


def _seed(seed: Any) -> int:
    """Return a seed of the config as a number: an int, or the words of a key of JAX."""
    if isinstance(seed, jax.Array) and jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
        seed = jax.random.key_data(seed)
    words = np.asarray(seed).reshape(-1)
    if words.dtype.kind not in "iu" or not 1 <= len(words) <= 2:
        raise InputError(f"rollout_config.seed of shape {words.shape} must be an int or a key of JAX")
    return int(words[0]) if len(words) == 1 else (int(words[0]) << 32 | int(words[1])) % 2**63
