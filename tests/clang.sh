#!/usr/bin/env bash
# Every line is C++ to clang++ as well as to g++, which builds the CPU backend of the other tests. Skipped without it.
# usage: clang.sh CONFIGS.TSV, the lines with their knobs as CMake has read them
set -u
cd "$(dirname "$0")/.." || exit 1
command -v clang++ >/dev/null || exit 77
[ -s "$1" ] || { echo "$1: no lines in it"; exit 1; }
awk -F'\t' '{ gsub(/[^ ]+/, " -D&", $4); print "-DSDPA_CONFIG_NAME=" $1 $4 }' "$1" |
  xargs -P "$(nproc)" -L1 clang++ -std=c++17 -fsyntax-only -w -Isimt -x c++ sdpa.cu
