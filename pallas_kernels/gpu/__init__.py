"""Pallas Mosaic GPU kernels: attention of decode steps and of prompts, and products, since Ampere.

`decode/` and `prompt/` have a kernel each: `attention.py` is the kernel and its launcher, `program.py` the
static shape and the memory of one program, `fetch.py` the producer, `softmax.py` the consumer. `attention.py`
has what both share, `dense_product.py` and `quantised_product.py` have the products' kernels.

Primitives that depend on the generation of GPU lie apart, so that another generation has one place each to
change: `primitives.py` (which of them a kernel has), `common.py` (layouts of shared memory and registers,
products, widening, stores), `cp_async.py` (copies and barriers without TMA), `prompt/tensor_memory.py`
(products by tcgen05), `int4_cache.py` (tiles of 4 bits a number), `arrival_counter.py` (which program
finishes last), `tuning.py` (tile sizes and depths).
`targets.py` lists the generations.
"""
