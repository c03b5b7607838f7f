#!/usr/bin/env bash
# The gate reader on reports and rows made up here: what it reads, and what it makes of it.
set -u
cd "$(dirname "$0")/.." || exit 1
. tools/gates.sh
. tests/expect.sh
mkdir "$dir/log"

report() {  # report NAME ARCH REGISTERS SPILL_STORES SPILL_LOADS
  cat >>"$dir/log/kernel_$1.log" <<EOT
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_ZN4sdpa8sdpa_mmaIiEEvS_' for '$2'
ptxas info    : Function properties for _ZN4sdpa8sdpa_mmaIiEEvS_
    16 bytes stack frame, $4 bytes spill stores, $5 bytes spill loads
ptxas info    : Used $3 registers, used 5 barriers, 16 bytes cumulative stack size
EOT
}
line() {  # line NAME "THREADS SMEM BLOCK_M" CHECKSUM [GATE...]
  local name=$1
  printf '%s\tPASS\tyes\tK=1\t%s\n' "$name" "${*:4}" >>"$dir/configs.tsv"
  echo "$2" >"$dir/$name.facts"
  echo "$3" >"$dir/$name.sum"
}
# What comes out of object files elsewhere comes from these files here.
# shellcheck disable=SC2317  # called through OBJECT_OF
test_object() { printf '%s' "$1/$2"; }
OBJECT_OF=test_object
launch_facts() { cat "$1.facts" 2>/dev/null; }
machine_code() { cat "$1.sum" 2>/dev/null; }

line good        "128 50000 64" 1;  report good sm_80 120 0 0; report good sm_90a 128 0 0
line spills      "128 50000 64" 2;  report spills sm_80 255 0 0; report spills sm_90a 255 8 12
line spills_why  "128 50000 64" 3 'gate:spill<=20:two_words_of_16_tiles'; report spills_why sm_90a 255 8 12
line registers   "512 50000 64" 4;  report registers sm_90a 136 0 0
line own_limit   "128 50000 64" 5 'gate:regs<=100'; report own_limit sm_90a 101 0 0
line shared      "128 101377 64" 6; report shared sm_89 64 0 0; report shared sm_90a 64 0 0
line shared_90   "128 101377 64" 7; report shared_90 sm_90a 64 0 0
line shared_own  "128 40001 64" 8 'gate:smem<=40000'; report shared_own sm_90a 64 0 0
line serial      "128 4000 64" 9;   report serial sm_90a 64 0 0
echo "ptxas info : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to..." >>"$dir/log/kernel_serial.log"
line split       "128 4100 64" 9;   report split sm_90a 64 0 0
echo "ptxas info : (C7519) warpgroup.arrive is injected in around line 7 by compiler to allow use of registers in GMMA..." >>"$dir/log/kernel_split.log"
line twin        "128 50000 64" 1;  report twin sm_80 120 0 0
line not_twin    "128 50000 32" 1;  report not_twin sm_80 120 0 0
line broken      "" "";               rm "$dir"/broken.*; touch "$dir/log/kernel_broken.log.failed"
line silent      "128 50000 64" 10; : >"$dir/log/kernel_silent.log"
line faster      "128 50000 64" 11 'gate:step-over=good:1.10'; report faster sm_80 64 0 0
line not_faster  "128 50000 64" 12 'gate:step-over=good:1.30@mission'; report not_faster sm_80 64 0 0
line perhaps     "128 50000 64" 13 'gate:step-over=good:1.25@mission'; report perhaps sm_80 64 0 0
line unmeasured  "128 50000 64" 14 'gate:step-over=good:1.10@long'; report unmeasured sm_80 64 0 0
line wrong       "128 50000 64" 15 'gate:step-over=good:1.10'; report wrong sm_80 64 0 0
cat >"$dir/steps.csv" <<'EOT'
line,over,shape,speed_up,low,high
faster,good,mission,1.25,1.222,1.278
not_faster,good,mission,1.25,1.222,1.278
perhaps,good,mission,1.25,1.222,1.278
unmeasured,good,mission,1.25,1.222,1.278
wrong,spills,mission,1.25,1.222,1.278
EOT
judge_gates "$dir" "$dir/steps.csv" >"$dir/table" && { echo "a bad set of lines was let through"; failed=1; }

want() {  # want NAME GATE VERDICT [FOUND]
  tr -s ' ' <"$dir/table" | grep -qE "^$1 $2 .*${4-}.* $3\$" ||
    { echo "want for $1, $2: $3 ${4-}; found:"; grep "^$1 " "$dir/table"; failed=1; }
}
want good 'bytes spilled' ok ' 0'
want good registers ok 128
want good 'shared bytes' ok 50000
want spills 'bytes spilled' FAIL ' 20'
want spills_why 'bytes spilled' ok '20 \(two_words_of_16_tiles\)'
want registers registers FAIL '<= 128 136'
want own_limit registers FAIL '<= 100 101'
want shared 'shared bytes' FAIL '<= 101376 101377'
want shared_90 'shared bytes' ok '<= 232448 101377'
want shared_own 'shared bytes' FAIL '<= 40000 40001'
want serial 'wgmma as written' FAIL 'yes no: C7510'
want split 'wgmma as written' FAIL 'yes no: C7519'
want twin duplicate FAIL "all of good's"
want broken compiles FAIL
want silent 'ptxas report' FAIL
want faster 'over good' ok '1.222 to 1.278'
want not_faster 'over good at mission' FAIL
want perhaps 'over good at mission' UNCLEAR
want unmeasured 'over good at long' UNCLEAR 'not timed'
want wrong 'over good' UNCLEAR 'not timed'
grep -q '^good.*FAIL\|^not_twin.*FAIL' "$dir/table" && { echo "a good line fails"; failed=1; }
[ "$(grep -c 'FAIL$' "$dir/table")" = 11 ] || { echo "want 11 failed gates:"; cat "$dir/table"; failed=1; }

# Alone, the good lines pass.
grep -P '^(good|faster|shared_90)\t' "$dir/configs.tsv" >"$dir/good.tsv"
mv "$dir/good.tsv" "$dir/configs.tsv"
judge_gates "$dir" "$dir/steps.csv" >"$dir/table" || { echo "good lines are refused:"; cat "$dir/table"; failed=1; }
: >"$dir/configs.tsv"
judge_gates "$dir" "$dir/steps.csv" >/dev/null && { echo "no line at all passes"; failed=1; }

expect 2 "gates: --frob: no such option" ./run_all.sh gates --frob
expect 2 "gates: --only (: not a regular expression" ./run_all.sh gates --only '('
expect 2 "gates: /no/such.csv: there is no such file" ./run_all.sh gates --steps /no/such.csv
exit $failed
