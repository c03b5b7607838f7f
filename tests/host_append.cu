// bindings/append.cu for the CPU backend.
#include "../bindings/append.cu"

extern "C" const void* host_last_stream() { return simt::last_launch().stream; }
