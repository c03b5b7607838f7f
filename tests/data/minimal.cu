#include <mma.h>
#include <cmath>

// ==== 1 KNOBS ====

enum class Mode { plain, packed };
enum class Kernel { packed, plain, swapped };
struct B {
  static constexpr bool packs = false;
  static constexpr int block_m = 32, mode = 0, stages = 1;
  static constexpr Kernel kernel = packs ? Kernel::packed : block_m > 8 ? Kernel::plain : Kernel::swapped;
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

// Chooses one type; passes on its parameter; has a parameter that it does not need.
template <Mode M> using ElementOf = std::conditional_t<M == Mode::plain, __half, __nv_bfloat16>;
template <class B> using Copier = Copy<B>;
template <class B> using Element = Other;
using Input = ElementOf<mode_of>;  // of Q
using Number = Other;              // of rows

static_assert(!B::packs || B::block_m > 8, "decided");
static_assert(B::block_m > 8, "open");

// Versions for types, of which nobody has the second.
float to_float(__half x) { return __half2float(x); }
float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
template <class E> float unit(E x) {
  if constexpr (std::is_same_v<E, __nv_bfloat16>) return 2;
  return to_float(x);
}
template <class E, int N> float shape() {
#define SHAPE(n)                                                     \
  if constexpr (N == n && std::is_same_v<E, __half>) {               \
    return measure("f16" #n);                                        \
  } else if constexpr (N == n && std::is_same_v<E, __nv_bfloat16>) { \
    return measure("bf16" #n);                                       \
  }
  SHAPE(8)
}

struct Options {  // may lose what nobody reads
  int read = 1;
  int other = 2;
};
struct Nothing {};
struct Args {  // data that nobody reads keeps its place, but at the end where it has no size
  int unread;
  Nothing between;
  Options options;
  std::conditional_t<B::packs, Packed, Nothing> end;
};
template <class B> int count(const Args& a, int b) { return a.options.read; }  // needs no b
int factor(int x) { return 1; }
Number product(const Args& a, int x) {
  Number y = x * factor(x) + B::mode + count<B>(a, x);
  return y;
}

int helper(int x) { return x; }  // of the branch that goes

// What nobody reads has no name, but on the device, where a macro may read it.
__device__ int of_device(int x, int y) { return x + 1; }
template <class B> int of_host(const Args& a, int (&b)[2], int* c, int d) {
  const auto both = [&](int e, int f) { return e + d; };  // f
  return both(1, 2);
}

// Does nothing, and decides.
void idle_of(int n) { return; }
bool decided(int& n) { return false; }
void early(int n) {
  if (n > 3) return idle_of(n);
  decided(n);
  of_device(n, n);
}

// Loses both brackets at once.
bool either(bool open) { return (open && !B::packs) || B::packs; }

// Goes, but what it is given does something.
void keep(int n) {
  if (B::packs) early(n);
}
// Loses a loop that runs once, but not one that a break leaves.
template <class B> int once(int n) {
  do {
    const int twice = 2 * n;
    n += twice;
  } while (B::packs && n > 0);
  do {
    if (n > 3) break;
    n++;
  } while (B::packs && n > 0);
  return n;
}

// Calls a member of an object that has no name.
template <class B> void made(int n) {
  if (n > 3) {
    typename Copier<B>::Maker(n, n).run(n);
  }
}

int counted(int& n) {
  n++;
  return n;
}

int sdpa_forward(int a, int b, int c) {
  early(a);
  keep(counted(a));
  made<B>(once<B>(a));
  keep(either(a));
  constexpr int idle = 1;
  Element<B> n = rows<B> + product({}, a) + unit(Input()) + shape<Input, 8>();
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
    const int more = Copier<B>().copy(n);
    n += more;
  }
  // A chain of decided ones.
  if constexpr (B::packs) {
    n = helper(a);
  } else if constexpr (B::mode == 0) {
    n += 3;
  } else {
    n = helper(b);
  }
  n += of_device(a, b) + of_host<B>({}, pair, nullptr, c);
  // Goes, whatever block_m is.
  if (B::kernel == Kernel::packed) n = helper(n);
  if (B::kernel == Kernel::plain) n++;
  // Goes: nothing is packed.
  if (B::packs) n = helper(n);
  if (B::stages == 1) return n + either(a);
  return helper(n);
}
// ======== becomes
#include <cmath>

// ==== 1 KNOBS ====

enum class Kernel { packed, plain, swapped };
struct B {
  static constexpr bool packs = false;
  static constexpr int block_m = 32, mode = 0, stages = 1;
  static constexpr Kernel kernel = block_m > 8 ? Kernel::plain : Kernel::swapped;
};
template <class B> constexpr int rows = B::block_m;

// ---- of all ----
// Stays with its section.

// Two versions, of which one stays.
template <class B, bool = B::packs> struct Copy {
  // Stays.
  int copy(int n) const { return n; }
  int left;  // data stays
};

using Type = int;
using Other = Type;

using Input = __half;  // of Q
using Number = Other;  // of rows

static_assert(B::block_m > 8, "open");

// Versions for types, of which nobody has the second.
float to_float(__half x) { return __half2float(x); }
template <class E> float unit(E x) { return to_float(x); }
template <class E, int N> float shape() {
#define SHAPE(n) \
  if constexpr (N == n) { return measure("f16" #n); }
  SHAPE(8)
}

struct Options { int read = 1; };  // may lose what nobody reads
struct Nothing {};
struct Args {  // data that nobody reads keeps its place, but at the end where it has no size
  int unread;
  Nothing between;
  Options options;
};
template <class B> int count(const Args& a, int b) { return a.options.read; }  // needs no b
Number product(const Args& a, int x) {
  Number y = x + count<B>(a, x);
  return y;
}

// What nobody reads has no name, but on the device, where a macro may read it.
__device__ int of_device(int x, int y) { return x + 1; }
template <class B> int of_host(const Args& a, int (&b)[2], int* c, int d) {
  const auto both = [&](int e, int f) { return e + d; };  // f
  return both(1, 2);
}

void early(int n) {
  if (n > 3) return;
  of_device(n, n);
}

// Loses both brackets at once.
bool either(bool open) { return open; }

// Loses a loop that runs once, but not one that a break leaves.
template <class B> int once(int n) {
  const int twice = 2 * n;
  n += twice;
  do {
    if (n > 3) break;
    n++;
  } while (false);
  return n;
}

// Calls a member of an object that has no name.
template <class B> void made(int n) {
  if (n > 3) { typename Copy<B>::Maker(n, n).run(n); }
}

int counted(int& n) {
  n++;
  return n;
}

int sdpa_forward(int a, int b, int c) {
  early(a);
  counted(a);
  made<B>(once<B>(a));
  Other n = rows<B> + product({}, a) + unit(Input()) + shape<Input, 8>();
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
  // A chain of decided ones.
  n += 3;
  n += of_device(a, b) + of_host<B>({}, pair, nullptr, c);
  if (B::kernel == Kernel::plain) n++;
  return n + either(a);
}
