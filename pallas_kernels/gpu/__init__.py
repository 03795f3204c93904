"""Pallas Mosaic GPU kernels: attention of decode steps and of prompts, since Ampere, and products, on Hopper.

`decode/` and `prompt/` have a kernel each: `attention.py` is the kernel and its launcher, `program.py` the
static shape and the memory of one program, `fetch.py` the producer, `softmax.py` the consumer. `attention.py`
has what both share, `dense_product.py` and `quantised_product.py` have the products' kernels.

Primitives that depend on the generation of GPU lie apart, so that another generation has one place each to
change: `common.py` (layouts of shared memory and registers, products, widening, stores, waits),
`cp_async.py` (copies and barriers without TMA), `int4_cache.py` (tiles of 4 bits a number),
`arrival_counter.py` (which program finishes last), `tuning.py` (tile sizes and depths).
`targets.py` lists the generations, and which of them have kernels.
"""
