#!/usr/bin/env bash
# Puts stdin into README.md between <!-- NAME:begin and <!-- NAME:end. usage: readme_section.sh NAME
set -eu
cd "$(dirname "$0")/.."
text=$(mktemp)
trap 'rm -f "$text" "$text.new"' EXIT
cat >"$text"
awk -v name="$1" -v text="$text" '
  index($0, "<!-- " name ":begin") { print; while ((getline row < text) > 0) print row; skip = 1 }
  index($0, "<!-- " name ":end") { skip = 0 }
  !skip { print }' README.md >"$text.new"
cat "$text.new" >README.md
