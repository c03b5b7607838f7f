#!/usr/bin/env bash
# Section 1 of sdpa.cu is plain C++: compile it alone with illegal knobs and look for the sentence.
set -u
cd "$(dirname "$0")/.." || exit 1
section=$(mktemp -d)/knobs.cpp
awk '/^\/\/ ==== 1 KNOBS/ { on = 1 } /^\/\/ ==== 2 PROBLEM/ { on = 0 } on' sdpa.cu >"$section"
failed=0

compile() { "${CXX:-g++}" -std=c++17 -fsyntax-only "$@" "$section" 2>&1; }

# refused "SENTENCE" -DKNOB=VALUE...
refused() {
  local want=$1 words
  shift
  if words=$(compile "$@"); then
    echo "$*: accepted, should be refused with: $want"; failed=1
  elif ! grep -qF "$want" <<<"$words"; then
    echo "$*: refused without the sentence: $want"; head -3 <<<"$words"; failed=1
  fi
}
accepted() {
  local words
  words=$(compile "$@") || { echo "$*: refused, should be accepted"; head -3 <<<"$words"; failed=1; }
}

accepted
accepted -DHEAD_DIM=128 -DDTYPE=BF16 -DBLOCK_M=64 -DBLOCK_N=48 -DNUM_WARPS=8
accepted -DUSE_CP_ASYNC=1 -DSTAGES=3 -DVEC_WIDTH=2 -DUSE_WMMA=0 -DSTAGES=3
refused "HEAD_DIM: not a legal value; it takes one of: 64 128 256. Type HEAD_DIM=64" -DHEAD_DIM=96
refused "HEAD_DIM: not a legal value" -DHEAD_DIM
refused "HEAD_DIM: not a legal value" -DHEAD_DIM=
refused "DTYPE: not a legal value; it takes one of: FP16 BF16. Type DTYPE=FP16" -DDTYPE=FP32
refused "USE_FAST_EXP: not a legal value; it takes one of: 0 1. Type USE_FAST_EXP=0" -DUSE_FAST_EXP=ON
refused "NUM_WARPS: not a legal value; it takes one of: 1..16. Type NUM_WARPS=4" -DNUM_WARPS=17
refused "SYNC_POLICY: not a legal value; it takes one of: 5 2 1 0" -DSYNC_POLICY=3
refused "VEC_WIDTH: not a legal value; it takes one of: 1 2 4 8" -DVEC_WIDTH=3
refused "STAGES: not a legal value; it takes one of: 1..4" -DSTAGES=5
refused "a multiple of 4*NUM_WARPS; type BLOCK_M=64 NUM_WARPS=4" -DBLOCK_M=24
refused "it must be a multiple of 8; type BLOCK_N=64" -DBLOCK_N=20
refused "over 176 registers and spill; type a smaller BLOCK_M or more NUM_WARPS" -DBLOCK_M=256 -DBLOCK_N=64
refused "STAGES does nothing without cp.async or producer warps; add USE_CP_ASYNC=1 or drop" -DSTAGES=2
refused "VEC_WIDTH=1 is 2 bytes; type VEC_WIDTH=8" -DUSE_CP_ASYNC=1
wmma=(-DUSE_WMMA=1 -DBLOCK_M=64)
accepted "${wmma[@]}" -DUSE_WMMA_PV=1 -DBLOCK_N=48
refused "P @ V goes to wmma only where Q @ K.T does; add USE_WMMA=1 or drop it" -DUSE_WMMA_PV=1
refused "a build has one kernel; keep one of them" "${wmma[@]}" -DUSE_MMA_SYNC=1
accepted -DUSE_CUBLAS=1 -DNUM_WARPS=8 -DHEAD_DIM=128 -DDTYPE=BF16
refused "a build has one kernel; keep one of them" -DUSE_CUBLAS=1 -DUSE_MMA_SYNC=1
refused "USE_CUBLAS=1: of the knobs for tiles and copies none has an effect" -DUSE_CUBLAS=1 -DVEC_WIDTH=8
refused "BLOCK_M must be 16*NUM_WARPS; type BLOCK_M=64 NUM_WARPS=4" "${wmma[@]}" -DNUM_WARPS=2
refused "wmma takes keys by 16, so it must be a multiple of 16; type BLOCK_N=64" "${wmma[@]}" -DBLOCK_N=40
accepted "${wmma[@]}" -DUSE_WARP_SPECIALIZATION=1 -DNUM_PRODUCER_WARPS=2 -DSYNC_POLICY=1 -DSTAGES=3
refused "so every warp must keep its rows; type SYNC_POLICY=1" "${wmma[@]}" -DUSE_WARP_SPECIALIZATION=1
refused "only the wmma and wgmma kernels have producer warps; add USE_WMMA=1 or" -DUSE_WARP_SPECIALIZATION=1
refused "producer warps only with USE_WARP_SPECIALIZATION=1" "${wmma[@]}" -DNUM_PRODUCER_WARPS=2
refused "USE_LAZY_MAX=1: only the mma.sync and wgmma kernels have it" "${wmma[@]}" -DUSE_LAZY_MAX=1
refused "SPLIT_KV: only the mma.sync and wgmma kernels have it" -DSPLIT_KV=2
accepted -DUSE_MMA_SYNC=1 -DBLOCK_M=64 -DNUM_WARPS=4
accepted -DUSE_MMA_SYNC=1 -DBLOCK_M=64 -DNUM_WARPS=8 -DSPLIT_KV=2 -DUSE_LAZY_MAX=1
refused "16 or 32 times NUM_WARPS/SPLIT_KV; type BLOCK_M=128 NUM_WARPS=4" -DUSE_MMA_SYNC=1 -DBLOCK_M=32
refused "NUM_WARPS must be a multiple of SPLIT_KV; type SPLIT_KV=2 NUM_WARPS=8" -DUSE_MMA_SYNC=1 -DBLOCK_M=96 -DNUM_WARPS=3 -DSPLIT_KV=2
refused "SPLIT_KV: not a legal value; it takes one of: 1 2 4" -DSPLIT_KV=3
refused "must be a multiple of 16; type BLOCK_N=64" -DUSE_MMA_SYNC=1 -DBLOCK_M=64 -DBLOCK_N=40
refused "so the policy does nothing; drop SYNC_POLICY" -DUSE_MMA_SYNC=1 -DBLOCK_M=64 -DSYNC_POLICY=1
wgmma=(-DUSE_WGMMA=1 -DUSE_WARP_SPECIALIZATION=1 -DVEC_WIDTH=8)
accepted "${wgmma[@]}" -DBLOCK_M=192 -DNUM_WARPS=12 -DBLOCK_N=96 -DSTAGES=3 -DOVERLAP=1 -DUSE_PING_PONG=1 -DUSE_LAZY_MAX=1
accepted "${wgmma[@]}" -DBLOCK_M=128 -DNUM_WARPS=8 -DUSE_PERSISTENT_CTA=1
accepted -DUSE_WGMMA=1 -DVEC_WIDTH=8 -DBLOCK_M=64 -DSTAGES=2
refused "the plain wgmma kernel has none of them; add USE_WARP_SPECIALIZATION=1 or drop them" -DUSE_WGMMA=1 -DVEC_WIDTH=8 -DBLOCK_M=64 -DNUM_WARPS=16 -DSPLIT_KV=4
refused "a warpgroup has 4 warps and 64 query rows" "${wgmma[@]}" -DBLOCK_M=64 -DNUM_WARPS=8
refused "wgmma takes keys by 16" "${wgmma[@]}" -DBLOCK_M=64 -DBLOCK_N=40
refused "type VEC_WIDTH=8" -DUSE_WGMMA=1 -DUSE_WARP_SPECIALIZATION=1 -DBLOCK_M=64
refused "the plain wgmma kernel has none of them; add USE_WARP_SPECIALIZATION=1" -DUSE_WGMMA=1 -DVEC_WIDTH=8 -DBLOCK_M=64 -DOVERLAP=1
refused "in the wgmma kernel not with SPLIT_KV" "${wgmma[@]}" -DBLOCK_M=64 -DNUM_WARPS=8 -DSPLIT_KV=2 -DUSE_PERSISTENT_CTA=1
accepted -DUSE_WGMMA=1 -DVEC_WIDTH=8 -DUSE_TUNED=1
accepted -DUSE_WGMMA=1 -DVEC_WIDTH=8 -DUSE_TUNED=1 -DHEAD_DIM=128 -DUSE_PING_PONG=1
accepted -DUSE_WGMMA=1 -DVEC_WIDTH=8 -DUSE_TUNED=1 -DSWAP_AB=1
refused "no row of TUNED_TILES has all the knobs" -DUSE_WGMMA=1 -DVEC_WIDTH=8 -DUSE_TUNED=1 -DBLOCK_N=80
refused "go with the tile" -DUSE_WGMMA=1 -DVEC_WIDTH=8 -DUSE_TUNED=1 -DOVERLAP=1
refused "must run the same rounds" "${wgmma[@]}" -DBLOCK_M=128 -DNUM_WARPS=8 -DSKIP_MASKED=1 -DUSE_PING_PONG=1
refused "would skip more tiles than can be in flight" "${wgmma[@]}" -DBLOCK_M=256 -DNUM_WARPS=16 -DBLOCK_N=32 -DSTAGES=2 -DSKIP_MASKED=1
swap=(-DUSE_WGMMA=1 -DVEC_WIDTH=8 -DSWAP_AB=1 -DBLOCK_N=64)
accepted "${swap[@]}" -DBLOCK_M=32 -DBLOCK_N=128 -DNUM_WARPS=16 -DSPLIT_KV=4
accepted "${swap[@]}" -DBLOCK_M=16 -DNUM_WARPS=4 -DSTAGES=2 -DHEAD_DIM=128 -DUSE_FAST_EXP=1
refused "every warpgroup has a slice of the keys" "${swap[@]}" -DBLOCK_M=32 -DNUM_WARPS=16 -DSPLIT_KV=2
refused "every warpgroup has a slice of the keys" "${swap[@]}" -DBLOCK_M=128 -DNUM_WARPS=16 -DSPLIT_KV=4
refused "every warpgroup has a slice of the keys" "${swap[@]}" -DBLOCK_N=96 -DBLOCK_M=32
refused "would leave too few of its registers" "${swap[@]}" -DBLOCK_M=64 -DHEAD_DIM=256 -DNUM_WARPS=16 -DSPLIT_KV=4
refused "for a round or two of few rows" "${swap[@]}" -DBLOCK_M=32 -DUSE_LAZY_MAX=1
refused "for a round or two of few rows" "${swap[@]}" -DBLOCK_M=32 -DUSE_WARP_SPECIALIZATION=1
refused "only the wgmma kernel has them; add USE_WGMMA=1 or drop them" -DSWAP_AB=1
refused "have no effect on it; drop them" "${wgmma[@]}" -DBLOCK_M=64 -DSWIZZLE_XOR=1
refused "only the wgmma kernel has them; add USE_WGMMA=1 or drop them" -DOVERLAP=1
accepted -DUSE_WGMMA=1 -DVEC_WIDTH=8 -DUSE_TUNED=1 -DSTAGES=4
# Rows of TUNED_TILES are judged like typed knobs.
sed -i 's/^constexpr TunedTile TUNED_TILES\[\] = {$/&\n    {64, 192, 64, 8, 2, 1, producer_warpgroup, 1, 1, 1},/' "$section"
refused "a warpgroup has 4 warps and 64 query rows, so BLOCK_M must be" -DUSE_WGMMA=1 -DVEC_WIDTH=8 -DUSE_TUNED=1
accepted -DUSE_WGMMA=1 -DVEC_WIDTH=8 -DBLOCK_M=64
rm -r "$(dirname "$section")"
exit $failed
