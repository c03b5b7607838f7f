#!/usr/bin/env bash
# Which builds have the same machine code and launch, as the gates tell it from object files.
# usage: duplicates.sh NVCC
set -u
cd "$(dirname "$0")/.." || exit 1
. tools/gates.sh
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
failed=0
compile() {  # compile NAME KNOB...
  "$nvcc" -O3 -std=c++17 -arch=sm_90a --no-compress -w "${@:2}" -c tools/library.cu -o "$dir/$1.o" || exit 1
}
nvcc=$1
compile a -DVEC_WIDTH=8 -DSDPA_CONFIG_NAME=a
compile twin -DSDPA_CONFIG_NAME=twin -DVEC_WIDTH=8 -DSTAGES=1  # a default, spelt out
compile other -DVEC_WIDTH=8 -DSYNC_POLICY=1
print() { echo "$(machine_code "$dir/$1.o") $(launch_facts "$dir/$1.o")"; }
[ "$(launch_facts "$dir/a.o" | wc -w)" = 3 ] || { echo "no launch facts"; failed=1; }
[ "$(machine_code "$dir/a.o" | wc -w)" = 1 ] || { echo "no machine code of one architecture"; failed=1; }
[ "$(print a)" = "$(print twin)" ] || { echo "equal builds differ: $(print a) and $(print twin)"; failed=1; }
[ "$(machine_code "$dir/a.o")" != "$(machine_code "$dir/other.o")" ] || { echo "different builds are equal"; failed=1; }
# The checksum is of instructions: one byte of them changed is seen.
at=$(grep -obUaP '\x7fELF' "$dir/a.o" | tail -1 | cut -d: -f1)
cubin=$dir/cubin
tail -c +$((at + 1)) "$dir/a.o" >"$cubin"
offset=$(readelf -SW "$cubin" 2>/dev/null | awk '{ sub(/^ *\[ *[0-9]+\] /, "") } $1 ~ /^\.text\./ { print $4; exit }')
cp "$dir/a.o" "$dir/changed.o"
printf '\377' | dd of="$dir/changed.o" bs=1 seek=$((at + 16#$offset + 100)) conv=notrunc status=none
[ "$(machine_code "$dir/a.o")" != "$(machine_code "$dir/changed.o")" ] || { echo "a changed byte is not seen"; failed=1; }
exit $failed
