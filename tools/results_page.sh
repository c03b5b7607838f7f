#!/usr/bin/env bash
# Puts the CSVs of results/ into README.md between its markers, and draws results/*.svg from them.
# usage: tools/results_page.sh [CSV | results/peers/CSV | results/ablation/CSV]...
# What is not named is the newest by its name (a clone has no mtimes worth reading): results/DATE-DEVICE[-N].csv,
# and for the same device the newest of results/peers/ and the newest of each line in results/ablation/.
set -eu -o pipefail
export LC_ALL=C
cd "$(dirname "$0")/.."

refuse() { printf 'results_page.sh: %s\n' "$*" >&2; exit 2; }
case ${1-} in -h|--help) sed -n '2,5s/^# //p' tools/results_page.sh; exit 0 ;; esac
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
rows=$(cat tools/rows.awk)

# by_date FILE...: those that exist, oldest first.
by_date() {
  local f
  for f in "$@"; do if [ -e "$f" ]; then printf '%s\n' "${f%.csv}"; fi; done | sort -V | sed 's/$/.csv/'
}
# first COLUMN CSV: its first value that is not empty.
first() {
  awk -F, -v column="$1" 'NR == 1 { for (i = 1; i <= NF; i++) if ($i == column) c = i; next }
                          c && $c != "" { print $c; exit }' "$2"
}

main='' peers='' ablations=()
for csv in "$@"; do
  [ -f "$csv" ] || refuse "$csv: no such file"
  case $csv in
    *peers/*) peers=$csv ;;
    *ablation/*) ablations+=("$csv") ;;
    *) main=$csv ;;
  esac
done
[ -n "$main" ] || main=$(by_date results/[0-9]*.csv | tail -1)
[ -n "$main" ] || refuse "no CSV in results/; measure first with ./run_all.sh, or name one"
device=$(first device "$main")
if [ -z "$peers" ]; then
  for csv in $(by_date results/peers/[0-9]*.csv); do
    [ "$(first device "$csv")" != "$device" ] || peers=$csv
  done
fi
if [ ${#ablations[@]} -eq 0 ]; then
  declare -A newest=()
  for csv in $(by_date results/ablation/[0-9]*.csv); do
    [ "$(first device "$csv")" != "$device" ] || newest[$(first config "$csv")]=$csv
  done
  for name in $(printf '%s\n' "${!newest[@]}" | sort); do ablations+=("${newest[$name]}"); done
fi

# ---- the pictures come first: they refuse what is no CSV with times ----
tools/svg.sh ladder "$main" ${peers:+"$peers"} >"$tmp/ladder.svg"

# The fastest line of each problem, from both CSVs, beside the fastest peer.
awk -F, -v tool=results_page.sh -v main="$main" -v peers="$peers" "$rows"'
  function add(p, title_of_p) { if (!(p in title)) { title[p] = title_of_p; order[++n] = p } }
  cell("graph_us") + 0 <= 0 { next }
  {
    p = problem(); s = cell("shape"); c = cell("config"); t = cell("graph_us") + 0
    named = s ~ /^[a-z]/
    if (FILENAME == peers) add(p, (named ? s ": " : "") p)
    # Of the main CSV only the problems of its first line; that of another head size is no size people ask for.
    else if (named && s != "small" && !(s in base)) { base[s] = p; add(p, s ": " p) }
    if (is_peer()) {
      if (!(p in peer_us) || t < peer_us[p]) { peer_us[p] = t; peer[p] = peer_name(c) }
    } else if (cell("check") == "PASS" && (!((p, c) in us) || t < us[p, c])) {
      if (!(c in seen)) { seen[c] = 1; line[++lines] = c }
      us[p, c] = t; tflops[p, c] = cell("tflops")
    }
  }
  END {
    if (failed) exit failed
    print "| problem (B,Hq,Hkv,Sq,Sk,D) | fastest line | µs | TFLOP/s | best peer | its µs | times as fast |"
    print "|---|---|--:|--:|---|--:|--:|"
    for (i = 1; i <= n; i++) {
      p = order[i]; c = ""
      for (j = 1; j <= lines; j++)  # a negative control may be fast, and pass by luck
        if (!(line[j] in control) && ((p, line[j]) in us) && (c == "" || us[p, line[j]] < us[p, c])) c = line[j]
      if (c == "") continue
      printf "| %s | %s | %s | %.0f |", title[p], c, short_us(us[p, c]), tflops[p, c]
      if (p in peer) printf " %s | %s | %.2fx |\n", peer[p], short_us(peer_us[p]), peer_us[p] / us[p, c]
      else print " | | |"
    }
    printf "\n![The time of every line of configs.txt at mission and long](results/ladder.svg)\n\n"
    printf "%s, SM clock %d MHz. graph_us, from [%s](%s)", provenance(file, "`"), mhz[file], main, main
    if (peers != "") {
      printf "; peers and the other problems from [%s](%s)", peers, peers
      if (provenance(1) != provenance(2)) printf " (%s)", provenance(1, "`")
    }
    print ". `./run_all.sh results` redraws this page."
  }' ${peers:+"$peers"} "$main" >"$tmp/best.md"

# Every line, with what each takes of an SM.
awk -F, -v tool=results_page.sh "$rows"'
  {
    c = cell("config"); s = cell("shape")
    if (!(c in verdict)) { order[++n] = c; verdict[c] = "PASS" }
    if (cell("status") != "ok") verdict[c] = cell("status")
    else if (cell("check") != "PASS") verdict[c] = "FAIL"
    us[c, s] = cell("graph_us"); tflops[c, s] = cell("tflops")
    about[c] = cell("dtype") " | " cell("D")
    kilobytes = cell("smem_bytes") == "" ? "" : sprintf("%.1f", cell("smem_bytes") / 1024)
    costs[c] = cell("regs") " | " kilobytes " | " cell("ctas_per_sm") " | " cell("barriers_per_tile")
  }
  function speed_up(c, s) {
    return us[c, s] && us[order[1], s] ? sprintf("%.2fx", us[order[1], s] / us[c, s]) : ""
  }
  END {
    if (failed) exit failed
    print "\n<details><summary>All " n " lines as a table</summary>\n"
    print "| config | check | type | D | mission µs | | long µs | | long TFLOP/s | regs | shared KB | CTAs/SM | barriers |"
    print "|---|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|"
    for (i = 1; i <= n; i++) {
      c = order[i]
      printf "| %s | %s | %s | %s | %s | %s | %s | %s | %s |\n", c, \
        c in control ? "FAIL, as it must" : verdict[c], about[c], us[c, "mission"], speed_up(c, "mission"), \
        us[c, "long"], speed_up(c, "long"), tflops[c, "long"], costs[c]
    }
    print "\n</details>"
  }' "$main" >"$tmp/all.md"
cat "$tmp/best.md" "$tmp/all.md" >"$tmp/results.md"

# ablation_section CSV LINK: picture and table of one line; the percentage is what the absence costs.
ablation_section() {
  local name
  name=$(first config "$1")
  tools/svg.sh ablation "$1" >"$tmp/ablation-$name.svg"
  printf '![What each optimisation of %s is worth](results/ablation-%s.svg)\n\n' "$name" "$name"
  awk -F, -v tool=results_page.sh -v link="$2" "$rows"'
    {
      c = cell("config"); s = cell("shape")
      if (!(c in seen)) { order[++n] = c; seen[c] = 1 }
      if (cell("ctas_per_sm") != "") ctas[c] = cell("ctas_per_sm")
      if (cell("check") == "PASS") us[c, s] = cell("graph_us")
      else words[c] = cell("note") == "" ? cell("status") " " cell("check") : cell("note")
      if (c == order[1] && us[c, s] + 0 > 0) shape[++shapes] = s
    }
    function cost(c, s) {
      return c != order[1] && us[c, s] ? sprintf("%+.0f%%", 100 * (us[c, s] / us[order[1], s] - 1)) : ""
    }
    END {
      if (failed) exit failed
      head = "| change |"; rule = "|---|"
      for (j = 1; j <= shapes; j++) { head = head " " shape[j] " µs | |"; rule = rule "--:|--:|" }
      print head " CTAs/SM |\n" rule "--:|"
      for (i = 1; i <= n; i++) {
        c = order[i]
        printf "| %s |", i == 1 ? c : removed(c, order[1])
        for (j = 1; j <= shapes; j++) {
          t = us[c, shape[j]]
          if (j == 1 && t == "") { gsub(/[|]/, "/", words[c]); t = words[c] }
          printf " %s | %s |", t, cost(c, shape[j])
        }
        print " " ctas[c] " |"
      }
      printf "\n%s. [%s](%s)\n", provenance(1, "`"), link, link
    }' "$1"
}
{
  if [ ${#ablations[@]} -gt 0 ]; then
    blank=''
    for csv in "${ablations[@]}"; do
      printf '%s' "$blank"
      ablation_section "$csv" "$csv"
      blank=$'\n'
    done
  else
    echo 'None on this GPU yet: ./run_all.sh ablate NAME measures one.'
  fi
} >"$tmp/ablation.md"

# The fastest line of each problem beside every peer, all from one run.
if [ -n "$peers" ]; then
  awk -F, -v tool=results_page.sh -v link="$peers" "$rows"'
    {
      p = problem(); c = cell("config"); t = cell("graph_us")
      if (!(p in seen)) { order[++n] = p; seen[p] = 1 }
      text = t == "" ? "" : sprintf("%s (%.0f)", short_us(t), cell("tflops"))
      if (cell("note") ~ /^PyTorch/) torch = cell("note")
      if (is_peer()) {
        if (!(c in seen_peer)) { seen_peer[c] = 1; peer[++peers] = c }
        theirs[p, c] = text
      } else if (cell("check") == "PASS" && t != "") {
        if (!(p in best) || t + 0 < best[p]) { best[p] = t + 0; ours[p] = c " | " text }
        if (!(c in seen_line)) { seen_line[c] = 1; line[++lines] = c; width[c] = cell("D") }
        rate[p, c] = sprintf("%.0f", cell("tflops"))
      }
      head_dim[p] = cell("D")
    }
    # Every line of one head dimension, TFLOP/s: a row is a rung of the ladder.
    function ladder(D, i, j) {
      head = "| TFLOP/s |"; rule = "|---|"
      for (i = 1; i <= n; i++) {
        if (head_dim[order[i]] == D) { head = head " " order[i] " |"; rule = rule "--:|" }
      }
      print "\n" head "\n" rule
      for (j = 1; j <= lines; j++) {
        if (width[line[j]] != D) continue
        printf "| %s |", line[j]
        for (i = 1; i <= n; i++) if (head_dim[order[i]] == D) printf " %s |", rate[order[i], line[j]]
        print ""
      }
    }
    END {
      if (failed) exit failed
      head = "| B,Hq,Hkv,Sq,Sk,D | fastest line | µs (TFLOP/s) |"; rule = "|---|---|--:|"
      for (j = 1; j <= peers; j++) { head = head " " peer_name(peer[j]) " |"; rule = rule "--:|" }
      print head "\n" rule
      for (i = 1; i <= n; i++) {
        p = order[i]
        printf "| %s | %s |", p, p in ours ? ours[p] : " | "
        for (j = 1; j <= peers; j++) printf " %s |", theirs[p, peer[j]]
        print ""
      }
      for (j = 1; j <= lines; j++) of_D[width[line[j]]]++
      for (D = 64; D <= 256; D *= 2) if (of_D[D] > 1) ladder(D)
      printf "\nOne run: %s; the peers through %s. [%s](%s)\n", provenance(1, "`"), torch, link, link
    }' "$peers" >"$tmp/peers.md"
else
  echo 'None on this GPU yet: tools/peers.py measures them.' >"$tmp/peers.md"
fi

# ---- everything is made: now it takes the place of what was there ----
for section in results ablation peers; do tools/readme_section.sh $section <"$tmp/$section.md"; done
rm -f results/ablation-*.svg  # a line that has no ablation any more has no picture either
cp "$tmp"/*.svg results/
echo "README.md and results/*.svg now show $main ${peers:-} ${ablations[*]-}" >&2
