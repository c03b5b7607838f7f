#include <cstring>

struct Args {
  int Sq, Sk;
  float scale;
  int forgotten;  // goes with what gives it its value
};
// A view, of which one member is called once.
struct View {
  static constexpr int ROWS = 4;
  struct Pair { int low, high; };  // a member's name outside
  float x[ROWS];
  int first, last;
  Pair pair;
  int row(int i) const { return first + i; }
  int rows_before(int i) const { return row(i) - first; }
  bool is_empty() const { return first == last; }
  void clear() {
    for (int i = 0; i < ROWS; i++) x[i] = 0;
    Pair& both = pair;
    both.low = both.high = 0;
    use(both);
  }
};
struct Derived : View {
  int own(int i) const { return i + last; }
};

// Stays: an instruction.
__device__ float of_ptx(float x) { return x; }
// Goes, though it branches.
__device__ float finite(float m) { return m < 0 ? 0.0f : m; }
// Stays: its bool decides a branch.
__device__ bool is_first(int lane) { return lane == 0; }

// Gives what it takes, to all who call it.
const Args& same(const Args& a) { return a; }
// n / size, rounded up.
int rounds_of(int n, int size) { return (n + size - 1) / size; }
// Is called twice, and is no name: stays.
int doubled(int n) { return n + n; }

// Two values of N: both stay.
template <int N> int times(int n) { return N * n; }

// x = y, scaled.
void scale_all(View& x, const float (&y)[4], float scale) {
  for (int i = 0; i < 4; i++) x.x[i] = y[i] * scale;
}
// Has a name of its own that is one there as well: goes into braces.
void count_up(int& total, int by) {
  const int k = by * 2;
  total += k;
}
// Both would hide what they are given: they stay.
void count_down(int& total, int by) {
  const int k = by * 3;
  total -= k;
}
int hides(int x) {
  const int three = x + 1;
  return three * three;
}
// Changes its parameter, which therefore is declared.
int halved(int n) {
  while (n % 2 == 0) n /= 2;
  return n;
}
// Returns early, which is no matter where its value is returned.
int sign_of(int n) {
  if (n < 0) return -1;
  return n > 0;
}
// Takes a whole number, which an argument of another type becomes.
int whole(int n) { return n / 2; }

template <int N, class T> T sum_of(const T (&x)[N], int unread) {
  T sum = 0;
  for (int i = 0; i < N; i++) sum += x[i];
  for (int i = 0; i < N; i++) sum -= x[i];
  for (int i = 0; i < N; i++) sum += x[i];
  for (int i = 0; i < N; i++) sum -= x[i];
  for (int i = 0; i < N; i++) sum += x[i];
  for (int i = 0; i < N; i++) sum -= x[i];
  for (int i = 0; i < N; i++) sum += x[i];
  for (int i = 0; i < N; i++) sum -= x[i];
  for (int i = 0; i < N; i++) sum += x[i];
  for (int i = 0; i < N; i++) sum -= x[i];
  for (int i = 0; i < N; i++) sum += x[i];
  for (int i = 0; i < N; i++) sum -= x[i];
  return sum;
}

// Halves both. Returns whether one was odd, which nobody asks.
bool halve(int (&x)[2]) {
  bool odd = false;
  for (int i = 0; i < 2; i++) {
    if (x[i] % 2) odd = true;
    if (x[i] < 0) odd = false, x[i] = 0;
    x[i] /= 2;
  }
  return odd;
}

// What nobody reads has no name where a pointer to the function is taken; on the device, where a macro may read it, it keeps it.
int callback(int read, int unread) { return read; }
__device__ int of_device(int read, int unread) { return read; }

// Loses a constructor and a parameter of the other, a method without effect, and a member that nobody reads.
struct Copier {
  int step, unread;
  explicit Copier(int n) : step(n) { init(); }
  Copier(int n, int spare) : step(n) { init(); }
  void start(int at) {}
  // Copies n from `first` on.
  int copy(int n, int first) const {
    while (n > first) n -= step;
    return n;
  }
};
// Loses the member in the middle, in its list too.
struct Tile {
  int q;
  float spare;
  int k;
};

// Goes: it holds what its user has, and a value, which gets a name.
struct Ends {
  const Args& a;
  int low, high;
};
// Loses the rate, which is 2.
struct Rates {
  int count;
  int rate = 2;
};

// Keeps the overload for the elements that the loop has.
template <int N> __device__ void hold(float (&d)[N]) { asm volatile("" : "+f"(d[0])); }
template <int N> __device__ void hold(unsigned (&d)[N]) { asm volatile("" : "+r"(d[0])); }
struct Blocks {
  float d[2][4];
  void hold_all() {
    for (auto& block : d) hold(block);
  }
};
// Loses all that its constructor does.
struct Bounds {
  int from, to, own;
  Bounds(const Args& a, int keys) : from(a.Sq), to(a.Sk - keys) { use(own); }
};
// Takes a type that is no name.
template <class T> int bytes_of(int n) {
  const int each = size_of<T>();
  return each * n;
}

int sign(int n) { return sign_of(n); }

int sdpa_forward(const Args& a, float x, int lane) {
  View S;
  Derived D;
  Args own = a;
  own.forgotten = 3;
  const float y[4] = {1, 2, 3, 4};
  S.clear();
  scale_all(S, y, a.scale);
  int total = rounds_of(same(a).Sq, same(a).Sk), k = doubled(lane) + doubled(total);
  count_up(total, lane);
  count_down(total, k);
  const int three = 3;
  const int more = hides(three);
  const int odd = halved(total);
  const auto plus = [&](int i) { return i + three; };
  total += plus(k) * S.rows_before(k) + D.own(k) + whole(x) + more + odd;
  total += times<2>(k) + times<3>(k) + call(callback) + call(of_device) + sign(total) + own.Sq;
  int pair[2] = {lane, total};
  halve(pair);
  const bool again = halve(pair);
  const bool no_time = S.is_empty();
  for (bool first = true;; first = false, total++) {
    if (total > k) break;
  }
  Copier copier(k, 2);
  copier.start(total);
  Tile tile{k, x, lane};
  use(tile);
  total += copier.copy(k, 0) + copier.copy(lane, 0) + tile.q + tile.k;
  const Ends ends{a, k, k + 1};
  Rates rates{total};
  use(rates);
  for (int i = 0; i < k; i++) {
    if (i < k) {
      total += int(lane) + ends.a.Sk + ends.low + ends.high * ends.high;
    }
    {
      use(rates.count * rates.rate);
    }
  }
  for (int i = 0; i < 0; i++) total += k;
  Blocks blocks;
  for (int i = 0; i < k; i++) blocks.hold_all();
  const Bounds bounds(a, k);
  total += bounds.own;
  if (is_first(lane)) total += finite(x) + of_ptx(x) + pair[0];
  if (total > 3) return sum_of(y, 7);
  return bytes_of<decltype(lane)>(total);
}
// ======== becomes
#include <cstring>

struct Args { int Sq, Sk; float scale; };
// A view, of which one member is called once.
struct View {
  static constexpr int ROWS = 4;
  struct Pair {};  // a member's name outside
  float x[ROWS];
  int first, last;
  Pair pair;
};
struct Derived : View {
  int own(int i) const { return i + last; }
};

// Stays: an instruction.
__device__ float of_ptx(float x) { return x; }
// Stays: its bool decides a branch.
__device__ bool is_first(int lane) { return lane == 0; }

// Is called twice, and is no name: stays.
int doubled(int n) { return n + n; }

// Two values of N: both stay.
template <int N> int times(int n) { return N * n; }

// Both would hide what they are given: they stay.
void count_down(int& total, int by) {
  const int k = by * 3;
  total -= k;
}
int hides(int x) {
  const int three = x + 1;
  return three * three;
}
// Returns early, which is no matter where its value is returned.
int sign_of(int n) {
  if (n < 0) return -1;
  return n > 0;
}

float sum_of(const float (&x)[4]) {
  float sum = 0;
  for (int i = 0; i < 4; i++) sum += x[i];
  for (int i = 0; i < 4; i++) sum -= x[i];
  for (int i = 0; i < 4; i++) sum += x[i];
  for (int i = 0; i < 4; i++) sum -= x[i];
  for (int i = 0; i < 4; i++) sum += x[i];
  for (int i = 0; i < 4; i++) sum -= x[i];
  for (int i = 0; i < 4; i++) sum += x[i];
  for (int i = 0; i < 4; i++) sum -= x[i];
  for (int i = 0; i < 4; i++) sum += x[i];
  for (int i = 0; i < 4; i++) sum -= x[i];
  for (int i = 0; i < 4; i++) sum += x[i];
  for (int i = 0; i < 4; i++) sum -= x[i];
  return sum;
}

// Halves both.
void halve(int (&x)[2]) {
  for (int i = 0; i < 2; i++) {
    if (x[i] < 0) x[i] = 0;
    x[i] /= 2;
  }
}

// What nobody reads has no name where a pointer to the function is taken; on the device, where a macro may read it, it keeps it.
int callback(int read, int) { return read; }
__device__ int of_device(int read, int unread) { return read; }

// Loses a constructor and a parameter of the other, a method without effect, and a member that nobody reads.
struct Copier {
  int step;
  Copier(int n) : step(n) { init(); }
  // Copies n from 0 on.
  int copy(int n) const {
    while (n > 0) n -= step;
    return n;
  }
};
// Loses the member in the middle, in its list too.
struct Tile { int q; int k; };

// Loses the rate, which is 2.
struct Rates { int count; };

// Keeps the overload for the elements that the loop has.
template <int N> __device__ void hold(float (&d)[N]) { asm volatile("" : "+f"(d[0])); }
struct Blocks {
  float d[2][4];
  void hold_all() {
    for (auto& block : d) hold(block);
  }
};
// Loses all that its constructor does.
struct Bounds {
  int own;
  Bounds(int) { use(own); }
};

int sdpa_forward(const Args& a, float x, int lane) {
  View S;
  Derived D;
  Args own = a;
  const float y[4] = {1, 2, 3, 4};
  for (int i = 0; i < 4; i++) S.x[i] = 0;
  View::Pair& both = S.pair;
  use(both);
  // S = y, scaled.
  for (int i = 0; i < 4; i++) S.x[i] = y[i] * a.scale;
  int total = (a.Sq + a.Sk - 1) / a.Sk, k = doubled(lane) + doubled(total);
  {
    // Has a name of its own that is one there as well: goes into braces.
    const int k = lane * 2;
    total += k;
  }
  count_down(total, k);
  const int three = 3;
  const int more = hides(three);
  // Changes its parameter, which therefore is declared.
  int n = total;
  while (n % 2 == 0) n /= 2;
  const int odd = n;

  total += (k + three) * ((S.first + k) - S.first) + D.own(k) + (int(x) / 2) + more + odd;
  total += times<2>(k) + times<3>(k) + call(callback) + call(of_device) + sign_of(total) + own.Sq;
  int pair[2] = {lane, total};
  halve(pair);
  halve(pair);
  for (;; total++) {
    if (total > k) break;
  }
  Copier copier(k);
  Tile tile{k, lane};
  use(tile);
  total += copier.copy(k) + copier.copy(lane) + tile.q + tile.k;
  const int high = k + 1;
  Rates rates{total};
  use(rates);
  for (int i = 0; i < k; i++) {
    total += lane + a.Sk + k + high * high;
    use(rates.count * 2);
  }
  Blocks blocks;
  for (int i = 0; i < k; i++) blocks.hold_all();
  const Bounds bounds(k);
  total += bounds.own;
  if (is_first(lane)) total += (x < 0 ? 0.0f : x) + of_ptx(x) + pair[0];
  if (total > 3) return sum_of(y);
  // Takes a type that is no name.
  const int each = size_of<decltype(lane)>();
  return each * total;
}
