#!/bin/sh
# Everything that needs a Hopper GPU, in one command and under nine minutes: the kernels' tests on the chip, then the
# decode benchmark until its budget is spent. Results go to the folder given (default: out).
#
#   sh benchmarks/gpu.sh [FOLDER] [--sweep]     on a GPU
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

case " $* " in
*" --smoke "*) "$python" -m pytest -q tests/kernels/test_gpu.py -rs ;;
*) timeout 120 "$python" -m pytest -q -m gpu tests/kernels/test_gpu.py ;;
esac
timeout 420 "$python" -m benchmarks.decode_attention --budget 330 --out "$folder/decode_attention.jsonl" "$@"
