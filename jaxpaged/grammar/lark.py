"""Writer of recursive languages as sources for llguidance, in its form of Lark."""

from collections.abc import Callable

from jaxpaged.grammar.lexemes import divided
from jaxpaged.grammar.nodes import (
    MAX_POINT,
    Both,
    Chars,
    Either,
    GrammarError,
    Members,
    Minus,
    Multiples,
    Node,
    Ranges,
    Ref,
    Repeat,
    Then,
    common,
    others,
)
from jaxpaged.grammar.productions import Call, Choice, Leaf, Lexemes, Loop, Part, Row
from jaxpaged.grammar.rules import Rules, simplest, spelled_out, walk

MAX_NESTED = 8  # parentheses inside each other, behind which a rule gets a name
MAX_INLINE = 200  # characters of an expression; a longer one gets a name
SURROGATES: Ranges = ((0xD800, 0xDFFF),)


def lark_of(rules: Rules) -> str:
    """Return the source of a language that llguidance follows exactly. Raises `GrammarError`."""
    rules = simplest(rules)
    writer = _Writer()
    if not any(isinstance(part, Ref | Multiples) for part in walk(rules.start)):
        return "\n".join([f"start: {writer.name(rules.start)}", *writer.lines])  # one lexeme for all
    return "\n".join(writer.whole(divided(rules)))


class _Writer:
    """A writer of terminals, each part once under a name, or as an expression where it is short."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.known: dict[int, tuple[Node, str]] = {}
        self.by_text: dict[str, str] = {}
        self.rules: dict[str, str] = {}

    def whole(self, made: Lexemes) -> list[str]:
        """Return the lines of rules over lexemes."""
        for name in made.named:
            self.rules[name] = f"r{len(self.rules)}"

        lines: list[str] = []

        def part(each: Part, depth: int = 1) -> str:
            if depth % MAX_NESTED == 0 and not isinstance(each, Leaf | Call):
                name = f"n{len(lines)}"
                lines.append("")  # its place, before those inside of it
                lines[int(name[1:])] = f"{name}: {part(each)}"
                return name
            match each:
                case Leaf(number):
                    return self.name(made.nodes[number])
                case Call(name):
                    return self.rules[name]
                case Row(parts):
                    return f"({' '.join(part(one, depth + 1) for one in parts)})" if parts else '""'
                case Choice(parts):
                    return f"({' | '.join(part(one, depth + 1) for one in parts)})"
                case Loop(inside, minimum, maximum):
                    return f"({part(inside, depth + 1)}){_times(minimum, maximum)}"

        first = [f"start: {part(made.start)}"]
        first += [f"{self.rules[name]}: {part(rule)}" for name, rule in made.named.items()]
        return [*first, *lines, *self.lines]

    def name(self, node: Node) -> str:
        """Return the name of a lexeme."""
        return self.named(self.atom(node))

    def named(self, text: str) -> str:
        if text not in self.by_text:
            self.by_text[text] = name = f"T{len(self.by_text)}"
            self.lines.append(f"{name}: {text}")
        return self.by_text[text]

    def atom(self, node: Node) -> str:
        """Return a part as an expression between slashes, or as a terminal's name."""
        if id(node) not in self.known:
            self.known[id(node)] = node, self.made(node)
        return self.known[id(node)][1]

    def made(self, node: Node) -> str:
        match node:
            case Chars(ranges):
                return f"/{_class(ranges)}/"
            case Then(parts):
                return self.joined(list(map(self.atom, parts)), "", " ", lambda text: text)
            case Either(parts) if parts:
                return self.joined(list(map(self.atom, parts)), "|", " | ", lambda text: f"(?:{text})")
            case Repeat(part, minimum, maximum):
                inside, times = self.atom(part), _times(minimum, maximum)
                if inside[0] == "/" and len(inside) < MAX_INLINE:
                    return f"/(?:{inside[1:-1]}){times}/"
                return self.named(f"({inside}){times}")
            case Members():
                return self.atom(spelled_out(node))
            case Both(parts):
                return self.named(" & ".join(f"({self.atom(part)})" for part in parts))
            case Minus(part, other):
                return self.named(f"({self.atom(part)}) & ~({self.atom(other)})")
        raise GrammarError(f"{type(node).__name__} is no part of a lexeme")

    def joined(self, atoms: list[str], mark: str, wide: str, group: Callable[[str], str]) -> str:
        """Return parts by a mark between expressions, or by another between names of longer ones."""
        if not atoms:
            return "/(?:)/"  # nothing between two slashes would be a comment
        inside = mark.join(atom[1:-1] for atom in atoms)
        if len(inside) < MAX_INLINE and all(atom[0] == "/" for atom in atoms):
            return f"/{group(inside)}/"
        chunks: list[list[str]] = [[]]
        for atom in atoms:
            ours = chunks[-1]
            is_long = sum(map(len, ours)) + len(atom) > MAX_INLINE
            if ours and (is_long or atom[0] != "/" or ours[-1][0] != "/"):
                chunks.append(ours := [])
            ours.append(atom)
        made = [
            chunk[0] if len(chunk) == 1 else f"/{group(mark.join(atom[1:-1] for atom in chunk))}/"
            for chunk in chunks
        ]
        return self.named(wide.join(made))


def _times(minimum: int, maximum: int | None) -> str:
    if maximum is None:
        return {0: "*", 1: "+"}.get(minimum, f"{{{minimum},}}")
    return f"{{{minimum},{maximum}}}"


def _class(ranges: Ranges) -> str:
    """Return one character of some ranges as an expression; half of a pair of surrogates is none."""
    kept = common(ranges, others(SURROGATES))
    if kept == common(((0, MAX_POINT),), others(SURROGATES)):
        return "(?s:.)"
    if len(kept) == 1 and kept[0][0] == kept[0][1]:
        return _letter(kept[0][0])
    inside = "".join(_letter(low) if low == high else f"{_letter(low)}-{_letter(high)}" for low, high in kept)
    return f"[{inside}]"


def _letter(point: int) -> str:
    letter = chr(point)
    return letter if letter.isascii() and letter.isalnum() else f"\\x{{{point:X}}}"
