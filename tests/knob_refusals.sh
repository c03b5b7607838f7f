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
refused "STAGES does nothing without cp.async; add USE_CP_ASYNC=1 or drop STAGES" -DSTAGES=2
refused "VEC_WIDTH=1 is 2 bytes; type VEC_WIDTH=8" -DUSE_CP_ASYNC=1
refused "USE_WMMA=1: this version has no wmma kernel; drop USE_WMMA" -DUSE_WMMA=1
refused "USE_WMMA_PV=1: this version has no wmma kernel" -DUSE_WMMA_PV=1
accepted -DUSE_MMA_SYNC=1 -DBLOCK_M=64 -DNUM_WARPS=4
refused "16 or 32 times NUM_WARPS; type BLOCK_M=128 NUM_WARPS=4" -DUSE_MMA_SYNC=1 -DBLOCK_M=32
refused "must be a multiple of 16; type BLOCK_N=64" -DUSE_MMA_SYNC=1 -DBLOCK_M=64 -DBLOCK_N=40
refused "so the policy does nothing; drop SYNC_POLICY" -DUSE_MMA_SYNC=1 -DBLOCK_M=64 -DSYNC_POLICY=1
refused "USE_WGMMA=1: this version has no wgmma kernel" -DUSE_WGMMA=1
refused "USE_WARP_SPECIALIZATION=1: this version has no producer warps" -DUSE_WARP_SPECIALIZATION=1
refused "NUM_PRODUCER_WARPS: this version has no producer warps" -DNUM_PRODUCER_WARPS=2
rm -r "$(dirname "$section")"
exit $failed
