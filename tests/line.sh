#!/usr/bin/env bash
# One line of configs.txt on the CPU backend: problems that touch every edge of the contract, under
# several orders of the threads. EXE is a sweep_NAME. usage: line.sh EXE PASS|FAIL none|address|thread
set -u
exe=$1 expect=$2 sanitizer=$3
failed=0
run() {  # run OPTION...: one launch of the executable; words and rows go to $out
  out=$(timeout 300 "$exe" --check-only "$@" 2>&1)
  status=$?
}

if [ "$expect" = FAIL ]; then
  # The negative control: every net that looks at it must see it. Only ThreadSanitizer sees wmma's in
  # reverse order: there the lanes of a warp wait for each other long enough for the copies to land.
  for schedule in forward reverse random:1; do
    run --shape small --schedule $schedule
    case $sanitizer,${exe##*/},$schedule in
      thread,*) grep -q 'ThreadSanitizer: data race' <<<"$out" || { echo "$schedule: no data race reported"; failed=1; } ;;
      *,sweep_wmma*,reverse) ;;
      *) [ $status = 1 ] || { echo "$schedule: exit $status, want 1"; echo "$out"; failed=1; } ;;
    esac
  done
  exit $failed
fi

expect_pass() {
  run "$@"
  if [ $status != 0 ]; then
    echo "exit $status: $exe --check-only $*"
    head -60 <<<"$out"
    failed=1
  fi
}
# More keys than queries and the other way round; one query; no key.
ragged=(--shape '1,2,1,33,70' --shape '1,1,1,70,33')
short=(--shape '1,1,1,1,100' --shape '2,2,2,5,0')
# The CPU backend has three SMs: fewer CTAs than are resident, and no fewer, give the same bits.
expect_same_bits() {
  grep -q ' USE_PERSISTENT_CTA=1 ' <<<"$out" || return
  for ctas in "$@"; do expect_pass --shape 1,4,2,200,100 --causal br --max-ctas "$ctas"; done
}
if [ "$sanitizer" = thread ]; then  # which looks at the order of accesses, not at numbers
  expect_pass --shape small --shape 1,1,1,70,33 --causal br --schedule reverse
  expect_pass --shape 1,2,1,33,150 --schedule random:1
  expect_same_bits 2
  exit $failed
fi
for schedule in forward reverse; do
  expect_pass --shape small "${ragged[@]}" --causal br --schedule $schedule
done
expect_pass "${ragged[@]}" "${short[@]}" --causal br --dist stairs --layout packed --schedule random:1
expect_pass "${ragged[@]}" --causal tl --dist huge --layout padded --schedule random:2
expect_pass --shape 1,2,1,33,70 --layout bshd --dist nonfinite
expect_pass --shape 1,1,1,33,300 --dist uniform
# TMA takes no strides of 0 or less, cuBLAS no rows that run backwards.
case $out in
  *' USE_WGMMA=1 '*) backwards=bshd shared=padded ;;
  *' USE_CUBLAS=1 '*) backwards=bshd shared=zero ;;
  *) backwards=reversed shared=zero ;;
esac
expect_pass --shape 1,6,2,40,50 --layout $backwards --dist outliers --scale 0.3
expect_pass --shape 2,3,1,9,30 --layout $shared --dist stairs --seeds 1 --causal tl
expect_same_bits 1 2 7
if [ "$sanitizer" = none ]; then
  expect_pass --shape 1,3,1,100,300 --causal br --dist large --schedule random:3
  expect_pass --shape 2,2,2,3,5 --layout far_rows
  # The barriers of a K/V tile, as executed, are those that the code declares.
  expect_pass --tile
fi
exit $failed
