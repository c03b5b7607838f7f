// Do the bits of the output depend on what else runs on the GPU? For each of a few problems one build of
// sdpa.cu runs once, and then again and again, alone, with fewer CTAs (USE_PERSISTENT_CTA=1) and beside a
// kernel that keeps an eighth of the SMs and the memory busy: O and LSE must have the bits of the first run.
// Whether those are right is for the line's own executable to say.
//   stress [--repeats N] [--save FILE | --like FILE]
//     --repeats N  runs of each case (default 1000)
//     --save FILE  write a digest of each problem's bits
//     --like FILE  of another build: run alone, and have the bits that it saved
// Prints config,case,problem,repeats,PASS|FAIL; `./run_all.sh stress` builds and runs it.
// exit: 0 the same bits everywhere, 1 other bits, 2 bad usage, 3 CUDA error, 77 no GPU
#define main sdpa_main
#include "../sdpa.cu"
#undef main

#include <chrono>

namespace SDPA_NAMESPACE {
namespace {

// ---- the problems ----

const struct {
  const char* shape;
  reference::Mask mask;
} stressed[] = {
#ifdef SDPA_SIMT  // as many tiles as the CPU backend gets through in a second
    {"1,2,2,256,256", reference::Mask::none}, {"2,4,2,100,177", reference::Mask::bottom_right}
#else
    {"1,8,8,512,512", reference::Mask::none},
    {"2,8,2,1000,1777", reference::Mask::bottom_right},
    {"1,8,8,4096,4096", reference::Mask::bottom_right}
#endif
};

string name_of(const Problem& p) {
  return p.shape + (p.mask == reference::Mask::none ? "" : string("_") + causal_names[int(p.mask)]);
}

// ---- the comparison ----

constexpr uint32_t POISON = ~0u;  // two NaNs of O or one of LSE, which no kernel makes of such inputs

struct BitComparison {
  uint32_t* got;
  const uint32_t* want;
  uint32_t words;
  uint32_t* found;  // [2], 0 at first: how many words differ; where one of them is
};

// Poisons what it has compared, so that a run that writes nothing is seen.
__global__ void compare_and_poison(BitComparison c) {
  for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < c.words; i += gridDim.x * blockDim.x) {
    if (c.got[i] != c.want[i] && atomicAdd(&c.found[0], 1u) == 0) c.found[1] = i;
    c.got[i] = POISON;
  }
}

void launch_comparison(const BitComparison& c) {
  cudaLaunchConfig_t launch{};
  launch.gridDim = dim3((c.words + 1023) / 1024), launch.blockDim = dim3(256);
  require(cudaLaunchKernelEx(&launch, compare_and_poison, c), "launching the comparison");
}

// A problem on the GPU with the bits of its first run.
class Repeated {
 public:
  Repeated(const Problem& p, int repeats)
      : repeats_(repeats),
        instance_(p),
        o_words_(rows_of(p, Tensor::O) * line.D / 2),
        words_(o_words_ + rows_of(p, Tensor::O)),
        got_("O and LSE", words_ * sizeof(uint32_t)),
        want_("the first O and LSE", got_.bytes),
        found_("what differs", 2 * sizeof(uint32_t) * repeats) {
    instance_.set_inputs(0);
    instance_.params.O = got_.data<Output>();
    instance_.params.LSE = reinterpret_cast<float*>(got_.data<uint32_t>() + o_words_);
    got_.fill(0xff);
    Instance::launch(instance_.params);
    const vector<uint32_t> first = got_.fetch<uint32_t>(got_.bytes);
    for (size_t i = 0; i < first.size(); i++) {
      if (first[i] == POISON) throw CudaError{name_of(p) + ": the first run did not write " + where(i)};
      digest_ = reference::mix(digest_ ^ first[i]);
    }
    want_.store(first);
    got_.fill(0xff);
  }

  // Runs again; returns a sentence about the first run whose bits differ, or nothing.
  string repeat(int max_ctas) {
    instance_.params.max_ctas = max_ctas;
    found_.fill(0);
    for (int n = 0; n < repeats_; n++) {
      Instance::launch(instance_.params);
      launch_comparison({got_.data<uint32_t>(), want_.data<uint32_t>(), uint32_t(words_),
                         found_.data<uint32_t>() + 2 * n});
    }
    const vector<uint32_t> differences = found_.fetch<uint32_t>(found_.bytes);
    for (int n = 0; n < repeats_; n++) {
      if (!differences[2 * n]) continue;
      return format("run %d differs from the first one in %u words, one of them ", n + 1, differences[2 * n]) +
             where(differences[2 * n + 1]);
    }
    return "";
  }

  string digest() const { return format("%016llx", (unsigned long long)digest_); }

 private:
  string where(size_t word) const {
    return word < o_words_ ? "O" + instance_.where(2 * word) : "LSE" + instance_.where((word - o_words_) * line.D);
  }

  const int repeats_;
  Instance instance_;
  const size_t o_words_, words_;
  Guarded got_, want_;  // O, two elements a word, and behind it LSE
  Guarded found_;       // a pair for each repeat; freeing it would wait for the hog
  uint64_t digest_ = 0;
};

// ---- the kernel beside ----

#ifndef SDPA_SIMT  // where launches never overlap

struct HogArgs {
  uint4* buffer;
  volatile uint64_t* stop;   // in host memory, like the counters
  volatile uint64_t* moved;  // [CTAs] bytes read and written
};

constexpr int HOG_THREADS = 1024;
constexpr uint32_t HOG_CHUNK = 64 * HOG_THREADS;  // vectors between two looks at `stop`: 1 MB
constexpr uint32_t HOG_CHUNKS = 32;               // of a CTA: 16 CTAs have ten times an H200's L2
constexpr long long HOG_NS = 100ll * 1000 * 1000 * 1000;  // then it ends by itself

// Reads and writes its part of the buffer over and over.
__global__ void __launch_bounds__(HOG_THREADS) hog(HogArgs a) {
  const auto now_ns = [] {
    long long ns;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
    return ns;
  };
  uint4* const part = a.buffer + size_t(blockIdx.x) * HOG_CHUNKS * HOG_CHUNK;
  const long long begin = now_ns();
  uint64_t moved = 0;
  for (uint32_t chunk = 0;; chunk = (chunk + 1) % HOG_CHUNKS) {
    const bool over = threadIdx.x == 0 && (*a.stop || now_ns() - begin > HOG_NS);
    if (__syncthreads_or(over)) return;
#pragma unroll 8
    for (uint32_t i = threadIdx.x; i < HOG_CHUNK; i += HOG_THREADS) {
      uint4 x = part[chunk * HOG_CHUNK + i];
      x.x++;
      part[chunk * HOG_CHUNK + i] = x;
    }
    moved += 2 * sizeof(uint4) * HOG_CHUNK;
    if (threadIdx.x == 0) a.moved[blockIdx.x] = moved;
  }
}

class Hog {
 public:
  const int ctas;

  explicit Hog(int ctas_) : ctas(ctas_), buffer_("the kernel beside", ctas_ * HOG_CHUNKS * sizeof(uint4) * HOG_CHUNK) {
    require(cudaHostAlloc(&shared_, (1 + ctas) * sizeof(uint64_t), cudaHostAllocMapped),
            "allocating memory that the GPU and the host share");
    moved_ = static_cast<uint64_t*>(shared_), stop_ = moved_ + ctas;
    // Launches on stream 0 do not wait for those on such a stream.
    require(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "creating a stream");
  }
  ~Hog() {
    *stop_ = 1;
    cudaStreamSynchronize(stream_);
    cudaStreamDestroy(stream_);
    cudaFreeHost(shared_);
  }
  Hog(const Hog&) = delete;
  Hog& operator=(const Hog&) = delete;

  void start() {  // comes back when all of its CTAs run
    *stop_ = 0;
    for (int i = 0; i < ctas; i++) moved_[i] = 0;
    const HogArgs args{buffer_.data<uint4>(), stop_, moved_};
    cudaLaunchConfig_t launch{};
    launch.gridDim = dim3(ctas), launch.blockDim = dim3(HOG_THREADS), launch.stream = stream_;
    require(cudaLaunchKernelEx(&launch, hog, args), "launching the kernel beside");
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < ctas;) {
      if (moved_[i]) i++;
      if (std::chrono::steady_clock::now() - begin > std::chrono::seconds(20)) {
        throw CudaError{"the kernel beside did not start within 20 seconds"};
      }
    }
  }
  uint64_t moved() const {
    uint64_t sum = 0;
    for (int i = 0; i < ctas; i++) sum += moved_[i];
    return sum;
  }
  bool runs() const {
    const cudaError_t state = cudaStreamQuery(stream_);
    if (state != cudaErrorNotReady) require(state, "running the kernel beside");
    return state == cudaErrorNotReady;
  }
  void stop() {
    *stop_ = 1;
    require(cudaStreamSynchronize(stream_), "ending the kernel beside");
  }

 private:
  const Guarded buffer_;
  void* shared_ = nullptr;
  volatile uint64_t *moved_, *stop_;  // in it
  cudaStream_t stream_ = nullptr;
};

// As Repeated::repeat(), beside the hog, which has started before and ends after: since stream 0 gets done, it was side
// by side.
string repeat_beside(Repeated& repeated, int repeats, const Problem& p) {
  const int sms = device_attribute(cudaDevAttrMultiProcessorCount, 0);
  const int ctas_per_sm = resources_of(line.facts_of({})).ctas_per_sm;
  Hog hog(sms / 8);
  hog.start();
  const uint64_t moved_before = hog.moved();
  const auto begin = std::chrono::steady_clock::now();
  const string difference = repeated.repeat(line.has_queue ? (sms - hog.ctas) * ctas_per_sm : 0);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  const uint64_t moved = hog.moved() - moved_before;
  if (!hog.runs() || moved == 0) {
    throw CudaError{name_of(p) + ": the kernel beside did not run all the while; use fewer --repeats"};
  }
  hog.stop();
  fprintf(stderr, "stress: %s, %s: beside its %d runs, for %.3f s, %d CTAs on %d SMs moved %.1f GB\n", line.name,
          name_of(p).c_str(), repeats, seconds, hog.ctas, sms, double(moved) * 1e-9);
  return difference;
}

#endif  // SDPA_SIMT

// ---- the program ----

struct StressOptions : Options {
  string save, like;
  StressOptions() { repeats = 1000; }
};

vector<Option> stress_options(StressOptions& o) {
  const auto text = [](string& value) { return [&value](const string& word) { return value = word, ""; }; };
  vector<Option> options = {{"--save", "FILE", "", text(o.save)}, {"--like", "FILE", "", text(o.like)}};
  for (const Option& option : options_of(o)) {
    if (option.name == string("--repeats")) options.push_back(option);
  }
  return options;
}

// The digest that `file` has of the problem.
string saved_digest(const string& file, const string& problem) {
  std::ifstream in(file);
  string name, digest;
  while (in >> name >> digest) {
    if (name == problem) return digest;
  }
  throw CudaError{file + " has no digest of " + problem + "; --save of the other build writes it"};
}

bool report(const string& name, const Problem& p, int repeats, const string& difference) {
  const char* const check = difference.empty() ? "PASS" : "FAIL";
  printf("%s,%s,%s,%d,%s\n", line.name, name.c_str(), name_of(p).c_str(), repeats, check);
  fflush(stdout);
  if (!difference.empty()) {
    fprintf(stderr, "stress: %s, %s, %s: %s\n", line.name, name.c_str(), name_of(p).c_str(), difference.c_str());
  }
  return difference.empty();
}

ExitCode run_stress(const StressOptions& o) {
  bool same = true;
  string digests;
  for (const auto& of : stressed) {
    Problem p;
    parse_shape(of.shape, p), p.mask = of.mask;
    Repeated repeated(p, o.repeats);
    string difference = repeated.repeat(0);
    if (!o.like.empty() && repeated.digest() != saved_digest(o.like, name_of(p))) {
      difference = "the first run has other bits than that of the other build";
    }
    same &= report("alone", p, o.repeats, difference);
    if (!o.like.empty()) continue;
    digests += name_of(p) + ' ' + repeated.digest() + '\n';
    for (int max_ctas : {1, 3, 7}) {
      if (line.has_queue) same &= report("max_ctas_" + to_string(max_ctas), p, o.repeats, repeated.repeat(max_ctas));
    }
#ifndef SDPA_SIMT
    same &= report("beside", p, o.repeats, repeat_beside(repeated, o.repeats, p));
#endif
  }
  if (!o.save.empty() && !(std::ofstream(o.save) << digests).flush()) throw CudaError{o.save + ": cannot be written"};
  return same ? exit_pass : exit_wrong;
}

int stress(const vector<string>& args) {
  StressOptions o;
  const string refusal = parse(stress_options(o), args, o);
  if (!refusal.empty()) return refuse(refusal);
  try {
    const Device device = find_device();
    if (device.missing.empty()) return run_stress(o);
    fprintf(stderr, "stress: %s\n", device.missing.c_str());
    return exit_skipped;
  } catch (const CudaError& error) {
    fprintf(stderr, "stress: %s: %s\n", line.name, error.text.c_str());
    return exit_cuda;
  }
}

}  // namespace
}  // namespace SDPA_NAMESPACE

#ifndef STRESS_NO_MAIN  // tests/stress.cu has one of its own
int main(int argc, char** argv) { return SDPA_NAMESPACE::stress({argv + 1, argv + argc}); }
#endif
