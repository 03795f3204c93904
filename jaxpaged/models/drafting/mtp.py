"""MTP layers: what lies behind a model's last layer in its own files, trained to predict one token more."""

import dataclasses

from jaxpaged.checks import InputError, check
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.drafting.description import DraftHead
from jaxpaged.models.drafting.stored import StoredHead
from jaxpaged.models.families import family_of, llama
from jaxpaged.models.files import hf
from jaxpaged.models.loading import Checkpoint
from jaxpaged.models.names import Names
from jaxpaged.models.quantised.on_load import on_load
from jaxpaged.models.weights import check_names

# Families whose published files have such a layer, by `model_type`.
FAMILIES = ("glm4_moe",)


def open_layer(checkpoint: Checkpoint, quantization: str | None = None) -> StoredHead:
    """Find the MTP layer in a model's files. Raises `InputError`."""
    path, rule = checkpoint.path, f"one of {', '.join(map(repr, FAMILIES))}, whose files have an MTP layer"
    kind = family_of(hf.read_object(path / "config.json")).model_type if path.is_dir() else path.suffix
    check("method='mtp' is not for this model: model_type", kind, rule, kind in FAMILIES)
    said = checkpoint.quant_method
    rule = "None: an MTP layer of weights that are quantised in the model's files is not read"
    check("method='mtp' is not for this model: quant_method", said, rule, said is None)
    rule = "None, 'int8', 'int4' or 'fp8' for an MTP layer"
    check("quantization", quantization, rule, quantization is None or on_load(quantization) is not None)
    config = described(checkpoint.config)
    names = names_behind(checkpoint.names, checkpoint.config.num_layers)
    try:
        tensors = checkpoint.load_weights()
        check_names(config, names, tensors)
    except InputError as error:
        raise InputError(f"method='mtp' is not for this model: {error}") from error
    return StoredHead(path, config, names, tensors, quantization)


def described(served: ModelConfig) -> ModelConfig:
    """Return the description of an MTP layer as DeepSeek-V3 has them: a layer like the model's last."""
    experts = served.experts and dataclasses.replace(served.experts, dense_layers=(), dense_size=0)
    head = DraftHead(
        kind="mtp",
        reads_last=True,
        given_size=served.hidden_size,
        num_choices=served.vocab_size,
        own_lm_head=False,
    )
    return dataclasses.replace(
        served,
        layers=served.layers[-1:],
        experts=experts,
        draft_head=head,
        eos_token_ids=(),
        tie_word_embeddings=False,
    )


def names_behind(names: Names, number: int) -> Names:
    """Return what the files call the weights of the layer behind the last, which has this number."""
    layer = llama.LAYER.format(layer=number)

    def of(name: str) -> str:
        return name.replace(llama.LAYER, layer)

    table = {
        role: of(pieces) if isinstance(pieces, str) else tuple(map(of, pieces))
        for role, pieces in names.table.items()
    }
    of_its_own = {
        "norm": f"{layer}.shared_head.norm",
        "fuse": f"{layer}.eh_proj",
        "embedded_norm": f"{layer}.enorm",
        "hidden_norm": f"{layer}.hnorm",
    }
    # All else in the files is the model's; of the layer, embedding and head are the model's again.
    return dataclasses.replace(names, table=table | of_its_own, ignored=("model.", "lm_head"))
