#!/usr/bin/env bash
# The shared library of a line has the C functions that a caller loads. usage: library.sh LIBRARY
for name in sdpa_library_params_bytes sdpa_library_workspace_bytes sdpa_library_forward; do
  nm -D --defined-only "$1" | grep -q " T $name\$" || { echo "$1 has no function $name"; exit 1; }
done
