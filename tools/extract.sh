# shellcheck shell=bash
# ./run_all.sh extract: the kernel of one line of configs.txt without knobs. run_all.sh sources this file;
# say, refuse and need are its functions, build its folder.

extract_usage() {
  cat <<'EOT'
usage: ./run_all.sh extract NAME [--arch LIST] [--verify | --no-verify] > my_kernel.cu
  NAME         a line of configs.txt
  --arch LIST  what to compare machine code for, such as 80,89,90a (default: 90a, or the line's arch=)
  --verify     fail if there is no nvcc to compare with
  --no-verify  do not compare
The file compiles alone (nvcc -std=c++17) and gives the same machine code as the line. Needs Python 3 and
g++; the comparison needs nvcc.
environment: SDPA_CONFIGS, CXX
EOT
}

extract_command() {
  local name='' archs='' verify=auto nvcc=''
  while [ $# -gt 0 ]; do
    case $1 in
      --arch)
        [ $# -gt 1 ] || refuse "--arch: its value is missing; it takes a list such as 80,89,90a"
        [[ $2 =~ ^[0-9]+[af]?(,[0-9]+[af]?)*$ ]] || refuse "--arch $2: want a list of CUDA architectures such as 80,89,90a"
        archs=$2
        shift
        ;;
      --verify) verify=yes ;;
      --no-verify) verify=no ;;
      -h|--help) extract_usage; exit 0 ;;
      -*) extract_usage >&2; refuse "extract $1: no such option" ;;
      *)
        [ -z "$name" ] || refuse "extract takes one line, and $name and $1 are two"
        name=$1
        ;;
    esac
    shift
  done
  [ -n "$name" ] || { extract_usage >&2; refuse "extract: the name of the line is missing"; }
  need python3 python3
  python3 -c 'import sys; sys.exit(sys.version_info < (3, 8))' || refuse "extract needs Python 3.8 or newer"
  if [ -n "${CXX-}" ]; then
    command -v "$CXX" >/dev/null || refuse "$CXX is missing; CXX names it"
  else
    need g++ g++
  fi
  if [ $verify != no ]; then
    nvcc=$(command -v nvcc || command -v "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc")
    if [ -z "$nvcc" ]; then
      [ $verify = auto ] || refuse "nvcc is missing, so the machine code cannot be compared; drop --verify or install the CUDA Toolkit"
      say "nvcc is missing: the machine code of the extract was not compared with that of the line"
    fi
  fi
  python3 tools/extract.py "$name" --configs "${SDPA_CONFIGS:-configs.txt}" --cxx "${CXX:-g++}" \
    --nvcc "$nvcc" --archs "$archs"
}
