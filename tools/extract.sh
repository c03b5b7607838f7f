# shellcheck shell=bash
# ./run_all.sh extract: one line's sections of sdpa.cu with its numbers. run_all.sh sources this file; say,
# refuse, need and assertion_words are its functions.

extract_usage() {
  cat <<'EOT'
usage: ./run_all.sh extract NAME [--namespace N] > my_kernel.cu
  NAME           a line of configs.txt
  --namespace N  the namespace of its functions (default: the line's name), so that two can go into one program
The file has the line's sections of sdpa.cu and its numbers as constants; it compiles alone, to the machine code of
the line. A section whose banner names families or knobs, as in `// ---- cp.async (USE_CP_ASYNC) ----`, stays behind
where the line has none of them.
environment: SDPA_CONFIGS, CXX
EOT
}

# line_words NAME: the words of a line without its gates; refuses a NAME that is not there.
line_words() {
  local file=${SDPA_CONFIGS:-configs.txt} lines
  need cmake cmake
  [ -r "$file" ] || refuse "$file: there is no such file; it lists one line a build"
  lines=$(cmake -DCONFIGS="$file" -P tools/configs.cmake) || exit 2
  awk -F'\t' -v name="$1" '
    $1 == name { print $5 ($4 == "" ? "" : " arch=" $4) ($3 == "FAIL" ? " expect=FAIL" : ""); found = 1; exit }
    END { exit !found }' <<<"$lines" ||
    refuse "$1: no line of $file has that name; it has: $(cut -f1 <<<"$lines" | paste -sd' ')"
}

# extract_sections NAMESPACE WORDS: reads sdpa.cu, prints the file.
extract_sections() {
  awk -v namespace="$1" -v words="$2" '
    BEGIN { n = split(words, word, " "); for (i = 1; i <= n; i++) { split(word[i], pair, "="); value[pair[1]] = pair[2] } }
    # Whether a condition holds: parts joined by " and ", each a list of families and knobs of which one has to be.
    function holds(condition,    part, any, i, j, parts, count, alternatives, ok, word) {
      parts = split(condition, part, " and ")
      for (i = 1; i <= parts; i++) {
        count = split(part[i], any, ", "); ok = 0
        for (j = 1; j <= count; j++) {
          split(any[j], word, " ")
          if (word[1] == family || (mixed && word[1] ~ /^(mma|USE_CP_ASYNC)$/)) ok = 1
          else if (value["USE_TUNED"] == 1 && word[1] ~ /^(SPLIT_KV|SWAP_AB|PACK_GQA)$/) ok = 1  # of some tile
          else if (word[2] == ">") ok = ok || value[word[1]] + 0 > word[3] + 0
          else if (word[2] == "=") ok = ok || value[word[1]] == word[3]
          else if (word[1] in value) ok = ok || value[word[1]] == 1
        }
        if (!ok) return 0
      }
      return 1
    }
    function put(line) { if (line != "" || last != "") print line; last = line }
    function put_knobs(    i, place) {
      put("// The numbers of the line. What they may be is said by sdpa.cu, which this comes from.")
      put("struct Typed {")
      for (i = 1; i <= rows; i++) {
        if (values[i] == "0 1") put("  static constexpr bool " member[i] " = " (value[knob[i]] == 1 ? "true" : "false") ";")
        else if (value[knob[i]] ~ /^[0-9]+$/) put("  static constexpr int " member[i] " = " value[knob[i]] ";")
        else {
          place = split(values[i], word, " ")
          while (word[place] != value[knob[i]]) place--
          put("  static constexpr int " member[i] " = " place - 1 ";  // " value[knob[i]] " of " values[i])
        }
      }
      put("};"); put("")
    }
    # What was typed besides narrows the tiles.
    function put_fits(    i, sizes) {
      put("// Whether this build may take the tile.")
      put("constexpr bool tile_fits(const TunedTile& t) {")
      put("  if (!is_of_table(t)) return false;")
      sizes = " HEAD_DIM BLOCK_M BLOCK_N NUM_WARPS STAGES SPLIT_KV "
      for (i = 1; i <= rows; i++) {
        if (sizes !~ (" " knob[i] " ") || (knob[i] != "HEAD_DIM" && words !~ (knob[i] "="))) continue
        put("  if (t." member[i] " != Build::" member[i] ") return false;")
      }
      put("  return true;"); put("}"); put("")
    }
    /^\/\/ ==== COPY FROM HERE/ { copying = keep = 1; next }
    /^\/\/ ==== COPY TO HERE/ { exit }
    !copying { next }
    /^  X\([A-Z_0-9]+, / {
      match($0, /"[^"]*"/); rows++
      values[rows] = substr($0, RSTART + 1, RLENGTH - 2)
      split($1 " " $2 " " $3, word, " "); gsub(/X\(|,/, "", word[1]); sub(",", "", word[2]); sub(",", "", word[3])
      knob[rows] = word[1]; member[rows] = word[3]
      if (!(knob[rows] in value)) value[knob[rows]] = word[2]
    }
    # A banner in the first column begins a section, which is kept or not.
    /^\/\/ (----|====) / {
      condition = ""
      if (match($0, /\([^()]*\) (----|====)/)) {
        condition = substr($0, RSTART + 1, RLENGTH - 7)
        if (condition !~ /^(typed|scalar|wmma|mma|wgmma|[A-Z_0-9]+)/) condition = ""
      }
      if (/what follows from the knobs/) {
        family = value["USE_MMA_SYNC"] == 1 ? "mma" : value["USE_WMMA"] == 1 ? "wmma" : \
                 value["USE_WGMMA"] == 1 ? "wgmma" : "scalar"
        mixed = value["USE_TUNED"] == 1 && value["DTYPE"] == "FP8_E4M3"  # tiles of wgmma and of mma.sync
        put_knobs()
      }
      if (/tiles that the typed knobs leave/ && value["USE_TUNED"] == 1) put_fits()
      keep = condition == "" || holds(condition)
      if (condition != "") sub(/ \([^()]*\) ----/, " ----")
    }
    # Of what depends on a macro, the part that is the line s.
    /^#ifdef SDPA_SIMT/ || /^#ifndef SDPA_NAMESPACE/ { dropping = 1 }
    /^#endif  \/\/ SDPA_/ || (dropping && /^#(else|endif)/) { dropping = 0; next }
    match($0, /^#if USE_[A-Z_]+/) { without = words !~ (substr($0, 5) "=1"); next }
    /^#endif  \/\/ USE_/ { without = 0; next }
    dropping || without || (!keep && !/^}  \/\/ namespace/) { next }
    { gsub(/SDPA_NAMESPACE/, namespace); put($0) }' sdpa.cu
}

extract_command() {
  local name='' namespace='' words='' word line arch=90a sentence
  while [ $# -gt 0 ]; do
    case $1 in
      --namespace)
        [ $# -gt 1 ] || refuse "extract: --namespace: its value is missing"
        [[ $2 =~ ^[A-Za-z_][A-Za-z0-9_]*$ ]] || refuse "extract: --namespace $2: want a name of C++"
        namespace=$2
        shift
        ;;
      -h|--help) extract_usage; exit 0 ;;
      -*) refuse "extract: $1: no such option" ;;
      *) [ -z "$name" ] || refuse "extract takes one line, and $name and $1 are two"; name=$1 ;;
    esac
    shift
  done
  [ -n "$name" ] || refuse "extract: which line?"
  line=$(line_words "$name") || exit 2
  local definitions=()
  for word in $line; do
    case $word in
      arch=*) arch=${word#*=} ;;
      expect=*) say "extract: $name is marked $word: it is there to be found wrong" ;;
      *) words+="${words:+ }$word"; definitions+=("-D$word") ;;
    esac
  done
  [ -n "${CXX-}" ] || need g++ g++
  sentence=$(sed -n '/^\/\/ ==== 1 KNOBS/,/^\/\/ ==== 2 PROBLEM/p' sdpa.cu |
    "${CXX:-g++}" -std=c++17 -fsyntax-only "${definitions[@]}" -x c++ - 2>&1 | assertion_words)
  [ -z "$sentence" ] || refuse "extract: $name: $sentence"
  echo "// sdpa, line $name: $words"
  echo "// Made by: ./run_all.sh extract $name${namespace:+ --namespace $namespace}"
  echo "// Compile: nvcc -O3 -std=c++17 -gencode arch=compute_$arch,code=sm_$arch -c my_kernel.cu"
  echo "// Call:    ${namespace:-$name}::sdpa_forward(params, stream)"
  echo
  extract_sections "${namespace:-$name}" "$words"
  sed 's,^,// ,; s, *$,,' LICENSE
}
