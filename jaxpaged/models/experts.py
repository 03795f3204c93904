"""A feed-forward part of experts: a router chooses a few for each token."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxpaged import row_sums
from jaxpaged.models import layers
from jaxpaged.models.config import Experts
from jaxpaged.models.feed_forward import MLP, linear, stack
from jaxpaged.models.names import layers_with
from jaxpaged.models.norms import Norm, norm
from jaxpaged.models.shards import total
from jaxpaged.models.weights import Weights

GLU_SLOPE = 1.702


class ExpertLinear(nnx.Module):
    """A product for each layer and expert. An expert's weights are read by its number: in a loop.

    Layers are counted among those that have experts.
    """

    def __init__(self, weights: Weights, role: str) -> None:
        self.num_experts = weights.config.experts.num_experts if weights.config.experts else 0
        each = layers_with(weights.config, role)
        groups = [each] if weights.form.loops else [[layer] for layer in each]
        self.num_pieces = weights.num_pieces(role) or 1
        self.linears = nnx.List(self._linear(weights, role, group) for group in groups)

    def _linear(self, weights: Weights, role: str, group: Sequence[int]) -> layers.Linear:
        kernels = weights.of_experts(f"{role}.weight", group) or ()
        biases = weights.of_experts(f"{role}.bias", group)
        num_pieces = weights.num_pieces(role)
        return layers.Linear(kernels, biases, form=weights.form, together=True, num_pieces=num_pieces)

    def __call__(
        self,
        x: Float[Array, "num_tokens in_features"],
        layer: layers.Layer,
        expert: Int[Array, ""],
    ) -> list[Float[Array, "num_tokens out_features"]]:
        """Return the expert's product, piece by piece."""
        if len(self.linears) == 1:
            return self.linears[0].pieces(x, layer * self.num_experts + expert)
        assert isinstance(layer, int)
        return self.linears[layer].pieces(x, expert)


class ExpertsMLP(nnx.Module):
    """The chosen experts' outputs, added up with the router's weights.

    One expert after the other, only those whom some token has chosen: nothing else of the weights is read.
    They come in the order of their numbers, so that a token's sum has the same bits in any company. An expert
    that all tokens have comes last. Layers are counted among those that have experts.
    """

    def __init__(self, weights: Weights, config: Experts) -> None:
        self.config, self.activation = config, weights.config.activation
        self.shards, self.visits_all = weights.shards, weights.form.differentiable
        self.router = linear(weights, "router")
        self.correction = stack(weights, "correction")
        self.gated = weights.config.gated
        self.gate_up = ExpertLinear(weights, "experts.gate_up" if self.gated else "experts.up")
        self.down = ExpertLinear(weights, "experts.down")
        self.shared = MLP(weights, "shared.") if config.shared_size else None
        self.shared_gate = linear(weights, "shared_gate") if config.shared_gate else None
        self.beside = Beside(weights) if config.beside else None
        has_latent = config.latent_size > 0
        self.into, self.out = (
            linear(weights, f"experts_{name}") if has_latent else None for name in ("in", "out")
        )

    def __call__(
        self,
        x: Float[Array, "num_tokens hidden"],
        layer: layers.Layer,
        is_padding: Bool[Array, " num_tokens"],
        residual: Float[Array, "num_tokens hidden"] | None = None,  # for experts beside a dense part
    ) -> tuple[Float[Array, "num_tokens hidden"], Int[Array, "num_tokens num_chosen"]]:
        """Return the output, and each token's experts, the one with the highest score first."""
        routed = given = x
        if self.beside is not None:
            assert residual is not None
            routed, given = self.beside.inputs(residual, layer)
        if self.into is not None:
            given = self.into(x, layer).astype(x.dtype)
        is_nobodys = is_padding[:, None]
        shares, by_token = self.choose(routed, layer)
        weights = jnp.where(is_nobodys, 0, shares)
        chosen = jnp.any(weights > 0, axis=0)
        if self.visits_all:
            experts = jnp.arange(chosen.shape[0])
        else:
            (experts,) = jnp.nonzero(chosen, size=chosen.shape[0], fill_value=0)

        type Sums = list[Float[Array, "num_tokens given"]]  # of each piece of the experts' inputs

        def add(i: Int[Array, ""], sums: Sums) -> Sums:
            expert = experts[i].astype(jnp.int32)
            weight = weights[:, expert, None]
            mine = jnp.where(weight > 0, given, 0)  # products on a CPU skip rows of zeros
            if self.config.scales_input:
                mine, weight = (mine * weight).astype(x.dtype), (weight > 0).astype(jnp.float32)
            wide = self._activated(*self.gate_up(mine, layer, expert))
            outs = self.down(wide.astype(x.dtype), layer, expert)
            if self.beside is not None:
                scale = self.beside.scale[layer][expert].astype(jnp.float32)
                outs = [out * scale for out in outs]
            return [
                so_far + weight * jnp.where(weight > 0, out, 0)
                for so_far, out in zip(sums, outs, strict=True)
            ]

        count = chosen.shape[0] if self.visits_all else jnp.sum(chosen)
        nothing = jnp.zeros(given.shape, jnp.float32)
        sums = lax.fori_loop(0, count, add, [nothing] * self.down.num_pieces)
        if self.out is not None:  # in models that one device computes
            sums = [self.out(sums[0].astype(x.dtype), layer)]
        if self.shared is None:
            return total(self.shards, sums), by_token
        shared = self._shared(x, layer)
        if self.beside is not None:
            out, by_all = (total(self.shards, each).astype(x.dtype) for each in (sums, shared))
            return self.beside.added(out, by_all, layer), by_token
        return total(self.shards, [out + more for out, more in zip(sums, shared, strict=True)]), by_token

    def _shared(
        self, x: Float[Array, "num_tokens hidden"], layer: layers.Layer
    ) -> list[Float[Array, "num_tokens hidden"]]:
        """Return the output of the expert that all tokens have, piece by piece."""
        assert self.shared is not None
        pieces = self.shared.pieces(x, layer)
        if self.shared_gate is not None:
            gate = jax.nn.sigmoid(self.shared_gate(x, layer))
            pieces = [piece * gate for piece in pieces]
        if self.config.shared_scale != 1.0:
            pieces = [piece * self.config.shared_scale for piece in pieces]
        return pieces

    def choose(
        self, x: Float[Array, "num_tokens hidden"], layer: layers.Layer
    ) -> tuple[Float[Array, "num_tokens num_experts"], Int[Array, "num_tokens num_chosen"]]:
        """Return each token's weight for each expert, 0 for experts that it has not chosen; and those that it
        has.
        """
        c = self.config
        logits = self.router(x, layer)
        if c.router_soft_cap is not None:
            logits = layers.soft_capped(logits, c.router_soft_cap)
        if c.scoring == "sparse_mixer":
            experts, share = sparse_mixer(logits, c.jitter)
        elif c.scoring == "softmax" and self.correction is None and c.num_groups == 1:
            best, experts = lax.top_k(logits, c.num_chosen)
            if c.renormalise:
                share = row_sums.softmax(best)
            else:
                share = jnp.exp(best - row_sums.logsumexp(logits))
        else:
            scores = jax.nn.sigmoid(logits) if c.scoring == "sigmoid" else row_sums.softmax(logits)
            ranked = logits if c.ranks_logits else scores
            if self.correction is not None:
                ranked = ranked + self.correction[layer].astype(jnp.float32)
            _, experts = lax.top_k(self._in_chosen_groups(ranked), c.num_chosen)
            share = jnp.take_along_axis(scores, experts, axis=-1)
            if c.renormalise:
                share = share / (row_sums.total(share) + 1e-20)
        if c.scale != 1.0:
            share = share * c.scale
        rows = jnp.arange(x.shape[0])[:, None]
        return jnp.zeros(logits.shape, jnp.float32).at[rows, experts].set(share), experts

    def _in_chosen_groups(
        self, ranked: Float[Array, "num_tokens num_experts"]
    ) -> Float[Array, "num_tokens num_experts"]:
        """Return what experts are chosen by, -inf for those outside of the chosen groups."""
        c = self.config
        if c.num_groups == 1:
            return ranked
        groups = ranked.reshape(ranked.shape[0], c.num_groups, -1)
        best, _ = lax.top_k(groups, c.group_best)
        _, numbers = lax.top_k(best.sum(axis=-1), c.num_chosen_groups)
        chosen = jnp.any(numbers[..., None] == jnp.arange(c.num_groups), axis=1)
        return jnp.where(chosen[..., None], groups, -jnp.inf).reshape(ranked.shape)

    def _activated(self, wide: Float[Array, "num_tokens outputs"]) -> Float[Array, "num_tokens width"]:
        if not self.gated:
            return layers.ACTIVATIONS[self.activation](wide)
        gate, up = jnp.split(wide, 2, axis=-1)
        limit = self.config.glu_limit
        if limit is None:
            return layers.ACTIVATIONS[self.activation](gate) * up
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
        return gate * jax.nn.sigmoid(GLU_SLOPE * gate) * (up + 1)


class Beside(nnx.Module):
    """Norms of experts beside a dense part, and each expert's factor.

    The router and the experts read the residual, and what comes out of experts and dense part is normed.
    """

    def __init__(self, weights: Weights) -> None:
        def required_norm(role: str) -> Norm:
            norm_of_role = norm(weights, role)
            assert norm_of_role is not None
            return norm_of_role

        self.router_norm, self.norm = required_norm("router_norm"), required_norm("experts_norm")
        self.out_norm, self.shared_out_norm = (
            required_norm("experts_out_norm"),
            required_norm("shared_out_norm"),
        )
        self.factor = weights.config.hidden_size**-0.5
        scale = stack(weights, "expert_scale")
        assert scale is not None
        self.scale = scale

    def inputs(
        self, residual: Float[Array, "num_tokens hidden"], layer: layers.Layer
    ) -> tuple[Float[Array, "num_tokens hidden"], Float[Array, "num_tokens hidden"]]:
        """Return what the router and what the experts read."""
        routed = self.router_norm(residual, layer) * jnp.asarray(self.factor, residual.dtype)
        return routed, self.norm(residual, layer)

    def added(
        self,
        out: Float[Array, "num_tokens hidden"],
        shared: Float[Array, "num_tokens hidden"],
        layer: layers.Layer,
    ) -> Float[Array, "num_tokens hidden"]:
        """Return the sum of both parts' outputs, each normed."""
        return self.shared_out_norm(shared, layer) + self.out_norm(out, layer)


def sparse_mixer(
    scores: Float[Array, "num_tokens num_experts"], jitter: float
) -> tuple[Int[Array, "num_tokens 2"], Float[Array, "num_tokens 2"]]:
    """Return two experts for each token and their weights, which do not add up to 1.

    The weight of each is a softmax over those that are left and not far behind it: by at most twice `jitter`
    of the larger of the best score and their own size.
    """
    left, choices = scores, []
    for _ in range(2):
        best = jnp.max(left, axis=-1, keepdims=True)
        expert = jnp.argmax(left, axis=-1)
        is_far = (best - scores) / jnp.maximum(jnp.abs(scores), best) > 2 * jitter
        shares = row_sums.softmax(jnp.where(is_far, -jnp.inf, left))
        choices.append((expert, jnp.take_along_axis(shares, expert[:, None], axis=-1)[:, 0]))
        left = jnp.where(jnp.arange(scores.shape[-1]) == expert[:, None], -jnp.inf, left)
    experts, weights = (jnp.stack(each, axis=-1) for each in zip(*choices, strict=True))
    return experts.astype(jnp.int32), weights
