#!/usr/bin/env bash
# Resource gates on every line of configs.txt, from ptxas's reports in BUILD/log: no spills, and the
# registers and shared memory of one CTA fit on every architecture that the line is built for. Threads and
# bytes are what the line's executable for the CPU backend says. usage: gates.sh BUILD CPU_BUILD
set -u
build=$1 cpu_build=$2
failed=0 lines=0
fail() { echo "$*"; failed=1; }
while IFS=$'\t' read -r name _; do
  log=$build/log/kernel_$name.log
  lines=$((lines + 1))
  kernels=$(grep -c 'bytes spill stores' "$log")
  [ "$kernels" -gt 0 ] || fail "$name: no ptxas report in $log"
  spilled=$(grep 'bytes spill stores' "$log" | grep -vc ' 0 bytes spill stores, 0 bytes spill loads')
  [ "$spilled" = 0 ] || fail "$name: $spilled kernels spill"
  if grep -qi 'serializ' "$log"; then fail "$name: wgmma serialized"; fi
  config=$("$cpu_build/sdpa_$name" --config)
  threads=$(sed -n 's/^threads \([0-9]*\),.*/\1/p' <<<"$config")
  smem=$(sed -n 's/.*shared memory \([0-9]*\) bytes.*/\1/p' <<<"$config")
  regs=$(sed -n 's/.*Used \([0-9]*\) registers.*/\1/p' "$log" | sort -n | tail -1)
  ctas=$(sed -n 's/^ *CTAS_PER_SM *\([0-9]*\) .*/\1/p' <<<"$config")
  if [ -z "$threads" ] || [ -z "$smem" ] || [ -z "$regs" ] || [ -z "$ctas" ]; then
    fail "$name: its threads, bytes, registers or CTAs are not found"
    continue
  fi
  limit=$((99 * 1024))  # sm_89's; a line for sm_90a alone may have 227 KB
  grep -q 'sm_8' "$log" || limit=$((227 * 1024))
  [ $((regs * threads * ctas)) -le 65536 ] || fail "$name: $ctas CTAs of $threads threads of $regs registers"
  [ "$smem" -le $limit ] || fail "$name: $smem bytes of shared memory, the limit is $limit"
done <"$build/configs.tsv"
[ $lines -gt 0 ] || fail "no line in $build/configs.tsv"
echo "$lines lines"
exit $failed
