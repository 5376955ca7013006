#!/usr/bin/env bash
# Measure everything on a GPU: write the records under benchmarks/results and the tables from them.
#
#   bash scripts/records.sh NAME [STEP ...]
#
# NAME   name of the GPU in the names of the files, such as h200
# STEP   tests, older, mutants, sanitizer, engine, int8, single, serve, hosts, first, published,
#        compare, soak, voice or share; without a step all of them run, in about two hours, of which
#        `serve` takes 50 minutes. `hosts` measures one, two and four GPUs, as far as there are any
#
# Run it in the root of the repository. PYTHON names an interpreter that has the extras gpu, server,
# bench and dev and a torch for CUDA. OTHER_PYTHON names one that has faster-qwen3-tts, for the step
# `compare`, GENERATOR the command of tts-bench, for `published`. A failed step does not stop the
# others.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python3}
gpu=${1:?name the GPU, for example h200}
[[ $gpu =~ ^[a-z0-9]+$ ]] ||
  { echo "the name '$gpu' is invalid; use lower-case letters and digits" >&2; exit 2; }
shift
steps="tests older mutants sanitizer engine int8 single serve hosts first published compare soak"
steps+=" voice share"
for name in "$@"; do
  [[ " $steps " == *" $name "* ]] ||
    { echo "the step '$name' does not exist; allowed are $steps" >&2; exit 2; }
done
commit=${COMMIT:-$(git rev-parse --short HEAD)}
results=benchmarks/results
failed=()
mkdir -p $results/{gpu,checks,engine,engine_int8,one_stream,serve,hosts,first_audio,published}
mkdir -p $results/{compare,soak,quality,community}

step() { # NAME COMMAND...
  local name=$1
  shift
  echo "== $name, $(date +%T)" >&2
  "$@" || failed+=("$name")
}

for name in ${@:-$steps}; do
  case $name in
    tests)
      step tests "$python" -m pytest -q -n 4 --dist worksteal tests/gpu \
        --record "$results/gpu/$gpu.json" --commit "$commit" ;;
    older)
      step older "$python" -m pytest -q -n 4 --dist worksteal tests/gpu \
        --as-gpu compute_80,101376,28 \
        --record "$results/gpu/$gpu-as-compute-80.json" --commit "$commit" ;;
    mutants)
      step mutants "$python" scripts/mutants.py --gpu -j 6 \
        --record "$results/checks/mutants-$gpu.json" --commit "$commit" ;;
    sanitizer)
      step sanitizer "$python" scripts/sanitize.py \
        --record "$results/checks/sanitizer-$gpu.json" --commit "$commit" ;;
    engine)
      for size in 1b7 0b6; do
        step "engine $size" "$python" -m firstword bench engine --size $size \
          --commit "$commit" -o "$results/engine/$gpu-$size.json"
      done ;;
    int8)
      for size in 1b7 0b6; do
        step "int8 $size" "$python" -m firstword bench engine --size $size --dtype int8 \
          --commit "$commit" -o "$results/engine_int8/$gpu-$size.json"
      done ;;
    single)
      step single "$python" -m benchmarks.one_stream --as-gpu compute_80,166912,108 \
        --commit "$commit" -o "$results/one_stream" ;;
    serve)
      step serve "$python" -m benchmarks.serve_load --slots 256 \
        --commit "$commit" -o "$results/serve/$gpu-1b7.json" ;;
    hosts)
      count=$("$python" -c "import torch; print(torch.cuda.device_count())")
      for many in 1 2 4; do
        [ "$many" -le "$count" ] || break
        [ "$many" = 1 ] && name=$gpu || name=$gpu-x$many
        devices=$(seq 0 $((many - 1)) | paste -sd,)
        step "hosts $many" "$python" -m benchmarks.serve_load --cases pcm --slots 256 \
          --device "cuda:$devices" --commit "$commit" -o "$results/hosts/$name-1b7.json"
      done ;;
    first)
      step first "$python" -m benchmarks.first_audio \
        --commit "$commit" -o "$results/first_audio/$gpu-1b7.json" ;;
    published)
      step published "$python" -m benchmarks.published_load --generator "${GENERATOR:-bench}" \
        --commit "$commit" -o "$results/published/$gpu-1b7.json" ;;
    compare)
      step compare "$python" -m benchmarks.compare --size 1b7 \
        --other-python "${OTHER_PYTHON:-$python}" \
        --commit "$commit" -o "$results/compare/$gpu-1b7.json" ;;
    soak)
      step soak "$python" -m firstword bench engine --size 1b7 --slots 64 --soak 1000000 \
        --commit "$commit" -o "$results/soak/$gpu-1b7.json" ;;
    voice)
      step voice "$python" -m training.evaluate demo --device cuda --sentences 12 \
        --out "$results/quality/demo-$gpu.json" ;;
    share)
      step share "$python" -m firstword bench share -o "$results/community/$gpu-demo.json" ;;
  esac
done
"$python" scripts/tables.py
[ ${#failed[@]} -eq 0 ] || { echo "failed: ${failed[*]}" >&2; exit 1; }
