// Replaces the CUDA driver's header: tensor maps and the function that encodes them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "engine.h"

using cuuint32_t = uint32_t;
using cuuint64_t = uint64_t;

enum CUresult { CUDA_SUCCESS = 0, CUDA_ERROR_INVALID_VALUE = 1 };
enum CUtensorMapDataType { CU_TENSOR_MAP_DATA_TYPE_UINT8, CU_TENSOR_MAP_DATA_TYPE_UINT16 };
enum CUtensorMapInterleave { CU_TENSOR_MAP_INTERLEAVE_NONE };
enum CUtensorMapSwizzle { CU_TENSOR_MAP_SWIZZLE_64B = 2, CU_TENSOR_MAP_SWIZZLE_128B = 3 };
enum CUtensorMapL2promotion {
  CU_TENSOR_MAP_L2_PROMOTION_L2_128B = 2,
  CU_TENSOR_MAP_L2_PROMOTION_L2_256B = 3
};
enum CUtensorMapFloatOOBfill { CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE };

struct alignas(64) CUtensorMap_st {
  static constexpr uint64_t MAGIC = 0x70616d726f736e65;
  uint64_t magic;
  const unsigned char* base;
  uint64_t size[5], stride[5];  // stride in bytes; [0] is the element's
  uint32_t box[5];
  uint16_t rank, swizzle_bytes;

  // Bytes of the whole box in shared memory, including out-of-bounds elements.
  uint64_t box_bytes() const {
    uint64_t bytes = stride[0];
    for (int i = 0; i < rank; i++) bytes *= box[i];
    return bytes;
  }
};
using CUtensorMap = CUtensorMap_st;
static_assert(sizeof(CUtensorMap) == 128, "as large as the driver's");

// Refuses the same arguments as the driver, as far as this part of the API can express them.
inline CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank,
                                       void* base, const cuuint64_t* sizes,
                                       const cuuint64_t* strides, const cuuint32_t* box,
                                       const cuuint32_t* steps, CUtensorMapInterleave,
                                       CUtensorMapSwizzle swizzle, CUtensorMapL2promotion,
                                       CUtensorMapFloatOOBfill) {
  if (simt::planned_failure(__func__)) return CUDA_ERROR_INVALID_VALUE;
  const cuuint64_t element_bytes = type == CU_TENSOR_MAP_DATA_TYPE_UINT8 ? 1 : 2;
  const cuuint64_t swizzle_bytes = swizzle == CU_TENSOR_MAP_SWIZZLE_64B ? 64 : 128;
  const uintptr_t address = reinterpret_cast<uintptr_t>(base);
  if (reinterpret_cast<uintptr_t>(map) % 64 || rank < 1 || rank > 5 || !base || address % 16) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  CUtensorMap m{};
  m.magic = CUtensorMap::MAGIC;
  m.base = static_cast<const unsigned char*>(base);
  m.rank = uint16_t(rank);
  m.swizzle_bytes = uint16_t(swizzle_bytes);
  for (cuuint32_t i = 0; i < rank; i++) {
    m.size[i] = sizes[i];
    m.box[i] = box[i];
    m.stride[i] = i ? strides[i - 1] : element_bytes;
    if (sizes[i] < 1 || sizes[i] > uint64_t(1) << 32) return CUDA_ERROR_INVALID_VALUE;
    if (box[i] < 1 || box[i] > 256 || steps[i] != 1) return CUDA_ERROR_INVALID_VALUE;
    if (i && (m.stride[i] % 16 || m.stride[i] >= uint64_t(1) << 40)) {
      return CUDA_ERROR_INVALID_VALUE;
    }
  }
  const cuuint64_t row_bytes = box[0] * element_bytes;
  if (row_bytes % 16 || row_bytes > swizzle_bytes) return CUDA_ERROR_INVALID_VALUE;
  *map = m;
  return CUDA_SUCCESS;
}
