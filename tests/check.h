// doctest, with CHECK as a function call: its expression templates take twice as long to compile.
#pragma once
#include <doctest/doctest.h>

[[maybe_unused]] static void check_that(bool is_good, const char* text, const char* file, int line) {
  doctest::detail::ResultBuilder result(doctest::assertType::DT_CHECK, file, line, text);
  result.setResult(doctest::detail::Result(is_good));
  result.log();
  result.react();
}
#undef CHECK
#define CHECK(...) check_that(bool(__VA_ARGS__), #__VA_ARGS__, __FILE__, __LINE__)
