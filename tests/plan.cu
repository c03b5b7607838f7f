// The plan of builds with USE_LENGTHS: its memory, and its work items for more and longer sequences
// than the CPU backend could compute, since no key is read. Several builds and rows of the table
// are called with a kernel that only records its work items. The expected items are computed from
// the rows and keys of reference.cpp.
#define SDPA_NO_MAIN
#define USE_WGMMA 1
#define VEC_WIDTH 8
#define BLOCK_M 64
#define USE_LENGTHS 1
#define USE_PAGES 1
#ifndef SDPA_SOURCE
#define SDPA_SOURCE "../sdpa.cu"
#endif
#include SDPA_SOURCE

#include <algorithm>
#include <map>
#include <mutex>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "../harness/sizes.h"
#include "../reference.cpp"
#include <doctest/doctest.h>

using reference::format;
using std::string;
using std::vector;

namespace SDPA_NAMESPACE {
namespace {

// ---- builds ----

std::mutex noted_mutex;
vector<PlannedItem> noted;  // by all CTAs of a launch

template <class B> void note_items(const KernelArgs a) {
  if (threadIdx.x != 0) return;
  const uint32_t step = B::use_persistent_cta ? gridDim.x : a.work_items;
  for (uint32_t i = B::use_persistent_cta ? blockIdx.x : item_index_of_cta<B>(a); i < a.work_items; i += step) {
    const PlannedItem item = work_item<B>(a, i);
    const std::lock_guard<std::mutex> lock(noted_mutex);
    if (item.ranges > 0) noted.push_back(item);
  }
}

#define PLAN_KERNEL(B, kb)                        \
  template <> struct KernelOf<B, B::kernel> {       \
    struct Shared { char bytes[(kb) << 10]; };    \
    static constexpr auto entry = note_items<B>;  \
  }
// The build above without pages, with some other knobs.
#define PLAN_BUILD(row, name, kb, ...)                                                        \
  template <> constexpr Config config_of<row>() {                                             \
    Config c;                                                                                 \
    c.use_pages = false, __VA_ARGS__;                                                         \
    return c;                                                                                 \
  }                                                                                           \
  using name = BuildOf<row>;                                                                  \
  PLAN_KERNEL(name, kb)

// One split per tile; and warpgroups that skip rows.
PLAN_BUILD(-2, Scalar, 40, c.use_wgmma = false, c.block_m = 32, c.block_n = 16);
PLAN_BUILD(-3, Roles, 200,
           c.use_warp_specialization = c.overlap = c.use_persistent_cta = true, c.block_m = 192, c.num_warps = 12);
// The number of splits is automatic, or three or more; merged by a kernel, or by the last CTA, with
// a counter.
PLAN_BUILD(-4, Chunk, 100, c.use_warp_specialization = c.overlap = true, c.split_ctas = 0);
PLAN_BUILD(-5, Chunk3, 180, c.use_warp_specialization = c.overlap = c.pack_gqa = true, c.block_m = 128, c.num_warps = 8,
           c.split_ctas = 3);
PLAN_BUILD(-6, Decode, 70, c.swap_ab = c.pack_gqa = true, c.block_m = 16, c.block_n = 64, c.split_ctas = 0);
PLAN_BUILD(-7, Decode3, 70, c.use_wgmma = false, c.use_mma_sync = c.pack_gqa = true, c.block_m = c.block_n = 16,
           c.num_warps = c.split_kv = 2, c.split_ctas = 3);
PLAN_BUILD(-8, Paged, 100, c.use_pages = c.use_warp_specialization = c.overlap = true, c.split_ctas = 0);
using Tuned = BuildOf<6>;  // 192 x 96 with the heads of a group, and with pages
PLAN_KERNEL(Tuned, 220);

// ---- problems ----

struct Rng {
  uint64_t state;
  int operator()(int64_t below) { return int((state = reference::mix(state)) % uint64_t(std::max<int64_t>(below, 1))); }
};

struct Planned {
  SdpaParams p{};
  reference::Problem of{};
};

// The parameters, with tensors that are never read.
Planned problem_of_sizes(int sequences, int Hq, int Hkv, int rows, int keys) {
  alignas(16) static const unsigned char anything[16] = {};
  Planned c;
  SdpaParams& p = c.p;
  p = params_of_sizes(sequences, Hq, Hkv, rows, keys, Defines::head_dim, Defines::d_v);
  p.q = p.k = p.v = p.o = {0, 0, p.D};  // tensor maps have no room for the strides of such sizes
  p.Q = p.K = p.V = reinterpret_cast<const KeyValue*>(anything);
  p.O = const_cast<Output*>(p.Q);
  p.page_size = 64;
  p.pages = 5;
  c.of.B = p.B;
  c.of.Hq = p.Hq;
  c.of.Hkv = p.Hkv;
  c.of.Sq = p.Sq;
  c.of.Sk = p.Sk;
  c.of.D = p.D;
  return c;
}

// B sequences of at most `rows` queries; packed ones may be empty. n selects the other properties.
template <class B> Planned problem(int n, int sequences, int rows, bool packs_q, bool invariant = false) {
  constexpr int heads[][2] = {{1, 1}, {8, 2}, {71, 1}, {24, 2}, {3, 3}}, sms[] = {3, 132, 1}, sums[] = {65536, 200, 64};
  constexpr int64_t most_keys[] = {300, 70000, size_limit, 3000000};
  Rng draw{uint64_t(n)};
  simt::gpu.sms[0] = sms[n % 3];
  simt::gpu.keys_at_once = limits_keys<B> ? 65536 : sums[n / 2 % 3];
  const int most = int(std::min({most_keys[n % 4], limits_keys<B> ? int64_t(65536) : int64_t(size_limit),
                                 invariant ? int64_t(20000) : int64_t(size_limit)}));  // else there is no memory for it
  Planned c = problem_of_sizes(sequences, heads[n % 5][0], heads[n % 5][1], rows, most);
  SdpaParams& p = c.p;
  reference::Problem& of = c.of;
  p.page_size = n % 2 ? 48 : 64;
  p.batch_invariant = invariant;
  if (n % 7 == 3) p.most_keys = std::max(most / 3, 1);
  if (packs_q) {
    of.packs_q = true;
    of.q_starts = {n % 3};
    for (int b = 0; b < sequences; b++) of.q_starts.push_back(of.q_starts[b] + (draw(3) ? 1 + draw(rows) : 0));
    of.Sq = p.Sq = of.q_starts.back() + n % 2;
    p.q_starts = of.q_starts.data();
  }
  if (n % 4 != 1) {  // of many magnitudes; of nine, one has all keys and one none
    for (int b = 0; b < sequences; b++) {
      const int length = draw(1 + (int64_t(most) >> draw(20)));
      of.k_lengths.push_back(b % 9 == 4 ? most : b % 9 == 7 ? 0 : length);
    }
    p.k_lengths = of.k_lengths.data();
  }
  if (p.most_keys) {
    if (!p.k_lengths) of.k_lengths.assign(sequences, most);
    for (int& length : of.k_lengths) length = std::min(length, p.most_keys);
    if (p.k_lengths) p.k_lengths = of.k_lengths.data();
  }
  p.causal = Causal(n % 3);
  of.mask = reference::Mask(n % 3);
  if (n % 5 >= 3) p.window_left = of.window_left = draw(1 + (most >> draw(12)));
  if (n % 10 == 4) p.window_right = of.window_right = draw(400);
  return c;
}

// ---- the expected plan ----

// The expected tiles of all sequences.
struct Tile {
  int b, rows_from, rows_to;
  reference::Sequence own;
  int64_t begin, end, first;  // visible keys, and where the first tile of keys begins
  uint64_t rounds, ranges;
};

template <class B> struct PlanCheck {
  const SdpaParams& p;
  const reference::Problem& of;
  string trouble = "";

  bool expect(bool good, std::string_view sentence) {
    if (!good && trouble.empty()) trouble = sentence;
    return good;
  }

  const int heads = most_heads();  // query heads per item
  int most_heads() const {
    int most = 1;
    for (int n = 1; B::pack_gqa && n <= B::block_m; n++) {
      if (p.Hq / p.Hkv % n == 0) most = n;
    }
    return most;
  }
  // Queries per head. batch_invariant: must not depend on the total number of queries.
  int queries() const {
    const int most = p.batch_invariant && p.q_starts ? B::block_m : std::max(p.Sq, 1);
    return B::pack_gqa ? std::min(B::block_m / heads, most) : B::block_m;
  }
  uint64_t rounds_of(int64_t keys) const { return keys <= 0 ? 0 : uint64_t(keys + B::round_keys - 1) / B::round_keys; }
  // With TMA and pages, K tiles start at a multiple of BLOCK_N.
  int64_t first_of(int64_t key) const { return B::use_pages ? key / B::block_n * B::block_n : key; }

  vector<Tile> tiles() const {
    vector<Tile> all;
    for (int b = 0; b < p.B; b++) {
      const reference::Sequence own = sequence_of(of, b);
      const int n = queries(), count = (own.Sq + n - 1) / n;
      // With a mask, unused warpgroups of 64 rows are the first ones, if warpgroups may skip tiles.
      const int64_t position = p.causal == Causal::bottom_right ? own.Sk - own.Sq : 0;  // of query 0
      const bool hides = p.causal != Causal::off && position + 1 < own.Sk;
      const bool masked = hides || p.window_left >= 0 || (p.window_right >= 0 && position + p.window_right + 1 < own.Sk);
      const bool may_skip = B::kernel == KernelKind::wgmma_roles && B::split_ctas == 1;
      const int early = masked && may_skip ? (count * n - own.Sq) / 64 * 64 : 0;
      for (int i = 0; i < count; i++) {
        const int from = i * n - early, to = from + n;
        const int64_t begin = int64_t(first_key(of, own, std::max(from, 0)));
        const int64_t end = int64_t(past_last_key(of, own, std::min(to, own.Sq) - 1));
        all.push_back({b, from, to, own, begin, end, first_of(begin), rounds_of(end - first_of(begin)), 1});
      }
    }
    return all;
  }

  string run() {
    // Memory for the maximum number of tiles, and for partials.
    const uint64_t groups = p.Hq / heads;
    const Items items = items_of<B>(p);
    const PlanArgs room = plan_args<B>(p, items);
    const uint64_t blocks = (p.Sq + queries() - 1) / queries();
    const uint64_t most_tiles = p.q_starts ? p.B + blocks : p.B * blocks;
    const uint64_t most_parts = merges_by_kernel<B> ? 1u << 31 : most_split_items / groups;
    const uint64_t ctas = (228 << 10) / (sizeof(typename KernelOf<B>::Shared) + 1024) * simt::gpu.sms[0];
    const uint64_t share = std::max<uint64_t>(simt::gpu.sms[0] / groups, 1);  // batch_invariant: of a sequence
    const uint64_t free = B::split_ctas == 1 ? 0 : p.batch_invariant ? share : std::min(2 * ((4 * ctas + groups - 1) / groups), most_parts);
    const uint64_t of_typed = B::split_ctas > 1 ? B::split_ctas * most_tiles : 0;
    const bool is_typed = of_typed > 0 && of_typed + free <= std::min<uint64_t>(most_parts, most_split_items);
    const uint64_t parts = p.batch_invariant ? invariant_parts(most_tiles, share) : free + (is_typed ? of_typed : 0);
    expect(items.heads == heads && items.queries == queries(), "rows of an item");
    expect(room.balancing_partials == free && room.partials == parts && room.items == most_tiles + parts,
           format("room for %u items and %u parts, want %d and %d", room.items, room.partials, int(most_tiles + parts), int(parts)));
    SdpaParams other = p;  // what the host does not know
    other.Sk = 1;
    other.most_keys = 5;
    other.causal = Causal::off;
    other.k_lengths = other.k_starts = nullptr;
    const size_t bytes = scratch_bytes<B>(p);
    expect(memory_of<B>(p).state == 0, "a plan's launch needs zeros");
    expect(scratch_bytes<B>(other) == bytes || p.batch_invariant, "room depends on the number of keys");
    if (bytes > size_t(4) << 30) return "";

    // The last launch of the call fails: the merge, or the kernel if there are many items.
    SdpaParams call = p;
    REQUIRE(cudaMalloc(&call.scratch, bytes) == cudaSuccess);
    unsigned char* const scratch = static_cast<unsigned char*>(call.scratch);
    const size_t plan_end = plan_bytes(room), counters_at = plan_end + parts * groups * sizeof(RangePartial<B>);
    const size_t counters = B::split_ctas != 1 && !merges_by_kernel<B> ? parts * groups / 2 : 0;
    memset(scratch, 0xa5, std::min(bytes, plan_end + 4096));
    memset(scratch + counters_at, 0xa5, bytes - counters_at);
    const bool has_kernel = room.items * groups * B::threads < 200000;
    noted.clear();
    simt::fail_next("cudaLaunchKernelEx", cudaErrorUnknown, has_kernel ? 2 : 1);
    const SdpaStatus status = forward<B>(call, /*stream=*/0);
    simt::fail_next("cudaLaunchKernelEx", 0);
    cudaGetLastError();
    cudaDeviceSynchronize();
    const bool is_whole = has_kernel && !merges_by_kernel<B>;
    if (p.batch_invariant && !merges_by_kernel<B> && parts * groups > most_split_items) {
      expect(string(status.text).find("batch_invariant: ") == 0, string("not refused, but: ") + status.text);
      return trouble;
    }
    expect(status.code == (is_whole ? cudaSuccess : cudaErrorUnknown), string("it says: ") + status.text);

    KernelArgs a(call, mask_rows<B>, B::block_n);
    [&](auto& args) { args.plan = room; }(a);
    a.q_heads = Divisor(uint32_t(groups));
    a.item_heads = heads;
    const Plan& plan = plan_of(a);
    const PlannedItem* const planned = planned_items(a);
    const uint32_t* const merges = reinterpret_cast<const uint32_t*>(planned + room.items);
    const auto* const end_of_parts = reinterpret_cast<unsigned char*>(range_partials<B>(a) + parts * groups);
    expect(end_of_parts == scratch + counters_at, "the counters do not follow the partial results");
    expect(counters_at + counters * sizeof(uint32_t) == bytes, "the counters do not end with the scratch memory");
    expect(reinterpret_cast<const unsigned char*>(merges + room.items) <= scratch + plan_end, "merges lie in the partial results");
    expect(std::all_of(scratch + plan_end, scratch + std::min(counters_at, plan_end + 4096), [](int x) { return x == 0xa5; }),
           "written past the plan");
    expect(plan.fetched == 0, "the queue does not begin with item 0");
    if (trouble.empty()) check_items(plan, planned, merges, room, is_typed);
    if (trouble.empty()) check_heads(a, plan, planned, groups, parts, counters, has_kernel);
    cudaFree(call.scratch);
    return trouble;
  }

  uint64_t at_once() const { return std::max(simt::gpu.keys_at_once / B::round_keys, 1); }
  uint64_t rounds_of_256_kb() const { return std::max(1, int((256 << 10) / (2 * sizeof(KeyValue) * p.D * B::round_keys))); }
  // batch_invariant: `share` splits per sequence, or per tile the number that sums require, limited
  // by 256 KB.
  uint64_t invariant_parts(uint64_t tiles, uint64_t share) const {
    const uint64_t rounds = rounds_of(p.most_keys ? std::min(p.most_keys, p.Sk) : p.Sk), sums = (rounds + at_once() - 1) / at_once();
    const uint64_t least = std::min(rounds_of_256_kb(), at_once()), split = B::split_ctas;
    if (split == 1 || (split == 0 && rounds <= least)) return 0;
    if (split > 1) return tiles * std::max(sums, split);
    return std::min(tiles * ((rounds + least - 1) / least), p.B * share + (sums > 1 ? tiles * sums : 0));
  }
  // batch_invariant: the splits of the plan's tiles equal those of the sequence alone (see
  // "invariant").
  void take_ranges(vector<Tile>& all, const Plan& plan, const PlannedItem* planned, uint64_t share) {
    std::map<std::pair<int, int>, uint64_t> found;
    vector<uint64_t> of_sequence(p.B, 0), most(p.B, 0);
    for (uint32_t i = 0; i < plan.count; i++) found[{planned[i].b, planned[i].q0}] = planned[i].ranges;
    for (Tile& t : all) {
      t.ranges = std::max<uint64_t>(found[{t.b, t.rows_from}], 1);
      of_sequence[t.b] += t.ranges > 1 ? t.ranges : 0;
      most[t.b] += (t.rounds + at_once() - 1) / at_once();
      const uint64_t least = std::min(rounds_of_256_kb(), at_once());
      expect(B::split_ctas == 1 || t.ranges * at_once() >= t.rounds, "a range is longer than a sum");
      expect(B::split_ctas != 0 || t.ranges <= std::max<uint64_t>((t.rounds + least - 1) / least, 1), "a range is shorter than 256 KB");
      expect(B::split_ctas <= 1 || t.ranges >= uint64_t(B::split_ctas), "fewer ranges than typed");
    }
    for (int b = 0; b < p.B; b++) expect(B::split_ctas != 0 || of_sequence[b] <= std::max(share, most[b]), "more than a share");
  }

  // Every tile occurs once; its splits are disjoint, ordered, of equal length and cover its keys.
  // The longest come first.
  void check_items(const Plan& plan, const PlannedItem* planned, const uint32_t* merges, const PlanArgs& room, bool is_typed) {
    vector<Tile> all = tiles();
    uint64_t rounds = 0, most_rounds = 1, count = 0, several = 0;
    for (const Tile& t : all) {
      rounds += t.rounds;
      most_rounds = std::max(most_rounds, rounds_of(t.own.Sk));
    }
    // Maximum K tiles of a split: the limit of an accumulator, unless there is no memory for so
    // many splits. With SPLIT_CTAS=0, at most 256 KB.
    const uint64_t at_once = this->at_once(), free = room.balancing_partials;
    const uint64_t even = p.batch_invariant && free ? 0 : free ? 2 * rounds / free + 1 : uint64_t(1) << 40;
    const uint64_t limit = p.batch_invariant ? ~uint64_t(0) : std::max(even, B::split_ctas == 0 ? std::min(rounds_of_256_kb(), at_once) : at_once);
    if (p.batch_invariant) take_ranges(all, plan, planned, free);
    for (Tile& t : all) {
      if (!p.batch_invariant) t.ranges = std::max<uint64_t>((t.rounds + limit - 1) / limit, is_typed ? B::split_ctas : 1);
      count += t.ranges;
      several += t.ranges > 1;
    }
    if (!expect(plan.count == count, format("%u items, want %llu", plan.count, (unsigned long long)count))) return;
    expect(plan.merges == several, format("%u items to merge, want %llu", plan.merges, (unsigned long long)several));

    vector<uint32_t> order(count), firsts;
    std::iota(order.begin(), order.end(), 0);
    const auto place = [&](uint32_t i) { return std::array<int, 3>{planned[i].b, planned[i].q0, planned[i].range}; };
    std::sort(order.begin(), order.end(), [&](uint32_t x, uint32_t y) { return place(x) < place(y); });
    vector<char> used(room.partials, 0);
    const uint32_t* next = order.data();
    vector<uint64_t> costs(count);
    for (const Tile& t : all) {
      int64_t at = t.begin;
      const int part = planned[*next].first_partial;
      for (uint64_t range = 0; range < t.ranges; range++, next++) {
        const PlannedItem& item = planned[*next];
        const bool same = item.b == t.b && item.h == 0 && item.q0 == t.rows_from && item.range == int(range) &&
                          item.ranges == int(t.ranges) && item.sequence.q_row == t.own.first_query && item.sequence.Sq == t.own.Sq &&
                          item.sequence.k_row == t.own.first_key && item.sequence.Sk == t.own.Sk && item.first_partial == part;
        const auto expect_of_it = [&](bool good, std::string_view words) {  // formats only failures: most items are good
          return good || expect(false, format("b=%d q0=%d range %d of %d ", t.b, t.rows_from, int(range), int(t.ranges)).append(words));
        };
        if (!expect_of_it(same, "is missing or another")) return;
        const uint64_t took = t.rounds / t.ranges + (range < t.rounds % t.ranges);
        if (took > 0 || t.ranges == 1) {
          const int64_t end = std::min(t.end, first_of(at) + int64_t(took) * B::round_keys);
          if (item.keys.begin != at || item.keys.end != end) {
            expect_of_it(false, format("has keys %d to %d, want %lld to %lld", item.keys.begin, item.keys.end, (long long)at,
                                       (long long)end));
          }
          at = end;
        } else {
          expect_of_it(item.keys.begin >= item.keys.end, "has keys of another");
        }
        expect_of_it(even > at_once || item.keys.end - first_of(item.keys.begin) <= int64_t(at_once) * B::round_keys,
                     "is longer than an accumulator sums");
        if (range == 0 && t.ranges > 1) firsts.push_back(*next);
        if (t.ranges > 1 && expect_of_it(part >= 0 && part + range < used.size(), "has no room for its partial result")) {
          expect_of_it(!used[part + range]++, "has the partial result of another");
        }
        costs[*next] = B::split_ctas == 1 ? rounds_of(t.own.Sk) : (t.rounds + t.ranges - 1) / t.ranges;
      }
      expect(at == t.end, "keys are left over");
    }
    vector<uint32_t> listed(merges, merges + plan.merges);
    std::sort(listed.begin(), listed.end());
    std::sort(firsts.begin(), firsts.end());
    expect(listed == firsts, "other items are to be merged than have several ranges");
    // Sorted into 64 classes by length relative to the longest.
    const uint64_t longest = std::max<uint64_t>(std::min(most_rounds, limit), 1);
    uint64_t least = ~uint64_t(0) >> 1;
    for (uint64_t cost : costs) {
      expect(cost <= least + longest / 63 + 1, "a longer item comes after a shorter one");
      least = std::min(least, cost);
    }
  }

  // The CTAs get every item for every group of heads, each with its own partials and counter.
  void check_heads(const KernelArgs& a, const Plan& plan, const PlannedItem* planned, uint64_t groups, uint64_t parts,
                   size_t counters, bool has_kernel) {
    if (plan.count * groups > 2000000) return;
    vector<char> used(parts * groups, 0);
    vector<int> counted(counters, -1);  // first_partial of the item that has a counter
    vector<PlannedItem> want;
    for (uint32_t i = 0; i < plan.count; i++) {
      for (int group = 0; group < int(groups); group++) {
        PlannedItem item = planned[i];
        const Item<B> found = planned_item<B>(a, i, group);
        item.h = group * heads;
        item.first_partial = found.first_partial;
        expect(memcmp(&item, &found, sizeof item) == 0, "an item's heads");
        if (has_kernel) want.push_back(found);
        if (item.ranges == 1) continue;
        const int64_t part = found.first_partial, mine = part + found.range;
        if (!expect(part >= 0 && mine < int64_t(used.size()), "no room for a head's partial result")) return;
        expect(!used[mine]++, "two heads have one partial result");
        if constexpr (B::split_ctas != 1 && !merges_by_kernel<B>) {
          const uint32_t counter = found.counter(a);
          if (!expect(counter < counters, "there is no such counter")) return;
          expect(range_counters<B>(a)[counter] == 0, "a counter is not zero");
          expect(counted[counter] < 0 || counted[counter] == part, "two items have one counter");
          counted[counter] = int(part);
        }
      }
    }
    if (!has_kernel) return;
    const auto less = [](const PlannedItem& x, const PlannedItem& y) { return memcmp(&x, &y, sizeof x) < 0; };
    std::sort(want.begin(), want.end(), less);
    std::sort(noted.begin(), noted.end(), less);
    const bool same = want.size() == noted.size() && !memcmp(want.data(), noted.data(), want.size() * sizeof want[0]);
    expect(same, format("CTAs find %d items, want %d, or others", int(noted.size()), int(want.size())));
  }
};

template <class B> void check_plan(const Planned& c) {
  const SdpaParams& p = c.p;
  INFO("B=", p.B, " Hq=", p.Hq, " Hkv=", p.Hkv, " Sq=", p.Sq, " Sk=", p.Sk, " packed=", c.of.packs_q, " causal=", int(p.causal),
       " sms=", simt::gpu.sms[0], " sums=", simt::gpu.keys_at_once);
  CHECK(PlanCheck<B>{p, c.of}.run() == "");
  simt::gpu = {};
}

// Sequences of one row, all with this number of K tiles.
template <class B> void check_alike(int sequences, int heads, int64_t rounds, int sms, int sums) {
  simt::gpu.sms[0] = sms;
  simt::gpu.keys_at_once = sums;
  check_plan<B>(problem_of_sizes(sequences, heads, heads, 1, int(std::min<int64_t>(rounds * B::round_keys, size_limit))));
}

// At the limit of the memory: tiles with one K tile more than a split allows, the maximum number of
// splits, and one more.
template <class B> void check_room() {
  for (const auto& [heads, sms] : {std::pair(1, 3), {3, 1}, {300, 3}, {20000, 1}}) {
    simt::gpu.sms[0] = sms;
    const Planned one = problem_of_sizes(1, heads, heads, 1, 1);
    const int free = int(plan_args<B>(one.p, items_of<B>(one.p)).balancing_partials);
    for (const int tiles : {free / 2 - 1, free / 2, free - 1}) {
      for (const int rounds : {free / 2 + 1, free, 3 * free}) {
        if (tiles > 0) check_alike<B>(tiles, heads, rounds, sms, 64);
      }
    }
    const int split = std::max(B::split_ctas, 1), most = merges_by_kernel<B> ? most_split_items : most_split_items / heads;
    const int fit = (most - free) / split;
    for (const int tiles : {fit, fit + 1}) {
      if (tiles > 0 && int64_t(tiles) * heads < 200000) check_alike<B>(tiles, heads, 2, sms, 65536);
    }
    const int64_t longest = size_limit / B::round_keys;
    check_alike<B>(int((int64_t(1) << 32) / longest + 1), heads, longest, sms, 65536);  // over 2^32 rounds in all
  }
  // A split with the maximum length of a sum, and one K tile more.
  for (const int sums : {65536, 200, 64}) {
    const int at_once = std::max(sums / B::round_keys, 1);
    for (const int rounds : {at_once, at_once + 1, 3 * at_once, 3 * at_once + 1}) {
      for (const int sms : {1, 132}) check_alike<B>(1, 2, rounds, sms, sums);
    }
  }
  // 2^32 K tiles in the tiles of one thread, since lanes share them.
  const int64_t tiles = 32 * ((int64_t(1) << 32) / (size_limit / B::round_keys) + 2);
  check_plan<B>(problem_of_sizes(1, 1, 1, int(tiles * B::block_m), size_limit));
}

template <class B> void check_plans() {
  // One sequence, as many as a warp has lanes, more than warps, and more than threads; tiles shared
  // by 2, 4, 8, 16 and 32 lanes.
  constexpr int shapes[][2] = {{1, 1},    {1, 40},  {33, 1},  {40, 3},  {100, 2}, {1030, 1},
                               {2100, 1}, {520, 2}, {270, 4}, {130, 8}, {70, 16}, {34, 40}};
  int n = 0;
  for (const auto& shape : shapes) {
    const int rows = (shape[1] - 1) * B::block_m + 1;
    for (const bool invariant : {false, true}) {
      check_plan<B>(problem<B>(n, shape[0], rows, false, invariant));
      check_plan<B>(problem<B>(n + 1, shape[0], rows, true, invariant));
    }
    n += 2;
  }
}

// The items of each sequence in the plan of a call, as tile, keys and split; empty if there is no
// memory for the plan.
using Places = std::multiset<std::array<int, 6>>;
template <class B> vector<Places> places_of(SdpaParams p) {
  const size_t bytes = scratch_bytes<B>(p);
  if (bytes > size_t(1) << 30) return {};
  REQUIRE(cudaMalloc(&p.scratch, bytes) == cudaSuccess);
  simt::fail_next("cudaLaunchKernelEx", cudaErrorUnknown, 1);
  const SdpaStatus status = forward<B>(p, /*stream=*/0);
  simt::fail_next("cudaLaunchKernelEx", 0);
  cudaGetLastError();
  cudaDeviceSynchronize();
  vector<Places> found(p.B);
  if (status.code != cudaErrorInvalidValue) {
    KernelArgs a(p, mask_rows<B>, B::block_n);
    const Plan& plan = plan_of(a);
    for (uint32_t i = 0; i < plan.count; i++) {
      const PlannedItem& x = planned_items(a)[i];
      found[x.b].insert({x.q0, x.keys.begin, x.keys.end, x.range, x.ranges, x.sequence.Sk});
    }
  }
  cudaFree(p.scratch);
  return found;
}
// batch_invariant: the items of a sequence equal those of the sequence alone.
template <class B> void check_alone() {
  int compared = 0;
  for (int n = 0; n < 48; n++) {
    const Planned c = problem<B>(n, 9, n % 3 == 0 ? 1 : 200, n % 2, true);
    const vector<Places> together = places_of<B>(c.p);
    for (int b = 0; b < int(together.size()); b++) {
      const reference::Sequence own = sequence_of(c.of, b);
      SdpaParams alone = c.p;
      const int starts[] = {0, own.Sq};
      alone.B = 1;
      alone.most_keys = 0;
      if (alone.k_lengths) {
        alone.Sk = own.Sk;
        alone.k_lengths = &own.Sk;
      } else if (c.p.most_keys)
        alone.Sk = own.Sk;
      if (alone.q_starts) {
        alone.Sq = own.Sq;
        alone.q_starts = starts;
      }
      if (own.Sq == 0 || together[b].empty()) continue;
      INFO("n=", n, " b=", b);
      CHECK(vector<Places>{together[b]} == places_of<B>(alone));
      compared++;
    }
  }
  CHECK(compared > 100);
  simt::gpu = {};
}

}  // namespace
}  // namespace SDPA_NAMESPACE

using namespace SDPA_NAMESPACE;

TEST_CASE("invariant") {
  check_alone<Chunk>();
  check_alone<Chunk3>();
  check_alone<Decode>();
  check_alone<Decode3>();
  check_alone<Paged>();
  // Tiles that see a tenth of the keys, so that splits of the single sequence have lengths that do
  // not occur in a batch.
  Planned c = problem_of_sizes(1, 1, 1, 64, 64000);
  c.p.window_right = c.of.window_right = 6400;
  c.p.batch_invariant = 1;
  simt::gpu.sms[0] = 132;
  check_plan<Decode>(c);
}

// Invalid starts and lengths are clamped to the tensors.
TEST_CASE("sequences") {
  constexpr int least = -2147483647 - 1, S = 100, wild[] = {least, least + 1, -7, 0, 1, 50, S - 1, S, S + 1, -(least + 1)};
  const auto rows = [&](int x) { return std::min(std::max(x, 0), S); };
  SdpaParams p{};
  p.Sq = p.Sk = S;
  for (const int first : wild) {
    for (const int end : wild) {
      for (const int length : wild) {
        const int starts[] = {first, end};
        p.q_starts = p.k_starts = starts;
        p.k_lengths = &length;
        const Sequence own(p, 0);
        const int want = std::max(rows(end) - rows(first), 0);
        CHECK((own.q_row == rows(first) && own.k_row == rows(first) && own.Sq == want && own.Sk == std::min(want, rows(length))));
      }
    }
  }
}

// No query of a sequence sees more keys than most_visible_keys() says, also where the limits of the mask have different
// alignments, so that the width of the window depends on the lengths.
TEST_CASE("visible_keys") {
  const int starts[] = {0, 5, 40};
  const Causal alignments[] = {Causal::off, Causal::top_left, Causal::bottom_right};
  for (const bool only_firsts : {false, true}) {
    for (const Causal causal : alignments) {
      for (const Causal alignment : alignments) {
        for (const auto& [left, right] : {std::pair(-1, -1), {7, -1}, {-1, 3}, {7, 3}}) {
          SdpaParams p{};
          p.B = 2;
          p.Sq = 40;
          p.Sk = 60;
          p.causal = causal;
          p.window_alignment = alignment;
          p.window_left = left;
          p.window_right = right;
          p.q_starts = p.k_starts = only_firsts ? nullptr : starts;
          p.k_firsts = only_firsts ? starts : nullptr;
          int most = 0;
          for (int queries = only_firsts ? p.Sq : 1; queries <= p.Sq; queries++) {
            for (int keys = 0; keys <= p.Sk; keys++) {
              const KeyBounds bounds(p, queries, keys);
              for (int q = 0; q < queries; q++) most = std::max(most, bounds.end(q) - bounds.begin(q));
            }
          }
          CHECK(most_visible_keys(p) >= most);
          CHECK(most_visible_keys(p) <= (left >= 0 && right >= 0 ? left + right + 1 : p.Sk));
        }
      }
    }
  }
}

TEST_CASE("scalar") { check_plans<Scalar>(); }
TEST_CASE("roles") { check_plans<Roles>(); }
#define PLAN_CASES(name, B)               \
  TEST_CASE(name) { check_plans<B>(); }   \
  TEST_CASE(name "_room") { check_room<B>(); }
PLAN_CASES("chunk", Chunk)
PLAN_CASES("chunk3", Chunk3)
PLAN_CASES("decode", Decode)
PLAN_CASES("decode3", Decode3)
PLAN_CASES("paged", Paged)
PLAN_CASES("tuned", Tuned)
