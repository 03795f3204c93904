"""Text of a PTX kernel as a list of instructions."""

import dataclasses
import re
from collections.abc import Iterator

from jaxpaged.research.ptx.faults import Fault

NAME = r"[A-Za-z_$%][\w$]*"


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction: its operation, operands as text, and the predicate that guards it."""

    operation: str
    operands: tuple[str, ...]
    guard: str | None = None
    guard_is_negated: bool = False

    @property
    def parts(self) -> list[str]:
        """Return the operation's parts, between its dots."""
        return self.operation.split(".")

    def __str__(self) -> str:
        guard = f"@{'!' * self.guard_is_negated}{self.guard} " if self.guard else ""
        return f"{guard}{self.operation} {', '.join(self.operands)}"


@dataclasses.dataclass
class Program:
    """A kernel. Inline assembly may declare names in braces: they get the number of their scope."""

    name: str
    parameters: list[str]
    num_threads: int
    registers: dict[str, str]  # name -> type
    shared: dict[str, int]  # symbol -> bytes; 0 for memory whose size the launch gives
    code: list[Instruction]
    labels: dict[str, int]  # label -> number of an instruction

    @property
    def is_asynchronous(self) -> bool:
        """Return whether the kernel uses the asynchronous proxy."""
        return any(re.match(r"cp\.async\.bulk|wgmma|tcgen05", i.operation) for i in self.code)


def parse(text: str) -> Program:
    """Read the one kernel of a module."""
    text = re.sub(r"//[^\n]*", "", text)
    entry = re.search(r"\.entry\s+([\w$]+)\s*\(", text)
    if entry is None:
        raise Fault("the text must have an .entry")
    start = text.index("{", entry.end())
    head = text[entry.start() : start]
    parameters = re.findall(r"\.param\s[^\n,)]*?([\w$]+)(?:\[\d+\])?\s*[,)\n]", head)
    threads = re.search(r"\.(?:maxntid|reqntid)\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?", head)
    if threads is None:
        raise Fault("the kernel must say its number of threads by .maxntid or .reqntid")
    num_threads = 1
    for size in threads.groups():
        num_threads *= int(size or 1)
    body = re.sub(r"^\s*\.(loc|file|pragma|section)[^\n]*$", "", text[start + 1 :], flags=re.MULTILINE)
    end = body.find("$L__func_end")
    body = body[: end if end >= 0 else body.rindex("}")]
    program = Program(entry.group(1), parameters, num_threads, {}, {}, [], {})
    for statement in _statements(body, program.registers):
        if statement.endswith(":"):
            program.labels[statement[:-1]] = len(program.code)
        elif statement.startswith(".reg"):
            program.registers.update(_declared(statement))
        elif statement.startswith(".shared"):
            symbol = re.search(r"([\w$]+)(?:\[(\d*)\])?$", statement)
            assert symbol is not None
            program.shared[symbol.group(1)] = int(symbol.group(2) or 0)
        elif statement and not statement.startswith("."):
            program.code.append(instruction(statement))
    return program


def instruction(statement: str) -> Instruction:
    """Split an instruction into its operation, operands and guard."""
    guard, is_negated = None, False
    if guarded := re.match(r"@(!?)([%\w#$]+)\s+", statement):
        is_negated, guard = guarded.group(1) == "!", guarded.group(2)
        statement = statement[guarded.end() :]
    split = re.match(r"([\w.:]+)\s*(.*)", statement, re.DOTALL)
    if split is None:
        raise Fault(f"no instruction: {statement!r}")
    operands = tuple(split_list(split.group(2)))
    return Instruction(split.group(1), operands, guard, is_negated)


def split_list(text: str) -> list[str]:
    """Split a list at its commas, but for those in brackets or braces."""
    items, depth = [""], 0
    for char in text:
        depth += (char in "{[") - (char in "}]")
        if char == "," and depth == 0:
            items.append("")
        else:
            items[-1] += char
    items = [item.strip() for item in items]
    return items if items != [""] else []


def _declared(statement: str) -> Iterator[tuple[str, str]]:
    """Yield name and type of each register that a statement declares."""
    kind, names = re.fullmatch(r"\.reg\s*\.(\w+)\s+(.*)", statement, re.DOTALL).groups()  # type: ignore[union-attr]
    for name in names.split(","):
        if many := re.fullmatch(r"\s*([\w%$]+)<(\d+)>\s*", name):
            yield from ((f"{many.group(1)}{n}", kind) for n in range(int(many.group(2))))
        else:
            yield name.strip(), kind


def _statements(body: str, registers: dict[str, str]) -> Iterator[str]:
    """Yield statements and labels, names of inner scopes made unique; add the scopes' registers."""
    scopes: list[dict[str, str]] = []
    num_scopes, buffer, at = 0, "", 0
    while at < len(body):
        char = body[at]
        if char == "{" and not buffer.strip():
            num_scopes += 1
            inner = body[at + 1 : _closing(body, at)]
            scope = {}
            for statement in re.findall(r"\.reg[^;]+(?=;)", inner):
                for name, kind in _declared(statement):
                    scope[name] = f"{name}#{num_scopes}"
                    registers[scope[name]] = kind
            for label in re.findall(r"(?:^|[;{}\s])([A-Za-z_$][\w$]*):(?!:)", inner):
                scope[label] = f"{label}#{num_scopes}"
            scopes.append(scope)
            buffer = ""
        elif char == "}" and not buffer.strip():
            if scopes:
                scopes.pop()
            buffer = ""
        elif char == ";":
            statement = buffer.strip()
            buffer = ""
            if scopes and statement.startswith(".reg"):
                pass  # declared with its scope
            else:
                yield _renamed(statement, scopes)
        elif char == ":" and re.fullmatch(r"\s*[\w$]+", buffer) and body[at + 1 : at + 2] != ":":
            yield _renamed(buffer.strip(), scopes) + ":"
            buffer = ""
        elif char == "{":
            end = _closing(body, at)
            buffer += body[at : end + 1]
            at = end
        else:
            buffer += char
        at += 1


def _closing(body: str, at: int) -> int:
    depth = 0
    for n in range(at, len(body)):
        depth += {"{": 1, "}": -1}.get(body[n], 0)
        if depth == 0:
            return n
    raise Fault("a brace is not closed")


def _renamed(text: str, scopes: list[dict[str, str]]) -> str:
    """Replace the names that the innermost scopes declare."""

    def name_of(match: re.Match[str]) -> str:
        for scope in reversed(scopes):
            if match.group() in scope:
                return scope[match.group()]
        return match.group()

    return re.sub(rf"(?<![\w.%$]){NAME}", name_of, text) if scopes else text
