// The tiles from which a build with USE_TUNED chooses, on the CPU backend. No kernel is called or
// compiled.
#define SDPA_NO_MAIN
#ifndef SDPA_SOURCE
#define SDPA_SOURCE "../sdpa.cu"
#endif
#include SDPA_SOURCE

#include <functional>
#include <string>

#include <doctest/doctest.h>

using namespace SDPA_NAMESPACE;

// The CTAs per SM of a tile do not exceed what fits in shared memory and, with a bias, in the register
// file; for tiles with packed GQA they are equal to what fits in shared memory, since splits depend on
// them.
template <int N> static void check_ctas() {
  if constexpr (N < tile_count) {
    constexpr TunedTile t = TUNED_TILES[N];
    const int resident = most_resident_ctas<BuildOf<N>>();
    INFO(t.block_m << " x " << t.block_n << " x " << t.split_kv << ": " << resident);
    CHECK((t.pack_gqa ? t.ctas == resident : t.ctas <= resident));
    if (BuildOf<N>::kernel == KernelKind::wgmma_roles && Defines::use_bias != 0)
      CHECK(t.ctas <= ctas_by_registers<BuildOf<N>>);
    check_ctas<next_tile(N + 1)>();
  }
}
TEST_CASE("tile_ctas" * doctest::skip(!Defines::use_tuned)) { check_ctas<next_tile(0)>(); }

// The chosen tile and the workspace depend only on the problem, not on the previous one. With
// batch_invariant the tile does not depend on members that differ between batches.
TEST_CASE("tile_history" * doctest::skip(!Defines::use_tuned)) {
  if constexpr (Defines::use_tuned) {
    uint32_t state = 1;
    const auto draw = [&](int size) { return int((state = state * 1664525u + 1013904223u) >> 8) % size; };
    static const int held[1] = {};
    struct Member {
      const char* name;
      bool can;
      std::function<void(SdpaParams&)> draw;
      std::function<bool(const SdpaParams&)> is_of_batch = [](const SdpaParams&) { return false; };
    };
    const auto pointer = [&](bool null) { return null ? nullptr : held; };
    const auto always = [](const SdpaParams&) { return true; };
    const auto differs_q = [](const SdpaParams& p) { return p.q_starts || p.q_lengths; };
    const auto differs_k = [](const SdpaParams& p) { return p.k_starts || p.k_lengths; };
    const bool lengths = Defines::use_lengths, starts = lengths && !Defines::use_pages;
    const Member members[] = {
        {"SMs", true, [&](SdpaParams&) { simt::gpu.sms[0] = 1 << draw(8); }},
        {"B", true, [&](SdpaParams& p) { p.B = 1 + draw(64); }, always},
        {"Hq", true, [&](SdpaParams& p) { p.Hq = p.Hkv << draw(5); }},
        {"Hkv", true,
         [&](SdpaParams& p) {
           while (p.Hq % (p.Hkv = 1 << draw(5))) {
           }
         }},
        {"Sq", true, [&](SdpaParams& p) { p.Sq = 1 << draw(13); }, differs_q},
        {"Sk", true, [&](SdpaParams& p) { p.Sk = 1 << draw(18); }, differs_k},
        {"causal", true, [&](SdpaParams& p) { p.causal = Causal(draw(3)); }},
        {"window_left", true, [&](SdpaParams& p) { p.window_left = draw(2) ? -1 : 1 << draw(13); }},
        {"window_right", true,
         [&](SdpaParams& p) { p.window_right = draw(2) ? -1 : 1 << draw(13); }},
        {"window_alignment", true, [&](SdpaParams& p) { p.window_alignment = Causal(draw(3)); }},
        {"k_lengths", lengths, [&](SdpaParams& p) { p.k_lengths = pointer(draw(2)); }},
        {"q_starts", lengths, [&](SdpaParams& p) { p.q_starts = pointer(draw(2)); }},
        {"k_starts", starts, [&](SdpaParams& p) { p.k_starts = pointer(draw(2)); }},
        {"q_lengths", lengths,
         [&](SdpaParams& p) {
           p.q_lengths = pointer(draw(2));
           p.batch_invariant = 1;
         }},
        {"batch_invariant", true, [&](SdpaParams& p) { p.batch_invariant = draw(2); }},
        {"most_keys", lengths, [&](SdpaParams& p) { p.most_keys = draw(2) ? 0 : 1 << draw(18); },
         always},
        {"D", Defines::is_wgmma, [&](SdpaParams& p) { p.D = 8 * (1 + draw(Defines::head_dim / 8)); }}};
    SdpaParams elsewhere{};
    elsewhere.B = 77;
    elsewhere.Hq = elsewhere.Hkv = 7;
    elsewhere.Sq = elsewhere.Sk = 777;
    elsewhere.D = Defines::head_dim;
    for (const Member& m : members) {
      if (!m.can) continue;
      int changed = 0, wrong = 0;
      for (int n = 0; n < 40000 && changed < 20; n++) {
        SdpaParams p{};
        p.D = Defines::head_dim;
        p.Hkv = 1;
        p.page_size = 16;
        for (const Member& each : members) {
          if (each.can && &each != &members[3]) each.draw(p);
        }
        const int before = choose_tile(p);
        const bool must_stay = p.batch_invariant && m.is_of_batch(p);
        m.draw(p);
        const int tile = choose_tile(p);
        const size_t bytes = sdpa_workspace_bytes(p);
        choose_tile(elsewhere);
        const int fresh = choose_tile(p);
        changed += fresh != before;
        wrong += tile != fresh || bytes != sdpa_workspace_bytes(p) || (must_stay && fresh != before);
      }
      INFO(std::string(m.name));
      CHECK((changed == 20 && wrong == 0));
    }
    simt::gpu = {};
  }
}
