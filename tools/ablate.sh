# ./run_all.sh ablate: what each knob of a line is worth. Sourced by run_all.sh.
# shellcheck shell=bash
. tools/derived.sh

ablate_usage() {
  cat <<'EOT'
usage: ./run_all.sh ablate NAME [OPTION...] [-- EXECUTABLE-OPTION...]
Takes back each knob that the line NAME of configs.txt sets, once, to its default (with another one where
they only go together; HEAD_DIM and DTYPE stay), checks and times all of these builds in turn, and prints
what each knob is worth. The rows go to results/ablation/DATE-DEVICE-NAME.csv.
  --shape S    the problem, as for the executables; repeatable; default mission and long
  --rounds N   how often each build is timed (default 6: their range holds the median with 97%)
  --svg        draw results/ablation-NAME.svg as well, and results/ladder.svg again
exit: 0 all builds pass their checks, 1 one does not, 2 bad usage
EOT
}

# knob_defaults: "KNOB DEFAULT" for each row of SDPA_KNOBS in sdpa.cu.
knob_defaults() { sed -n 's/^  X(\([A-Z_]*\), \([A-Z0-9_]*\),.*/\1 \2/p' sdpa.cu; }

# refusal KNOB=VALUE...: the sentence with which section 1 of sdpa.cu refuses them; nothing if it does not.
refusal() {
  awk '/^\/\/ ==== 1 KNOBS/ { on = 1 } /^\/\/ ==== 2 PROBLEM/ { on = 0 } on' sdpa.cu |
    "${CXX:-g++}" -std=c++17 -fsyntax-only "${@/#/-D}" -x c++ - 2>&1 | assertion_words
}

# changed "KNOB=VALUE..." KNOB=VALUE...: the first words with these changes, one a line.
changed() {
  local word change words=$1
  shift
  for word in $words; do
    case $word in expect=*|arch=*) continue ;; esac
    for change in "$@"; do [ "${word%%=*}" = "${change%%=*}" ] && continue 2; done
    echo "$word"
  done
  printf '%s\n' "$@"
}

# removals "KNOB=VALUE...": for each knob set there one line: "KNOB=DEFAULT..." that takes it back and can
# be built, or "! KNOB=DEFAULT SENTENCE". If a knob cannot go alone, what the refusal says to type goes with
# it, or else one or two other knobs are taken back as well.
removals() {
  local words=$1 word knob value set_knobs=() first second sentence list advice tries try
  declare -A default
  while read -r knob value; do default[$knob]=$value; done < <(knob_defaults)
  for word in $words; do
    knob=${word%%=*}
    case $knob in expect|arch|HEAD_DIM|DTYPE) continue ;; esac
    [ "${default[$knob]-}" = "${word#*=}" ] || set_knobs+=("$knob=${default[$knob]-}")
  done
  for knob in ${set_knobs[@]+"${set_knobs[@]}"}; do
    mapfile -t list < <(changed "$words" "$knob")
    sentence=$(refusal "${list[@]}")
    tries=("$knob")
    if [ -n "$sentence" ]; then
      advice=$(grep -o 'type [A-Z_]*=.*$' <<<"$sentence" | grep -o '[A-Z_]*=[A-Z0-9_]*' | tr '\n' ' ')
      tries=()
      [[ " $advice" == *" ${knob%%=*}="* ]] || tries+=("$knob $advice")
      for first in "${set_knobs[@]}"; do [ "$first" = "$knob" ] || tries+=("$knob $first"); done
      for first in "${set_knobs[@]}"; do
        for second in "${set_knobs[@]}"; do
          [[ $first < $second && $first != "$knob" && $second != "$knob" ]] && tries+=("$knob $first $second")
        done
      done
    fi
    for try in "${tries[@]}"; do
      # shellcheck disable=SC2086  # one word a knob
      mapfile -t list < <(changed "$words" $try)
      if [ -z "$(refusal "${list[@]}")" ]; then
        echo "$try"
        continue 2
      fi
    done
    echo "! $knob $sentence"
  done
}

# merge_rounds ROWS ROUNDS: ROWS (with header) with graph_us, its interval and tflops taken over them and the
# later rounds (rows of --time-only without header, in ROUNDS).
merge_rounds() {
  awk -F, -v OFS=, -v rounds="$2" '
    function sort(x, n,   i, j, t) {
      for (i = 2; i <= n; i++) { t = x[i]; for (j = i; j > 1 && x[j - 1] > t; j--) x[j] = x[j - 1]; x[j] = t }
    }
    function key() { return $at["config"] "/" $at["shape"] "/" $at["causal"] }
    NR == 1 {
      for (i = 1; i <= NF; i++) at[$i] = i
      header = $0
      while ((getline < rounds) > 0) us[key(), ++n[key()]] = $at["graph_us"]
      print header
      next
    }
    $at["graph_us"] == "" { print; next }
    {
      count = 0
      for (i = 1; i <= n[key()]; i++) x[++count] = us[key(), i] + 0
      x[++count] = $at["graph_us"] + 0
      sort(x, count)
      median = count % 2 ? x[(count + 1) / 2] : (x[count / 2] + x[count / 2 + 1]) / 2
      $at["tflops"] = sprintf("%.2f", $at["tflops"] * $at["graph_us"] / median)
      $at["graph_us"] = sprintf("%.3f", median)
      $at["graph_lo_us"] = sprintf("%.3f", x[1])
      $at["graph_hi_us"] = sprintf("%.3f", x[count])
      print
    }' "$1"
}

# print_waterfall NAME CSV: per problem the line, then what it is without each knob, the dearest first.
print_waterfall() {
  awk -F, -v name="$1" '
    NR == 1 { for (i = 1; i <= NF; i++) at[$i] = i; next }
    {
      shape = $at["shape"] ($at["causal"] == "off" || $at["causal"] == "" ? "" : " " $at["causal"])
      if ($at["status"] == "error") { broken[++errors] = $at["config"] ": " $at["note"]; next }
      if (!(shape in count)) order[++shapes] = shape
      n = ++count[shape]
      label[shape, n] = $at["config"]; us[shape, n] = $at["graph_us"] + 0; check[shape, n] = $at["check"]
      if ($at["config"] == name) full[shape] = $at["graph_us"] + 0
      device = $at["device"]
    }
    END {
      for (s = 1; s <= shapes; s++) {
        shape = order[s]; n = count[shape]
        for (i = 1; i <= n; i++) rank[i] = i
        for (i = 2; i <= n; i++) {
          r = rank[i]
          for (j = i; j > 1 && us[shape, rank[j - 1]] < us[shape, r]; j--) rank[j] = rank[j - 1]
          rank[j] = r
        }
        printf "\n%s on %s: %s, %.3f us\n", shape, device, name, full[shape]
        for (i = 1; i <= n; i++) {
          r = rank[i]
          if (label[shape, r] == name) continue
          text = substr(label[shape, r], length(name) + 3)
          gsub(/__/, ", ", text)
          cost = full[shape] ? us[shape, r] / full[shape] - 1 : 0
          bar = ""
          for (j = 0; j < 25 * cost && j < 40; j++) bar = bar "#"
          printf "  %-40s %-4s %10.3f us %+6.1f%% %s\n", text, check[shape, r], us[shape, r], 100 * cost, bar
        }
      }
      if (errors) print "\ncannot be taken back:"
      for (i = 1; i <= errors; i++) print "  " substr(broken[i], length(name) + 3)
    }' "$2"
}

ablate_command() {
  local name='' shapes=() more=() rounds=6 svg=0
  while [ $# -gt 0 ]; do
    case $1 in
      -h|--help) ablate_usage; exit 0 ;;
      --svg) svg=1; shift ;;
      --shape|--rounds)
        [ $# -gt 1 ] || refuse "ablate: $1: its value is missing"
        if [ "$1" = --shape ]; then
          shapes+=(--shape "$2")
        else
          [[ $2 =~ ^[1-9][0-9]?$ ]] || refuse "ablate: --rounds $2: want a whole number from 1 to 99"
          rounds=$2
        fi
        shift 2
        ;;
      --) shift; more=("$@"); break ;;
      -*) ablate_usage >&2; refuse "ablate: $1: no such option" ;;
      *)
        [ -z "$name" ] || { ablate_usage >&2; refuse "ablate: one line at a time"; }
        name=$1
        shift
        ;;
    esac
  done
  [ -n "$name" ] || { ablate_usage >&2; refuse "ablate: which line?"; }
  [ ${#shapes[@]} -gt 0 ] || shapes=(--shape mission --shape long)
  derive "$name"
  local words=$derived_words
  need_gpu ablate
  need_tools
  need_nvcc

  local builds=("$name" "$words") names=("$name") impossible=() removal
  while IFS= read -r removal; do
    if [ "${removal:0:2}" = '! ' ]; then
      impossible+=("${removal:2}")
      continue
    fi
    # shellcheck disable=SC2086  # one word a knob
    derive "$name" $removal
    builds+=("$derived_name" "$derived_words")
    names+=("$derived_name")
  done < <(removals "$words")
  build_derived "${builds[@]}"

  local header='' rows=$derived_build/ablation.csv later=$derived_build/rounds.csv exe round failed=0 sentence
  : >"$later"
  header=$("$derived_build/sdpa_$name" --header) || refuse "ablate: $name: $(why_not_built "$name")"
  echo "$header" >"$rows"
  local timed=()
  for derived_name in "${names[@]}"; do
    exe=$derived_build/sdpa_$derived_name
    sentence=$(why_not_built "$derived_name")
    if [ -n "$sentence" ]; then
      error_row "$derived_name" "$sentence" >>"$rows"
      continue
    fi
    tty_line "round 1 of $rounds: $derived_name"
    if "$exe" "${shapes[@]}" ${more[@]+"${more[@]}"} >>"$rows"; then
      timed+=("$exe")
    elif [ $? = 2 ]; then
      refuse "ablate: the executables refuse these options"
    else
      failed=1
    fi
  done
  for removal in ${impossible[@]+"${impossible[@]}"}; do
    error_row "${name}__$(sed 's/=/_/; s/ .*//' <<<"$removal")" "${removal#* }" >>"$rows"
  done
  for ((round = 2; round <= rounds; round++)); do
    for exe in ${timed[@]+"${timed[@]}"}; do
      tty_line "round $round of $rounds: ${exe##*/}"
      "$exe" --time-only "${shapes[@]}" ${more[@]+"${more[@]}"} >>"$later" || failed=1
    done
  done
  end_line
  merge_rounds "$rows" "$later" >"$rows.merged"
  local csv
  csv=$(keep_rows "$rows.merged" ablation "$name")
  print_waterfall "$name" "$csv"
  say "rows: $csv"
  if [ $svg = 1 ]; then
    tools/svg.sh ablation "$csv" >"results/ablation-$name.svg" || exit
    say "picture: results/ablation-$name.svg"
    local ladder
    ladder=$(newest_rows)
    if [ -n "$ladder" ]; then
      tools/svg.sh ladder "$ladder" >"results/ladder.svg" || exit
      say "picture: results/ladder.svg, from $ladder (with the peers: ./run_all.sh results)"
    else
      say "no picture of the ladder: ./run_all.sh has not been run here yet"
    fi
  fi
  exit $failed
}
