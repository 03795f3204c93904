"""Engine options with few and small shapes, for quick compiling; the same as in test_llm.py."""

FAST = ["--max-num-seqs", "4", "--block-size", "8", "--dtype", "float32", "--max-num-batched-tokens", "132"]
FAST += ["--num-blocks", "65"]
