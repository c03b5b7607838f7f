#!/usr/bin/env bash
# Builds, checks, times and ranks all lines of configs.txt, and runs the other tools. See ./run_all.sh --help
set -u
# Numbers need a decimal point in every locale; keep the user's other locale categories.
if [ -n "${LC_ALL-}" ]; then export LANG=$LC_ALL; unset LC_ALL; fi
export LC_NUMERIC=C
# A relative path is relative to the caller's folder, so resolve it before cd.
[ -z "${SDPA_CONFIGS-}" ] || SDPA_CONFIGS=$(realpath -m -- "$SDPA_CONFIGS")
caller=$PWD
typed=("$@")
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")" || exit 2

usage=$(cat <<'EOF'
usage: ./run_all.sh [--cpu] [--only REGEX] [--shape S]... [--causal C] [--csv] [-- OPTION...]
       ./run_all.sh ab NAME KNOB=VALUE...    is the line faster with these knobs? ab --help
       ./run_all.sh ab main~20:NAME NAME     is the line faster than in an older commit, or than another line?
       ./run_all.sh ablate NAME [--svg]      the contribution of each knob of a line. ablate --help
       ./run_all.sh tune [--shape S]...      search the fastest line for a problem on this GPU. tune --help
       ./run_all.sh micro [--family F]       the time per iteration of a tile loop, for many tiles. micro --help
       ./run_all.sh fit [--check]            does TUNED_TILES choose well on this GPU? fit --help
       ./run_all.sh list [REGEX]             list the lines, their bases and changes, and the GPUs that they need
       ./run_all.sh gates [--only REGEX]     check registers, spills, shared memory, duplicates and speed-ups
       ./run_all.sh profile NAME [--shape S] what limits a line's kernel, measured by ncu
       ./run_all.sh rungs                    time each rung of docs/LADDER.md, and find what limits it
       ./run_all.sh stress [NAME...]         are results bitwise equal while other work runs? stress --help
       ./run_all.sh sweep [N]                random problems on every line, counted. sweep --help
       ./run_all.sh sanitize [REGEX]         run lines under NVIDIA's compute-sanitizer. sanitize --help
       ./run_all.sh test [--all] [CTEST OPTION...]
       ./run_all.sh extract NAME > my_kernel.cu
       ./run_all.sh results [CSV]...
       ./run_all.sh report
  (no command)    build, check, time and rank all lines of configs.txt on small, mission and long;
                  the rows go to results/lines/DATE-DEVICE.csv. Without a GPU: as with --cpu
  --cpu           check the lines on the CPU backend, on small and mission, without timing
  --only REGEX    only lines whose names match
  --shape S       small, mission, mission2, long, decode, decode1, chunk or B,Hq,Hkv,Sq,Sk[,D]; repeatable
  --causal C      br: the last query sees the last key; tl: query q sees keys 0..q; or off
  --csv           print the rows as CSV on stdout instead of the table
  -- OPTION...    further options for the executables, such as -- --window 128,0 --seeds 0,1,2
  test            build and run the tests; with --all also the long ones, for changes of kernels
  extract         print the kernel of a line as a self-contained file without knobs. extract --help
  results         update the tables of README.md and docs/ and the pictures of results/, from the newest or the given CSVs
  report          write results/report.html, one page with all results; needs python3-matplotlib
environment: SDPA_BUILD_DIR (default build), SDPA_ARCHS (such as "80-real"), SDPA_CONFIGS, JOBS
exit status: 0 success, 1 a line or test failed, 2 bad usage or a missing tool, 3 a full disk or closed output
EOF
)

say() { printf '%s\n' "$*" >&2; }
refuse() { say "run_all.sh: $*"; exit 2; }
# show TEXT: prints it to stdout. Exits with the reason if that fails.
show() {
  local reason
  { :; } 2>/dev/null 3>&1 || { say "run_all.sh: stdout is closed"; exit 3; }
  { reason=$(printf '%s\n' "$1" 2>&1 >&3); } 3>&1 && return
  reason=${reason##*: }
  say "run_all.sh: stdout cannot be written to (${reason:-its reader has exited})"
  exit 3
}
# nearest WORD NAME...: prints "; did you mean NAME?" for the name with the smallest edit distance, if that is small.
nearest() {
  printf '%s\n' "$@" | awk '
    function edits(a, b,   i, j, least, d) {  # swapping neighbours is one edit
      for (i = 0; i <= length(a); i++) {
        for (j = 0; j <= length(b); j++) {
          least = i == 0 ? j : j == 0 ? i : d[i-1, j-1] + (substr(a, i, 1) != substr(b, j, 1))
          if (i && d[i-1, j] + 1 < least) least = d[i-1, j] + 1
          if (j && d[i, j-1] + 1 < least) least = d[i, j-1] + 1
          if (i > 1 && j > 1 && substr(a, i-1, 2) == substr(b, j, 1) substr(b, j-1, 1) && d[i-2, j-2] + 1 < least)
            least = d[i-2, j-2] + 1
          d[i, j] = least
        }
      }
      return d[length(a), length(b)]
    }
    NR == 1 { word = $0; fewest = int((length(word) + 2) / 3) + 1; next }
    { n = edits(word, $0); if (n < fewest) { fewest = n; name = $0 } }
    END { if (name) printf "; did you mean %s?", name }'
}

for path in "SDPA_BUILD_DIR=${SDPA_BUILD_DIR-}" "SDPA_CONFIGS=${SDPA_CONFIGS-}" "the folder of run_all.sh, $PWD"; do
  [[ $path != *[\;$'\n']* ]] || refuse "$path: CMake splits paths at ';' and at line ends; take a path without them"
done
build=${SDPA_BUILD_DIR:-build}
venv=$(realpath -m -- "$build/venv")  # absolute, since tests use it in other folders
jobs=${JOBS:-$(nproc 2>/dev/null || echo 2)}
[[ $jobs =~ ^[1-9][0-9]{0,3}$ ]] || refuse "JOBS=$jobs: want a number of processes from 1 to 9999"
# progress WHAT DONE COUNT NAME SINCE: prints "built 7 of 81, 130 s left: scalar_vec8". SINCE: $SECONDS at the start.
progress() {
  local left=$(((SECONDS - $5) * ($3 - $2) / $2)) text=''
  [ $left -lt 5 ] || text=", $left s left"
  tty_line "$1 $2 of $3$text: $4"
}
# Progress messages overwrite each other on a terminal that supports it; otherwise each is a line.
is_terminal() { [ -t 2 ] && [ "${TERM-dumb}" != dumb ]; }
tty_line() { if is_terminal; then printf '\r\033[K%s' "$*" >&2; else say "$*"; fi; }
end_line() { if is_terminal; then printf '\n' >&2; fi; }
lines() { if [ "$1" = 1 ]; then echo "1 line"; else echo "$1 lines"; fi; }

if [ -n "${SDPA_CONFIGS-}" ] && ! [ -f "$SDPA_CONFIGS" ]; then refuse "SDPA_CONFIGS=$SDPA_CONFIGS: there is no such file"; fi
arch='[0-9]+[af]?(-real|-virtual)?'
[[ ${SDPA_ARCHS:-native} =~ ^(native|$arch(;$arch)*)$ ]] ||
  refuse "SDPA_ARCHS=$SDPA_ARCHS: want native or a list such as 80-real;90a-real"

# from_caller PATH: prints the path relative to the caller's folder.
from_caller() { realpath --relative-to="$caller" -- "$1"; }

# may_install WHAT: asks for permission if there is a terminal; otherwise only prints a message.
may_install() {
  local answer
  if ! [ -t 0 ] || ! [ -t 2 ]; then say "installing $1"; return; fi
  read -rp "May I install $1? [y/N] " answer
  [[ $answer = [yY]* ]]
}

# apt_install PACKAGE...: installs as root, or with sudo if there is a terminal for the password.
apt_install() {
  local apt=(env DEBIAN_FRONTEND=noninteractive apt-get)
  command -v apt-get >/dev/null || return
  if [ "$(id -u)" != 0 ]; then
    if ! [ -t 0 ] || ! command -v sudo >/dev/null; then return 1; fi
    apt=(sudo "${apt[@]}")
  fi
  may_install "$* (apt-get)" && "${apt[@]}" update >/dev/null &&
    "${apt[@]}" install -y --no-install-recommends "$@" >/dev/null
}

# refuse_full_disk WORDS: exits if a program failed because a disk is full: WORDS, its output, says so, or less than
# 4 MB are free.
refuse_full_disk() {
  local full folder
  full=$(grep -m1 -E 'No space left on device|Disk quota exceeded' <<<"$1")
  for folder in "$build" "${TMPDIR:-/tmp}"; do
    [ -n "$full" ] || full=$(df -Pk "$folder" | awk -v folder="$folder" 'NR == 2 && $4 < 4096 { print folder " has " $4 " KB left" }')
  done
  [ -n "$full" ] || return 0
  end_line
  say "run_all.sh: No space left on device: ${full#"${full%%[![:space:]]*}"}"
  say "Free some space, or set SDPA_BUILD_DIR (now $build) or TMPDIR (now ${TMPDIR:-/tmp}) to a folder with more."
  exit 3
}

# need COMMAND PACKAGE: installs a tool if it is missing. Refuses if that fails.
need() {
  command -v "$1" >/dev/null || { apt_install "$2" && command -v "$1" >/dev/null; } ||
    refuse "$1 is missing; install it with: sudo apt-get install $2"
}

# lacking PYTHON PACKAGE...: prints the packages that are missing. A package may have a version, as in onnx==1.23.*
lacking() {
  "$1" -c '
import fnmatch, importlib.metadata, sys
for word in sys.argv[1:]:
    package, _, version = word.partition("==")
    try: is_there = fnmatch.fnmatch(importlib.metadata.version(package), version or "*")
    except importlib.metadata.PackageNotFoundError: is_there = False
    if not is_there: print(word)' "${@:2}" 2>/dev/null || echo python3
}

# python_with PACKAGE...: sets $python to a Python that has all of them.
python_with() {
  for python in python3 "$venv/bin/python3" /usr/bin/python3; do  # Debian's packages, if another Python is first on PATH
    command -v "$python" >/dev/null && [ -z "$(lacking "$python" "$@")" ] && return
  done
  return 1
}

# pip_install PYTHON PACKAGE...: installs missing packages into $venv, which is created from PYTHON if needed, and sets
# $python. --no-compile, here and below: Python compiles a module at its first import, and most are never imported.
pip_install() {
  local base=$1
  shift
  command -v "$base" >/dev/null && may_install "$* (pip, into $venv)" || return
  need_folder
  "$base" -c 'import ensurepip' 2>/dev/null || apt_install python3-venv  # Debian's Python lacks it
  "$venv/bin/python3" -m pip --version >/dev/null 2>&1 || "$base" -m venv --system-site-packages --clear "$venv" || return
  "$venv/bin/python3" -m pip install -qqq --no-compile --retries 1 "$@" >"$build/pip.log" 2>&1 || tail -1 "$build/pip.log" >&2
  python_with "$@"
}

# find_python PACKAGE...: like python_with, but installs what is missing: packages with a version from PyPI, others with
# apt-get.
find_python() {
  local word debian=()
  for word in "$@"; do [[ $word = *==* ]] || debian+=("$word"); done
  python_with "$@" || {
    python_with "${debian[@]}" || { apt_install python3 "${debian[@]/#/python3-}"; python_with "${debian[@]}"; } || python=python3
    python_with "$@" || pip_install "$python" "$@"
  }
}

# ml_dtypes 0.6 requires NumPy 2, but Debian's SciPy is compiled for NumPy 1.
engine_packages=(numpy scipy pyelftools 'ml_dtypes==0.5.*')
extract_packages=('tree-sitter==0.*' 'tree-sitter-cpp==0.*')
layout_packages=("${extract_packages[@]}" 'clang-format==23.*')  # extract works without clang-format, but leaves long lines

# PyTorch for the tests of bindings/, without 2 GB of its libraries that the CUDA Toolkit contains too.
pytorch_size="2.7 GB on the disk"
has_pytorch() { "$python" -c 'import torch._dynamo' 2>/dev/null; }
install_pytorch() {
  [ "$python" = "$venv/bin/python3" ] && has_nvcc && may_install "PyTorch (pip, $pytorch_size, into $venv)" &&
    "$python" -m pip install --quiet --no-compile expecttest filelock fsspec jinja2 networkx 'sympy>=1.13.3' typing-extensions 'transformers==5.*' >&2 &&
    "$python" -m pip install -qqq --no-compile --no-deps 'torch==2.11.*' 'nvidia-cufile==1.*' 'nvidia-cusparselt-cu13==0.8.0' \
      'nvidia-nccl-cu13==2.28.*' 'nvidia-nvshmem-cu13==3.4.*' 'triton==3.6.*' >&2 && "$python" -c 'import torch._dynamo'
}

# Installs the newest PyTorch into a separate folder, which a test puts first on the module path, and the NVIDIA libraries
# that it pins and the CUDA Toolkit lacks. It shares all other packages with the older PyTorch.
install_newest_pytorch() {
  local folder=$venv-torch-latest
  local pip=("$python" -m pip install --quiet --no-compile --no-deps --target "$folder") pins='nvidia-(cusparselt|nccl|nvshmem)-cu[0-9]+==[0-9.]+'
  if [ ! -d "$folder/torch" ]; then
    if ! has_nvcc || ! may_install "the newest PyTorch (pip, into $folder)"; then return 1; fi
    if ! "${pip[@]}" torch >&2 || ! grep -ohE "$pins" "$folder"/torch-*.dist-info/METADATA | xargs "${pip[@]}" >&2; then
      rm -rf "$folder"
      return 1
    fi
  fi
  PYTHONPATH=$folder "$python" -c 'import torch._dynamo' && export SDPA_TORCH_LATEST=$folder
}

need_python() {
  judge "$@"
  find_python "$@" && return
  local words
  words=$(lacking python3 "$@" | sed "s/.*[*<>=].*/'&'/" | tr '\n' ' ')  # quoted for the shell
  refuse "python3 lacks ${words% }; install with: python3 -m pip install ${words% }"
}

# judge PACKAGE...: refuses bad arguments, as far as possible without the packages, before they are installed.
judge() {
  python_with "$@" || ! command -v python3 >/dev/null || python3 tools --judge "${typed[@]}" || exit
}

need_tools() {
  need cmake cmake
  command -v "${CXX:-g++}" >/dev/null || need g++ g++
  command -v ninja >/dev/null || need make make
}

has_nvcc() {
  PATH=$PATH:${CUDA_HOME:-/usr/local/cuda}/bin
  command -v nvcc >/dev/null
}

has_gpu() { nvidia-smi -L 2>/dev/null | grep -q GPU; }

need_folder() {
  if ! mkdir -p "$build" 2>/dev/null || ! [ -w "$build" ]; then
    refuse "$build: not a writable folder; set SDPA_BUILD_DIR to one"
  fi
}

# configure [CMAKE OPTION...]
configure() {
  need_folder
  local generator=()
  if [ ! -e "$build/CMakeCache.txt" ] && command -v ninja >/dev/null; then generator=(-G Ninja); fi
  # Lock the folder; the lock ends with this process.
  if command -v flock >/dev/null; then
    exec 9>"$build/lock"
    flock -n 9 || refuse "$build: another run_all.sh is running there; wait, or set SDPA_BUILD_DIR to another folder"
  fi
  # Always pass both options, since CMake remembers their last values.
  local words
  if words=$(cmake -S . -B "$build" ${generator[@]+"${generator[@]}"} -DSDPA_ARCHS="${SDPA_ARCHS-}" \
      -DSDPA_CONFIGS="${SDPA_CONFIGS:-$PWD/configs.txt}" "$@" 2>&1); then
    return
  fi
  refuse_full_disk "$words"
  printf '%s\n' "$words" >"$build/configure.log"
  grep -A3 -E '^CMake Error|[Ee]rror:' <<<"$words" | head -20 >&2
  refuse "CMake could not configure; its output is in $build/configure.log"
}

# stopped HOW_FAR: the trap during a build.
stopped() {
  end_line
  say "stopped while building, $1; the same command continues in $build"
  exit 130
}

# compiled_count: prints the number of compiled lines. Executables do not count, since make compiles all lines before
# it links them.
compiled_count() {
  local name count=0
  for name in "${names[@]}"; do
    ! ls "$build/CMakeFiles/line_$name.dir/"sdpa*.cu.o >/dev/null 2>&1 || count=$((count + 1))
  done
  echo $count
}

# build_selected COUNT: builds all selected lines, with progress, and continues after errors. Uses one target for all
# lines, since make builds several targets one after the other.
build_selected() {
  local keep_going=-k done=0 line full='' since=$SECONDS count=$1  # copied, since a trap sees the arguments of the interrupted function
  trap 'stopped "$(lines "$(compiled_count)") of $count compiled"' INT TERM
  grep -q '^CMAKE_GENERATOR:INTERNAL=Ninja' "$build/CMakeCache.txt" && keep_going=-k0
  while IFS= read -r line; do
    case $line in
      *Building*/line_*.dir/*)  # compiling the harness and linking do not count
        done=$((done + 1)) line=${line##*/line_}
        progress built $done "$count" "${line%%.dir/*}" "$since"
        ;;
      *' space left on '*|*' quota '*) full=$line ;;
    esac
  done < <(cmake --build "$build" -j "$jobs" --target sdpa_selected -- "$keep_going" 2>&1 | tee "$build/build.log" 2>/dev/null)
  [ "$done" -gt 0 ] && end_line
  local name
  for name in "${names[@]}"; do
    if [ ! -x "$build/sdpa_$name" ] || [ -e "$build/log/$name.log.failed" ]; then
      refuse_full_disk "$full"
      break
    fi
  done
  [ ! -e "$build/log/harness.log.failed" ] || refuse "the harness, which all lines share, $(compiler_words harness)"
}

# Prints the first static assertion in the output of nvcc, clang++ or g++.
assertion_words() {
  sed -n -e 's/.*static assertion failed with "\(.*\)"$/\1/p' \
    -e 's/.*static_assert failed .*"\(.*\)"$/\1/p' \
    -e "s/.*static assertion failed\( due to requirement '.*'\)\{0,1\}: \(.*\)\$/\2/p" | head -1
}

# line_number NAME: prints where configs.txt defines the line, as in configs.txt:7.
line_number() {
  local file=${SDPA_CONFIGS:-configs.txt} byte_order_mark=$'\xEF\xBB\xBF'
  echo "$(basename "$file"):$(grep -nm1 -E "^($byte_order_mark)?[[:space:]]*$1([[:space:]]|\$)" "$file" | cut -d: -f1)"
}

# compiler_words NAME: prints the reason why a line, or the harness, did not compile.
compiler_words() {
  local log=$build/log/$1.log
  echo "does not compile: $( (assertion_words <"$log"; grep -E 'error|fatal' "$log"; tail -1 "$log") | head -1)"
}

# error_row NAME SENTENCE: prints a row for a line without an executable.
error_row() {
  local column row=''
  for column in ${header//,/ }; do
    case $column in config) row+=$1 ;; status) row+=error ;; note) row+=\"${2//\"/\"\"}\" ;; esac
    row+=,
  done
  echo "${row%,}"
}

# A racy negative control may pass its check by luck; racecheck then must report the race.
racecheck_reports() {
  command -v compute-sanitizer >/dev/null &&
    ! compute-sanitizer --tool racecheck --error-exitcode 9 "$1" --shape small --check-only \
      >"$build/racecheck.log" 2>&1 && grep -q 'RACECHECK SUMMARY: [1-9]' "$build/racecheck.log"
}

# print_table ROWS, print_rows ROWS: print to stdout.
print_table() { "$build/sdpa_table" "$1"; }
print_rows() { cat "$1"; }

# need_lines: refuses a configs.txt without lines.
need_lines() {
  local file=${SDPA_CONFIGS:-configs.txt}
  [ ! -r "$file" ] || grep -q '^[[:space:]]*[^#[:space:]]' "$file" || refuse "$file: no configuration in it; a line is NAME KNOB=VALUE ..."
}

# list [REGEX]: prints the lines of configs.txt, the changes of each to its base, and the architectures that they need.
list_lines() {
  case ${1-} in
    -h|--help) show "usage: ./run_all.sh list [REGEX]: lines, what they need, the step of each over its base"; exit 0 ;;
    -*) refuse "list $1: no such option; it takes a regular expression" ;;
  esac
  [ $# -le 1 ] || refuse "list ${*:2}: it takes one regular expression"
  echo | grep -qE -- "${1-}" 2>/dev/null
  [ $? -le 1 ] || refuse "list $1: not a regular expression"
  need_lines
  need cmake cmake
  local text status
  # Messages about bad lines use the same pipe, marked with "bad:".
  text=$( { cmake -DCONFIGS="${SDPA_CONFIGS:-configs.txt}" -P configs.cmake 2>&1 >&3 | sed 's/^/bad:/'; } 3>&1 |
    awk -F'\t' -v only="${1-}" '
    /^bad:/ {
      sentence = substr($0, 5)
      if (sentence != "") print sentence >"/dev/stderr"
      if (match(sentence, /^[^:]*:[0-9]+: /) && !seen[substr(sentence, 1, RLENGTH)]++) bad++
      next
    }
    {
      n = split($5, knob, " "); step = ""; split("", value)
      for (i = 1; i <= n; i++) {
        split(knob[i], pair, "="); value[pair[1]] = pair[2]; has[$1, pair[1]] = pair[2]
        if (!(($2, pair[1]) in has) || has[$2, pair[1]] != pair[2]) step = step " " knob[i]
      }
      needs = value["USE_WGMMA"] ? "sm_90a" : $4 ~ /^[0-9]+$/ ? "sm_" $4 : "sm_80"
      if ($3 == "FAIL") needs = needs ", must fail"
      if ($1 !~ only) next
      if (!found++) printf "%-24s %-20s %-24s %s\n", "line", "needs", "built on", "step"
      printf "%-24s %-20s %-24s%s\n", $1, needs, $2, step
      if ($6 ~ /gate:also=120/) also = also " " $1
    }
    END {
      if (also) print "sm_120 (RTX 50), compiled and gated, not timed:" also
      if (bad) print "list: " bad (bad == 1 ? " line" : " lines") " more could not be read" >"/dev/stderr"
      exit bad ? 1 : found ? 0 : 2
    }')
  status=$?
  [ -z "$text" ] || show "$text"
  [ $status != 2 ] || refuse "list ${1-}: no line of configs.txt has such a name; without it all are listed"
  return $status
}

# keep_rows ROWS: copies rows that were measured on a GPU to results/lines/DATE-DEVICE.csv, or DATE-DEVICE-N.csv if that
# exists. Prints where the rows are.
keep_rows() {
  local device stem path n=1 folder=results/lines
  device=$(awk -F, 'NR == 1 { for (i = 1; i <= NF; i++) if ($i == "device") d = i; next }
                    $d != "" { print $d; exit }' "$1" | tr -cs 'A-Za-z0-9\n' '-')
  case $device in ''|CPU-*) printf '%s' "$1"; return ;; esac
  stem=$folder/$(date +%Y-%m-%d)-$device
  path=$stem.csv
  while [ -e "$path" ]; do n=$((n + 1)); path=$stem-$n.csv; done
  if mkdir -p "$folder" && cp "$1" "$path"; then printf '%s' "$path"; else printf '%s' "$1"; fi  # mkdir and cp print errors
}

# judge_shape S: refuses a bad shape before anything is built.
judge_shape() {
  case $1 in small|mission|mission2|long|decode|decode1|chunk) return ;; esac
  if [[ $1 =~ ^[1-9][0-9]{0,8}([,x][1-9][0-9]{0,8}){2}([,x](0|[1-9][0-9]{0,8})){2}([,x][1-9][0-9]{0,8})?$ ]]; then
    local sizes
    IFS=,x read -ra sizes <<<"$1"
    [ $((sizes[1] % sizes[2])) != 0 ] || return 0
  fi
  refuse "--shape $1: want small, mission, mission2, long, decode, decode1, chunk or B,Hq,Hkv,Sq,Sk[,D] with Hq a" \
    "multiple of Hkv"
}

# judge_more OPTION...: refuses options that make an executable print something other than rows.
judge_more() {
  local option
  for option in "$@"; do
    case $option in
      -h|--help|--header|--config) refuse "-- $option: only for a single executable; type: build/sdpa_NAME $option" ;;
    esac
  done
}

main_job() {
  local only='' print=print_table cpu=0 shapes=() more=()
  while [ $# -gt 0 ]; do
    case $1 in --only=*|--shape=*|--causal=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" ;; esac
    case $1 in --only|--shape|--causal) [ $# -gt 1 ] || refuse "$1: its value is missing" ;; esac
    case $1 in
      --only) [ -z "$only" ] || refuse "--only is given twice; write --only '$only|$2'"; only=$2; shift ;;
      --shape) judge_shape "$2"; shapes+=(--shape "$2"); shift ;;
      --causal) [[ $2 =~ ^(off|br|tl)$ ]] || refuse "--causal $2: want br (bottom-right), tl (top-left) or off"
                more+=(--causal "$2"); shift ;;
      --csv) print=print_rows ;;
      --cpu) cpu=1 ;;
      --) judge_more "${@:2}"; more+=("${@:2}"); break ;;
      -h|--help) show "$usage"; exit 0 ;;
      *) local hint
         # shellcheck disable=SC2046  # names have no blanks
         hint=$(nearest "$1" $(grep -oE '^  --[a-z]+' <<<"$usage") $(grep -oE 'run_all.sh [a-z]+' <<<"$usage" | cut -d' ' -f2))
         refuse "$1: no such option or command${hint:-; --help lists them}" ;;
    esac
    shift
  done
  if [ $cpu = 0 ] && ! has_gpu; then
    say "There is no GPU here: checking the kernels on the CPU backend, without times."
    cpu=1
  fi
  if [ ${#shapes[@]} -eq 0 ]; then
    shapes=(--shape small --shape mission)
    [ $cpu = 1 ] || shapes+=(--shape long)
  fi
  echo | grep -qE -- "$only" 2>/dev/null
  [ $? -le 1 ] || refuse "--only $only: not a regular expression"
  [[ ! $only =~ (^|[\(|])[*+?]|\{|\[\[: ]] || refuse "--only $only: CMake reads it: its regular" \
    "expressions have no {N} and no [[:CLASS:]], and need something before each *, + and ?"

  need_tools
  if [ $cpu = 1 ]; then
    build=$build-cpu
  else
    has_nvcc || refuse "nvcc is missing; install the CUDA Toolkit 12.4 or newer, or put its bin folder on PATH"
  fi
  need_lines
  tty_line "reading configs.txt"
  configure -DSDPA_KEEP_GOING=ON -DSDPA_TESTS=OFF -DSDPA_ONLY="$only" -DSDPA_CPU=$cpu
  local names=() expects=() name expect selected sentence bad=0 failed=0 wrong=0 skipped=0 header='' csv i
  while IFS=$'\t' read -r name expect selected _; do
    [ "$selected" = yes ] && names+=("$name") && expects+=("$expect")
  done <"$build/configs.tsv"
  if [ ${#names[@]} -eq 0 ] && [ ! -s "$build/bad_lines.txt" ]; then
    refuse "--only $only: no line of configs.txt has such a name; ./run_all.sh list has them all"
  fi

  tty_line "building $(lines ${#names[@]}), $jobs at once"
  build_selected ${#names[@]}

  local rows=$build/rows.csv run=$build/run
  rm -rf "$run"
  mkdir "$run"
  : >"$rows"
  # run_line NAME: writes its rows, messages and exit status to files in $run.
  run_line() {
    "$build/sdpa_$1" "${shapes[@]}" ${more[@]+"${more[@]}"} >"$run/$1.csv" 2>"$run/$1.err"
    echo $? >"$run/$1.status"
  }
  # If interrupted, keep the rows that were already measured.
  local kept=0  # number of lines whose rows are in $rows
  trap 'end_line; for name in "${names[@]:kept}"; do cat "$run/$name.csv" >>"$rows" 2>/dev/null; done
        say "stopped; rows: $(from_caller "$(keep_rows "$rows")")"; exit 130' INT TERM
  for i in "${!names[@]}"; do
    [ -x "$build/sdpa_${names[i]}" ] && header=$("$build/sdpa_${names[i]}" --header) && break
  done
  [ -n "$header" ] && echo "$header" >"$rows"
  local number last=''
  while IFS=$'\t' read -r number name sentence; do
    say "$sentence"
    [ "$number" != "$last" ] || continue  # one row per line, even if it has several errors
    last=$number failed=1 bad=$((bad + 1))
    [ -n "$header" ] && error_row "$name" "$sentence" >>"$rows"
  done <"$build/bad_lines.txt"
  local since=$SECONDS
  if [ $cpu = 1 ]; then  # run several lines in parallel, since nothing is timed
    for i in "${!names[@]}"; do
      [ -x "$build/sdpa_${names[i]}" ] || continue
      [ "$i" -lt "$jobs" ] || wait -n
      progress running $((i + 1)) ${#names[@]} "${names[i]}" "$since"
      run_line "${names[i]}" &
    done
    wait
  fi
  for i in "${!names[@]}"; do
    name=${names[i]}
    # shellcheck disable=SC2034  # the trap reads it
    kept=$i
    local exe=$build/sdpa_$name status words
    if [ -e "$build/log/$name.log.failed" ] || [ ! -x "$exe" ]; then
      failed=1 wrong=$((wrong + 1))
      say "$(line_number "$name"): sdpa_$name $(compiler_words "$name")"
      # For errors other than static assertions, also print the last lines of the compiler's output.
      [ -n "$(assertion_words <"$build/log/$name.log")" ] ||
        tail -5 "$build/log/$name.log" | cut -c1-200 | sed 's/^/    /' >&2
      [ -n "$header" ] && error_row "$name" "$(compiler_words "$name")" >>"$rows"
      continue
    fi
    if [ $cpu = 0 ]; then
      progress running $((i + 1)) ${#names[@]} "$name" "$since"
      run_line "$name"
    fi
    status=$(cat "$run/$name.status")
    [ -n "$status" ] || refuse_full_disk "$run/$name.status: No space left on device"
    if [ "${expects[i]}" = FAIL ] && [ "$status" -le 1 ]; then
      local by='the check'
      if [ "$status" -eq 0 ] && racecheck_reports "$exe"; then status=1 by='racecheck (the check passed by luck)'; fi
      if [ "$status" -eq 1 ]; then
        status=0
        awk -v header="$header" -v note="\"expected failure, reported by $by\"" '
          BEGIN { n = split(header, c, ","); for (j = 1; j <= n; j++) at[c[j]] = j }
          {
            text = ""
            for (j = 1; j <= n; j++) {  # quoted cells may contain commas
              match($0, /^("[^"]*")+|^[^,]*/)
              cell = substr($0, 1, RLENGTH)
              $0 = substr($0, RLENGTH + 2)
              if (j == at["check"]) fails = cell == "FAIL"
              if (j == at["note"] && (fails || note ~ /racecheck/)) cell = note
              text = text (j > 1 ? "," : "") cell
            }
            print text
          }' "$run/$name.csv" >>"$rows"
      else
        status=1
        say "sdpa_$name passed, but must fail its check"
        cat "$run/$name.csv" >>"$rows"
      fi
    else
      words=$(grep -v "^sdpa_$name: skipped " "$run/$name.err") && { end_line; say "$words"; }
      cat "$run/$name.csv" >>"$rows"
    fi
    case $status in
      0) ;;
      77) skipped=$((skipped + 1)) ;;
      2) refuse "the executables refuse these options" ;;
      *) failed=1 wrong=$((wrong + 1)) ;;
    esac
  done
  end_line
  trap - INT TERM

  [ -n "$header" ] || refuse "no line of configs.txt could be built"
  csv=$(keep_rows "$rows")
  if ! $print "$csv"; then
    say "stdout cannot be written to; the rows are in $(from_caller "$csv")"
    exit 3
  fi
  if [ $cpu = 1 ]; then
    words=
    [ $skipped = 0 ] || words=", $skipped skipped"
    say "$(lines $((${#names[@]} - skipped))) checked on the CPU backend, $wrong failed$words; no times"
    [ $bad = 0 ] || say "$(lines $bad) more could not be read"
  fi
  say "rows: $(from_caller "$csv")"
  [ $skipped -lt ${#names[@]} ] || { say "nothing was checked, since every line was skipped"; exit 77; }
  exit $failed
}

# build_tests: builds all targets, with progress. The output goes to build.log.
build_tests() {
  local line last=$SECONDS
  trap 'stopped "in the tests of $what"' INT TERM
  cmake --build "$build" -j "$jobs" 2>&1 | tee "$build/build.log" 2>/dev/null | while IFS= read -r line; do
    # Ninja prints file counts, make prints percentages. Without a terminal, print one line per 15 s.
    if [[ $line =~ ^\[\ *([0-9]+(/[0-9]+|%))\] ]] && { is_terminal || [ $((SECONDS - last)) -ge 15 ]; }; then
      last=$SECONDS
      tty_line "building ${BASH_REMATCH[1]}: $what"
    fi
    case $line in *' space left on '*|*' quota '*) refuse_full_disk "$line" ;; esac
  done
  local status=("${PIPESTATUS[@]}")
  trap - INT TERM
  [ "${status[2]}" != 3 ] || exit 3
  end_line
  [ "${status[0]}" = 0 ] && return
  refuse_full_disk ''
  grep -m1 -A20 -E 'error|FAILED' "$build/build.log" >&2 || tail -20 "$build/build.log" >&2
  say "the build failed; its output is in $build/build.log"
  return 1
}

# run_ctest: runs ctest. Prints the output of failed tests immediately; on a terminal, passed tests overwrite each other.
run_ctest() {
  local line
  ctest --test-dir "$build" --output-on-failure -j "$jobs" ${options[@]+"${options[@]}"} 2>&1 | while IFS= read -r line; do
    case $line in
      *Start*[0-9]:\ * | *'Internal ctest'* | 'Test project '*) ;;
      *Test*\ Passed\ *) if is_terminal; then tty_line "$line"; else echo "$line"; fi ;;
      *) end_line; echo "$line" ;;
    esac
  done
  return "${PIPESTATUS[0]}"
}

# test_in DIRECTORY WHAT CMAKE_OPTION...: builds and runs one set of tests, filtered by ctest's $options.
test_in() {
  local what=$2
  build=$1
  stage=$((stage + 1))
  say "---- tests, $stage of $stages: $what ($((SECONDS / 60)) min $((SECONDS % 60)) s)"
  configure_tests "${@:3}"
  if [ $listed = 1 ]; then
    ctest --test-dir "$build" ${options[@]+"${options[@]}"} | grep -E '^( *Test |Total)'  # hide warnings about tests that are not built
    return
  fi
  # Build nothing if the options select no test of this set.
  has_tests || return 0
  build_tests || return
  # Build the next set while these tests run. Its own stage builds again and reports errors.
  [ $stage = $stages ] || start_build "$base" 1
  local outcome=0
  run_ctest || outcome=$?
  end_build
  return $outcome
}
# Tests can be listed without doctest. Tells CMake where the compiler finds doctest.
configure_tests() {
  configure -DSDPA_TESTS="$which" -DSDPA_KEEP_GOING=OFF -DSDPA_ONLY= -DDOCTEST="$(doctest_folder || echo missing)" "$@"
}
has_tests() { ! ctest --test-dir "$build" -N ${options[@]+"${options[@]}"} | grep -q '^Total Tests: 0$'; }

# any_tests: succeeds if ctest's options select a test of any set.
any_tests() {
  local build=$base-cpu
  configure_tests -DSDPA_CPU=ON
  has_tests && return
  has_nvcc || return
  build=$base
  configure_tests
  has_tests
}

# judge_ctest WORD...: refuses unknown options, which ctest would ignore.
judge_ctest() {
  local word before='' known
  known=$(ctest --help | grep -oE -- '[ ,]--?[A-Za-z][-A-Za-z0-9]*' | tr -d ' ,')
  while [[ ${1-} =~ ^--(all|no-pytorch)$ ]]; do shift; done
  for word in "$@"; do
    case $word in
      -j[0-9]*) ;;
      -*) # shellcheck disable=SC2086  # options have no blanks
          grep -qxF -e "${word%%=*}" <<<"$known" ||
            refuse "test $word: neither --all or --no-pytorch, which come first, nor an option of ctest$(
              nearest "$word" --all --no-pytorch $known)" ;;
      *) [[ $before = -* ]] || refuse "test $word: want an option of ctest before it, as in -R $word" ;;
    esac
    before=$word
  done
}

# Prints the include folder in which the compiler finds doctest/doctest.h.
doctest_folder() {
  # shellcheck disable=SC2086  # several flags
  echo '#include <doctest/doctest.h>' | "${CXX:-c++}" ${CXXFLAGS-} -x c++ -M - 2>/dev/null |
    sed -n 's|^ *\(.*: \)\{0,1\}\(.*[^ ]\)/doctest/doctest\.h.*|\2|p' | grep -m1 .
}

# build_set DIRECTORY JOBS CMAKE_OPTION...: builds one set of tests.
build_set() {
  local build=$1
  configure_tests "${@:3}"
  ! has_tests || cmake --build "$build" -j "$2" 9>&-  # the lock ends with this function
}
# start_build: build_set in the background. end_build waits until it ends; stop_build ends it.
start_build() {
  set -m  # its own process group
  build_set "$@" >/dev/null 2>&1 &
  building=$!
  set +m
  trap 'stop_build; exit 130' INT TERM
}
end_build() {
  [ -n "$building" ] || return 0
  wait "$building" 2>/dev/null
  building=''
  trap - INT TERM
}
stop_build() {
  while [ -n "$building" ] && kill -TERM -- -"$building" 2>/dev/null; do sleep 0.1; done
  end_build
}

# prepare_tests: installs missing dependencies of the tests if possible, and prints which tests are left out.
prepare_tests() {
  local tool missing=()
  for tool in git shellcheck chromium; do
    command -v "$tool" >/dev/null || missing+=("$tool")
  done
  [ ${#missing[@]} = 0 ] || apt_install "${missing[@]}" || say "---- tests: without ${missing[*]}"
  doctest_folder >/dev/null || { apt_install doctest-dev && doctest_folder >/dev/null; } ||
    refuse "doctest is missing; install it with: sudo apt-get install doctest-dev"
  # ONNX from PyPI, since Debian's version lacks the operator Attention.
  local packages=("${engine_packages[@]}" 'allpairspy==2.*' matplotlib 'onnx==1.23.*' 'optuna==4.*' pytest "${layout_packages[@]}")
  if ! python_with "${packages[@]}" || { [ $wants_pytorch = 1 ] && ! has_pytorch; }; then
    start_build "$base-cpu" "$jobs" -DSDPA_CPU=ON
  fi
  if find_python "${packages[@]}"; then
    export PYTHON=$python
    if ! has_pytorch && ! { [ $wants_pytorch = 1 ] && install_pytorch; }; then
      mapfile -t missing < <(grep -lE 'importorskip\("torch"|def need_torch' tests/test_*.py)
      say "---- tests: PyTorch 2.11 is missing, so all or some cases of these files are left out: ${missing[*]#tests/}"
    elif [ $which = ALL ] && ! install_newest_pytorch; then
      say "---- tests: bindings/pytorch.py is not tested with the newest PyTorch, which could not be installed"
    fi
  else
    say "---- tests: those in Python are left out; they need packages of PyPI, which pip could not install"
  fi
  stop_build
}

test_minutes=7
run_tests() {
  local base=$build failed=0 which=ON wants_pytorch=1 stage=0 stages=1 listed=0 building=''
  case ${1-} in
    -h|--help)
      show "usage: ./run_all.sh test [--all] [--no-pytorch] [CTEST OPTION...]
  builds and runs the tests: on the CPU backend, under the sanitizers and, if there is nvcc, with CUDA
  installs missing dependencies (on a terminal, after asking): compilers, CMake, Python and packages;
  with nvcc also PyTorch, $pytorch_size. Takes about $test_minutes minutes on two cores
  --all         all tests, for changes of kernels. Without it: one line of each kind, a sample of the
                injected bugs and of crossed knobs, and no long tests
  --no-pytorch  do not install PyTorch; tests that need it are left out if it is missing
  CTEST OPTION  such as -R unit (one test) or -N (list the tests)"
      return 0
      ;;
  esac
  need_tools
  judge_ctest "$@"
  while :; do
    case ${1-} in
      --all) which=ALL ;;
      --no-pytorch) wants_pytorch=0 ;;
      *) break ;;
    esac
    shift
  done
  if [ $which = ON ]; then
    export SDPA_TEST_QUICK=1
    [ -n "${SDPA_ARCHS-}" ] || has_gpu || export SDPA_ARCHS='80-real;90a-real'  # nothing runs there, and sm_89 has sm_80's kernels
  fi
  local options=("$@")
  case " $* " in *' -N '* | *' --show-only'*) listed=1 ;; esac
  if [ $listed = 0 ]; then
    [ $# = 0 ] || any_tests || refuse "test ${options[*]}: these options select no test; ./run_all.sh test -N lists them"
    prepare_tests
    if [ $# = 0 ] && [ $which = ON ]; then say "---- tests: two cores take about $test_minutes minutes"; fi
  fi
  has_nvcc && stages=2
  test_in "$base-cpu" "the CPU backend" -DSDPA_CPU=ON || failed=1
  if has_nvcc; then
    test_in "$base" "CUDA" || failed=1
  else
    say "---- tests: CUDA: left out, nvcc is missing"
  fi
  [ $listed = 0 ] || return $failed
  local took="$((SECONDS / 60)) min $((SECONDS % 60)) s"
  if [ $failed = 0 ]; then say "---- all tests passed, $took"; else say "---- some tests failed, $took"; fi
  return $failed
}

# name_files WORD...: sets $words to the arguments, with the names of files resolved from the caller's folder.
name_files() {
  local word before=''
  words=()
  for word in "$@"; do
    if [[ $word != /* && ( $before = --output || $word =~ \.(csv|jsonl?|html)$ && -e $caller/$word ) ]]; then
      word=$caller/$word
    fi
    words+=("$word")
    before=$word
  done
}

# help_of FILE: prints a tool's docstring, which is its usage, without running Python.
help_of() {
  show "$(sed -n -e '1,/^"""$/{ /^#!/d; s/^"""//; p; }' "$1" | awk -v RS= -v own="./run_all.sh $2" '!/^usage:/ || index($0, own)')"
  exit 0
}

case ${1-} in
  ab|extract|fit|gates|micro|report|sanitize|stress|sweep|tune) tool=tools/$1.py ;;
  ablate|rungs) tool=tools/steps.py ;;
  profile) tool=tools/ncu.py ;;
  results) tool=tools/page.py ;;
  *) tool= ;;
esac
for word in "$@"; do
  [ "$word" != -- ] || break
  [ -z "$tool" ] || [[ ! $word =~ ^(-h|--help)$ ]] || help_of "$tool" "$1"
done
case ${1-} in
  ab|ablate|fit|gates|micro|profile|rungs|sanitize|stress|sweep|tune)
    [ "$1" != tune ] || engine_packages+=(matplotlib 'optuna==4.*')
    need_python "${engine_packages[@]}"
    name_files "${@:2}"
    exec "$python" tools "$1" ${words[@]+"${words[@]}"}
    ;;
  extract)
    judge pyelftools "${layout_packages[@]}"
    need cmake cmake
    command -v "${CXX:-g++}" >/dev/null || need g++ g++
    find_python pyelftools "${layout_packages[@]}" || need_python pyelftools "${extract_packages[@]}"
    exec "$python" tools extract "${@:2}"
    ;;
  list) list_lines "${@:2}" ;;
  test) shift; run_tests "$@" ;;
  results)
    page_packages=(matplotlib pyelftools "${extract_packages[@]}")
    [ "${2-}" != --diffs ] || page_packages+=("${layout_packages[@]}")  # they are those of extracts
    need_python "${page_packages[@]}"
    name_files "${@:2}"
    exec "$python" tools results ${words[@]+"${words[@]}"}
    ;;
  report) need_python matplotlib pyelftools; name_files "${@:2}"; exec "$python" tools report ${words[@]+"${words[@]}"} ;;
  *) main_job "$@" ;;
esac
