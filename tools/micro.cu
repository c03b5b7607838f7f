// What a round over a K/V tile costs the kernel of a line without a grid around it: one CTA alone, then as many as the
// GPU holds, each with one item, all on the same K and V, which stay in L2. A library, which `./run_all.sh micro` builds
// and calls: sdpa_micro() gives a JSON object, with [clocks of a round, clocks of an item besides] for one SM and for
// all. A clock is clock64's, counted right behind each load. On the CPU backend it counts instead: barriers, bytes from
// global memory and bank conflicts of a round.
#define SDPA_NO_MAIN
#include "../sdpa.cu"
#ifndef SDPA_SIMT
#include "../clock.cu"
#endif

#include <algorithm>
#include <string>

namespace SDPA_NAMESPACE {
namespace {

using B = Build;

struct Trouble {  // as a sentence
  std::string text;
};

void require(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw Trouble{std::string(what) + ": " + cudaGetErrorString(error)};
}

template <class... Values> std::string format(const char* text, Values... values) {
  char buffer[256];
  snprintf(buffer, sizeof buffer, text, values...);
  return buffer;
}

// One item to each of `heads`, of so many rounds, and memory for it.
SdpaParams make_problem(int heads, int rounds) {
  SdpaParams p{};
  p.B = p.Hkv = 1, p.Hq = heads, p.Sq = B::block_m, p.Sk = rounds * B::block_n * B::split_kv;
  p.D = B::head_dim;
  const int64_t q = int64_t(p.Sq) * p.D, k = int64_t(p.Sk) * p.D;
  p.q = p.o = {heads * q, q, p.D}, p.k = p.v = {k, k, p.D};
  const auto allocate = [](auto*& pointer, int64_t bytes) {
    void* memory;
    require(cudaMalloc(&memory, size_t(bytes)), "allocating memory");
    require(cudaMemset(memory, 0, size_t(bytes)), "clearing memory");
    pointer = static_cast<std::remove_reference_t<decltype(pointer)>>(memory);
  };
  allocate(p.Q, heads * q * int64_t(sizeof *p.Q)), allocate(p.O, heads * q * int64_t(sizeof *p.O));
  allocate(p.K, k * int64_t(sizeof *p.K)), allocate(p.V, k * int64_t(sizeof *p.V));
  allocate(p.workspace, int64_t(sdpa_workspace_bytes(p)) + 256);
  return p;
}

void launch(const SdpaParams& p) {
  const SdpaStatus status = sdpa_forward(p, nullptr);
  if (!status.ok()) throw Trouble{status.text};
}

void free_problem(const SdpaParams& p) {
  for (const void* memory : {(const void*)p.Q, (const void*)p.K, (const void*)p.V, (const void*)p.O,
                             (const void*)p.workspace}) {
    cudaFree(const_cast<void*>(memory));
  }
}

#ifdef SDPA_SIMT

simt::Counters count(int rounds) {
  const SdpaParams p = make_problem(1, rounds);
  simt::take_counters();
  launch(p);
  require(cudaDeviceSynchronize(), "running the kernel");
  free_problem(p);
  return simt::take_counters();
}

unsigned long long conflicts(const simt::Counters& counters) {
  unsigned long long sum = 0;
  for (const auto& site : counters.shared) sum += site.second.conflicts;
  return sum;
}

std::string measure() {
  const simt::Counters less = count(4), more = count(5);
  return format("{\"barriers\": %llu, \"global_bytes\": %llu, \"conflicts\": %llu}",
                (unsigned long long)(more.barriers - less.barriers),
                (unsigned long long)(more.global_bytes - less.global_bytes),
                conflicts(more) - conflicts(less));
}

#else

// Of a launch, the least of some series.
double clocks(int heads, int rounds) {
  constexpr int launches = 10, series = 5;
  const SdpaParams p = make_problem(heads, rounds);
  long long* counted;
  cudaEvent_t begin, end;
  require(cudaMallocManaged(&counted, 2 * sizeof *counted), "allocating memory");
  require(cudaEventCreate(&begin), "creating an event");
  require(cudaEventCreate(&end), "creating an event");
  double least = INFINITY;
  for (int i = 0; i < series; i++) {
    launch(p);  // warms up
    require(cudaEventRecord(begin), "recording an event");
    for (int n = 0; n < launches; n++) launch(p);
    require(cudaEventRecord(end), "recording an event");
    count_clocks<<<1, 1>>>(counted);
    require(cudaDeviceSynchronize(), "running the kernel");
    float ms = 0;
    require(cudaEventElapsedTime(&ms, begin, end), "reading an event");
    least = std::min(least, 1e6 * ms / launches * double(counted[0]) / double(counted[1]));
  }
  cudaFree(counted), free_problem(p);
  return least;
}

std::string round_and_item(int heads) {
  constexpr int few = 32, many = 96;
  const double less = clocks(heads, few), more = clocks(heads, many);
  const double round = (more - less) / (many - few);
  return format("[%.1f, %.1f]", round, less - few * round);
}

std::string measure() {
  const SdpaParams p = make_problem(1, 1);
  launch(p);
  require(cudaDeviceSynchronize(), "running the kernel");
  const KernelFacts facts = kernel_facts(p);
  const int sms = device_attribute(cudaDevAttrMultiProcessorCount, 1);
  int ctas_per_sm = 0;
  require(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&ctas_per_sm, facts.kernel, facts.threads,
                                                        facts.shared_bytes),
          "asking for the occupancy");
  free_problem(p);
  return "{\"one_sm\": " + round_and_item(1) +
         ", \"all_sms\": " + round_and_item(sms * ctas_per_sm) +
         format(", \"sms\": %d, \"ctas_per_sm\": %d, \"shared_bytes\": %zu}", sms, ctas_per_sm,
                facts.shared_bytes);
}

#endif

}  // namespace
}  // namespace SDPA_NAMESPACE

// Returns 0 with the object in text, or 1 with a sentence.
extern "C" int sdpa_micro(char* text, size_t bytes) {
  try {
    snprintf(text, bytes, "%s", SDPA_NAMESPACE::measure().c_str());
    return 0;
  } catch (const SDPA_NAMESPACE::Trouble& trouble) {
    snprintf(text, bytes, "%s", trouble.text.c_str());
    return 1;
  }
}
