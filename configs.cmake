# Reads configs.txt, for CMakeLists.txt and, as a script, for run_all.sh and the tools.
#   cmake -DCONFIGS=FILE [-DSOURCE=FILE] -P configs.cmake
# prints NAME, BASE, PASS or FAIL, ARCH, KNOB=VALUE... and GATE... of each valid line, separated by tabs, and errors in
# the other lines on stderr. The knobs are those listed in SOURCE (default: sdpa.cu) and in sdpa_backward.cu next to it.
#   cmake -DEXPRESSION=KNOB=VALUE [-DSOURCE=FILE] -P configs.cmake
# prints why a SCORE_MOD or MASK_MOD expression does not compile, or nothing if it does.
#
# read_configs(FILE SOURCE) sets config_names; config_base_NAME, config_expect_NAME, config_arch_NAME, config_knobs_NAME,
# config_gates_NAME and config_source_NAME (sdpa.cu or sdpa_backward.cu) for each NAME; config_bad_lines, a list of
# LINE<tab>NAME<tab>SENTENCE; and config_bad_sentences.
#
# `NAME : BASE KNOB=VALUE...` inherits the knobs and the architecture of an earlier line. The values of SCORE_MOD and
# MASK_MOD are expressions in single quotes. They are compiled here, so that an error message names the line.

cmake_policy(VERSION 3.20)

# "; did you mean NAME?" for the knob with the longest common prefix, if that is at least three letters; otherwise lists
# all knobs.
function(nearest_knob word knobs result)
  string(TOUPPER "${word}" word)
  string(LENGTH "${word}" length)
  while(length GREATER 2 AND NOT near)
    string(SUBSTRING "${word}" 0 ${length} start)
    set(near ${knobs})
    list(FILTER near INCLUDE REGEX "^${start}")
    math(EXPR length "${length} - 1")
  endwhile()
  list(JOIN near " or " near)
  list(JOIN knobs " " all)
  if(near)
    set(${result} "; did you mean ${near}?" PARENT_SCOPE)
  else()
    set(${result} "; the knobs are ${all}" PARENT_SCOPE)
  endif()
endfunction()

# Returns why the value of SCORE_MOD or MASK_MOD does not compile; "" if it does or if there is no compiler. Compiles it
# with the declarations of its names that SOURCE has between two markers.
function(expression_error word source result)
  set(${result} "" PARENT_SCOPE)
  find_program(SDPA_EXPRESSION_COMPILER NAMES $ENV{CXX} c++ g++ clang++)
  if(NOT SDPA_EXPRESSION_COMPILER)
    return()
  endif()
  file(READ "${source}" text)
  string(FIND "${text}" "\n// ---- 5f expressions of scores" begin)
  string(FIND "${text}" "\n}  // namespace expression\n" end)
  math(EXPR length "${end} - ${begin}")
  string(SUBSTRING "${text}" ${begin} ${length} text)
  string(REGEX MATCH "^([A-Z_]+)=(.*)$" found "${word}")
  string(RANDOM LENGTH 12 name)
  set(file "/tmp/sdpa_expression_${name}.cpp")
  file(WRITE "${file}" [=[
#include <cstdint>
#include <type_traits>
#define __device__
#define __forceinline__ inline
#define SDPA_NAMESPACE sdpa
#define INFINITY __builtin_inff()
#ifndef SCORE_MOD
#define SCORE_MOD NONE
#endif
#ifndef MASK_MOD
#define MASK_MOD NONE
#endif
float expf(float), exp2f(float), logf(float), log2f(float), sqrtf(float), sinf(float), cosf(float), floorf(float);
float powf(float, float), fabsf(float), fminf(float, float), fmaxf(float, float);
namespace sdpa {
struct SdpaParams { const float *x0, *x1, *x2, *x3; const int *i0, *i1; };
template <class T> T ld_global_nc(const T* from) { return *from; }
float tanh_exact(float), tanh_approx(float);
template <int> constexpr bool is_read_by_head = false;
]=] "${text}
template <class H> float value(H h, const SdpaParams& p) {
  return mask_mod(0, h, {}, {}, 0, 0, p) ? float(term(score_mod(Score{}, 0, h, {}, {}, 0, 0, p))) : 0;
}
float values(const SdpaParams& p) { return value(0, p) + value(Head{}, p); }
}
}
")
  execute_process(COMMAND ${SDPA_EXPRESSION_COMPILER} -std=c++17 -w -fsyntax-only "-D${word}" "${file}"
                  ERROR_VARIABLE words RESULT_VARIABLE failed)
  file(REMOVE "${file}")
  if(NOT failed EQUAL 0)
    string(REGEX MATCH "error: ([^\n]*)" found_error "${words}")
    set(reason "${CMAKE_MATCH_1}")
    string(REGEX REPLACE "^([A-Z_]+)=(.*)$" "\\1='\\2'" shown "${word}")
    set(${result} "${shown} does not compile: ${reason}; it is a C++ expression of the names that docs/USING.md lists"
        PARENT_SCOPE)
  endif()
endfunction()

# Formats a list of KNOB=VALUE for a shell, with expressions in quotes.
function(quoted knobs result)
  list(TRANSFORM knobs REPLACE "^((SCORE|MASK)_MOD)=(.*[^A-Za-z0-9_].*)$" "\\1='\\3'")
  string(REPLACE ";" " " knobs "${knobs}")
  set(${result} "${knobs}" PARENT_SCOPE)
endfunction()

macro(bad_line sentence)
  string(APPEND config_bad_lines "${line_number}\t${name}\t${file_name}:${line_number}: ${sentence}\n")
  set(good FALSE)
endmacro()

function(read_configs file source)
  if(NOT EXISTS "${file}")
    message(FATAL_ERROR "${file}: there is no such file; it lists one configuration a line")
  endif()
  get_filename_component(file_name "${file}" NAME)
  file(READ "${source}" text)
  string(REGEX REPLACE "\\.cu$" "_backward.cu" backward_source "${source}")
  if(EXISTS "${backward_source}")
    file(READ "${backward_source}" backward_text)
    string(APPEND text "${backward_text}")
  endif()
  string(REGEX MATCHALL "\n  X\\([A-Z][A-Z0-9_]*, " rows "${text}")  # the rows of SDPA_KNOBS and SDPA_BACKWARD_KNOBS
  list(TRANSFORM rows REPLACE "\n  X\\(|, " "" OUTPUT_VARIABLE known_knobs)

  set(config_names "")
  set(config_bad_lines "")
  file(READ "${file}" text)
  string(ASCII 239 187 191 byte_order_mark)
  string(REGEX REPLACE "^${byte_order_mark}" "" text "${text}")
  # Replace characters that are special in CMake's lists. Brackets are legal in expressions and are restored after the
  # line has been split into words. The other characters are illegal everywhere, so "?" preserves the error.
  string(REGEX REPLACE "#[^\n]*" "" text "${text}")
  string(REGEX REPLACE "[;\\]" "?" text "${text}")
  string(ASCII 1 left_bracket)
  string(ASCII 2 right_bracket)
  string(REPLACE "[" "${left_bracket}" text "${text}")
  string(REPLACE "]" "${right_bracket}" text "${text}")
  string(REGEX REPLACE "\r?\n" ";" lines "${text}")
  set(line_number 0)
  foreach(line IN LISTS lines)
    math(EXPR line_number "${line_number} + 1")
    string(REGEX MATCHALL "[A-Z_]+='[^']*'|[^ \t]+" words "${line}")
    if(words STREQUAL "")
      continue()
    endif()
    foreach(what knobs seen twice base arch gates)
      set(${what} "")
    endforeach()
    set(expect PASS)
    set(good TRUE)
    list(POP_FRONT words name)
    string(LENGTH "${name}" name_length)
    if(NOT name MATCHES "^[A-Za-z][A-Za-z0-9_]*$")
      bad_line("'${name}' is no name: it starts with a letter and has letters, digits and _ only")
    elseif(name MATCHES "^(selected|kernels|stress|cpu_backend|git_sha|find_git_sha|harness|sweeps?|table)$|_lib$" OR
           name_length GREATER 60)
      bad_line("'${name}' is no name for a line: the build uses it, or it has more than 60 letters")
    elseif(name IN_LIST config_names)
      bad_line("the name ${name} is taken by an earlier line")
    endif()
    if(words MATCHES "^:(;|$)")
      list(POP_FRONT words)
      list(POP_FRONT words base)
      if(base IN_LIST config_names)
        set(knobs "${config_knobs_${base}}")
        set(arch "${config_arch_${base}}")
      else()
        bad_line("'${base}' is no earlier line; want NAME : BASE KNOB=VALUE ...")
      endif()
    endif()
    foreach(word IN LISTS words)
      set(expression FALSE)
      if(word MATCHES "^(SCORE_MOD|MASK_MOD)='(.*)'$")
        set(expression TRUE)
        set(knob ${CMAKE_MATCH_1})
        set(value "${CMAKE_MATCH_2}")
        string(REPLACE "${left_bracket}" "[" value "${value}")
        string(REPLACE "${right_bracket}" "]" value "${value}")
        set(word "${knob}=${value}")
      elseif(word MATCHES "^([A-Za-z_][A-Za-z0-9_]*)=([A-Za-z0-9_]+)$")
        set(knob ${CMAKE_MATCH_1})
        set(value ${CMAKE_MATCH_2})
      else()
        set(knob "")
      endif()
      if(word MATCHES "^gate:((regs|smem)<=[0-9]+|spill<=[0-9]+:[A-Za-z0-9_,.-]+|also=[0-9]+a?|\
step-over=[A-Za-z0-9_]+:[0-9]+(\\.[0-9]+)?(@[A-Za-z0-9]+)?)$")
        list(APPEND gates ${word})
      elseif(word MATCHES "^gate:")
        bad_line("'${word}' is no gate; want gate:regs<=N, gate:smem<=BYTES, gate:spill<=BYTES:WHY, gate:also=ARCH or \
gate:step-over=NAME:FACTOR[@SHAPE]")
      elseif(word MATCHES "^([A-Za-z_][A-Za-z0-9_]*)=?$")
        bad_line("${CMAKE_MATCH_1} has no value: write ${CMAKE_MATCH_1}=VALUE")
      elseif(knob STREQUAL "")
        bad_line("'${word}' is not KNOB=VALUE (letters, digits and _ only)")
      elseif(word MATCHES "^expect=(PASS|FAIL)$|^arch=([0-9]+a?)$")
        set(${knob} ${value})
      elseif(knob STREQUAL "expect")
        bad_line("expect=${value}: want expect=PASS or expect=FAIL")
      elseif(knob STREQUAL "arch")
        bad_line("arch=${value}: want a CUDA architecture, as in arch=90a")
      elseif(NOT knob IN_LIST known_knobs)
        nearest_knob(${knob} "${known_knobs}" hint)
        bad_line("no knob is called ${knob}${hint}")
      elseif(knob IN_LIST twice)
        continue()
      elseif(knob IN_LIST seen)
        bad_line("${knob} is given twice")
        list(APPEND twice ${knob})
      elseif(word IN_LIST knobs)
        bad_line("${base} has ${word} already")
      else()
        set(trouble "")
        if(expression)  # several lines have the same one, and a compiler takes longer than the rest of the file
          string(MD5 key "${word}")
          if(NOT DEFINED trouble_of_${key})
            expression_error("${word}" "${source}" trouble_of_${key})
          endif()
          set(trouble "${trouble_of_${key}}")
        endif()
        if(trouble STREQUAL "")
          list(APPEND seen ${knob})
          list(FILTER knobs EXCLUDE REGEX "^${knob}=")
          list(APPEND knobs "${word}")
        else()
          bad_line("${trouble}")
        endif()
      endif()
    endforeach()
    if(good)
      list(APPEND config_names ${name})
      set(config_source_${name} sdpa.cu PARENT_SCOPE)
      if("BACKWARD=1" IN_LIST knobs)
        set(config_source_${name} sdpa_backward.cu PARENT_SCOPE)
      endif()
      foreach(what base expect arch knobs gates)
        set(config_${what}_${name} "${${what}}")
        set(config_${what}_${name} "${${what}}" PARENT_SCOPE)
      endforeach()
    endif()
  endforeach()
  set(config_names "${config_names}" PARENT_SCOPE)
  set(config_bad_lines "${config_bad_lines}" PARENT_SCOPE)
  string(REGEX REPLACE "[^\t\n]*\t[^\t\n]*\t" "" sentences "${config_bad_lines}")
  set(config_bad_sentences "${sentences}" PARENT_SCOPE)
endfunction()

if(CMAKE_SCRIPT_MODE_FILE STREQUAL CMAKE_CURRENT_LIST_FILE)
  if(NOT SOURCE)
    set(SOURCE "${CMAKE_CURRENT_LIST_DIR}/sdpa.cu")
  endif()
  if(EXPRESSION)
    expression_error("${EXPRESSION}" "${SOURCE}" trouble)
    execute_process(COMMAND ${CMAKE_COMMAND} -E echo "${trouble}")
    return()
  endif()
  read_configs("${CONFIGS}" "${SOURCE}")
  set(text "")
  foreach(name IN LISTS config_names)
    quoted("${config_knobs_${name}}" knobs)
    string(REPLACE ";" " " gates "${config_gates_${name}}")
    string(APPEND text "${name}\t${config_base_${name}}\t${config_expect_${name}}\t${config_arch_${name}}\t"
           "${knobs}\t${gates}\n")
  endforeach()
  execute_process(COMMAND ${CMAKE_COMMAND} -E echo_append "${text}")
  if(config_bad_sentences)
    message("${config_bad_sentences}")
  endif()
endif()
