#!/usr/bin/env bash
# What profile reads out of ncu's counters; refusals of profile, stress, ablate and peers.
set -u
cd "$(dirname "$0")/.." || exit 1
. tests/expect.sh
# shellcheck disable=SC2317  # called by what is sourced
say() { printf '%s\n' "$*" >&2; }
# shellcheck disable=SC2317
refuse() { say "$*"; exit 2; }
. tools/profile.sh

# ---- ncu's counters ----
metric='"ID","Kernel Name"' unit='"",""' value='"0","sdpa_mma"'
counter() { metric+=",\"$1\"" unit+=",\"$2\"" value+=",\"$3\""; }
counter gpu__time_duration.sum us "1,500.00"
counter sm__cycles_elapsed.avg.per_second Ghz 1.80
counter sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed % 60.00
counter sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_elapsed % 40.00
counter smsp__issue_active.avg.pct_of_peak_sustained_active % 39.00
counter l1tex__data_pipe_lsu_wavefronts_mem_shared.sum '' "1,000"
counter l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum '' 250
counter lts__t_bytes.sum Mbyte 4.00
counter dram__bytes_read.sum Kbyte 900.00
counter dram__bytes_write.sum byte "100,000"
counter gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed % 3.00
counter smsp__average_warps_issue_stalled_wait_per_issue_active.ratio '' 3
counter smsp__average_warps_issue_stalled_selected_per_issue_active.ratio '' 1
printf '==PROF== words\n%s\n%s\n%s\n' "$metric" "$unit" "$value" >"$dir/ncu.csv"
row() { printf 'config,family,shape,B,Hq,Hkv,Sq,Sk,D,sm,device,causal\nline,%s,mission,1,2,1,512,512,64,%s,GPU,br' "$1" "$2"; }
profile_verdict "$(row mma 90)" <"$dir/ncu.csv" >"$dir/verdict" || fail "no verdict"
[ "$(wc -l <"$dir/verdict")" = 11 ] || fail "not a line and ten more"
# Tensors: Q and O 2*512*64, K and V 1*512*64 elements of 2 bytes each, LSE 2*512 floats.
for want in 'line at mission causal br on GPU: 1500.00 us under ncu, SM at 1800 MHz' \
  'tensor pipe .*60.0%  93% of what mma.sync can reach' '25.0% of its wavefronts are bank conflicts' \
  '4.0 MB, 10.1 times the tensors' '1.0 MB, 2.52 of the 0.4 MB' 'wait 75%' 'tensor pipe >= 50%: yes; DRAM < 50%: yes' \
  'bound by  *tensor pipe, at 93% of its limit'; do
  grep -q -- "$want" "$dir/verdict" || { fail "no such line: $want"; cat "$dir/verdict"; }
done
profile_verdict "$(row wgmma 90)" <"$dir/ncu.csv" | grep -q 'bound by  *latency: the busiest unit is the tensor pipe at 60%' ||
  fail "wgmma is held against mma.sync's limit"
echo '==ERROR== nothing' | profile_verdict "$(row mma 90)" >/dev/null && fail "a verdict out of nothing"

# ---- bad input ----
expect 2 "nobody: no line of configs.txt has that name" ./run_all.sh ablate nobody
expect 2 "ablate: which line?" ./run_all.sh ablate
expect 2 "ablate: --rounds: no such option" ./run_all.sh ablate wmma_all --rounds 0
expect 2 "nobody: no line of configs.txt has that name" ./run_all.sh profile nobody
expect 2 "profile: --frob: no such option" ./run_all.sh profile wmma_all --frob
expect 2 "cublas runs three kernels" ./run_all.sh profile cublas
expect 2 "nobody: no line of configs.txt has that name" ./run_all.sh stress nobody
expect 2 "stress: --repeats 0: want a whole number from 1 to 999999" ./run_all.sh stress --repeats 0
expect 2 "stress: --frob: no such option" ./run_all.sh stress --frob
if ! nvidia-smi -L 2>/dev/null | grep -q GPU; then
  expect 2 "stress: it runs kernels side by side and there is no GPU here" ./run_all.sh stress
  expect 2 "profile: it times kernels and there is no GPU here" ./run_all.sh profile wmma_all
  expect 2 "peers.py: it times kernels and there is no GPU here" tools/peers.py mma_lazy
  expect 2 "gates: --time needs a GPU" ./run_all.sh gates --time
  expect 2 "ablate: it times kernels and there is no GPU here" ./run_all.sh ablate wmma_all
fi
exit $failed
