"""Parsers of tool calls that a grammar forces: JSON of one form, whatever form the model writes by itself."""

from jaxpaged.serve.parsers.base import Arguments, Begin, Parser, Reads, Source, Text
from jaxpaged.serve.parsers.json_calls import SPACE, call_object
from jaxpaged.serve.parsers.registry import forced_parser

REQUIRED, NAMED = "forced_calls", "forced_arguments"


@forced_parser(REQUIRED)
class ForcedCalls(Parser):
    """Reads a JSON list of calls, each an object with a name and parameters."""

    def read(self, source: Source) -> Reads[None]:
        """Yield the calls; an answer that ends early has those that have begun."""
        yield from source.run(SPACE)
        yield from source.takes("[")
        while True:
            yield from source.run(SPACE)
            if not (yield from call_object(source)):
                break
            yield from source.run(SPACE)
            if not (yield from source.takes(",")):
                break
        yield from source.rest(lambda text: Text(""))


@forced_parser(NAMED)
class ForcedArguments(Parser):
    """Reads an answer that is the arguments of the only tool."""

    def read(self, source: Source) -> Reads[None]:
        """Yield the fragments of the call as its text arrives."""
        yield Begin(self.tools[0]["function"]["name"])
        yield from source.rest(Arguments)
