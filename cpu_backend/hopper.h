// Host versions of the sm_90 part of section 3 of sdpa.cu; ptx.h includes this file at its end.
// engine_hopper.h describes their timing and reports.

inline void mbarrier_arrive_expect_tx(uint64_t* barrier_s, uint32_t bytes, SIMT_CALLER) {
  simt::mbarrier_arrive(barrier_s, int(bytes), at);
}
// Like mbarrier_test_wait_parity, but sleeps until the phase is complete.
inline bool mbarrier_try_wait_parity(uint64_t* barrier_s, int parity, SIMT_CALLER) {
  simt::mbarrier_wait(barrier_s, parity, at);
  return true;
}
inline void arrive_by_warp(uint64_t* barrier_s, SIMT_CALLER) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) simt::mbarrier_arrive(barrier_s, 0, at);
}
inline bool mbarrier_peek_parity(uint64_t* barrier_s, int parity, SIMT_CALLER) {
  return simt::mbarrier_peek(barrier_s, parity, at);
}
inline void fence_mbarrier_init() { simt::fence_mbarrier_init(); }
inline void fence_proxy_async() { simt::fence_proxy_async(); }

inline void prefetch_tensormap(const CUtensorMap* map, SIMT_CALLER) {
  simt::prefetch_tensormap(map, at);
}
template <int RANK>
inline void cp_async_bulk_tensor_load(void* dst_s, const CUtensorMap* map, const int (&c)[RANK],
                                      uint64_t* barrier_s, uint64_t, SIMT_CALLER) {
  simt::tensor_load(dst_s, map, c, RANK, barrier_s, at);
}
template <int RANK>
inline void cp_async_bulk_tensor_store(const CUtensorMap* map, const int (&c)[RANK],
                                       const void* src_s, SIMT_CALLER) {
  simt::tensor_store(map, c, RANK, src_s, at);
}
inline void cp_async_bulk_load(void* dst_s, const void* src_g, uint32_t bytes, uint64_t* barrier_s,
                               SIMT_CALLER) {
  simt::bulk_load(dst_s, src_g, bytes, barrier_s, at);
}
inline void cp_async_bulk_store(void* dst_g, const void* src_s, uint32_t bytes, SIMT_CALLER) {
  simt::bulk_store(dst_g, src_s, bytes, at);
}
inline void cp_reduce_async_bulk_add(float* dst_g, const float* src_s, uint32_t bytes, SIMT_CALLER) {
  simt::bulk_add(dst_g, src_s, bytes, at);
}
// No effect: a bulk operation reads and writes global memory when it is waited for.
inline void fence_proxy_async_global() {}
// Addresses in the shared memory of a CTA of the cluster.
inline SharedAddress address_in_cta(const void* p_s, int rank, SIMT_CALLER) {
  return reinterpret_cast<SharedAddress>(simt::address_in_cta(p_s, rank, at));
}
inline int cluster_rank() { return simt::cluster_rank(); }
inline void cluster_sync(SIMT_CALLER) { simt::sync_cluster(at); }
inline void cp_async_bulk_copy_to_cta(SharedAddress dst, const void* src_s, uint32_t bytes,
                                      SharedAddress barrier, SIMT_CALLER) {
  simt::bulk_copy_to_cta(reinterpret_cast<void*>(dst), src_s, bytes,
                         reinterpret_cast<uint64_t*>(barrier), at);
}
inline void arrive_in_cluster_by_warp(SharedAddress barrier, SIMT_CALLER) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) {
    simt::mbarrier_arrive_in_cluster(reinterpret_cast<uint64_t*>(barrier), at);
  }
}
inline void cp_async_bulk_commit_group() { simt::bulk_commit(); }
template <int N> inline void cp_async_bulk_wait_group_read() { simt::bulk_wait(N, true); }
template <int N> inline void cp_async_bulk_wait_group() { simt::bulk_wait(N, false); }

inline void wgmma_fence(SIMT_CALLER) { simt::wgmma_fence(at); }
inline void wgmma_commit_group(SIMT_CALLER) { simt::wgmma_commit(at); }
template <int N> inline void wgmma_wait_group(SIMT_CALLER) { simt::wgmma_wait(N, at); }
template <class T, int N> inline void hold(T (&)[N]) {}
inline void hold(const CUtensorMap*&) {}
template <int N> inline void forget(float (&d)[N]) {
  for (float& x : d) x = NAN;
}

inline uint64_t wgmma_descriptor(SharedAddress start, int leading_bytes, int stride_bytes) {
  const uint64_t offset = start - shared_address(simt::self->shared);
  return (offset & 0x3ffff) >> 4 | uint64_t(leading_bytes >> 4) << 16 |
         uint64_t(stride_bytes >> 4) << 32 | uint64_t(stride_bytes == 512 ? 2 : 1) << 62;
}

template <class E>
constexpr simt::Element element_of = std::is_same<E, __nv_fp8_e4m3>::value   ? simt::Element::e4m3
                                     : std::is_same<E, __nv_bfloat16>::value ? simt::Element::bf16
                                                                             : simt::Element::fp16;

// Keep d, and a of wgmma_rs, in place until the wait: the results go there, and a is read there.
template <class E, int N, int TRANS_B, int TRANS_A = 0>
inline void wgmma_ss(float (&d)[N / 2], uint64_t a, uint64_t b, bool accumulate, SIMT_CALLER) {
  static_assert(N == 8 || (N <= 256 && N % 16 == 0), "wgmma: N is 8 or a multiple of 16 up to 256");
  static_assert(sizeof(E) == 2 || !(TRANS_A || TRANS_B), "wgmma transposes 16-bit elements only");
  simt::wgmma({N, element_of<E>, TRANS_A != 0, TRANS_B != 0, accumulate, d, nullptr, a, b}, at);
}
template <class E, int N, int TRANS_B>
inline void wgmma_rs(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, bool accumulate,
                     SIMT_CALLER) {
  static_assert(N == 8 || (N <= 256 && N % 16 == 0), "wgmma: N is 8 or a multiple of 16 up to 256");
  static_assert(sizeof(E) == 2 || !TRANS_B, "wgmma transposes 16-bit elements only");
  simt::wgmma({N, element_of<E>, false, TRANS_B != 0, accumulate, d, a, 0, b}, at);
}

template <int N, int CTAS = 1> inline void setmaxnreg_dec(SIMT_CALLER) { simt::setmaxnreg(N, CTAS, false, at); }
template <int N, int CTAS = 1> inline void setmaxnreg_inc(SIMT_CALLER) { simt::setmaxnreg(N, CTAS, true, at); }

template <bool TRANS>
inline void stmatrix_x4(SharedAddress row, const uint32_t (&r)[4], SIMT_CALLER) {
  matrix_collective<4, TRANS, true>(reinterpret_cast<void*>(row), const_cast<uint32_t*>(r), at);
}

inline void griddepcontrol_wait(SIMT_CALLER) { simt::griddepcontrol_wait(at); }
// No effect: a dependent launch starts when all CTAs have ended.
inline void griddepcontrol_launch_dependents() {}
