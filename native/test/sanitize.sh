#!/bin/sh
# Builds and runs native_test.cpp under the address, undefined-behaviour and thread sanitizers.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
native=$(dirname "$here")
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT
for sanitizers in address,undefined thread; do
    HOSTWARD_SANITIZE=$sanitizers "$native/build.sh" "$build"
    "${CXX:-g++}" -std=c++17 -g -fsanitize="$sanitizers" -I"$native/include" "$here/native_test.cpp" \
        -L"$build" -lhostward_native -Wl,-rpath,"$build" -pthread -o "$build/native_test"
    "$build/native_test"
    echo "$sanitizers: passed"
done
