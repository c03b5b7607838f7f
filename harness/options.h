// Command-line options.
#pragma once

#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "inputs.h"

namespace SDPA_NAMESPACE {
namespace {

const char* const causal_names[] = {"off", "br", "tl"};  // indexed by reference::Mask and Causal

// The window as it is typed: L, R and the alignment, if given. Empty without a window.
string window_text(const Problem& p, const char* comma) {
  if (!p.has_window()) return "";
  const string by =
      p.window_alignment == reference::Mask::none ? "" : causal_names[int(p.window_alignment)];
  return to_string(p.window_left) + comma + to_string(p.window_right) +
         (by.empty() ? "" : comma + by);
}

struct Option {
  const char *name, *value, *help;            // value: placeholder in the help; "" for a flag
  std::function<string(const string&)> take;  // returns "" or what it expects instead
  std::function<string(const Problem&)> given =
      {};  // returns a problem's value as it is typed; "" for the default
};

// Option::given for a member of Problem.
template <class T, class Of> auto given(T Of::* member) {
  return [member](const Problem& p) -> string {
    if (p.*member == Problem().*member) return "";
    if constexpr (std::is_same_v<T, string>)
      return p.*member;
    else
      return format("%.9g", double(p.*member));
  };
}

// The options that a problem sets to values other than the defaults, each preceded by `before`.
string words_of(const vector<Option>& options, const Problem& p, const char* before) {
  string text;
  for (const Option& o : options) {
    const string value = o.given ? o.given(p) : "";
    if (!value.empty()) text += string(before) + (o.name + 2) + (*o.value ? " " + value : "");
  }
  return text;
}

struct Options {
  vector<Problem> problems;
  vector<uint64_t> seeds;  // empty: each problem has its own
  Problem common;          // settings of all problems
  int warmup = 20, iterations = 100, repeats = 1;
  bool check_only = false, config = false, header = false, help = false, shape_given = false;
  int passed = 0;  // number of problems
};

// Parses integers in [low, high], separated by commas. Returns nothing if `text` is anything else.
vector<long long> parse_numbers(const string& text, long long low, long long high) {
  vector<long long> numbers;
  for (size_t at = 0; at <= text.size();) {
    const size_t comma = std::min(text.find(',', at), text.size());
    const string word = text.substr(at, comma - at);
    const size_t sign = word[0] == '-';
    if (word.size() == sign || word.size() > 18) return {};
    if (word.find_first_not_of("0123456789", sign) != string::npos) return {};
    numbers.push_back(std::atoll(word.c_str()));
    if (numbers.back() < low || numbers.back() > high) return {};
    at = comma + 1;
  }
  return numbers;
}

const struct {
  const char *name, *sizes;
} named_shapes[] = {{"small", "1,1,1,32,32"},      {"mission", "1,8,8,512,512"},
                    {"mission2", "2,8,8,512,512"}, {"long", "1,8,8,2048,2048"},
                    {"decode", "32,32,8,1,8192"},  {"decode1", "1,32,8,1,32768"},
                    {"chunk", "1,32,8,256,8192"}};

string shape_names() {  // small, mission, ...
  string names;
  for (const auto& named : named_shapes) names += (names.empty() ? "" : ", ") + string(named.name);
  return names;
}

string parse_shape(const string& text, Problem& p) {
  string sizes = text;
  for (const auto& named : named_shapes) {
    if (text == named.name) sizes = named.sizes;
  }
  const bool is_named = sizes != text;
  std::replace(sizes.begin(), sizes.end(), 'x', ',');  // the form in CSV rows
  const vector<long long> n = parse_numbers(sizes, 0, size_limit);
  if (n.size() < 5 || n.size() > 7) {
    return "want " + shape_names() +
           " or sizes B,Hq,Hkv,Sq,Sk from 0 to 10^9, optionally with D or D,Dv, such as "
           "1,8,2,512,512 "
           "or 1,8,2,512,512,64";
  }
  p.B = int(n[0]);
  p.Hq = int(n[1]);
  p.Hkv = int(n[2]);
  p.Sq = int(n[3]);
  p.Sk = int(n[4]);
  if (n.size() > 5) {
    p.D = int(n[5]);
    p.Dv = line.Dv == line.D ? p.D : std::min(p.D, line.Dv);
  }
  if (n.size() > 6) p.Dv = int(n[6]);
  p.shape = is_named ? text : format("%dx%dx%dx%dx%d", p.B, p.Hq, p.Hkv, p.Sq, p.Sk);
  return p.Hq && (p.Hkv == 0 || p.Hq % p.Hkv) ? "Hq must be a multiple of Hkv" : "";
}

vector<Option> options_of(Options& o) {
  const auto count = [](int& value, int least) {
    return [&value, least](const string& text) {
      const vector<long long> n = parse_numbers(text, least, 1000000);
      if (n.size() == 1) value = int(n[0]);
      return n.size() == 1 ? "" : format("want a whole number from %d to 1000000", least);
    };
  };
  const auto flag = [](bool& value) {
    return [&value](const string&) {
      value = true;
      return "";
    };
  };
  const auto positive = [](double& value) {
    return [&value](const string& text) {
      char* end = nullptr;
      value = std::strtof(text.c_str(), &end);
      const bool is_decimal = text.find_first_not_of("0123456789.eE+-") ==
                              string::npos;  // refuses 0x10, inf and blanks
      const bool good = is_decimal && !text.empty() && !*end && value > 0 && !std::isinf(value);
      return good ? "" : "want a number greater than 0, below 10^38";
    };
  };
  return {
      {"--shape", "S",
       "B,Hq,Hkv,Sq,Sk[,D[,Dv]], small, mission (the default), mission2, long, decode, decode1 or "
       "chunk; repeatable",
       [](const string& text) {
         Problem p;
         return parse_shape(text, p);
       }},
      {"--causal", "br|tl|off", "br: the last query sees the last key; tl: query q sees keys 0..q",
       [&o](const string& text) {
         const auto names = std::begin(causal_names), end = std::end(causal_names);
         const auto found = std::find(names, end, text);
         if (found != end) o.common.mask = reference::Mask(found - names);
         return found != end ? "" : "want br (bottom-right), tl or off";
       },
       [](const Problem& p) {
         return p.mask == reference::Mask::none ? "" : causal_names[int(p.mask)];
       }},
      {"--window", "L,R[,br|,tl]",
       "a query sees L keys before its position and R keys after it; -1: no limit; br, tl: the "
       "position as with --causal",
       [&o](const string& text) {
         const size_t comma = text.find(',', text.find(',') + 1);
         const vector<long long> n = parse_numbers(text.substr(0, comma), -1, size_limit);
         const string by = comma == string::npos ? "off" : text.substr(comma + 1);
         const auto names = std::begin(causal_names), end = std::end(causal_names);
         const auto found = std::find(names, end, by);
         if (n.size() != 2 || found == end) {
           return "want two numbers from -1 to 10^9 and optionally br or tl, such as 1024,0 or "
                  "1024,0,br";
         }
         o.common.window_left = int(n[0]);
         o.common.window_right = int(n[1]);
         o.common.window_alignment = reference::Mask(found - names);
         return "";
       },
       [](const Problem& p) { return window_text(p, ","); }},
      {"--dist", "D",
       "distribution of the inputs: normal (the default), outliers, large (logits), uniform "
       "(logits)",
       [&o](const string& text) {
         string names;
         for (const reference::Dist& d : reference::dists) names += string(" ") + d.name;
         if (reference::dist_named(text)) o.common.dist = text;
         return reference::dist_named(text) ? "" : "want one of" + names;
       },
       given(&Problem::dist)},
      {"--scale", "X", "scale of the logits (default: 1/sqrt(D))", positive(o.common.scale),
       given(&Problem::scale)},
      {"--softcap", "X", "replace each logit x by X * tanh(x / X) (builds with USE_SOFTCAP)",
       positive(o.common.softcap), given(&Problem::softcap)},
      {"--sinks", "", "an attention sink per head, drawn from the seed (builds with USE_SINKS)",
       flag(o.common.has_sinks), given(&Problem::has_sinks)},
      {"--lengths", "",
       "a number of keys per sequence, at most Sk, drawn from the seed (builds with USE_LENGTHS)",
       flag(o.common.has_lengths), given(&Problem::has_lengths)},
      {"--q-lengths", "",
       "a number of queries per sequence, at most Sq, drawn from the seed (builds with "
       "USE_LENGTHS)",
       flag(o.common.has_q_lengths), given(&Problem::has_q_lengths)},
      {"--k-firsts", "",
       "a number of hidden first keys per sequence, drawn from the seed (builds with USE_LENGTHS)",
       flag(o.common.has_k_firsts), given(&Problem::has_k_firsts)},
      {"--packed", "q|k|qk",
       "packed sequences: Sq, Sk or both are totals; starts are drawn (builds with USE_LENGTHS)",
       [&o](const string& text) {
         o.common.packs_q = text.find('q') == 0;
         o.common.packs_k = !text.empty() && text.back() == 'k';
         return !text.empty() && text == packed_text(o.common) ? "" : "want q, k or qk";
       },
       packed_text},
      {"--bias", "KIND[,bhqmBHQKN]",
       "a bias for each (query, key) pair: add, bool, tree (of the last keys), causal, documents, blocks or padding; "
       "b, h, q: its dimensions besides keys (default q); m: one map for all launches; B, H, Q, K: only the bias or "
       "only dBias has this dimension; N: no dBias (builds with USE_BIAS)",
       [&o](const string& text) {
         const size_t comma = std::min(text.find(','), text.size());
         o.common.bias_kind = text.substr(0, comma);
         if (has_key_bias()) o.common.bias_dims = "b";
         if (comma < text.size()) o.common.bias_dims = text.substr(comma + 1);
         const bool is_known =
             std::count(std::begin(bias_kinds), std::end(bias_kinds), o.common.bias_kind) > 0;
         const char* const dims = has_key_bias() ? "b" : "bhqmBHQKN";
         const bool named = o.common.bias_dims.find_first_not_of(dims) == string::npos;
         const bool suits = o.common.bias_kind != (line.use_bias == 2 ? "add"
                                                   : line.use_bias    ? "bool"
                                                                      : "");
         if (has_key_bias()) {
           return is_known && named && suits && o.common.bias_kind != "tree"
                      ? ""
                      : "want add, padding, causal, documents or blocks, and optionally ,b (a bias per batch, the "
                        "default) or a comma (one for all)";
         }
         return is_known && named && suits
                    ? ""
                    : "want add (USE_BIAS=1, 3), bool (USE_BIAS=2), tree, causal, documents, blocks or "
                      "padding, and optionally letters of b, h, q and m, such as tree,bq";
       },
       bias_text},
      {"--key-mask", "KIND[,shared]",
       "padding keys: right, left or scattered; shared: the same for all batches (builds with "
       "USE_KEY_MASK)",
       [&o](const string& text) {
         const size_t comma = std::min(text.find(','), text.size());
         o.common.key_mask_kind = text;
         const string kind = text.substr(0, comma), rest = text.substr(comma);
         const bool is_known =
             std::count(std::begin(key_mask_kinds), std::end(key_mask_kinds), kind) > 0;
         return is_known && (rest.empty() || rest == ",shared")
                    ? ""
                    : "want right, left or scattered, and optionally ,shared";
       },
       given(&Problem::key_mask_kind)},
      {"--keep-map", "",
       "make one map of the keys that MASK_MOD hides for all launches, not one per launch",
       flag(o.common.keeps_map), given(&Problem::keeps_map)},
      {"--most-keys", "N", "an upper bound of the keys of a sequence (builds with USE_LENGTHS)",
       count(o.common.most_keys, 1), given(&Problem::most_keys)},
      {"--batch-invariant", "",
       "the result of a sequence does not depend on the other sequences of the batch",
       flag(o.common.batch_invariant), given(&Problem::batch_invariant)},
      {"--pages", "N", "page size in keys, a multiple of 16 (builds with USE_PAGES; default 64)",
       count(o.common.page_size, 1), given(&Problem::page_size)},
      {"--seeds", "0,1,2", "seeds of the inputs (default 0); each is checked",
       [&o](const string& text) {
         const vector<long long> n = parse_numbers(text, 0, 1ll << 40);
         o.seeds.assign(n.begin(), n.end());
         return n.empty() ? "want whole numbers separated by commas, such as 0,1" : "";
       }},
      {"--iters", "N", "number of timed launches (default 100)", count(o.iterations, 1)},
      {"--warmup", "N", "number of launches before the timed ones (default 20)",
       count(o.warmup, 0)},
      {"--repeats", "N", "launches that must be bitwise equal to the checked one (default 1)",
       count(o.repeats, 1)},
      {"--max-ctas", "N",
       "CTAs of every launch except the checked one (0: all that fit; builds with "
       "USE_PERSISTENT_CTA=1)",
       count(o.common.max_ctas, 0), given(&Problem::max_ctas)},
      {"--check-only", "", "check without timing", flag(o.check_only)},
      {"--config", "", "print the knobs of this build and exit", flag(o.config)},
      {"--header", "", "print the CSV header first (without --shape, only the header)",
       flag(o.header)},
      {"--help", "", "print this help and exit", flag(o.help)}};
}

// The edit distance of two words; swapping neighbours is one edit.
size_t edits_between(const string& a, const string& b) {
  vector<vector<size_t>> d(a.size() + 1, vector<size_t>(b.size() + 1));
  for (size_t i = 0; i <= a.size(); i++) {
    for (size_t j = 0; j <= b.size(); j++) {
      size_t least = i == 0 ? j : j == 0 ? i : d[i - 1][j - 1] + (a[i - 1] != b[j - 1]);
      if (i > 0) least = std::min(least, d[i - 1][j] + 1);
      if (j > 0) least = std::min(least, d[i][j - 1] + 1);
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
        least = std::min(least, d[i - 2][j - 2] + 1);
      d[i][j] = least;
    }
  }
  return d[a.size()][b.size()];
}

// Suggests the option whose name is closest to an unknown name, if it is close enough.
string hint_for(const vector<Option>& options, const string& name) {
  string nearest;
  size_t fewest = (name.size() + 2) / 3 + 1;
  for (const Option& o : options) {
    const size_t edits = edits_between(name, o.name);
    if (edits < fewest) {
      fewest = edits;
      nearest = o.name;
    }
  }
  return nearest.empty() ? "--help lists them" : "did you mean " + nearest + "?";
}

// Parses the arguments. Returns a sentence if they are refused.
string parse(const vector<Option>& options, const vector<string>& args, Options& o) {
  vector<string> given, shapes;
  for (size_t i = 0; i < args.size(); i++) {
    const size_t equals = args[i].find('=');  // --NAME VALUE or --NAME=VALUE
    const string name = args[i].substr(0, equals);
    const auto option = std::find_if(options.begin(), options.end(),
                                     [&](const Option& x) { return name == x.name; });
    if (option == options.end()) return name + ": no such option; " + hint_for(options, name);
    const bool is_joined = equals != string::npos;
    if (is_joined && !*option->value) return name + ": it takes no value";
    if (*option->value && !is_joined && i + 1 == args.size())
      return name + ": its value is missing";
    const bool again = std::count(given.begin(), given.end(), name);
    if (again && name != "--shape") return name + " is given twice";
    given.push_back(name);
    const string value = is_joined ? args[i].substr(equals + 1) : *option->value ? args[++i] : "";
    const string wanted = option->take(value);
    if (name == "--shape") shapes.push_back(value);
    if (!wanted.empty()) return name + " " + value + ": " + wanted;
  }
  if (o.common.max_ctas && !line.has_queue) {
    return "--max-ctas: only builds with USE_PERSISTENT_CTA=1 accept it; build with "
           "USE_PERSISTENT_CTA=1 or omit it";
  }
  o.shape_given = !shapes.empty();
  if (shapes.empty()) shapes.push_back("mission");
  for (const string& shape : shapes) {
    o.problems.push_back(o.common);
    parse_shape(shape, o.problems.back());
  }
  return "";
}

void print_help(const vector<Option>& options) {
  puts("usage: sdpa [OPTION]...   (prints a summary to a terminal, CSV rows to a file or a pipe)");
  for (const Option& o : options) {
    printf("  %-26s %s\n", (string(o.name) + " " + o.value).c_str(), o.help);
  }
  puts(
      "exit status: 0 pass, 1 wrong result, 2 bad usage, 3 CUDA error or a problem that the build "
      "refuses, 77 all problems skipped");
}

}  // namespace
}  // namespace SDPA_NAMESPACE
