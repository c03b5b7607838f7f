#!/usr/bin/env bash
# Puts a results CSV into README.md between its markers. usage: tools/readme_tables.sh [CSV]
set -eu
cd "$(dirname "$0")/.."
csv=${1-}
if [ -z "$csv" ]; then
  # shellcheck disable=SC2012  # names are DATE-DEVICE[-N].csv, made by run_all.sh
  csv=$(ls -t results/*.csv 2>/dev/null | head -1)
fi
if [ ! -r "$csv" ]; then
  echo "readme_tables.sh: no CSV to read; measure first with ./run_all.sh, or name one" >&2
  exit 2
fi

awk -F, -v file="$csv" '
  NR == 1 { for (i = 1; i <= NF; i++) at[$i] = i; next }
  {
    c = $at["config"]
    if (!(c in seen)) { order[++n] = c; seen[c] = 1 }
    line[c] = $0
    us[c, $at["shape"]] = $at["graph_us"]; tflops[c, $at["shape"]] = $at["tflops"]
    if ($at["check"] != "PASS") ok[c] = $at["note"] ~ /^expected failure/ ? "FAIL, as it must" : "FAIL"
    else if (!(c in ok)) ok[c] = "PASS"
    if ($at["device"] != "") provenance = $at["device"] ", driver " $at["driver"] ", CUDA " \
        $at["cuda"] ", commit `" $at["git_sha"] "`"
    if ($at["clock_mhz"] + 0 > mhz) mhz = $at["clock_mhz"] + 0
  }
  function speed_up(c, shape) {
    return us[c, shape] && us[order[1], shape] ? sprintf("%.2fx", us[order[1], shape] / us[c, shape]) : ""
  }
  END {
    print "| config | check | type | D | mission µs | | long µs | | long TFLOP/s | regs | shared KB | CTAs/SM | barriers |"
    print "|---|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|"
    for (i = 1; i <= n; i++) {
      c = order[i]; split(line[c], f, ",")
      printf "| %s | %s | %s | %s | %s | %s | %s | %s | %s | %s | %.1f | %s | %s |\n", c, ok[c], \
        f[at["dtype"]], f[at["D"]], us[c, "mission"], speed_up(c, "mission"), us[c, "long"], \
        speed_up(c, "long"), tflops[c, "long"], f[at["regs"]], f[at["smem_bytes"]] / 1024, \
        f[at["ctas_per_sm"]], f[at["barriers_per_tile"]]
    }
    printf "\n%s, SM clock %d MHz. graph_us of `./run_all.sh`; every row of it is in [%s](%s).\n", \
      provenance, mhz, file, file
  }' "$csv" | tools/readme_section.sh results
echo "README.md now shows $csv" >&2
