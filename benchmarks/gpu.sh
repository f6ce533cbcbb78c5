#!/usr/bin/env bash
# Everything that needs a GPU, on the installed package: tests, compute-sanitizer, records of every
# suite. From the checkout's root:
#
#   pip install '.[test,bench]' && benchmarks/gpu.sh OUT [STEP...]
#
# STEP is one or more of: tests sanitizer ladder suites functions sweep examples residues tune, and devices,
# which wants several GPUs. Without any, all run but the last three. OUT receives the logs and the records. Each
# step is bounded, so that one that hangs does not take the others with it. Nothing in the checkout
# changes: copy OUT/*.jsonl to benchmarks/results/ and run `python -m jax_tcgemm bench render`.
set -uo pipefail
out=$(realpath "${1:?the folder for logs and records}")
shift
steps=${*:-tests sanitizer ladder suites functions sweep examples}
mkdir -p "$out"
revision=$(git rev-parse --short HEAD 2>/dev/null || echo unknown)
failed=()

step() { # NAME SECONDS COMMAND...
  local name=$1 seconds=$2
  shift 2
  echo "== $name"
  timeout "$seconds" "$@" >"$out/$name.txt" 2>&1 || failed+=("$name")
  tail -n 5 "$out/$name.txt"
}

bench() { # NAME SECONDS ARGUMENTS...
  step "$1" "$2" python3 -m jax_tcgemm bench "${@:3}" --out "$out/$1.jsonl" --revision "$revision"
}

for each in $steps; do
  case $each in
  # Most of a test is XLA's compilation, so several processes share the GPU, but for what needs most of
  # its memory or its time.
  tests)
    alone=(tests/gpu/test_large.py tests/gpu/test_autotune.py)
    step tests 1200 python3 -m pytest -m gpu tests "${alone[@]/#/--ignore=}" -q -p no:cacheprovider
    step tests-alone 300 python3 -m pytest -m gpu "${alone[@]}" -n 0 -q -p no:cacheprovider
    ;;
  sanitizer) step sanitizer 900 python3 -m pytest -m sanitizer tests -n 4 -q -p no:cacheprovider ;;
  ladder)
    bench squares 200 --suite squares --impl all --budget 0.2
    bench other-dtypes 200 --suite squares_f32,squares_f64,squares_tf32,squares_int8 --impl all --budget 0.15
    bench overhead 60 overhead
    ;;
  suites)
    bench suites 700 --suite squares,squares_f16,squares_tf32,llama,deepseek128,decode,unaligned,batched,longk \
      --impl auto --budget 0.6 --repeats 100
    ;;
  # Problems that nobody chose, and a new seed each time: the promise that the default is never slower than XLA.
  sweep) bench sweep 900 sweep --limit 800 ;;
  residues) bench residues 900 --suite residues --budget 0.3 ;;
  functions)
    bench fused 420 --suite fused,gated,mlp,functions,elementwise
    # XLA's search among Triton's kernels takes minutes for each of its dense expansions.
    XLA_FLAGS=--xla_gpu_enable_triton_gemm=false bench moe 300 --suite moe
    bench quantize 120 --suite quantize
    bench scaled 400 --suite scaled,block_formats
    bench symmetric 120 --suite symmetric
    bench blas 200 --suite blas
    bench tensor 300 --suite einsum,tensor
    ;;
  examples)
    step train_gpt 300 python3 examples/train_gpt.py --size 100m --stock --accelerate --out "$out/train_gpt"
    step train_gpt-muon 200 python3 examples/train_gpt.py --size 100m --stock --accelerate --optimizer muon --steps 100 \
      --out "$out/train_gpt-muon"
    step train_moe 300 python3 examples/train_moe.py --size 100m --out "$out/train_moe"
    ;;
  devices)
    step devices 400 python3 -m pytest -m gpu tests/gpu/test_sharding.py tests/gpu/test_several_devices.py \
      tests/gpu/test_all_reduce.py \
      -n 0 -q -p no:cacheprovider
    count=$(nvidia-smi --list-gpus | wc -l)
    bench parallel 300 parallel --devices "$count" --chunks auto,1,4
    bench decode 100 decode --devices "$count"
    for axis in data model; do
      step "train_gpt-$axis" 300 python3 examples/train_gpt.py --size 100m --stock --mesh "$axis=$count" --out "$out/train_gpt-$axis"
    done
    ;;
  tune)
    step tune 900 python3 -m jax_tcgemm tune --suite squares,squares_tf32,llama,deepseek128,decode,unaligned,batched,longk \
      --budget 1.5 --no-xla --out "$out/h200.json" --provenance "python -m jax_tcgemm tune, revision $revision"
    step regret 600 python3 -m jax_tcgemm bench regret --out "$out/regret.csv" --limit 580
    ;;
  *) failed+=("unknown step $each") ;;
  esac
done

if ((${#failed[@]})); then
  printf 'failed: %s\n' "${failed[@]}"
  exit 1
fi
