#!/usr/bin/env bash
# A broken configs.txt: every problem is named with file and line, and the good lines go on.
set -u
cd "$(dirname "$0")/.." || exit 1
. tests/expect.sh

cat >"$dir/bad.txt" <<'EOF'
# a comment
good1 BLOCK_N=64 VEC_WIDTH=8 gate:regs<=128 gate:step-over=good2:1.05@mission  # and another
typo BLOK_N=64
good1 VEC_WIDTH=8
novalue BLOCK_N
novalue2 BLOCK_N=
9lives VEC_WIDTH=8
semi;colon VEC_WIDTH=8
chars VEC_WIDTH=8;rm
twice BLOCK_N=32 BLOCK_N=64
maybe expect=PERHAPS
where arch=hopper
illegal HEAD_DIM=96
gated1 gate:regs=120
gated2 gate:spill<=16
good2 VEC_WIDTH=4 SYNC_POLICY=1
baseless : good3 VEC_WIDTH=4
nobase :
again : good1 BLOCK_N=64
good3 : good2 SYNC_POLICY=2 BLOCK_N=64
selected VEC_WIDTH=8
a234567890123456789012345678901234567890123456789012345678901 VEC_WIDTH=8
often BLOCK_N=32 BLOCK_N=32 BLOCK_N=32 BLOCK_N=32
unknown WARP_COLOUR=3
EOF
sentences=(
  "bad.txt:3: no knob is called BLOK_N; did you mean BLOCK_N?"
  "bad.txt:4: the name good1 is taken by an earlier line"
  "bad.txt:5: BLOCK_N has no value: write BLOCK_N=VALUE"
  "bad.txt:6: BLOCK_N has no value: write BLOCK_N=VALUE"
  "bad.txt:7: '9lives' is no name: it starts with a letter and has letters, digits and _ only"
  "bad.txt:8: 'semi?colon' is no name"
  "bad.txt:9: 'VEC_WIDTH=8?rm' is not KNOB=VALUE (letters, digits and _ only)"
  "bad.txt:10: BLOCK_N is given twice"
  "bad.txt:11: expect=PERHAPS: want expect=PASS or expect=FAIL"
  "bad.txt:12: arch=hopper: want a CUDA architecture, as in arch=90a"
  "bad.txt:14: 'gate:regs=120' is no gate; want gate:regs<=N, gate:smem<=BYTES, gate:spill<=BYTES:WHY"
  "bad.txt:15: 'gate:spill<=16' is no gate"
  "bad.txt:17: 'good3' is no earlier line; want NAME : BASE KNOB=VALUE ..."
  "bad.txt:18: '' is no earlier line; want NAME : BASE KNOB=VALUE ..."
  "bad.txt:19: good1 has BLOCK_N=64 already"
  "bad.txt:21: 'selected' is no name for a line: the build uses it"
  "bad.txt:22: 'a234567890123456789012345678901234567890123456789012345678901' is no name for a line"
  "bad.txt:23: BLOCK_N is given twice"
  "bad.txt:24: no knob is called WARP_COLOUR; the knobs are HEAD_DIM DTYPE BLOCK_M BLOCK_N NUM_WARPS"
)

# CMake alone refuses the file and names every bad line.
if cmake -S . -B "$dir/cmake" -DSDPA_CPU=ON -DSDPA_CONFIGS="$dir/bad.txt" >"$dir/cmake.out" 2>&1; then
  echo "CMake accepted the file"; failed=1
fi
for sentence in "${sentences[@]}"; do has "$dir/cmake.out" "$sentence"; done

# run_all.sh names them too, builds the good lines, and exits with 1.
export SDPA_CONFIGS="$dir/bad.txt" SDPA_BUILD_DIR="$dir/build"
./run_all.sh --cpu --csv --shape small -- --check-only >"$dir/out.csv" 2>"$dir/err"
status=$?
[ $status = 1 ] || { echo "run_all.sh exited with $status, want 1"; failed=1; }
for sentence in "${sentences[@]}"; do has "$dir/err" "$sentence"; done
has "$dir/err" "lines checked on the CPU backend, "
[ "$(grep -c 'bad.txt:23' "$dir/err")" = 1 ] || { echo "a knob given four times is told more than once"; failed=1; }
[ "$(grep -c 'static_assert\|static assertion' "$dir/err")" = 0 ] || { echo "a refusal comes with the compiler's words"; failed=1; }
has "$dir/err" "bad.txt:13: sdpa_illegal does not compile: HEAD_DIM: not a legal value; it takes one of: 64 128 256. Type HEAD_DIM=64"
[ "$(head -1 "$dir/out.csv")" = "$("$dir/build-cpu/sdpa_good1" --header)" ] || { echo "no header"; failed=1; }
[ "$(grep -c "^good1," "$dir/out.csv")" = 2 ] || { echo "want a row of good1 and one of its double"; failed=1; }
for row in good2 good3 illegal typo; do
  [ "$(grep -c "^$row," "$dir/out.csv")" = 1 ] || { echo "want one row of $row"; failed=1; }
done
[ "$(awk -F, '{ print NF }' "$dir/out.csv" | sort -u | wc -l)" = 1 ] || { echo "rows differ in width"; failed=1; }
has "$dir/out.csv" "no knob is called BLOK_N"

# Other ways to go wrong.
expect 2 "--only zzz: no line of configs.txt has such a name" env SDPA_CONFIGS="$PWD/configs.txt" ./run_all.sh --cpu --only zzz
expect 2 "--only (: not a regular expression" ./run_all.sh --cpu --only '('
expect 2 "--frob: no such option or command" ./run_all.sh --frob
expect 2 "list nobody: no line of configs.txt has such a name" env SDPA_CONFIGS="$PWD/configs.txt" ./run_all.sh list nobody
expect 0 "scalar_vec4 any GPU scalar_vec2 VEC_WIDTH=4" env SDPA_CONFIGS="$PWD/configs.txt" ./run_all.sh list '^scalar_vec'
expect 2 "--shape: its value is missing" ./run_all.sh --shape
# These are judged before anything is built.
export SDPA_BUILD_DIR="$dir/none"
expect 2 "--shape huge: want small, mission" ./run_all.sh --cpu --only good1 --shape huge
expect 2 "--shape 1,3,2,8,8: want small, mission" ./run_all.sh --cpu --shape mission --shape 1,3,2,8,8
expect 2 "JOBS=abc: want a number of processes" env JOBS=abc ./run_all.sh --cpu
expect 2 "gates: --only zzz: no line of configs.txt has such a name" env SDPA_CONFIGS="$PWD/configs.txt" ./run_all.sh gates --only zzz
expect 0 "usage: ./run_all.sh test [--all-lines]" ./run_all.sh test --help
expect 0 "usage: ./run_all.sh results [CSV" ./run_all.sh results --help
[ -z "$(find "$dir" -maxdepth 1 -name 'none*')" ] || { echo "something was built before the arguments were judged"; failed=1; }
expect 2 "/proc/none-cpu: no folder that can be written to" env SDPA_BUILD_DIR=/proc/none ./run_all.sh --cpu
export SDPA_BUILD_DIR="$dir/build"
expect 2 "sdpa: --frob: no such option; --help lists them" "$dir/build-cpu/sdpa_good1" --frob
echo "# nothing" >"$dir/empty.txt"
expect 2 "empty.txt: no configuration in it; a line is NAME KNOB=VALUE ..." env SDPA_CONFIGS="$dir/empty.txt" ./run_all.sh --cpu
expect 2 "missing.txt: there is no such file" env SDPA_CONFIGS="$dir/missing.txt" ./run_all.sh --cpu
expect 0 "SYNC_POLICY 1" "$dir/build-cpu/sdpa_good2" --config
expect 0 "changed: BLOCK_N=64 VEC_WIDTH=4 SYNC_POLICY=2" "$dir/build-cpu/sdpa_good3" --config
for knob in "VEC_WIDTH 4" "SYNC_POLICY 2" "BLOCK_N 64"; do expect 0 "$knob" "$dir/build-cpu/sdpa_good3" --config; done
# What SDPA_CONFIGS said last is not remembered.
expect 2 "--only ^good1: no line of configs.txt has such a name" env -u SDPA_CONFIGS ./run_all.sh --cpu --only '^good1'
# A link to the command, from another folder, whose rows are named from there.
ln -s "$PWD/run_all.sh" "$dir/link"
(cd "$dir" && expect 1 "rows: build-cpu/rows.csv" ./link --cpu --only '^good2$' --shape small; exit $failed) || failed=1
# Options and rows that go nowhere.
expect 2 "sdpa: --causal is given twice" "$dir/build-cpu/sdpa_good2" --causal br --causal tl
expect 0 "1x1x1x8x8,ok,PASS" "$dir/build-cpu/sdpa_good2" --check-only --causal off --shape 1x1x1x8x8
expect 3 "stdout cannot be written to (No space left on device), so rows are lost" \
  bash -c "'$dir/build-cpu/sdpa_good2' --check-only --shape small >/dev/full"
# A relative name is looked for where the command was typed.
top=$PWD
cd "$dir" || exit 1
expect 2 "empty.txt: no configuration in it" env SDPA_CONFIGS=empty.txt "$top/run_all.sh" --cpu
cd "$top" || exit 1
exit $failed
