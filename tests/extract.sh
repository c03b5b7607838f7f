#!/usr/bin/env bash
# run_all.sh extract: files that stand alone, give the machine code of their lines and know no knob; and what it
# refuses. usage: extract.sh
set -u
cd "$(dirname "$0")/.." || exit 1
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
failed=0
fail() { echo "$*"; failed=1; }
knobs=$(sed -n 's/^  X(\([A-Z_]*\), .*/\1/p' sdpa.cu | paste -sd'|')
[ -n "$knobs" ] || fail "no knobs in sdpa.cu"

# looks_right NAME ARCH
looks_right() {
  local name=$1 arch=$2 file=$dir/$1.cu err=$dir/$1.err nvcc
  ./run_all.sh extract "$name" --arch "$arch" --verify >"$file" 2>"$err" || fail "$name: $(cat "$err")"
  [ -s "$file" ] || { fail "$name: nothing was printed"; return; }
  [ -s "$err" ] && fail "$name: words without need: $(cat "$err")"
  # Comments above the first #include name the line and its knobs; below nothing may.
  local code=$dir/$1.code
  sed -n '/^#include/,$p' "$file" >"$code"
  grep -nwE "$knobs|SDPA_[A-Z_]*|[A-Z_]*_text|[A-Z_]*_changed" "$code" && fail "$name: knobs are left"
  grep -nE 'simt|SIMT' "$code" && fail "$name: the CPU backend is left"
  grep -nE 'if constexpr \((!?Build|true|false)|std::conditional|class B\b|<B>|\bB::' "$code" &&
    fail "$name: something is left that the line decides"
  grep -nE '(&&|\|\|) (true|false)\b|\b(true|false) (&&|\|\|)|if \((true|false)\)' "$code" &&
    fail "$name: a condition that is decided is left"
  grep -nE '\{ *\}$|^ *;$' "$code" | grep -vE '\) (const )?\{ *\}$|(while|:).*\{|\{\}$' && fail "$name: an empty statement"
  awk '$0 == "" && last == "" { print FILENAME ": " FNR ": two blank lines"; bad = 1 } { last = $0 } END { exit !bad }' \
    "$file" && fail "$name: two blank lines"
  grep -q '^// Copyright' "$file" || fail "$name: no licence line"
  grep -q "run_all.sh extract $name" "$file" || fail "$name: not said how it was made"
  if [ "$name" = scalar_minimal ]; then
    nvcc=$(command -v nvcc || echo "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc")
    (cd "$dir" && "$nvcc" -std=c++17 -arch=sm_90a -c "$file" -o alone.o) || fail "$name does not compile alone"
  fi
}
# extracted NAME ARCH, in the background: one line of each family and of each way that a kernel can be cut.
running=()
extracted() {
  if [ ${#running[@]} -ge "$(nproc)" ]; then
    wait "${running[0]}" || failed=1
    running=("${running[@]:1}")
  fi
  (looks_right "$1" "$2"; exit $failed) &
  running+=($!)
}
extracted scalar_minimal 80
extracted wmma_all 90a
extracted mma_lazy3 80
extracted wgmma_192x128 90a
extracted cublas 90a
for job in "${running[@]}"; do wait "$job" || failed=1; done
grep -q '^#include <cublas_v2.h>' "$dir/cublas.cu" || fail "cublas: no header"
grep -qE 'cublas(_v2|[A-Z])|Cublas' "$dir/scalar_minimal.cu" && fail "scalar_minimal: cuBLAS is left"
grep -nE '[eE]ncode|CUDART' "$dir/mma_lazy3.cu" && fail "mma_lazy3: TMA is left"

# Macros in a function: expanded where all calls agree, else as in sdpa.cu. A softmax with products thrown in, in a
# copy of the sources.
mkdir "$dir/tree"
cp -r .clang-format configs.txt run_all.sh tools simt "$dir/tree"
products() {  # products MORE_CALLS
  awk -v more="$1" '
    /^__global__ .* sdpa_cublas\(/ { kernel = 1 }
    { print }
    kernel && /const int lane/ {
      kernel = 0
      print "  if (p.scale < -1) {\n    constexpr int columns = 2 * B::head_dim;\n    float d[columns / 2] = {};"
      print "    wgmma_ss<Element, columns, 0>(d, p.B, p.Hq, p.Sk > 1);\n" more
      print "    p.O[lane] = to_element(d[1]);\n  }"
    }' sdpa.cu >"$dir/tree/sdpa.cu"
  (cd "$dir/tree" && ./run_all.sh extract cublas --arch 90a --verify) >"$dir/out" 2>"$dir/err" ||
    fail "wgmma: $(cat "$dir/err")"
}
products ''
grep -q 'SDPA_' "$dir/out" && fail "wgmma of one size: macros are left"
grep -A1 'm64n128k16.f32.f16.f16' "$dir/out" | grep -q '{%0, %1, ' || fail "wgmma of one size is not written out"
products '    float e[32] = {};\n    wgmma_ss<Element, 64, 0>(e, p.B, p.Hq, p.Sk > 1);\n    p.O[lane + 1] = to_element(e[1]);'
diff <(sed -n '/^#define SDPA_D8(/,/^\/\/ clang-format on/p; /^template.*int TRANS_B/,/^}/p' sdpa.cu | sed '/wgmma_rs/,$d') \
  <(sed -n '/^#define SDPA_D8(/,/^\/\/ clang-format on/p; /^template.*int TRANS_B/,/^}/p' "$dir/out"; echo 'template <class E, int N, int TRANS_B>') ||
  fail "wgmma of two sizes: not the macros of sdpa.cu"

# refused STATUS SENTENCE COMMAND...: nothing on stdout.
refused() {
  local want=$1 sentence=$2 status
  shift 2
  "$@" >"$dir/out" 2>"$dir/err" </dev/null
  status=$?
  [ $status = "$want" ] || fail "$*: exit $status, want $want"
  [ -s "$dir/out" ] && fail "$*: something on stdout"
  grep -qF -- "$sentence" "$dir/err" || { fail "$*: no such sentence: $sentence"; head -5 "$dir/err"; }
}
extract=(./run_all.sh extract)
refused 2 "the name of the line is missing" "${extract[@]}"
refused 2 "mma_lasy3: no line of configs.txt has that name; there are, for example, mma_lazy" "${extract[@]}" mma_lasy3
refused 2 "extract takes one line, and mma_lazy and mma_lazy3 are two" "${extract[@]}" mma_lazy mma_lazy3
refused 2 "extract --frob: no such option" "${extract[@]}" mma_lazy --frob
refused 2 "--arch: its value is missing" "${extract[@]}" mma_lazy --arch
refused 2 "--arch hopper: want a list of CUDA architectures" "${extract[@]}" mma_lazy --arch hopper
refused 2 "mma_d256 is built for sm_90a alone; drop --arch 80" "${extract[@]}" mma_d256 --arch 80 --verify
refused 2 "hopper chooses between tiles at run time" "${extract[@]}" hopper
refused 2 "missing.txt: there is no such file" env SDPA_CONFIGS="$dir/missing.txt" "${extract[@]}" mma_lazy
cat >"$dir/bad.txt" <<'EOT'
typo BLOK_N=64
illegal HEAD_DIM=96
words BLOCK_N
EOT
refused 2 "bad.txt:1: no knob is called BLOK_N" env SDPA_CONFIGS="$dir/bad.txt" "${extract[@]}" typo
refused 2 "HEAD_DIM: not a legal value; it takes one of: 64 128 256" env SDPA_CONFIGS="$dir/bad.txt" "${extract[@]}" illegal
refused 2 "bad.txt:3: 'BLOCK_N' is not KNOB=VALUE" env SDPA_CONFIGS="$dir/bad.txt" "${extract[@]}" words

# Without nvcc the file is the same, and it is said that nothing was compared. Without g++ or Python there is none.
tools=$dir/bin
mkdir "$tools"
for tool in bash sh dirname id nproc clang-format env python3 g++ as; do
  path=$(command -v "$tool") || continue
  [ "$tool" != python3 ] || path=$(python3 -c 'import sys; print(sys.executable)')
  printf '#!/bin/sh\nexec "%s" "$@"\n' "$path" >"$tools/$tool"
  chmod +x "$tools/$tool"
done
without() {  # without TOOL COMMAND...
  local path=$tools/$1 kept=$dir/kept
  shift
  [ ! -e "$path" ] || mv "$path" "$kept"
  env PATH="$tools" CUDA_HOME=/nonexistent "$@"
  local status=$?
  [ ! -e "$kept" ] || mv "$kept" "$path"
  return $status
}
without nvcc "${extract[@]}" scalar_minimal >"$dir/out" 2>"$dir/err" || fail "without nvcc: $(cat "$dir/err")"
cmp "$dir/out" "$dir/scalar_minimal.cu" || fail "without nvcc the file is another one"
grep -qF "nvcc is missing: the machine code of the extract was not compared" "$dir/err" || fail "without nvcc: no word of it"
refused 2 "nvcc is missing, so the machine code cannot be compared" without nvcc "${extract[@]}" scalar_minimal --verify
refused 2 "python3 is missing" without python3 "${extract[@]}" scalar_minimal
refused 2 "/nonexistent is missing; CXX names it" env CXX=/nonexistent "${extract[@]}" scalar_minimal
refused 2 "g++ is missing" without g++ "${extract[@]}" scalar_minimal

"${extract[@]}" scalar_racy --no-verify >"$dir/out" 2>"$dir/err" || fail "scalar_racy: $(cat "$dir/err")"
grep -qF "scalar_racy is marked expect=FAIL" "$dir/err" || fail "scalar_racy: no warning"
exit $failed
