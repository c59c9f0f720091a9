#!/bin/sh
# Builds the native library with g++ (or $CXX) alone: native/build.sh OUT_DIR, for example native/build.sh src/hostward/_native
set -eu
here=$(cd "$(dirname "$0")" && pwd)
out=${1:?usage: native/build.sh OUT_DIR}
cxx=${CXX:-g++}
command -v "$cxx" >/dev/null || {
    echo "hostward needs a C++ compiler, and there is no $cxx: install g++, or set CXX to another" >&2
    exit 1
}
mkdir -p "$out"
objects=$(mktemp -d)
trap 'rm -rf "$objects"' EXIT

sanitize=${HOSTWARD_SANITIZE:+-g -fsanitize=$HOSTWARD_SANITIZE -fno-sanitize-recover=all}
flags="-std=c++17 -O3 -fPIC -Wall -Wextra -fvisibility=hidden -ffp-contract=off -fno-fast-math -fno-math-errno -fno-trapping-math \
-fno-strict-aliasing -I$here/include -I$here/src"
compilers=
compile() { # SOURCE FLAGS...
    source=$1
    shift
    # shellcheck disable=SC2086
    "$cxx" $flags $sanitize "$@" -c "$here/src/$source.cpp" -o "$objects/$source.o" &
    compilers="$compilers $!"
}

for source in accumulate adamw clocked copy isa issue lanes memory norm; do compile "$source"; done
compile kernels_scalar -fno-tree-vectorize -fno-tree-slp-vectorize
case $(uname -m) in
x86_64)
    compile kernels_avx2 -mavx2 -mprfchw
    compile kernels_avx512 -mavx512f -mavx512bw -mavx512dq -mavx512vl -mprfchw -mprefer-vector-width=512
    ;;
aarch64) compile kernels_neon ;;
esac
for compiler in $compilers; do wait "$compiler"; done # the first that failed ends this script
# shellcheck disable=SC2086
"$cxx" $sanitize -shared -Wl,--version-script="$here/exports.map" -o "$out/.libhostward_native.so.new" "$objects"/*.o -pthread
# Renamed, not overwritten: a process that has the old one open keeps it whole.
mv "$out/.libhostward_native.so.new" "$out/libhostward_native.so"
