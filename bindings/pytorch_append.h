// sdpa::append: appends new rows of K and V to caches.

#pragma once

#include <torch/library.h>

#include "append.h"
#include "pytorch.h"

struct Appender {
  decltype(&sdpa_append) append;
  char trouble[512];  // the reason for having no function, or empty
};
static auto& appenders = *new std::map<int, Appender>;  // by device
using LoadAppender = void (*)(int device, Appender* appender);
static LoadAppender load_appender;

static bool is_final(const Appender& appender) { return appender.append != nullptr; }
static const Appender& appender_for(int device) {
  return loaded_for(appenders, device, [&](Appender* appender) { load_appender(device, appender); });
}

// Returns the pointers and strides of new rows x, [B,rows,H,D] or with starts [rows,H,D], and of their cache,
// [caches or pages,keys,H,D].
static SdpaNewRows new_rows_of(const Tensor& cache, const Tensor& x) {
  const int64_t size = x.element_size();
  const int last = int(x.dim());
  return {static_cast<const char*>(x.const_data_ptr()), static_cast<char*>(cache.mutable_data_ptr()),
          last == 4 ? x.stride(0) * size : 0, x.stride(last - 3) * size, x.stride(last - 2) * size,
          cache.stride(0) * size, cache.stride(1) * size, cache.stride(2) * size, int(x.size(last - 1) * size)};
}

// Writes the rows of k and v to the caches, after the first lengths[b] rows. Returns the new lengths.
static Tensor append(const Tensor& k_cache, const Tensor& v_cache, const Tensor& k_any, const Tensor& v_any,
                     const Tensor& lengths_any, const OptionalTensor& page_table, const OptionalTensor& starts) {
  const c10::OptionalDeviceGuard guard(k_cache.device());
  const auto check = [](bool holds, const auto&... words) {
    TORCH_CHECK(holds, "flash_attn_with_kvcache: ", words...);
  };
  const auto with_rows = [](const Tensor& x) { return x.stride(-1) == 1 ? x : x.contiguous(); };
  const auto ints = [&](const char* name, const Tensor& x, int64_t dims, int64_t length) {
    check(x.device() == k_cache.device() && at::isIntegralType(x.scalar_type(), false) && x.dim() == dims &&
              x.size(0) == length, name, " is not an integer tensor [", length, dims == 2 ? ",pages of a sequence" : "",
          "] on the caches' device");
    const Tensor whole = x.scalar_type() == at::kInt ? x : x.to(at::kInt);
    return whole.stride(-1) == 1 || whole.size(-1) <= 1 ? whole : whole.contiguous();
  };
  const int64_t B = lengths_any.numel();
  for (const Tensor* x : {&k_any, &v_any}) {
    const Tensor& cache = x == &k_any ? k_cache : v_cache;
    check(cache.dim() == 4 && x->dim() == (starts ? 3 : 4), "the caches have ", cache.dim(), " dimensions, and k or v ",
          x->dim());
    check(x->device() == cache.device() && x->scalar_type() == cache.scalar_type() && x->size(-1) == cache.size(3) &&
              x->size(-2) == cache.size(2) && (starts || x->size(0) == B),
          "k and v are not of the caches' device, type, heads and D, or not of ", B, " sequences");
    check(cache.stride(3) == 1, "rows of the caches are not contiguous");
    check(page_table || cache.size(0) == B, "there are ", cache.size(0), " caches for ", B, " sequences");
  }
  check(k_any.sizes().slice(0, k_any.dim() - 1) == v_any.sizes().slice(0, v_any.dim() - 1) &&
            k_cache.sizes().slice(0, 3) == v_cache.sizes().slice(0, 3), "k and v, or their caches, differ in shape");
  const Tensor k = with_rows(k_any), v = with_rows(v_any), lengths = ints("cache_seqlens", lengths_any, 1, B);
  const Tensor new_lengths = at::empty({B}, lengths.options());
  SdpaAppend a{};
  a.k = new_rows_of(k_cache, k);
  a.v = new_rows_of(v_cache, v);
  a.B = int(B);
  a.heads = int(k.size(-2));
  a.new_rows = int(k.size(starts ? 0 : 1));
  a.count = int(k_cache.size(0));
  a.keys = int(k_cache.size(1));
  a.lengths = lengths.const_data_ptr<int>();
  a.new_lengths = new_lengths.mutable_data_ptr<int>();
  Tensor kept[2];
  if (starts) {
    kept[0] = ints("cu_seqlens_k_new", *starts, 1, B + 1);
    a.starts = kept[0].const_data_ptr<int>();
  }
  if (page_table) {
    check(k_cache.size(1) > 0, "a page of page_table has 0 keys");
    kept[1] = ints("page_table", *page_table, 2, B);
    a.page_table = kept[1].const_data_ptr<int>();
    a.page_stride = int(kept[1].stride(0));
    a.sequence_pages = int(kept[1].size(1));
  }
  const Appender& appender = appender_for(k_cache.get_device());
  check(appender.append, appender.trouble);
  const LaunchStream at(k_cache);
  const auto error = cudaError_t(appender.append(&a, at.stream));
  check(error == cudaSuccess, cudaGetErrorString(error));
  return new_lengths;
}

// There is no gradient. Increments the versions of the caches, so that autograd detects that they were modified.
static Tensor append_autograd(c10::DispatchKeySet keys, const Tensor& k_cache, const Tensor& v_cache, const Tensor& k,
                              const Tensor& v, const Tensor& lengths, const OptionalTensor& page_table,
                              const OptionalTensor& starts) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("sdpa::append", "").typed<decltype(append)>();
  for (const Tensor* cache : {&k_cache, &v_cache}) {
    if (!cache->is_inference()) cache->unsafeGetTensorImpl()->bump_version();
  }
  return op.redispatch(keys & c10::after_autograd_keyset, k_cache, v_cache, k, v, lengths, page_table, starts);
}
