# Lines that configs.txt does not have: one of its lines with some knobs changed. Sourced by the
# sub-commands that build such lines; uses run_all.sh's functions.
# shellcheck shell=bash

configs_file=${SDPA_CONFIGS:-configs.txt}

# config_lines: NAME, BASE, PASS or FAIL, ARCH, KNOB=VALUE..., GATE... of each line, with tabs between.
config_lines() {
  need cmake cmake
  [ -r "$configs_file" ] || refuse "$configs_file: there is no such file; it lists one line a build"
  cmake -DCONFIGS="$configs_file" -P tools/configs.cmake
}

# line_words NAME: the words of a line without its gates; refuses a NAME that is not there.
line_words() {
  local lines
  lines=$(config_lines) || exit 2
  awk -F'\t' -v name="$1" '
    $1 == name { print $5 ($4 == "" ? "" : " arch=" $4) ($3 == "FAIL" ? " expect=FAIL" : ""); found = 1; exit }
    END { exit !found }' <<<"$lines" ||
    refuse "$1: no line of $configs_file has that name; it has: $(cut -f1 <<<"$lines" | paste -sd' ')"
}

# derive NAME [KNOB=VALUE...]: sets derived_name and derived_words, the line NAME with these knobs
# changed. The line's gates do not go along.
derive() {
  local words word change
  words=$(line_words "$1") || exit 2
  derived_name=$1 derived_words=
  shift
  for word in $words; do
    for change in "$@"; do [ "${word%%=*}" = "${change%%=*}" ] && continue 2; done
    derived_words+=" $word"
  done
  for change in "$@"; do
    derived_name+=__${change/=/_}
    derived_words+=" $change"
  done
}

# build_derived [--stress] NAME WORDS [NAME WORDS]...: builds these lines in $build/derived, which the caller
# finds in derived_build; with --stress their stress_NAME instead of sdpa_NAME. Old ones stay there, so that
# asking again compiles nothing.
build_derived() {
  local list pattern='' count=0 build=$build target=sdpa_selected
  if [ "$1" = --stress ]; then target=sdpa_stress; shift; fi
  derived_build=$build/derived
  list=$derived_build.txt
  mkdir -p "$build"
  touch "$list"
  while [ $# -gt 0 ]; do
    awk -v name="$1" '$1 != name' "$list" >"$list.new"
    printf '%s %s\n' "$1" "$2" >>"$list.new"
    sort "$list.new" | cmp -s - "$list" || sort "$list.new" >"$list"
    rm -f "$list.new"
    pattern+="${pattern:+|}$1" count=$((count + 1))
    shift 2
  done
  build=$derived_build
  SDPA_CONFIGS=$list configure -DSDPA_KEEP_GOING=ON -DSDPA_ONLY="^($pattern)\$" -DSDPA_CPU=OFF -DSDPA_TESTS=OFF
  build_selected $count $target
}

# why_not_built [--stress] NAME: the sentence that says why the derived line has no executable; nothing if it
# has one.
why_not_built() {
  local sentence build=$derived_build exe=sdpa_ log=
  if [ "$1" = --stress ]; then exe=stress_ log=stress_; shift; fi
  sentence=$(awk -F'\t' -v name="$1" '$2 == name { print $3; exit }' "$build/bad_lines.txt")
  if [ -n "$sentence" ]; then
    echo "${sentence#*:*: }"  # without the name of our own list
  elif [ -e "$build/log/$log$1.log.failed" ] || [ ! -x "$build/$exe$1" ]; then
    compiler_words "$log$1" | sed 's/^does not compile: //'
  fi
}

need_gpu() {  # need_gpu COMMAND
  has_gpu || refuse "$1: it times kernels and there is no GPU here; run it on a machine with one (check without times: ./run_all.sh --cpu)"
}
