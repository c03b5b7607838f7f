// Replaces the CUDA runtime's header when kernels are compiled for the CPU: the qualifiers,
// built-in variables, vector types, intrinsics and runtime functions that sdpa.cu uses.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <tuple>
#include <utility>

#include "cuda.h"
#include "engine.h"

#define SDPA_SIMT 1  // sdpa.cu takes the host versions of its PTX section from cpu_backend/ptx.h

#define __host__
#define __device__
#define __global__
#define __constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) alignas(n)

// Built-in variables: objects whose members read the running thread's values.
#define SIMT_BUILT_IN(name, value)                              \
  inline const struct {                                         \
    struct { operator unsigned() const { return (value).x; } } x; \
    struct { operator unsigned() const { return (value).y; } } y; \
    struct { operator unsigned() const { return (value).z; } } z; \
  } name{};
SIMT_BUILT_IN(threadIdx, simt::self->index)
SIMT_BUILT_IN(blockIdx, simt::self->block_index)
SIMT_BUILT_IN(blockDim, simt::grid.block_dim)
SIMT_BUILT_IN(gridDim, simt::grid.dim)

struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

// ---- intrinsics ----

using std::max;
using std::min;

#define __syncthreads() ::simt::sync_threads(SIMT_HERE)
#define __syncwarp() ::simt::warp_collective(~0u, nullptr, nullptr, SIMT_HERE)

namespace simt {

template <class T> struct ShuffleArgs { T value; int source; };

template <class T> T shuffle(unsigned mask, T value, int source, const Site& at) {
  ShuffleArgs<T> mine{value, source};
  warp_collective(mask, &mine, [](void* const args[32], unsigned lanes) {
    T values[32];
    for (int i = 0; i < 32; i++) {
      if (lanes >> i & 1) values[i] = static_cast<ShuffleArgs<T>*>(args[i])->value;
    }
    for (int i = 0; i < 32; i++) {
      if (!(lanes >> i & 1)) continue;
      auto& a = *static_cast<ShuffleArgs<T>*>(args[i]);
      if (lanes >> a.source & 1) {
        a.value = values[a.source];
      } else {
        memset(&a.value, 0xff, sizeof(T));  // undefined on the hardware
      }
    }
  }, at);
  return mine.value;
}

inline unsigned ballot(unsigned mask, bool predicate, const Site& at) {
  unsigned mine = predicate;
  warp_collective(mask, &mine, [](void* const args[32], unsigned lanes) {
    unsigned votes = 0;
    for (int i = 0; i < 32; i++) {
      if ((lanes >> i & 1) && *static_cast<unsigned*>(args[i])) votes |= 1u << i;
    }
    for (int i = 0; i < 32; i++) {
      if (lanes >> i & 1) *static_cast<unsigned*>(args[i]) = votes;
    }
  }, at);
  return mine;
}

}  // namespace simt

template <class T> T __shfl_xor_sync(unsigned mask, T value, int lane_mask, SIMT_CALLER) {
  return simt::shuffle(mask, value, simt::self->lane ^ lane_mask, at);
}
template <class T> T __shfl_sync(unsigned mask, T value, int lane, SIMT_CALLER) {
  return simt::shuffle(mask, value, lane & 31, at);
}
inline unsigned __ballot_sync(unsigned mask, bool predicate, SIMT_CALLER) {
  return simt::ballot(mask, predicate, at);
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline bool __any_sync(unsigned mask, bool predicate, SIMT_CALLER) {
  return simt::ballot(mask, predicate, at) != 0;
}
inline bool __all_sync(unsigned mask, bool predicate, SIMT_CALLER) {
  return simt::ballot(mask, predicate, at) == mask;
}

namespace simt {
// Atomics in shared or global memory.
inline void check_atomic(const void* address, int bytes, const Site& at) {
  if (size_t(static_cast<const unsigned char*>(address) - self->shared) < self->shared_bytes) {
    return check_shared(address, bytes, at);
  }
  check_global(address, bytes, at);
  note_global_write(address, bytes);
}
}  // namespace simt
// They return the old value.
template <class T> inline T atomicAdd(T* address, T value, SIMT_CALLER) {
  simt::check_atomic(address, sizeof(T), at);
  return __atomic_fetch_add(address, value, __ATOMIC_RELAXED);
}
inline unsigned atomicMax(unsigned* address, unsigned value, SIMT_CALLER) {
  simt::check_atomic(address, sizeof *address, at);
  unsigned old = __atomic_load_n(address, __ATOMIC_RELAXED);
  while (old < value &&
         !__atomic_compare_exchange_n(address, &old, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
  return old;
}
// Counts up, after `last` from 0 again; returns the old value.
namespace simt {
template <int ORDER> inline unsigned increment(unsigned* address, unsigned last, const Site& at) {
  check_global(address, sizeof *address, at);
  note_global_write(address, sizeof *address);
  unsigned old = __atomic_load_n(address, __ATOMIC_RELAXED);
  while (!__atomic_compare_exchange_n(address, &old, old >= last ? 0 : old + 1, false, ORDER,
                                      __ATOMIC_RELAXED)) {
  }
  return old;
}
}  // namespace simt
inline unsigned atomicInc(unsigned* address, unsigned last, SIMT_CALLER) {
  return simt::increment<__ATOMIC_RELAXED>(address, last, at);
}

// ---- runtime API ----
// Two devices; the first is the default. Streams execute launches immediately; they only determine which
// launch a dependent launch follows.

#define CUDART_VERSION 0

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorInsufficientDriver = 35,
  cudaErrorInvalidDeviceFunction = 98,
  cudaErrorNoDevice = 100,
  cudaErrorInvalidDevice = 101,
  cudaErrorNoKernelImageForDevice = 209,
  cudaErrorLaunchFailure = 719,
  cudaErrorUnknown = 999,
};
using cudaStream_t = void*;
enum { cudaStreamNonBlocking = 1 };
enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount,
  cudaDevAttrL2CacheSize,
  cudaDevAttrMaxSharedMemoryPerMultiprocessor
};
struct cudaDeviceProp {
  char name[64];
  int major, minor;
  size_t sharedMemPerBlockOptin;
};
struct cudaFuncAttributes {
  int numRegs;
  size_t localSizeBytes;
};
enum cudaLaunchAttributeID {
  cudaLaunchAttributeClusterDimension = 4,
  cudaLaunchAttributeProgrammaticStreamSerialization = 6,
};
union cudaLaunchAttributeValue {
  struct {
    unsigned x, y, z;
  } clusterDim;
  int programmaticStreamSerializationAllowed;
};
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  cudaLaunchAttributeValue val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};
enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess, cudaDriverEntryPointSymbolNotFound };
enum { cudaEnableDefault = 0 };

namespace simt {

constexpr int DEVICES = 2;
constexpr int SHARED_OF_SM = 228 << 10, SHARED_OF_SYSTEM = 1 << 10;  // the latter for each CTA
inline thread_local int current_device = 0;
inline thread_local cudaError_t last_error = cudaSuccess;

// Sets and returns the error of a runtime function. A failed launch is not a sticky error.
inline cudaError_t result(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}
// Used at the start of a function that tests can make fail.
#define SIMT_MAY_FAIL                                            \
  if (const int planned = ::simt::planned_failure(__func__)) {   \
    return ::simt::result(static_cast<cudaError_t>(planned));    \
  }

inline bool is_device(int device) { return device >= 0 && device < DEVICES; }

}  // namespace simt

inline const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInvalidConfiguration: return "invalid configuration argument";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorLaunchFailure: return simt::last_report().c_str();
    default: return "invalid argument";
  }
}
inline cudaError_t cudaPeekAtLastError() { return simt::last_error; }
inline cudaError_t cudaGetLastError() { return std::exchange(simt::last_error, cudaSuccess); }

// The only function of the driver.
inline cudaError_t cudaGetDriverEntryPoint(const char* symbol, void** function, unsigned long long,
                                           cudaDriverEntryPointQueryResult* found) {
  SIMT_MAY_FAIL
  if (simt::planned_failure("symbol")) {  // the driver has no such function
    *found = cudaDriverEntryPointSymbolNotFound;
    *function = nullptr;
    return cudaSuccess;
  }
  *found = cudaDriverEntryPointSuccess;
  *function = strcmp(symbol, "cuTensorMapEncodeTiled")
                  ? nullptr
                  : reinterpret_cast<void*>(&cuTensorMapEncodeTiled);
  return cudaSuccess;
}

inline cudaError_t cudaSetDevice(int device) {
  if (!simt::is_device(device)) return simt::result(cudaErrorInvalidDevice);
  simt::current_device = device;
  return cudaSuccess;
}
inline cudaError_t cudaGetDevice(int* device) {
  SIMT_MAY_FAIL
  return *device = simt::current_device, cudaSuccess;
}
inline cudaError_t cudaGetDeviceCount(int* count) {
  *count = simt::DEVICES;
  return cudaSuccess;
}
inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp* prop, int device) {
  if (!simt::is_device(device)) return simt::result(cudaErrorInvalidDevice);
  *prop = {"CPU backend", 0, 0, 227 << 10};
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  SIMT_MAY_FAIL
  if (!simt::is_device(device)) return simt::result(cudaErrorInvalidDevice);
  *value = attribute == cudaDevAttrL2CacheSize                        ? simt::gpu.l2_bytes
           : attribute == cudaDevAttrMaxSharedMemoryPerMultiprocessor ? simt::SHARED_OF_SM
                                                                      : simt::gpu.sms[device];
  return cudaSuccess;
}

template <class F> cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* a, F) {
  *a = {0, 0};
  return cudaSuccess;
}
template <class F> cudaError_t cudaFuncSetAttribute(F kernel, cudaFuncAttribute, int value) {
  SIMT_MAY_FAIL
  if (value < 0 || value > 227 << 10) return simt::result(cudaErrorInvalidValue);
  simt::allow_shared(reinterpret_cast<const void*>(kernel), simt::current_device, value);
  return cudaSuccess;
}
template <class F>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, F, int, size_t shared_bytes) {
  SIMT_MAY_FAIL
  const int fit = simt::SHARED_OF_SM / (int(shared_bytes) + simt::SHARED_OF_SYSTEM);
  *blocks = std::min(fit, simt::gpu.ctas_per_sm);
  return cudaSuccess;
}

inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  *stream = new char;
  return cudaSuccess;
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  simt::synchronise(stream);
  return cudaSuccess;
}
inline cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  simt::synchronise(stream);
  delete static_cast<char*>(stream);
  return cudaSuccess;
}
inline cudaError_t cudaDeviceSynchronize() {
  simt::synchronise();
  return cudaSuccess;
}

template <class T> cudaError_t cudaMalloc(T** pointer, size_t bytes) {
  SIMT_MAY_FAIL
  *pointer = static_cast<T*>(simt::allocate(bytes, simt::current_device));
  return simt::result(*pointer ? cudaSuccess : cudaErrorMemoryAllocation);
}
inline cudaError_t cudaFree(void* pointer) {
  simt::synchronise();
  simt::deallocate(pointer);
  return cudaSuccess;
}
inline cudaError_t cudaMemset(void* pointer, int value, size_t bytes) {
  simt::synchronise();
  if (bytes) memset(pointer, value, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaMemcpy(void* dst, const void* src, size_t bytes, cudaMemcpyKind) {
  simt::synchronise();
  if (bytes) memcpy(dst, src, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  *free_bytes = *total_bytes = size_t(1) << 44;  // callers check the host's limit
  return cudaSuccess;
}

template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  SIMT_MAY_FAIL
  struct Call {
    void (*kernel)(Parameters...);
    std::tuple<std::decay_t<Parameters>...> arguments;
  } call{kernel, {arguments...}};
  const dim3 g = config->gridDim, b = config->blockDim;
  if (!g.x || g.x > 0x7fffffff || !g.y || g.y > 65535 || !g.z || g.z > 65535 || !b.x ||
      b.x > 1024 || !b.y || b.y > 1024 || !b.z || b.z > 64 || b.x * b.y * b.z > 1024) {
    return simt::result(cudaErrorInvalidConfiguration);
  }
  const void* const function = reinterpret_cast<const void*>(kernel);
  simt::Launch launch{};
  launch.kernel = function;
  launch.grid_dim = {g.x, g.y, g.z};
  launch.block_dim = {b.x, b.y, b.z};
  launch.shared_bytes = config->dynamicSmemBytes;
  launch.device = simt::current_device;
  launch.stream = config->stream;
  for (unsigned i = 0; i < config->numAttrs; i++) {
    const cudaLaunchAttribute& attribute = config->attrs[i];
    if (attribute.id == cudaLaunchAttributeProgrammaticStreamSerialization) {
      launch.dependent = attribute.val.programmaticStreamSerializationAllowed != 0;
    }
    if (attribute.id == cudaLaunchAttributeClusterDimension) {
      const auto& cluster = attribute.val.clusterDim;
      if (!cluster.x || cluster.x > 8 || g.x % cluster.x || cluster.y != 1 || cluster.z != 1) {
        return simt::result(cudaErrorInvalidConfiguration);
      }
      launch.cluster_ctas = int(cluster.x);
    }
  }
  if (launch.shared_bytes > size_t(simt::allowed_shared(function, launch.device))) {
    return simt::result(cudaErrorInvalidValue);
  }
  const bool ok = simt::launch(launch, [](const void* c) {
    const Call& call_ = *static_cast<const Call*>(c);
    std::apply(call_.kernel, call_.arguments);
  }, &call);
  return simt::result(ok ? cudaSuccess : cudaErrorLaunchFailure);
}
