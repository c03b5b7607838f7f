#!/usr/bin/env bash
# Puts the outcome of tests/bugs.sh, read from stdin, into README.md as a table.
set -eu
cd "$(dirname "$0")/.."
awk '$2 == "caught" || $2 == "MISSED" {
  net = $3; sub(/:.*/, "", net)
  names[net] = names[net] (names[net] == "" ? "" : ", ") $1
  if ($2 == "MISSED") missed = missed " " $1
}
END {
  print "| net | bugs that it catches |"
  print "|---|---|"
  n = split("check backend address thread", nets, " ")
  for (i = 1; i <= n; i++) print "| " nets[i] " | " names[nets[i]] " |"
  if (missed != "") print "\nMissed:" missed
}' | sed 's/_/ /g' | tools/readme_section.sh bugs
