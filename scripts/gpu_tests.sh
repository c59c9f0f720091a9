#!/usr/bin/env bash
# Run tests/gpu: tests of one GPU spread over this machine's GPUs, then those of two.
#
#     scripts/gpu_tests.sh FOLDER      # FOLDER gets what each part printed; PYTEST_WORKERS=8 for each GPU; GPUS=2: the first two
#
# Tests measure the memory of their GPU, so those with the same temporary folder wait for one another: each part has its
# own. Exits with 1 if a part fails.
set -u
cd "$(dirname "$0")/.."
out=${1:?the folder for what the parts print}
mkdir -p "$out"
two=(ranks_on_devices ranks_that_end sharded_weights_on_device native_launch)
gpus=${GPUS:-$(nvidia-smi --list-gpus | wc -l)}
failed=0

part() { # NAME DEVICES WORKERS FILE...
    local name=$1 devices=$2 workers=$3 temp code
    shift 3
    temp=$(mktemp -d)
    TMPDIR=$temp CUDA_VISIBLE_DEVICES=$devices python3 -m pytest -q -p no:benchmark -p no:cacheprovider -n "$workers" --dist loadfile \
        --durations 12 "$@" >"$out/$name.txt" 2>&1
    code=$?
    rm -rf "$temp"
    return "$code"
}

files=()
for file in $(ls -S tests/gpu/test_*.py); do # of similar size in turn
    name=$(basename "$file" .py)
    [[ $gpus -gt 1 && " ${two[*]} " == *" ${name#test_} "* ]] || files+=("$file")
done
running=()
for ((gpu = 0; gpu < gpus; gpu++)); do
    mine=()
    for ((i = gpu; i < ${#files[@]}; i += gpus)); do mine+=("${files[i]}"); done
    part "gpu$gpu" "$gpu" "${PYTEST_WORKERS:-8}" "${mine[@]}" &
    running+=($!)
done
for process in "${running[@]}"; do wait "$process" || failed=1; done
if ((gpus > 1)); then
    part two 0,1 2 $(printf 'tests/gpu/test_%s.py ' "${two[@]}") || failed=1
fi
grep -hE "^(FAILED|ERROR)|passed|failed|no tests" "$out"/*.txt
exit "$failed"
