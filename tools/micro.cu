// What a round over a K/V tile costs the kernel of a line without a grid around it: one CTA alone, then as many as the
// GPU holds, each with one item, all on the same K and V, which stay in L2. A library for `./run_all.sh micro`:
// sdpa_micro() gives a JSON object, with [clocks of a round, clocks of an item besides] for one SM and for all. A clock
// is clock64's, counted right behind each load. On the CPU backend it counts what a round does instead.
#define main sdpa_main
#include "../sdpa.cu"
#undef main

namespace SDPA_NAMESPACE {
namespace {

// One item to each of `heads`, of so many rounds, on inputs of zeros.
struct OneItemEach : Instance {
  OneItemEach(int heads, int rounds) : Instance(sizes(heads, rounds)) {
    for (auto& tensor : tensors) tensor->fill(0);
  }
  static Problem sizes(int heads, int rounds) {
    Problem p;
    p.B = p.Hkv = 1, p.Hq = heads;
    p.Sq = Build::block_m, p.Sk = rounds * Build::block_n * Build::split_kv;
    return p;
  }
};

#ifdef SDPA_SIMT

simt::Counters count(int rounds) {
  OneItemEach items(1, rounds);
  simt::take_counters();
  Instance::launch(items.params);
  require(cudaDeviceSynchronize(), "running the kernel");
  return simt::take_counters();
}

string measure() {
  const simt::Counters less = count(4), more = count(5);
  unsigned long long conflicts = 0;
  for (const auto& site : more.shared) conflicts += site.second.conflicts;
  for (const auto& site : less.shared) conflicts -= site.second.conflicts;
  return format("{\"barriers\": %llu, \"global_bytes\": %llu, \"conflicts\": %llu}",
                (unsigned long long)(more.barriers - less.barriers),
                (unsigned long long)(more.global_bytes - less.global_bytes), conflicts);
}

#else

// Of a launch, the least of some series.
double clocks(int heads, int rounds) {
  constexpr int launches = 10, series = 5;
  OneItemEach items(heads, rounds);
  const Guarded counted("the clock", 2 * sizeof(long long));
  cudaEvent_t begin, end;
  require(cudaEventCreate(&begin), "creating an event");
  require(cudaEventCreate(&end), "creating an event");
  double least = INFINITY;
  for (int i = 0; i < series; i++) {
    Instance::launch(items.params);  // warms up
    require(cudaEventRecord(begin), "recording an event");
    for (int n = 0; n < launches; n++) Instance::launch(items.params);
    require(cudaEventRecord(end), "recording an event");
    count_clocks<<<1, 1>>>(counted.data<long long>());
    require(cudaDeviceSynchronize(), "running the kernel");
    const vector<long long> cycles_and_ns = counted.fetch<long long>(counted.bytes);
    float ms = 0;
    require(cudaEventElapsedTime(&ms, begin, end), "reading an event");
    least = std::min(least, 1e6 * ms / launches * double(cycles_and_ns[0]) / double(cycles_and_ns[1]));
  }
  return least;
}

string measure() {
  const auto round_and_item = [](int heads) {
    constexpr int few = 32, many = 96;
    const double less = clocks(heads, few), round = (clocks(heads, many) - less) / (many - few);
    return format("[%.1f, %.1f]", round, less - few * round);
  };
  const KernelFacts facts = line.facts_of(OneItemEach(1, 1).params);
  const int sms = sm_count(), ctas_per_sm = resources_of(facts).ctas_per_sm;
  return format("{\"one_sm\": %s, \"all_sms\": %s, \"sms\": %d, \"ctas_per_sm\": %d}", round_and_item(1).c_str(),
                round_and_item(sms * ctas_per_sm).c_str(), sms, ctas_per_sm);
}

#endif

}  // namespace
}  // namespace SDPA_NAMESPACE

// Returns 0 with the object in text, or 1 with a sentence.
extern "C" int sdpa_micro(char* text, size_t bytes) {
  try {
    snprintf(text, bytes, "%s", SDPA_NAMESPACE::measure().c_str());
    return 0;
  } catch (const SDPA_NAMESPACE::CudaError& error) {
    snprintf(text, bytes, "%s", error.text.c_str());
    return 1;
  }
}
