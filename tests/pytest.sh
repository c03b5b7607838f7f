#!/usr/bin/env bash
# Runs tests/FILE by the first Python that has pytest and what the tools need: a test_NAME.py by pytest, another as a program
# with its words. Exit code 77 (skipped) if there is none, or if every test was skipped (by pytest: 0, or 5 if the whole file
# was).  usage: tests/pytest.sh FILE [WORD...]
set -u
cd "$(dirname "$0")" || exit 1
if [ -n "${PYTHONDONTWRITEBYTECODE-}" ]; then  # with it, each process compiles the modules of PyTorch again, in 4 s
  unset PYTHONDONTWRITEBYTECODE
  export PYTHONPYCACHEPREFIX=${SDPA_BUILD_DIR:-$PWD/../build}/pycache
fi
find='import importlib.util, sys
sys.exit(not all(map(importlib.util.find_spec, "allpairspy elftools matplotlib ml_dtypes optuna pytest scipy".split())))'
for python in "${PYTHON:-python3}" /usr/bin/python3; do
  "$python" -c "$find" 2>/dev/null || continue
  PATH=$(dirname "$(command -v "$python")"):$PATH  # the tools' #! line finds the same one
  [[ $1 = test_* ]] || exec "$python" "$@"
  out=$("$python" -m pytest -q -rs -p no:cacheprovider "$@" 2>&1)
  status=$?
  printf '%s\n' "$out"
  if [[ $status = [05] ]] && ! grep -q ' passed' <<<"$out"; then exit 77; fi
  exit $status
done
echo "skipped: a package is missing; python3 -m pip install allpairspy matplotlib 'ml_dtypes==0.5.*' 'optuna==4.*' pyelftools pytest scipy"
exit 77
