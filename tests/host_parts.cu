// tools/backward_parts.cu for the CPU backend, with its "device memory" for tests/test_micro.py.
#include "../tools/backward_parts.cu"

extern "C" {

void* host_allocate(size_t bytes) {
  void* pointer;
  return cudaMalloc(&pointer, bytes) ? nullptr : pointer;
}
void host_synchronize() { cudaDeviceSynchronize(); }
}
