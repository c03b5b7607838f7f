// The members of SdpaParams by name, of which tests ask that each was drawn or changed. Included after sdpa.cu.
#pragma once
#include <string>

#include "sdpa_members.h"  // SDPA_MEMBERS, as bindings/sdpa.h has them: one that is missing does not compile

// visit(name, member) for each.
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
// see(name, bytes) of each.
template <class Params, class See> void for_each_member(const Params& params, const See& see) {
  visit_members(params, [&](const std::string& name, const auto& member) {
    see(name, std::string(reinterpret_cast<const char*>(&member), sizeof member));
  });
}

// The members that a build takes, by its features: others it refuses, or has them the same in every problem.
struct Features { bool queue, softcap, factors, q_factors, sinks, lengths, pages, bias; };
inline bool takes_member(const Features& has, const std::string& member) {
  const auto is_one_of = [&](const char* names) { return (" " + std::string(names) + " ").find(" " + member + " ") != std::string::npos; };
  return (has.queue || !is_one_of("max_ctas")) && (has.softcap || !is_one_of("softcap")) &&
         (has.factors || !is_one_of("k_descale v_descale")) && (has.q_factors || !is_one_of("q_descale")) && (has.sinks || !is_one_of("sinks")) &&
         (has.lengths || !is_one_of("k_lengths q_lengths q_starts k_starts most_keys")) && (!has.pages || !is_one_of("k_starts")) &&
         (has.pages || !is_one_of("page_table page_stride page_size pages")) &&
         (has.bias || !is_one_of("bias bias_strides bias_keys bias_map bias_map_bytes"));
}
