// tools/stress.cu on the CPU backend, where a GPU's neighbours are not to be had: its comparison sees every
// bit, and the cases that are left pass.
#define USE_WMMA 1
#define USE_WMMA_PV 1
#define VEC_WIDTH 8
#define SYNC_POLICY 1
#define USE_CP_ASYNC 1
#define STAGES 2
#define BLOCK_M 64
#define BLOCK_N 64
#define USE_PERSISTENT_CTA 1
#define main stress_main
#include "../tools/stress.cu"
#undef main

#include <doctest/doctest.h>

using namespace SDPA_NAMESPACE;

// Compares n words with themselves, after the bits `flipped` of word `at` and of `more` behind it have
// changed.
static std::vector<uint32_t> compared(uint32_t n, uint32_t at, uint32_t flipped, uint32_t more) {
  std::vector<uint32_t> words(n);
  for (uint32_t i = 0; i < n; i++) words[i] = i * 2654435761u;
  DeviceArray<uint32_t> want(n), got(n), found(2);
  want.upload(words);
  for (uint32_t i = at; i <= at + more; i++) words[i] ^= flipped;
  got.upload(words);
  found.fill(0);
  launch_comparison({got.data(), want.data(), n, found.data()});
  for (uint32_t word : got.download()) CHECK(word == POISON);
  return found.download();
}

TEST_CASE("comparison") {
  using Found = std::vector<uint32_t>;
  CHECK(compared(5000, 0, 0, 0) == Found({0, 0}));
  CHECK(compared(5000, 4999, 1, 0) == Found({1, 4999}));
  CHECK(compared(5000, 0, 0x80000000, 0) == Found({1, 0}));  // 0.0 and -0.0 are different bits
  const Found many = compared(1025, 700, 0x10, 324);
  CHECK((many[0] == 325 && many[1] >= 700));
}

TEST_CASE("command_line") {
  const auto error = [](std::vector<const char*> words) {
    words.insert(words.begin(), "stress");
    return parse_options(int(words.size()), const_cast<char**>(words.data())).error;
  };
  CHECK(error({"--repeats", "20", "--save", "x"}) == "");
  CHECK(error({"--repeats", "0"}) == "--repeats 0: want a whole number from 1 to 999999");
  CHECK(error({"--repeats", "1.5"}) == "--repeats 1.5: want a whole number from 1 to 999999");
  CHECK(error({"--like"}) == "--like: its value is missing");
  CHECK(error({"--frob"}).find("--frob: no such option; it takes") == 0);
}

TEST_CASE("run") {
  Options o;
  o.repeats = 2;
  CHECK(run(o) == 0);
  o.save = "no/such/folder/bits";
  CHECK(run(o) == 3);
  o.save = "", o.like = "no_such_file";
  CHECK(run(o) == 3);
}
