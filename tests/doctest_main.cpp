// main() of the tests in C++, compiled once.
#define DOCTEST_CONFIG_IMPLEMENT
#define DOCTEST_CONFIG_NO_POSIX_SIGNALS  // the sanitizers have theirs
#include <doctest/doctest.h>

#include <cstdlib>
#include <exception>
#include <iostream>

int main(int argc, char** argv) {
  // With --abort-after a failed check throws, in threads that a test has started as well.
  std::set_terminate([] {
    std::cout.flush();
    std::_Exit(1);
  });
  doctest::Context context(argc, argv);
  return context.run();
}
