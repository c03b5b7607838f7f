// The harness extended for tests: random problems, difficult inputs and layouts, chains of kernels, thread
// orders and counters of the CPU backend. Linked to a line it is sweep_NAME, with all options of sdpa_NAME and
//   --sweep N      check N random problems without timing; --seeds sets the seed
//   --all-kinds    and more problems, until every kind and every tile of the build has occurred; else fail
//   --edges        check problems at the edges of the line's tiles, masks, sums and groups
//   --layout L     layout of the tensors
//   --descale D    descale factors of 8-bit inputs
//   --narrow-table a page table for only Sk keys
//   --schedule S   CPU backend: order of the threads
//   --machine M    CPU backend: the emulated GPU, and the maximum length of sums
//   --alone        no chains of kernels
//   --tile         CPU backend: cost of an additional K/V tile; fails if its barriers are not those declared
//   --last-head    CPU backend: gradients of a head that is over 2^31 elements behind the first one
#ifndef SWEEP_NO_MAIN  // tests/unit.cu has the line and a main of its own
#define SDPA_HARNESS_ONLY
#define SDPA_NAMESPACE sweep
#endif
#define main sdpa_main
#include "../sdpa.cu"
#undef main

#include <climits>

#include "layouts.h"
#include "members.h"

#include <map>
#include <set>
#include <unordered_map>

namespace SDPA_NAMESPACE {
namespace {

using reference::Dist;
using reference::InputAt;
using reference::mix;

// ---- inputs ----

// Logits up to the limit of the type, exact in fp32 for any order of the sum: the elements of a row
// of Q or K are 0 and +-2^e, with an exponent per row. In a quarter of the key heads, Q and K are
// constant instead, so O is the mean of V.
float huge(const InputAt& i) {
  if (i.tensor == Tensor::V) return i.x;
  const bool bytes = element_bytes(line.input) == 1;
  const reference::Problem& p = i.problem;
  const uint64_t kv_head = i.tensor == Tensor::Q ? i.head / (p.Hq / p.Hkv) : i.head;
  const uint64_t of_head = mix(mix(i.seed + 33) + kv_head);
  if (of_head % 4 == 0) return float((bytes ? 8 : 1000) * (1 + of_head / 4 % (bytes ? 15 : 60)));
  const DType type = dtype_of(i.tensor);
  const int low = type == DType::bf16 ? -59 : type == DType::fp16 ? -14 : 0;
  const int high = type == DType::bf16 ? 59 : type == DType::fp16 ? 15 : 6;
  const uint64_t stream = mix(i.seed * 4 + uint64_t(i.tensor) + 44);
  const int sign = int(mix(mix(stream) + i.index) % 3) - 1;
  return std::ldexp(float(sign), low + int(mix(stream + i.index / p.D) % (high - low + 1)));
}

// The logit of key k is about 20 * k at the default scale, or -20 * k for odd seeds (k below 2^15),
// so O is the last or first visible row of V. K contains three base-32 digits of k, and Q their
// place values; the other elements are noise of -1, 0 and 1, which changes logits by less. S is an
// integer. For 8-bit types the digits are base 8 (k below 2^9) and spread over all elements, so
// that none exceeds 127.
float stairs(const InputAt& i) {
  if (i.tensor == Tensor::V) return i.x;
  if (element_bytes(line.input) == 1) {
    const int place = int(i.d % 3);
    if (i.tensor == Tensor::Q) return float(1 << 3 * place);
    return float((i.seed % 2 ? -8 : 8) * int(i.row >> 3 * place & 7));
  }
  if (i.d >= 3) return float((i.x > 0.5f) - (i.x < -0.5f));
  if (i.tensor == Tensor::Q) return float(32 << 5 * i.d);
  const int step = int(std::lround(20 * std::sqrt(double(i.problem.D)) / 32));
  return float((i.seed % 2 ? -step : step) * int(i.row >> 5 * i.d & 31));
}

// NaN or +inf in an element of most heads of Q, and of a quarter of the heads of K and V. e4m3 has
// no inf; 448 instead would give logits beyond the resolution of 14-bit sums. Q and K are finite if a bias is added and
// the kernel skips rounds of keys with a bias of -inf: the reference adds -inf to NaN.
float nonfinite(const InputAt& i) {
  const bool adds = i.problem.bias.keys > 0 && !i.problem.bias.hides;
  if (adds && (line.has_bias_maps || has_key_bias()) && i.tensor != Tensor::V) return i.x;
  const size_t heads = heads_of(i.problem, i.tensor);
  const uint64_t per_head = rows_of(i.problem, i.tensor) / heads * i.problem.D;
  const uint64_t r = mix(mix(i.seed + 99) + i.head * 4 + uint64_t(i.tensor));
  const bool bad = i.tensor == Tensor::Q ? r % 2 == 0 : r % 16 < 4;
  if (!bad || i.index != i.head * per_head + r / 16 % per_head) return i.x;
  return r / 8 % 2 && line.input != DType::e4m3 ? float(INFINITY) : float(NAN);
}

// Logits of about -100 at the default scale, or -30 for e4m3, whose P underflows earlier: P is 0
// unless the row max is subtracted.
float negative(const InputAt& i) {
  const float mean = std::sqrt(line.input == DType::e4m3 ? 30.0f : 100.0f) / std::pow(float(i.problem.D), 0.25f);
  return i.tensor == Tensor::V ? i.x : i.tensor == Tensor::Q ? i.x / 2 + mean : i.x / 2 - mean;
}

// Rows of Q below the range of fp16, for a scale of TINY_SCALE.
constexpr float TINY_SCALE = 0x1p97f;
float tiny(const InputAt& i) { return i.tensor == Tensor::Q ? std::ldexp(i.x, -100) : i.x; }

// With a softcap, four of five key heads of `ramps` have logits on both sides of the point where a polynomial
// replaces tanh. Returns their kind, an index of parts_beside_cap, or -1.
int kind_beside_cap(const reference::Problem& p, uint64_t seed, uint64_t kv_head) {
  if (p.softcap < 1 || p.softcap >= 1000 || element_bytes(line.input) != 2) return -1;
  return int((mix(seed + 111) / 8 + kv_head) % 5) - 1;
}
// Indices of the factors of 8 rows of Q, and of the next 8.
constexpr int parts_beside_cap[][2] = {{3, 4}, {1, 1}, {0, 0}, {4, 3}};
constexpr int small_jumps = 2;

enum Way { slowly, at_once, at_keys, after_a_fall };
struct Ramp {
  Way way;
  int rise, start;  // rise of logits; start of scores, in units of 128
};
const Ramp& ramp_of(uint64_t seed, uint64_t kv_head) {
  static constexpr Ramp ramps[] = {{slowly, 16, 0}, {at_once, 40, 0}, {at_once, 130, 0}, {at_keys, 200, 0}, {slowly, 300, 32},
                                   {after_a_fall, 100, 32}, {after_a_fall, 30, 1 << 15}, {slowly, 12, INT_MIN}};
  return ramps[(mix(seed + 111) + kv_head) % 8];
}
bool has_few_bits() { return line.input == DType::e4m3 && line.family != string("scalar"); }
// Scores within the range of the type, above a sink, and small enough that adding a bias or a term of SCORE_MOD is
// exact in a float.
int start_of_ramp(uint64_t seed, uint64_t kv_head, bool has_sinks, bool adds_bias) {
  const int start = ramp_of(seed, kv_head).start;
  if (has_few_bits() || (element_bytes(line.input) == 1 && start != 32) || ((adds_bias || line.logit) && start > 1 << 10)) return 0;
  return start == INT_MIN || has_sinks || mix(mix(seed + 111) + kv_head) / 4 % 2 ? start : -start;
}

// Row maxima that change along the keys, for lazy rescaling. Key heads cycle through eight kinds:
// along the keys, in either direction, logits at the default scale rise slowly, at once, at single
// keys, or fall and rise; starting from 0, +-512 (beyond 710 no row max is stale), +-524288 or
// -inf. The rise of a query row is multiplied by 1, 1/2, 0 or -1; in half of the heads, 8 rows have
// one of these factors and the next 8 another one. With a softcap c, most heads have logits between
// c and 4 * c, or logits that rise from about 0.7 * c to 1.2 * c, slowly or at single keys. Scores
// are integers below 2^24, exact in fp32; for e4m3, where tensor cores sum 14 bits, a rise over
// several keys is at most 24. In most problems, V is as large as the sums of P @ V allow.
float ramps(const InputAt& i) {
  const reference::Problem& p = i.problem;
  const bool few_bits = has_few_bits();
  const uint64_t of_seed = mix(i.seed + 111), r = mix(of_seed + i.head);
  const int beside_cap = kind_beside_cap(p, i.seed, i.head);
  if (i.tensor == Tensor::V) {
    const bool is_bf16 = line.input == DType::bf16 && line.output == DType::bf16;
    const float largest = is_bf16 ? 0x1p64f / float(1 << std::ilogb(std::max(p.Sk, 1))) : 0x1p12f;
    return of_seed % 4 ? i.x * largest : i.x;
  }
  const float noise = float((i.x > 0.5f) - (i.x < -0.5f));
  if (i.tensor == Tensor::Q) {
    constexpr float parts[] = {4, 4, 2, 0, -4};
    const int first = mix(r + 1) % 5, other = (first + 1 + mix(r + 2) % 4) % 5;
    const bool is_second = i.row / 8 % 2;
    const int part = beside_cap >= 0 ? parts_beside_cap[beside_cap][is_second]
                     : r % 2         ? (is_second ? other : first)
                                     : mix(r + i.row) % 5;
    return i.d == 0 ? parts[p.sinks.empty() ? part : std::min(part, 3)] : i.d == 1 ? 128 : noise;
  }
  if (i.d > 1) return noise;
  const Ramp& kind = ramp_of(i.seed, i.head);
  const float last = float(std::max(p.Sk - 1, 1)), k = r % 4 < 2 ? float(i.row) : last - float(i.row);
  const float drawn = float(mix(r + uint64_t(k)) % 4096) / 4096;
  if (beside_cap >= 0) {
    const bool is_level = parts_beside_cap[beside_cap][0] != parts_beside_cap[beside_cap][1];
    const float level = is_level ? 1 + r / 1024 % 32 / 10.0f : 0.4f + r / 1024 % 32 / 50.0f;
    const float slope = is_level ? 0 : 0.2f + r / 32768 % 32 / 50.0f;
    // Or at single keys, to scores near the cap that differ slightly. These jumps multiply P by 2^18 to 2^49. Small
    // ones multiply it by less than 2^16, from scores inside the polynomial's range to equal scores outside it.
    const bool is_small = beside_cap == small_jumps, jumps = is_small || (!is_level && mix(r + 3) % 4);
    const float bit = 1 / (1.4427f * float(p.softcap)), range = std::tanh(0.85f);  // fractions of the softcap
    const float high = is_small ? std::min(range + (5 + r / 32768 % 32 / 10.0f) * bit, 0.95f)
                                : std::tanh(0.95f + r / 32768 % 32 / 128.0f);
    const float below = is_small ? range - (2 + r / 1024 % 32 / 16.0f) * bit : high - (18 + r / 1024 % 32) * bit;
    const float low = std::atanh(std::max(below, -0.3f));
    const float beyond = std::atanh(high) + (is_small ? 0 : 100 * drawn / float(p.softcap));
    const bool is_late = (is_small ? last - float(i.row) : k) > 0.6f * last;  // wgmma kernels begin at the last key
    // In rows whose factor is -1, most keys are below the polynomial's range, and the row max is just inside it.
    const bool falls = is_level && (p.softcap == 30 || mix(r + 4) % 2);
    const float near = 0.7f + r / 1024 % 32 / 230.0f, far = near + 0.2f + r / 32768 % 32 / 160.0f;
    const float part = falls    ? (drawn < 0.06f ? near : far)
                       : !jumps ? level + slope * k / last
                       : is_late && drawn < 0.06f ? beyond
                                                  : low;
    return i.d == 1 ? 0 : std::round(float(p.softcap) * part * std::sqrt(float(p.D)) / 4);
  }
  if (i.d == 1) {
    const int start = start_of_ramp(i.seed, i.head, !p.sinks.empty(), !p.bias.hides && p.bias.keys > 0);
    return start == INT_MIN ? (k < 0.55f * last ? -INFINITY : 0) : start;
  }
  const float place = r / 8 % 2 ? last - 4 : last * float(r / 16 % 16) / 16;
  const float part = kind.way == slowly    ? k / last
                     : kind.way == at_once ? float(k >= place)
                     : kind.way == at_keys ? std::max(0.0f, 48 * drawn - 47)
                                           : std::fabs(2 * k / last - 1);
  // After a rise of P beyond 2^120, scores cannot be recovered from P. With a bias, most rises are
  // smaller.
  const bool adds = !p.bias.hides && p.bias.keys > 0;
  const int most_rise = few_bits && kind.way != at_keys ? 20 : adds && r / 4096 % 4 ? 60 : INT_MAX;
  const float rise = std::min(kind.rise, most_rise) * (0.8f + float(r / 256 % 256) / 640);
  return std::round(rise * std::sqrt(float(p.D)) / 4 * part);
}

// All rows of V are equal, so dQ and dK are 0 up to cancellation.
float constant(const InputAt& i) { return i.tensor == Tensor::V ? reference::normal(i.seed, i.tensor, i.d) + 3 : i.x; }

void add_dists() {
  if (reference::dist_named("huge")) return;
  if (line.backward) reference::dists.push_back({"constant", constant});
  for (const Dist& d : {Dist{"nonfinite", nonfinite},
                        {"huge", huge},
                        {"stairs", stairs},
                        {"negative", negative},
                        {"ramps", ramps},
                        {"tiny", tiny}}) {
    reference::dists.push_back(d);
  }
}

// ---- chains of kernels ----

struct Copies {
  struct {
    uint4* to;
    const uint4* from;
    size_t words;
  } tensors[3];
  uint32_t flipped;  // bits of each 32
};

// Writes the inputs of the next kernel, which it allows to start before anything is copied.
__global__ void copy_tensors(Copies c) {
#if defined(SDPA_SIMT) || (defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900)
  griddepcontrol_launch_dependents();
#endif
  for (const auto& t : c.tensors) {
    for (size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < t.words;
         i += gridDim.x * blockDim.x) {
      uint4 x = t.from[i];
      x.x ^= c.flipped;
      x.y ^= c.flipped;
      x.z ^= c.flipped;
      x.w ^= c.flipped;
      st_global_v4(&t.to[i], x);
    }
  }
}

void launch_copies(const Copies& c) {
  cudaLaunchConfig_t config{};
  // Few CTAs, so that the next kernel can run concurrently.
  config.gridDim = dim3(has_clock ? 64 : 1);
  config.blockDim = dim3(has_clock ? 256 : 32);
  require(cudaLaunchKernelEx(&config, copy_tensors, c), "launching a copy of the inputs");
}

// Three kernels without synchronization: one writes Q, K and V, then O = attention(Q, K, V), then
// O2 = attention(O, K, V). O must be bitwise equal to the checked run, and O2 to the same launch
// after a synchronization. Returns a sentence on failure.
string check_chain(Instance& instance) {
  if (line.backward) return "";  // its kernels start when those before them have ended
  if (is_far(instance.problem.layout)) return "";  // gigabytes to copy
  if (line.input != line.output) return "";                          // O is no Q
  const auto O2 = make_tensor(instance.problem, Tensor::O);
  SdpaParams second = instance.params;
  second.Q = reinterpret_cast<decltype(second.Q)>(instance.params.O);
  second.q = instance.params.o;
  second.LSE = nullptr;
  second.O = static_cast<decltype(second.O)>(O2->first());
  O2->poison();
  instance.launch(second);  // O is that of the checked run
  require(cudaDeviceSynchronize(), "running the kernel");
  string trouble;
  const Bits want = O2->read(trouble);
  if (!trouble.empty()) return trouble;

  std::unique_ptr<Guarded> copies[3];
  Copies save{}, write{};
  for (int t = 0; t < 3; t++) {
    const Guarded& tensor = *instance.tensors[t];
    const size_t words = (tensor.bytes + GUARD) / sizeof(uint4);  // some of the guard behind it
    copies[t].reset(new Guarded("a copy", words * sizeof(uint4)));
    save.tensors[t] = {copies[t]->data<uint4>(), tensor.data<uint4>(), words};
    write.tensors[t] = {tensor.data<uint4>(), copies[t]->data<uint4>(), words};
  }
  launch_copies(save);
  write.flipped = 0x80408040;  // what the inputs hold before the chain: other finite numbers
  launch_copies(write);
  O2->poison();
  instance.poison();
  require(cudaDeviceSynchronize(), "preparing a chain of kernels");

  write.flipped = 0;
  launch_copies(write);
  instance.launch(instance.params);
  instance.launch(second);
  const char* const sentence = "in a chain of kernels differs";
  trouble = instance.check_last(sentence);
  const Bits got = O2->read(trouble);
  return trouble.empty() ? instance.difference("O of the second kernel", want, got, sentence)
                         : trouble;
}

// ---- the CPU backend ----

string value_of_knob(const char* name) {
  for (const Knob* k = line.knobs; k < line.knobs + line.knob_count; k++) {
    if (string(k->name) == name) return k->value;
  }
  return "";
}

// Builds without splits refuse longer sums.
bool has_ranges() { return line.is_tuned || value_of_knob("SPLIT_CTAS") != "1"; }

#ifdef SDPA_SIMT
constexpr bool has_machines = true;
// Sets the order of threads. Returns a sentence if `text` is unknown.
string set_schedule(const string& text) {
  const string random = "random:", digits = "0123456789";
  simt::schedule = {};
  simt::schedule.alternate = false;
  if (text == "reverse") simt::schedule.order = simt::Order::reverse;
  if (text == "forward" || text == "reverse") return "";
  if (text.compare(0, random.size(), random) || text.size() == random.size() ||
      text.find_first_not_of(digits, random.size()) != string::npos) {
    return "want forward, reverse or random:SEED with a number for SEED";
  }
  simt::schedule.order = simt::Order::random;
  simt::schedule.seed = std::strtoull(text.c_str() + random.size(), nullptr, 10);
  return "";
}

// Sets simt::Gpu from SMS,L2_KB,CTAS,KEYS; "" sets the defaults. Returns a sentence on any other
// text.
string parse_machine(const string& text, simt::Gpu& gpu) {
  gpu = {};
  if (text.empty()) return "";
  const vector<long long> n = parse_numbers(text, 1, 1000000);
  if (n.size() != 4) return "want SMs, KB of L2, CTAs per SM and keys per sum, such as 132,61440,1,65536";
  gpu.sms[0] = int(n[0]);
  gpu.l2_bytes = int(n[1]) << 10;
  gpu.ctas_per_sm = int(n[2]);
  gpu.keys_at_once = int(n[3]);
  return "";
}
string refuse_machine(const string& text) {
  simt::Gpu gpu;
  return parse_machine(text, gpu);
}
void play_machine(const string& text) { parse_machine(text, simt::gpu); }
// Three of four random problems have a random machine.
template <class Draw> string draw_machine(const Draw& draw) {
  // Builds with ranges launch 8 CTAs or more for each SM. Edge cases have 132 SMs.
  constexpr int sms[] = {1, 3, 16, 32}, l2_kb[] = {24, 120, 61440}, keys[] = {64, 200, 65536};
  if (draw(4) == 0) return "";
  const int at[] = {draw(4), draw(3), 1 + draw(3), draw(3)};
  return format("%d,%d,%d,%d", sms[at[0]], l2_kb[at[1]], at[2], keys[has_ranges() ? at[3] : 2]);
}

simt::Counters count_tiles(int tiles) {
  const TunedTile& t = line.tiles[0];
  Problem p;
  p.B = p.Hq = p.Hkv = 1;
  p.Sq = t.block_m;
  p.Sk = tiles * t.split_kv * t.block_n;
  Instance instance(p);
  instance.set_inputs(0);
  simt::start_counting();
  instance.run_once();
  return simt::stop_counting();
}

// The cost of an additional K/V tile in a launch of one CTA: barriers of its first thread, bytes
// from global memory, and bank conflicts (excess wavefronts of shared memory).
ExitCode print_tile() {
  if (line.is_tuned) {
    puts("the tile is chosen for each problem");
    return exit_pass;
  }
  if (value_of_knob("SPLIT_CTAS") != "1") {
    puts("one more tile may go to one more CTA");
    return exit_pass;
  }
  const int groups = line.tiles[0].split_kv;  // each takes a tile more
  const simt::Counters less = count_tiles(4), more = count_tiles(5);
  string sites;
  uint64_t conflicts = 0;
  for (const auto& site : more.shared) {
    const auto before = less.shared.find(site.first);
    const simt::AccessCount old =
        before == less.shared.end() ? simt::AccessCount{} : before->second;
    if (site.second.accesses == old.accesses) continue;
    conflicts += site.second.conflicts - old.conflicts;
    sites += format("  %6llu accesses, %6llu conflicts  %s\n",
                    (unsigned long long)(site.second.accesses - old.accesses) / groups,
                    (unsigned long long)(site.second.conflicts - old.conflicts) / groups,
                    site.second.where.c_str());
  }
  const int barriers = int(more.barriers - less.barriers);
  printf("a K/V tile of %s: %d barriers, %llu bytes from global memory, %llu bank conflicts\n%s",
         line.name, barriers, (unsigned long long)(more.global_bytes - less.global_bytes) / groups,
         (unsigned long long)conflicts / groups, sites.c_str());
  if (barriers == line.barriers_per_tile) return exit_pass;
  fprintf(stderr, "sweep: the code declares %d barriers for a tile\n", line.barriers_per_tile);
  return exit_wrong;
}

// A backward pass of equal heads, of which only the CTAs of the last one run, so that only its memory is touched.
class EqualHeads {
 public:
  static constexpr int rows = 32;

  explicit EqualHeads(int count)
      : count(count), p(params_of_sizes(1, count, count, rows, rows, line.D, line.Dv)) {
    set_input(p.Q, Tensor::Q, line.query, line.D);
    set_input(p.K, Tensor::K, line.input, line.D);
    set_input(p.V, Tensor::V, line.input, line.Dv);
    set_input(g.dO, Tensor::dO, line.output, line.Dv);
    g.d_o = p.v;
    g.d_q = p.q;
    g.d_k = p.k;
    g.d_v = p.v;
    p.q.head = p.k.head = p.v.head = g.d_o.head = 0;  // the heads share their inputs
    set(p.O, "O", count * p.o.head * sizeof(uint16_t));
    set(p.LSE, "LSE", size_t(count) * rows * sizeof(float));
    set(g.dQ, "dQ", count * g.d_q.head * sizeof(uint16_t));
    set(g.dK, "dK", count * g.d_k.head * sizeof(uint16_t));
    set(g.dV, "dV", count * g.d_v.head * sizeof(uint16_t));
    set(g.workspace, "the workspace of the backward pass", line.backward_workspace_bytes(p));
  }
  void run_forward() {
    const KernelFacts facts = line.facts_of(p);
    set(p.workspace, "the workspace", facts.workspace_bytes);
    memory_.back()->fill(0);
    set(p.scratch, "the scratch memory", facts.scratch_bytes);
    require_ok(line.forward(p, 0));
  }
  // Copies O and LSE of a head alone to the last head.
  void copy_forward(const EqualHeads& alone) {
    copy(last(p.O, p.o), alone.p.O, p.o.head * sizeof(uint16_t));
    copy(p.LSE + int64_t(count - 1) * rows, alone.p.LSE, rows * sizeof(float));
  }
  // Returns dQ, dK and dV of the last head.
  vector<Bits> run_backward() {
    const struct {
      void* tensor;
      const Strides& strides;
    } gradients[] = {{g.dQ, g.d_q}, {g.dK, g.d_k}, {g.dV, g.d_v}};
    for (const auto& x : gradients)
      poison(last(x.tensor, x.strides), x.strides.head * sizeof(uint16_t));
    // The end of the workspace is the last head's sums of dQ, unless counters follow.
    const size_t bytes = line.backward_workspace_bytes(p),
                 end = std::min<size_t>(bytes, rows * line.D * sizeof(float));
    poison(static_cast<char*>(g.workspace) + bytes - end, end);
    simt::schedule.parts = count;
    require_ok(line.backward(p, g, 0));
    require(cudaDeviceSynchronize(), "running the last head");
    simt::schedule.parts = 1;
    vector<Bits> results;
    for (const auto& x : gradients) {
      results.emplace_back(x.strides.head);
      copy(results.back().data(), last(x.tensor, x.strides), x.strides.head * sizeof(uint16_t),
           cudaMemcpyDeviceToHost);
    }
    return results;
  }

 private:
  template <class T> void set(T*& pointer, const char* name, size_t bytes) {
    memory_.emplace_back(new Guarded(name, bytes));
    pointer = reinterpret_cast<T*>(memory_.back()->data());
  }
  template <class T> void set_input(T*& pointer, Tensor tensor, DType type, int width) {
    vector<float> x(rows * width);
    for (size_t i = 0; i < x.size(); i++) x[i] = reference::normal(1, tensor, i);
    set(pointer, name_of(tensor), x.size() * sizeof(uint16_t));
    memory_.back()->store(round_to_elements(x, 1, type));
  }
  void* last(void* tensor, const Strides& strides) const {
    return static_cast<uint16_t*>(tensor) + (count - 1) * strides.head;
  }
  static void copy(void* to, const void* from, size_t bytes,
                   cudaMemcpyKind kind = cudaMemcpyDeviceToDevice) {
    require(cudaMemcpy(to, from, bytes, kind), "copying a head");
  }
  static void poison(void* at, size_t bytes) {
    require(cudaMemset(at, 0xff, bytes), "poisoning a head");
  }
  static void require_ok(const SdpaStatus& status) {
    if (!status.ok()) throw CudaError{status.text};
  }

  const int count;
  SdpaParams p;
  Gradients g{};
  vector<std::unique_ptr<Guarded>> memory_;
};

// Compares the gradients of a head with those of the same head over 2^31 elements behind the first one: in O, in the
// gradients, and in the sums of dQ.
ExitCode check_last_head() {
  const int64_t far = int64_t(1) << 31;
  string trouble;
  try {
    EqualHeads alone(1), many(int(far / (EqualHeads::rows * std::min(line.D, line.Dv))) + 2);
    alone.run_forward();
    many.copy_forward(alone);
    const vector<Bits> want = alone.run_backward(), got = many.run_backward();
    for (int i = 0; i < 3; i++) {
      if (got[i] != want[i]) trouble += string(name_of(gradient_tensors[i])) + " is wrong; ";
    }
  } catch (const CudaError& error) {
    trouble = error.text;
  }
  printf("sdpa_%s: %s last head: %s\n", line.name, trouble.empty() ? "PASS" : "FAIL",
         trouble.c_str());
  return trouble.empty() ? exit_pass : exit_wrong;
}
#else
constexpr bool has_machines = false;
string set_schedule(const string&) { return "only the CPU backend has one; a GPU has its own"; }
string refuse_machine(const string&) { return "only the CPU backend has one; a GPU is what it is"; }
void play_machine(const string&) {}
template <class Draw> string draw_machine(const Draw&) { return ""; }
ExitCode print_tile() {
  fprintf(stderr, "sweep: --tile: only the CPU backend counts; configure with -DSDPA_CPU=ON\n");
  return exit_usage;
}
ExitCode check_last_head() {
  fprintf(stderr, "sweep: --last-head: a GPU has no room for it; configure with -DSDPA_CPU=ON\n");
  return exit_usage;
}
#endif

// The maximum number of keys per sum, on the machine of the problem.
int keys_at_once(const Problem& p) {
  return p.machine.empty() ? 65536 : std::atoi(p.machine.c_str() + p.machine.rfind(',') + 1);
}
// e4m3 wgmma: number of keys after which P @ V is added to O in fp32; 0: never.
int keys_of_flush() {
  if (!line.is_wgmma || line.query != DType::e4m3) return 0;
  return std::stoi(value_of_knob("FP8_FLUSH")) * line.tiles[0].block_n * line.tiles[0].split_kv;
}
// True for builds with lazy rescaling.
bool has_stale_maximum() { return line.is_tuned || value_of_knob("USE_LAZY_MAX") == "1"; }

// ---- coverage of random problems ----

constexpr int DESCALES = 5;
const char* const descales[DESCALES] = {"heads", "gaps", "shared", "none", "zeros"};

bool packs_heads() { return line.is_tuned || value_of_knob("PACK_GQA") == "1"; }
// True for builds in which rows of a tile may have different factors of Q.
bool has_tiles_of_factors() { return packs_heads() && element_bytes(line.query) == 1; }
// True if O would show that a row has a wrong factor.
bool shows_factors_of_tile(const Problem& p) {
  return p.Hq > p.Hkv && (p.descale == "heads" || p.descale == "gaps") && (p.dist == "normal" || p.dist == "outliers") && p.Sk > 8;
}

bool same_tile(const TunedTile& a, const TunedTile& b) {
  const auto numbers = [](const TunedTile& t) {
    return std::array<int, 6>{t.block_m, t.block_n, t.num_warps, t.stages, t.skip_masked, t.use_mma_sync};
  };
  return numbers(a) == numbers(b);
}
bool takes_tile(const Problem& p, const TunedTile& t) {
  play_machine(p.machine);
  return same_tile(line.tile_of(params_of(p)), t);
}

// wgmma sums e4m3 products with 14 bits, which is inexact for logits in the hundreds; fp16 sums
// overflow at 65504.
bool takes_dist(const string& dist) {
  // The backward pass reads LSE as a float, so with logits in the millions the error of P exceeds
  // P.
  if (line.backward && (dist == "huge" || dist == "ramps" || dist == "nonfinite")) return false;
  // SCORE_MOD adds to logits in floats, which is inexact beyond 10^5.
  if (line.logit && (dist == "huge" || dist == "stairs" || dist == "ramps")) return false;
  if (line.fp16_acc) return dist == "normal" || dist == "nonfinite";
  if (dist == "tiny") return line.query == DType::bf16;
  return !(line.is_wgmma && line.input == DType::e4m3 && (dist == "large" || dist == "negative"));
}

bool takes_k_firsts() { return line.has_lengths && (!line.has_pages || line.has_small_pages); }
// True if all problems of this build have the same value of a member.
bool is_fixed(const string& member) {
  if (member == "bias_map" || member == "bias_map_bytes") return !line.has_bias_maps;
  if (member == "bias_keys" && has_key_bias()) return true;
  if (member == "D" || member == "Dv") return !line.is_wgmma;
  return !takes_member({line.has_queue, line.has_softcap, element_bytes(line.input) == 1, element_bytes(line.query) == 1,
                        line.has_sinks, line.has_lengths, line.has_pages, takes_k_firsts(), line.use_bias != 0, line.has_key_mask}, member);
}

// ---- features of a problem ----

constexpr int far_stride = INT_MAX;  // strides from here on are far

// The optional features of a problem. A sweep draws which features a problem has, so that each
// occurs alone, where no other feature can hide its faults, and together with each other one.
struct Feature {
  const char* name;
  bool in_build;
  bool is_of_scores;  // it changes the weights of a row
  bool (*is_on)(const Problem&);
  void (*turn_off)(Problem&);
};
const vector<Feature>& features() {
  const bool is_8bit = element_bytes(line.input) == 1;
  static const vector<Feature> of_build = [&] {
    vector<Feature> all = {
        {"softcap", line.has_softcap, true, [](const Problem& p) { return p.softcap != 0; },
         [](Problem& p) { p.softcap = 0; }},
        {"bias", line.use_bias != 0, true,
         [](const Problem& p) { return !p.bias_kind.empty() && p.Sk > 0; },
         [](Problem& p) { p.bias_kind = ""; }},
        {"key_mask", line.has_key_mask, true,
         [](const Problem& p) { return !p.key_mask_kind.empty() && p.Sk > 0; },
         [](Problem& p) { p.key_mask_kind = ""; }},
        {"sinks", line.has_sinks, true, [](const Problem& p) { return p.has_sinks; },
         [](Problem& p) { p.has_sinks = false; }},
        {"lengths", line.has_lengths, true, [](const Problem& p) { return p.has_lengths; },
         [](Problem& p) { p.has_lengths = false; }},
        {"q_lengths", line.has_lengths, false, [](const Problem& p) { return p.has_q_lengths; },
         [](Problem& p) { p.has_q_lengths = false; }},
        {"k_firsts", takes_k_firsts(), false, [](const Problem& p) { return p.has_k_firsts; },
         [](Problem& p) { p.has_k_firsts = false; }},
        {"packed_q", line.has_lengths, false, [](const Problem& p) { return p.packs_q; },
         [](Problem& p) { p.packs_q = false; }},
        {"packed_k", line.has_lengths && !line.has_pages, false,
         [](const Problem& p) { return p.packs_k; }, [](Problem& p) { p.packs_k = false; }},
        {"most_keys", line.has_lengths, false, [](const Problem& p) { return p.most_keys != 0; },
         [](Problem& p) { p.most_keys = 0; }},
        {"batch_invariant", line.has_lengths, false,
         [](const Problem& p) { return p.batch_invariant; },
         [](Problem& p) { p.batch_invariant = false; }},
        {"causal", true, false, [](const Problem& p) { return p.mask != reference::Mask::none; },
         [](Problem& p) { p.mask = reference::Mask::none; }},
        {"window", true, false, [](const Problem& p) { return p.has_window(); },
         [](Problem& p) { p.window_left = p.window_right = -1; }},
        {"short_rows", line.is_wgmma, false,
         [](const Problem& p) { return p.D < line.D || p.Dv < line.Dv; },
         [](Problem& p) {
           p.D = line.D;
           p.Dv = line.Dv;
         }},
        {"ranges", has_machines && has_ranges(), false,
         [](const Problem& p) { return keys_at_once(p) < 65536; },
         [](Problem& p) { p.machine = ""; }},
        {"max_ctas", line.has_queue, false, [](const Problem& p) { return p.max_ctas != 0; },
         [](Problem& p) { p.max_ctas = 0; }},
        {"factors", is_8bit, false, [](const Problem& p) { return p.descale != "none"; },
         [](Problem& p) { p.descale = "none"; }},
    };
    all.erase(std::remove_if(all.begin(), all.end(), [](const Feature& f) { return !f.in_build; }), all.end());
    return all;
  }();
  return of_build;
}

// The contents of the auxiliary inputs of a problem.
struct Contents {
  vector<int> lengths, q_starts, k_starts, pages, k_firsts;
  vector<float> sinks;
};
int pages_of(const Problem& p) { return p.page_size ? p.B * ((p.Sk + p.page_size - 1) / p.page_size) + 1 : 0; }
template <class T> vector<T> fetch(const T* from, size_t count) {
  vector<T> x(from ? count : 0);
  require(cudaMemcpy(x.data(), from, x.size() * sizeof(T), cudaMemcpyDeviceToHost), "copying from the GPU");
  return x;
}
Contents contents_of(const SdpaParams& p) {
  return {fetch(p.k_lengths, p.B), fetch(p.q_starts, p.B + 1), fetch(p.k_starts, p.B + 1),
          fetch(p.page_table, size_t(p.B) * p.page_stride), fetch(p.k_firsts, p.B), fetch(p.sinks, p.Hq)};
}
// The same before a launch. `pages` has one entry of each kind, as nearly every table has.
Contents drawn_contents(const Problem& p) {
  Contents c;
  if (p.has_lengths) c.lengths = drawn_lengths(p, p.seed);
  if (p.has_k_firsts) c.k_firsts = drawn_k_firsts(p, p.seed);
  if (p.has_sinks) c.sinks = drawn_sinks(p, p.seed);
  const auto starts = [&](Tensor t, int rows) {
    return beyond_tensor(drawn_starts(p, t, p.seed), rows, p.seed);
  };
  if (p.packs_q) c.q_starts = starts(Tensor::Q, p.Sq);
  if (p.packs_k) c.k_starts = starts(Tensor::K, p.Sk);
  if (p.page_size && p.Sk) c.pages = {-1, 0, pages_of(p) - 1, pages_of(p)};
  return c;
}
// The number of keys of the longest sequence, limited by most_keys.
int longest_sequence(Problem p) {
  p.most_keys = 0;
  p.k_firsts.clear();
  p.k_lengths = clamped_k_lengths(p, p.seed);
  if (p.packs_q) p.q_starts = drawn_starts(p, Tensor::Q, p.seed);
  if (p.packs_k) p.k_starts = drawn_starts(p, Tensor::K, p.seed);
  int longest = 0;
  for (int b = 0; b < p.B; b++) longest = std::max(longest, reference::sequence_of(p, b).Sk);
  return longest;
}

// Kinds of problems, in groups: counts how many a sweep has drawn, of all that this build supports.
class Kinds {
 public:
  Kinds() {
    const auto takes = [&](const char* group, const string& kinds) {
      size_t size = 0;
      for (size_t at = 0, end; at < kinds.size(); at = end + 1, size++) {
        end = std::min(kinds.find(' ', at), kinds.size());
        kinds_.push_back({group, kinds.substr(at, end - at)});
      }
      for (size_t i = kinds_.size() - size; i < kinds_.size(); i++) {
        kinds_[i].weight = int(size);
        number_of_.insert({kinds_[i].group + "=" + kinds_[i].name, i});
      }
    };
    string all_layouts, all_dists;
    for (const char* layout : layouts) all_layouts += takes_layout(layout) ? string(layout) + " " : "";
    for (const Dist& d : reference::dists) all_dists += takes_dist(d.name) ? string(d.name) + " " : "";
    takes("mask", "off br tl");
    takes("window", "none left right both");
    takes("aligned", "off br tl");
    takes("scale", "default set");
    takes("queries", "none_more more one");
    takes("keys", "none some");
    takes("batches", "1 more");
    takes("groups", "1 more");
    takes("batch_invariant", "0 1");
    takes("layout", all_layouts);
    takes("dist", all_dists);
    if (line.has_softcap) {
      takes("softcap", "none small usual large");
      const bool has_factors = element_bytes(line.query) == 1;
      if (!line.backward) takes("extremes", has_factors ? "scale_down scale_up scale_up_of_zeros" : "scale_down scale_up");
    }
    if (adds_bias() && !line.backward) takes("beside_bias", "scale_down scale_up");
    string alone = "none ", pairs, sets = "none ";
    for (const Feature& f : features()) {
      alone += f.name + string(" ");
      if (f.is_of_scores) sets += f.name + string(" ");
      for (const Feature* other = features().data(); other != &f; other++) {
        pairs += pair_name(*other, f) + " ";
        if (f.is_of_scores && other->is_of_scores) sets += pair_name(*other, f) + " ";
      }
    }
    takes("alone", alone);
    takes("pair", pairs);
    takes("scores", sets);
    if (keys_of_flush() > 0) takes("flushes", "none several of_ramps");
    if (has_stale_maximum() && takes_dist("ramps")) {
      takes("stale", sets);
      takes("start", has_few_bits() ? "0" : element_bytes(line.input) == 1 ? "-32 0 32" : "-inf -32768 -32 0 32 32768");
    }
    if (has_stale_maximum() && line.use_bias && takes_dist("ramps")) {
      takes("bias_of_stale", has_key_bias() ? "shared" : adds_bias() ? "add tree shared" : "bool tree shared");  // by all queries
    }
    // A polynomial replaces tanh between bounds that depend on the softcap.
    const bool has_polynomial = line.is_wgmma && line.tanh_is_approximate && line.use_bias == 0 && element_bytes(line.input) == 2;
    if (has_stale_maximum() && line.has_softcap) {
      takes("cap_of_stale", has_polynomial ? "30 50 100 200 small_jump large" : line.tanh_is_approximate ? "50 large" : "50");
    }
    if (has_stale_maximum() && has_polynomial) takes("cap_of_negative", "1e+08 1e+09");

    string of_far;
    for (const char* layout : {"far", "far_heads", "far_rows"}) {
      of_far += string(layout) + (line.use_bias ? "+bias " : element_bytes(line.input) == 1 ? "+factors " : " ");
      if (line.has_key_mask && layout == string("far")) of_far += "far+key_mask ";
      if (has_machines && has_stale_maximum() && takes_dist("ramps")) of_far += string(layout) + "+ramps ";
    }
    takes("distance", of_far);
    if (line.is_wgmma) {
      takes("D", "whole short");
      takes("Dv", "whole short");
    }
    if (line.has_queue) takes("max_ctas", "0 set");
    if (has_machines) {
      takes("machine", "default set");
      takes("summed", has_ranges() ? "64 200 65536" : "65536");
    }
    if (element_bytes(line.input) == 1) takes("descale", "heads gaps shared none zeros");
    // Tiles of one head with many queries, at the edge of a mask.
    if (packs_heads() && !line.has_lengths) takes("mask_of_packed", "none br tl");
    if (has_tiles_of_factors()) takes("factors_of_tile", "one several");
    if (line.has_sinks) takes("sinks", string("none usual -inf ") + (line.backward ? "" : "nonfinite ") + "large small");
    if (line.use_bias) {
      takes("bias", has_key_bias() ? "none add padding" : adds_bias() ? "none add tree" : "none bool tree");
      takes("bias_of", has_key_bias() ? "all b" : "all b h q bh bq hq bhq");
    }
    if (line.backward && adds_bias()) {
      takes("dbias_of", "none all b h q bh bq hq bhq");
      takes("dbias_keys", "kept summed");
    }
    if (line.use_bias) {
      takes("bias_rows", has_key_bias() ? "contiguous padded shifted batch_gaps odd" : "contiguous padded shifted batch_gaps head_gaps odd");
      takes("padded_keys", "whole tail");
    }
    if (line.has_key_mask && line.has_queue) takes("items_of_cta", "any of_equal_counts");
    if (line.has_key_mask) {
      takes("key_mask", "none right left scattered");
      takes("key_mask_of", "batch shared");
    }
    if (line.use_bias && line.has_bias_maps) {
      takes("bias_map", moves_rows_up() ? "none made kept made_moved kept_moved" : "none made kept");
      takes("rows_of_map", "contiguous padded shifted batch_gaps odd");
    }
    if (line.sees && line.has_bias_maps) takes("mask_map", "own kept");
    if (line.has_lengths) takes("q_lengths", "none some");
    if (takes_k_firsts()) takes("k_firsts", "none below_0 0 usual all");
    if (line.has_lengths) {
      takes("lengths", "none below_0 0 1 usual Sk above");
      takes("packed", line.has_pages ? "none q" : "none q k qk");
      takes("q_start", "below usual beyond empty");
      takes("rows_at_edge", "before at after");
      takes("keys_at_edge", "before at after");
      if (!line.has_pages) takes("k_start", "below usual beyond empty");
      takes("most_keys", "0 fewer longest more");
    }
    if (line.has_pages) {
      takes("page", line.has_small_pages ? "1 3 16 24 256" : "16 48 64 256");
      takes("table", "narrow wide");
      takes("entry", "below usual last beyond");
    }
  }
  // The number of kinds of which this problem would be the first, with larger weights in larger
  // groups.
  int count_new(const Problem& p, const Contents& c) const {
    std::set<size_t> found;
    for_each_kind(p, c, [&](size_t kind) { found.insert(kind); });
    int n = 0;
    for (size_t kind : found) n += kinds_[kind].count ? 0 : kinds_[kind].weight;
    return n;
  }
  bool has_all() const {
    return std::all_of(kinds_.begin(), kinds_.end(), [](const Kind& kind) { return kind.count > 0; });
  }
  void add(const Problem& p, const Contents& c) {
    for_each_kind(p, c, [&](size_t kind) { kinds_[kind].count++; });
  }
  void see(const SdpaParams& launched) {
    for_each_member(launched, [&](const string& name, const string& bytes) { values_[name].insert(bytes); });
    for_each_stride(launched, [&](const string& name, int64_t stride) {
      if (stride >= far_stride) far_.insert(name);
    });
  }

  // All kinds with their counts.
  string text() const {
    string text, group;
    for (const Kind& kind : kinds_) {
      if (kind.weight == 1) continue;  // all problems are of the only one of its group
      if (kind.group != group) text += (text.empty() ? "" : "; ") + (group = kind.group);
      text += " " + kind.name + ":" + to_string(kind.count);
    }
    return text;
  }
  // The missing kinds.
  string missing() const {
    string text;
    for (const Kind& kind : kinds_) text += kind.count ? "" : " " + kind.group + "=" + kind.name;
    return text;
  }
  // The strides in SdpaParams that were never far.
  string near_strides() const {
    string text;
    if (has_clock) return text;  // a GPU has no room for all of them
    for_each_stride(SdpaParams{}, [&](const string& name, int64_t) {
      if (has_key_bias() && (name == "bias_strides.head" || name == "bias_strides.row")) return;
      if (!is_fixed(name.substr(0, name.find('.'))) && !far_.count(name)) text += " far:" + name;
    });
    return text;
  }
  // The members of SdpaParams that never changed.
  string constant_members() const {
    string text;
    for_each_member(SdpaParams{}, [&](const string& name, const string& bytes) {
      auto values = values_.count(name) ? values_.at(name) : std::set<string>{};
      if (name == "Q" || name == "K" || name == "V" || name == "O" || name == "LSE" || name == "workspace" || name == "scratch") {
        values.insert(bytes);
      }
      if (!is_fixed(name) && values.size() < 2) text += " " + name;
    });
    return text;
  }

 private:
  struct Kind {
    string group, name;
    int weight = 0, count = 0;  // the size of its group; problems, or things in them
  };
  // Calls see() with the index of each kind that occurs in the problem.
  template <class See> void for_each_kind(const Problem& p, const Contents& c, const See& see) const {
    const auto add = [&](const char* group, const string& name) {
      const auto found = number_of_.find(group + ("=" + name));
      if (found != number_of_.end()) see(found->second);
    };
    constexpr const char* masks[] = {"off", "br", "tl"};
    const auto start_kind = [&](const vector<int>& starts, size_t b, int rows) {
      return starts[b] < 0 ? "below" : starts[b] > rows ? "beyond" : "usual";
    };
    const bool left = p.window_left >= 0, right = p.window_right >= 0;
    add("mask", masks[int(p.mask)]);
    add("window", left && right ? "both" : left ? "left" : right ? "right" : "none");
    if (left || right) add("aligned", masks[int(p.window_alignment)]);
    add("scale", p.scale == 0 ? "default" : "set");
    add("layout", p.layout);
    add("dist", p.dist);
    add("queries", p.Sq == 1 ? "one" : p.Sq > p.Sk ? "more" : "none_more");
    add("keys", p.Sk == 0 ? "none" : "some");
    add("batch_invariant", p.batch_invariant ? "1" : "0");
    add("batches", p.B == 1 ? "1" : "more");
    add("groups", p.Hq == p.Hkv ? "1" : "more");
    add("D", p.D == line.D ? "whole" : "short");
    add("Dv", p.Dv == line.Dv ? "whole" : "short");
    const string of_dims = p.bias_dims.substr(0, p.bias_dims.find_first_not_of("bhq"));
    add("softcap", p.softcap == 0 ? "none" : p.softcap < 1 ? "small" : p.softcap < 1000 ? "usual" : "large");
    const bool is_up = p.scale > 1e5, is_down = p.scale != 0 && p.scale < 1e-5;
    const bool has_scores = p.Sq > 0 && p.Sk > 1;  // else features change nothing
    if (has_scores && p.softcap != 0 && (is_down ? p.softcap > 1e5 : is_up && p.softcap < 1e-5)) {
      add("extremes", is_up ? "scale_up" : "scale_down");
      if (is_up && p.descale == "zeros" && p.B * p.Hkv > 1) add("extremes", "scale_up_of_zeros");
    }
    if (has_scores && !p.bias_kind.empty() && (is_up || is_down)) add("beside_bias", is_up ? "scale_up" : "scale_down");
    add("max_ctas", p.max_ctas ? "set" : "0");
    add("descale", p.descale);
    const bool fills_tile = p.Hq == p.Hkv && p.Sq > 64 && p.Sk > 64 && p.dist == "normal";
    add("mask_of_packed", fills_tile && p.mask != reference::Mask::none ? masks[int(p.mask)] : "none");
    add("factors_of_tile", shows_factors_of_tile(p) ? "several" : "one");
    add("machine", p.machine.empty() ? "default" : "set");
    add("summed", to_string(keys_at_once(p)));
    const bool has_tiles = p.mask == reference::Mask::none && !p.has_window() && p.Sk > 2 * line.tiles[0].block_n * line.tiles[0].split_kv;
    if (p.dist == "negative" && has_tiles) add("cap_of_negative", format("%g", p.softcap));
    if (const int keys = keys_of_flush()) add("flushes", p.Sk < keys ? "none" : p.Sk < 2 * keys ? "one" : p.dist == "ramps" ? "of_ramps" : "several");
    if (has_scores) add_features(p, add);
    if (has_scores && is_far(p.layout)) {
      const bool has_factors = element_bytes(line.input) == 1 && p.descale != "none";
      add("distance", p.layout + (!p.bias_kind.empty() ? "+bias" : has_factors ? "+factors" : ""));
      if (!has_few_bits() || overflows_by_ramp(p)) add("distance", p.layout + "+" + p.dist);
      if (!p.key_mask_kind.empty()) add("distance", p.layout + "+key_mask");
    }
    add("packed", *packed_text(p) ? packed_text(p) : "none");
    if (p.Sk > 0) add("bias", p.bias_kind.empty() ? "none" : p.bias_kind);  // without keys a tree is of none
    add("bias_of", of_dims.empty() ? "all" : of_dims);
    if (!p.bias_kind.empty()) add_bias(p, add);
    if (has_scores && line.backward && !p.bias_kind.empty()) {
      const auto names = [&](char c) { return p.bias_dims.find(c) != string::npos; };
      string kept;
      for (const char* dim : {"bB", "hH", "qQ"}) kept += names(dim[0]) != names(dim[1]) ? string(1, dim[0]) : "";
      add("dbias_of", !has_bias_gradient(p) ? "none" : kept.empty() ? "all" : kept);
      if (has_bias_gradient(p)) add("dbias_keys", names('K') ? "summed" : "kept");
    }
    if (p.Sk > 0) {
      const size_t comma = p.key_mask_kind.find(',');
      add("key_mask", p.key_mask_kind.empty() ? "none" : p.key_mask_kind.substr(0, comma));
      if (!p.key_mask_kind.empty()) add("key_mask_of", comma == string::npos ? "batch" : "shared");
    }
    add("items_of_cta", has_equal_counts(p) ? "of_equal_counts" : "any");
    add("mask_map", p.keeps_map ? "kept" : "own");
    if (line.has_lengths) add("q_lengths", p.has_q_lengths ? "some" : "none");
    if (takes_k_firsts() && !p.has_k_firsts) add("k_firsts", "none");
    for (int first : c.k_firsts) add("k_firsts", first < 0 ? "below_0" : first == 0 ? "0" : first < p.Sk ? "usual" : "all");
    if (!p.has_sinks) add("sinks", "none");
    for (float x : c.sinks) add("sinks", x == -INFINITY ? "-inf" : std::isnan(x) || x == INFINITY ? "nonfinite" : x == 100 ? "large" : x == -150 ? "small" : "usual");
    if (!p.has_lengths) add("lengths", "none");
    for (int n : c.lengths) {
      add("lengths", n < 0 ? "below_0" : n == 0 ? "0" : n > p.Sk ? "above" : n == p.Sk ? "Sk" : n == 1 ? "1" : "usual");
    }
    if (line.has_lengths) add_sequences(p, add);
    for (const bool of_q : {true, false}) {
      const vector<int>& starts = of_q ? c.q_starts : c.k_starts;
      for (size_t b = 0; b < starts.size(); b++) {
        add(of_q ? "q_start" : "k_start", start_kind(starts, b, of_q ? p.Sq : p.Sk));
        if (b > 0 && starts[b] == starts[b - 1]) add(of_q ? "q_start" : "k_start", "empty");
      }
    }
    if (line.has_lengths) {
      const int longest = longest_sequence(p);
      add("most_keys", p.most_keys == 0 ? "0" : p.most_keys == longest ? "longest" : p.most_keys < longest ? "fewer" : "more");
    }
    add("page", to_string(p.page_size));
    add("table", p.narrow_table ? "narrow" : "wide");
    const int pages = pages_of(p);
    for (int page : c.pages) add("entry", page < 0 ? "below" : page >= pages ? "beyond" : page == pages - 1 ? "last" : "usual");
  }

  // True if P of a head overflows relative to a stale maximum, so that its scores are recomputed.
  static bool overflows_by_ramp(const Problem& p) {
    const int heads = p.same_heads ? 1 : p.packs_k ? p.Hkv : p.B * p.Hkv;
    for (int head = 0; head < heads; head++) {
      if (ramp_of(p.seed, head).way == at_keys) return true;
    }
    return false;
  }
  // True if a CTA computes items of one head with equally many tiles but different first keys.
  static bool has_equal_counts(const Problem& p) {
    const bool is_band = p.mask != reference::Mask::none && p.window_left > 0 && p.window_left <= line.tiles[0].block_n;
    return !p.key_mask_kind.empty() && is_band && p.max_ctas == 1 && p.B * p.Hq == 1 && p.Sq == p.Sk &&
           p.Sq > 3 * line.tiles[0].block_m;
  }
  static string pair_name(const Feature& a, const Feature& b) { return a.name + string("+") + b.name; }
  // Adds the pairs of features of the problem, a feature that occurs alone, and the features that
  // change scores if there are one or two.
  template <class Add> static void add_features(const Problem& p, const Add& add) {
    vector<const Feature*> on, of_scores;
    for (const Feature& f : features()) {
      if (!f.is_on(p)) continue;
      for (const Feature* other : on) add("pair", pair_name(*other, f));
      on.push_back(&f);
      if (f.is_of_scores) of_scores.push_back(&f);
    }
    if (on.size() < 2) add("alone", on.empty() ? "none" : on[0]->name);
    if (of_scores.size() > 2) return;
    const string set = of_scores.empty()       ? "none"
                       : of_scores.size() == 1 ? of_scores[0]->name
                                               : pair_name(*of_scores[0], *of_scores[1]);
    add("scores", set);
    if (p.dist != "ramps" || p.mask != reference::Mask::none || p.has_window()) return;
    add("stale", set);
    const bool adds = !p.bias_kind.empty() && p.bias_kind != "bool";
    for (int head = 0; head < (p.same_heads ? 1 : p.packs_k ? p.Hkv : p.B * p.Hkv); head++) {
      const int start = start_of_ramp(p.seed, head, p.has_sinks, adds);
      const int beside_cap = kind_beside_cap(p, p.seed, head);
      if (beside_cap < 0) add("start", start == INT_MIN ? "-inf" : to_string(start));
      if (beside_cap == small_jumps && set == "softcap" && p.softcap >= 30) add("cap_of_stale", "small_jump");
    }
    if (set == "bias") add("bias_of_stale", p.bias_dims.find('q') == string::npos ? "shared" : p.bias_kind);
    if (set == "softcap") add("cap_of_stale", p.softcap < 1000 ? format("%g", p.softcap) : "large");
  }
  // Adds sequences that end next to the edge of a tile, with more rows of the tensor after them.
  template <class Add> static void add_sequences(Problem p, const Add& add) {
    if (p.has_lengths || p.most_keys) p.k_lengths = clamped_k_lengths(p, p.seed);
    if (p.has_q_lengths) p.q_lengths = drawn_q_lengths(p, p.seed);
    if (p.has_k_firsts) p.k_firsts = drawn_k_firsts(p, p.seed);
    if (p.packs_q) p.q_starts = drawn_starts(p, Tensor::Q, p.seed);
    if (p.packs_k) p.k_starts = drawn_starts(p, Tensor::K, p.seed);
    for (int b = 0; b < p.B; b++) {
      const reference::Sequence own = reference::sequence_of(p, b);
      const auto add_edge = [&](const char* group, int first, int rows, int all, int unit) {
        if (own.Sq == 0 || own.Sk == 0 || rows < unit - 1 || first + rows >= all) return;
        const int past = (rows + 1) % unit;
        if (past < 3) add(group, past == 0 ? "before" : past == 1 ? "at" : "after");
      };
      add_edge("rows_at_edge", own.first_query, own.Sq, p.Sq, rows_at_edge());
      add_edge("keys_at_edge", own.first_key, own.Sk, p.Sk, keys_at_edge());
    }
  }
  // Adds the layout of the bias, and whether K tiles are skipped by a map, made by the launch or
  // kept.
  template <class Add> static void add_bias(const Problem& p, const Add& add) {
    const BiasRows rows = bias_rows(p.layout);
    const bool is_tree = p.bias_kind == "tree";
    const int keys = is_tree ? std::min(p.Sq, p.Sk) : p.Sk;
    const bool has_batches = p.B > 1 && p.bias_dims.find('b') != string::npos;
    const bool has_heads = p.Hq > 1 && p.bias_dims.find('h') != string::npos;
    // Only one of the strides is unaligned.
    const char* const of_gaps = has_batches == has_heads ? "" : has_batches ? "batch_gaps" : "head_gaps";
    const bool is_copied_by_chunks = !is_tree && keys >= 2 * line.tiles[0].block_n;
    const string of_rows = !rows.gaps ? rows.name : is_copied_by_chunks ? of_gaps : "";
    add("bias_rows", of_rows);
    if (rows.unit > 1) add("padded_keys", keys % 16 ? "tail" : "whole");
    if (!line.has_bias_maps) return;
    const TunedTile t = line.is_tuned ? line.tile_of(params_of(p)) : line.tiles[0];
    const bool has_lists = t.split_ctas == 1 && t.use_warp_specialization, is_kept = p.bias_dims.find('m') != string::npos;
    const bool is_made = p.bias_dims.find('h') == string::npos && keys >= 16 * t.block_n * t.split_kv;
    const bool is_moved = moves_rows_up(t) && p.mask != reference::Mask::none && (p.Sq + 63) / 64 * 64 % t.block_m != 0;
    if (!has_lists || (!is_kept && !is_made)) return add("bias_map", "none");
    add("bias_map", string(is_kept ? "kept" : "made") + (is_moved ? "_moved" : ""));
    add("rows_of_map", of_rows);
  }
  // Tiles whose first warpgroups have no rows.
  static bool moves_rows_up(const TunedTile& t) { return t.block_m > 64 && t.split_kv == 1 && !t.use_ping_pong; }
  static bool moves_rows_up() { return std::any_of(line.tiles, line.tiles + line.tile_count, [](const TunedTile& t) { return moves_rows_up(t); }); }

  vector<Kind> kinds_;
  std::unordered_map<string, size_t> number_of_;  // of GROUP=NAME
  std::map<string, std::set<string>> values_;     // of each member of SdpaParams
  std::set<string> far_;                          // strides that were far in some launch
};
std::unique_ptr<Kinds> launched;

// ---- random problems ----

// Scales at the limits of floats, with a softcap at the opposite limit or with a bias. All logits
// are nearly 0, or are steps far larger than the bias.
template <class Draw> void draw_extremes(Problem& p, const Draw& draw) {
  const bool adds = adds_bias() && !p.bias_kind.empty();
  if (p.dist != "normal" || !(p.softcap != 0 || adds) || line.backward || draw(4)) return;
  const bool up = draw(2);
  const int digits = up ? 22 + draw(9) : 28 + draw(9);  // a float holds neither the scale over the softcap nor its inverse
  p.scale = up ? std::pow(10.0, digits) : std::pow(10.0, -digits);
  if (p.softcap != 0) p.softcap = up ? 1e-18 : 1e18;
  if (element_bytes(line.query) == 1 && draw(2)) p.descale = "zeros";
  // Scores may be 0 too. With a bias they are steps; logits are floats then and must be finite.
  if (up && takes_dist("stairs")) p.dist = "stairs";
  // The smallest bias of a type would absorb all steps of a row.
  if (up && adds) p.bias_kind = has_key_bias() ? "blocks" : "tree";
}

// Turns features off: none, all but one or two, or all but one or two of those that change scores.
template <class Draw> void keep_features(Problem& p, const Draw& draw) {
  const vector<Feature>& all = features();
  const int way = draw(3), first = draw(int(all.size())), second = draw(2) ? draw(int(all.size())) : first;
  for (int i = 0; i < int(all.size()); i++) {
    const bool is_kept = i == first || i == second;
    if (way != 0 && !is_kept && (way == 1 || all[i].is_of_scores)) all[i].turn_off(p);
  }
}

// Reduces the problem until the CPU backend takes a tenth of a second. Tiles of tuned builds require
// larger ones. wgmma takes less for a pair, since it multiplies a tile at once.
void limit_size(Problem& p, const TunedTile& tile) {
  const double of_tile = line.is_wgmma || line.backward ? 6e4 : 3e4;
  const double most_pairs = line.is_tuned ? 8e5 : of_tile * std::min(1.0, tile.block_m / 64.0);  // of a query and a key
  const double keys = p.Sk + 64;  // a query without keys also takes a CTA
  const auto is_too_large = [&] { return double(p.packs_q && p.packs_k ? 1 : p.B) * p.Hq * p.Sq * keys > most_pairs; };
  if (is_too_large() && !p.packs_q) p.B = 1;
  if (is_too_large()) {
    p.Hq /= p.Hkv;
    p.Hkv = 1;
  }
  if (is_too_large()) p.Sq = std::max(1, int(most_pairs / p.Hq / keys));
  if (is_too_large()) p.Sk = std::min(p.Sk, std::max(300, int(most_pairs / p.Hq)));  // many heads of one query
}

template <class Draw> Problem draw_problem(const Draw& draw, const TunedTile& tile, uint64_t seed) {
  const auto draw_size = [&](int unit) {  // half of them beside an edge of tiles or of 64 rows
    if (draw(2)) return draw(301);
    if (draw(2)) unit = 64;
    return (1 + draw(std::max(1, 300 / unit))) * unit - 1 + draw(3);
  };
  Problem p;
  constexpr const char* often[] = {"normal", "ramps"};
  p.dist = draw(2) ? often[draw(2)] : reference::dists[draw(int(reference::dists.size()))].name;
  if (!takes_dist(p.dist)) p.dist = line.fp16_acc ? "normal" : "outliers";
  const bool lasts = p.dist == "ramps" && draw(4);  // tiles without a mask, whose maximum may be stale
  p.seed = seed;
  p.B = 1 + draw(3);
  p.Hkv = 1 + draw(3);
  int ratio = 1 + draw(8);
  p.Sq = draw_size(tile.block_m);
  p.Sk = draw(4) ? draw_size(tile.block_n) : p.Sq;
  if (draw(8) == 0) p.Sq = 1;
  if (draw(16) == 0) p.Sk = 0;
  p.machine = draw_machine(draw);
  if (value_of_knob("SPLIT_CTAS") == "0" && draw(3) == 0) {
    p.Sq = 1 + draw(4);
    p.Sk = 1000 + draw(3001);
  }
  if (packs_heads()) {
    constexpr int ratios[] = {12, 24, 71};  // some larger than a tile
    if (draw(4) == 0) ratio = ratios[draw(3)];
    if (draw(3) == 0) {
      p.Sq = 1 + draw(4);
      p.Sk = 1000 + draw(4001);
    }
  }
  if (line.is_tuned && draw(4) == 0) {
    p.Sq = 256;
    p.Sk = 1200 + draw(1500);
    p.Hkv = ratio = 1;
  }
  if (lasts) {
    const int keys = tile.block_n * tile.split_kv;
    p.Sq = 1 + draw(30);
    p.Sk = std::max(300, 2 * keys) + draw(3 * keys);
    p.Hkv = 4 + draw(5);
    ratio = 1 + draw(2);
  }
  if (keys_of_flush() > 0 && draw(3) == 0) {
    p.Sq = 1 + draw(30);
    p.Sk = (2 + draw(2)) * keys_of_flush() + draw(100);
  }
  p.Hq = p.Hkv * ratio;
  p.mask = reference::Mask(lasts ? 0 : draw(3));
  if (!lasts && draw(3) == 0) {
    p.window_left = draw(5) ? draw(1 + draw(300)) : -1;
    p.window_right = draw(5) ? draw(1 + draw(300)) : -1;
    p.window_alignment = reference::Mask(draw(3));
  }
  if (line.has_softcap && draw(4)) p.softcap = draw(2) ? 2 : 50;
  p.layout = layouts[draw(6)];
  if (!takes_layout(p.layout)) p.layout = "padded";
  const bool far = draw(16) == 0;
  if (far) {
    p.layout = layouts[6 + draw(3)];
    p.B = p.layout == "far" ? line.has_pages ? 3 : 2 : 1;  // with the third, offsets by the int page_stride pass 2^31
    p.Hq = p.Hkv = p.layout == "far_heads" ? 2 : 1;
    if (p.layout == "far_rows") {
      // At most 36 GB on a GPU; the CPU backend allocates only memory that is written.
      p.Sq = 2 + draw(has_clock ? 2 : 20);
      p.Sk = has_clock ? 2 + draw(2) : std::min(p.Sk, 300);
    }
  }
  p.same_heads = p.layout == "zero";
  const int unit = std::max(8, line.vec_width);  // of widths
  if (line.is_wgmma && draw(2)) {
    p.D = unit * (1 + draw(line.D / unit));
    p.Dv = unit * (1 + draw(line.Dv / unit));
  }
  if (element_bytes(line.input) == 1) p.descale = descales[far || draw(2) ? 0 : draw(DESCALES)];
  p.has_sinks = line.has_sinks && p.dist != "negative" && draw(4);
  const bool exact = p.dist == "huge" || p.dist == "stairs", is_small = !exact && p.dist != "ramps" && p.dist != "large";
  const auto power_of_ten = [&](int least, int most) { return std::pow(10.0, least + draw(most - least + 1)); };
  if (p.softcap == 50 && is_small && draw(2)) p.softcap = power_of_ten(3, 18);
  constexpr int caps_of_stale[] = {2, 30, 50, 100, 200};
  if (p.softcap != 0 && p.dist == "negative" && draw(4)) p.softcap = power_of_ten(8, 9);
  // Logits up to 2^19, for which the exact tanh has an error of 2^-4 with large softcaps.
  const bool draws_large_cap = line.tanh_is_approximate && draw(3) == 0;
  if (p.softcap != 0 && p.dist == "ramps") p.softcap = draws_large_cap ? power_of_ten(3, 18) : caps_of_stale[draw(5)];
  if (p.softcap == 2 && is_small && draw(4) == 0) p.softcap = power_of_ten(-18, -1);
  if (line.use_bias && draw(4) && !exact) {
    constexpr const char* dims[] = {"", "b", "h", "q", "bh", "bq", "hq", "bhq"};
    p.bias_kind = draw(3) == 0 ? (has_key_bias() ? "padding" : "tree") : adds_bias() ? "add" : "bool";
    // The logit of an infinite score is the softcap. Beyond 10^5 adding a bias to it is inexact in floats.
    if (p.dist == "nonfinite" && p.bias_kind != "bool" && p.softcap > 1e5) p.softcap = 1e5;
    p.bias_dims = has_key_bias() ? dims[far || draw(2)] : far ? "bhq" : dims[draw(8)];
    if (has_key_bias() && !far && draw(3) == 0) p.Sk = 1000 + draw(2000);  // runs of hidden tiles
    if (line.has_bias_maps && draw(2)) p.bias_dims += "m";
    if (line.backward && adds_bias() && !far) {
      for (const char* dim : {"B", "H", "Q", "K"}) p.bias_dims += draw(3) ? "" : dim;
      if (draw(8) == 0) p.bias_dims += "N";
    }
    // Enough keys that the launch makes a map, and enough rows that two tiles of 192 are faster than five of 64.
    if (line.has_bias_maps && !far && draw(3) == 0) {
      p.Sq = 1 + draw(tile.block_m + 128);
      p.Sk = (16 + draw(8)) * tile.block_n * tile.split_kv + draw(100);
      p.B = p.Hkv = 1;
      p.Hq = 1 + draw(2);
    }
  }
  if (line.has_key_mask && draw(4)) {
    p.key_mask_kind = key_mask_kinds[draw(3)];
    if (!far && draw(4) == 0) p.key_mask_kind += ",shared";
    if (!far && draw(3) == 0) p.Sk = 1000 + draw(2000);  // runs of hidden tiles
  }
  p.keeps_map = line.sees && line.has_bias_maps && draw(2);
  p.has_lengths = line.has_lengths && draw(2);
  p.has_q_lengths = line.has_lengths && draw(2);
  p.has_k_firsts = takes_k_firsts() && draw(3) == 0;
  if (line.has_lengths && !far && draw(3)) {
    p.packs_q = draw(2);
    p.packs_k = draw(2) && !line.has_pages;
    p.B = 1 + draw(p.packs_q && p.packs_k ? 12 : 4);
  }
  // TMA strides are limited to 2^40 bytes, which excludes pages of 256 rows that are far apart.
  const bool largest = p.layout != "far_rows";
  constexpr int page_sizes[] = {16, 48, 64, 256}, small_page_sizes[] = {1, 3, 16, 24, 256};
  if (line.has_pages) p.page_size = line.has_small_pages ? small_page_sizes[draw(4 + largest)] : page_sizes[draw(3 + largest)];
  if (line.has_pages && far) p.Sk = std::min(p.Sk, 60 * p.page_size);  // no address space for more pages
  if (exact && !line.backward &&
      draw(2) == 0) {  // up to 1e10 or down to 1e-10; bf16's huge logits leave no room above
    float scale = 1;
    for (int digits = 4 + draw(7); digits > 0; digits--) scale *= 10;
    p.scale = draw(2) || (p.dist == "huge" && line.input == DType::bf16) ? 1 / scale : scale;
  }
  // Larger logits would measure the error of fp32: at 10^4 the last bit of S changes P by 1e-3.
  if (draw(4) == 0 && !exact && p.dist != "large" && p.dist != "ramps") p.scale = 0.05f * float(1 + draw(10));
  if (p.dist == "tiny") p.scale = TINY_SCALE;
  draw_extremes(p, draw);
  if (line.has_queue && draw(4) == 0) p.max_ctas = 1 + draw(5);
  const bool is_band = line.has_queue && !p.key_mask_kind.empty() && !far && draw(3) == 0;
  if (is_band) {
    p.B = p.Hq = p.Hkv = p.max_ctas = 1;
    p.Sq = p.Sk = 3 * tile.block_m + 1 + draw(tile.block_m / 2);
    p.mask = reference::Mask::bottom_right;
    p.window_left = 1 + draw(tile.block_n);
    p.window_right = -1;
  }
  if (line.has_pages) p.narrow_table = draw(2);
  bool is_longest = false;  // most_keys
  if (line.has_lengths) {
    const int longest = longest_sequence(p), fewer = longest > 1 ? 1 + draw(longest - 1) : 0;
    const int most_keys[] = {0, longest, fewer, p.Sk + 1 + draw(300)}, which = draw(4);
    p.most_keys = most_keys[which];
    is_longest = which == 1;
  }
  p.batch_invariant = draw(3) == 0;
  keep_features(p, draw);
  if (!far && !is_band) limit_size(p, tile);
  if (is_longest && p.most_keys) p.most_keys = longest_sequence(p);
  // With the maximum keys of a wide table, the partials of such builds take gigabytes, or are
  // refused.
  if (p.batch_invariant && has_ranges() && line.has_pages && !p.narrow_table && p.most_keys == 0) p.most_keys = p.Sk + 1;
  p.shape = format("%dx%dx%dx%dx%d", p.B, p.Hq, p.Hkv, p.Sq, p.Sk);
  return p;
}

// Random small problems that cover the whole contract; problem n of a seed and build is the same
// everywhere. Tuned lines cycle through their tiles. Of several candidates, takes the one with the
// most kinds that have not occurred.
Problem sweep_problem(uint64_t series, uint64_t n, Kinds& had) {
  const int most_candidates = had.has_all() ? 1 : 256, most_tries = 4000;
  uint64_t state = mix(mix(series + 11) + n);
  const auto draw = [&](int size) { return int((state = mix(state)) % uint64_t(size)); };
  const TunedTile& tile = line.tiles[(series + n) % line.tile_count];
  Problem best;
  int best_new = -1, candidates = 0;
  for (int tries = 0; tries < most_tries && candidates < most_candidates; tries++) {
    const Problem p = draw_problem(draw, tile, n);
    const bool is_candidate = !line.is_tuned || takes_tile(p, tile);
    const int count = is_candidate ? had.count_new(p, drawn_contents(p)) : -1;
    if (tries == 0 || count > best_new) {
      best = p;
      best_new = count;
    }
    candidates += is_candidate;
  }
  had.add(best, drawn_contents(best));
  return best;
}
// Draws `count` problems, and with `all_kinds` more until all kinds occur. Returns the kinds that
// were not drawn.
string draw_problems(uint64_t series, int count, bool all_kinds, vector<Problem>& problems) {
  Kinds had;
  for (int n = 0; n < count || (all_kinds && !had.has_all() && n < 8 * count + 16); n++) {
    problems.push_back(sweep_problem(series, n, had));
  }
  return all_kinds ? had.missing() : "";
}

// ---- edge cases ----

// Edge cases of a tile that random problems rarely contain.
void add_edges(vector<Problem>& problems, int rows, int keys) {
  using reference::Mask;
  const auto add = [&](vector<int> sizes, Mask mask = Mask::none, const char* dist = "normal") -> Problem& {
    Problem p;
    p.B = sizes[0];
    p.Hq = sizes[1];
    p.Hkv = sizes[2];
    p.Sq = sizes[3];
    p.Sk = sizes[4];
    p.mask = mask;
    p.dist = line.fp16_acc && string(dist) != "nonfinite" ? "normal" : dist;
    p.shape = format("%dx%dx%dx%dx%d", p.B, p.Hq, p.Hkv, p.Sq, p.Sk);
    p.seed = problems.size();
    p.softcap = line.has_softcap ? 20 : 0;
    p.has_sinks = line.has_sinks && p.dist != "negative";  // else the sink would outweigh all keys
    p.has_lengths = line.has_lengths;
    problems.push_back(p);
    return problems.back();
  };
  // The last key of a tile is missing, also in the second block of rows; O is the first or the last
  // visible row of V.
  for (Mask mask : {Mask::none, Mask::bottom_right}) {
    for (uint64_t seed : {0, 1}) add({1, 2, 1, rows + 3, 2 * keys - 1}, mask, "stairs").seed = seed;
  }
  // Rows and whole warpgroups without a visible key; a first key far from key 0; both edges in one
  // tile.
  constexpr int windows[][2] = {{0, 5}, {20, 0}, {33, 20}, {-1, 7}, {9, -1}};
  const int shapes[][2] = {{rows + 70, keys}, {40, keys + 150}, {rows + 3, rows + 50}};
  int turn = 0;
  for (Mask mask : {Mask::none, Mask::bottom_right, Mask::top_left}) {
    for (const auto& window : windows) {
      const auto& shape = shapes[turn++ % 3];
      Problem& p = add({1, 2, 1, shape[0], shape[1]}, mask, turn % 2 ? "normal" : "uniform");
      p.window_left = window[0];
      p.window_right = window[1];
      p.window_alignment = Mask(turn / 3 % 3);
    }
  }
  // Many rows and few keys; inf and NaN in several places; logits far below 0.
  add({1, 1, 1, 700, 40}, Mask::bottom_right);
  for (uint64_t seed : {1, 2, 3}) add({1, 4, 2, 20, 70}, Mask::none, "nonfinite").seed = seed;
  add({1, 2, 2, 40, 200}, Mask::top_left, "negative");
  // Stale row maxima that must be updated, in heads of all kinds; for e4m3 also after P @ V was
  // flushed.
  for (uint64_t seed = 0; seed < 3 && (line.is_tuned || value_of_knob("USE_LAZY_MAX") == "1"); seed++) {
    const int tiles = line.is_wgmma && line.input == DType::e4m3 && seed == 0 ? 21 : 5;
    Problem& p = add({1, 8, 8, 24, std::min(tiles * keys, 2600) + (seed == 1 ? 0 : 5)}, Mask::none, "ramps");
    p.seed = seed;
    p.softcap *= 2.5;
    p.has_lengths = false;
  }
  // For 8 bits: scores that are recomputed, with rows of several batches far apart; sums that are
  // flushed once, once plus one key, and twice.
  if (element_bytes(line.input) == 1) {
    Problem& p = add({2, 2, 1, 4, 300});
    p.layout = "far_rows";
    p.dist = "stairs";
    p.seed = 1;
    p.scale = 1.28f / line.D;
    for (int flushed : {1024, 1025, 2048, 2049}) add({1, 1, 1, 16, flushed}, Mask::none, "uniform");
  }
  if (line.family == string("scalar")) return;
  // Several splits, on GPUs with fewer and more CTAs than items, and with two CTAs per SM.
  const auto machine = [](const char* gpu, int keys) { return format("%s,%d", gpu, has_ranges() ? keys : 65536); };
  add({1, 3, 1, 40, 300}, Mask::none, "stairs").machine = machine("1,120,2", 64);
  add({1, 1, 1, rows, std::max(rows - 28, 1)}, Mask::bottom_right).machine = machine("3,120,1", 64);
  add({1, 3, 1, 40, 300}, Mask::bottom_right, "stairs").machine = machine("1,24,1", 64);
  add({1, 2, 1, 40, 300}, Mask::none, "negative").machine = machine("132,61440,3", 64);
  add({1, 2, 1, 40, 300}, Mask::bottom_right, "uniform").machine = machine("3,120,1", 200);
}
// Heads of a group that do not fit into a tile; splits of many keys.
void add_decode_edges(vector<Problem>& problems) {
  constexpr int shapes[][5] = {
      {2, 24, 2, 3, 70}, {1, 71, 1, 1, 90}, {2, 24, 1, 1, 1100}, {1, 8, 1, 1, 6000}, {1, 12, 1, 4, 1500}};
  for (const auto& s : shapes) {
    Problem p;
    p.B = s[0];
    p.Hq = s[1];
    p.Hkv = s[2];
    p.Sq = s[3];
    p.Sk = s[4];
    p.shape = format("%dx%dx%dx%dx%d", p.B, p.Hq, p.Hkv, p.Sq, p.Sk);
    p.mask = reference::Mask(problems.size() % 2);
    p.seed = problems.size();
    if (p.Sk > 1000) p.machine = "132,61440,1,65536";
    problems.push_back(p);
  }
}

vector<Problem> edge_problems() {
  vector<Problem> problems;
  const auto fewer_rows = [](const TunedTile& a, const TunedTile& b) { return a.block_m < b.block_m; };
  const TunedTile& t = *std::max_element(line.tiles, line.tiles + line.tile_count, fewer_rows);
  add_edges(problems, t.block_m, t.block_n * t.split_kv);
  if (packs_heads()) add_decode_edges(problems);
  return problems;
}

// ---- the command line ----

struct SweepOptions : Options {
  int sweep = 0;
  string not_drawn;  // kinds of problems, with all_kinds
  bool all_kinds = false, edges = false, alone = false, tile = false, last_head = false;
};

vector<Option> sweep_options(SweepOptions& o) {
  vector<Option> options = options_of(o);
  const vector<Option> more = {
      {"--sweep", "N", "N random problems instead, checked and not timed; --seeds picks the series",
       [&o](const string& text) {
         const vector<long long> n = parse_numbers(text, 1, 1000000);
         if (n.size() == 1) o.sweep = int(n[0]);
         return n.size() == 1 ? "" : "want a whole number from 1 to 1000000";
       }},
      {"--all-kinds", "",
       "with --sweep: more problems, until every kind that the build takes has occurred; else it fails",
       [&o](const string&) {
         o.all_kinds = true;
         return "";
       }},
      {"--edges", "", "problems at the edges of the line's tiles instead, checked and not timed",
       [&o](const string&) {
         o.edges = true;
         return "";
       }},
      {"--layout", "L",
       "layout of the tensors; zero: all heads of an input share one; reversed: rows and heads of inputs "
       "have negative strides; far, far_heads, far_rows: batches, heads or rows over 2^31 elements apart",
       [&o](const string& text) {
         string names;
         for (const char* name : layouts) {
           names += string(" ") + name;
           if (text == name) {
             o.common.layout = text;
             o.common.same_heads = text == "zero";
           }
         }
         return o.common.layout == text ? "" : "want one of" + names;
       },
       given(&Problem::layout)},
      {"--descale", "D",
       "descale factors of 8-bit inputs: heads: one per head; gaps: with gaps between them; zeros: some "
       "are 0; shared: one per tensor; none",
       [&o](const string& text) {
         for (const char* name : descales) {
           if (text == name) o.common.descale = text;
         }
         return o.common.descale == text ? "" : "want heads, gaps, zeros, shared or none";
       },
       given(&Problem::descale)},
      {"--narrow-table", "", "a table of pages for Sk keys and no more, with lengths above Sk",
       [&o](const string&) {
         o.common.narrow_table = true;
         return "";
       },
       given(&Problem::narrow_table)},
      {"--schedule", "S",
       "CPU backend: forward, reverse or random:SEED (default: the first two in turn)",
       set_schedule},
      {"--machine", "SMS,L2_KB,CTAS,KEYS",
       "CPU backend: SMs, KB of L2, maximum CTAs per SM and maximum keys per sum "
       "(default: 3,120,1,65536)",
       [&o](const string& text) {
         o.common.machine = text;
         return refuse_machine(text);
       },
       given(&Problem::machine)},
      {"--alone", "", "no chains of kernels",
       [&o](const string&) {
         o.alone = true;
         return "";
       }},
      {"--tile", "", "CPU backend: count what one more K/V tile costs, and stop",
       [&o](const string&) {
         o.tile = true;
         return "";
       }},
      {"--last-head", "",
       "CPU backend: check the gradients of a head over 2^31 elements behind the first, and stop",
       [&o](const string&) {
         o.last_head = true;
         return line.backward ? "" : "want a line of the backward pass";
       }}};
  options.insert(options.end(), more.begin(), more.end());
  return options;
}

string parse_sweep(const vector<Option>& options, const vector<string>& args, SweepOptions& o) {
  const string refusal = parse(options, args, o);
  if (!refusal.empty() || (!o.sweep && !o.edges)) return refusal;
  for (const Option& option : options) {
    const bool is_drawn = option.given || option.name == string("--shape");
    if (is_drawn && std::count(args.begin(), args.end(), option.name)) {
      return string("--sweep and --edges have their own problems; drop ") + option.name;
    }
  }
  o.check_only = o.shape_given = true;
  o.problems = o.edges ? edge_problems() : vector<Problem>();
  if (o.sweep) o.not_drawn = draw_problems(o.seeds.empty() ? 0 : o.seeds[0], o.sweep, o.all_kinds, o.problems);
  o.seeds.clear();  // each problem has its own
  return "";
}

}  // namespace
}  // namespace SDPA_NAMESPACE

#ifdef SWEEP_NO_MAIN
#define main sweep_main  // for tests/unit.cu
#endif
int main(int argc, char** argv) {
  using namespace SDPA_NAMESPACE;
  signal(SIGPIPE, SIG_IGN);
  make_tensor = make_placed_tensor;
  prepare_launch = [](const Problem& problem, const SdpaParams& p) {
    const SdpaParams far = spread_inputs(problem, p);
    if (launched) launched->see(far);
    return far;
  };
  check_more = [](Instance& instance) {
    if (!launched) return check_chain(instance);
    launched->add(instance.problem, contents_of(instance.params));
    // An eighth of a sweep's problems run in a chain, which costs three launches. A quarter run again, and all problems with
    // max_ctas, which the checked launch ignores. Problems of a backward pass always run again, by --repeats.
    const uint64_t turn = instance.problem.seed % 8;
    const std::string trouble = turn == 0 ? check_chain(instance) : "";
    const bool again = turn % 4 == 2 || instance.params.max_ctas > 0;
    return trouble.empty() && again && !line.backward ? instance.check_again() : trouble;
  };
  set_machine = play_machine;
  add_dists();
  SweepOptions o;
  const std::vector<Option> options = sweep_options(o);
  const std::string refusal = parse_sweep(options, {argv + 1, argv + argc}, o);
  if (!refusal.empty()) return refuse(refusal);
  if (o.tile) return finish(print_tile());
  if (o.last_head) return finish(check_last_head());
  if (!o.not_drawn.empty()) {
    fprintf(stderr, "%d problems have none of:%s\n", int(o.problems.size()), o.not_drawn.c_str());
    return finish(exit_wrong);
  }
  if (o.sweep) {
    launched.reset(new Kinds);
    if (!line.backward && !o.alone) o.repeats = 0;
  }
  if (o.edges || o.alone) check_more = [](Instance&) { return std::string(); };
  ExitCode exit = run(o, options);
  const auto taken = [&](const TunedTile& t) {
    return std::any_of(o.problems.begin(), o.problems.end(), [&](const Problem& p) { return takes_tile(p, t); });
  };
  const bool all_taken = line.is_tuned && std::all_of(line.tiles, line.tiles + line.tile_count, taken);
  if (o.sweep || o.edges) {
    const std::string missing = launched ? launched->missing() + launched->constant_members() + launched->near_strides() : "";
    fprintf(stderr, "%d of %d passed%s%s%s%s\n", o.passed, int(o.problems.size()), all_taken ? ", on every tile" : "",
            o.sweep && missing.empty() ? ", of every kind" : "", launched ? (": " + launched->text()).c_str() : "",
            missing.empty() ? "" : ("; missing:" + missing).c_str());
    const bool all = o.passed == int(o.problems.size()) && (all_taken || !line.is_tuned) && missing.empty();
    if (o.all_kinds && !all && exit == exit_pass) exit = exit_wrong;
  }
  return finish(exit);
}
#undef main
