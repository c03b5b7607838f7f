// Measures the time of a kernel.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "check.h"
#include "device.h"

namespace SDPA_NAMESPACE {
namespace {

struct Timing {
  double p50_us = 0, p90_us = 0, p99_us = 0, min_us = 0, graph_us = 0, graph_lo_us = 0,
         graph_hi_us = 0, cold_us = 0, clock_mhz = 0;
  string trouble;  // a sentence if results during timing differ from those of the checked run
};

inline double percentile(vector<double> samples, double fraction) {  // nearest rank
  std::sort(samples.begin(), samples.end());
  const double rank = std::ceil(fraction * double(samples.size()));
  return samples[size_t(std::max(1.0, rank)) - 1];
}
// Of n samples, the number that are below a 95% confidence interval of the median. As many are above it.
// Ranks within 1.96 standard deviations of a binomial(n, 1/2) from the middle are inside (David and
// Nagaraja, Order Statistics, 7.1).
inline size_t outside_of_interval(size_t n) {
  return size_t(std::max(0.0, (double(n) - 1.96 * std::sqrt(double(n))) / 2));
}

#ifdef SDPA_SIMT
Timing time_kernel(Instance&, int, int) { return {}; }
#else

// Measures the cycles of one SM and the nanoseconds of the same interval of about 300 us.
__global__ void count_clocks(long long* cycles_and_ns) {
  const auto now_ns = [] {
    long long ns;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
    return ns;
  };
  const long long ns = now_ns(), cycles = clock64();
  while (now_ns() - ns < 300000) {
  }
  cycles_and_ns[0] = clock64() - cycles;
  cycles_and_ns[1] = now_ns() - ns;
}

class Timer {
 public:
  Timing t;

  explicit Timer(Instance& instance)
      : instance_(instance), clocks_("the clock", 2 * sizeof(long long)) {
    require(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "creating a stream");
    require(cudaEventCreate(&begin_), "creating an event");
    require(cudaEventCreate(&end_), "creating an event");
  }
  ~Timer() {
    cudaEventDestroy(begin_);
    cudaEventDestroy(end_);
    cudaStreamDestroy(stream_);
  }

  // Times each launch with a pair of events, then launches a few times back to back.
  void time_launches(int warmup, int iterations) {
    vector<double> us;
    checked("in the last of several launches differs", [&] {
      for (int i = 0; i < warmup; i++) launch();
      for (int i = 0; i < iterations; i++) us.push_back(time_us([&] { launch(); }));
      for (int i = 0; i < 3; i++) launch();
    });
    t.p50_us = percentile(us, 0.5);
    t.p90_us = percentile(us, 0.9);
    t.p99_us = percentile(us, 0.99);
    t.min_us = percentile(us, 0);
  }

  // Times graphs of 20 launches: the time of a kernel without launch overhead.
  void time_graph(int least_replays) {
    constexpr int launches = 20, most_replays = 1000;
    // An H200 lowers its clock as it warms up. Replays of 0.1 s before the measured ones reduce the
    // spread between processes from 1% to 0.3%.
    constexpr double warm_up_us = 100e3, replayed_us = 30e3;
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    require(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "capturing a graph");
    for (int i = 0; i < launches; i++) launch();
    require(cudaStreamEndCapture(stream_, &graph), "capturing a graph");
    require(cudaGraphInstantiate(&executable, graph, 0), "instantiating a graph");
    const auto replay = [&] { require(cudaGraphLaunch(executable, stream_), "replaying a graph"); };
    vector<double> us;
    checked("in the last replay of the graph differs", [&] {
      for (double spent = 0; spent < warm_up_us;) spent += time_us(replay);
      double spent = 0;
      for (int i = 0; i < least_replays || (spent < replayed_us && i < most_replays); i++) {
        us.push_back(time_us(replay) / launches);
        spent += us.back() * launches;
      }
      replay();
      t.clock_mhz = clock_mhz();  // right after the load, before the clock rises again
    });
    std::sort(us.begin(), us.end());
    const size_t skipped = outside_of_interval(us.size());
    t.graph_us = percentile(us, 0.5);
    t.graph_lo_us = us[skipped];
    t.graph_hi_us = us[us.size() - 1 - skipped];
    require(cudaGraphExecDestroy(executable), "destroying a graph");
    require(cudaGraphDestroy(graph), "destroying a graph");
  }

  // Times launches with a cold L2 cache.
  void time_cold(int iterations) {
    const size_t bytes = 4 * size_t(device_attribute(cudaDevAttrL2CacheSize, 0)) + (32 << 20);
    const Guarded other("the buffer that flushes L2", bytes);
    vector<double> us;
    checked("in the last launch with a cold L2 differs", [&] {
      for (int i = 0; i < iterations; i++) {
        require(cudaMemsetAsync(other.data(), i, bytes, stream_), "flushing L2");
        us.push_back(time_us([&] { launch(); }));
      }
    });
    t.cold_us = percentile(us, 0.5);
  }

 private:
  void launch() { instance_.launch_pass(stream_); }

  // Runs a series of launches. The results of the last one must be bitwise equal to the checked
  // run.
  template <class Series> void checked(const char* sentence, const Series& series) {
    instance_.poison();
    require(cudaDeviceSynchronize(), "poisoning the outputs");  // poison() uses another stream
    series();
    if (t.trouble.empty()) t.trouble = instance_.check_last(sentence);
  }
  // Returns the GPU time of work() in microseconds.
  template <class Work> double time_us(const Work& work) {
    require(cudaEventRecord(begin_, stream_), "recording an event");
    work();
    require(cudaEventRecord(end_, stream_), "recording an event");
    require(cudaEventSynchronize(end_), "running the kernel");
    float ms = 0;
    require(cudaEventElapsedTime(&ms, begin_, end_), "reading an event");
    return 1e3 * ms;
  }
  double clock_mhz() {
    // clang-format off: it splits >>> in a header
    count_clocks<<<1, 1, 0, stream_>>>(clocks_.data<long long>());
    // clang-format on
    require(cudaStreamSynchronize(stream_), "reading the clock");
    const vector<long long> c = clocks_.fetch<long long>(clocks_.bytes);
    return c[1] ? 1e3 * double(c[0]) / double(c[1]) : 0;
  }

  Instance& instance_;
  const Guarded clocks_;
  cudaStream_t stream_;
  cudaEvent_t begin_, end_;
};

Timing time_kernel(Instance& instance, int warmup, int iterations) {
  Timer timer(instance);
  timer.time_launches(warmup, iterations);
  timer.time_graph(std::min(iterations, 15));
  timer.time_cold(std::min(iterations, 20));
  if (timer.t.trouble.empty()) {
    timer.t.trouble = instance.check_again("in the run after timing differs");
  }
  return timer.t;
}
#endif  // SDPA_SIMT

}  // namespace
}  // namespace SDPA_NAMESPACE
