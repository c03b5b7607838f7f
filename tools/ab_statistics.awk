# The verdict of an A/B comparison, for each problem.
#
# in   pair side row graph_us clock_mhz          one line a sample; side is A or B, row counts problems
# out  row pairs thrown A_us A_low A_high B_us B_low B_high ratio low high A_mhz B_mhz verdict enough
#
# Medians with 95% intervals from order statistics. ratio is B/A: the Hodges-Lehmann estimate of the
# paired differences of logarithms, with the 95% interval that Wilcoxon's signed-rank test gives
# (Hollander and Wolfe, Nonparametric Statistical Methods, 3.2 and 3.3): no assumption of normal noise,
# and a hiccup in one process moves neither.
# verdict: SAME inside 0.5%, else FASTER or SLOWER if the interval leaves out 1, else UNCLEAR.
# enough: 1 when more pairs would not say more: the interval is 0.2% wide to each side, or a tenth of the
# difference found.
# A sample whose clock is 5% under the median clock of its side was throttled: its pair is thrown out.

function sort(x, n,   i, j, gap, t) {  # Shell's, ascending
  for (gap = int(n / 2); gap > 0; gap = int(gap / 2)) {
    for (i = gap + 1; i <= n; i++) {
      t = x[i]
      for (j = i; j > gap && x[j - gap] > t; j -= gap) x[j] = x[j - gap]
      x[j] = t
    }
  }
}
function middle(x, n) { return n % 2 ? x[(n + 1) / 2] : (x[n / 2] + x[n / 2 + 1]) / 2 }  # of sorted x
function positive(x) { return x > 0 ? x : 0 }

{
  pair[$3] = pair[$3] > $1 ? pair[$3] : $1
  if ($3 > rows) rows = $3
  us[$3, $1, $2] = $4
  mhz[$3, $1, $2] = $5
}

function side_clock(row, side,   n, i, x) {
  n = 0
  for (i = 1; i <= pair[row]; i++) if ((row, i, side) in us) x[++n] = mhz[row, i, side] + 0
  if (!n) return 0
  sort(x, n)
  return middle(x, n)
}

# Sets med, low and high of one side's times.
function summary(row, side,   n, i, x, skip) {
  n = 0
  for (i = 1; i <= pairs; i++) x[++n] = us[row, kept[i], side] + 0
  sort(x, n)
  skip = int(positive(n - 1.96 * sqrt(n)) / 2)
  med = middle(x, n)
  low = x[1 + skip]
  high = x[n - skip]
}

END {
  for (row = 1; row <= rows; row++) {
    clock["A"] = side_clock(row, "A")
    clock["B"] = side_clock(row, "B")
    pairs = thrown = 0
    for (i = 1; i <= pair[row]; i++) {
      if (!((row, i, "A") in us) || !((row, i, "B") in us)) continue
      if (mhz[row, i, "A"] < 0.95 * clock["A"] || mhz[row, i, "B"] < 0.95 * clock["B"]) thrown++
      else kept[++pairs] = i
    }
    if (!pairs) {
      print row, 0, thrown, 0, 0, 0, 0, 0, 0, 0, 0, 0, clock["A"], clock["B"], "UNCLEAR", 0
      continue
    }
    summary(row, "A")
    a = med; a_low = low; a_high = high
    summary(row, "B")
    n = 0
    for (i = 1; i <= pairs; i++) {
      d[i] = log(us[row, kept[i], "B"] / us[row, kept[i], "A"])
      for (j = 1; j <= i; j++) walsh[++n] = (d[i] + d[j]) / 2
    }
    sort(walsh, n)
    skip = int(positive(pairs * (pairs + 1) / 4 - 0.5 - \
                        1.96 * sqrt(pairs * (pairs + 1) * (2 * pairs + 1) / 24)))  # 0.5: continuity
    ratio = exp(middle(walsh, n))
    from = exp(walsh[1 + skip])
    to = exp(walsh[n - skip])
    # Under 6 pairs no interval of these reaches 95%.
    if (pairs < 6) verdict = "UNCLEAR"
    else if (from >= 0.995 && to <= 1.005) verdict = "SAME"
    else if (from > 1) verdict = "SLOWER"
    else if (to < 1) verdict = "FASTER"
    else verdict = "UNCLEAR"
    half = (to - from) / 2
    away = ratio > 1 ? ratio - 1 : 1 - ratio
    enough = pairs >= 6 && (half <= 0.002 || half <= away / 10)
    printf "%d %d %d %.4f %.4f %.4f %.4f %.4f %.4f %.5f %.5f %.5f %.0f %.0f %s %d\n", row, pairs, thrown, a, \
           a_low, a_high, med, low, high, ratio, from, to, clock["A"], clock["B"], verdict, enough
  }
}
