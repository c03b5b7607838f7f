#!/usr/bin/env bash
# What ablate takes back and how it sums up its rounds; what profile reads out of ncu's counters; refusals,
# also those of stress.
set -u
cd "$(dirname "$0")/.." || exit 1
. tests/expect.sh
# shellcheck disable=SC2317  # called by what is sourced
say() { printf '%s\n' "$*" >&2; }
# shellcheck disable=SC2317
refuse() { say "$*"; exit 2; }
# shellcheck disable=SC1090  # one function of run_all.sh
. <(sed -n '/^assertion_words/,/^}/p' run_all.sh)
. tools/ablate.sh
. tools/profile.sh

# ---- what is taken back ----
cat >"$dir/configs.txt" <<'EOT'
all USE_WMMA=1 BLOCK_M=64 USE_WMMA_PV=1 VEC_WIDTH=8 SYNC_POLICY=1 STAGES=2 USE_CP_ASYNC=1 USE_WARP_SPECIALIZATION=1 HEAD_DIM=128 gate:regs<=200
split USE_MMA_SYNC=1 VEC_WIDTH=8 BLOCK_M=32 SPLIT_KV=4 NUM_WARPS=8
EOT
# shellcheck disable=SC2034  # read by tools/derived.sh
configs_file=$dir/configs.txt
derive all
[[ $derived_words != *gate:* ]] || fail "a changed line keeps a gate"
removals "$derived_words" >"$dir/all"
while IFS= read -r want; do
  grep -qxF "$want" "$dir/all" || fail "all: want $want"
done <<'EOT'
USE_WMMA_PV=0
USE_CP_ASYNC=0
STAGES=1
USE_WARP_SPECIALIZATION=0
VEC_WIDTH=1 USE_CP_ASYNC=0
SYNC_POLICY=5 USE_WARP_SPECIALIZATION=0
! BLOCK_M=32 BLOCK_M and NUM_WARPS: a wmma warp owns 16 query rows, so BLOCK_M must be 16*NUM_WARPS; type BLOCK_M=64 NUM_WARPS=4
EOT
grep -q 'HEAD_DIM' "$dir/all" && fail "HEAD_DIM is the problem, no optimisation"
derive split
removals "$derived_words" | grep -q '^SPLIT_KV=1 BLOCK_M=128 NUM_WARPS=4' || fail "split: the refusal's advice is not taken"
# Everything that it proposes is legal.
while IFS= read -r removal; do
  [[ $removal == '! '* ]] && continue
  # shellcheck disable=SC2086  # one word a knob
  mapfile -t list < <(changed "$(line_words all)" $removal | grep -v '^gate:')
  [ -z "$(refusal "${list[@]}")" ] || fail "all, $removal: $(refusal "${list[@]}")"
done <"$dir/all"
derive all STAGES=3 BLOCK_N=64
[ "$derived_name" = all__STAGES_3__BLOCK_N_64 ] || fail "name $derived_name"

# ---- rounds ----
cat >"$dir/rows" <<'EOT'
config,shape,causal,status,graph_us,tflops,graph_lo_us,graph_hi_us,check,device,note
l,mission,off,ok,10.000,100.00,9,11,PASS,GPU,
l__A_0,mission,off,ok,16.000,50.00,9,11,PASS,GPU,
l__B_0,,,error,,,,,,,needs A
EOT
printf '%s\n' l,mission,off,ok,12,1,1,1,,GPU, l,mission,off,ok,11,1,1,1,,GPU, l__A_0,mission,off,ok,20,1,1,1,,GPU, >"$dir/later"
merge_rounds "$dir/rows" "$dir/later" >"$dir/merged"
grep -qx 'l,mission,off,ok,11.000,90.91,10.000,12.000,PASS,GPU,' "$dir/merged" || fail "the median of three rounds: $(cat "$dir/merged")"
grep -qx 'l__A_0,mission,off,ok,18.000,44.44,16.000,20.000,PASS,GPU,' "$dir/merged" || fail "the median of two rounds: $(cat "$dir/merged")"
print_waterfall l "$dir/merged" >"$dir/waterfall"
grep -q 'A_0 .*PASS .*18.000 us  *+63.6% #' "$dir/waterfall" || fail "no waterfall: $(cat "$dir/waterfall")"
grep -q 'B_0: needs A' "$dir/waterfall" || fail "the waterfall keeps silent about what cannot be taken back"

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
expect 2 "ablate: --rounds 0: want a whole number from 1 to 99" ./run_all.sh ablate wmma_all --rounds 0
expect 2 "nobody: no line of configs.txt has that name" ./run_all.sh profile nobody
expect 2 "profile: --frob: no such option" ./run_all.sh profile wmma_all --frob
expect 2 "cublas runs three kernels" ./run_all.sh profile cublas
expect 2 "nobody: no line of configs.txt has that name" ./run_all.sh stress nobody
expect 2 "stress: --repeats 0: want a whole number from 1 to 999999" ./run_all.sh stress --repeats 0
expect 2 "stress: --frob: no such option" ./run_all.sh stress --frob
if ! nvidia-smi -L 2>/dev/null | grep -q GPU; then
  expect 2 "stress: it runs kernels side by side and there is no GPU here" ./run_all.sh stress
  expect 2 "profile: it times kernels and there is no GPU here" ./run_all.sh profile wmma_all
  expect 2 "ablate: it times kernels and there is no GPU here" ./run_all.sh ablate wmma_all
fi
if command -v python3 >/dev/null && ! python3 -c 'import torch' 2>/dev/null; then
  expect 1 "peers.py: PyTorch is missing; install it with: pip install torch" tools/peers.py mma_lazy
fi
exit $failed
