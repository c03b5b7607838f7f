#!/usr/bin/env bash
# The A/B comparison: known samples in, known verdicts out; and its course with stand-ins for executables.
set -u
cd "$(dirname "$0")/.." || exit 1
. tests/expect.sh

# samples TRIAL PAIRS "B/A" NOISE DRIFT: made-up samples of one problem of 100 us; normal noise of this
# relative size (by Box and Muller from a generator of our own: awks differ in theirs), and time that
# grows by DRIFT over the whole run.
samples() {
  awk -v trial="$1" -v pairs="$2" -v ratio="$3" -v noise="$4" -v drift="$5" '
    function uniform() { state = (state * 16807) % 2147483647; return state / 2147483647 }
    function normal() { return sqrt(-2 * log(uniform())) * cos(6.283185307179586 * uniform()) }
    BEGIN {
      state = 1 + trial * 7919
      for (i = 0; i < 20; i++) uniform()
      for (pair = 1; pair <= pairs; pair++) {
        for (turn = 0; turn < 2; turn++) {
          side = (pair % 2 == 1) == (turn == 0) ? "A" : "B"
          t = 100 * (side == "B" ? ratio : 1) * (1 + noise * normal()) * (1 + drift * n / (2 * pairs))
          n++
          print pair, side, 1, t, 1980
        }
      }
    }'
}
verdict() { samples "$@" | awk -f tools/ab_statistics.awk | cut -d' ' -f15; }
expect_verdict() {
  local want=$1 got
  shift
  got=$(verdict "$@")
  [ "$got" = "$want" ] || fail "samples $*: $got, want $want"
}
expect_verdict SAME    1 12 1     0.001 0
expect_verdict SLOWER  2 12 1.01  0.002 0
expect_verdict FASTER  3 12 0.98  0.005 0
expect_verdict UNCLEAR 4 12 1     0.03  0
expect_verdict UNCLEAR 5 4  1.2   0.001 0      # too few for any verdict
expect_verdict SAME    6 12 1     0.001 0.1    # drift falls on both sides
expect_verdict SLOWER  7 12 1.01  0.002 0.1

# Over 200 trials: a line against itself is called different in at most 5%, and 1% is found.
count() {  # count VERDICT-REGEX SAMPLES-ARGUMENT...: of 200 trials
  local pattern=$1 trial n=0
  shift
  for trial in $(seq 200); do [[ $(verdict "$trial" "$@") =~ $pattern ]] && n=$((n + 1)); done
  echo $n
}
n=$(count 'FASTER|SLOWER' 14 1 0.004 0.01)
[ "$n" -le 10 ] || fail "A against A: $n of 200 called different"
n=$(count '^SLOWER$' 14 1.01 0.004 0.01)
[ "$n" -ge 190 ] || fail "1% more work: $n of 200 called SLOWER"

# By hand: 6 pairs with ratios 1.01 to 1.06. Of the 21 averages of logarithms the middle one is the 11th;
# with n = 6 Wilcoxon's interval is the whole range. The clock of pair 7 marks it as throttled.
for i in 1 2 3 4 5 6; do echo "$i A 1 100 1980"; echo "$i B 1 10$i 1980"; done >"$dir/hand"
{ echo "7 A 1 100 1980"; echo "7 B 1 200 1800"; } >>"$dir/hand"
awk -f tools/ab_statistics.awk "$dir/hand" | awk '
  function near(x, y) { return x - y < 1e-4 && y - x < 1e-4 }
  { exit !($2 == 6 && $3 == 1 && near($4, 100) && near($7, 103.5) && near($8, 101) && near($9, 106) &&
           near($10, 1.03488) && near($11, 1.01) && near($12, 1.06) && $15 == "SLOWER") }' ||
  fail "the example by hand: $(awk -f tools/ab_statistics.awk "$dir/hand")"

# ---- the course of a comparison ----
say() { printf '%s\n' "$*" >&2; }
refuse() { say "$*"; exit 2; }
tty_line() { :; }
end_line() { :; }
. tools/ab.sh
# fake NAME US "CHECK EXIT" "TIME EXIT": an executable that takes US for the first problem, twice that for
# the second.
fake() {
  cat >"$dir/$1" <<EOT
#!/bin/sh
case " \$* " in
  *' --check-only '*) check=PASS; [ $3 = 0 ] || check=FAIL; us= ; status=$3 ;;
  *) check= ; us=$2; status=$4 ;;
esac
echo config,shape,causal,check,graph_us,clock_mhz,regs,spill_bytes,smem_bytes,ctas_per_sm
echo $1,mission,off,\$check,\$us,1980,64,0,1024,2
echo $1,long,br,\$check,\$us\${us:+0},1980,64,0,1024,2
[ \$status = 0 ] || echo "$1 did it" >&2
exit \$status
EOT
  chmod +x "$dir/$1"
}
fake base 10.0 0 0
fake slow 10.2 0 0
fake wrong 5.0 1 0
fake dies 10.0 0 3
course() {  # course A B: what ab_command does after building
  exe_a=$dir/$1 exe_b=$dir/$2 rows_a=$dir/a.csv rows_b=$dir/b.csv options_a=(--x) options_b=(--x)
  check_side "$exe_a" A "$rows_a" "${options_a[@]}"
  check_side "$exe_b" B "$rows_b" "${options_b[@]}"
  statistics=$(take_samples "$exe_a" "$exe_b" "$dir/samples" 10 60) || exit
  print_comparison "$1" "$2" "$statistics"
}
(course base slow) >"$dir/out" 2>&1 || fail "a good comparison ended with $?"
[ "$(grep -c 'SLOWER  (10 pairs, 0 thrown out' "$dir/out")" = 2 ] || { fail "no SLOWER for two problems:"; cat "$dir/out"; }
grep -q '1.0200 \[1.0200, 1.0200\]' "$dir/out" || { fail "not the ratio 1.02:"; cat "$dir/out"; }
grep -q '^long br .*PASS .*PASS' "$dir/out" || { fail "no checks beside the times:"; cat "$dir/out"; }
(course base base) >"$dir/out" 2>&1
[ "$(grep -c SAME "$dir/out")" = 2 ] || { fail "A against A:"; cat "$dir/out"; }
(course base wrong) >"$dir/out" 2>&1
[ $? = 1 ] || fail "a wrong kernel ended with $?"
grep -q 'wrong results, so it gets no time' "$dir/out" || { fail "no word about the wrong kernel:"; cat "$dir/out"; }
grep -q ' us ' "$dir/out" && fail "a wrong kernel got a time"
(course base dies) >"$dir/out" 2>&1
[ $? = 3 ] || fail "a process that failed ended with $?"
grep -q 'failed while being timed: dies did it' "$dir/out" || { fail "no word about the failed process:"; cat "$dir/out"; }
[ "$(wc -l <"$dir/samples")" = 2 ] || fail "the samples before the failure are lost"

# ---- bad input ----
expect 2 "give a line and at least one KNOB=VALUE, or two lines" ./run_all.sh ab mma_lazy
expect 2 "give a line and at least one KNOB=VALUE, or two lines" ./run_all.sh ab mma_lazy mma_lazy3 STAGES=2
expect 2 "nobody: no line of configs.txt has that name; it has: scalar_minimal scalar_vec2" ./run_all.sh ab nobody STAGES=2
expect 2 "ab: --budget soon: want a whole number from 1" ./run_all.sh ab mma_lazy STAGES=3 --budget soon
expect 2 "ab: --frob: no such option" ./run_all.sh ab mma_lazy STAGES=3 --frob
expect 2 "ab: --shape: its value is missing" ./run_all.sh ab mma_lazy STAGES=3 --shape
expect 2 "ab: arch=90a is no knob" ./run_all.sh ab mma_lazy arch=90a
if ! nvidia-smi -L 2>/dev/null | grep -q GPU; then
  expect 2 "it times kernels and there is no GPU here" ./run_all.sh ab mma_lazy STAGES=3
fi
exit $failed
