// The tests' only assertion: counts, reports and goes on.
#pragma once

#include <cstdio>

static int failures = 0, checks = 0;
#define EXPECT(condition)                                                       \
  do {                                                                          \
    checks++;                                                                   \
    if (!(condition)) {                                                         \
      failures++;                                                               \
      fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition); \
    }                                                                           \
  } while (0)
