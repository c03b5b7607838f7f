# For tests that are shell scripts: a folder of their own, and what they say when something is not as it
# should be. They end in `exit $failed`.
# shellcheck shell=bash disable=SC2034  # failed is read by the tests
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
failed=0
fail() { echo "$*"; failed=1; }

# has FILE SENTENCE: the words stand there, however the lines are broken.
has() {
  tr -s ' \n' ' ' <"$1" | grep -qF -- "$2" || { fail "no such sentence: $2"; echo in:; head -30 "$1"; }
}

# expect STATUS SENTENCE COMMAND...: the command exits so and says so.
expect() {
  local want=$1 sentence=$2 status
  shift 2
  "$@" >"$dir/out" 2>&1 </dev/null
  status=$?
  [ $status = "$want" ] || fail "$*: exit $status, want $want"
  has "$dir/out" "$sentence"
}
