#!/usr/bin/env bash
# Run tests/gpu: those of two GPUs, then the others, spread over this machine's GPUs as workers become free.
#
#     scripts/gpu_tests.sh FOLDER      # FOLDER gets what each part printed; PYTEST_WORKERS=8 for each GPU; GPUS=2: the first two
#
# Each test has a line as soon as it is over, so that a run that is cut off names what failed.
# Tests of one GPU share it, but those marked `alone` measure it and have it to themselves. Exits with 1 if a part fails.
set -u
cd "$(dirname "$0")/.."
out=${1:?the folder for what the parts print}
mkdir -p "$out"
two=(ranks_on_devices ranks_that_end sharded_weights_on_device native_launch)
gpus=${GPUS:-$(nvidia-smi --list-gpus | wc -l)}
failed=0

part() { # NAME WORKERS FILE...
    local name=$1 workers=$2
    shift 2
    python3 -m pytest -v --tb=short -p no:benchmark -p no:cacheprovider -n "$workers" --dist loadfile --durations 12 "$@" \
        >"$out/$name.txt" 2>&1 || failed=1
}

files=()
for file in $(ls -S tests/gpu/test_*.py); do # the largest first
    name=$(basename "$file" .py)
    [[ $gpus -gt 1 && " ${two[*]} " == *" ${name#test_} "* ]] || files+=("$file")
done
if ((gpus > 1)); then # first: the tests of one torchrun take minutes
    CUDA_VISIBLE_DEVICES=0,1 part two 2 $(printf 'tests/gpu/test_%s.py ' "${two[@]}")
fi
HOSTWARD_TEST_GPUS=$gpus part one $((${PYTEST_WORKERS:-8} * gpus)) "${files[@]}"
grep -hE "^(FAILED|ERROR) |^=+ .*(passed|failed|error|no tests)" "$out"/*.txt
exit "$failed"
