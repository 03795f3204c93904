"""Programs of small integers that run for microseconds: their time in a test goes into compiling them."""

import functools

import jax

UNOPTIMIZED = {"xla_backend_optimization_level": 0}  # takes LLVM 40% less

jit = functools.partial(jax.jit, compiler_options=UNOPTIMIZED)
