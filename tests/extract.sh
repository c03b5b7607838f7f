#!/usr/bin/env bash
# run_all.sh extract: files that compile alone, know no knob, and give the machine code of their lines; two of them in
# one program; and what it refuses. usage: extract.sh BUILD_DIR [NAME...]
# BUILD_DIR has the objects of the lines' kernels (target sdpa_kernels). Without names one line of each family.
set -u
cd "$(dirname "$0")/.." || exit 1
. tests/expect.sh
. tools/gates.sh
build=$1
shift
[ $# -gt 0 ] || set -- scalar_minimal wmma_all mma_lazy3 wgmma_plain wgmma_192x128 hopper cublas
nvcc=$(command -v nvcc || echo "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc")
knobs=$(sed -n 's/^  X(\([A-Z_]*\), .*/\1/p' sdpa.cu | paste -sd'|')
[ -n "$knobs" ] || fail "no knobs in sdpa.cu"

# is_the_line NAME: the file that extract prints gives the line's machine code, for every architecture of its object.
is_the_line() {
  local file=$dir/$1.cu arch gencode=() object=$build/CMakeFiles/kernel_$1.dir/tools/library.cu.o
  ./run_all.sh extract "$1" >"$file" 2>"$dir/$1.err" || { fail "$1: $(cat "$dir/$1.err")"; return; }
  # Below the first #include only comments and sentences may name a knob.
  sed -n '/^#include/,$p' "$file" | sed 's,//.*,,; s,"[^"]*",,g' >"$dir/$1.code"
  grep -nwE "$knobs|SDPA_(KNOB|REFUSE|SIMT|NAMESPACE)[A-Z_]*|[A-Z_]*_(text|changed)" "$dir/$1.code" && fail "$1: knobs are left"
  awk '$0 == "" && last == "" { print FILENAME ": " FNR ": two blank lines"; bad = 1 } { last = $0 } END { exit !bad }' \
    "$file" && fail "$1: two blank lines"
  grep -q "Permission is hereby granted" "$file" || fail "$1: no license"
  while read -r arch; do gencode+=("-gencode" "arch=compute_$arch,code=sm_$arch"); done < <(
    ptxas_report "$build/log/kernel_$1.log" | sed -n 's/^sm_\([0-9a-z]*\) .*/\1/p' | sort -u)
  "$nvcc" -O3 -DNDEBUG -std=c++17 --no-compress "${gencode[@]}" -c "$file" -o "$dir/$1.o" >"$dir/$1.err" 2>&1 ||
    { fail "$1 does not compile alone: $(grep -m1 error "$dir/$1.err")"; return; }
  [ -n "$(machine_code "$object")" ] || fail "$1: no object in $build"
  [ "$(machine_code "$dir/$1.o" | tr ' ' '\n' | sort)" = "$(machine_code "$object" | tr ' ' '\n' | sort)" ] ||
    fail "$1: not the line's machine code"
}
running=()
for name in "$@"; do
  if [ ${#running[@]} -ge "$(nproc)" ]; then
    wait "${running[0]}" || failed=1
    running=("${running[@]:1}")
  fi
  (is_the_line "$name"; exit $failed) &
  running+=($!)
done
for job in "${running[@]}"; do wait "$job" || failed=1; done

# Two in one program; the command that stands on top of a file compiles it.
./run_all.sh extract scalar_minimal >"$dir/my_kernel.cu"
eval "$(sed -n "s,^// Compile: nvcc,\"$nvcc\",p" "$dir/my_kernel.cu" | sed "s, my_kernel.cu, $dir/my_kernel.cu -o $dir/first.o,")" ||
  fail "the command on top of scalar_minimal does not compile it"
./run_all.sh extract scalar_vec8 --namespace other >"$dir/other.cu"
{
  echo '#include "other.cu"'
  echo 'namespace scalar_minimal { struct SdpaParams; struct SdpaStatus; SdpaStatus sdpa_forward(const SdpaParams&, cudaStream_t); }'
  echo 'int main() { return other::sdpa_forward({}, 0).ok() ? 0 : 1; }'
} >"$dir/program.cu"
"$nvcc" -std=c++17 -arch=sm_80 -w -I"$dir" "$dir/program.cu" "$dir/my_kernel.cu" -o "$dir/program" || fail "two extracts do not link"

extract=(./run_all.sh extract)
expect 2 "extract: which line?" "${extract[@]}"
expect 2 "mma_lasy3: no line of configs.txt has that name; it has: " "${extract[@]}" mma_lasy3
expect 2 "extract takes one line, and mma_lazy and mma_lazy3 are two" "${extract[@]}" mma_lazy mma_lazy3
expect 2 "extract: --frob: no such option" "${extract[@]}" mma_lazy --frob
expect 2 "extract: --namespace: its value is missing" "${extract[@]}" mma_lazy --namespace
expect 2 "extract: --namespace 1x: want a name of C++" "${extract[@]}" mma_lazy --namespace 1x
expect 2 "missing.txt: there is no such file" env SDPA_CONFIGS="$dir/missing.txt" "${extract[@]}" mma_lazy
cat >"$dir/bad.txt" <<'EOT'
typo BLOK_N=64
illegal HEAD_DIM=96
words BLOCK_N
EOT
expect 2 "bad.txt:1: no knob is called BLOK_N" env SDPA_CONFIGS="$dir/bad.txt" "${extract[@]}" typo
expect 2 "HEAD_DIM: not a legal value; it takes one of: 64 128 256" env SDPA_CONFIGS="$dir/bad.txt" "${extract[@]}" illegal
expect 2 "bad.txt:3: BLOCK_N has no value: write BLOCK_N=VALUE" env SDPA_CONFIGS="$dir/bad.txt" "${extract[@]}" words
./run_all.sh extract scalar_racy 2>&1 >/dev/null | grep -qF "scalar_racy is marked expect=FAIL" || fail "scalar_racy: no warning"
exit $failed
