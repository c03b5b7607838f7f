#include <mma.h>
#include <cmath>

// ==== 1 KNOBS ====

enum class Mode { plain, packed };
struct B {
  static constexpr bool packs = false;
  static constexpr int block_m = 32, mode = 0, stages = 1;
};
constexpr Mode mode_of = Mode(B::mode);
template <class B> constexpr bool is_plain = mode_of == Mode::plain && !B::packs;
template <class B> constexpr int rows = B::packs ? 2 * B::block_m
                                                  : B::block_m;

// ---- of packed rows ----
// Goes with its section.

// Goes as well.
struct Packed {
  int first;
};

// ---- of all ----
// Stays with its section.

// Two versions, of which one stays.
template <class B, bool = B::packs> struct Copy {
  // Nobody names it.
  int unused() const { return 0; }

  // Stays.
  int copy(int n) const {
    return n;
  }
  int left;  // data stays
};
template <class B> struct Copy<B, true> {
  int copy(int n) const { return n + Packed().first; }
};

using Type = typename std::conditional<B::packs, Packed, int>::type;
using Other = std::conditional_t<B::packs, Packed, Type>;

static_assert(!B::packs || B::block_m > 8, "decided");
static_assert(B::block_m > 8, "open");

int helper(int x) { return x; }  // of the branch that goes

int sdpa_forward(int a, int b, int c) {
  Other n = rows<B>;
  // Stays: a branch does.
  if constexpr (B::packs) {
    n = helper(a);
  } else if (a < b || b > c) {
    n++;
  } else {
    n--;
  }
  if (is_plain<B> && (a > 0 || B::block_m > 16)) n += 2;
  // Stays: its statement does.
  if constexpr (!B::packs) {
    const int more = Copy<B>().copy(n);
    n += more;
  }
  // Goes: nothing is packed.
  if (B::packs) n = helper(n);
  if (B::stages == 1) return n;
  return helper(n);
}
// ======== becomes
#include <cmath>

// ==== 1 KNOBS ====

struct B {
  static constexpr bool packs = false;
  static constexpr int block_m = 32, mode = 0, stages = 1;
};
template <class B> constexpr int rows = B::block_m;

// ---- of all ----
// Stays with its section.

// Two versions, of which one stays.
template <class B, bool = B::packs> struct Copy {
  // Stays.
  int copy(int n) const {
    return n;
  }
  int left;  // data stays
};

using Type = int;
using Other = Type;

static_assert(B::block_m > 8, "open");

int sdpa_forward(int a, int b, int c) {
  Other n = rows<B>;
  // Stays: a branch does.
  if (a < b || b > c) {
    n++;
  } else {
    n--;
  }
  if (a > 0 || B::block_m > 16) n += 2;
  // Stays: its statement does.
  const int more = Copy<B>().copy(n);
  n += more;
  return n;
}
