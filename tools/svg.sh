#!/usr/bin/env bash
# Draws a CSV of results as an SVG picture on stdout, with awk alone.
# usage: tools/svg.sh ladder CSV [PEERS_CSV]   all lines, mission and long side by side
#        tools/svg.sh ablation CSV             the first config, and what each removal from it costs
set -eu
export LC_ALL=C  # numbers have points, and text is bytes, in every awk

refuse() { printf 'svg.sh: %s\n' "$*" >&2; exit 2; }
here=$(dirname "$0")
what=${1-}
[ $# -gt 0 ] && shift
case $what:$# in
  ladder:1|ladder:2|ablation:1) ;;
  *) refuse "usage: tools/svg.sh ladder CSV [PEERS_CSV], or tools/svg.sh ablation CSV" ;;
esac
for csv in "$@"; do
  if [ ! -f "$csv" ] || [ ! -r "$csv" ] || [ ! -s "$csv" ]; then refuse "$csv: no such file, or nothing in it"; fi
done

# shellcheck disable=SC2016  # the dollars are awk's
drawing='
function xml(s) { gsub(/&/, "\\&amp;", s); gsub(/</, "\\&lt;", s); gsub(/>/, "\\&gt;", s); return s }
function text(x, y, class, s) { printf "<text x=\"%.1f\" y=\"%.1f\" class=\"%s\">%s</text>\n", x, y, class, xml(s) }
function line(x1, y1, x2, y2, class) {
  printf "<path d=\"M%.1f %.1fL%.1f %.1f\" class=\"%s\"/>\n", x1, y1, x2, y2, class
}
function rect(x, y, w, h, class) {
  printf "<rect x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%.1f\" class=\"%s\"/>\n", x, y, w, h, class
}
# A value that stays legible where a line crosses it.
function label(x, y, class, s) {
  rect(x - 2, y - 10, 6.8 * length(s) + 4, 13, "halo")
  text(x, y, class, s)
}
# The page has its own background, so that light and dark themes show the same picture.
function page(height, title) {
  printf "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"1000\" height=\"%d\" viewBox=\"0 0 1000 %d\" role=\"img\">\n", \
    height, height
  print "<title>" xml(title) "</title>"
  print "<style>text{font:12px system-ui,-apple-system,\"Segoe UI\",\"DejaVu Sans\",Arial,sans-serif;fill:#24292f}"
  print ".h1{font-size:18px;font-weight:bold}.h2{font-size:14px;font-weight:bold}.b{font-weight:bold}"
  print ".end{text-anchor:end}.mid{text-anchor:middle}.dim{fill:#57606a}path{fill:none}"
  print ".page{fill:#fff;stroke:#d0d7de}.halo{fill:#fff;fill-opacity:.85}"
  print ".grid{stroke:#d8dee4}.minor{stroke:#eef1f4}.axis{stroke:#8c959f}.ci{stroke:#24292f}"
  print ".scalar{fill:#8c959f}.wmma{fill:#e69f00}.mma{fill:#2f7fc1}.wgmma{fill:#009e73}.cublas{fill:#b266a3}"
  print ".peer{stroke:#b3261e;stroke-width:1.5}.p2{stroke-dasharray:6 3}.p3{stroke-dasharray:2 3}"
  print ".p4{stroke-dasharray:8 3 2 3}text.peer{stroke:none;fill:#b3261e}"
  print ".full{fill:#57606a}.slower{fill:#cf222e}.faster{fill:#1a7f37}.step{stroke:#57606a;stroke-dasharray:2 2}</style>"
  rect(.5, .5, 999, height - 1, "page")
  text(20, 32, "h1", title)
}
function ci(y, from, to) {  # the 95% interval of a time, over its bar
  line(from, y, to, y, "ci"); line(from, y - 3, from, y + 3, "ci"); line(to, y - 3, to, y + 3, "ci")
}
'

# shellcheck disable=SC2016
ladder='
file == 2 {
  if (is_peer() && problem() == base[cell("shape")]) {
    s = cell("shape"); peers[s]++
    peer_us[s, peers[s]] = cell("graph_us") + 0; peer_label[s, peers[s]] = peer_name(cell("config"))
    peer_note = cell("note")
  }
  next
}
{
  c = cell("config"); s = cell("shape")
  if (!(c in family)) {
    order[++lines] = c; family[c] = cell("family")
    if (lines == 1) { D = cell("D"); dtype = cell("dtype") }
  }
  if (cell("note") != "") why[c] = cell("status") ": " cell("note")
  if (cell("check") == "FAIL") why[c] = "FAIL"
  if (cell("D") != "") {
    tag[c] = (cell("D") == D ? "" : " D=" cell("D")) (cell("dtype") == dtype ? "" : " " cell("dtype"))
  }
  if ((s != "mission" && s != "long") || cell("graph_us") + 0 <= 0) next
  if (!(s in base)) { panel[++panels] = s; base[s] = problem() }
  us[s, c] = cell("graph_us") + 0
  lo[s, c] = cell("graph_lo_us"); hi[s, c] = cell("graph_hi_us")
}
# busybox awk often comes without log() and ^. x = 2^n * m with m in [1, 2), then the series of atanh.
function ln(x, n, y, term, k, sum) {
  for (n = 0; x >= 2; x /= 2) n++
  for (; x < 1; x *= 2) n--
  y = (x - 1) / (x + 1); term = y
  for (k = 1; k < 40; k += 2) { sum += term / k; term *= y * y }
  return n * 0.69314718055994531 + 2 * sum
}
function at_x(s, t) { return left[s] + plot * ln(t / axis_lo[s]) / ln(axis_hi[s] / axis_lo[s]) }
function sort_peers(s, i, j, t, l) {
  for (i = 2; i <= peers[s]; i++) {
    t = peer_us[s, i]; l = peer_label[s, i]
    for (j = i - 1; j >= 1 && peer_us[s, j] > t; j--) {
      peer_us[s, j + 1] = peer_us[s, j]; peer_label[s, j + 1] = peer_label[s, j]
    }
    peer_us[s, j + 1] = t; peer_label[s, j + 1] = l
  }
}
# Ticks at 1 to 9 times each power of ten; 1, 2 and 5 have labels.
function axis(s, top, bottom, decade, m, t, x, n) {
  for (decade = .01; decade < 1e8; decade *= 10) for (m = 1; m <= 9; m++) {
    t = m * decade
    if (t < axis_lo[s] || t > axis_hi[s]) continue
    x = at_x(s, t); n = m == 1 || m == 2 || m == 5
    line(x, top, x, bottom, n ? "grid" : "minor")
    if (m == 1) line(x, top, x, bottom, "axis")
    line(x, top - (n ? 5 : 3), x, top, "axis"); line(x, bottom, x, bottom + (n ? 5 : 3), "axis")
    if (n) { text(x, top - 8, "mid dim", t); text(x, bottom + 18, "mid dim", t) }
  }
  line(left[s], top, left[s], bottom, "axis")
}
function draw_line(c, y, i, s, x, b) {
  text(names - 6, y + 12, "end", c tag[c])
  for (i = 1; i <= panels; i++) {
    s = panel[i]
    if (!((s, c) in us)) continue
    x = at_x(s, us[s, c])
    rect(left[s], y + 2.5, x - left[s], 11, "bar " family[c])
  }
}
function draw_values(c, y, i, s, x, t) {  # over the lines of the peers
  if (!((panel[1], c) in us) && c in why) label(left[panel[1]] + 6, y + 12, "dim", substr(why[c], 1, 110))
  for (i = 1; i <= panels; i++) {
    s = panel[i]
    if (!((s, c) in us)) continue
    t = us[s, c]; x = at_x(s, t)
    if (lo[s, c] != "" && hi[s, c] != "") {
      ci(y + 8, at_x(s, lo[s, c]), at_x(s, hi[s, c])); x = at_x(s, hi[s, c] + 0 > t ? hi[s, c] : t)
    }
    label(x + 5, y + 12, t == best[s] && tag[c] == "" ? "b" : "", short_us(t))
  }
}
END {
  if (failed) exit failed
  if (!panels) refuse(ARGV[1] " has no row with a time for mission or long")
  # The lines of the first line'"'"'s head size and type, then the others; a gap where the family changes.
  y = 0
  for (group = 0; group <= 1; group++) for (i = 1; i <= lines; i++) {
    c = order[i]
    if ((tag[c] != "") != group || c in control || !((("mission", c) in us) || (("long", c) in us) || c in why)) continue
    if (rows && group > in_group) { y += 34; others = y }
    else if (rows && family[c] != last) y += 7
    row[++rows] = c; row_y[rows] = y
    y += 16; last = family[c]; in_group = group
    if (!group) peers_to = y + 4
    if (length(c tag[c]) > longest) longest = length(c tag[c])
    for (j = 1; j <= panels; j++) {
      s = panel[j]
      if (!((s, c) in us)) continue
      t = us[s, c]
      if (!(s in least) || t < least[s]) least[s] = t
      if (t > most[s]) most[s] = t
      if (!group && (!(s in best) || t < best[s])) best[s] = t
    }
    if (!(family[c] in known)) { known[family[c]] = 1; legend[++legends] = family[c] }
  }
  names = 20 + 7.1 * longest + 8
  plot = (1000 - 20 - names - 26 * (panels - 1)) / panels - 40
  for (i = 1; i <= panels; i++) {
    s = panel[i]
    left[s] = names + (i - 1) * (plot + 40 + 26)
    sort_peers(s)
    if (peers[s] > peer_rows) peer_rows = peers[s]
    axis_lo[s] = least[s]; axis_hi[s] = most[s]
    if (peers[s] && peer_us[s, 1] < axis_lo[s]) axis_lo[s] = peer_us[s, 1]
    if (peers[s] && peer_us[s, peers[s]] > axis_hi[s]) axis_hi[s] = peer_us[s, peers[s]]
    axis_lo[s] /= 1.5; axis_hi[s] *= 1.02
  }
  top = 130
  bars = top + 8 + 16 * peer_rows
  bottom = bars + y + 4
  page(bottom + 36, "Attention, forward: time of each line of configs.txt")
  text(20, 53, "dim", provenance(1) ". graph_us: launches of a replayed CUDA graph")
  x = 20
  for (i = 1; i <= legends; i++) {
    rect(x, 66, 12, 12, legend[i]); text(x + 17, 76, "", legend[i]); x += 75
  }
  if (peer_rows) { line(x, 72, x + 22, 72, "peer"); text(x + 28, 76, "", "peers: " peer_note ", " date[2]) }
  for (i = 1; i <= panels; i++) {
    s = panel[i]
    text(left[s], 103, "h2", s)
    text(left[s] + 9.5 * length(s) + 6, 103, "dim", base[s] ", µs, log axis")
    axis(s, top, bottom)
  }
  if (others) {
    rect(20, bars + others - 27, 960, 24, "halo")
    text(names, bars + others - 10, "b", "Other head sizes and types (not the problems of the vertical lines)")
  }
  for (i = 1; i <= rows; i++) draw_line(row[i], bars + row_y[i])
  for (i = 1; i <= panels; i++) {
    s = panel[i]
    for (j = 1; j <= peers[s]; j++) {
      x = at_x(s, peer_us[s, j])
      line(x, top + 5 + 16 * (j - 1), x, bars + peers_to, "peer p" j)
      words = peer_label[s, j] " " short_us(peer_us[s, j])
      width = 6.8 * length(words)
      if (x + width > left[s] + plot + 40) x -= width + 8
      label(x + 4, top + 16 * j, "peer", words)
    }
  }
  for (i = 1; i <= rows; i++) draw_values(row[i], bars + row_y[i])
  print "</svg>"
}'

# shellcheck disable=SC2016
ablation='
full == "" { full = cell("config") }
index(cell("config"), full) == 1 && cell("graph_us") + 0 > 0 && cell("check") == "PASS" {
  c = cell("config"); s = cell("shape")
  if (!(s in base)) {
    if (c != full) next  # without the full time there is nothing to compare with
    panel[++panels] = s; base[s] = cell("graph_us") + 0; what[s] = problem()
  }
  n = ++count[s]
  name[s, n] = c == full ? full : removed(c, full)
  t = us[s, n] = cell("graph_us") + 0
  lo[s, n] = cell("graph_lo_us"); hi[s, n] = cell("graph_hi_us")
  if (t > most[s]) most[s] = t
  if (hi[s, n] + 0 > most[s]) most[s] = hi[s, n] + 0
  if (length(name[s, n]) > longest) longest = length(name[s, n])
}
function nice_step(most, e) {
  for (e = .1; ; e *= 10) {
    if (most / e <= 8) return e
    if (most / e / 2 <= 8) return 2 * e
    if (most / e / 5 <= 8) return 5 * e
  }
}
function at_x(s, t) { return names + plot * t / most[s] }
END {
  if (failed) exit failed
  if (!panels) refuse(ARGV[1] " has no row with a time for its first config, " (full == "" ? "which is missing" : full))
  names = 20 + 7.9 * longest + 8  # these are capitals
  if (names > 540) names = 540
  plot = 980 - names - 130
  y = 84
  for (p = 1; p <= panels; p++) { s = panel[p]; panel_y[s] = y; y += 42 + 21 * count[s] + 34 }
  page(y, "What each optimisation of " full " is worth")
  text(20, 53, "dim", provenance(1) ". graph_us: launches of a replayed CUDA graph")
  text(20, 71, "dim", "Each bar: from the time of " full " to its time with that change. Red: slower. Green: faster.")
  for (p = 1; p <= panels; p++) {
    s = panel[p]; y = panel_y[s] + 42; n = count[s]
    for (i = 1; i <= n; i++) rank[i] = i
    for (i = 3; i <= n; i++) {  # the full line stays on top
      r = rank[i]
      for (j = i - 1; j >= 2 && us[s, rank[j]] < us[s, r]; j--) rank[j + 1] = rank[j]
      rank[j + 1] = r
    }
    text(names, panel_y[s] + 16, "h2", s)
    text(names + 9.5 * length(s) + 6, panel_y[s] + 16, "dim", what[s] == "" ? "" : "B,Hq,Hkv,Sq,Sk,D = " what[s] "; µs")
    step = nice_step(most[s])
    for (t = 0; t <= most[s] * 1.0001; t += step) {
      line(at_x(s, t), y - 4, at_x(s, t), y + 21 * n, t ? "grid" : "axis")
      text(at_x(s, t), y - 8, "mid dim", t)
    }
    zero = at_x(s, base[s])
    for (i = 1; i <= n; i++) {
      r = rank[i]; t = us[s, r]; x = at_x(s, t); row_y = y + 21 * (i - 1)
      text(names - 6, row_y + 15, r == 1 ? "end b" : "end", name[s, r])
      if (r == 1) rect(names, row_y + 3, x - names, 15, "bar full")
      else if (t >= base[s]) rect(zero, row_y + 3, x - zero > 1 ? x - zero : 1, 15, "bar slower")
      else rect(x, row_y + 3, zero - x > 1 ? zero - x : 1, 15, "bar faster")
      end = x > zero ? x : zero
      if (lo[s, r] != "" && hi[s, r] != "") {
        ci(row_y + 10.5, at_x(s, lo[s, r]), at_x(s, hi[s, r]))
        if (at_x(s, hi[s, r]) > end) end = at_x(s, hi[s, r])
      }
      if (r == 1) label(end + 6, row_y + 15, "b", short_us(t))
      else {
        cost = sprintf("%+.0f%%", 100 * (t / base[s] - 1))
        rect(end + 4, row_y + 4, 110, 14, "halo")
        printf "<text x=\"%.1f\" y=\"%.1f\" class=\"dim\"><tspan class=\"b %s\">%s</tspan> %s</text>\n", end + 6, \
          row_y + 15, t < base[s] ? "faster" : "slower", cost, short_us(t)
      }
    }
    line(zero, y + 21, zero, y + 21 * n, "step")
  }
  print "</svg>"
}'

program=$ladder
[ "$what" = ladder ] || program=$ablation
exec awk -F, -v tool=svg.sh "$(cat "$here/rows.awk")$drawing$program" "$@"
