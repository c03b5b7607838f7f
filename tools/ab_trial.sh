#!/usr/bin/env bash
# Is the A/B comparison itself to be trusted? 20 comparisons of lines with themselves, which must come out
# SAME or UNCLEAR, and 20 in which B has 1% more keys, which must come out SLOWER; printed as CSV.
# usage: tools/ab_trial.sh [ROUNDS] > results/ab/DATE-DEVICE.csv   (a round is 4 of each and takes 2 minutes)
set -u
cd "$(dirname "$0")/.." || exit 2

# trial LINE EXPECTED SHAPE [B-SHAPE]: one comparison of the line with itself.
trial() {
  local out b=()
  [ $# -lt 4 ] || b=(--b-shape "$4")
  if ! out=$(./run_all.sh ab "$1" "$1" --shape "$3" "${b[@]}" --budget 30 2>"$words"); then
    cat "$words" >&2
    exit 2
  fi
  sed -n 's/.*B\/A, 95% *\([0-9.]*\) \[\([0-9.]*\), \([0-9.]*\)\] *\([A-Z]*\) *(\([0-9]*\) pairs, \([0-9]*\).*/\1,\2,\3,\4,\5,\6/p' <<<"$out" |
    while IFS= read -r fields; do echo "$1,${3//,/x},${4:+${4//,/x}},$2,$fields"; done
}
words=$(mktemp) || exit 2
trap 'rm -f "$words"' EXIT
echo "config,shape,b_shape,expected,ratio,low,high,verdict,pairs,thrown_out"
rounds=${1:-5}
[[ $rounds =~ ^[1-9][0-9]?$ ]] || { echo "ab_trial.sh: $rounds: want a number of rounds" >&2; exit 2; }
for round in $(seq "$rounds"); do
  trial mma_split4 SAME mission
  trial mma_split2 SAME long
  trial mma_lazy3 SAME 1,32,32,4096,4096
  trial wmma_all SAME long
  # A hundred tiles of keys for each group of warps, and a hundred and one.
  trial mma_split4 SLOWER 1,8,8,512,12800 1,8,8,512,12928
  trial mma_split2 SLOWER 1,8,8,2048,12800 1,8,8,2048,12928
  trial mma_lazy3 SLOWER 1,8,8,2048,6400 1,8,8,2048,6464
  trial wmma_all SLOWER 1,8,8,2048,6400 1,8,8,2048,6464
  echo "round $round of $rounds" >&2
done
