// Host versions of section 3 of sdpa.cu, which includes this file inside its namespace in its place.
// One function per instruction, under the same names. Ordering rules are taken at their strictest.

// Dynamic shared memory of the CTA.
template <class T> inline T& dynamic_shared(SIMT_CALLER) {
  if (sizeof(T) > simt::self->shared_bytes) {
    simt::fail(at, "the kernel wants %zu bytes of shared memory and was launched with %zu",
               sizeof(T), simt::self->shared_bytes);
  }
  return *reinterpret_cast<T*>(simt::self->shared);
}

template <class T> inline T ld_shared(const void* src_s, SIMT_CALLER) {
  simt::check_shared(src_s, sizeof(T), at);
  if (simt::self->counting) simt::count_shared(src_s, sizeof(T), at);
  return *static_cast<const T*>(src_s);
}

template <class T> inline void st_shared(void* dst_s, T value, SIMT_CALLER) {
  simt::check_shared(dst_s, sizeof(T), at);
  if (simt::self->counting) simt::count_shared(dst_s, sizeof(T), at);
  *static_cast<T*>(dst_s) = value;
}

template <class T> inline T ld_global(const void* src_g, SIMT_CALLER) {
  simt::check_global(src_g, sizeof(T), at);
  if (simt::self->counting) simt::count_global(sizeof(T));
  return *static_cast<const T*>(src_g);
}

template <class T> inline void st_global(void* dst_g, T value, SIMT_CALLER) {
  simt::check_global(dst_g, sizeof(T), at);
  *static_cast<T*>(dst_g) = value;
}

// The bytes land at the wait that covers them; until then the destination is poison.
template <int BYTES> inline void cp_async(void* dst_s, const void* src_g, bool valid, SIMT_CALLER) {
  simt::check_shared(dst_s, BYTES, at);
  if (valid) simt::check_global(src_g, BYTES, at);
  if (simt::self->counting) simt::count_shared(dst_s, BYTES, at);
  if (simt::self->counting && valid) simt::count_global(BYTES);
  memset(dst_s, 0xff, BYTES);
  simt::self->open_copies.push_back({static_cast<unsigned char*>(dst_s),
                                     valid ? static_cast<const unsigned char*>(src_g) : nullptr,
                                     BYTES});
}

inline void cp_async_commit_group() {
  simt::self->copy_groups.push_back(std::move(simt::self->open_copies));
  simt::self->open_copies.clear();
}

template <int N> inline void cp_async_wait_group() {
  auto& groups = simt::self->copy_groups;
  while (groups.size() > size_t(N)) {
    for (auto copy = groups[0].rbegin(); copy != groups[0].rend(); ++copy) {  // any order will do
      if (copy->src) {
        memcpy(copy->dst, copy->src, copy->bytes);
      } else {
        memset(copy->dst, 0, copy->bytes);
      }
    }
    groups.erase(groups.begin());
  }
}

inline float ex2_approx_ftz(float x) {
  const float y = std::exp2(x);
  return y < 0x1p-126f ? 0.0f : y;  // NaN stays
}

inline float max_nan(float a, float b) { return a != a ? a : b != b ? b : a > b ? a : b; }

// a + b rounded towards -infinity: the rounded sum, and one step down if its exact error (Knuth's
// TwoSum) is negative.
inline float add_rm(float a, float b) {
  const float sum = a + b, b_part = sum - a;
  const float error = (a - (sum - b_part)) + (b - b_part);
  return error < 0 ? std::nextafter(sum, -INFINITY) : sum;
}

inline uint32_t bits_of(float x) { return simt::bits_of_float(x); }
inline float float_of(uint32_t bits) { return simt::float_of_bits(bits); }
