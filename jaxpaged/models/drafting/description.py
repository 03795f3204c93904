"""Description of a head that drafts: what it has beside a decoder's layer."""

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftHead:
    """A layer that drafts the token after the next from the next token and features of the tokens before.

    `eagle3`: features are the product of hidden states behind several layers of the served model. The layer's
    attention reads the next token's embedding and the features side by side. `mtp`: features are the hidden
    state behind the model's last norm. A product of embedding and features is what an ordinary layer reads.
    Where the model's features are not known yet, the head's own output takes their place.
    """

    kind: Literal["eagle3", "mtp"]
    behind: tuple[int, ...] = ()  # numbers of layers behind which hidden states are read
    reads_last: bool = False  # whether one of these comes out of the model's last layer
    given_size: int  # numbers of one hidden state of the served model
    num_choices: int  # tokens that it chooses from
    fuse_norm: bool = False  # whether the hidden states are normed as one before their product
    norm_before_residual: bool = False  # whether the residual begins with normed features
    hands_normed: bool = False  # whether its own features are its output behind its last norm
    own_embedding: bool = False  # whether it has a table of embeddings, or shares the model's
    own_lm_head: bool = True

    @property
    def fuse_inputs(self) -> int:
        """Inputs of the product that features, or the layer's inputs, are made by."""
        return self.given_size * (2 if self.kind == "mtp" else len(self.behind))
