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
# The ablation: each line wmma_all... against wmma_all, as the time that taking the thing away costs.
awk -F, '
  NR == 1 { for (i = 1; i <= NF; i++) at[$i] = i; next }
  $at["config"] ~ /^wmma_all/ {
    c = $at["config"]
    if (!(c in seen)) { order[++n] = c; seen[c] = 1 }
    us[c, $at["shape"]] = $at["graph_us"]; ctas[c] = $at["ctas_per_sm"]
  }
  function cost(c, shape, base) {
    base = us[order[1], shape]
    return base && us[c, shape] ? sprintf("%+.0f%%", 100 * (us[c, shape] / base - 1)) : ""
  }
  END {
    print "| config | mission µs | | long µs | | CTAs/SM |"
    print "|---|--:|--:|--:|--:|--:|"
    for (i = 1; i <= n; i++) {
      c = order[i]; at_mission = at_long = ""
      if (i > 1) { at_mission = cost(c, "mission"); at_long = cost(c, "long") }
      printf "| %s | %s | %s | %s | %s | %s |\n", c, us[c, "mission"], at_mission, us[c, "long"], \
        at_long, ctas[c]
    }
  }' "$csv" | tools/readme_section.sh ablation

# The peers: the fastest line of each problem beside PyTorch's backends, all from one run.
peers=results/peers/${csv##*/}
if [ -r "$peers" ]; then
  awk -F, -v file="$peers" '
    NR == 1 { for (i = 1; i <= NF; i++) at[$i] = i; next }
    {
      problem = $at["B"] "," $at["Hq"] "," $at["Hkv"] "," $at["Sq"] "," $at["Sk"] "," $at["D"] " " $at["dtype"] \
          ($at["causal"] == "off" ? "" : " causal")
      if (!(problem in seen)) { order[++n] = problem; seen[problem] = 1 }
      cell = $at["graph_us"] == "" ? "" : sprintf("%.1f (%.0f)", $at["graph_us"], $at["tflops"])
      if ($at["config"] == "torch_flash") flash[problem] = cell
      else if ($at["config"] == "torch_cudnn") cudnn[problem] = cell
      else if ($at["check"] == "PASS" && (!(problem in best) || $at["graph_us"] + 0 < best[problem])) {
        best[problem] = $at["graph_us"] + 0; ours[problem] = cell; name[problem] = $at["config"]
      }
      if ($at["git_sha"] != "") sha = $at["git_sha"]
      if ($at["note"] ~ /^PyTorch/) torch = $at["note"]
    }
    END {
      print "| B,Hq,Hkv,Sq,Sk,D | fastest line | µs (TFLOP/s) | FlashAttention-2 | cuDNN |"
      print "|---|---|--:|--:|--:|"
      for (i = 1; i <= n; i++) {
        p = order[i]
        printf "| %s | %s | %s | %s | %s |\n", p, name[p], ours[p], flash[p], cudnn[p]
      }
      printf "\nOne run, commit `%s`; the peers through %s. [%s](%s)\n", sha, torch, file, file
    }' "$peers" | tools/readme_section.sh peers
fi
echo "README.md now shows $csv" >&2
