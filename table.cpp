// Prints the table of ./run_all.sh, at most 100 columns wide: the fastest line of each problem;
// then, for each problem, all timed lines, fastest first, and the lines that were not timed.
//
// In C++, since the main job of run_all.sh (build, check, time, print the table) works without
// Python.
//
// usage: sdpa_table ROWS.csv   (rows as the executables print them; cells contain no newlines)
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <vector>

namespace {

using std::string;
using std::vector;

struct Row {
  string line, problem, verdict, said, peak, bound;
  double us = 0, tflops = 0;  // us: 0 if not timed

  bool is_timed() const { return us > 0; }
  // FAIL* is a negative control, which must fail.
  bool is_fine() const { return verdict == "PASS" || verdict == "FAIL*"; }
};

struct Problem {
  string name;
  vector<Row> rows;  // in the order of the file

  // The first timed line, to which speed-ups refer; null if none was timed.
  const Row* base() const {
    const auto at =
        std::find_if(rows.begin(), rows.end(), [](const Row& r) { return r.is_timed(); });
    return at == rows.end() ? nullptr : &*at;
  }
  vector<const Row*> by_time() const {
    vector<const Row*> timed;
    for (const Row& r : rows) {
      if (r.is_timed()) timed.push_back(&r);
    }
    std::stable_sort(timed.begin(), timed.end(),
                     [](const Row* a, const Row* b) { return a->us < b->us; });
    return timed;
  }
};

// Splits a CSV row. Quoted cells may contain commas, and "" for a quote.
vector<string> cells_of(const string& row) {
  vector<string> cells(1);
  bool is_quoted = false;
  for (size_t i = 0; i < row.size(); i++) {
    if (row[i] == '"' && is_quoted && row[i + 1] == '"')
      cells.back() += row[++i];
    else if (row[i] == '"')
      is_quoted = !is_quoted;
    else if (row[i] == ',' && !is_quoted)
      cells.emplace_back();
    else
      cells.back() += row[i];
  }
  return cells;
}

// The problems in the order of the file. Lines without an executable are listed under a problem of
// their own.
struct Table {
  vector<Problem> problems;
  std::set<string> lines;
  string device;
  bool has_times = false;

  explicit Table(std::istream& file) {
    string text;
    std::getline(file, text);
    const vector<string> columns = cells_of(text);
    while (std::getline(file, text)) {
      const vector<string> cells = cells_of(text);
      std::map<string, string> cell;
      for (size_t i = 0; i < std::min(columns.size(), cells.size()); i++)
        cell[columns[i]] = cells[i];
      add(cell);
    }
  }
  void add(std::map<string, string>& cell) {
    Row r;
    r.line = cell["config"];
    r.bound = cell["bound"];
    r.said = cell["note"];
    const bool must_fail = r.said.compare(0, 16, "expected failure") == 0;
    r.verdict = must_fail ? "FAIL*" : cell["status"] != "ok" ? cell["status"] : cell["check"];
    if (r.verdict == "PASS") {
      r.said = "rel_rms " + cell["rel_rms"] + ", max_abs_err " + cell["max_abs_err"] +
               (r.said.empty() ? "" : ", ") + r.said;
    }
    r.us = std::atof(cell["graph_us"].c_str());
    r.tflops = std::atof(cell["tflops"].c_str());
    if (!cell["peak_share"].empty()) {
      char percent[16];
      std::snprintf(percent, sizeof percent, "%.1f%%", 100 * std::atof(cell["peak_share"].c_str()));
      r.peak = percent;
    }
    r.problem = "no executable";
    if (!cell["shape"].empty()) {
      const string causal = cell["causal"] == "off" ? "" : " causal " + cell["causal"];
      const string pass = cell["pass"] == "backward" ? "backward of " : "";
      r.problem = pass + cell["shape"] + causal + ", D=" + cell["D"] + " " + cell["dtype"];
    }
    if (!cell["device"].empty()) device = cell["device"];
    has_times |= r.is_timed();
    lines.insert(r.line);
    const auto is_its = [&](const Problem& p) { return p.name == r.problem; };
    if (std::none_of(problems.begin(), problems.end(), is_its)) problems.push_back({r.problem, {}});
    std::find_if(problems.begin(), problems.end(), is_its)->rows.push_back(r);
  }
};

// ---- printing ----

string painted(const char* code, const string& text) {
  const char *term = std::getenv("TERM"), *plain = std::getenv("NO_COLOR");
  static const bool coloured =
      isatty(STDOUT_FILENO) && term && string(term) != "dumb" && !(plain && *plain);
  return coloured ? string("\033[") + code + "m" + text + "\033[0m" : text;
}
string padded(string text, size_t width) {
  if (text.size() < width) text.resize(width, ' ');
  return text;
}
string verdict_of(const Row& r, size_t width) {
  const string text = padded(r.verdict, width);
  return r.is_fine() ? text : painted("1;31", text);
}

void print_figures(const Row& r) {
  std::printf("%10.2f %8.2f %6s", r.us, r.tflops, r.peak.c_str());
}
void print_factor(const Row& r, const Row* base) { std::printf(" %8.2fx", base->us / r.us); }

// Prints text wrapped to 66 columns and indented.
void print_said(const string& text) {
  size_t column = 0;
  string word;
  for (std::istringstream words(text); words >> word;) {
    if (column && column + 1 + word.size() > 66) {
      std::printf("\n%33s", "");
      column = 0;
    } else if (column) {
      std::printf(" ");
      column++;
    }
    std::printf("%s", word.c_str());
    column += word.size();
  }
  std::printf("\n");
}

void print_fastest(const Table& table) {
  std::printf("\n%s\n",
              painted("1", "the fastest line of each problem on " + table.device).c_str());
  size_t width = 28;
  for (const Problem& p : table.problems) width = std::max(width, p.name.size());
  std::printf("%s %-24s %10s %8s %6s %-6s %9s\n", padded("problem", width).c_str(), "line", "graph_us",
              "TFLOP/s", "peak", "of", "base");
  for (const Problem& p : table.problems) {
    const vector<const Row*> timed = p.by_time();
    const auto best =
        std::find_if(timed.begin(), timed.end(), [](const Row* r) { return r->verdict == "PASS"; });
    if (best == timed.end()) continue;
    std::printf("%s %s ", padded(p.name, width).c_str(),
                painted("1;32", padded((*best)->line, 24)).c_str());
    print_figures(**best);
    std::printf(" %-6s", (*best)->bound.c_str());
    print_factor(**best, p.base());
    std::printf("\n");
  }
}

void print_timed(const Problem& p) {
  const vector<const Row*> timed = p.by_time();
  if (timed.empty()) return;
  std::printf("%-24s %-6s %10s %8s %6s %9s\n", "line", "check", "graph_us", "TFLOP/s", "peak",
              "of base");
  for (const Row* r : timed) {
    std::printf("%s %s ", padded(r->line, 24).c_str(), verdict_of(*r, 6).c_str());
    print_figures(*r);
    print_factor(*r, p.base());
    std::printf(" %s\n", string(size_t(28 * r->us / timed.back()->us + 0.999), '#').c_str());
  }
}

// Prints the lines without a time. In a long list only those with an unexpected result, and each
// reason for skipping lines once.
void print_untimed(const Problem& p, bool few) {
  std::map<string, int> skipped;
  for (const Row& r : p.rows) skipped[r.said] += r.verdict == "skipped";
  for (const Row& r : p.rows) {
    if (r.is_timed() || (!few && r.is_fine())) continue;
    string name = r.line;
    if (r.verdict == "skipped") {
      const int alike = skipped[r.said];
      if (!alike) continue;
      if (alike > 1) name += " and " + std::to_string(alike - 1) + " more";
      skipped[r.said] = 0;
    }
    std::printf("%s %s ", padded(name, 24).c_str(), verdict_of(r, 7).c_str());
    print_said(r.said);
  }
}

void print(const Table& table) {
  const bool few = table.has_times || table.lines.size() <= 20;
  if (table.has_times) print_fastest(table);
  for (const Problem& p : table.problems) {
    const auto is_shown = [&](const Row& r) { return r.is_timed() || few || !r.is_fine(); };
    if (std::none_of(p.rows.begin(), p.rows.end(), is_shown)) continue;
    std::printf("\n%s\n",
                painted("1", p.name + (p.base() ? ", base " + p.base()->line : "")).c_str());
    print_timed(p);
    print_untimed(p, few);
  }
  if (!table.has_times) return;
  std::printf(
      "\ngraph_us  median time of a launch in a replayed CUDA graph, without launch overhead\n"
      "peak      share of the peak rate of the tensor cores or of the memory, whichever is the "
      "bound\n"
      "base      speed relative to the first line with this D and type\n"
      "FAIL*     a negative control, which must fail the check\n");
}

}  // namespace

int main(int argc, char** argv) {
  std::ifstream file(argc == 2 ? argv[1] : "");
  if (!file) {
    std::fprintf(stderr, "usage: sdpa_table ROWS.csv\n");
    return 2;
  }
  print(Table(file));
  if (!std::fflush(stdout) && !std::ferror(stdout)) return 0;
  std::fprintf(stderr, "sdpa_table: stdout cannot be written to (%s)\n", std::strerror(errno));
  return 1;
}
