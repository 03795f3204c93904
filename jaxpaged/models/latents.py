"""Latent attention of DeepSeek V2 and its descendants: sizes and weights of layers, by their description."""

from dataclasses import dataclass

from jaxpaged.checks import check, checked_int, checked_number

type Shape = tuple[int, ...]
PREFIX = "latent."


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Attention whose heads share one vector a token: `rank` numbers, and `rope_dim` that RoPE turns.

    Keys and values of each head are products of the former. The cache holds the vector: the latent behind
    its norm, then the key behind RoPE, in pairs half of `rope_dim` apart.
    """

    q_rank: int | None  # numbers of the queries' own latent; None: they are a product of the layer's input
    rank: int
    k_dim: int  # coordinates of a head that RoPE leaves out
    rope_dim: int
    v_dim: int
    bias: bool = False  # of the products that give latents
    norm_eps: float = 1e-6  # of the latents' norms: transformers has it whatever a config says
    q_scale: float = 1.0  # factors of the normed latents
    kv_scale: float = 1.0

    def __post_init__(self) -> None:
        """Check the sizes, which come from files. Raises `InputError`."""
        for name in ("rank", "k_dim", "rope_dim", "v_dim", *(() if self.q_rank is None else ("q_rank",))):
            checked_int(f"model config: {name} of latent attention", getattr(self, name), "an int >= 1", 1)
        even = self.rope_dim % 2 == 0
        check("model config: qk_rope_head_dim", self.rope_dim, "even: RoPE turns pairs", even)
        for name in ("q_scale", "kv_scale", "norm_eps"):
            value = getattr(self, name)
            checked_number(f"model config: {name} of latent attention", value, "a number > 0", 0, above=True)

    @property
    def width(self) -> int:
        """Numbers of a token in the cache."""
        return self.rank + self.rope_dim

    @property
    def head_dim(self) -> int:
        """Coordinates of a head's queries."""
        return self.k_dim + self.rope_dim

    def weights(self, hidden_size: int, num_heads: int) -> dict[str, Shape]:
        """Return the shapes of a layer's weights by role. `k_up` makes absorbed queries of a head, `v_up` its
        values of latents, head after head.
        """
        shapes: dict[str, Shape] = {
            "latent.q.weight": (num_heads * self.head_dim, self.q_rank or hidden_size),
            "latent.kv_a.weight": (self.width, hidden_size),
            "latent.kv_norm.weight": (self.rank,),
            "latent.k_up.weight": (num_heads * self.rank, self.k_dim),
            "latent.v_up.weight": (num_heads * self.v_dim, self.rank),
        }
        if self.bias:
            shapes["latent.kv_a.bias"] = (self.width,)
        if self.q_rank is not None:
            shapes |= {
                "latent.q_a.weight": (self.q_rank, hidden_size),
                "latent.q_norm.weight": (self.q_rank,),
            }
            if self.bias:
                shapes["latent.q_a.bias"] = (self.q_rank,)
        return shapes
