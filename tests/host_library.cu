// bindings/library.cu for the CPU backend, with its "device memory" for a test in Python.
#include "../bindings/library.cu"

extern "C" {

void* host_allocate(size_t bytes) {
  void* pointer;
  return cudaMalloc(&pointer, bytes) ? nullptr : pointer;
}
void host_free(void* pointer) { cudaFree(pointer); }
void host_synchronize() { cudaDeviceSynchronize(); }
const void* host_last_stream() { return simt::last_launch().stream; }
int host_last_threads() { return int(simt::last_launch().block_dim.x); }
int host_last_shared_bytes() { return int(simt::last_launch().shared_bytes); }
}
