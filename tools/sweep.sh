# ./run_all.sh sweep: random problems on every line, counted. Sourced by run_all.sh.
# shellcheck shell=bash

sweep_usage() {
  cat <<'EOT'
usage: ./run_all.sh sweep [N] [--only REGEX] [--series S] [--jobs J] [--cpu]
Checks N (default 120) random problems on every line of configs.txt, on the GPU or with --cpu on the CPU
backend: all masks, layouts, inputs and ratios of heads that the line takes. CSV on stdout, a row a line:
what it was, how many problems passed, were wrong, or ended in an error; on a GPU also kept as
results/sweep/DATE-DEVICE.csv. The rows of all problems are in BUILD/sweep/NAME.csv, the words in NAME.err.
  --only REGEX  only the lines whose name matches
  --series S    which problems are drawn (default 0); line number i of configs.txt takes series S + i
  --jobs J      executables that run at once (default 2)
exit: 0 all passed, 1 some did not, 2 bad usage
EOT
}

sweep_command() {
  local count=120 only='' series=0 at_once=2 cpu=0
  while [ $# -gt 0 ]; do
    case $1 in
      -h|--help) sweep_usage; exit 0 ;;
      --cpu) cpu=1; shift; continue ;;
      --only|--series|--jobs) [ $# -gt 1 ] || refuse "sweep: $1: its value is missing" ;;&
      --only) only=$2; shift 2 ;;
      --series) series=$2; shift 2 ;;
      --jobs) at_once=$2; shift 2 ;;
      -*) sweep_usage >&2; refuse "sweep: $1: no such option" ;;
      *) count=$1; shift ;;
    esac
  done
  [[ $count =~ ^[1-9][0-9]{0,5}$ ]] || refuse "sweep: $count: want a number of problems from 1 to 999999"
  [[ $series =~ ^[0-9]{1,9}$ ]] || refuse "sweep: --series $series: want a whole number"
  [[ $at_once =~ ^[1-9][0-9]?$ ]] || refuse "sweep: --jobs $at_once: want a number from 1 to 99"
  echo | grep -qE -- "$only"
  [ $? -le 1 ] || refuse "sweep: --only $only: not a regular expression"
  if [ $cpu = 0 ] && ! has_gpu; then
    say "There is no GPU here: sweeping on the CPU backend."
    cpu=1
  fi
  need_tools
  if [ $cpu = 1 ]; then build=$build-cpu; else need_nvcc; fi
  configure -DSDPA_KEEP_GOING=ON -DSDPA_ONLY="$only" -DSDPA_CPU=$cpu
  local names=() name expect selected
  while IFS=$'\t' read -r name expect selected _; do
    series=$((series + 1))
    [ "$selected" = yes ] && [ "$expect" = PASS ] && names+=("$name $series")
  done <"$build/configs.tsv"
  [ ${#names[@]} -gt 0 ] || refuse "sweep: --only $only: no line of configs.txt has such a name"
  build_selected ${#names[@]} sdpa_sweeps

  local folder=$build/sweep
  rm -rf "$folder"
  mkdir -p "$folder"
  # shellcheck disable=SC2016  # the inner shell expands them
  printf '%s\n' "${names[@]}" |
    xargs -P "$at_once" -L1 sh -c '"$1/sweep_$3" --header --sweep "$2" --seeds "$4" >"$1/sweep/$3.csv" 2>"$1/sweep/$3.err"; echo "swept $3" >&2' \
      sh "$build" "$count"
  # A line without an executable has no rows, and so fewer than were wanted.
  local counts=$folder.csv
  {
    echo config,series,problems,passed,wrong,errors,skipped,D,dtype,device,sm,cuda,driver,git_sha
    for name in "${names[@]}"; do
      awk -F, -v name="${name% *}" -v series="${name#* }" -v OFS=, '
        NR == 1 { for (i = 1; i <= NF; i++) at[$i] = i; next }
        {
          n++
          if ($at["status"] == "skipped") skipped++; else if ($at["status"] != "ok") errors++
          else if ($at["check"] == "PASS") passed++; else wrong++
          tail = $at["D"] OFS $at["dtype"] OFS $at["device"] OFS $at["sm"] OFS $at["cuda"] OFS $at["driver"] OFS $at["git_sha"]
        }
        END { print name, series, n + 0, passed + 0, wrong + 0, errors + 0, skipped + 0, tail }' "$folder/${name% *}.csv"
    done
  } >"$counts"
  counts=$(keep_rows "$counts" sweep)
  cat "$counts"
  say "counts: $counts"
  head -qn3 "$folder"/*.err | head -20 >&2
  awk -F, -v count="$count" 'NR > 1 && $4 + $7 != count { bad = 1 } END { exit bad }' "$counts"
  exit
}
