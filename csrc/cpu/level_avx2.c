// AVX2, FMA and F16C: nearly every x86 processor since 2013.
#include "simd_avx2.h"

#include "products.h"
#include "attention.h"
#include "rows.h"
#include "delta.h"
#include "regroup.h"

const struct pgs_level pgs_level_avx2 = { "avx2", kernels, sizeof(kernels) / sizeof(kernels[0]), attend, norm, convolve, gate, sum, argmax, delta, regroup };
