// The table of ./run_all.sh: the fastest line of each problem, then by problem all lines that were timed, the fastest
// first, and in words what was not timed. At most 100 columns.
// usage: sdpa_table ROWS.csv   (as the executables print them: no cell has the end of a line)
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
  double us = 0, tflops = 0;  // us: 0 if it was not timed

  bool is_timed() const { return us > 0; }
  // A negative control that fails is as it should be.
  bool is_fine() const { return verdict == "PASS" || verdict == "FAIL*"; }
};

struct Problem {
  string name;
  vector<Row> rows;  // as in the file

  // The first line that has this D and type; null if none was timed.
  const Row* base() const {
    const auto at = std::find_if(rows.begin(), rows.end(), [](const Row& r) { return r.is_timed(); });
    return at == rows.end() ? nullptr : &*at;
  }
  vector<const Row*> by_time() const {
    vector<const Row*> timed;
    for (const Row& r : rows) {
      if (r.is_timed()) timed.push_back(&r);
    }
    std::stable_sort(timed.begin(), timed.end(), [](const Row* a, const Row* b) { return a->us < b->us; });
    return timed;
  }
};

// The cells of a row of CSV. One between quotes may have commas, and two quotes for each of its own.
vector<string> cells_of(const string& row) {
  vector<string> cells(1);
  bool is_quoted = false;
  for (size_t i = 0; i < row.size(); i++) {
    if (row[i] == '"' && is_quoted && row[i + 1] == '"') cells.back() += row[++i];
    else if (row[i] == '"') is_quoted = !is_quoted;
    else if (row[i] == ',' && !is_quoted) cells.emplace_back();
    else cells.back() += row[i];
  }
  return cells;
}

// The file's problems in the order in which they come; of no problem are lines without an executable.
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
      for (size_t i = 0; i < std::min(columns.size(), cells.size()); i++) cell[columns[i]] = cells[i];
      add(cell);
    }
  }
  void add(std::map<string, string>& cell) {
    Row r;
    r.line = cell["config"], r.bound = cell["bound"], r.said = cell["note"];
    const bool must_fail = r.said.compare(0, 16, "expected failure") == 0;
    r.verdict = must_fail ? "FAIL*" : cell["status"] != "ok" ? cell["status"] : cell["check"];
    if (r.verdict == "PASS") {
      r.said = "rel_rms " + cell["rel_rms"] + ", max_abs_err " + cell["max_abs_err"] + (r.said.empty() ? "" : ", ") + r.said;
    }
    r.us = std::atof(cell["graph_us"].c_str()), r.tflops = std::atof(cell["tflops"].c_str());
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
  static const bool coloured = isatty(STDOUT_FILENO) && term && string(term) != "dumb" && !(plain && *plain);
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

void print_figures(const Row& r) { std::printf("%10.2f %8.2f %6s", r.us, r.tflops, r.peak.c_str()); }
void print_factor(const Row& r, const Row* base) { std::printf(" %8.2fx", base->us / r.us); }

// Words in lines of at most 66 columns, which stand below each other.
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
  std::printf("\n%s\n", painted("1", "the fastest line of each problem on " + table.device).c_str());
  std::printf("%-28s %-24s %10s %8s %6s %-6s %9s\n", "problem", "line", "graph_us", "TFLOP/s", "peak", "of", "base");
  for (const Problem& p : table.problems) {
    const vector<const Row*> timed = p.by_time();
    const auto best = std::find_if(timed.begin(), timed.end(), [](const Row* r) { return r->verdict == "PASS"; });
    if (best == timed.end()) continue;
    std::printf("%-28s %s ", p.name.c_str(), painted("1;32", padded((*best)->line, 24)).c_str());
    print_figures(**best);
    std::printf(" %-6s", (*best)->bound.c_str());
    print_factor(**best, p.base());
    std::printf("\n");
  }
}

void print_timed(const Problem& p) {
  const vector<const Row*> timed = p.by_time();
  if (timed.empty()) return;
  std::printf("%-24s %-6s %10s %8s %6s %9s\n", "line", "check", "graph_us", "TFLOP/s", "peak", "of base");
  for (const Row* r : timed) {
    std::printf("%s %s ", padded(r->line, 24).c_str(), verdict_of(*r, 6).c_str());
    print_figures(*r);
    print_factor(*r, p.base());
    std::printf(" %s\n", string(size_t(28 * r->us / timed.back()->us + 0.999), '#').c_str());
  }
}

// Of many lines without a time those alone that are not as they should be; why lines were skipped once.
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
    std::printf("\n%s\n", painted("1", p.name + (p.base() ? ", base " + p.base()->line : "")).c_str());
    print_timed(p);
    print_untimed(p, few);
  }
  if (!table.has_times) return;
  std::printf(
      "\ngraph_us  one launch in a replayed graph, median: the kernel without the cost of a launch\n"
      "peak      the share of what the GPU can do: its matrix rate, or its memory rate where that binds\n"
      "base      times the speed of the first line of this D and type\n"
      "FAIL*     a negative control, which the check has to catch\n");
}

}  // namespace

int main(int argc, char** argv) {
  std::ifstream file(argc == 2 ? argv[1] : "");
  if (!file) return std::fprintf(stderr, "usage: sdpa_table ROWS.csv\n"), 2;
  print(Table(file));
  if (!std::fflush(stdout) && !std::ferror(stdout)) return 0;
  std::fprintf(stderr, "sdpa_table: stdout cannot be written to (%s)\n", std::strerror(errno));
  return 1;
}
