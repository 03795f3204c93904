"""Recurrent layers in NumPy and float64, token by token: their definitions."""

import numpy as np


def recurrence(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    log_decay: np.ndarray,
    beta: np.ndarray | None,
    state: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return outputs [num_tokens, num_heads, v_dim], and the state after the last token.

    q, k: [num_tokens, num_key_heads, k_dim]; consecutive heads of v share one of these.
    v: [num_tokens, num_heads, v_dim].
    log_decay: [num_tokens, num_heads, 1], or with k_dim numbers for a decay of each channel.
    beta: [num_tokens, num_heads] for the delta rule: the state is corrected towards v. None: v is added.
    state: [num_heads, k_dim, v_dim] before the first token; zeros by default.

    With S the state: S = exp(log_decay) S, then S = S + k u' with u = beta (v - S' k), or u = v; the output
    is S' q. The gated delta rule (Yang et al. 2024) and Kimi Delta Attention have beta; Mamba-2 (Dao and Gu
    2024, with q = C, k = B, v = dt x, log_decay = dt A) and lightning attention have none.
    """
    num_tokens, num_heads, v_dim = v.shape
    q, k, v, log_decay = (np.asarray(x, np.float64) for x in (q, k, v, log_decay))
    q, k = (np.repeat(x, num_heads // x.shape[1], axis=1) for x in (q, k))
    s = np.zeros((num_heads, k.shape[2], v_dim)) if state is None else np.asarray(state, np.float64)
    out, decay = np.zeros((num_tokens, num_heads, v_dim)), np.exp(log_decay)
    for t in range(num_tokens):
        s = decay[t][:, :, None] * s
        u = v[t]
        if beta is not None:
            u = np.asarray(beta[t], np.float64)[:, None] * (u - (k[t][:, None] @ s)[:, 0])
        s = s + k[t][:, :, None] * u[:, None, :]
        out[t] = (q[t][:, None] @ s)[:, 0]
    return out, s


def causal_convolution(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
    """Return a causal convolution of each channel by itself, [num_tokens, num_channels].

    x: [num_tokens, num_channels]; zeros come before the first token.
    weight: [kernel_size, num_channels], for the oldest token first.
    """
    kernel_size = len(weight)
    padded = np.concatenate([np.zeros((kernel_size - 1, x.shape[1])), np.asarray(x, np.float64)])
    out = np.zeros(x.shape)
    for j in range(kernel_size):
        out += padded[j : j + len(x)] * np.asarray(weight[j], np.float64)
    return out if bias is None else out + np.asarray(bias, np.float64)


def selective_scan(
    x: np.ndarray, dt: np.ndarray, b: np.ndarray, c: np.ndarray, a: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return outputs [num_tokens, num_channels] of Mamba-1, and the state after the last token.

    x, dt: [num_tokens, num_channels]; b, c: [num_tokens, state_size]; a: [num_channels, state_size].

    With S the state: S = exp(dt a) S + dt x b', and the output is S c (Gu and Dao 2023).
    """
    x, dt, b, c, a = (np.asarray(array, np.float64) for array in (x, dt, b, c, a))
    s, out = np.zeros(a.shape), np.zeros(x.shape)
    for t in range(len(x)):
        s = np.exp(dt[t][:, None] * a) * s + (dt[t] * x[t])[:, None] * b[t]
        out[t] = s @ c[t]
    return out, s
