"""Pooling in NumPy: a vector, or the probabilities of classes, from a prompt's hidden states."""

import numpy as np

METHODS = ("LAST", "MEAN", "CLS")  # the last token's, the mean of all tokens', the first token's


def pooled(hidden: np.ndarray, method: str) -> np.ndarray:
    """Return one vector [hidden] for a prompt's hidden states [num_tokens, hidden]."""
    if method == "LAST":
        return hidden[-1]
    if method == "CLS":
        return hidden[0]
    assert method == "MEAN"
    total = np.zeros(hidden.shape[1], np.float64)
    for token in hidden:
        total += token
    return (total / len(hidden)).astype(hidden.dtype)


def normalised(vector: np.ndarray) -> np.ndarray:
    """Return the vector of length 1 of the same direction."""
    length = 0.0
    for value in vector.tolist():
        length += value * value
    return vector / max(length**0.5, 1e-12)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def softmax(x: np.ndarray) -> np.ndarray:
    powers = np.exp(x - x.max())
    return powers / powers.sum()
