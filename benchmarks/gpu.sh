#!/bin/sh
# Everything that needs a Hopper GPU, in two commands of under nine minutes each. Results go to the folder given
# (default: out).
#
#   sh benchmarks/gpu.sh [FOLDER] [--sweep]     the kernels: their tests on the chip, then decode attention
#   sh benchmarks/gpu.sh [FOLDER] --engine      the engine: a step's overhead, with and without CUDA graphs, then
#                                               decoding in the shapes of well-known models
#   sh benchmarks/gpu.sh [FOLDER] --smoke       the same steps, tiny, on a CPU
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

engine() {
    timeout 100 "$python" -m benchmarks.step_overhead --out "$folder/step_overhead.jsonl" "$@"
    XLA_FLAGS=--xla_gpu_enable_command_buffer=+FUSION \
        timeout 60 "$python" -m benchmarks.step_overhead --out "$folder/step_overhead.jsonl" "$@"
    timeout 370 "$python" -m benchmarks.decode_shapes --budget 280 --out "$folder/decode_shapes.jsonl" "$@"
}

case " $* " in
*" --engine "*)
    engine
    exit
    ;;
*" --smoke "*)
    "$python" -m pytest -q tests/kernels/test_gpu.py -rs
    engine --smoke
    ;;
*) timeout 120 "$python" -m pytest -q -m gpu tests/kernels/test_gpu.py ;;
esac
timeout 420 "$python" -m benchmarks.decode_attention --budget 330 --out "$folder/decode_attention.jsonl" "$@"
