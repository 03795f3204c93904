"""Grammars of structured output, on the host: what may be written, and tables of it for the compiled loop.

Nothing here imports the engine or JAX. A regular language becomes a `TokenAutomaton`, whose tables the
compiled loop reads. A recursive one becomes a `Language`, which the host follows, or an automaton to a few
levels (`jaxpaged.grammar.compile` has the rule).
"""
