#!/bin/sh
# Everything that needs a Hopper GPU, in two commands of under nine minutes each. Results go to the folder given
# (default: out).
#
#   sh benchmarks/gpu.sh [FOLDER] [--sweep]     the kernels: are they right on this chip, then decode attention
#   sh benchmarks/gpu.sh [FOLDER] --engine      the engine: a step's overhead, with and without CUDA graphs, then
#                                               decoding in the shapes of well-known models
#   sh benchmarks/gpu.sh [FOLDER] --smoke       the same steps, tiny, on a CPU
#
# It needs jax with CUDA, numpy, jaxtyping and absl-py, and flax for the engine. Of these, what is not installed may
# lie in a folder that PYTHONPATH names (pip install --target FOLDER absl-py).
set -eu
cd "$(dirname "$0")/.."
folder=out
case "${1:-}" in
'' | --*) ;;
*) folder=$1 && shift ;;
esac
mkdir -p "$folder"
export XLA_PYTHON_CLIENT_PREALLOCATE=false # the peers in PyTorch need memory too
python=${PYTHON:-python3}

needs() {
    missing=$("$python" -c '
import importlib.util, sys
print(*(name for name in sys.argv[1:] if importlib.util.find_spec(name) is None))' "$@")
    [ -z "$missing" ] || {
        echo "gpu.sh: $python must be able to import $missing: install them, or name a folder in PYTHONPATH" >&2
        exit 1
    }
}

kernels() {
    timeout 150 "$python" -m benchmarks.check_kernels --out "$folder/check_kernels.jsonl" $smoke
    timeout 385 "$python" -m benchmarks.decode_attention --budget 240 --out "$folder/decode_attention.jsonl" "$@"
}

engine() {
    needs flax
    timeout 100 "$python" -m benchmarks.step_overhead --out "$folder/step_overhead.jsonl" $smoke
    XLA_FLAGS=--xla_gpu_enable_command_buffer=+FUSION \
        timeout 60 "$python" -m benchmarks.step_overhead --out "$folder/step_overhead.jsonl" $smoke
    timeout 370 "$python" -m benchmarks.decode_shapes --budget 280 --out "$folder/decode_shapes.jsonl" $smoke
}

needs jax numpy jaxtyping absl
case " $* " in
*" --smoke "*)
    smoke=--smoke
    engine
    kernels --smoke
    ;;
*" --engine "*)
    smoke=
    engine
    ;;
*)
    smoke=
    kernels "$@"
    ;;
esac
