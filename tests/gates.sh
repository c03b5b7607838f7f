#!/usr/bin/env bash
# Resource gates on every line of configs.txt, from ptxas's reports in BUILD/log: no spills, and the
# registers and shared memory of one CTA fit on every architecture that the line is built for.
set -u
build=$1
failed=0 lines=0
while IFS=$'\t' read -r name _; do
  log=$build/log/$name.log
  lines=$((lines + 1))
  kernels=$(grep -c 'bytes spill stores' "$log")
  [ "$kernels" -gt 0 ] || { echo "$name: no ptxas report in $log"; failed=1; }
  spilled=$(grep 'bytes spill stores' "$log" | grep -vc ' 0 bytes spill stores, 0 bytes spill loads')
  [ "$spilled" = 0 ] || { echo "$name: $spilled kernels spill"; failed=1; }
  if grep -qi 'serializ' "$log"; then echo "$name: wgmma serialized"; failed=1; fi
  config=$("$build/sdpa_$name" --config)
  threads=$(sed -n 's/^threads \([0-9]*\),.*/\1/p' <<<"$config")
  smem=$(sed -n 's/.*shared memory \([0-9]*\) bytes.*/\1/p' <<<"$config")
  regs=$(sed -n 's/.*Used \([0-9]*\) registers.*/\1/p' "$log" | sort -n | tail -1)
  if ! [ $((regs * threads)) -le 65536 ]; then echo "$name: $threads threads of $regs registers"; failed=1; fi
  if ! [ "$smem" -le $((99 * 1024)) ]; then echo "$name: $smem bytes of shared memory, sm_89 has 99 KB"; failed=1; fi
done <"$build/configs.tsv"
[ $lines -gt 0 ] || { echo "no line in $build/configs.tsv"; failed=1; }
echo "$lines lines"
exit $failed
