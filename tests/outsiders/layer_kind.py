"""Kinds of layers from outside: a window with sinks kept, and some that contradict themselves."""

from dataclasses import dataclass

from jaxpaged.contracts import CacheSpec


@dataclass(frozen=True)
class WindowWithSinks(CacheSpec):
    """Attention to the first `first_tokens` tokens and to the last `window`, the token itself among them."""

    window: int
    first_tokens: int = 4
    contract = 1

    def first_read(self, num_tokens):
        first = num_tokens + 1 - self.window
        return first * (first > 0)  # of ints and of arrays

    def most_kept(self, num_in_flight):
        return self.window - 1 + num_in_flight


SINKS = WindowWithSinks(13)


def every_second(layer, num_layers):
    """Give every second layer sinks and a window, from the first on."""
    return SINKS if layer % 2 == 0 else None


@dataclass(frozen=True)
class Dilated(WindowWithSinks):
    """A window of which a token attends to every second one; memory keeps all of it."""

    def sees(self, query, key):
        return (key < self.first_tokens) | ((key > query - self.window) & ((query - key) % 2 == 0))


DILATED = Dilated(21, 3)


@dataclass(frozen=True)
class SeesTooMuch(WindowWithSinks):
    """A kind that attends to a token which memory gives back."""

    def sees(self, query, key):
        return (key < self.first_tokens) | (key >= query - self.window)


@dataclass(frozen=True)
class KeepsTooLittle(WindowWithSinks):
    """A kind that understates what a row keeps, so that admission would be wrong."""

    def most_kept(self, num_in_flight):
        return self.window


SEES_TOO_MUCH = SeesTooMuch(13)
KEEPS_TOO_LITTLE = KeepsTooLittle(13)


@dataclass(frozen=True)
class Backwards(WindowWithSinks):
    """A kind that begins behind the token itself."""

    def first_read(self, num_tokens):
        return num_tokens + (num_tokens == 2)


@dataclass(frozen=True)
class OfTheFuture(WindowWithSinks):
    """A kind for a version of the contract that there is not yet."""

    contract = 2


BACKWARDS, OF_THE_FUTURE = Backwards(13), OfTheFuture(13)


def seven(layer, num_layers):
    """Return what is no kind."""
    return 7
