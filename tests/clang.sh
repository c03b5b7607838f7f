#!/usr/bin/env bash
# A line of each kind is C++ to clang++ as well as to g++, which builds the CPU backend of the other tests. Skipped
# without it.
# usage: clang.sh CONFIGS.TSV, the lines with their knobs as CMake has read them
set -u
cd "$(dirname "$0")/.." || exit 1
command -v clang++ >/dev/null || exit 77
[ -s "$1" ] || { echo "$1: no lines in it"; exit 1; }
kinds='^(scalar_(minimal|sync2|persistent|fast_exp|bf16)|wmma_(qk|pv|ws2|all)|mma_(lazy3|split4|fast_exp|d256)|cublas'
kinds+='|wgmma_(plain|ws|overlap|d128_turns|d128_causal|fast_exp|split4|split2|swap32|d256)|hopper)$'
awk -F'\t' -v kinds="$kinds" '$1 ~ kinds { gsub(/[^ ]+/, " -D&", $4); print "-DSDPA_CONFIG_NAME=" $1 $4 }' "$1" |
  xargs -P "$(nproc)" -L1 clang++ -std=c++17 -fsyntax-only -w -Isimt -x c++ sdpa.cu
