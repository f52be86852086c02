// Rounding activations: by AVX2 where there is some, or else in plain C that compilers turn into the vectors of the level whose file includes this.
#pragma once

#include <math.h>
#include <string.h>

#include "ggml.h"
#include "layout.h"

#if defined(__AVX2__) && !defined(PLAIN_ROUNDING)
#include <immintrin.h>
#endif

// Nearest whole number, ties to even, for |x| < 2^22; anything for others. No call, so loops of it become vectors.
static inline int8_t nearest(float x) {
    const float y = x + 12582912.0f;
    uint32_t    bits;
    memcpy(&bits, &y, sizeof(bits));
    return (int8_t) (uint8_t) bits;
}

// The bits of the largest magnitude: as whole numbers they have the order of the magnitudes, Inf above all numbers and NaN above Inf.
static inline uint32_t largest(const float * x, int n) {
    uint32_t most = 0;
    for (int i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, x + i, sizeof(bits));
        bits &= 0x7fffffffu;
        most = bits > most ? bits : most;
    }
    return most;
}

static inline float as_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof(x));
    return x;
}

#define NOT_FINITE 0x7f800000u

#if defined(__AVX2__) && !defined(PLAIN_ROUNDING)
// Bit-equal to the C code below. Eight blocks of 32 (the parts of a block of 256) are quantised together, so that maxima, divisions and sums are vectors.
// The bytes of a row that is not finite may differ; they are never read.
static inline __m256i magnitude_bits(__m256 x) {
    return _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0x7fffffff));
}

static inline uint32_t largest_of(__m256i most) {
    __m128i m = _mm_max_epu32(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
    m         = _mm_max_epu32(m, _mm_shuffle_epi32(m, 0x4e));
    m         = _mm_max_epu32(m, _mm_shuffle_epi32(m, 0xb1));
    return (uint32_t) _mm_cvtsi128_si32(m);
}

// The largest magnitudes of 32 values, in eight places
static inline __m256i largest_bits_of_32(const float * x) {
#if defined(__AVX512F__)
    const __m512i of  = _mm512_set1_epi32(0x7fffffff);
    const __m512i low = _mm512_and_si512(_mm512_loadu_si512(x), of), high = _mm512_and_si512(_mm512_loadu_si512(x + 16), of);
    const __m512i m   = _mm512_max_epu32(low, high);
    return _mm256_max_epu32(_mm512_castsi512_si256(m), _mm512_extracti64x4_epi64(m, 1));
#else
    __m256i most = magnitude_bits(_mm256_loadu_ps(x));
    for (int i = 8; i < 32; i += 8) {
        most = _mm256_max_epu32(most, magnitude_bits(_mm256_loadu_ps(x + i)));
    }
    return most;
#endif
}

// nearest() of 32 values times `scale`
static inline __m256i nearest_32(const float * x, float scale) {
#if defined(__AVX512F__)
    const __m512 by = _mm512_set1_ps(scale), whole = _mm512_set1_ps(12582912.0f);
    const __m512 low = _mm512_add_ps(_mm512_mul_ps(_mm512_loadu_ps(x), by), whole), high = _mm512_add_ps(_mm512_mul_ps(_mm512_loadu_ps(x + 16), by), whole);
    return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm512_cvtepi32_epi8(_mm512_castps_si512(low))), _mm512_cvtepi32_epi8(_mm512_castps_si512(high)), 1);
#else
    __m256i y[4];
    for (int i = 0; i < 4; i++) {
        const __m256 scaled = _mm256_mul_ps(_mm256_loadu_ps(x + 8 * i), _mm256_set1_ps(scale));
        y[i] = _mm256_and_si256(_mm256_castps_si256(_mm256_add_ps(scaled, _mm256_set1_ps(12582912.0f))), _mm256_set1_epi32(255));
    }
    const __m256i bytes = _mm256_packus_epi16(_mm256_packus_epi32(y[0], y[1]), _mm256_packus_epi32(y[2], y[3]));
    return _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
#endif
}

// Sums of four values each
static inline __m256i sums_of_4(__m256i q) {
    return _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_set1_epi8(1), q), _mm256_set1_epi16(1));
}

// What OP makes of the lower and of the upper four places of four vectors, side by side in the lower and the upper half
#define OF_HALVES(name, OP)                                                                                              \
    static inline __m256i name(const __m256i * v) {                                                                      \
        const __m256i a = OP(_mm256_unpacklo_epi32(v[0], v[1]), _mm256_unpackhi_epi32(v[0], v[1]));                      \
        const __m256i b = OP(_mm256_unpacklo_epi32(v[2], v[3]), _mm256_unpackhi_epi32(v[2], v[3]));                      \
        return OP(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));                                             \
    }
OF_HALVES(largest_of_halves, _mm256_max_epu32)
OF_HALVES(sums_of_halves, _mm256_add_epi32)

// Eight blocks of a row, or fewer: `count`
static inline void round_blocks_32(const float * x, act_32 * to, int row, int count) {
    __m256i v[8];
    float   scale[8], d[8];
    int32_t sum[8], first[8];
    for (int b = 0; b < 8; b++) {
        v[b] = b < count ? largest_bits_of_32(x + 32 * b) : _mm256_setzero_si256();
    }
    const __m256i few = largest_of_halves(v), others = largest_of_halves(v + 4);
    const __m256i most = _mm256_max_epu32(_mm256_permute2x128_si256(few, others, 0x20), _mm256_permute2x128_si256(few, others, 0x31));
    const __m256  amax = _mm256_castsi256_ps(most), by = _mm256_set1_ps(127.0f);
    const __m256  zero = _mm256_castsi256_ps(_mm256_cmpeq_epi32(most, _mm256_setzero_si256()));
    const __m256  infinite = _mm256_castsi256_ps(_mm256_cmpgt_epi32(most, _mm256_set1_epi32(NOT_FINITE - 1)));
    const __m256  half = _mm256_cvtph_ps(_mm256_cvtps_ph(_mm256_div_ps(amax, by), _MM_FROUND_TO_NEAREST_INT));
    _mm256_storeu_ps(scale, _mm256_andnot_ps(zero, _mm256_div_ps(by, amax)));
    _mm256_storeu_ps(d, _mm256_blendv_ps(half, _mm256_set1_ps(NAN), infinite));
    for (int b = 0; b < count; b++) {
        const __m256i q = nearest_32(x + 32 * b, scale[b]);
        _mm256_storeu_si256((__m256i *) to[b].q[row], q);
        v[b] = sums_of_4(q);
    }
    const __m256i low = sums_of_halves(v), high = sums_of_halves(v + 4), of_first = _mm256_permute2x128_si256(low, high, 0x20);
    _mm256_storeu_si256((__m256i *) first, of_first);
    _mm256_storeu_si256((__m256i *) sum, _mm256_add_epi32(of_first, _mm256_permute2x128_si256(low, high, 0x31)));
    for (int b = 0; b < count; b++) {
        to[b].by_128[row] = -128 * sum[b];
        to[b].by_8[row]   = -8 * sum[b];
        to[b].first[row]  = first[b];
        to[b].d[row]      = d[b];
    }
}

// The value of the largest magnitude, with its sign, the first of those of both signs
static inline float largest_value(const float * x, int n, uint32_t * most) {
    __m256i above = _mm256_setzero_si256(), below = _mm256_setzero_si256();  // as whole numbers with and without a sign: positive and negative ones
    for (int i = 0; i < n; i += 8) {
        const __m256i bits = _mm256_castps_si256(_mm256_loadu_ps(x + i));
        above = _mm256_max_epi32(above, bits);
        below = _mm256_max_epu32(below, bits);
    }
    const uint32_t up = largest_of(above), low = largest_of(below), down = low > 0x7fffffffu ? low & 0x7fffffffu : 0;
    *most = up > down ? up : down;
    if (up != down) {
        return up > down ? as_float(up) : -as_float(down);
    }
    for (int i = 0; i < n; i++) {
        if (fabsf(x[i]) == as_float(up)) {
            return x[i];
        }
    }
    return as_float(up);  // NaN
}

static void round_256(const float * x, act_256 * to, int row) {
    uint32_t    most;
    const float max = largest_value(x, 256, &most), scale = most != 0 ? -127.0f / max : 0.0f;
    __m256i     v[8];
    for (int j = 0; j < 8; j++) {
        const __m256i q = nearest_32(x + 32 * j, scale);
        _mm256_storeu_si256((__m256i *) (to->q[row] + 32 * j), q);
        v[j] = sums_of_4(q);
    }
    for (int j = 0; j < 8; j += 4) {
        const __m256i sums = sums_of_halves(v + j), by_32 = _mm256_sub_epi32(_mm256_setzero_si256(), _mm256_slli_epi32(sums, 5));
        const __m128i low = _mm256_castsi256_si128(by_32), high = _mm256_extracti128_si256(by_32, 1);
        const __m128i both = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
        _mm_storeu_si128((__m128i *) (to->by_32[row] + 2 * j), _mm_unpacklo_epi32(low, high));
        _mm_storeu_si128((__m128i *) (to->by_32[row] + 2 * j + 4), _mm_unpackhi_epi32(low, high));
        _mm_storel_epi64((__m128i *) (to->sum[row] + j), _mm_packs_epi32(both, both));
        const __m128i lower = _mm256_castsi256_si128(sums), upper = _mm256_extracti128_si256(sums, 1);
        _mm_storeu_si128((__m128i *) (to->of_16[row] + 2 * j), _mm_packs_epi32(_mm_unpacklo_epi32(lower, upper), _mm_unpackhi_epi32(lower, upper)));
    }
    to->d[row] = most >= NOT_FINITE ? NAN : most != 0 ? 1.0f / scale : 0.0f;
}

// n is a multiple of the block here: rows of quantised weights have whole blocks
static void activations_32(const float * x, int64_t n, char * tile, int row) {
    int64_t b = 0;
    for (; b + 8 <= n / 32; b += 8) {
        round_blocks_32(x + 32 * b, (act_32 *) tile + b, row, 8);
    }
    if (b < n / 32) {
        round_blocks_32(x + 32 * b, (act_32 *) tile + b, row, (int) (n / 32 - b));
    }
}
#else
static void round_32(const float * x, act_32 * to, int row) {
    const uint32_t most = largest(x, 32);
    const float    amax = as_float(most), scale = most != 0 ? 127.0f / amax : 0.0f;
    int32_t        sum = 0, first = 0;
    int8_t         q[32];
    for (int i = 0; i < 32; i++) {
        q[i] = nearest(x[i] * scale);
    }
    for (int i = 0; i < 16; i++) {
        first += q[i];
        sum += q[i] + q[16 + i];
    }
    memcpy(to->q[row], q, 32);
    to->by_128[row] = -128 * sum;
    to->by_8[row]   = -8 * sum;
    to->first[row]  = first;
    // a row that is not finite must not look like one that is
    to->d[row] = most < NOT_FINITE ? ggml_fp16_to_fp32(ggml_fp32_to_fp16(amax / 127.0f)) : NAN;
}

static void round_256(const float * x, act_256 * to, int row) {
    const uint32_t most = largest(x, 256);
    float          max = as_float(most);
    for (int i = 0; i < 256; i++) {  // the first of that magnitude, with its sign
        if (fabsf(x[i]) == max) {
            max = x[i];
            break;
        }
    }
    const float scale = most != 0 ? -127.0f / max : 0.0f;
    int8_t      q[256];
    for (int i = 0; i < 256; i++) {
        q[i] = nearest(x[i] * scale);  // -127 .. 127: |x| <= |max|
    }
    memcpy(to->q[row], q, 256);
    for (int j = 0; j < 16; j++) {
        int32_t sum = 0;
        for (int i = 0; i < 16; i++) {
            sum += q[16 * j + i];
        }
        to->by_32[row][j]   = -32 * sum;
        to->of_16[row][j]   = (int16_t) sum;
        to->sum[row][j / 2] = (int16_t) (j % 2 == 0 ? sum : to->sum[row][j / 2] + sum);
    }
    to->d[row] = most >= NOT_FINITE ? NAN : most != 0 ? 1.0f / scale : 0.0f;
}

// n is a multiple of the block here: rows of quantised weights have whole blocks
static void activations_32(const float * x, int64_t n, char * tile, int row) {
    for (int64_t b = 0; b < n / 32; b++) {
        round_32(x + 32 * b, (act_32 *) tile + b, row);
    }
}

#endif

static void activations_256(const float * x, int64_t n, char * tile, int row) {
    for (int64_t b = 0; b < n / 256; b++) {
        round_256(x + 256 * b, (act_256 *) tile + b, row);
    }
}

static void activations_f32(const float * x, int64_t n, char * tile, int row) {
    for (int64_t b = 0; 32 * b < n; b++) {
        const int64_t left = n - 32 * b;
        float *       to = ((act_f32 *) tile)[b].x[row];
        memset(to, 0, 32 * sizeof(float));
        memcpy(to, x + 32 * b, (size_t) (left < 32 ? left : 32) * sizeof(float));
    }
}
