"""Models of text and images, of which the text part is served: a decoder of another family inside.

Its config lies in `text_config`, or among the model's own fields; its tensors have longer names, and those of
the vision part are not read. Where positions are of text alone, RoPE of several axes is RoPE.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxpaged.checks import InputError, shown
from jaxpaged.models.families import qwen
from jaxpaged.models.families.cohere import COHERE2, COHERE2_MOE
from jaxpaged.models.families.family import Family
from jaxpaged.models.families.gemma import GEMMA3
from jaxpaged.models.families.gemma3n import GEMMA3N
from jaxpaged.models.families.gemma4 import GEMMA4
from jaxpaged.models.families.llama import LLAMA, MISTRAL
from jaxpaged.models.families.llama4 import LLAMA4
from jaxpaged.models.families.near_llama import MINISTRAL3
from jaxpaged.models.families.qwen_next import QWEN3_5, QWEN3_5_MOE
from jaxpaged.models.names import Names

INSIDE = (
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
    ("language_model.", "model."),
)
FIRST_OUTSIDE = 5
VISION = (
    *("vision_tower.", "vision_model.", "multi_modal_projector.", "visual."),
    *("model.vision_tower.", "model.multi_modal_projector.", "model.visual."),
    *("model.audio_tower.", "model.embed_vision.", "model.embed_audio.", "model.vision_model."),
    *("audio_tower.", "embed_vision.", "embed_audio."),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wrapper:
    """A kind of model with a decoder inside.

    `texts`: the families that it may be of, by the `model_type` of `text_config`; the first where that says
    none. `is_tied`: whether transformers 5 takes the head for the embedding, unless a config says otherwise.
    `is_flat`: whether there are configs with the decoder's fields among the model's own.
    """

    model_type: str
    models: str
    texts: Mapping[str, Family]
    is_tied: bool = False
    is_flat: bool = False
    gguf: str = ""

    def inside(self, said: Mapping[str, Any]) -> tuple[Family, dict[str, Any]]:
        """Return the decoder's family, and its config. Raises `InputError` for a decoder that is unknown."""
        text = said.get("text_config")
        if text is None and self.is_flat:
            text = {name: value for name, value in said.items() if name != "vision_config"}
        if not isinstance(text, Mapping):
            raise InputError(f"model config: text_config={shown(text)} must be a JSON object")
        kind = text.get("model_type")
        if kind is None or kind == self.model_type:
            kind = next(iter(self.texts))
        if not isinstance(kind, str) or kind not in self.texts:
            known = ", ".join(map(repr, self.texts))
            raise InputError(f"model config: text_config.model_type={shown(kind)} must be one of {known}")
        family = self.texts[kind]
        text_config = {**SIZES.get(kind, {}), **text, "model_type": family.model_type}
        text_config["tie_word_embeddings"] = self._is_tied(said, text, kind)
        if said.get("eos_token_id") is not None:
            text_config["eos_token_id"] = said["eos_token_id"]
        for name in ("rope_scaling", "rope_parameters"):
            text_config[name] = _of_one_axis(text_config.get(name))
        return family, text_config

    def _is_tied(self, said: Mapping[str, Any], text: Mapping[str, Any], kind: str) -> object:
        """Return whether the head is the embedding: since transformers 5 configs say it outside, before
        inside of `text_config`.
        """
        outside, inside = said.get("tie_word_embeddings"), text.get("tie_word_embeddings")
        version = str(said.get("transformers_version", "")).partition(".")[0]
        if version.isdecimal() and int(version) >= FIRST_OUTSIDE:
            return outside if outside is not None else self.is_tied or inside
        default = kind == GEMMA3.model_type
        return next((each for each in (inside, outside) if each is not None), default)

    def names(self, names: Names) -> Names:
        """Return what files of this kind call the decoder's weights."""
        return dataclasses.replace(names, inside=INSIDE, ignored=(*names.ignored, *VISION))


def taken_out(names: Names) -> Names:
    """Return the names of a decoder's weights with those of wrappers, out of which it may be taken."""
    first = names.table.get("embedding")
    is_like_theirs = isinstance(first, str) and first.startswith("model.")
    return dataclasses.replace(names, inside=(*names.inside, *INSIDE)) if is_like_theirs else names


def _of_one_axis(rope: Any) -> Any:
    """Return RoPE's numbers without the axes of images."""
    if not isinstance(rope, Mapping):
        return rope
    plain_rope = {
        name: value for name, value in rope.items() if name not in ("mrope_section", "mrope_interleaved")
    }
    for name in ("rope_type", "type"):
        if plain_rope.get(name) == "mrope":
            plain_rope[name] = "default"
    return plain_rope


# What transformers takes for sizes that a `text_config` leaves out.
SIZES: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
    "llama": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
}
SIZES["llama4_text"] = {
    "vocab_size": 202048,
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
}
SIZES["mistral"] = SIZES["llama"] | {"intermediate_size": 14336}


def _texts(*families: Family) -> dict[str, Family]:
    return {family.model_type: family for family in families}


def _like(family: Family, **defaults: Any) -> Family:
    """Return a family whose configs leave other numbers out."""
    return dataclasses.replace(family, defaults={**family.defaults, **defaults})


_PLAIN = _texts(MISTRAL, LLAMA, qwen.QWEN2, qwen.QWEN3, qwen.QWEN3_MOE)
_MISTRAL = {**_PLAIN, **_texts(MINISTRAL3)}
_QWEN2 = _like(qwen.QWEN2, rope_theta=1000000.0, rms_norm_eps=1e-5)
_QWEN3 = {"max_position_embeddings": 128000, "rope_theta": 500000.0}
_QWEN3_MOE = _like(qwen.QWEN3_VL_MOE_TEXT, **_QWEN3)

WRAPPERS = (
    Wrapper(
        model_type="gemma3",
        models="Gemma 3 4B, 12B, 27B: the text part",
        texts=_texts(GEMMA3),
        is_tied=True,
        gguf="gemma3",
    ),
    Wrapper(
        model_type="gemma3n",
        models="Gemma 3n E2B and E4B: the text part",
        texts=_texts(GEMMA3N),
        is_tied=True,
    ),
    Wrapper(
        model_type="gemma4",
        models="Gemma 4 E2B, E4B, 26B-A4B and 31B: the text part",
        texts=_texts(GEMMA4),
        is_tied=True,
    ),
    Wrapper(
        model_type="mistral3",
        models="Mistral Small 3.1 and 3.2, Ministral 3, Devstral 2: the text part",
        texts=_MISTRAL,
        is_tied=True,
        gguf="llama",
    ),
    Wrapper(
        model_type="llama4",
        models="Llama 4 Scout and Maverick: the text part",
        texts=_texts(LLAMA4),
    ),
    Wrapper(
        model_type="cohere2_vision",
        models="Command A Vision, Command A Plus: the text part",
        texts=_texts(COHERE2, COHERE2_MOE),
        is_tied=True,
    ),
    Wrapper(model_type="llava", models="LLaVA 1.5, Pixtral: the text part", texts=_PLAIN, gguf="llama"),
    Wrapper(
        model_type="internvl",
        models="InternVL 3 and 3.5, in transformers' form: the text part",
        texts={"qwen2": qwen.QWEN2, **_PLAIN},
        is_tied=True,
    ),
    Wrapper(
        model_type="qwen2_vl",
        models="Qwen2-VL: the text part",
        texts={"qwen2_vl_text": _QWEN2},
        is_flat=True,
        gguf="qwen2vl",
    ),
    Wrapper(
        model_type="qwen2_5_vl",
        models="Qwen2.5-VL: the text part",
        texts={"qwen2_5_vl_text": _QWEN2},
        is_flat=True,
        gguf="qwen2vl",
    ),
    Wrapper(
        model_type="qwen3_vl",
        models="Qwen3-VL dense: the text part",
        texts={"qwen3_vl_text": _like(qwen.QWEN3, **_QWEN3)},
        gguf="qwen3vl",
    ),
    Wrapper(
        model_type="qwen3_5",
        models="Qwen 3.5 to 3.8, dense: the text part",
        texts=_texts(QWEN3_5),
    ),
    Wrapper(
        model_type="qwen3_5_moe",
        models="Qwen 3.5 to 3.8 with experts: the text part",
        texts=_texts(QWEN3_5_MOE),
    ),
    Wrapper(
        model_type="qwen3_vl_moe",
        models="Qwen3-VL 30B-A3B, 235B-A22B: the text part",
        texts={"qwen3_vl_moe_text": _QWEN3_MOE},
        gguf="qwen3vlmoe",
    ),
)
