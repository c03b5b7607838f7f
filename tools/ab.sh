# ./run_all.sh ab: is B faster than A? Sourced by run_all.sh.
# shellcheck shell=bash
. tools/derived.sh

ab_usage() {
  cat <<'EOT'
usage: ./run_all.sh ab NAME KNOB=VALUE...   [OPTION...] [-- EXECUTABLE-OPTION...]
       ./run_all.sh ab NAME1 NAME2          [OPTION...] [-- EXECUTABLE-OPTION...]
Builds the line NAME of configs.txt (A) and the same with these knobs changed (B), or two lines; checks
both; then runs them in turn (ABBA), 10 pairs of processes and more while the interval is wide, and says
whether B is FASTER, SLOWER, the SAME (inside 0.5%) or UNCLEAR, with what else changed.
  --shape S      the problem, as for the executables; repeatable; default mission and long
  --b-shape S    B's problem, where it is not A's (as many as --shape)
  --pairs N      pairs of processes at least (default 10)
  --budget SEC   seconds for all measuring (default 120)
  -- ...         more options for both executables, such as -- --causal br
exit: 0 whatever the verdict, 1 a side fails its check, 2 bad usage, 3 a process failed
EOT
}

# sample EXE PAIR SIDE SAMPLES OPTION...: one process; appends a line for each of its problems.
sample() {
  local exe=$1 pair=$2 side=$3 samples=$4 rows
  shift 4
  if ! rows=$("$exe" --time-only --header "$@" 2>"$samples.err"); then
    say "ab: ${exe##*/} failed while being timed: $(tail -1 "$samples.err")"
    say "what was measured until then is in $samples"
    exit 3
  fi
  awk -F, -v pair="$pair" -v side="$side" '
    NR == 1 { for (i = 1; i <= NF; i++) at[$i] = i; next }
    { print pair, side, NR - 1, $at["graph_us"], $at["clock_mhz"] }' <<<"$rows" >>"$samples"
}

# take_samples EXE_A EXE_B SAMPLES PAIRS BUDGET: fills SAMPLES, prints the statistics. Reads the arrays
# options_a and options_b. Pairs go AB, BA, AB...: what drifts over time falls on both sides alike.
take_samples() {
  local exe_a=$1 exe_b=$2 samples=$3 least=$4 budget=$5 pair=0 begin=$SECONDS statistics
  : >"$samples"
  while :; do
    pair=$((pair + 1))
    if [ $((pair % 2)) = 1 ]; then
      sample "$exe_a" $pair A "$samples" "${options_a[@]}"
      sample "$exe_b" $pair B "$samples" "${options_b[@]}"
    else
      sample "$exe_b" $pair B "$samples" "${options_b[@]}"
      sample "$exe_a" $pair A "$samples" "${options_a[@]}"
    fi
    tty_line "pair $pair, $((SECONDS - begin)) s"
    [ $((pair % 2)) = 0 ] || continue
    [ $pair -ge "$least" ] || [ $((SECONDS - begin)) -ge "$budget" ] || continue
    statistics=$(awk -f tools/ab_statistics.awk "$samples")
    # Enough, or no time for two pairs more.
    if awk '$NF == 0 { exit 1 }' <<<"$statistics" ||
      [ $(((SECONDS - begin) * (pair + 2) / pair)) -gt "$budget" ]; then
      break
    fi
  done
  end_line
  printf '%s\n' "$statistics"
}

# check_side EXE SIDE ROWS OPTION...: the checks, before any time; rows go to ROWS.
check_side() {
  local exe=$1 side=$2 rows=$3 status=0
  shift 3
  "$exe" --check-only --header "$@" >"$rows" 2>"$rows.err" || status=$?
  [ $status = 0 ] && return
  cat "$rows.err" >&2
  case $status in
    1) say "ab: $side (${exe##*/}) gives wrong results, so it gets no time"; exit 1 ;;
    2) refuse "ab: the executables refuse these options" ;;
    *) say "ab: $side (${exe##*/}) could not be checked (exit $status)"; exit 3 ;;
  esac
}

# instruction_mix EXE: "HMMA MUFU FFMA LDS BAR total" counted in its attention kernels, if cuobjdump is
# there. HMMA stands for all tensor-core instructions, LDS for all loads from shared memory.
instruction_mix() {
  command -v cuobjdump >/dev/null || return 0
  cuobjdump -sass "$1" 2>/dev/null | awk '
    /Function :/ { counting = !/count_clocks/ }
    counting && match($0, /\/\*[0-9a-f][0-9a-f][0-9a-f][0-9a-f]+\*\/ +/) {
      text = substr($0, RSTART + RLENGTH)
      sub(/^@!?U?P[0-9T]+ +/, "", text)
      if (text !~ /^[A-Z]/ || text ~ /^NOP/) next
      total++
      if (text ~ /^(HMMA|HGMMA|QGMMA|IMMA)/) tensor++
      else if (text ~ /^MUFU/) mufu++
      else if (text ~ /^FFMA/) ffma++
      else if (text ~ /^LDSM?[. ]/) lds++
      else if (text ~ /^(BAR|SYNCS)/) bar++
    }
    END { if (total) print tensor + 0, mufu + 0, ffma + 0, lds + 0, bar + 0, total }'
}

# print_comparison NAME_A NAME_B STATISTICS: the table. Reads rows_a, rows_b and the executables.
print_comparison() {
  awk -v a="$1" -v b="$2" -v mix_a="$(instruction_mix "$exe_a")" -v mix_b="$(instruction_mix "$exe_b")" '
    function load(file, row,   line, n, f, i, rows) {
      while ((getline line < file) > 0) {
        n = split(line, f, ",")
        if (rows++ == 0) { for (i = 1; i <= n; i++) name[i] = f[i]; continue }
        for (i = 1; i <= n; i++) field[file, rows - 1, name[i]] = f[i]
      }
    }
    function both(label, x, y) { printf "%-22s %-34s %-34s%s\n", label, x, y, x == y || label == "" ? "" : "  *" }
    function times(x, low, high) { return sprintf("%.3f us [%.3f, %.3f]", x, low, high) }
    BEGIN {
      rows_a = ARGV[1]; rows_b = ARGV[2]; ARGV[1] = ARGV[2] = ""
      load(rows_a); load(rows_b)
    }
    {
      if (NR == 1) {
        printf "%-22s %-34s %-34s\n", "", "A " a, "B " b
        split("regs spill_bytes smem_bytes ctas_per_sm", column, " ")
        split("registers,bytes spilled,shared bytes,CTAs per SM", label, ",")
        for (i = 1; i <= 4; i++) both(label[i], field[rows_a, 1, column[i]], field[rows_b, 1, column[i]])
        if (mix_a != "" && mix_b != "") {
          split(mix_a, ma, " "); split(mix_b, mb, " ")
          split("tensor core,MUFU,FFMA,LDS and LDSM,BAR and SYNCS,instructions in all", kind, ",")
          for (i = 1; i <= 6; i++) both(kind[i], ma[i], mb[i])
        } else print "(no instruction mix: cuobjdump is not there)"
      }
      shape = field[rows_a, $1, "shape"] " " field[rows_a, $1, "causal"]
      sub(/ off$/, "", shape)
      print ""
      both(shape, field[rows_a, $1, "check"], field[rows_b, $1, "check"])
      both("", times($4, $5, $6), times($7, $8, $9))
      both("", $13 " MHz", $14 " MHz")
      printf "%-22s %.4f [%.4f, %.4f]  %s  (%d pairs, %d thrown out as throttled)\n", "  B/A, 95%", $10, $11, $12, \
             $15, $2, $3
    }' "$rows_a" "$rows_b" - <<<"$3"
}

ab_command() {
  local names=() changes=() shapes=() b_shapes=() more=() least=10 budget=120
  while [ $# -gt 0 ]; do
    case $1 in
      -h|--help) ab_usage; exit 0 ;;
      --shape|--b-shape|--pairs|--budget)
        [ $# -gt 1 ] || refuse "ab: $1: its value is missing"
        case $1 in
          --shape) shapes+=(--shape "$2") ;;
          --b-shape) b_shapes+=(--shape "$2") ;;
          *)
            [[ $2 =~ ^[1-9][0-9]{0,5}$ ]] || refuse "ab: $1 $2: want a whole number from 1"
            if [ "$1" = --pairs ]; then least=$2; else budget=$2; fi
            ;;
        esac
        shift 2
        ;;
      --) shift; more=("$@"); break ;;
      -*) ab_usage >&2; refuse "ab: $1: no such option" ;;
      *=*) changes+=("$1"); shift ;;
      *) names+=("$1"); shift ;;
    esac
  done
  if ! { [ ${#names[@]} = 1 ] && [ ${#changes[@]} -gt 0 ]; } &&
    ! { [ ${#names[@]} = 2 ] && [ ${#changes[@]} = 0 ]; }; then
    ab_usage >&2
    refuse "ab: give a line and at least one KNOB=VALUE, or two lines"
  fi
  [ ${#shapes[@]} -gt 0 ] || shapes=(--shape mission --shape long)
  [ ${#b_shapes[@]} -gt 0 ] || b_shapes=("${shapes[@]}")
  [ ${#b_shapes[@]} = ${#shapes[@]} ] || refuse "ab: give as many --b-shape as --shape"
  local change
  for change in ${changes[@]+"${changes[@]}"}; do
    case $change in
      expect=*|arch=*|gate:*) refuse "ab: $change is no knob" ;;
    esac
  done

  local name_a name_b words_a words_b
  derive "${names[0]}"
  name_a=$derived_name words_a=$derived_words
  if [ ${#names[@]} = 2 ]; then derive "${names[1]}"; else derive "${names[0]}" "${changes[@]}"; fi
  name_b=$derived_name words_b=$derived_words
  need_gpu ab
  need_tools
  need_nvcc
  build_derived "$name_a" "$words_a" "$name_b" "$words_b"
  local name sentence
  for name in "$name_a" "$name_b"; do
    sentence=$(why_not_built "$name")
    [ -z "$sentence" ] || refuse "ab: $name: $sentence"
  done

  local exe_a=$derived_build/sdpa_$name_a exe_b=$derived_build/sdpa_$name_b
  local options_a=("${shapes[@]}" ${more[@]+"${more[@]}"}) options_b=("${b_shapes[@]}" ${more[@]+"${more[@]}"})
  local rows_a=$derived_build/a.csv rows_b=$derived_build/b.csv statistics
  check_side "$exe_a" A "$rows_a" "${options_a[@]}"
  check_side "$exe_b" B "$rows_b" "${options_b[@]}"
  statistics=$(take_samples "$exe_a" "$exe_b" "$derived_build/samples.txt" "$least" "$budget") || exit
  print_comparison "$name_a" "$name_b" "$statistics"
  say "samples: $derived_build/samples.txt"
}
