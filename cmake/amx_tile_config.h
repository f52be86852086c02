// Forced into the C++ files of ggml-cpu (llama_cpp_python.cmake does it; by hand: CXXFLAGS="-include .../amx_tile_config.h").
//
// GCC's _tile_loadconfig told the optimiser until 11.5, 12.4 and 13.3 (PR target/114098) that it reads 8 bytes. It reads 64: the stores of
// the rows and columns after them were dropped as dead, and the first tile instruction of ggml's AMX kernels ended the process with SIGILL.
// Compilers that are right have a builtin for it and keep their own; without AMX nothing is included, and nothing costs time.
#if defined(__AMX_TILE__) && defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__CUDACC__)
#if !defined(__has_builtin)
#define PGS_OWN_TILE_LOADCONFIG
#elif !__has_builtin(__builtin_ia32_ldtilecfg)
#define PGS_OWN_TILE_LOADCONFIG
#endif
#endif
#ifdef PGS_OWN_TILE_LOADCONFIG
#include <immintrin.h>
#define _tile_loadconfig(config) __asm__ volatile("ldtilecfg %0" ::"m"(*(const char(*)[64])(config)))
#endif
