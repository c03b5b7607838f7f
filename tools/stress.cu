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
#define SDPA_NO_MAIN
#include "../sdpa.cu"

#include <chrono>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#ifndef SDPA_CONFIG_NAME
#define SDPA_CONFIG_NAME custom
#endif

namespace SDPA_NAMESPACE {
namespace {

using std::string;

struct Trouble {  // what ends the program, as a sentence
  string text;
};

void require(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw Trouble{string(what) + ": " + cudaGetErrorString(error)};
}

template <class T> class DeviceArray {
 public:
  explicit DeviceArray(size_t count) : bytes_(count * sizeof(T)) {
    require(cudaMalloc(&data_, bytes_ ? bytes_ : 1), "allocating memory on the GPU");
  }
  ~DeviceArray() { cudaFree(data_); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;

  T* data() const { return static_cast<T*>(data_); }
  void fill(int byte) { require(cudaMemset(data_, byte, bytes_), "filling memory on the GPU"); }
  void upload(const std::vector<T>& x) {
    require(cudaMemcpy(data_, x.data(), bytes_, cudaMemcpyHostToDevice), "copying to the GPU");
  }
  std::vector<T> download() const {  // waits for what was launched before
    std::vector<T> x(bytes_ / sizeof(T));
    require(cudaMemcpy(x.data(), data_, bytes_, cudaMemcpyDeviceToHost), "running the kernels");
    return x;
  }

 private:
  void* data_ = nullptr;
  size_t bytes_;
};

// ---- the problems ----

struct Problem {
  int B, Hq, Hkv, Sq, Sk;
  Causal causal;
  string name() const {
    const char* const masks[] = {"", "_br", "_tl"};
    char text[80];
    snprintf(text, sizeof text, "%dx%dx%dx%dx%d%s", B, Hq, Hkv, Sq, Sk, masks[int(causal)]);
    return text;
  }
};

#ifdef SDPA_SIMT  // as many tiles as the CPU backend gets through in a second
const Problem problems[] = {{1, 2, 2, 256, 256, Causal::off},
                            {2, 4, 2, 100, 177, Causal::bottom_right}};
#else
const Problem problems[] = {{1, 8, 8, 512, 512, Causal::off},
                            {2, 8, 2, 1000, 1777, Causal::bottom_right},
                            {1, 8, 8, 4096, 4096, Causal::bottom_right}};
#endif

// Sums of four bytes of a hash: logits of some width, and no two rows alike.
std::vector<Input> make_input(size_t elements, uint32_t seed) {
  std::vector<Input> x(elements);
  for (size_t i = 0; i < elements; i++) {
    uint32_t h = uint32_t(i) * 2654435761u ^ seed * 0x9e3779b9u;
    h = (h ^ h >> 16) * 0x85ebca6bu;
    h = (h ^ h >> 13) * 0xc2b2ae35u;
    h ^= h >> 16;
    const uint32_t sum = (h & 255) + (h >> 8 & 255) + (h >> 16 & 255) + (h >> 24);
    x[i] = rounded<Input>((float(sum) - 510.0f) / 148.0f);  // a standard deviation of 1
  }
  return x;
}

// ---- the comparison ----

constexpr uint32_t POISON =
    ~0u;  // two NaNs of O or one of LSE, which no kernel makes of such inputs

struct Comparison {
  uint32_t* got;
  const uint32_t* want;
  uint32_t words;
  uint32_t* found;  // [2], 0 at first: how many words differ; where one of them is
};

// Poisons what it has compared, so that a run that writes nothing is seen.
__global__ void compare_and_poison(Comparison c) {
  for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < c.words;
       i += gridDim.x * blockDim.x) {
    if (c.got[i] != c.want[i] && atomicAdd(&c.found[0], 1u) == 0) c.found[1] = i;
    c.got[i] = POISON;
  }
}

void launch_comparison(const Comparison& c) {
  cudaLaunchConfig_t launch{};
  launch.gridDim = dim3((c.words + 1023) / 1024), launch.blockDim = dim3(256);
  require(cudaLaunchKernelEx(&launch, compare_and_poison, c), "launching the comparison");
}

// A problem on the GPU with the bits of its first run.
class Run {
 public:
  Run(const Problem& p, int repeats)
      : p_(p),
        repeats_(repeats),
        rows_(size_t(p.B) * p.Hq * p.Sq),
        kv_elements_(size_t(p.B) * p.Hkv * p.Sk * Build::head_dim),
        o_words_(rows_ * Build::head_dim / 2),
        Q_(rows_ * Build::head_dim),
        K_(kv_elements_),
        V_(kv_elements_),
        got_(o_words_ + rows_),
        want_(o_words_ + rows_),
        found_(2 * size_t(repeats)) {
    constexpr int64_t D = Build::head_dim;
    Q_.upload(make_input(rows_ * D, 1));
    K_.upload(make_input(kv_elements_, 2));
    V_.upload(make_input(kv_elements_, 3));
    params_.Q = Q_.data(), params_.K = K_.data(), params_.V = V_.data();
    params_.O = reinterpret_cast<Output*>(got_.data());
    params_.LSE = reinterpret_cast<float*>(got_.data() + o_words_);
    params_.B = p.B, params_.Hq = p.Hq, params_.Hkv = p.Hkv, params_.Sq = p.Sq, params_.Sk = p.Sk;
    params_.D = int(D), params_.causal = p.causal;
    params_.q = params_.o = {p.Hq * p.Sq * D, p.Sq * D, D};
    params_.k = params_.v = {p.Hkv * p.Sk * D, p.Sk * D, D};
    workspace_.reset(new DeviceArray<unsigned char>(sdpa_workspace_bytes(params_)));
    workspace_->fill(0);
    params_.workspace = workspace_->data();

    got_.fill(0xff);
    launch();
    const std::vector<uint32_t> first = got_.download();
    for (size_t i = 0; i < first.size(); i++) {
      if (first[i] == POISON) throw Trouble{p.name() + ": the first run did not write " + where(i)};
      for (int byte = 0; byte < 4; byte++) {  // FNV-1a
        digest_ = (digest_ ^ (first[i] >> 8 * byte & 255)) * 0x100000001b3u;
      }
    }
    want_.upload(first);
    got_.fill(0xff);
  }

  // Runs again; returns a sentence about the first run whose bits differ, or nothing.
  string repeat(int max_ctas) {
    params_.max_ctas = max_ctas;
    found_.fill(0);
    for (int n = 0; n < repeats_; n++) {
      launch();
      launch_comparison(
          {got_.data(), want_.data(), uint32_t(o_words_ + rows_), found_.data() + 2 * size_t(n)});
    }
    const std::vector<uint32_t> differences = found_.download();
    for (int n = 0; n < repeats_; n++) {
      const uint32_t count = differences[2 * size_t(n)];
      if (count == 0) continue;
      return "run " + std::to_string(n + 1) + " differs from the first one in " +
             std::to_string(count) + " words, one of them " + where(differences[2 * size_t(n) + 1]);
    }
    return "";
  }

  string digest() const {
    char text[20];
    snprintf(text, sizeof text, "%016llx", (unsigned long long)digest_);
    return text;
  }

 private:
  void launch() {
    const SdpaStatus status = sdpa_forward(params_, /*stream=*/0);
    if (!status.ok()) throw Trouble{status.text};
  }
  string where(size_t word) const {
    const bool in_o = word < o_words_;
    const size_t D = Build::head_dim, row = in_o ? 2 * word / D : word - o_words_;
    const size_t S = p_.Sq, H = p_.Hq;
    char text[80];
    snprintf(text, sizeof text, "%s(b=%d,h=%d,q=%d", in_o ? "O" : "LSE", int(row / S / H),
             int(row / S % H), int(row % S));
    return text + (in_o ? ",d=" + std::to_string(2 * word % D) : string()) + ")";
  }

  const Problem p_;
  const int repeats_;
  const size_t rows_, kv_elements_, o_words_;
  DeviceArray<Input> Q_, K_, V_;
  DeviceArray<uint32_t> got_, want_;  // O, two elements a word, and behind it LSE
  DeviceArray<uint32_t> found_;       // a pair for each repeat; freeing it would wait for the hog
  std::unique_ptr<DeviceArray<unsigned char>> workspace_;
  SdpaParams params_{};
  uint64_t digest_ = 0xcbf29ce484222325u;
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

  explicit Hog(int ctas_) : ctas(ctas_), buffer_(size_t(ctas_) * HOG_CHUNKS * HOG_CHUNK) {
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
    const HogArgs args{buffer_.data(), stop_, moved_};
    cudaLaunchConfig_t launch{};
    launch.gridDim = dim3(ctas), launch.blockDim = dim3(HOG_THREADS), launch.stream = stream_;
    require(cudaLaunchKernelEx(&launch, hog, args), "launching the kernel beside");
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < ctas;) {
      if (moved_[i]) i++;
      if (std::chrono::steady_clock::now() - begin > std::chrono::seconds(20)) {
        throw Trouble{"the kernel beside did not start within 20 seconds"};
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
  DeviceArray<uint4> buffer_;
  void* shared_ = nullptr;
  volatile uint64_t *moved_, *stop_;  // in it
  cudaStream_t stream_ = nullptr;
};

// As Run::repeat(), beside the hog, which has started before and ends after: since stream 0 gets done, it
// was side by side.
string repeat_beside(Run& run, int repeats, const Problem& p) {
  int device = 0, sms = 0, ctas_per_sm = 0;
  require(cudaGetDevice(&device), "asking for the device");
  require(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device),
          "asking for the number of SMs");
  require(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&ctas_per_sm, kernel_facts({}).kernel, kernel_facts({}).threads,
                                                        kernel_facts({}).shared_bytes),
          "asking for occupancy");
  Hog hog(sms / 8);
  hog.start();
  const uint64_t moved_before = hog.moved();
  const auto begin = std::chrono::steady_clock::now();
  const string difference =
      run.repeat(Build::use_persistent_cta ? (sms - hog.ctas) * ctas_per_sm : 0);
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  const uint64_t moved = hog.moved() - moved_before;
  if (!hog.runs() || moved == 0) {
    throw Trouble{p.name() + ": the kernel beside did not run all the while; use fewer --repeats"};
  }
  hog.stop();
  fprintf(stderr,
          "stress: %s, %s: beside its %d runs, for %.3f s, %d CTAs on %d SMs moved %.1f GB\n",
          SDPA_TEXT(SDPA_CONFIG_NAME), p.name().c_str(), repeats, seconds, hog.ctas, sms,
          double(moved) * 1e-9);
  return difference;
}

#endif  // SDPA_SIMT

// ---- the program ----

struct Options {
  int repeats = 1000;
  string save, like;
  string error;  // one sentence
};

Options parse_options(int argc, char** argv) {
  Options o;
  for (int i = 1; i < argc; i++) {
    const string name = argv[i];
    if (name != "--repeats" && name != "--save" && name != "--like") {
      o.error = name + ": no such option; it takes --repeats N, --save FILE and --like FILE";
    } else if (i + 1 == argc) {
      o.error = name + ": its value is missing";
    } else if (name == "--repeats") {
      const string value = argv[++i];
      const bool digits = value.find_first_not_of("0123456789") == string::npos;
      o.repeats = digits ? number_of(value.c_str()) : -1;
      if (o.repeats < 1) o.error = name + " " + value + ": want a whole number from 1 to 999999";
    } else {
      (name == "--save" ? o.save : o.like) = argv[++i];
    }
    if (!o.error.empty()) break;
  }
  return o;
}

// The digest that `file` has of the problem.
string saved_digest(const string& file, const string& problem) {
  std::ifstream in(file);
  string name, digest;
  while (in >> name >> digest) {
    if (name == problem) return digest;
  }
  throw Trouble{file + " has no digest of " + problem + "; --save of the other build writes it"};
}

bool report(const string& name, const Problem& p, int repeats, const string& difference) {
  printf("%s,%s,%s,%d,%s\n", SDPA_TEXT(SDPA_CONFIG_NAME), name.c_str(), p.name().c_str(), repeats,
         difference.empty() ? "PASS" : "FAIL");
  fflush(stdout);
  if (!difference.empty()) {
    fprintf(stderr, "stress: %s, %s, %s: %s\n", SDPA_TEXT(SDPA_CONFIG_NAME), name.c_str(),
            p.name().c_str(), difference.c_str());
  }
  return difference.empty();
}

int run_problems(const Options& o) {
  bool same = true;
  string digests;
  for (const Problem& p : problems) {
    Run run(p, o.repeats);
    string difference = run.repeat(0);
    if (!o.like.empty() && run.digest() != saved_digest(o.like, p.name())) {
      difference = "the first run has other bits than that of the other build";
    }
    same &= report("alone", p, o.repeats, difference);
    if (!o.like.empty()) continue;
    digests += p.name() + ' ' + run.digest() + '\n';
    for (int max_ctas : {1, 3, 7}) {
      if (!Build::use_persistent_cta) break;
      same &= report("max_ctas_" + std::to_string(max_ctas), p, o.repeats, run.repeat(max_ctas));
    }
#ifndef SDPA_SIMT
    same &= report("beside", p, o.repeats, repeat_beside(run, o.repeats, p));
#endif
  }
  if (!o.save.empty() && !(std::ofstream(o.save) << digests).flush()) {
    throw Trouble{o.save + ": cannot be written"};
  }
  return same ? 0 : 1;
}

int run(const Options& o) {
  if (!o.error.empty()) {
    fprintf(stderr, "stress: %s\n", o.error.c_str());
    return 2;
  }
  int gpus = 0;
  if (cudaGetDeviceCount(&gpus) != cudaSuccess || gpus == 0) {
    fprintf(stderr, "stress: no CUDA GPU in this machine\n");
    return 77;
  }
  try {
    return run_problems(o);
  } catch (const Trouble& trouble) {
    fprintf(stderr, "stress: %s: %s\n", SDPA_TEXT(SDPA_CONFIG_NAME), trouble.text.c_str());
    return 3;
  }
}

}  // namespace
}  // namespace SDPA_NAMESPACE

int main(int argc, char** argv) {
  return SDPA_NAMESPACE::run(SDPA_NAMESPACE::parse_options(argc, argv));
}
