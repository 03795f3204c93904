#!/bin/sh
# Everything that needs a GPU, one of Ampere or later, in five commands that each end within nine minutes, with a table.
#
#   sh benchmarks/gpu.sh [FOLDER]               what must be known first: one decode case, then decode attention of 256 rows of
#                                               1,126 tokens in bfloat16 and fp8, its peers, prompts, the engine's overhead
#   sh benchmarks/gpu.sh [FOLDER] --decode      decode attention: is it right on this chip, then how fast; its peers
#   sh benchmarks/gpu.sh [FOLDER] --sweep       its tile sizes, stages and partitions
#   sh benchmarks/gpu.sh [FOLDER] --prefill     attention of prompts, likewise
#   sh benchmarks/gpu.sh [FOLDER] --engine      the engine: a step's overhead, with and without CUDA graphs, then
#                                               decoding in the shapes of well-known models
#   sh benchmarks/gpu.sh [FOLDER] --products    products with a layer's weights: is the kernel right, and how fast beside
#                                               cuBLAS; then decoding with and without the loop over layers
#   sh benchmarks/gpu.sh [FOLDER] --smoke       all of these, tiny, on a CPU, but for --sweep
#
# What --engine shows of three choices that were made without a chip. step_overhead fails, and decode_shapes with it,
# where a GPU does not launch a graph of loops: the engine would log that and let the host turn its loop
# (EngineConfig.loop), and step_overhead's second run, without such graphs, says what that costs at least. The ms_per_step
# of one model at 1, 32, 128 and 256 rows are what EngineConfig.decode_widths can win: a step of 256 rows takes as long for
# one that runs. seconds_to_start is one compile; a cache that is not given a size may take a second one, which
# "jaxpaged generate --verbose" logs, with the sum that "jaxpaged info" prints.
#
# Results go to FOLDER, or $OUT, or out: a JSON line each, as soon as it is there, so a run that is stopped keeps
# what it has. A step ends at a limit of its own, at most STEP_SECONDS if that is set, and is killed where it hangs. One that
# fails does not keep the next from running, but the command fails in the end; without --smoke it fails at once where JAX
# uses no GPU that our kernels serve. Lines say what share is reached of what the
# card's datasheet says (pallas_kernels/gpu/targets.py), or of reading alone.
# Cases and peers that do not serve the GPU are named with the reason.
#
# It needs jax with CUDA, numpy, jaxtyping and absl-py, and flax for the engine. Of these, what is not installed may
# lie in a folder that PYTHONPATH names (pip install --target FOLDER absl-py), and so may FlashInfer and
# FlashAttention 3. JAXPAGED_NO_TRACE=1 times by the host's clock, should the GPU's profiler fail.
set -u
cd "$(dirname "$0")/.."
folder=${OUT:-out}
case "${1:-}" in
'' | --*) ;;
*) folder=$1 && shift ;;
esac
mode=${1:-}
mkdir -p "$folder" || exit 1
export XLA_PYTHON_CLIENT_PREALLOCATE=false # the peers in PyTorch need memory too
export JAX_COMPILATION_CACHE_DIR="${JAX_COMPILATION_CACHE_DIR:-${TMPDIR:-/tmp}/jaxpaged-gpu}" # for a second run
python=${PYTHON:-python3}
end=$(($(date +%s) + 525))
failed=

needs() {
    missing=$("$python" -c '
import importlib.util, sys
print(*(name for name in sys.argv[1:] if importlib.util.find_spec(name) is None))' "$@")
    [ -z "$missing" ] || {
        echo "gpu.sh: $python must be able to import $missing: install them, or name a folder in PYTHONPATH" >&2
        exit 1
    }
}

# step SECONDS FILE MODULE FLAGS...: runs a benchmark, for so long, or until the nine minutes end
step() {
    left=$((end - $(date +%s)))
    [ "$left" -gt "$1" ] && left=$1
    [ "$left" -gt "${STEP_SECONDS:-$left}" ] && left=$STEP_SECONDS
    file=$2 module=$3
    shift 3
    if [ "$left" -lt 1 ]; then
        echo "gpu.sh: no time left for $module" >&2
        failed="$failed $module"
    else
        timeout -k 2 "$left" "$python" -m "benchmarks.$module" --out "$folder/$file" "$@" $smoke || failed="$failed $module"
    fi
}

# What tells most comes first. A chip may be lent for ten minutes only.
first() {
    step 60 first.jsonl check_kernels --kernel decode --case head_major
    step 110 first.jsonl decode_attention --first
    [ -n "$smoke" ] || step 60 first.jsonl attention_peers --what decode --of jax --budget 30
    [ -n "$smoke" ] || step 60 first.jsonl attention_peers --what decode $torch --budget 30
    [ -n "$smoke" ] || step 90 first.jsonl prompt_attention --budget 60
    [ -n "$smoke" ] || step 80 first.jsonl step_overhead --gpu
    [ -n "$smoke" ] || step 60 first.jsonl check_kernels --kernel decode --case float8_e4m3fn_per_head --case int8_per_head
}

# In a smoke run one process stands for two that differ in flags: starting and compiling takes the time.
decode() {
    step 120 decode.jsonl check_kernels --kernel decode
    step 240 decode.jsonl decode_attention --budget 190 "$@"
    [ -n "$smoke" ] || step 60 decode.jsonl attention_peers --what decode --of jax --budget 40
    step 80 decode.jsonl attention_peers --what decode $torch --budget 60
}

prefill() {
    step 90 prefill.jsonl check_kernels --kernel prompts
    step 240 prefill.jsonl prompt_attention --budget 200
    [ -n "$smoke" ] || step 80 prefill.jsonl attention_peers --what prompts --of jax --budget 60
    step 80 prefill.jsonl attention_peers --what prompts $torch --budget 60
}

engine() {
    step 80 engine.jsonl step_overhead --gpu
    if [ -z "$smoke" ]; then
        flags=${XLA_FLAGS:-}
        export XLA_FLAGS="--xla_gpu_enable_command_buffer=+FUSION $flags"
        step 60 engine.jsonl step_overhead --gpu
        export XLA_FLAGS="$flags"
    fi
    step 400 engine.jsonl decode_shapes --budget 280 ${smoke:+--loop_over_layers}
}

# The kernel is the default of nothing but experts. Where its times are cuBLAS's, and ms_per_step of the loop over layers
# those of layers one by one, EngineConfig.loop_over_layers may be; seconds_to_start is what it is for.
products() {
    step 80 products.jsonl check_kernels --kernel products
    step 180 products.jsonl products --budget 150
    [ -n "$smoke" ] || for loop in --noloop_over_layers --loop_over_layers; do
        step 130 products.jsonl decode_shapes --models llama-3.1-8b-shaped --batches 256 $loop
    done
}

table() {
    "$python" -m benchmarks.record "$@"
    [ -z "$failed" ] || {
        echo "gpu.sh: not done, wrong, or stopped:$failed" >&2
        exit 1
    }
}

needs jax numpy jaxtyping absl flax
smoke= torch='--of torch'
if [ "$mode" = --smoke ]; then
    smoke=--smoke torch=
    export JAX_PLATFORMS=cpu JAX_DISABLE_MOST_OPTIMIZATIONS=true JAXPAGED_NATIVE=0 # for what compiles quickly
    first
    decode
    prefill
    engine
    products
    table "$folder/first.jsonl" "$folder/decode.jsonl" "$folder/prefill.jsonl" "$folder/engine.jsonl" "$folder/products.jsonl"
    exit
fi
# JAX looks for ptxas in NVIDIA's Python packages, or where this says.
if [ -z "${CUDA_ROOT:-}" ] && [ -x /usr/local/cuda/bin/ptxas ]; then
    "$python" -c '
import pathlib, sys
import nvidia
sys.exit(not any(file for place in nvidia.__path__ for file in pathlib.Path(place).glob("*/bin/ptxas")))' 2>&- ||
        export CUDA_ROOT=/usr/local/cuda
fi
"$python" -m benchmarks.device || exit 1
case "$mode" in
--prefill) prefill && table "$folder/prefill.jsonl" ;;
--engine) engine && table "$folder/engine.jsonl" ;;
--products) products && table "$folder/products.jsonl" ;;
'') first && table "$folder/first.jsonl" ;;
--decode) decode && table "$folder/decode.jsonl" ;;
--sweep) decode --sweep && table "$folder/decode.jsonl" ;;
*)
    echo "gpu.sh: $mode must be --decode, --sweep, --prefill, --engine, --products or --smoke" >&2
    exit 2
    ;;
esac
