# ./run_all.sh gates: what every line of configs.txt must keep to. Sourced by run_all.sh and the tests.
# shellcheck shell=bash

gates_usage() {
  cat <<'EOT'
usage: ./run_all.sh gates [--only REGEX] [--time | --steps CSV]
Compiles the kernel of every line for sm_80, sm_89 and sm_90a (or SDPA_ARCHS) and prints what is asked of
it and what was found: spills, registers, shared memory, wgmma not as written; lines whose machine code and
launch are another line's; and speed claims, judged by what was measured of them. Needs nvcc, no GPU.
  --only REGEX   only the lines whose name matches
  --time         time the claims first, on this machine's GPU, into results/steps/DATE-DEVICE.csv
  --steps CSV    what judges gate:step-over (default: the newest of results/steps)
In configs.txt: gate:regs<=N  gate:smem<=BYTES  gate:spill<=BYTES:WHY  gate:step-over=NAME:FACTOR[@SHAPE]
exit: 0 no gate failed, 1 one did, 2 bad usage or a missing tool
EOT
}

# ptxas_report LOG: "ARCH REGISTERS SPILLED" for every kernel in ptxas's words, SPILLED in bytes stored and
# loaded; and "wgmma CODE" for what it says of wgmma: (C7510) that it serializes, (C7519) that it puts in an
# arrive, which makes two groups of one; and so on.
ptxas_report() {
  awk '
    /Compiling entry function/ { arch = $0; sub(/.* for ./, "", arch); sub(/[^a-z0-9_].*/, "", arch) }
    /bytes spill stores/ {
      spilled = 0
      for (i = 2; i < NF; i++) if ($i == "bytes" && $(i + 1) == "spill") spilled += $(i - 1)
    }
    match($0, /Used [0-9]+ registers/) { print arch, substr($0, RSTART + 5, RLENGTH - 15), spilled }
    match($0, /\(C75[0-9][0-9]\)/) { print "wgmma", substr($0, RSTART + 1, RLENGTH - 2) }' "$1"
}

# launch_facts OBJECT: "THREADS SMEM_BYTES BLOCK_M", the sizes of tools/library.cu's symbols.
launch_facts() {
  local symbol size out=''
  for symbol in threads smem_bytes block_m; do
    size=$(nm -S "$1" 2>/dev/null | awk -v symbol="sdpa_library_$symbol" '$4 == symbol { print $2 }')
    [ -n "$size" ] || return 1
    out+="${out:+ }$((16#$size))"
  done
  echo "$out"
}

# machine_code OBJECT: a checksum of the instructions of its kernels, one for each architecture. The
# device code is one ELF file each inside the object; of these only the code sections count, since names,
# line numbers and checksums of the source lie elsewhere.
machine_code() {
  local object=$1 at cubin sums=''
  cubin=$(mktemp)
  while IFS=: read -r at _; do
    [ "$at" -gt 0 ] || continue  # the object itself
    tail -c +$((at + 1)) "$object" >"$cubin"
    sums+="${sums:+ }$(
      readelf -SW "$cubin" 2>/dev/null |
        awk '{ sub(/^ *\[ *[0-9]+\] /, "") } $1 ~ /^\.text\./ { print $4, $5 }' |
        while read -r offset size; do
          tail -c +$((16#$offset + 1)) "$cubin" | head -c $((16#$size))
        done | cksum | tr -d ' \n')"
  done < <(grep -obUaP '\x7fELF' "$object")
  rm -f "$cubin"
  [ -n "$sums" ] || return 1
  echo "$sums"
}

# step_over CSV NAME OTHER SHAPE: "LOW HIGH" for each problem (or SHAPE alone): how many times as fast as OTHER
# NAME is, as tools/steps.py measured it.
step_over() {
  awk -F, -v name="$2" -v other="$3" -v shape="$4" '
    NR == 1 { for (i = 1; i <= NF; i++) at[$i] = i; next }
    $at["line"] == name && $at["over"] == other && (shape == "" || $at["shape"] == shape) {
      print $at["low"], $at["high"]
    }' "$1"
}

newest_steps() { find results/steps -name '*.csv' 2>/dev/null | sed 's/\.csv$//' | sort -V | tail -1 | sed 's/$/.csv/'; }

# judge_gates BUILD CSV: prints the table for the lines of BUILD/configs.tsv that are selected; fails if a
# gate fails. OBJECT_OF, if set, names the function that prints where a line's object is.
judge_gates() {
  local build=$1 csv=$2 failed=0 lines=0 name selected gates gate log object regs spill limit facts codes
  local threads smem sum other factor shape interval
  declare -A line_of
  row() {  # row LINE GATE WANTED FOUND VERDICT
    printf '%-24s %-28s %-16s %-28s %s\n' "$@"
    if [ "$5" = FAIL ]; then failed=1; fi
  }
  at_most() {  # at_most GATE LIMIT FOUND [WHY]
    local verdict=ok
    [ "$3" -le "$2" ] || verdict=FAIL
    row "$name" "$1" "<= $2" "$3${4:+ ($4)}" $verdict
  }
  printf '%-24s %-28s %-16s %s\n' line gate wanted found
  while IFS=$'\t' read -r name _ selected _ gates; do
    [ "$selected" = yes ] || continue
    lines=$((lines + 1))
    log=$build/log/kernel_$name.log
    object=$("${OBJECT_OF:-kernel_object}" "$build" "$name")
    if [ -e "$log.failed" ] || ! facts=$(launch_facts "$object") || ! sum=$(machine_code "$object"); then
      row "$name" compiles yes "no: see $log" FAIL
      continue
    fi
    read -r threads smem _ <<<"$facts"
    regs=$(ptxas_report "$log" | awk 'NF == 3 && $2 > most { most = $2 } END { print most + 0 }')
    spill=$(ptxas_report "$log" | awk 'NF == 3 && $3 > most { most = $3 } END { print most + 0 }')
    if [ "$regs" = 0 ]; then
      row "$name" 'ptxas report' 'one' "none in $log" FAIL
      continue
    fi
    # A warp takes registers in units of 256, so a thread's share is a multiple of 8.
    limit=$((65536 / threads / 8 * 8))
    [ "$limit" -le 255 ] || limit=255
    local regs_limit=$limit smem_limit=$((99 * 1024)) spill_limit=0 spill_why=''  # 99 KB: sm_89
    ptxas_report "$log" | grep -q '^sm_8' || smem_limit=$((227 * 1024))
    for gate in $gates; do
      case $gate in
        'gate:regs<='*) regs_limit=${gate#*=} ;;
        'gate:smem<='*) smem_limit=${gate#*=} ;;
        'gate:spill<='*) spill_limit=${gate#*=} spill_why=${spill_limit#*:} spill_limit=${spill_limit%%:*} ;;
      esac
    done
    at_most 'bytes spilled' "$spill_limit" "$spill" "$spill_why"
    at_most registers "$regs_limit" "$regs"
    at_most 'shared bytes' "$smem_limit" "$smem"
    codes=$(ptxas_report "$log" | awk '$1 == "wgmma" { print $2 }' | sort -u | paste -sd' ')
    if [ -n "$codes" ]; then row "$name" 'wgmma as written' yes "no: $codes" FAIL; fi
    if [ -n "${line_of[$sum $facts]-}" ]; then
      row "$name" duplicate 'its own code' "all of ${line_of[$sum $facts]}'s" FAIL
    else
      line_of[$sum $facts]=$name
    fi
    for gate in $gates; do
      case $gate in gate:step-over=*) ;; *) continue ;; esac
      IFS=':@' read -r other factor shape <<<"${gate#*=}"
      if [ ! -r "$csv" ]; then
        row "$name" "over $other${shape:+ at $shape}" ">= $factor" 'not timed: gates --time' UNCLEAR
        continue
      fi
      interval=$(step_over "$csv" "$name" "$other" "$shape")
      if [ -z "$interval" ]; then
        row "$name" "over $other${shape:+ at $shape}" ">= $factor" 'not timed' UNCLEAR
        continue
      fi
      while read -r low high; do
        row "$name" "over $other${shape:+ at $shape}" ">= $factor" "$low to $high" \
          "$(awk -v low="$low" -v high="$high" -v factor="$factor" \
            'BEGIN { print (low >= factor ? "ok" : high < factor ? "FAIL" : "UNCLEAR") }')"
      done <<<"$interval"
    done
  done <"$build/configs.tsv"
  if [ $lines = 0 ]; then
    echo "no line of $build/configs.tsv is selected"
    return 1
  fi
  echo "$lines lines, $([ $failed = 0 ] && echo 'no gate failed' || echo 'A GATE FAILED')"
  return $failed
}

kernel_object() {  # where CMake puts the object of the target kernel_NAME
  printf '%s' "$1/CMakeFiles/kernel_$2.dir/tools/library.cu.o"
}

gates_command() {
  local only='' csv='' timed=0
  while [ $# -gt 0 ]; do
    case $1 in
      -h|--help) gates_usage; exit 0 ;;
      --time) timed=1; shift ;;
      --only|--steps)
        [ $# -gt 1 ] || refuse "gates: $1: its value is missing"
        if [ "$1" = --only ]; then only=$2; else csv=$2; fi
        shift 2
        ;;
      *) gates_usage >&2; refuse "gates: $1: no such option" ;;
    esac
  done
  [ -z "$csv" ] || [ -r "$csv" ] || refuse "gates: $csv: there is no such file"
  echo | grep -qE -- "$only" 2>/dev/null
  [ $? -le 1 ] || refuse "gates: --only $only: not a regular expression"
  need_tools
  cmake -DCONFIGS="${SDPA_CONFIGS:-configs.txt}" -P tools/configs.cmake 2>/dev/null | cut -f1 | grep -qE -- "$only" ||
    refuse "gates: --only $only: no line of configs.txt has such a name"
  if [ $timed = 1 ]; then
    need_python numpy scipy
    # shellcheck disable=SC2154  # need_python has set it
    csv=$("$python" tools/steps.py "$only") || exit
  fi
  [ -n "$csv" ] || csv=$(newest_steps)
  need_nvcc
  need readelf binutils
  build=$build/gates
  SDPA_ARCHS=${SDPA_ARCHS:-80-real;89-real;90a-real}
  configure -DSDPA_KEEP_GOING=ON -DSDPA_ONLY="$only" -DSDPA_CPU=OFF -DSDPA_TESTS=OFF
  local bad=0
  if [ -s "$build/bad_lines.txt" ]; then cut -f3 "$build/bad_lines.txt" >&2; bad=1; fi
  local keep_going=-k
  grep -q '^CMAKE_GENERATOR:INTERNAL=Ninja' "$build/CMakeCache.txt" && keep_going=-k0
  say "compiling the kernels (ptxas's words: $build/log)"
  cmake --build "$build" -j "${jobs:?}" --target sdpa_kernels -- "$keep_going" >"$build/build.log" 2>&1
  [ -z "$csv" ] || say "speed claims are judged by $csv"
  judge_gates "$build" "$csv" || bad=1
  exit $bad
}
