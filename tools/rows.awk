# What the tables and pictures share in reading the CSVs of results/ (awk -F,): a column by its name, what
# was measured where, and numbers for people. For gawk, mawk and busybox awk alike.

function cell(name) { return name in at ? $at[name] : "" }  # "" also in files older than the column

function refuse(sentence) {
  print tool ": " sentence | "cat 1>&2"
  failed = 2
  exit 2  # END still runs, and asks for failed
}

function problem() {
  return cell("B") "," cell("Hq") "," cell("Hkv") "," cell("Sq") "," cell("Sk") "," cell("D") " " \
    cell("dtype") (cell("causal") == "off" ? "" : " causal")
}

# A peer's row has a time and no check: it is not one of our executables.
function is_peer() { return cell("check") == "" && cell("graph_us") != "" }
function peer_name(config) {
  return config == "torch_flash" ? "FlashAttention-2" : config == "torch_cudnn" ? "cuDNN" : \
    config == "torch_efficient" ? "memory-efficient" : config == "torch_math" ? "PyTorch math" : config
}

# provenance(FILE NUMBER, QUOTE): GPU, driver, CUDA, commits of its rows and date, each commit between QUOTEs.
function provenance(f, quote, words, commits) {
  commits = commit[f]
  gsub(/ /, quote ", " quote, commits)
  words = gpu[f] ", driver " driver[f] ", CUDA " cuda[f] ", commit " quote commits quote
  return date[f] == "" ? words : words ", " date[f]
}

function short_us(t) { t += 0; return sprintf(t < 9.995 ? "%.2f" : t < 99.95 ? "%.1f" : "%.0f", t) }

# What an ablation took away: NAME__KNOB_VALUE__KNOB_VALUE as KNOB=VALUE KNOB=VALUE.
function removed(name, full, part, parts, i, words) {
  name = substr(name, length(full) + 1)
  if (name !~ /^__/) { sub(/^_/, "", name); return name }
  parts = split(substr(name, 3), part, "__")
  for (i = 1; i <= parts; i++) {
    match(part[i], /_[^_]*$/)
    words = words (i > 1 ? " " : "") substr(part[i], 1, RSTART - 1) "=" substr(part[i], RSTART + 1)
  }
  return words
}

FNR == 1 {
  file++
  split("", at)
  for (i = 1; i <= NF; i++) at[$i] = i
  if (!("config" in at && "shape" in at && "graph_us" in at))
    refuse(FILENAME " is no CSV of results: its first line does not name config, shape and graph_us")
  # The rows have no date; the names of results/ begin with it.
  base_name = FILENAME
  sub(/.*\//, "", base_name)
  if (match(base_name, /^[0-9][0-9][0-9][0-9]-[0-9][0-9]-[0-9][0-9]/)) date[file] = substr(base_name, 1, RLENGTH)
  next
}
cell("device") != "" { gpu[file] = cell("device"); driver[file] = cell("driver"); cuda[file] = cell("cuda") }
cell("git_sha") != "" && !((file, cell("git_sha")) in has_commit) {
  has_commit[file, cell("git_sha")] = 1
  commit[file] = commit[file] (commit[file] == "" ? "" : " ") cell("git_sha")
}
cell("clock_mhz") + 0 > mhz[file] { mhz[file] = cell("clock_mhz") + 0 }
cell("note") ~ /^expected failure/ { control[cell("config")] = 1 }
