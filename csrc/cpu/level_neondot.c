// NEON with dot products of bytes: ARMv8.4 and later, and most processors of 8.2 since 2018 (Apple's from A13 and M1 on, Neoverse N1).
#include "simd_neon.h"

#include "products.h"
#include "attention.h"
#include "rows.h"
#include "delta.h"
#include "regroup.h"

const struct pgs_level pgs_level_neondot = { "neondot", kernels, sizeof(kernels) / sizeof(kernels[0]), attend, norm, convolve, gate, sum, argmax, delta, regroup };
