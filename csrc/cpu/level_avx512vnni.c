// AVX-512 with VNNI: Intel from Ice Lake and Cascade Lake on, AMD from Zen 4 on.
#include "simd_avx512.h"

#include "products.h"
#include "attention.h"
#include "rows.h"
#include "delta.h"
#include "regroup.h"

const struct pgs_level pgs_level_avx512vnni = { "avx512vnni", kernels, sizeof(kernels) / sizeof(kernels[0]), attend, norm, convolve, gate, sum, argmax, delta, regroup };
