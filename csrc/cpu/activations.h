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
// The same bits as those of the C below, with nothing written to be read again: one core of a Xeon with AVX-512 took 1.09 and 1.22 ns per value in blocks of
// 32 and of 256, and takes 0.50 and 0.41. The bytes of a row that is not finite may be others; nobody reads them.
static inline __m256i magnitude_bits(__m256 x) {
    return _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0x7fffffff));
}

static inline uint32_t largest_of(__m256i most) {
    __m128i m = _mm_max_epu32(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
    m         = _mm_max_epu32(m, _mm_shuffle_epi32(m, 0x4e));
    m         = _mm_max_epu32(m, _mm_shuffle_epi32(m, 0xb1));
    return (uint32_t) _mm_cvtsi128_si32(m);
}

// nearest() of 32 values times `scale`
static inline __m256i nearest_32(const float * x, float scale) {
    __m256i y[4];
    for (int i = 0; i < 4; i++) {
        const __m256 scaled = _mm256_mul_ps(_mm256_loadu_ps(x + 8 * i), _mm256_set1_ps(scale));
        y[i] = _mm256_and_si256(_mm256_castps_si256(_mm256_add_ps(scaled, _mm256_set1_ps(12582912.0f))), _mm256_set1_epi32(255));
    }
    const __m256i bytes = _mm256_packus_epi16(_mm256_packus_epi32(y[0], y[1]), _mm256_packus_epi32(y[2], y[3]));
    return _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

// Sums of the lower and the upper 16 values, each in all places of its half
static inline __m256i sums_of_16(__m256i q) {
    __m256i s = _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_set1_epi8(1), q), _mm256_set1_epi16(1));
    s         = _mm256_add_epi32(s, _mm256_shuffle_epi32(s, 0x4e));
    return _mm256_add_epi32(s, _mm256_shuffle_epi32(s, 0xb1));
}

static void round_32(const float * x, act_32 * to, int row) {
    __m256i most_of = magnitude_bits(_mm256_loadu_ps(x));
    for (int i = 8; i < 32; i += 8) {
        most_of = _mm256_max_epu32(most_of, magnitude_bits(_mm256_loadu_ps(x + i)));
    }
    const uint32_t most = largest_of(most_of);
    const float    amax = as_float(most);
    const __m256i  q = nearest_32(x, most != 0 ? 127.0f / amax : 0.0f), sums = sums_of_16(q);
    const int32_t  sum = _mm_cvtsi128_si32(_mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1)));
    _mm256_storeu_si256((__m256i *) to->q[row], q);
    to->by_128[row] = -128 * sum;
    to->by_8[row]   = -8 * sum;
    to->d[row]      = most < NOT_FINITE ? _cvtsh_ss(_cvtss_sh(amax / 127.0f, _MM_FROUND_TO_NEAREST_INT)) : NAN;
}

static void round_256(const float * x, act_256 * to, int row) {
    __m256i most_of = magnitude_bits(_mm256_loadu_ps(x));
    for (int i = 8; i < 256; i += 8) {
        most_of = _mm256_max_epu32(most_of, magnitude_bits(_mm256_loadu_ps(x + i)));
    }
    const uint32_t most = largest_of(most_of);
    float          max  = as_float(most);
    for (int i = 0; i < 256; i += 8) {  // the first of that magnitude, with its sign
        const __m256i same = _mm256_cmpeq_epi32(magnitude_bits(_mm256_loadu_ps(x + i)), _mm256_set1_epi32((int32_t) most));
        const int     mask = _mm256_movemask_ps(_mm256_castsi256_ps(same));
        if (mask != 0) {
            max = x[i + __builtin_ctz((unsigned) mask)];
            break;
        }
    }
    const float scale = most != 0 ? -127.0f / max : 0.0f;
    for (int j = 0; j < 8; j++) {
        const __m256i q = nearest_32(x + 32 * j, scale), sums = sums_of_16(q);
        const int32_t low = _mm_cvtsi128_si32(_mm256_castsi256_si128(sums)), high = _mm_cvtsi128_si32(_mm256_extracti128_si256(sums, 1));
        _mm256_storeu_si256((__m256i *) (to->q[row] + 32 * j), q);
        to->by_32[row][2 * j]     = -32 * low;
        to->by_32[row][2 * j + 1] = -32 * high;
        to->sum[row][j]           = (int16_t) (low + high);
    }
    to->d[row] = most >= NOT_FINITE ? NAN : most != 0 ? 1.0f / scale : 0.0f;
}
#else
static void round_32(const float * x, act_32 * to, int row) {
    const uint32_t most = largest(x, 32);
    const float    amax = as_float(most), scale = most != 0 ? 127.0f / amax : 0.0f;
    int32_t        sum = 0;
    int8_t         q[32];
    for (int i = 0; i < 32; i++) {
        q[i] = nearest(x[i] * scale);
    }
    for (int i = 0; i < 32; i++) {
        sum += q[i];
    }
    memcpy(to->q[row], q, 32);
    to->by_128[row] = -128 * sum;
    to->by_8[row]   = -8 * sum;
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
        to->sum[row][j / 2] = (int16_t) (j % 2 == 0 ? sum : to->sum[row][j / 2] + sum);
    }
    to->d[row] = most >= NOT_FINITE ? NAN : most != 0 ? 1.0f / scale : 0.0f;
}

#endif

// n is a multiple of the block here: rows of quantised weights have whole blocks
static void activations_32(const float * x, int64_t n, char * tile, int row) {
    for (int64_t b = 0; b < n / 32; b++) {
        round_32(x + 32 * b, (act_32 *) tile + b, row);
    }
}

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
