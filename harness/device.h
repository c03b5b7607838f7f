// Properties of the GPU, and the resources that a kernel uses.
#pragma once

#include <fstream>
#include <string>

#include "problem.h"

namespace SDPA_NAMESPACE {
namespace {

struct Device {
  string name, sm, driver;
  string missing;                             // the reason why kernels cannot run here, or empty
  double matrix_flops = 0, memory_bytes = 0;  // peak rates per second; 0: unknown
};

string driver_version() {
  std::ifstream file("/proc/driver/nvidia/version");
  string word;
  while (file >> word) {
    const bool number = word.find_first_not_of("0123456789.") == string::npos;
    if (number && word.find('.') != string::npos) return word;
  }
  return "";
}

#ifdef SDPA_SIMT
void find_peaks(Device&, const cudaDeviceProp&) {}
#else
void find_peaks(Device& d, const cudaDeviceProp& prop) {
  const struct {
    int sm, flops;  // per SM and cycle: dense 16-bit products, fp32 sums (GeForce: half rate)
  } rates[] = {{80, 2048}, {86, 1024}, {89, 1024}, {90, 4096}, {100, 8192}, {120, 1024}};
  for (const auto& rate : rates) {
    if (rate.sm != prop.major * 10 + prop.minor) continue;
    const int rate_of_type = line.query == DType::e4m3 ? 2 : 1;  // relative to 16-bit products
    d.matrix_flops = 1e3 * rate.flops * rate_of_type * prop.multiProcessorCount *
                     device_attribute(cudaDevAttrClockRate, 0);
  }
  d.memory_bytes = 2e3 * device_attribute(cudaDevAttrMemoryClockRate, 0) * prop.memoryBusWidth / 8;
}
#endif  // SDPA_SIMT

Device find_device() {
  Device d;
  int count = 0;
  cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess || count == 0) {
    const bool none =
        error == cudaSuccess || error == cudaErrorNoDevice || driver_version().empty();
    d.missing = none ? "no CUDA GPU in this machine"
                     : string("no usable CUDA GPU: ") + cudaGetErrorString(error);
    return d;
  }
  cudaDeviceProp prop;
  require(cudaGetDeviceProperties(&prop, 0), "querying the GPU's properties");
  d.name = prop.name;
  if (!has_clock) return d;
  d.sm = to_string(prop.major) + to_string(prop.minor);
  d.driver = driver_version();
  find_peaks(d, prop);
  const KernelFacts k = line.facts_of({});
  cudaFuncAttributes attributes;
  error = cudaFuncGetAttributes(&attributes, k.kernel);
  if (error != cudaSuccess) {
    cudaGetLastError();
    d.missing = format("built for sm_%s and this GPU is sm_%s (%s); build again on this machine",
                       line.archs, d.sm.c_str(), cudaGetErrorString(error));
  } else if (k.shared_bytes > prop.sharedMemPerBlockOptin) {
    d.missing = format("needs %zu bytes of shared memory per CTA and this GPU has %zu",
                       k.shared_bytes, prop.sharedMemPerBlockOptin);
  }
  return d;
}

struct Resources {  // used by a kernel on this GPU
  int regs = 0, spill_bytes = 0, ctas_per_sm = 0;
};

Resources resources_of(const KernelFacts& k) {
  cudaFuncAttributes attributes;
  Resources r;
  require(cudaFuncGetAttributes(&attributes, k.kernel), "querying the kernel's registers");
  require(cudaFuncSetAttribute(k.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               int(k.shared_bytes)),
          "setting the kernel's shared memory");
  require(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&r.ctas_per_sm, k.kernel, k.threads,
                                                        k.shared_bytes),
          "querying the occupancy");
  r.regs = attributes.numRegs;
  r.spill_bytes = int(attributes.localSizeBytes);
  return r;
}

}  // namespace
}  // namespace SDPA_NAMESPACE
