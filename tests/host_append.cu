// bindings/append.cu for the CPU backend.
#include "../bindings/append.cu"
