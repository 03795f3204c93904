"""The families of models that are known: a short file each, and here the list of them."""

from collections.abc import Collection, Mapping
from typing import Any

from jaxpaged.checks import InputError, check, shown
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.families.afmoe import AFMOE
from jaxpaged.models.families.apertus import APERTUS
from jaxpaged.models.families.bamba import BAMBA
from jaxpaged.models.families.bloom import BLOOM
from jaxpaged.models.families.cohere import COHERE, COHERE2, COHERE2_MOE
from jaxpaged.models.families.deepseek import (
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    GLM4_MOE_LITE,
    KIMI_K2,
    MINICPM3,
    MISTRAL4,
)
from jaxpaged.models.families.dots import DOTS1
from jaxpaged.models.families.ernie_moe import ERNIE4_5_MOE
from jaxpaged.models.families.exaone import EXAONE, EXAONE4, EXAONE_MOE
from jaxpaged.models.families.falcon import FALCON
from jaxpaged.models.families.falcon_h1 import FALCON_H1
from jaxpaged.models.families.family import Family, Gguf
from jaxpaged.models.families.gemma import GEMMA, GEMMA2, GEMMA3, VAULTGEMMA
from jaxpaged.models.families.gemma3n import GEMMA3N
from jaxpaged.models.families.gemma4 import GEMMA4
from jaxpaged.models.families.glm import GLM, GLM4, GLM4_MOE
from jaxpaged.models.families.gpt2 import GPT2
from jaxpaged.models.families.gpt_bigcode import GPT_BIGCODE
from jaxpaged.models.families.gpt_neo import GPT_NEO
from jaxpaged.models.families.gpt_neox import GPT_NEOX
from jaxpaged.models.families.gpt_oss import GPT_OSS
from jaxpaged.models.families.gptj import GPTJ
from jaxpaged.models.families.granite_moe import GRANITEMOE, GRANITEMOESHARED
from jaxpaged.models.families.granite_swa import GRANITE_SWA, GRANITEMOE_SWA, GRANITEMOEHYBRID
from jaxpaged.models.families.hunyuan import HUNYUAN_MOE, HY_V3
from jaxpaged.models.families.hyperclova import HYPERCLOVAX
from jaxpaged.models.families.jamba import JAMBA
from jaxpaged.models.families.laguna import LAGUNA
from jaxpaged.models.families.lfm2 import LFM2, LFM2_MOE
from jaxpaged.models.families.llama import GRANITE, LLAMA, MISTRAL, SMOLLM3
from jaxpaged.models.families.llama4 import LLAMA4
from jaxpaged.models.families.mamba import FALCON_MAMBA, MAMBA, MAMBA2
from jaxpaged.models.families.mimo import MIMO_V2, MIMO_V2_FLASH
from jaxpaged.models.families.minimax import MINIMAX_M2
from jaxpaged.models.families.minimax_text import MINIMAX
from jaxpaged.models.families.mixtral import MIXTRAL
from jaxpaged.models.families.mpt import MPT
from jaxpaged.models.families.nanochat import NANOCHAT
from jaxpaged.models.families.near_llama import (
    ARCEE,
    CWM,
    ERNIE4_5,
    HELIUM,
    HUNYUAN,
    INTERNLM3,
    IQUESTCODER,
    MINISTRAL,
    MINISTRAL3,
    SEED_OSS,
)
from jaxpaged.models.families.nemotron import JAIS2, NEMOTRON
from jaxpaged.models.families.nemotron_h import NEMOTRON_H
from jaxpaged.models.families.olmo import FLEX_OLMO, OLMO, OLMO2, OLMO3, OLMOE
from jaxpaged.models.families.olmo_hybrid import OLMO_HYBRID
from jaxpaged.models.families.opt import OPT
from jaxpaged.models.families.phi import PHI, PHIMOE
from jaxpaged.models.families.phi3 import PHI3
from jaxpaged.models.families.qwen import QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE
from jaxpaged.models.families.qwen_next import QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT
from jaxpaged.models.families.sarvam import SARVAM_MOE
from jaxpaged.models.families.solar import SOLAR_OPEN
from jaxpaged.models.families.stablelm import STABLELM
from jaxpaged.models.families.starcoder2 import STARCODER2
from jaxpaged.models.families.windowed_moe import FLINT, KOLIBRI, MELLUM
from jaxpaged.models.families.wrappers import WRAPPERS, Wrapper, taken_out
from jaxpaged.models.fields import Fields
from jaxpaged.models.lengths import lengthened
from jaxpaged.models.names import Names
from jaxpaged.models.overrides import NAME as OVERRIDES
from jaxpaged.models.overrides import TEXT, check_read, overridden

FAMILIES = (
    LLAMA,
    MISTRAL,
    MINISTRAL,
    MINISTRAL3,
    MIXTRAL,
    LLAMA4,
    QWEN2,
    QWEN2_MOE,
    QWEN3,
    QWEN3_MOE,
    QWEN3_NEXT,
    QWEN3_5,
    QWEN3_5_MOE,
    LFM2,
    LFM2_MOE,
    GEMMA,
    GEMMA2,
    GEMMA3,
    GEMMA3N,
    GEMMA4,
    VAULTGEMMA,
    PHI,
    PHI3,
    PHIMOE,
    GPT_OSS,
    GLM,
    GLM4,
    GLM4_MOE,
    GLM4_MOE_LITE,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    KIMI_K2,
    MISTRAL4,
    MINICPM3,
    MINIMAX,
    MINIMAX_M2,
    MIMO_V2_FLASH,
    MIMO_V2,
    SEED_OSS,
    COHERE,
    COHERE2,
    COHERE2_MOE,
    EXAONE,
    EXAONE4,
    EXAONE_MOE,
    GRANITE,
    GRANITE_SWA,
    GRANITEMOE,
    GRANITEMOESHARED,
    GRANITEMOE_SWA,
    GRANITEMOEHYBRID,
    BAMBA,
    HUNYUAN,
    HUNYUAN_MOE,
    HY_V3,
    HYPERCLOVAX,
    ERNIE4_5,
    ERNIE4_5_MOE,
    DOTS1,
    AFMOE,
    LAGUNA,
    SOLAR_OPEN,
    SARVAM_MOE,
    MELLUM,
    FLINT,
    KOLIBRI,
    NANOCHAT,
    INTERNLM3,
    IQUESTCODER,
    APERTUS,
    OLMO,
    OLMO2,
    OLMO3,
    OLMOE,
    FLEX_OLMO,
    OLMO_HYBRID,
    SMOLLM3,
    NEMOTRON,
    NEMOTRON_H,
    JAIS2,
    ARCEE,
    CWM,
    HELIUM,
    STABLELM,
    STARCODER2,
    FALCON,
    FALCON_H1,
    JAMBA,
    MAMBA,
    FALCON_MAMBA,
    MAMBA2,
    GPT_NEOX,
    GPT2,
    GPT_NEO,
    GPTJ,
    GPT_BIGCODE,
    OPT,
    BLOOM,
    MPT,
)
BY_TYPE = {family.model_type: family for family in FAMILIES}
ARCHITECTURES = tuple(dict.fromkeys(gguf.architecture for family in FAMILIES for gguf in family.gguf))


OUTSIDE = (TEXT, "tie_word_embeddings", "eos_token_id")  # what a wrapper's own fields say of its decoder
WRAPPER_OF = {wrapper.model_type: wrapper for wrapper in WRAPPERS}


def described(
    said: Mapping[str, Any], overrides: Mapping[str, Any] | None = None
) -> tuple[ModelConfig, Names]:
    """Return the description of a model from its Hugging Face config, and what its files call the weights; of
    a model of images and text those of its text part.

    overrides: what a user says in place of the config; see `jaxpaged.models.overrides`.

    Raises `InputError` for unknown model types, for values of the wrong type, and for whatever changes the
    arithmetic in a way that is not supported.
    """
    said, overrides = overridden(said, overrides or {}), overrides or {}
    wrapper, family, text_config = _found(said)
    fields = Fields(text_config, family.defaults)
    config = family.read(fields)
    fields.refuse_rest()
    if wrapper is not None and isinstance(said.get(TEXT), Mapping):
        rule = f"one of {', '.join(OUTSIDE)} for a model with a decoder inside"
        for name in overrides:
            check(f"{OVERRIDES}: key", name, rule, name in OUTSIDE)
        overrides = overrides.get(TEXT) or {}
    check_read(fields, overrides)
    if not family.has_final_length:
        config = lengthened(config)
    return config, names_of(said, config)


def family_of(said: Mapping[str, Any]) -> Family:
    """Return the family of a Hugging Face config; of a model of images and text that of its text part.

    Raises `InputError` for unknown model types.
    """
    return _found(said)[1]


def names_of(said: Mapping[str, Any], config: ModelConfig, quant_method: str | None = None) -> Names:
    """Return what files of a config call the weights of its description, in this quantised form if in one."""
    wrapper, family, _ = _found(said)
    names = family.quantised_names.get(quant_method or "") or family.names(config)
    return taken_out(names) if wrapper is None else wrapper.names(names)


def _found(said: Mapping[str, Any]) -> tuple[Wrapper | None, Family, Mapping[str, Any]]:
    """Return the wrapper and the family of a config, and the part of it that is the family's."""
    model_type = said.get("model_type")
    known = [*BY_TYPE, *WRAPPER_OF]
    if not isinstance(model_type, str) or model_type not in known:
        types = ", ".join(map(repr, known))
        raise InputError(f"model config: model_type={shown(model_type)} must be one of {types}")
    wrapper = WRAPPER_OF.get(model_type)
    if wrapper is None:
        return None, BY_TYPE[model_type], said
    return wrapper, *wrapper.inside(said)


def of_architecture(architecture: str, tensors: Collection[str]) -> tuple[Family, Gguf] | None:
    """Return the family of a GGUF file with these tensors; None for an unknown architecture."""
    pairs = [(family, gguf) for family in FAMILIES for gguf in family.gguf]
    known = [(family, gguf) for family, gguf in pairs if gguf.architecture == architecture]
    marked = [pair for pair in known if pair[1].marker in tensors]
    return next(iter([*marked, *(pair for pair in known if pair[1].marker is None)]), None)


def from_hf(said: Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> ModelConfig:
    """Return the description alone; see `described`."""
    return described(said, overrides)[0]


def markdown_table() -> str:
    """Return the families as the table of `docs/guides/models.md`."""
    lines = ["| `model_type` | models | GGUF |", "| --- | --- | --- |"]
    for family in FAMILIES:
        gguf = f"`{family.gguf[0].architecture}`" if family.gguf else ""
        lines.append(f"| `{family.model_type}` | {family.models} | {gguf} |")
    for wrapper in WRAPPERS:
        gguf = f"`{wrapper.gguf}`" if wrapper.gguf else ""
        lines.append(f"| `{wrapper.model_type}` | {wrapper.models} | {gguf} |")
    return "\n".join(lines)
