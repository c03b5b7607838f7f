#!/usr/bin/env bash
# Every line of configs.txt, compiled by nvcc in BUILD, keeps to its gates. usage: gates.sh BUILD
set -u
cd "$(dirname "$0")/.." || exit 1
. tools/gates.sh
judge_gates "$1" "$(newest_steps)"
