#!/usr/bin/env bash
# ./run_all.sh results: a sample gives the expected page and pictures under every awk there is; README.md
# and results/*.svg equal the CSVs of results/; a file that cannot be drawn is refused in one sentence.
set -u
cd "$(dirname "$0")/.." || exit 1
root=$PWD
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
failed=0
fail() { echo "$*"; failed=1; }
has() { grep -qF -- "$2" "$1" || fail "$1 lacks: $2"; }

well_formed() {  # well_formed SVG
  if command -v xmllint >/dev/null; then xmllint --noout "$1" || fail "$1 is not well-formed"; return; fi
  tr -d '\n' <"$1" | sed 's/</\n</g' | awk '
    /^<\// { if (depth == 0 || open[depth--] != substr($0, 3, index($0, ">") - 3)) bad = 1; next }
    /^<[a-z]/ && !/^<[^>]*\/>/ { name = substr($0, 2); sub(/[ >].*/, "", name); open[++depth] = name }
    /&/ && !/&(amp|lt|gt);/ { bad = 1 }
    END { exit bad || depth }' || fail "$1 is not well-formed"
}

# bars SVG CSV SHAPES: a bar for each timed row of these shapes that is no negative control.
bars() {
  local drawn timed
  drawn=$(grep -c 'class="bar ' "$1")
  timed=$(awk -F, -v shapes="$3" '
    NR == 1 { for (i = 1; i <= NF; i++) at[$i] = i; next }
    $at["check"] == "PASS" && $at["graph_us"] != "" && $at["shape"] ~ "^(" shapes ")$" { n++ }
    END { print n + 0 }' "$2")
  [ "$drawn" = "$timed" ] || fail "$1 has $drawn bars, $2 has $timed rows"
  well_formed "$1"
}

# refuses SENTENCE COMMAND...: exit 2 and one line.
refuses() {
  local want=$1 status
  shift
  "$@" >"$dir/out" 2>"$dir/err"
  status=$?
  [ $status = 2 ] || fail "$*: exit $status, not 2"
  [ "$(wc -l <"$dir/err")" = 1 ] || fail "$*: not one line: $(cat "$dir/err")"
  has "$dir/err" "$want"
}

# ---- the sample ----
page=$dir/page
mkdir "$page"
cp -r tools tests/data/results "$page"
cp -r "$page/results" "$dir/csv"
# The page wants the newest by name: these are older, whatever their mtime, or of another device.
main=2026-01-02-Sample-GPU
for name in 2026-01-01-Sample-GPU-11 2026-01-02-Sample-GPU-2 2026-01-02-Sample-GPU; do
  sed "s/scalar_minimal,/not_the_newest,/" "$dir/csv/$main.csv" >"$page/results/$name.csv"
done
cp "$dir/csv/$main.csv" "$page/results/$main-10.csv"
sed "s/Sample GPU/Other GPU/" "$dir/csv/peers/$main.csv" >"$page/results/peers/2026-01-03-Other-GPU.csv"
sed "s/wmma_all__STAGES/wmma_all__OLDER/" "$dir/csv/ablation/$main-wmma_all.csv" >"$page/results/ablation/2026-01-01-Sample-GPU-wmma_all.csv"
touch "$page/results/2026-01-01-Sample-GPU-11.csv"
for name in results ablation peers; do
  printf '%s\n' "before $name" "<!-- $name:begin -->" "old" "<!-- $name:end -->" "after $name"
done >"$page/README.md"
touch "$page/results/ablation-gone.svg"

for awk in "gawk" "mawk" "busybox awk" "awk"; do
  command -v "${awk%% *}" >/dev/null || continue
  mkdir -p "$dir/bin"
  printf '#!/bin/sh\nexec %s "$@"\n' "$(command -v "${awk%% *}")${awk#"${awk%% *}"}" >"$dir/bin/awk"
  chmod +x "$dir/bin/awk"
  PATH=$dir/bin:$PATH "$page/tools/results_page.sh" 2>"$dir/err" || { fail "$awk: $(cat "$dir/err")"; continue; }
  cat "$page/README.md" "$page"/results/*.svg >"$dir/made"
  [ -e "$dir/first" ] || cp "$dir/made" "$dir/first"
  cmp -s "$dir/made" "$dir/first" || fail "$awk makes another page than the awk before it, or running twice changes it"
done

has "$page/README.md" '| mission: 1,8,8,512,512,64 fp16 | mma_split4 | 6.34 | 85 | cuDNN | 9.07 | 1.43x |'
has "$page/README.md" '| mission2: 2,8,8,512,512,64 fp16 | mma_split2_8warps | 8.18 | 131 | cuDNN | 9.30 | 1.14x |'
has "$page/README.md" '| scalar_minimal | PASS | fp16 | 64 | 88.029 | 1.00x | 799.101 | 1.00x |'
has "$page/README.md" '| scalar_racy | FAIL, as it must |'
has "$page/README.md" '| wgmma_tile | skipped | fp16 | 64 |  |  |  |'
has "$page/README.md" '| wmma_all | 14.752 |  | 88.869 |  | 1 |'
has "$page/README.md" '| USE_WARP_SPECIALIZATION=0 SYNC_POLICY=2 | 31.450 | +113% | 143.606 | +62% | 3 |'
has "$page/README.md" '| SYNC_POLICY=5 | SYNC_POLICY=5 needs the producer warps gone; type USE_WARP_SPECIALIZATION=0 / too |  |  |  |  |'
has "$page/README.md" '| 1,8,8,512,512,64 fp16 | mma_split4 | 6.36 (84) | 9.91 (54) | 9.07 (59) |'
has "$page/README.md" 'Sample GPU, driver 1.2.3, CUDA 13.0, commit '
has "$page/README.md" 'after peers'
! grep -qE 'not_the_newest|Other GPU|OLDER|^old$' "$page/README.md" || fail "the page shows a file that is not the newest, or what was there before"
[ ! -e "$page/results/ablation-gone.svg" ] || fail "the picture of a line without ablation is still there"
bars "$page/results/ladder.svg" "$dir/csv/$main.csv" 'mission|long'
bars "$page/results/ablation-wmma_all.svg" "$dir/csv/ablation/$main-wmma_all.csv" '.*'
has "$page/results/ladder.svg" 'skipped: needs sm_90a &amp; this GPU is sm_80 &lt;or so&gt;'
has "$page/results/ablation-wmma_all.svg" 'class="ci"'
! grep -q 'racy' "$page/results/ladder.svg" || fail "a negative control is in the ladder"

"$page/tools/results_page.sh" results/2026-01-01-Sample-GPU-11.csv 2>/dev/null
has "$page/README.md" 'not_the_newest'  # a file that is named is taken

# ---- refusals; a refused page leaves everything as it was ----
echo 'a,b' >"$dir/header.csv"
: >"$dir/empty.csv"
grep -v ',mission,\|,long,' "$dir/csv/$main.csv" >"$dir/small.csv"
sed 1q "$dir/csv/$main.csv" >"$dir/rowless.csv"
cp "$page/README.md" "$dir/before"
for what in ladder ablation; do
  refuses 'no such file' tools/svg.sh $what "$dir/none.csv"
  refuses 'no such file, or nothing in it' tools/svg.sh $what "$dir/empty.csv"
  refuses 'no CSV of results' tools/svg.sh $what "$dir/header.csv"
  refuses 'no row with a time' tools/svg.sh $what "$dir/small.csv"
  refuses 'no row with a time' tools/svg.sh $what "$dir/rowless.csv"
done
refuses 'usage' tools/svg.sh
refuses 'usage' tools/svg.sh waterfall "$dir/rowless.csv"
refuses 'no such file' "$page/tools/results_page.sh" "$dir/none.csv"
refuses 'no CSV of results' "$page/tools/results_page.sh" "$dir/header.csv"
refuses 'no row with a time' "$page/tools/results_page.sh" "$dir/small.csv"
cmp -s "$page/README.md" "$dir/before" || fail "a refused page was written"

# ---- numbers in README equal results/: as committed, since a measurement made here needs no page yet ----
mkdir "$dir/own"
{ git ls-files -z README.md tools results 2>/dev/null | grep . -z || find README.md tools results -type f -print0; } |
  xargs -0 cp --parents -t "$dir/own"
"$dir/own/tools/results_page.sh" 2>"$dir/err" || fail "$(cat "$dir/err")"
for file in README.md results/*.svg; do
  cmp -s "$file" "$dir/own/$file" || 
    fail "$file is not what the CSVs of results/ that git has give: ./run_all.sh results, and git add a new CSV"
done
main=$(sed -n 's/.*graph_us, from \[\([^]]*\)\].*/\1/p' README.md)
bars results/ladder.svg "$root/$main" 'mission|long'
for svg in results/ablation-*.svg; do well_formed "$svg"; done
exit $failed
