#!/usr/bin/env bash
# Every line is C++ to clang++ as well as to g++, which builds the CPU backend of the other tests. Skipped without it.
set -u
cd "$(dirname "$0")/.." || exit 1
command -v clang++ >/dev/null || exit 77
sed 's/#.*//' configs.txt | awk 'NF {
  knobs = "-DSDPA_CONFIG_NAME=" $1
  for (i = 2; i <= NF; i++) if ($i !~ /^(gate:|arch=|expect=)/) knobs = knobs " -D" $i
  print knobs }' |
  xargs -P "$(nproc)" -L1 clang++ -std=c++17 -fsyntax-only -w -Isimt -x c++ sdpa.cu
