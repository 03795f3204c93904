"""What a conversation must look like. Imports nothing heavy: the command line checks files with it."""

from collections.abc import Mapping, Sequence

from jaxpaged.checks import InputError

Message = Mapping[str, str]


def check_messages(messages: object) -> None:
    """Raise `InputError` unless `messages` is a non-empty list of {"role": str, "content": str}."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise InputError(f"messages={messages!r} must be a list with at least one message")
    for message in messages:
        texts = [message.get(key) if isinstance(message, Mapping) else None for key in ("role", "content")]
        if not all(isinstance(text, str) for text in texts):
            raise InputError(f"message {message!r} must have a 'role' and a 'content', both strings")
