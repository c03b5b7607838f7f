// doctest's main() for the tests in C++, compiled once.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#define DOCTEST_CONFIG_NO_POSIX_SIGNALS  // the sanitizers have theirs
#include <doctest/doctest.h>
