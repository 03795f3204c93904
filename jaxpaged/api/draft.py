"""The model or head that drafts: found by its name, and compared with the model that is served."""

from typing import Any

from jaxpaged.checks import InputError, check
from jaxpaged.config import EngineConfig
from jaxpaged.engine.drafted import Draft
from jaxpaged.models import loading
from jaxpaged.models.drafting import eagle3, mtp
from jaxpaged.models.loading import Checkpoint
from jaxpaged.speculation import BY_MODEL, EAGLE3, MTP


def draft_of(config: EngineConfig, checkpoint: Checkpoint) -> Draft | None:
    """Return the draft model or draft head for this model; None if none is asked for. Raises `InputError`."""
    drafts = config.speculative_config
    if drafts is None or drafts.method not in BY_MODEL:
        return None
    try:
        if drafts.method in (EAGLE3, MTP):
            head = (
                mtp.open_layer(checkpoint, drafts.quantization)
                if drafts.method == MTP
                else eagle3.open_head(str(drafts.model), checkpoint.config, drafts.quantization)
            )
            return Draft(head.config, head.load, head.abstract)
        EngineConfig(quantization=drafts.quantization)  # refuses what is none
        draft_checkpoint = loading.open_checkpoint(drafts.model)
        draft_checkpoint.quantisation(drafts.quantization)
    except InputError as error:
        raise InputError(f"speculative_config: {error}") from error
    same = (
        draft_checkpoint.tokenizer is None
        or checkpoint.tokenizer is None
        or _ids(draft_checkpoint) == _ids(checkpoint)
    )
    rule = "one with the served model's tokenizer: the two give different ids to tokens"
    check("speculative_config: model", drafts.model, rule, same)
    return Draft(draft_checkpoint.config, draft_checkpoint.model, draft_checkpoint.abstract)


def _ids(checkpoint: Checkpoint) -> Any:
    """Return the id of each token."""
    return checkpoint.tokenizer.get_vocab()
