"""Methods of `LLM` for a pooling model: vectors, classes and scores of texts."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jaxpaged.checks import InputError, check, checked_choice
from jaxpaged.config import EngineConfig
from jaxpaged.models.loading import Checkpoint
from jaxpaged.pooling.engine import PoolingEngine, Text
from jaxpaged.pooling.head import Head
from jaxpaged.pooling.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingParams,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)

TASKS = ("embed", "classify", "score", "token_embed", "token_classify")
type Texts = str | Sequence[str]


class Pooling:
    """A pooling model and its tokenizer, by vLLM's methods. For any thread."""

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint, head: Head) -> None:
        self.engine = PoolingEngine(config, checkpoint, head)
        self.tokenizer = checkpoint.tokenizer
        self._numbers = itertools.count()

    @property
    def is_classifier(self) -> bool:
        return self.engine.head.classifier is not None

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of a classifier's classes."""
        return self.engine.head.labels

    def encode(
        self, prompts: Any, pooling_params: Any = None, *, pooling_task: str = "embed"
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Return the pooled output of each text: by task a vector or class probabilities, of the whole text,
        or with "token_embed" and "token_classify" of each token.
        """
        task = checked_choice("pooling_task", pooling_task, TASKS)
        self._check_task(task)
        wants = {"token_embed": "hidden", "token_classify": "classes"}.get(task)
        texts = self._admitted(prompts, pooling_params, wants_tokens=wants)
        return [self._output(text, PoolingOutput(data)) for text, data in self._run(texts)]

    def embed(self, prompts: Any, pooling_params: Any = None) -> list[EmbeddingRequestOutput]:
        """Return each text's vector. Raises `InputError` for a model that gives classes."""
        self._check_task("embed")
        texts = self._admitted(prompts, pooling_params)
        return [self._output(text, EmbeddingOutput(data.tolist())) for text, data in self._run(texts)]

    def classify(self, prompts: Any, pooling_params: Any = None) -> list[ClassificationRequestOutput]:
        """Return the chances of each text's classes. Raises `InputError` for a model that gives vectors."""
        self._check_task("classify")
        texts = self._admitted(prompts, pooling_params)
        return [self._output(text, ClassificationOutput(data.tolist())) for text, data in self._run(texts)]

    def score(
        self,
        data_1: Texts,
        data_2: Texts,
        pooling_params: PoolingParams | None = None,
        chat_template: str | None = None,
    ) -> list[ScoringRequestOutput]:
        """Return how well texts go together: one with each of several, or each with its own.

        A model that gives vectors: their cosine. A classifier of one class: its chance, of both as one
        prompt. `chat_template`: Jinja that makes this prompt of two messages, the roles "query" and
        "document"; None: the tokenizer's pair.

        Raises `InputError` for other numbers of texts, for a classifier of several classes, and for a
        template beside a model that gives vectors.
        """
        first, second = ([each] if isinstance(each, str) else list(each) for each in (data_1, data_2))
        if len(first) not in (1, len(second)) or not second:
            raise InputError(
                f"data_1 has {len(first)} texts, must have one, or as many as data_2, which has {len(second)}"
            )
        params = PoolingParams() if pooling_params is None else pooling_params
        if self.is_classifier:
            return self._scores_of_pairs(first * (len(second) // len(first)), second, params, chat_template)
        check("chat_template", chat_template, "None for a model that gives vectors", chat_template is None)
        texts = self._admitted([*first, *second], params)
        vectors = [data / max(float(np.linalg.norm(data)), 1e-12) for _, data in self._run(texts)]
        first_vectors, others = vectors[: len(first)], vectors[len(first) :]
        scores = []
        for i, other in enumerate(others):
            mine = i if len(first) > 1 else 0
            ids = np.concatenate([texts[mine].token_ids, texts[len(first) + i].token_ids])
            text = Text(ids, params)
            scores.append(self._output(text, ScoringOutput(float(first_vectors[mine] @ other))))
        return scores

    def _scores_of_pairs(
        self, first: Sequence[str], second: Sequence[str], params: PoolingParams, chat_template: Any
    ) -> list[ScoringRequestOutput]:
        classifier = self.engine.head.classifier
        assert classifier is not None
        rule = "1 for scores: this model's are of more classes"
        check("num_labels", len(classifier), rule, len(classifier) == 1)
        pairs = zip(first, second, strict=True)
        if chat_template is not None:
            ids = [self._ids(self._templated(*pair, chat_template)) for pair in pairs]
        else:
            ids = [self._ids(*pair) for pair in pairs]
        texts = [self.engine.admit(each, params) for each in ids]
        return [self._output(text, ScoringOutput(float(data[0]))) for text, data in self._run(texts)]

    def _templated(self, query: str, document: str, chat_template: Any) -> str:
        """Return the prompt that a template makes of a pair. Raises `InputError`."""
        check("chat_template", chat_template, "a template's text", isinstance(chat_template, str))
        rule = "None for a model without a tokenizer"
        check("chat_template", chat_template, rule, self.tokenizer is not None)
        messages = [{"role": "query", "content": query}, {"role": "document", "content": document}]
        try:
            return str(
                self.tokenizer.apply_chat_template(messages, chat_template=chat_template, tokenize=False)
            )
        except Exception as error:  # whatever Jinja, or the template itself, raises
            raise InputError(f"chat_template cannot be rendered: {type(error).__name__}: {error}") from error

    def _check_task(self, task: str) -> None:
        if task == "token_embed":
            return
        if task == "token_classify":
            rule = "'embed' or 'token_embed': this model gives vectors"
            check("pooling_task", task, rule, self.is_classifier)
            return
        served = "classify" if self.is_classifier else "embed"
        if task != served and not (task == "score" and self.is_classifier):
            what = "classes" if self.is_classifier else "vectors"
            raise InputError(
                f"pooling_task={task!r} must be {served!r} or 'token_embed': this model gives {what}"
            )

    def _admitted(self, prompts: Any, params: Any, *, wants_tokens: str | None = None) -> list[Text]:
        """Check all texts before any runs. Raises `InputError`, with the number of one of several."""
        many = as_many(prompts)
        each = list(params) if isinstance(params, list | tuple) else [params] * len(many)
        if len(each) != len(many):
            raise InputError(
                f"pooling_params has {len(each)} entries, must have one for each of {len(many)} prompts"
            )
        texts = []
        for i, (prompt, options) in enumerate(zip(many, each, strict=True)):
            try:
                options = PoolingParams() if options is None else options
                texts.append(self.engine.admit(self._read(prompt), options, wants_tokens=wants_tokens))
            except InputError as error:
                raise error if len(many) == 1 else InputError(f"prompt {i}: {error}") from error
        return texts

    def _read(self, prompt: Any) -> Any:
        """Return a prompt's token ids."""
        if isinstance(prompt, dict):
            ids = prompt.get("prompt_token_ids")
            return self._ids(prompt.get("prompt")) if ids is None else ids
        return self._ids(prompt) if isinstance(prompt, str) else prompt

    def _ids(self, text: Any, pair: str | None = None) -> list[int]:
        for each in (text, pair):
            is_text = (isinstance(each, str) and each != "") or (each is None and text is not None)
            check("prompt", each, "a text that is not empty", is_text)
        check("prompt", text, "token ids for a model without a tokenizer", self.tokenizer is not None)
        ids: list[int] = self.tokenizer(text, pair)["input_ids"]
        return ids

    def _run(self, texts: Sequence[Text]) -> Iterator[tuple[Text, np.ndarray]]:
        return zip(texts, self.engine.run(texts), strict=True)

    def _output[Output](self, text: Text, output: Output) -> PoolingRequestOutput[Output]:
        return PoolingRequestOutput(str(next(self._numbers)), output, text.token_ids.tolist())


def as_many(prompts: Any) -> Sequence[Any]:
    """Return prompts as a sequence, whether one was given or several."""
    if isinstance(prompts, str | dict):
        return [prompts]
    is_list = isinstance(prompts, Sequence | np.ndarray) and not isinstance(prompts, bytes)
    check("prompts", prompts, "a prompt or a list of prompts", is_list)
    is_one = len(prompts) > 0 and np.ndim(prompts[0]) == 0 and not isinstance(prompts[0], str | dict)
    return [prompts] if is_one else prompts
