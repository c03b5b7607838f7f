// Lists the members of SdpaParams, for tests that require that each was varied. Included after
// sdpa.cu.
#pragma once
#include <string>
#include <type_traits>

#include "sdpa_members.h"  // SDPA_MEMBERS: those of bindings/sdpa.h; compiles only if sdpa.cu has as many

// Calls visit(name, member) for each member, in order.
template <class Params, class Visit> void visit_members(Params& params, const Visit& visit) {
  auto& [SDPA_MEMBERS] = params;
  std::string names = SDPA_TEXT(SDPA_MEMBERS) ",";
  const auto visit_next = [&](auto& member) {
    const size_t comma = names.find(',');
    visit(names.substr(0, comma), member);
    names.erase(0, names.find_first_not_of(' ', comma + 1));
  };
  const auto visit_all = [&](auto&... members) { (visit_next(members), ...); };
  visit_all(SDPA_MEMBERS);
}
// The same, with the bytes of each member.
template <class Params, class See> void for_each_member(const Params& params, const See& see) {
  visit_members(params, [&](const std::string& name, const auto& member) {
    see(name, std::string(reinterpret_cast<const char*>(&member), sizeof member));
  });
}

// Calls see(name, value) for each stride: in Strides, in a Descale, or a member whose name ends in
// "stride".
template <class Params, class See> void for_each_stride(const Params& params, const See& see) {
  visit_members(params, [&](const std::string& name, const auto& member) {
    using Member = std::decay_t<decltype(member)>;
    if constexpr (std::is_same_v<Member, SDPA_NAMESPACE::Strides> || std::is_same_v<Member, SDPA_NAMESPACE::Descale>) {
      see(name + ".batch", member.batch);
      see(name + ".head", member.head);
    }
    if constexpr (std::is_same_v<Member, SDPA_NAMESPACE::Strides>) see(name + ".row", member.row);
    if constexpr (std::is_integral_v<Member>) {
      const std::string suffix = "stride";
      const bool is_stride = name.size() > suffix.size() && name.substr(name.size() - suffix.size()) == suffix;
      if (is_stride) see(name, int64_t(member));
    }
  });
}

// The members that a build supports. Others are refused, or constant in all problems.
struct Features { bool queue, softcap, factors, q_factors, sinks, lengths, pages, firsts, bias, key_mask; };
inline bool takes_member(const Features& has, const std::string& member) {
  const auto is_one_of = [&](const char* names) { return (" " + std::string(names) + " ").find(" " + member + " ") != std::string::npos; };
  return (has.queue || !is_one_of("max_ctas")) && (has.softcap || !is_one_of("softcap")) &&
         (has.factors || !is_one_of("k_descale v_descale")) && (has.q_factors || !is_one_of("q_descale")) && (has.sinks || !is_one_of("sinks")) &&
         (has.lengths || !is_one_of("k_lengths q_lengths q_starts k_starts most_keys k_firsts")) && (!has.pages || !is_one_of("k_starts")) &&
         (has.firsts || !is_one_of("k_firsts")) &&
         (has.pages || !is_one_of("page_table page_stride page_size pages")) &&
         (has.bias || !is_one_of("bias bias_strides bias_keys bias_map bias_map_bytes")) &&
         (has.key_mask || !is_one_of("key_mask key_mask_stride")) &&
         !is_one_of("x0 x1 x2 x3 i0 i1");  // only tests/mods.py builds lines with SCORE_MOD or MASK_MOD
}
