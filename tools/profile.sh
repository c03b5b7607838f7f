# ./run_all.sh profile: what binds a line's kernel. Sourced by run_all.sh.
# shellcheck shell=bash
. tools/derived.sh

profile_usage() {
  cat <<'EOT'
usage: ./run_all.sh profile NAME [--shape S] [-- EXECUTABLE-OPTION...]
Runs the kernel of the line NAME once under ncu (Nsight Compute) with the counters that matter for
attention, and prints in ten lines what binds it and how far it is from that limit.
  --shape S   the problem (default long)
exit: 0, 1 the kernel gives wrong results, 2 bad usage, no ncu, or no right to read the counters
EOT
}

stall_reasons="barrier branch_resolving dispatch_stall drain gmma imc_miss lg_throttle long_scoreboard
  math_pipe_throttle membar mio_throttle no_instruction not_selected selected short_scoreboard sleeping wait"

ncu_metrics() {  # the names, separated by commas
  local reason
  {
    printf '%s\n' gpu__time_duration.sum sm__cycles_elapsed.avg.per_second \
      sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed \
      sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_elapsed \
      sm__pipe_fma_cycles_active.avg.pct_of_peak_sustained_elapsed \
      sm__pipe_alu_cycles_active.avg.pct_of_peak_sustained_elapsed \
      smsp__issue_active.avg.pct_of_peak_sustained_active \
      l1tex__data_pipe_lsu_wavefronts_mem_shared.sum.pct_of_peak_sustained_elapsed \
      l1tex__data_pipe_lsu_wavefronts_mem_shared.sum \
      l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum \
      lts__throughput.avg.pct_of_peak_sustained_elapsed lts__t_bytes.sum \
      gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed dram__bytes_read.sum dram__bytes_write.sum \
      sm__warps_active.avg.per_cycle_active
    for reason in $stall_reasons; do
      echo "smsp__average_warps_issue_stalled_${reason}_per_issue_active.ratio"
    done
  } | paste -sd,
}

# profile_verdict ROW < NCU_CSV: the ten lines. NCU_CSV is what `ncu --csv --page raw` prints: a line of
# names, one of units, one of values, every field in quotes. ROW is the executable's header and row.
#
# Peaks: ncu's percentages are of what the unit can do. mma.sync cannot fill Hopper's tensor pipe: it
# stops at 2640 of wgmma's 4096 FLOP per clock and SM (6.2 clocks per m16n8k16 and scheduler; measured
# with independent instructions alone), so on sm_90 the mma and wmma families are held against that.
profile_verdict() {
  awk -v row="$1" '
    function fields(line, out,   n) {  # of a CSV line in which every field is quoted
      gsub(/\r/, "", line)
      sub(/^"/, "", line)
      sub(/"$/, "", line)
      return split(line, out, /","/)
    }
    function number(text) { gsub(/,/, "", text); return text + 0 }
    function metric(name) { return number(value[name]) }
    function percent(name) { return metric(name ".pct_of_peak_sustained_" (name ~ /issue/ ? "active" : "elapsed")) }
    function scaled(name,   u) {  # in the base unit: ncu chooses prefixes by itself
      u = unit[name]
      return metric(name) * (u ~ /^T/ ? 1e12 : u ~ /^G/ ? 1e9 : u ~ /^M/ ? 1e6 : u ~ /^K/ ? 1e3 : \
                             u == "us" || u == "usecond" ? 1e3 : u == "ms" || u == "msecond" ? 1e6 : 1)
    }
    BEGIN {
      split(row, lines, "\n")
      n = split(lines[1], name, ",")
      split(lines[2], f, ",")
      for (i = 1; i <= n; i++) r[name[i]] = f[i]
    }
    /^"ID"/ { n = fields($0, names); state = 1; next }
    state == 1 { fields($0, units); state = 2; next }
    state == 2 && /^"/ {
      fields($0, values)
      for (i = 1; i <= n; i++) { value[names[i]] = values[i]; unit[names[i]] = units[i] }
      state = 3
    }
    END {
      if (state != 3) exit 1
      tensor = percent("sm__pipe_tensor_cycles_active.avg")
      limited = r["sm"] ~ /^9/ && r["family"] ~ /^w?mma$/
      reach = limited ? 100 * 2640 / 4096 : 100
      dram = percent("gpu__dram_throughput.avg")
      use["tensor pipe"] = 100 * tensor / reach
      use["XU (MUFU)"] = percent("sm__inst_executed_pipe_xu.avg")
      use["FMA pipes"] = percent("sm__pipe_fma_cycles_active.avg")
      use["ALU"] = percent("sm__pipe_alu_cycles_active.avg")
      use["issue slots"] = percent("smsp__issue_active.avg")
      use["shared memory"] = percent("l1tex__data_pipe_lsu_wavefronts_mem_shared.sum")
      use["L2"] = percent("lts__throughput.avg")
      use["DRAM"] = dram
      for (u in use) if (most == "" || use[u] > use[most]) most = u
      moved = scaled("dram__bytes_read.sum") + scaled("dram__bytes_write.sum")
      bytes = 2 * r["D"] * r["B"] * 2 * (r["Hq"] * r["Sq"] + r["Hkv"] * r["Sk"]) + 4 * r["B"] * r["Hq"] * r["Sq"]
      waves = metric("l1tex__data_pipe_lsu_wavefronts_mem_shared.sum")
      conflicts = metric("l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum")
      for (m in value) {
        if (m !~ /^smsp__average_warps_issue_stalled_/) continue
        reason = m
        sub(/^smsp__average_warps_issue_stalled_/, "", reason)
        sub(/_per_issue_active\.ratio$/, "", reason)
        all += metric(m)
        if (reason != "selected") stall[reason] = metric(m)
      }
      for (k = 1; k <= 3; k++) {
        best = ""
        for (s in stall) if (!(s in taken) && (best == "" || stall[s] > stall[best])) best = s
        taken[best]
        top[k] = sprintf("%s %.0f%%", best, all ? 100 * stall[best] / all : 0)
      }
      mask = r["causal"] == "off" ? "" : " causal " r["causal"]
      printf "%s at %s%s on %s: %.2f us under ncu, SM at %.0f MHz\n", r["config"], r["shape"], mask, r["device"], \
             scaled("gpu__time_duration.sum") / 1e3, scaled("sm__cycles_elapsed.avg.per_second") / 1e6
      printf "  tensor pipe    %5.1f%%  %s\n", tensor, (limited ? \
             sprintf("%.0f%% of what mma.sync can reach on Hopper (%.1f%%)", 100 * tensor / reach, reach) : "")
      printf "  XU (MUFU)      %5.1f%%\n", use["XU (MUFU)"]
      printf "  FMA, ALU       %5.1f%%  %.1f%%\n", use["FMA pipes"], use["ALU"]
      printf "  issue slots    %5.1f%%  %.1f warps on an SM\n", use["issue slots"], metric("sm__warps_active.avg.per_cycle_active")
      printf "  shared memory  %5.1f%%  %.1f%% of its wavefronts are bank conflicts\n", use["shared memory"], \
             waves ? 100 * conflicts / waves : 0
      printf "  L2             %5.1f%%  %.1f MB, %.1f times the tensors\n", use["L2"], scaled("lts__t_bytes.sum") / 1e6, \
             scaled("lts__t_bytes.sum") / bytes
      printf "  DRAM           %5.1f%%  %.1f MB, %.2f of the %.1f MB of the tensors\n", dram, moved / 1e6, moved / bytes, bytes / 1e6
      printf "  warps wait for         %s, %s, %s\n", top[1], top[2], top[3]
      printf "  gates                  tensor pipe >= 50%%: %s; DRAM < 50%%: %s\n", \
             (tensor >= 50 ? "yes" : "no"), (dram < 50 ? "yes" : "no")
      if (use[most] >= 80) {
        printf "  bound by               %s, at %.0f%% of its limit\n", most, use[most]
      } else {
        printf "  bound by               latency: the busiest unit is the %s at %.0f%% of its limit; warps wait for %s\n", \
               most, use[most], top[1]
      }
    }'
}

profile_command() {
  local name='' shape=long more=()
  while [ $# -gt 0 ]; do
    case $1 in
      -h|--help) profile_usage; exit 0 ;;
      --shape) [ $# -gt 1 ] || refuse "profile: --shape: its value is missing"; shape=$2; shift 2 ;;
      --) shift; more=("$@"); break ;;
      -*) profile_usage >&2; refuse "profile: $1: no such option" ;;
      *)
        [ -z "$name" ] || { profile_usage >&2; refuse "profile: one line at a time"; }
        name=$1
        shift
        ;;
    esac
  done
  [ -n "$name" ] || { profile_usage >&2; refuse "profile: which line?"; }
  derive "$name"
  case $derived_words in *USE_CUBLAS=1*) refuse "profile: $name runs three kernels, two of them cuBLAS's; use ncu itself" ;; esac
  need_gpu profile
  command -v ncu >/dev/null || refuse "profile: ncu is missing; it is Nsight Compute of the CUDA Toolkit, put its folder on PATH"
  need_tools
  need_nvcc
  build_derived "$derived_name" "$derived_words"
  local sentence exe=$derived_build/sdpa_$name row status=0 report=$derived_build/ncu.csv
  sentence=$(why_not_built "$name")
  [ -z "$sentence" ] || refuse "profile: $name: $sentence"
  row=$("$exe" --check-only --header --shape "$shape" ${more[@]+"${more[@]}"}) || status=$?
  case $status in
    0) ;;
    1) say "profile: $name gives wrong results, so there is nothing to profile"; exit 1 ;;
    *) refuse "profile: $name does not run on this problem" ;;
  esac
  # The second launch: the first one finds L2 cold.
  ncu --clock-control none --csv --page raw --metrics "$(ncu_metrics)" --kernel-name 'regex:sdpa_' \
    --launch-skip 1 --launch-count 1 "$exe" --check-only --shape "$shape" ${more[@]+"${more[@]}"} \
    >"$report" 2>&1
  if grep -q ERR_NVGPUCTRPERM "$report"; then
    refuse "profile: this user may not read the GPU's counters (ERR_NVGPUCTRPERM): run as root, or load the driver with NVreg_RestrictProfilingToAdminUsers=0"
  fi
  profile_verdict "$row" <"$report" ||
    refuse "profile: ncu gave no counters: $(grep '^==' "$report" | tail -1) (all its words: $report)"
}
