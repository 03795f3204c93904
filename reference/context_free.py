"""Context-free grammars over tokens, followed one byte at a time by all stacks of what must still come.

A grammar has rules: for each name its alternatives, each a sequence of bytes and names. No rule begins with
itself, and each has a text. So what has begun can be completed exactly if any stack is left.
"""

from collections.abc import Collection, Mapping, Sequence

Stack = tuple[bytes | str, ...]  # what must still come, the next part first


class TokenGrammar:
    """Grammar over tokens that constrains an answer.

    rules: the grammar's, of which `start` is the first.
    tokens: the bytes of each token; b"" may never be written.
    end_tokens: the tokens that end a complete answer.
    opens: the token behind which the grammar begins; None: it begins with the answer.
    begins: the token that lets it wait for `opens`, where an answer begins with it; None: it always waits.
    """

    def __init__(
        self,
        rules: Mapping[str, Sequence[Sequence[bytes | str]]],
        tokens: Sequence[bytes],
        end_tokens: Collection[int],
        opens: int | None = None,
        begins: int | None = None,
    ) -> None:
        self.rules, self.tokens, self.end_tokens = rules, tokens, end_tokens
        self.opens, self.begins = opens, begins

    def stacks(self, answer: Sequence[int]) -> frozenset[Stack] | None:
        """Return the stacks behind an answer, none behind what is barred; None before its beginning."""
        start: frozenset[Stack] = frozenset([("start",)])
        stacks = start if self.opens is None or self.begins is not None else None
        for place, token in enumerate(answer):
            if place == 0 and token == self.begins:
                stacks = None
            elif stacks is None:
                stacks = start if token == self.opens else None
            elif token not in self.end_tokens:
                stacks = self.behind(stacks, self.tokens[token])
            elif not self.is_complete(stacks):
                stacks = frozenset()
        return stacks

    def behind(self, stacks: frozenset[Stack], text: bytes) -> frozenset[Stack]:
        """Return the stacks behind a text; none where it is empty."""
        if not text:
            return frozenset()
        for i in range(len(text)):
            byte, behind = text[i : i + 1], set[Stack]()
            for head, *rest in filter(None, self.expanded(stacks)):
                assert isinstance(head, bytes)
                if head[:1] == byte:
                    behind.add((head[1:], *rest) if head[1:] else tuple(rest))
            stacks = frozenset(behind)
        return stacks

    def expanded(self, stacks: Collection[Stack]) -> set[Stack]:
        """Return the stacks with bytes first, or empty, that some stacks may become by the rules."""
        expanded, left = set[Stack](), list(stacks)
        while left:
            stack = left.pop()
            if stack and isinstance(stack[0], str):
                left += [(*parts, *stack[1:]) for parts in self.rules[stack[0]]]
            else:
                expanded.add(stack)
        return expanded

    def is_complete(self, stacks: frozenset[Stack]) -> bool:
        """Check whether the answer may end here."""
        return () in self.expanded(stacks)

    def allowed(self, answer: Sequence[int]) -> set[int] | None:
        """Return the tokens that may follow an answer; None: all."""
        stacks = self.stacks(answer)
        if not stacks:
            return None
        token_ids = {token for token, text in enumerate(self.tokens) if self.behind(stacks, text)}
        token_ids |= {self.begins} if self.begins is not None and not answer else set()
        return token_ids | ({*self.end_tokens} if self.is_complete(stacks) else set())
