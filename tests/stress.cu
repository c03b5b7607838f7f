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
#define STRESS_NO_MAIN
#include "../tools/stress.cu"

#include <doctest/doctest.h>

using namespace SDPA_NAMESPACE;

// Compares n words with themselves, after the bits `flipped` of word `at` and of `more` behind it have
// changed.
static std::vector<uint32_t> compared(uint32_t n, uint32_t at, uint32_t flipped, uint32_t more) {
  std::vector<uint32_t> words(n);
  for (uint32_t i = 0; i < n; i++) words[i] = i * 2654435761u;
  Guarded want("want", 4 * n), got("got", 4 * n), found("found", 8);
  want.store(words);
  for (uint32_t i = at; i <= at + more; i++) words[i] ^= flipped;
  got.store(words);
  found.fill(0);
  launch_comparison({got.data<uint32_t>(), want.data<uint32_t>(), n, found.data<uint32_t>()});
  for (uint32_t word : got.fetch<uint32_t>(4 * n)) CHECK(word == POISON);
  return found.fetch<uint32_t>(8);
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
  CHECK(stress({"--repeats", "0"}) == exit_usage);
  CHECK(stress({"--like"}) == exit_usage);
  CHECK(stress({"--shape", "small"}) == exit_usage);
}

TEST_CASE("run") {
  CHECK(stress({"--repeats", "2"}) == exit_pass);
  CHECK(stress({"--repeats", "2", "--save", "no/such/folder/bits"}) == exit_cuda);
  CHECK(stress({"--repeats", "2", "--like", "no_such_file"}) == exit_cuda);
  const char* const saved = "stress.bits";
  CHECK(stress({"--repeats", "2", "--save", saved}) == exit_pass);
  CHECK(stress({"--repeats", "2", "--like", saved}) == exit_pass);
  std::fstream file(saved);
  file.seekp(-2, std::ios::end).put('x');  // of the last digest
  file.close();
  CHECK(stress({"--repeats", "2", "--like", saved}) == exit_wrong);
  std::remove(saved);
}
