"""The exception for what a program may not do on the machine of PTX."""


class Fault(Exception):
    """An act that PTX forbids or leaves open, or an instruction that the interpreter does not know."""
