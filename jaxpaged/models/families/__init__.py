"""The families of models that are known: a short file each, and here the list of them."""

from collections.abc import Collection, Mapping
from typing import Any

from jaxpaged.checks import InputError, shown
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.families.apertus import APERTUS
from jaxpaged.models.families.bloom import BLOOM
from jaxpaged.models.families.cohere import COHERE, COHERE2
from jaxpaged.models.families.dots import DOTS1
from jaxpaged.models.families.exaone import EXAONE4
from jaxpaged.models.families.falcon import FALCON
from jaxpaged.models.families.family import Family, Gguf
from jaxpaged.models.families.gemma import GEMMA, GEMMA2, GEMMA3, VAULTGEMMA
from jaxpaged.models.families.glm import GLM, GLM4, GLM4_MOE
from jaxpaged.models.families.gpt2 import GPT2
from jaxpaged.models.families.gpt_neox import GPT_NEOX
from jaxpaged.models.families.gpt_oss import GPT_OSS
from jaxpaged.models.families.granite_moe import GRANITEMOE, GRANITEMOESHARED
from jaxpaged.models.families.llama import GRANITE, LLAMA, MISTRAL, SMOLLM3
from jaxpaged.models.families.minimax import MINIMAX_M2
from jaxpaged.models.families.mixtral import MIXTRAL
from jaxpaged.models.families.mpt import MPT
from jaxpaged.models.families.near_llama import ARCEE, CWM, ERNIE4_5, HELIUM, HUNYUAN, MINISTRAL, SEED_OSS
from jaxpaged.models.families.nemotron import NEMOTRON
from jaxpaged.models.families.olmo import OLMO2, OLMO3, OLMOE
from jaxpaged.models.families.opt import OPT
from jaxpaged.models.families.phi import PHI, PHIMOE
from jaxpaged.models.families.phi3 import PHI3
from jaxpaged.models.families.qwen import QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE
from jaxpaged.models.families.stablelm import STABLELM
from jaxpaged.models.families.starcoder2 import STARCODER2
from jaxpaged.models.fields import Fields

FAMILIES = (
    LLAMA,
    MISTRAL,
    MINISTRAL,
    MIXTRAL,
    QWEN2,
    QWEN2_MOE,
    QWEN3,
    QWEN3_MOE,
    GEMMA,
    GEMMA2,
    GEMMA3,
    VAULTGEMMA,
    PHI,
    PHI3,
    PHIMOE,
    GPT_OSS,
    GLM,
    GLM4,
    GLM4_MOE,
    MINIMAX_M2,
    SEED_OSS,
    COHERE,
    COHERE2,
    EXAONE4,
    GRANITE,
    GRANITEMOE,
    GRANITEMOESHARED,
    HUNYUAN,
    ERNIE4_5,
    DOTS1,
    APERTUS,
    OLMO2,
    OLMO3,
    OLMOE,
    SMOLLM3,
    NEMOTRON,
    ARCEE,
    CWM,
    HELIUM,
    STABLELM,
    STARCODER2,
    FALCON,
    GPT_NEOX,
    GPT2,
    OPT,
    BLOOM,
    MPT,
)
BY_TYPE = {family.model_type: family for family in FAMILIES}
ARCHITECTURES = tuple(dict.fromkeys(gguf.architecture for family in FAMILIES for gguf in family.gguf))


def family_of(said: Mapping[str, Any]) -> Family:
    """The family of a Hugging Face config. Raises `InputError`, with those that are known, for another."""
    model_type = said.get("model_type")
    if not isinstance(model_type, str) or model_type not in BY_TYPE:
        known = ", ".join(map(repr, BY_TYPE))
        raise InputError(f"model config: model_type={shown(model_type)} must be one of {known}")
    return BY_TYPE[model_type]


def of_architecture(architecture: str, tensors: Collection[str]) -> tuple[Family, Gguf] | None:
    """The family of a GGUF file with these tensors; None of an unknown architecture."""
    pairs = [(family, gguf) for family in FAMILIES for gguf in family.gguf]
    known = [(family, gguf) for family, gguf in pairs if gguf.architecture == architecture]
    marked = [pair for pair in known if pair[1].marker in tensors]
    return next(iter([*marked, *(pair for pair in known if pair[1].marker is None)]), None)


def from_hf(said: Mapping[str, Any]) -> ModelConfig:
    """The description of a model from its Hugging Face config, as a dictionary.

    Raises `InputError` for unknown model types, for values of the wrong type, and for whatever changes the
    arithmetic in a way that is not supported.
    """
    family = family_of(said)
    fields = Fields(said, family.defaults)
    config = family.read(fields)
    fields.refuse_rest()
    return config


def markdown_table() -> str:
    """The families for people: the README's table."""
    lines = ["| `model_type` | models | GGUF |", "| --- | --- | --- |"]
    for family in FAMILIES:
        gguf = f"`{family.gguf[0].architecture}`" if family.gguf else ""
        lines.append(f"| `{family.model_type}` | {family.models} | {gguf} |")
    return "\n".join(lines)
