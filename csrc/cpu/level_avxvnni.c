// AVX2 with AVX-VNNI: Intel's client processors from Alder Lake on, AMD from Zen 5 on.
#ifdef __AVXVNNI__
#define LEVEL             pgs_level_avxvnni
#define DOT_BYTES(s, w, x) _mm256_dpbusd_avx_epi32(s, w, x)
#else  // the same instruction as AVX-512 encodes it: server processors run, and test, this level too
#define LEVEL             pgs_level_avxvnni_evex
#define DOT_BYTES(s, w, x) _mm256_dpbusd_epi32(s, w, x)
#endif
#include "simd_avx2.h"

#include "products.h"
#include "attention.h"
#include "rows.h"
#include "delta.h"
#include "regroup.h"

const struct pgs_level LEVEL = { "avxvnni", kernels, sizeof(kernels) / sizeof(kernels[0]), attend, norm, convolve, gate, sum, argmax, delta, regroup };
