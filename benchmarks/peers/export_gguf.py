"""Writes a GGUF file with weights of another type.

    python benchmarks/peers/export_gguf.py model.gguf out.gguf --dtype float32

For llama.cpp, so that it computes with the same weights as the engines it is compared with.
"""

import argparse
import ctypes
import os
from pathlib import Path

import llama_cpp  # type: ignore[import-not-found]

_FILE_TYPES = {
    "float32": llama_cpp.LLAMA_FTYPE_ALL_F32,
    "bfloat16": llama_cpp.LLAMA_FTYPE_MOSTLY_BF16,
    "q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0,
    "q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0,
}


def export(source: Path, target: Path, dtype: str) -> None:
    """Write `source` to `target` with its matrices in `dtype`; vectors stay in float32.

    Raises: RuntimeError if llama.cpp cannot read the one or write the other.
    """
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = _FILE_TYPES[dtype]
    params.allow_requantize = True
    if llama_cpp.llama_model_quantize(os.fsencode(source), os.fsencode(target), ctypes.byref(params)):
        raise RuntimeError(f"llama.cpp could not write {source} as {target}: see its message above")


def main() -> None:
    """Read the command line and export."""
    parser = argparse.ArgumentParser(description="Write a GGUF file with weights of another type.")
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--dtype", choices=list(_FILE_TYPES), required=True)
    args = parser.parse_args()
    export(args.source, args.target, args.dtype)


if __name__ == "__main__":
    main()
