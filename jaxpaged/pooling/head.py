"""A pooling model's head: how hidden states become a vector, and what is made of it; as files say."""

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from jaxpaged.checks import InputError, check, checked_bool, checked_choice, is_int, shown
from jaxpaged.models.files import hf
from jaxpaged.models.loading import Checkpoint
from jaxpaged.vllm_names.judge import check_keys
from jaxpaged.vllm_names.table import POOLER

Method = Literal["LAST", "MEAN", "CLS"]
Activation = Literal["none", "sigmoid", "softmax"]
METHODS: tuple[str, ...] = get_args(Method)
CLASSIFIER = "ForSequenceClassification"  # ends the names of such architectures
HEADS = ("score.weight", "lm_head.weight")  # tensors beside those of the body
# What sentence-transformers calls the ways of pooling that are served, in its older and newer files.
WAYS: dict[str, Method] = {
    "lasttoken": "LAST",
    "mean": "MEAN",
    "mean_tokens": "MEAN",
    "cls": "CLS",
    "cls_token": "CLS",
}
NEUTRAL_OF_POOLING = {"word_embedding_dimension", "embedding_dimension", "include_prompt"}


@dataclasses.dataclass(frozen=True, eq=False)
class Head:
    """Head of a pooling model: the function from a prompt's hidden states to its result."""

    method: Method = "LAST"
    normalise: bool = True  # a vector to length 1
    classifier: np.ndarray | None = None  # float32 [num_classes, hidden]; None: the model gives vectors
    activation: Activation = "none"  # of the classes
    labels: tuple[str, ...] = ()  # the classes' names
    dimensions: tuple[int, ...] | None = ()  # of shorter vectors that it is trained for; None: any


# Overrides of config.json that say what stands behind the decoder.
OF_HEAD = ("architectures", "classifier_from_token", "is_original_qwen3_reranker")


def is_for_pooling(path: Path) -> bool:
    """Check whether a directory's files describe a model for vectors or classes."""
    if not path.is_dir():
        return False
    if (path / "modules.json").is_file():
        return True
    return _architecture(hf.read_object(path / "config.json")).endswith(CLASSIFIER)


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""


def read(
    checkpoint: Checkpoint, pooler_config: Any = None, overrides: Mapping[str, Any] | None = None
) -> Head:
    """Return the head that a model's files describe, changed by the user's options.

    pooler_config: a mapping, or an object with attributes, of `pooling_type` (one of METHODS) and `normalize`
        or `use_activation`; keys of vLLM's that ask for nothing pass.
    overrides: of config.json: `architectures`, `classifier_from_token` (the tokens whose logits are the
    classes')
        and `is_original_qwen3_reranker` (of two such tokens the second one's chance), as vLLM reads them.

    Raises `InputError` for a head that is not served, or is not the files'.
    """
    path = checkpoint.path
    config = hf.read_object(path / "config.json") if path.is_dir() else {}
    for name in overrides or {}:
        check("hf_overrides: key", name, f"one of {', '.join(OF_HEAD)}", name in OF_HEAD)
    config |= dict(overrides or {})
    try:
        head = _of_modules(path) if path.is_dir() else Head()
        architecture = _architecture(config)
        rule = (
            f"a causal model, or one that ends in {CLASSIFIER}; use pooling_task='token_classify' with that"
        )
        check("architectures", architecture, rule, not architecture.endswith("ForTokenClassification"))
        if architecture.endswith(CLASSIFIER):
            head = _with_classifier(head, checkpoint, config)
        sizes = config.get("matryoshka_dimensions")
        if isinstance(sizes, list) and all(is_int(size) and size > 0 for size in sizes):
            head = dataclasses.replace(head, dimensions=tuple(sizes))
        elif config.get("is_matryoshka") is True:
            head = dataclasses.replace(head, dimensions=None)
    except InputError as error:
        raise InputError(f"model={str(path)!r}: {error}") from error
    return _as_told(head, pooler_config)


def _as_told(head: Head, pooler_config: Any) -> Head:
    if pooler_config is None:
        return head
    said = dict(pooler_config if isinstance(pooler_config, Mapping) else vars(pooler_config))
    said = {name: value for name, value in said.items() if value is not None}
    check_keys("pooler_config", said, POOLER)
    if (kind := said.get("pooling_type", said.get("seq_pooling_type"))) is not None:
        method: Any = checked_choice("pooling_type", kind, METHODS)
        head = dataclasses.replace(head, method=method)
    for name in ("normalize", "use_activation"):
        if name in said:
            head = dataclasses.replace(head, normalise=checked_bool(name, said[name]))
    return head


def _of_modules(path: Path) -> Head:
    """Return the head that a sentence-transformers directory describes in modules.json; without that file
    vLLM's default.
    """
    if not (path / "modules.json").is_file():
        return Head()
    modules = hf.read_value(path / "modules.json")
    try:
        types = [(str(module["type"]).rpartition(".")[2], str(module.get("path", ""))) for module in modules]
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(f"modules.json cannot be read: {type(error).__name__}: {error}") from error
    head = Head(normalise=False)
    for kind, folder in types:
        if kind == "Normalize":
            head = dataclasses.replace(head, normalise=True)
        elif kind == "Pooling":
            inside = (path / folder).resolve()
            check("path of a module", folder, "inside the directory", inside.is_relative_to(path.resolve()))
            head = dataclasses.replace(head, method=_method(hf.read_object(inside / "config.json")))
        elif kind != "Transformer":
            raise InputError(f"a module of type {kind!r} is not served; Transformer, Pooling, Normalize are")
    return head


def _method(said: Mapping[str, Any]) -> Method:
    """Return the way of pooling that a module's config names."""
    ways = [name.removeprefix("pooling_mode_") for name, value in said.items() if value is True]
    ways = [way for way in ways if way not in NEUTRAL_OF_POOLING]
    if isinstance(said.get("pooling_mode"), str):
        ways = [said["pooling_mode"]]
    check("pooling_mode", ways, f"one of {', '.join(WAYS)}", len(ways) == 1 and ways[0] in WAYS)
    return WAYS[ways[0]]


def _with_classifier(head: Head, checkpoint: Checkpoint, config: Mapping[str, Any]) -> Head:
    tensors, tokens = checkpoint.load_weights(), config.get("classifier_from_token")
    if tokens is None:
        if "score.weight" not in tensors:
            raise InputError("the weights lack 'score.weight', which a classifier has")
        classifier = np.asarray(tensors["score.weight"]).astype(np.float32)
    else:
        classifier = _rows_of_tokens(checkpoint, tensors, tokens)
        if config.get("is_original_qwen3_reranker"):
            check("classifier_from_token", tokens, "two tokens, no and yes", len(tokens) == 2)
            classifier = classifier[1:] - classifier[:1]
    hidden = checkpoint.config.hidden_size
    if classifier.ndim != 2 or classifier.shape[1] != hidden or not np.isfinite(classifier).all():
        shape = classifier.shape
        raise InputError(f"'score.weight' has shape {shape}, must be [num_classes, {hidden}], finite")
    kind = config.get("problem_type")
    one = len(classifier) == 1 or kind == "multi_label_classification"
    activation: Activation = "none" if kind == "regression" else "sigmoid" if one else "softmax"
    said = config.get("id2label")
    names = said if isinstance(said, dict) else {}
    labels = tuple(str(names.get(str(i), f"LABEL_{i}")) for i in range(len(classifier)))
    return dataclasses.replace(head, classifier=classifier, activation=activation, labels=labels)


def _rows_of_tokens(checkpoint: Checkpoint, tensors: Mapping[str, Any], tokens: Any) -> np.ndarray:
    """Return the rows of the table of logits for these tokens, float32."""
    is_list = isinstance(tokens, list | tuple) and all(isinstance(token, str) for token in tokens) and tokens
    check("classifier_from_token", tokens, "a list of tokens", bool(is_list))
    check("classifier_from_token", tokens, "None without a tokenizer", checkpoint.tokenizer is not None)
    vocabulary = checkpoint.tokenizer.get_vocab()
    for token in tokens:
        if token not in vocabulary:
            raise InputError(f"classifier_from_token={shown(token)} must be a token of the vocabulary")
    names = checkpoint.names
    table = f"{names.table['embedding' if checkpoint.config.tie_word_embeddings else 'lm_head']}.weight"
    weight = tensors.get(table, tensors.get(table.removeprefix(names.prefix)))
    if weight is None:
        raise InputError(f"the weights lack {table!r}")
    return np.stack([np.asarray(weight[vocabulary[token]]).astype(np.float32) for token in tokens])


def body(checkpoint: Checkpoint) -> Checkpoint:
    """Return the model without a head, which computes hidden states."""
    if not checkpoint.path.is_dir():
        return checkpoint
    embedding = checkpoint.names.table["embedding"]
    assert isinstance(embedding, str)
    return dataclasses.replace(
        checkpoint,
        config=dataclasses.replace(checkpoint.config, tie_word_embeddings=True),
        # Files of a body alone lack what begins its names in a whole model.
        names=dataclasses.replace(checkpoint.names, prefix=embedding[: embedding.rfind(".") + 1]),
        load_weights=lambda: _Body(checkpoint.load_weights()),
    )


class _Body(Mapping[str, Any]):
    """A file's tensors without those of heads."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self._tensors = tensors

    def __getitem__(self, name: str) -> Any:
        if name in HEADS:
            raise KeyError(name)
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._tensors if name not in HEADS)

    def __len__(self) -> int:
        return sum(1 for _ in self)
