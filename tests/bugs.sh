#!/usr/bin/env bash
# The checker checked: each bug below is put into a copy of sdpa.cu, built for the CPU backend, and
# must be caught by the net named beside it:
#   check    the self-check against the reference, or tests/contract.cu (exit 1)
#   backend  a report of the CPU backend (exit 3)
#   address  AddressSanitizer and UBSan           thread  ThreadSanitizer
# Each set of knobs and options is also run without a bug, and must pass. usage: bugs.sh [REGEX]
set -u
cd "$(dirname "$0")/.." || exit 1
only=${1-}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
jobs=$(nproc)
ln -s "$PWD/simt" "$work/simt"
cp reference.cpp tests/contract.cu tests/expect.h "$work/"
sed -i 's~"../reference.cpp"~"reference.cpp"~' "$work/contract.cu"
# Two objects make an executable: the bug's line, and the harness of the clean sdpa.cu with what tests/sweep.cu
# adds, which is compiled once.

# Not optimised: a bug takes longer to compile than to run.
flags=(-std=c++17 -O0 -march=native -ffp-contract=off -ftrivial-auto-var-init=pattern -w -pthread
       -I"$PWD/simt")

# compiler KIND ARGUMENT...
compiler() {
  local sanitize=()
  case $1 in
    address) sanitize=('-fsanitize=address,undefined' -fno-sanitize-recover=undefined -g1) ;;
    thread) sanitize=(-fsanitize=thread -g1) ;;
  esac
  "${CXX:-g++}" "${flags[@]}" "${sanitize[@]}" "${@:2}"
}
# prepare KIND: the engine, the standard headers, which every bug includes, and the harness.
prepare() {
  local macro=()
  case $1 in
    address) macro=(-DSIMT_ASAN) ;;
    thread) macro=(-DSIMT_TSAN) ;;
  esac
  mkdir "$work/$1"
  "${CXX:-g++}" -std=c++17 -O2 -march=native -ffp-contract=off "${macro[@]}" -c simt/engine.cpp \
    -o "$work/engine_$1.o" &
  grep -hE '^#include <([a-z_]+|unistd\.h)>' sdpa.cu reference.cpp | sort -u >"$work/$1/standard.h"
  compiler "$1" -x c++-header "$work/$1/standard.h" -o "$work/$1/standard.h.gch" &&
    compiled "$1" "" "$work/harness_$1.o" tests/sweep.cu && wait $!
}

# kind_of NET: the compiler's
kind_of() {
  case $1 in
    address | thread) echo "$1" ;;
    *) echo plain ;;
  esac
}
# compiled KIND "KNOBS" OBJECT ARGUMENT...: a file of $work
compiled() {
  local knob_list
  read -ra knob_list <<<"$2"
  compiler "$1" "${knob_list[@]/#/-D}" -include "$work/$1/standard.h" -x c++ -c "${@:4}" -o "$3"
}
# built SOURCE KIND "KNOBS" "OPTIONS" EXE: or why not. With the options "@contract [NAME]" it is
# tests/contract.cu with the SOURCE, run for the test NAME.
built() {
  local source=(-DSDPA_LINE_ONLY "$1") objects=("$work/harness_$2.o" "$5.o" "$work/engine_$2.o")
  if [[ $4 = @contract* ]]; then
    source=("-DSDPA_SOURCE=\"$(realpath "$1")\"" "$work/contract.cu")
    objects=("${objects[@]:1}")
  fi
  { compiled "$2" "$3" "$5.o" "${source[@]}" && compiler "$2" "${objects[@]}" -o "$5"; } 2>"$5.log" && return
  echo "does not compile: $(grep -m1 error "$5.log")"
  return 1
}
# outcome EXE "OPTIONS": "NET: evidence", or "nothing".
outcome() {
  local option_list=() out status=0
  read -ra option_list <<<"--check-only $2"
  [[ $2 != @contract* ]] || option_list=("${option_list[@]:2}")
  out=$(timeout 120 "$1" "${option_list[@]}" 2>&1) || status=$?
  if grep -q 'ThreadSanitizer: data race' <<<"$out"; then echo "thread: data race"
  elif grep -q 'ERROR: AddressSanitizer\|runtime error' <<<"$out"; then
    echo "address: $(grep -om1 'AddressSanitizer: [a-z-]*\|runtime error: .*' <<<"$out")"
  elif [ $status = 1 ] && [[ $2 = @contract* ]]; then echo "check: $(grep -om1 'not true: .*' <<<"$out")"
  elif grep -q '^simt: ' <<<"$out"; then echo "backend: $(sed -n 's/^simt: //p' <<<"$out" | head -1)"
  elif [ $status = 1 ]; then echo "check: $(sed -n 's/.*: FAIL [^:]*: //p' <<<"$out" | head -1)"
  elif [ $status = 0 ]; then echo "nothing"
  else echo "exit $status: $(head -1 <<<"$out")"
  fi
}
running=0
# Before something is run in the background: waits while all cores are busy.
one_more() {
  if [ $running -ge "$jobs" ]; then wait -n; else running=$((running + 1)); fi
}

# bug NAME NET "KNOBS" "OPTIONS" SED-SCRIPT, run in the background
bugs=0
bug() {
  local name=$1 net=$2 knobs=$3 options=$4 script=$5 kind
  [[ $name =~ $only ]] || return 0
  bugs=$((bugs + 1))
  kind=$(kind_of "$net")
  [ -d "$work/$kind" ] || { wait; running=0; prepare "$kind" || exit 1; }
  echo "$kind|$knobs|$options" >>"$work/clean.txt"
  one_more
  (
    sed -E "$script" sdpa.cu >"$work/$name.cu"
    if cmp -s sdpa.cu "$work/$name.cu"; then
      found="no line of sdpa.cu matches its edit"
    else
      found=$(built "$work/$name.cu" "$kind" "$knobs" "$options" "$work/$name" && outcome "$work/$name" "$options")
    fi
    verdict=MISSED
    [[ $found == "$net: "* ]] && verdict=caught
    printf '%-26s %-7s %s\n' "$name" $verdict "${found:0:110}" >"$work/$name.result"
  ) &
}

async="VEC_WIDTH=8 SYNC_POLICY=1 USE_CP_ASYNC=1 STAGES=2"
# ---- what is computed ----
bug last_tile_dropped      check   ""  "--shape 1,1,1,40,70"  's~k0 < t\.keys\.end; k0 \+= B::block_n~k0 + B::block_n <= t.keys.end; k0 += B::block_n~'
bug o_not_rescaled         check   ""  "--shape 1,1,1,40,70"  's~scale_rows\(O, alpha\);~;~'
bug l_not_rescaled         check   ""  "--shape 1,1,1,40,70"  's~fmaf\(l\[i\], alpha\[i\], sum\[i\]\)~l[i] + sum[i]~'
bug scale_wrong            check   ""  "--shape small"        's~1 / std::sqrt\(double\(p\.D\)\)~1 / double(p.D)~'
bug max_of_one_lane        check   "VEC_WIDTH=8 SYNC_POLICY=1" "--shape small --dist large"  's~^.*m_new = fmaxf\(m_new, __shfl_xor_sync.*$~~'
bug mask_off_by_one        check   ""  "--shape 1,1,1,40,70 --causal br"  's~own \+ right \+ 1~own + right + 2~'
bug top_left_for_bottom    check   ""  "--shape 1,1,1,40,70 --causal br"  's~bottom_right \? p\.Sk - p\.Sq : 0~bottom_right ? 0 : 0~'
bug inf_minus_inf          check   ""  "--shape 1,1,1,70,33 --causal br"  's~m == -INFINITY \? 0\.0f : m~m~'
bug lse_to_base_2          check   ""  "--shape small"  's~a\.scale_log2 \* ln2, ln2 \* lg2~a.scale_log2, lg2~'
# ---- where it comes from ----
bug wrong_kv_head          check   ""  "--shape 1,4,2,20,30"  's~h_kv = item\.h / \(p\.Hq / p\.Hkv\)~h_kv = item.h % p.Hkv~'
bug stride_ignored         check   ""  "--shape 1,2,2,20,30 --layout packed"  's~s\.K\[stage\], K_g, p\.k\.row~s.K[stage], K_g, B::head_dim~'
bug offset_of_32_bits      check   ""  "--shape 2,1,1,20,30 --layout far"  's~p\.K \+ item\.b \* p\.k\.batch~p.K + int(item.b * p.k.batch)~'
bug tail_rows_not_zeroed   check   ""  "--shape 1,1,1,20,30"  's~(VectorCopy<B::use_cp_async>::template copy<B::vec_width)~if (r < rows) \1~'
bug tail_rows_read         backend ""  "--shape 1,1,1,20,9"   's~src_g \+ c, r < rows\)~src_g + c, true)~'
bug swizzled_store_only    check   "SWIZZLE_XOR=1"  "--shape small"  's~K_s \+ tile_offset<B>\(S\.col\(j\), d\)~K_s + S.col(j) * B::head_dim + d~'
bug wrong_stage            check   "$async"  "--shape 1,1,1,40,150"  's~s\.P, s\.V\[stage\]~s.P, s.V[(stage + 1) % B::stages]~'
# ---- when ----
bug no_barrier_after_load  check   "VEC_WIDTH=8 SYNC_POLICY=1"  "--shape small"  's~sync_for<B, Hazard::kv_written>\(\);~~'
bug no_barrier_after_s     thread  "VEC_WIDTH=8 SYNC_POLICY=2"  "--shape small"  's~sync_for<B, Hazard::s_written>\(\);~~'
bug no_barrier_before_reuse thread "VEC_WIDTH=8 SYNC_POLICY=1"  "--shape 1,1,1,32,96"  's~sync_for<B, Hazard::tile_read>\(\);~~'
bug no_syncwarp_after_p    thread  "VEC_WIDTH=8 SYNC_POLICY=1"  "--shape small"  's~sync_for<B, Hazard::sum_written>\(\);~~'
bug barrier_in_a_branch    backend "VEC_WIDTH=8 SYNC_POLICY=1"  "--shape small"  's~sync_for<B, Hazard::kv_written>\(\);~if (threadIdx.x / 32) sync_for<B, Hazard::kv_written>(); else sync_for<B, Hazard::tile_read>();~'
bug no_wait_for_copies     check   "$async"  "--shape 1,1,1,40,150"  's~^.*template wait<copies_last .*$~~'
bug wait_for_older_group   check   "$async"  "--shape 1,1,1,40,150"  's~(copies_last \? B::stages - 2 : B::stages) - 1~\1~'
bug shared_uninitialised   check   ""  "--shape small"  's~ = -INFINITY, s\.l\[S\.row\(i\)\] = 0;~ = -INFINITY;~'
# ---- what is written ----
bug row_past_the_end       check   ""  "--shape 1,1,1,33,20"  's~if \(q >= p\.Sq\) continue;~if (q > p.Sq) continue;~'
bug o_written_twice        thread  "VEC_WIDTH=8"  "--shape small"  's~(if \(q >= p\.Sq\) continue;)~\1 if (O.row(i) == 0) st_global(O_g + (item.q0 + 8) * p.o.row + O.col(0), Vector{});~'
bug lse_one_too_far        check   ""  "--shape small"  's~\* a\.p\.Sq \+ q;~* a.p.Sq + q + 1;~'
bug store_misaligned       backend "VEC_WIDTH=8"  "--shape small"  's~O\.first_col = lane % COL_LANES \* CHUNK;~O.first_col = lane % COL_LANES * CHUNK + 1;~'
bug shared_past_the_end    address ""  "--shape small"  's~m_out\[i\] = s\.m\[own\.row\(i\)\]~m_out[i] = s.m[own.row(i) + 3 * B::block_m + 1]~'
bug shared_too_small       backend ""  "--shape small"  's~dynamicSmemBytes = shared_bytes<B>;~dynamicSmemBytes = shared_bytes<B> - 16;~'
# ---- from launch to launch ----
bug previous_result_kept   check   ""  "--shape small"  's~(launch\.gridDim = dim3\(ctas\);)~static bool done = false; if (done) return {}; done = true; \1~'
bug queue_skips_an_item    check   "USE_PERSISTENT_CTA=1"  "--shape 1,2,2,70,20"  's~work_item<B>\(a, drawn_s\)~work_item<B>(a, drawn_s == 2 ? 1 : drawn_s)~'
bug queue_not_reset        check   "USE_PERSISTENT_CTA=1"  "--shape small"  's~^.*atomicExch\(counter, 0u\);~~'
# ---- the wmma kernel ----
wmma="USE_WMMA=1 USE_WMMA_PV=1 BLOCK_M=32 NUM_WARPS=2 VEC_WIDTH=8 SYNC_POLICY=1 SWIZZLE_XOR=1"
ws="$wmma USE_CP_ASYNC=1 STAGES=2 USE_WARP_SPECIALIZATION=1"
bug wmma_other_stride      check   "$wmma"  "--shape small"  's~K_s \+ tile_offset<B>\(n, d\), TILE_STRIDE<B>~K_s + tile_offset<B>(n, d), B::head_dim~'
bug wmma_rows_of_lane_0    check   "$wmma"  "--shape 1,1,1,32,96"  's~row\[e\] = int\(rows\.x\[e\]\)~row[e] = int(rows.x[0])~'
bug wmma_no_sync_after_s   check   "$wmma"  "--shape small"  's~__syncwarp\(\);  // hazard: S written.*$~~'
bug ws_no_wait_for_full    thread  "$ws"    "--shape 1,1,1,32,150"  's~mbarrier_spin\(&s\.full\[ring\.stage\], ring\.parity\);~~'
bug ws_no_wait_for_empty   thread  "$ws"    "--shape 1,1,1,32,150"  's~mbarrier_spin\(&s\.empty\[ring\.stage\], ring\.parity \^ 1\);.*$~~'
bug ws_wrong_parity        backend "$ws"    "--shape 1,1,1,32,150"  's~ring\.parity \^ 1~ring.parity~'
bug ws_released_by_one     thread  "$ws"    "--shape 1,1,1,32,150"  's~mbarrier_init\(&s\.empty\[stage\], consumers\)~mbarrier_init(\&s.empty[stage], 1)~'
bug ws_queue_skips_item    check   "$ws USE_PERSISTENT_CTA=1"  "--shape 1,2,2,70,20"  's~work_item<B>\(a, drawn_s\)~work_item<B>(a, drawn_s == 2 ? 1 : drawn_s)~'
# ---- the mma.sync kernel ----
mma="USE_MMA_SYNC=1 VEC_WIDTH=8 SWIZZLE_XOR=1 USE_CP_ASYNC=1 STAGES=2 BLOCK_M=32 NUM_WARPS=2"
split="$mma NUM_WARPS=4 SPLIT_KV=2 USE_LAZY_MAX=1"
bug mma_wrong_lane         check   "$mma"   "--shape small"  's~key = lane / 16 \* 8 \+ lane % 8~key = lane % 16~'
bug mma_swizzle_mismatch   check   "$mma"   "--shape small"  's~\(at \^ c % xored~(at + c % xored~'
bug mma_no_barrier         thread  "$mma"   "--shape 1,1,1,32,150"  's~^ *sync_for<B, Hazard::kv_written>\(\);~~'
bug mma_wait_older_group   check   "$mma"   "--shape 1,1,1,32,150"  's~copies_last \? B::stages - 2~copies_last ? B::stages - 1~'
bug mma_queue_skips_item   check   "$mma USE_PERSISTENT_CTA=1"  "--shape 1,2,2,70,20"  's~work_item<B>\(a, drawn_s\)~work_item<B>(a, drawn_s == 2 ? 1 : drawn_s)~'
bug mma_sees_too_little    check   "$mma"   "--shape 1,1,1,64,84 --causal br"  's~touch_to\(b\.to \+ rows - 1\)~touch_to(b.to)~'
bug lazy_without_limit     check   "$mma USE_LAZY_MAX=1"  "--shape 1,1,1,64,256 --dist stairs"  's~all <= lazy_limit~true~'
bug lazy_sum_lost          check   "$mma USE_LAZY_MAX=1"  "--shape 1,1,1,64,256"  's~l\[i\] \+= sum\[i\];~;~'
bug split_not_rescaled     check   "$split"  "--shape 1,1,1,64,256"  's~O\.x\[i\]\[j\] \*= weight\[0\];~;~'
bug split_merged_too_soon  thread  "$split"  "--shape 1,1,1,64,256"  's~__syncthreads\(\);  // hazard: partial results written~~'
bug split_over_tiles_read  thread  "$split"  "--shape 1,1,1,64,256"  's~__syncthreads\(\);  // hazard: the partial results take.*$~~'
# ---- the wgmma kernel ----
wgmma="USE_WGMMA=1 USE_WARP_SPECIALIZATION=1 VEC_WIDTH=8 BLOCK_M=128 NUM_WARPS=8 BLOCK_N=32 STAGES=2 OVERLAP=1 USE_LAZY_MAX=1"
bug wgmma_no_fence         backend "$wgmma" "--shape 1,1,1,64,150"  's~^ *wgmma_fence\(\);$~~'
bug wgmma_wait_too_loose   backend "${wgmma/ USE_LAZY_MAX=1/}" "--shape 1,1,1,64,150"  's~wgmma_wait_group<1>\(\)~wgmma_wait_group<2>()~'
bug wgmma_p_changed_early  backend "$wgmma" "--shape 1,1,1,64,150"  's~wgmma_wait_group<0>\(\), hold\(O\.x\.d\), hold\(S\.x\.d\);.*$~~'
bug wgmma_p_changed_exact  backend "${wgmma/ USE_LAZY_MAX=1/}" "--shape 1,1,1,64,150"  's~wgmma_wait_group<0>\(\), hold\(O\.x\.d\), hold\(S\.x\.d\);.*$~~'
bug wgmma_k_released_early thread  "$wgmma" "--shape 1,1,1,64,300"  's~begin_qk\(S, next, k_is_there\);~begin_qk(S, next, k_is_there), release(\&t.k_empty[next.stage]);~'
bug wgmma_wrong_parity     backend "$wgmma" "--shape 1,1,1,64,150"  's~(mbarrier_wait\(empty, ring\.parity) \^ 1~\1~'
bug wgmma_stride_wrong     check   "$wgmma HEAD_DIM=128" "--shape 1,1,1,64,150"  's~B::block_n \* 128, 1024\)~B::block_n * 64, 1024)~'
bug wgmma_too_few_bytes    backend "$wgmma" "--shape 1,1,1,64,150"  's~B::block_n \* B::head_dim \* sizeof\(Element\)\)~B::block_n * B::head_dim)~'
bug wgmma_o_not_fenced     backend "$wgmma" "--shape small"  's~^ *fence_proxy_async\(\);$~~'
bug wgmma_turn_lost        backend "$wgmma USE_PING_PONG=1" "--shape 1,1,1,64,150"  's~barrier_arrive\(turn \+ \(mine \+ 1\) % B::warpgroups, 256\)~barrier_arrive(turn + mine, 256)~'
bug wgmma_limit_lost       check   "$wgmma" "--shape 1,1,1,64,256 --dist large"  's~all <= lazy_limit~true~'
bug wgmma_again_wrong_key  check   "$wgmma" "--shape 1,1,1,64,256 --dist large"  's~\(k0 \+ lane / 4\) \* p\.k\.row~(k0 + lane / 8) * p.k.row~'
bug wgmma_q_reused_early   thread  "$wgmma USE_PERSISTENT_CTA=1" "--shape 1,3,1,200,40"  's~mbarrier_wait\(&s\.q_empty.*$~~'
bug wgmma_queue_skips_item check   "$wgmma USE_PERSISTENT_CTA=1" "--shape 1,3,1,400,20"  's~gridDim\.x \+ uniform\(drawn\)~gridDim.x + uniform(drawn + (drawn == 2))~'
bug wgmma_before_row_0     backend "$wgmma USE_PERSISTENT_CTA=1" "--shape 1,1,1,64,64 --causal br"  's~^ *if \(at\[1\] < 0\) continue;~~'
bug wgmma_passed_not_done  backend "$wgmma USE_PERSISTENT_CTA=1" "--shape 1,2,1,64,150"  's~release\(&s\.o_done\[q_ring\.stage\].*$~~'
tuned="USE_WGMMA=1 VEC_WIDTH=8 USE_TUNED=1"
plain="USE_WGMMA=1 VEC_WIDTH=8 BLOCK_M=64 BLOCK_N=32 STAGES=2"
wsplit="USE_WGMMA=1 USE_WARP_SPECIALIZATION=1 VEC_WIDTH=8 BLOCK_M=64 NUM_WARPS=8 BLOCK_N=32 STAGES=2 SPLIT_KV=2"
bug wgmma_merged_too_soon  thread  "$wsplit" "--shape 1,1,1,64,256"  's~barrier_sync\(partials, .*$~~'
bug wgmma_v_not_skipped    backend "$wgmma SKIP_MASKED=1" "--shape 1,1,1,128,300 --causal br"  's~^ *release\(&t\.v_empty\[ring\.stage\]\);$~~'
bug wgmma_refilled_early   thread  "$plain BLOCK_M=128 NUM_WARPS=8" "--shape 1,1,1,128,256"  's~__syncthreads\(\);  // hazard: K and V read by all warps~~'
bug plain_wrong_phase      backend "$plain" "--shape 1,1,1,64,256"  's~tile / B::stages % 2~tile % 2~'
bug plain_clean_too_long   check   "$plain" "--shape 1,1,1,64,94 --causal br --dist stairs"  's~cover_to\(b\.to - keys\)~cover_to(b.to - keys + 1)~'
bug wgmma_scale_of_another check   "$wsplit" "--shape 1,1,1,64,256"  's~\[n \+ \(n >= slice\)\]\[row~[n][row~'
bug wgmma_slice_misplaced  check   "$wsplit" "--shape 1,1,1,64,256 --causal br"  's~\(round \* B::split_kv \+ slice\) \* B::block_n~round * B::split_kv * B::block_n~'
bug wgmma_rows_of_another  check   "$wsplit" "--shape 1,1,1,64,256"  's~v \* 8 \+ to % 2 \* 2~v * 8~'
swap="USE_WGMMA=1 VEC_WIDTH=8 SWAP_AB=1 BLOCK_M=32 NUM_WARPS=8 BLOCK_N=64 STAGES=1 SPLIT_KV=2"
bug swap_p_not_fenced      backend "$swap" "--shape 1,1,1,32,64"  's~^ *fence_proxy_async\(\);$~~'
bug swap_p_read_too_soon   backend "$swap" "--shape 1,1,1,32,64"  's~sync\(\);  // hazard: P written.*$~~'
bug swap_max_read_too_soon thread  "$swap" "--shape 1,1,1,32,64"  's~sync\(\);  // hazard: written by all warps.*$~~'
bug swap_max_of_own_warp   check   "$swap" "--shape 1,1,1,32,64"  's~combine_warps\(m_new, larger\);~sync();~'
bug swap_lane_left_out     check   "$swap" "--shape 1,1,1,32,64"  's~(combine_pair<8>\(x, combine\)), combine_pair<4>\(x, combine\);~\1;~'
bug swap_o_not_rescaled    check   "$swap" "--shape 1,1,1,32,256 --dist outliers"  's~fmaf\(ld_shared<float>\(place\(i, n\)\), factor, x\)~ld_shared<float>(place(i, n)) + x~'
bug swap_k_released_early  thread  "$swap" "--shape 1,1,1,32,256"  's~write_p\(S, m_log2\);~release(\&t.empty[ring.stage]), write_p(S, m_log2);~'
bug swap_mask_by_row       check   "$swap" "--shape 1,1,1,64,64 --causal br"  's~a\.keys\.end\(q0 \+ column\(i\)\)~a.keys.end(q0)~'
# ---- heads and batches ----
bug gqa_by_shift           backend ""  "--shape 2,6,2,20,30"  's~h_kv = item\.h / \(p\.Hq / p\.Hkv\)~h_kv = item.h >> (p.Hq / p.Hkv > 3 ? 2 : p.Hq / p.Hkv > 1)~'
bug k_of_first_batch       check   ""  "--shape 2,3,1,20,30"  's~p\.K \+ item\.b \* p\.k\.batch \+ h_kv~p.K + h_kv~'
bug v_of_first_head        check   ""  "--shape 2,5,5,20,30"  's~ \+ h_kv \* p\.v\.head~~'
bug section_uneven         backend "USE_PERSISTENT_CTA=1"  "--shape 2,6,2,150,150 --causal br"  's~min\(a\.heads_in_l2, a\.p\.B \* a\.p\.Hq - first\)~a.heads_in_l2~'
bug section_overlaps       check   ""  "--shape 2,3,3,70,150 --causal br"  's~part \* a\.heads_in_l2~part * (a.heads_in_l2 - 1)~'
bug wgmma_gqa_by_shift     check   "$wgmma" "--shape 2,6,2,20,30 --shape 1,7,1,20,30 --causal br"  's~a\.q_heads_per_kv\.divide\(item\.h\)~(item.h >> (a.p.Hq / a.p.Hkv > 3 ? 2 : 1))~'
bug wgmma_again_batch      check   "$wgmma" "--shape 2,2,2,64,256 --dist large"  's~p\.K \+ item\.b \* p\.k\.batch \+ item\.h_kv~p.K + item.h_kv~'
bug wgmma_again_head       check   "$wgmma" "--shape 1,6,2,64,256 --dist large"  's~item\.h_kv \* p\.k\.head \+$~item.h_kv / 2 * p.k.head +~'
# ---- masks at the edges of tiles ----
bug scalar_one_key_more    check   ""  "--shape 1,1,1,40,70 --causal br --dist stairs"  's~j >= keys\.end\(q\) - k0~j > keys.end(q) - k0~'
bug wmma_one_key_more      check   "$wmma"  "--shape 1,1,1,40,70 --causal tl --dist stairs"  's~j >= keys\.end\(q\) - k0~j > keys.end(q) - k0~'
bug mma_one_key_more       check   "$mma"  "--shape 1,1,1,40,70 --causal br --dist stairs"  's~j >= keys\.end\(q\) - k0~j > keys.end(q) - k0~'
bug wgmma_one_key_more     check   "$wgmma"  "--shape 1,1,1,64,94 --causal br --dist stairs"  's~j >= keys\.end\(q\) - k0~j > keys.end(q) - k0~'
bug swap_one_key_more      check   "$swap"  "--shape 1,1,1,32,94 --causal br --dist stairs"  's~j >= uint32_t\(end - begin\)~j > uint32_t(end - begin)~'
bug tuned_one_key_more     check   "$tuned"  "--shape 1,1,1,65,70 --causal br --dist stairs"  's~j >= keys\.end\(q\) - k0~j > keys.end(q) - k0~'
bug top_left_one_more      check   ""  "--shape 1,1,1,40,70 --causal tl --dist stairs"  's~own \+ right \+ 1~own + right + 2~'
bug scalar_clean_too_long  check   ""  "--shape 1,1,1,40,70 --causal br --dist stairs"  's~cover_to\(b\.to - keys\)~cover_to(b.to - keys + 1)~'
bug mma_clean_too_long     check   "$mma"  "--shape 1,1,1,40,70 --causal br --dist stairs"  's~cover_to\(b\.to - keys\)~cover_to(b.to - keys + 1)~'
bug wgmma_clean_too_long   check   "$wgmma"  "--shape 1,1,1,64,94 --causal br --dist stairs"  's~cover_to\(b\.to - keys\)~cover_to(b.to - keys + 1)~'
bug swap_clean_too_long    check   "$swap"  "--shape 1,1,1,32,94 --causal br --dist stairs"  's~cover_to\(b\.to - keys\)~cover_to(b.to - keys + 1)~'
bug wgmma_skips_a_row      check   "$wgmma SKIP_MASKED=1" "--shape 1,1,1,128,97 --causal br --dist stairs"  's~min\(q \+ 63, ~min(q + 62, ~'
bug first_key_dropped      check   "$mma"  "--shape 1,1,1,40,70 --dist stairs --seeds 1"  's~^( *)if \(!clean\) mask_scores\(S, a\.keys, q0, k0\);~\1if (!clean) mask_scores(S, a.keys, q0, k0); if (k0 == 0 \&\& S.first_col == 0) S.x[0][0] = -INFINITY;~'
# ---- windows ----
bug window_left_ignored    check   ""  "--shape 1,1,1,40,170 --window 20,10 --dist uniform"  's~if \(p\.window_left >= 0\) from~if (p.window_left < -1) from~'
bug window_right_ignored   check   "$mma"  "--shape 1,1,1,40,170 --window 20,10 --dist stairs"  's~off \? p\.window_right : 0~off ? -1 : 0~'
bug window_of_top_left     check   "$wgmma"  "--shape 1,1,1,64,170 --window 20,-1 --causal br --dist uniform"  's~max\(own - p\.window_left~max(-p.window_left~'
bug window_one_key_less    check   "$wmma"  "--shape 1,1,1,40,170 --window 20,10 --dist uniform"  's~j < keys\.begin\(q\) - k0~j <= keys.begin(q) - k0~'
bug window_begin_unmasked  check   "$wgmma"  "--shape 1,1,1,128,128 --window 20,0 --dist uniform"  's~if \(keys\.from > -most_rows\) mask~if (keys.from > most_rows) mask~'
bug window_clean_too_early check   "$mma USE_LAZY_MAX=1"  "--shape 1,1,1,140,140 --window 40,0 --dist uniform"  's~cover_from\(b\.from \+ rows - 1\)~cover_from(b.from)~'
bug window_tile_left_out   check   "$mma"  "--shape 1,1,1,64,170 --window 20,10 --dist uniform"  's~touch_from\(b\.from - keys \+ 1\)~touch_from(b.from)~'
bug window_first_tile_lost check   "$wgmma SKIP_MASKED=1"  "--shape 1,1,1,128,300 --window 40,0 --dist uniform"  's~\(seen\.begin - first_key\) / round_keys<B>~(seen.begin - first_key + 31) / round_keys<B>~'
bug window_left_unreleased backend "$wgmma SKIP_MASKED=1 USE_PERSISTENT_CTA=1"  "--shape 1,9,1,128,300 --window 10,0"  's~if \(B::skip_masked\) let_pass\(own_rounds\(item, rounds\)\.first\);~~'
bug swap_window_ignored    check   "$swap"  "--shape 1,1,1,32,194 --window 20,10 --dist uniform"  's~begin = a\.keys\.begin\(q0 \+ column\(i\)\) - k~begin = -k~'
bug cublas_window_ignored  check   "USE_CUBLAS=1"  "--shape 1,1,1,20,60 --window 5,10 --dist uniform"  's~begin = a\.keys\.begin\(q\)~begin = 0~'
# ---- huge logits ----
bug scalar_no_shift        check   ""  "--shape 1,4,4,40,70 --dist huge"  's~if \(fabsf\(m_log2\[i\]\) <= shift_limit\) continue;~continue;~'
bug wmma_no_shift          check   "$wmma"  "--shape 1,4,4,40,70 --dist huge"  's~if \(fabsf\(m_log2\[i\]\) <= shift_limit\) continue;~continue;~'
bug mma_lazy_beyond        check   "$mma USE_LAZY_MAX=1"  "--shape 1,4,4,40,170 --dist huge"  's~stale_max_will_do = __all_sync\(0xffffffffu, may_be_kept\)~stale_max_will_do = true~'
bug wgmma_guess_beyond     check   "$wgmma"  "--shape 1,8,8,16,64 --dist huge --seeds 0,1"  's~a\.scale_log2 <= shift_limit\)~a.scale_log2 <= 3e38f)~'
bug wgmma_lazy_beyond      check   "$wgmma"  "--shape 1,4,4,64,150 --dist huge"  's~keep_max\((softmax_sum<B>\(.*\))\);~\1, keep_max(true);~'
bug swap_no_shift          check   "$swap"  "--shape 1,4,4,32,150 --dist huge"  's~if \(__all_sync\(0xffffffffu, within\)\) return;~return;~'
bug cublas_no_shift        check   "USE_CUBLAS=1"  "--shape 1,4,4,20,30 --dist huge"  's~\(S\[k\] - m\) \* a\.scale_log2~fmaf(S[k], a.scale_log2, -(m * a.scale_log2))~'
# ---- 32 bits, and strides of all kinds ----
bug far_head_of_32_bits    check   ""  "--shape 1,2,2,20,30 --layout far_heads"  's~\+ h_kv \* p\.v\.head~+ int(h_kv * p.v.head)~'
bug far_row_of_32_bits     check   ""  "--shape 1,1,1,20,30 --layout far_rows"  's~tensor \+ row \* row_stride~tensor + int(row * row_stride)~'
bug far_query_of_32_bits   check   "BLOCK_M=16"  "--shape 1,1,1,20,30 --layout far_rows"  's~item\.h \* p\.q\.head \+ q \* p\.q\.row~item.h * p.q.head + int(q * p.q.row)~'
bug far_output_of_32_bits  backend ""  "--shape 1,1,1,20,30 --layout far_rows"  's~O_g \+ q \* p\.o\.row \+~O_g + int(q * p.o.row) +~'
bug far_third_batch        check   ""  "--shape 3,1,1,20,30 --layout far"  's~p\.O \+ item\.b \* p\.o\.batch~p.O + int(item.b / 2 * 2 * p.o.batch) + item.b % 2 * p.o.batch~'
bug wgmma_map_of_32_bits   check   "$wgmma"  "--shape 1,2,2,20,30 --layout far_heads"  's~uint64_t\(dims\[i\]\.stride\) \* sizeof\(Element\)~uint32_t(dims[i].stride * sizeof(Element))~'
bug wgmma_far_again        check   "$wgmma"  "--shape 1,1,1,64,150 --layout far_rows --dist large"  's~\(k0 \+ lane / 4\) \* p\.k\.row~int((k0 + lane / 4) * p.k.row)~'
bug wgmma_far_share        backend "$wsplit"  "--shape 1,1,1,64,150 --layout far_rows"  's~O_g \+ r \* p\.o\.row~O_g + int(r * p.o.row)~'
bug unsigned_row_stride    backend ""  "--shape 1,1,1,20,70 --layout reversed"  's~K_g \+= ADVANCE \* p\.k\.row~K_g += ADVANCE * int64_t(uint32_t(p.k.row))~'
bug zero_stride_is_one     backend "$mma"  "--shape 2,2,2,40,70 --layout zero"  's~item\.b \* p\.k\.batch~item.b * (p.k.batch ? p.k.batch : p.Sk * 64)~'
# ---- kernels that follow each other, and mbarriers ----
bug dependent_never_waits  backend "$wgmma"  "--shape 1,1,1,64,150"  's~griddepcontrol_wait\(\)~(void)0~'
bug producers_do_not_wait  check   "$wgmma"  "--shape 1,1,1,64,150"  's~griddepcontrol_wait\(\);  // from here on.*$~~'
bug drawn_before_the_wait  check   "$wgmma USE_PERSISTENT_CTA=1"  "--shape 1,3,1,400,20"  's~griddepcontrol_wait\(\);  // from here on.*$~if (!starts) griddepcontrol_wait();~'
bug plain_loads_too_early  backend  "$plain"  "--shape 1,1,1,64,150"  's~^  wait_then_let_next_kernel_start\(\);~~'
bug swap_loads_too_early   check   "$swap"  "--shape 1,1,1,32,64"  's~bool waited_for_last_kernel = false;~bool waited_for_last_kernel = true;~'
bug mbarriers_not_fenced   backend "$wgmma"  "--shape 1,1,1,64,150"  's~^ *fence_mbarrier_init\(\);$~~'
bug split_no_sync_of_rows  check   "$wsplit"  "--shape 1,1,1,64,150"  's~__syncwarp\(\);  // hazard: written by all lanes$~~'
# ---- rounding, guards ----
bug o_truncated            check   ""  "--shape 1,1,1,40,70"  's~O\.x\[i\]\[j \+ n\] \* inverse\)~float_of(bits_of(O.x[i][j + n] * inverse) \& 0xffffe000u))~'
bug o_truncated_bf16       check   "DTYPE=BF16"  "--shape 1,1,1,40,70"  's~O\.x\[i\]\[j \+ n\] \* inverse\)~float_of(bits_of(O.x[i][j + n] * inverse) \& 0xffff0000u))~'
bug wgmma_o_truncated      check   "$wgmma"  "--shape 1,1,1,64,150"  's~scale_rows\(part, inverse\);~scale_rows(part, inverse); for (float\& x : part.x.d) x = float_of(bits_of(x) \& 0xffffe000u);~'
bug lse_not_written        check   ""  "--shape 1,1,1,40,30"  's~if \(O\.col\(0\) == 0\) store_lse~if (O.col(0) == 0 \&\& q != 33) store_lse~'
bug writes_before_k        check   ""  "--shape small"  's~(if \(q >= p\.Sq\) continue;)~\1 if (q == 0) st_global(const_cast<Element*>(p.K) - 1, Element(0.0f));~'
bug writes_into_v          check   ""  "--shape small"  's~(if \(q >= p\.Sq\) continue;)~\1 if (q == 0) st_global(const_cast<Element*>(p.V) + 5, Element(0.0f));~'
bug writes_past_workspace  check   "USE_PERSISTENT_CTA=1"  "--shape small"  's~atomicExch\(counter, 0u\);~atomicExch(counter, 0u), st_global(counter + 1, 0u);~'
# ---- the contract (tests/contract.cu) ----
queue="VEC_WIDTH=8 USE_PERSISTENT_CTA=1"
bug alignment_of_one       check   "$queue"  "@contract pointers"  's~pointer\) % \(vec \* sizeof\(Element\)\)~pointer) % sizeof(Element)~'
bug lse_alignment          check   "$queue"  "@contract pointers"  's~uintptr_t>\(p\.LSE\) % sizeof\(float\)~uintptr_t>(p.LSE) % 2~'
bug null_workspace         check   "$queue"  "@contract pointers"  's~\(has_queue \|\| is_cublas\) && !p\.workspace~is_cublas \&\& !p.workspace~'
bug workspace_alignment    check   "USE_CUBLAS=1"  "@contract pointers"  's~uintptr_t>\(p\.workspace\) % WORKSPACE_ALIGNMENT~uintptr_t>(p.workspace) % 4~'
bug max_ctas_ignored       check   "$queue"  "@contract max_ctas"  's~asked > 0 && asked < resident \? asked : resident~resident~'
bug idle_strides_used      check   "$async"  "@contract idle_strides"  's~if \(t\.[HS] <= 1\) t\.s\.(head|row) = 0;~~'
bug attribute_set_once     check   "$wgmma HEAD_DIM=128"  "@contract devices"  's~cudaError_t error = cudaFuncSetAttribute\(~static cudaError_t error = cudaFuncSetAttribute(~'
bug maps_of_all_threads    thread  "$wgmma"  "@contract host_threads"  's~thread_local (SdpaParams last|TensorMaps last_maps)~static \1~'
bug maps_of_old_sizes      check   "$wgmma"  "@contract changed_tensors"  's~a\.Sq == b\.Sq && a\.Sk == b\.Sk && ~~'
bug maps_of_old_strides    check   "$wgmma"  "@contract changed_tensors"  's~return a\.batch == b\.batch && a\.head == b\.head && a\.row == b\.row;~return true;~'
bug encoder_given_up       check   "$wgmma"  "@contract errors"  's~(thread_local void\* encoder = nullptr;).*~\1 thread_local cudaError_t failed = cudaSuccess; if (failed != cudaSuccess) return failed;~; s~if \(error != cudaSuccess\) return error;$~if (error != cudaSuccess) return failed = error;~'
bug map_of_no_keys         check   "$wgmma"  "@contract no_keys"  's~t\.map = maps\.q;~~'
bug handle_of_device_0     check   "USE_CUBLAS=1"  "@contract devices"  's~if \(device != handle_device\) \{~if (handle_device < 0) {~'
bug handle_destroyed_twice backend "USE_CUBLAS=1"  "@contract errors"  's~if \(handle_device >= 0\) cublasDestroy~if (handle) cublasDestroy~'
bug error_left_behind      check   "$queue"  "@contract errors"  's~if \(!status\.ok\(\) && clean\) cudaGetLastError\(\);~~'
bug error_taken_away       check   "$queue"  "@contract errors"  's~if \(!status\.ok\(\) && clean\) cuda~if (!status.ok()) cuda~'
bug sizes_overflow         address "$tuned"  "@contract sizes"  's~min\(own \+ right \+ 1, p\.Sk\)~min(own + right + 1 + 2 * p.Sk, 3 * p.Sk) - 2 * p.Sk~'

[ $bugs -gt 0 ] || { echo "bugs.sh: no bug has a name like $only"; exit 2; }
# Without a bug: each set of knobs once, with all options that it was run with.
awk -F'|' '{ print $1 "|" $2 "|" ($3 ~ /^@contract/ ? "@contract" : "") }' "$work/clean.txt" | sort -u >"$work/clean_builds.txt"
while IFS='|' read -r kind knobs program; do
  one_more
  (
    exe=$work/clean_$BASHPID
    failed() { echo "without a bug ($kind; $knobs; $1): $2" >>"$exe.failed"; }
    if words=$(built sdpa.cu "$kind" "$knobs" "$program" "$exe"); then
      awk -F'|' -v build="$kind|$knobs" -v program="$program" \
        '$1 "|" $2 == build && ($3 ~ /^@contract/) == (program != "") { print $3 }' "$work/clean.txt" | sort -u |
        while read -r options; do
          found=$(outcome "$exe" "$options")
          [ "$found" = nothing ] || failed "$options" "$found"
        done
    else
      failed "" "$words"
    fi
  ) &
done <"$work/clean_builds.txt"
wait

cat "$work"/*.result
cat "$work"/*.failed 2>/dev/null
caught=$(cat "$work"/*.result | awk '$2 == "caught"' | wc -l)
echo "$caught of $bugs bugs caught"
[ "$bugs" -gt 0 ] && [ "$caught" = "$bugs" ] && ! ls "$work"/*.failed >/dev/null 2>&1
