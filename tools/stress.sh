# ./run_all.sh stress: do a line's bits depend on what runs beside it? Sourced by run_all.sh.
# shellcheck shell=bash
. tools/derived.sh

stress_usage() {
  cat <<'EOT'
usage: ./run_all.sh stress [NAME...] [--repeats N]
Runs these lines of configs.txt (by default those with USE_WGMMA=1) N times on each of three problems and
compares O and LSE bit by bit with those of a first run. CSV on stdout, one row a case:
config,case,problem,repeats,check, which is PASS or FAIL. The cases:
  alone       the same launch again
  max_ctas_N  persistent lines: at most 1, 3 or 7 CTAs
  beside      beside a kernel that keeps an eighth of the SMs and the memory busy; what it moved meanwhile
              stands on stderr
  stages_N    the line with STAGES=2, 3 or 4, whose bits must be the line's; one that cannot be built is
              named on stderr
  --repeats N  runs of each case (default 1000)
exit: 0 all bits are the same, 1 some are not, 2 bad usage, 3 something could not be run
EOT
}

# wgmma_lines: the names of the lines that set USE_WGMMA=1.
wgmma_lines() {
  config_lines | awk -F'\t' '(" " $5 " ") ~ / USE_WGMMA=1 / { print $1 }'
}

# stress_one NAME CASE-OF-THE-VARIANT LINE OPTION...: runs stress_NAME; a variant's rows go under its line's
# name. Sets worst to the worst exit code so far: 3 is worse than 1.
stress_one() {
  local name=$1 case=$2 line=$3 status
  shift 3
  timeout "$seconds" "$derived_build/stress_$name" --repeats "$repeats" "$@" | sed "s/^$name,alone,/$line,$case,/"
  status=${PIPESTATUS[0]}
  case $status in
    0) ;;
    1) [ "$worst" = 3 ] || worst=1 ;;
    124) say "stress: $name: no end after $seconds seconds"; worst=3 ;;
    *) say "stress: $name ended with exit code $status"; worst=3 ;;
  esac
}

stress_command() {
  local names=() repeats=1000
  while [ $# -gt 0 ]; do
    case $1 in
      -h|--help) stress_usage; exit 0 ;;
      --repeats)
        [ $# -gt 1 ] || refuse "stress: $1: its value is missing"
        [[ $2 =~ ^[1-9][0-9]{0,5}$ ]] || refuse "stress: $1 $2: want a whole number from 1 to 999999"
        repeats=$2
        shift 2
        ;;
      -*) stress_usage >&2; refuse "stress: $1: no such option" ;;
      *) names+=("$1"); shift ;;
    esac
  done
  if [ ${#names[@]} = 0 ]; then
    mapfile -t names < <(wgmma_lines)
    [ ${#names[@]} -gt 0 ] || refuse "stress: no line of $configs_file has USE_WGMMA=1; name the lines"
  fi
  local name stages builds=() stages_of=()
  for name in "${names[@]}"; do
    derive "$name"
    builds+=("$derived_name" "$derived_words")
    stages_of+=("$(grep -o 'STAGES=[0-9]*' <<<"$derived_words STAGES=1" | head -1)")
    for stages in 2 3 4; do
      [ "${stages_of[-1]}" != "STAGES=$stages" ] || continue
      derive "$name" "STAGES=$stages"
      builds+=("$derived_name" "$derived_words")
    done
  done
  has_gpu || refuse "stress: it runs kernels side by side and there is no GPU here; run it on a machine with one"
  need_tools
  need_nvcc
  build_derived --stress "${builds[@]}"

  echo config,case,problem,repeats,check
  # A kernel that waits for one that waits for it would never end.
  local worst=0 i sentence variant seconds=$((120 + repeats / 4))
  for i in "${!names[@]}"; do
    name=${names[i]}
    sentence=$(why_not_built --stress "$name")
    if [ -n "$sentence" ]; then
      say "stress: $name: not built: $sentence"
      worst=3
      continue
    fi
    stress_one "$name" alone "$name" --save "$derived_build/$name.bits"
    for stages in 2 3 4; do
      [ "${stages_of[i]}" != "STAGES=$stages" ] || continue
      variant=${name}__STAGES_$stages
      sentence=$(why_not_built --stress "$variant")
      if [ -z "$sentence" ]; then
        stress_one "$variant" "stages_$stages" "$name" --like "$derived_build/$name.bits"
        continue
      fi
      say "stress: $name with STAGES=$stages: not built: $sentence"
      # What sdpa.cu refuses in words cannot be; anything else is an error.
      [ -n "$(assertion_words <"$derived_build/log/stress_$variant.log")" ] || worst=3
    done
  done
  exit "$worst"
}
