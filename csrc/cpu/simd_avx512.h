// Vectors of 16 outputs: AVX-512 F, BW, DQ, VL and VNNI.
#pragma once

#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define VL     16
#define ROWS   8  // that share a load of weights, at most
#define HELD   8  // vectors of sums that fit the registers

// Shapes of products (products.h): vectors of outputs at once, the fastest measured per type.
#define BYTES_SHAPE 8, 2, 2
#define Q4_K_SHAPE  8, 2, 1
#define Q5_K_SHAPE  8, 2, 2
#define Q6_K_SHAPE  8, 2, 2
#define GRID_SHAPE  8, 2, 2
#define FLOAT_SHAPE 4, 2, 2

typedef __m512  vf;
typedef __m512i vi;
typedef __m512i vb;      // VL quads of bytes
typedef __m512i vbias;   // the same, of weights + 128, ready for products
typedef __m512i vx;      // a quad of a row, VL times
typedef uint32_t vw __attribute__((vector_size(4 * VL)));

INLINE vf vf_zero(void) { return _mm512_setzero_ps(); }
INLINE vf vf_set(float x) { return _mm512_set1_ps(x); }
INLINE vf vf_load(const float * p) { return _mm512_loadu_ps(p); }
INLINE void vf_store(float * p, vf x) { _mm512_storeu_ps(p, x); }
INLINE vf vf_add(vf a, vf b) { return _mm512_add_ps(a, b); }
INLINE vf vf_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
INLINE vf vf_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
INLINE vf vf_fnma(vf a, vf b, vf c) { return _mm512_fnmadd_ps(a, b, c); }
INLINE vf vf_half(const uint16_t * p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *) p)); }
INLINE vf vf_bf16(const uint16_t * p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *) p)), 16));
}
INLINE vf vf_u8(const uint8_t * p) { return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *) p))); }
INLINE vf vf_i8(const int8_t * p) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *) p))); }
INLINE vf vf_half_words(vw x) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16((__m512i) x)); }  // the lower halves
INLINE vw vw_bytes(const uint8_t * p) { return (vw) _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *) p)); }
INLINE vf vf_int(vi x) { return _mm512_cvtepi32_ps(x); }
INLINE vi vi_set(int32_t x) { return _mm512_set1_epi32(x); }

INLINE int32_t quad(const void * p) {
    int32_t x;
    memcpy(&x, p, sizeof(x));
    return x;
}

INLINE vb   vb_load(const uint8_t * p) { return _mm512_loadu_si512(p); }
INLINE vb   vb_low(vb x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
INLINE vb   vb_high(vb x) { return _mm512_and_si512(_mm512_srli_epi16(x, 4), _mm512_set1_epi8(15)); }
// For every byte of 0 .. 15 that of `table`
INLINE vb vb_look(const uint8_t * table, vb x) {
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *) table)), x);
}
// Words of `table`
INLINE vb vb_grid(const uint32_t * table, vw index) { return _mm512_i32gather_epi32((__m512i) index, table, 4); }
// 256 - x where bit i, of `high` ones bit 4 + i, of byte `at` of a word is set: i is the byte's place in its quad
INLINE vb vb_signed(vb x, vw signs, int at, int high) {
    const __m128i   each = _mm_add_epi8(_mm_setr_epi32(0, 0x04040404, 0x08080808, 0x0c0c0c0c), _mm_set1_epi8((char) at));
    const __m512i   four = _mm512_shuffle_epi8((__m512i) signs, _mm512_broadcast_i32x4(each));
    const __mmask64 less = _mm512_test_epi8_mask(four, _mm512_set1_epi32(high ? (int) 0x80402010 : 0x08040201));
    return _mm512_mask_sub_epi8(x, less, _mm512_setzero_si512(), x);
}
INLINE vb vb_or(vb a, vb b) { return _mm512_or_si512(a, b); }
// `bits` of every byte, from bit `from` on, put at bit `to`
INLINE vb vb_place(vb x, int from, int bits, int to) {
    const __m512i moved = from < to ? _mm512_slli_epi16(x, to - from) : _mm512_srli_epi16(x, from - to);
    return _mm512_and_si512(moved, _mm512_set1_epi8((char) (((1 << bits) - 1) << to)));
}
// bit `j` of every byte, at bit 2
INLINE vb vb_third(vb x, int j) {
    return _mm512_and_si512(_mm512_slli_epi16(_mm512_srl_epi16(x, _mm_cvtsi32_si128(j)), 2), _mm512_set1_epi8(4));
}
// 2^(x - 128): half of what an exponent of MXFP4 stands for
INLINE vf vf_e8m0(const uint8_t * p) {
    const __m512i x = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *) p)), two = _mm512_set1_epi32(2);
    const __m512i normal = _mm512_slli_epi32(_mm512_sub_epi32(x, _mm512_set1_epi32(1)), 23);
    return _mm512_castsi512_ps(_mm512_mask_sllv_epi32(normal, _mm512_cmplt_epi32_mask(x, two), _mm512_set1_epi32(0x00200000), x));
}
// `bits` of every byte of `high`, from bit `from` on, put at bit 4 of `low`
INLINE vb vb_join(vb low, vb high, int from, int bits) {
    return _mm512_or_si512(low, vb_place(high, from, bits, 4));
}
// bit `j` of every byte of `high`, put at bit 4 of `low`
INLINE vb vb_fifth(vb low, vb high, int j) {
    const __m512i moved = _mm512_slli_epi16(_mm512_srl_epi16(high, _mm_cvtsi32_si128(j)), 4);
    return _mm512_or_si512(low, _mm512_and_si512(moved, _mm512_set1_epi8(16)));
}

INLINE vx vx_quad(const void * p) { return _mm512_set1_epi32(quad(p)); }

INLINE vi vi_dot(vi s, vb w, vx x) { return _mm512_dpbusd_epi32(s, w, x); }

INLINE vbias bias_of(vb w) { return w; }  // w: weights + 128

// In halves for the second group of a pair, whose Q8_0 records (8.5 cache lines) begin mid-line: loads that cross uncached lines are slow.
INLINE vbias bias_load(const uint8_t * p, int second) {
    if (!second) {
        return _mm512_loadu_si512(p);
    }
    const __m256i low = _mm256_loadu_si256((const __m256i *) p), high = _mm256_loadu_si256((const __m256i *) (p + 32));
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}
INLINE vi    bias_start(const int32_t * by_128) { return _mm512_set1_epi32(*by_128); }
INLINE vi    bias_dot(vi s, vbias w, vx x) { return _mm512_dpbusd_epi32(s, w, x); }

// z + two halves of every word times a pair of sums
INLINE vi vi_pairs(vi z, vw m, const int16_t * pair) { return _mm512_dpwssd_epi32(z, (__m512i) m, _mm512_set1_epi32(quad(pair))); }
// z + two mins of every output times the sums of two sub-blocks
INLINE vi vi_mins(vi z, const uint8_t * m, const int16_t * pair) {
    return vi_pairs(z, (vw) _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *) m)), pair);
}

// The sums of four vectors of LANES values, each added as i + (i + 8), then i + (i + 4), i + (i + 2), i + (i + 1).
INLINE void sum_four(const vf * a, const vf * b, const vf * c, const vf * d, float * out) {
    const vf ab = _mm512_add_ps(_mm512_shuffle_f32x4(*a, *b, 0x44), _mm512_shuffle_f32x4(*a, *b, 0xee));
    const vf cd = _mm512_add_ps(_mm512_shuffle_f32x4(*c, *d, 0x44), _mm512_shuffle_f32x4(*c, *d, 0xee));
    vf       s  = _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
    s           = _mm512_add_ps(s, _mm512_permute_ps(s, 0x4e));
    s           = _mm512_add_ps(s, _mm512_permute_ps(s, 0xb1));
    const __m512i first = _mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
    _mm_storeu_ps(out, _mm512_castps512_ps128(_mm512_permutexvar_ps(first, s)));
}
INLINE vf vf_sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
INLINE vf vf_div(vf a, vf b) { return _mm512_div_ps(a, b); }
INLINE vf vf_abs(vf x) { return _mm512_abs_ps(x); }
INLINE vf vf_max(vf a, vf b) { return _mm512_max_ps(a, b); }  // b if one is NaN
INLINE vf vf_exponent(vi n) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(n, _mm512_set1_epi32(127)), 23)); }  // 2^n
INLINE vi vi_nearest(vf x) { return _mm512_cvtps_epi32(x); }
INLINE vf vf_below(vf x, float limit, vf then, vf otherwise) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(limit), _CMP_LT_OQ), otherwise, then);
}
INLINE void prefetch(const void * p) { _mm_prefetch((const char *) p, _MM_HINT_T0); }

// Rows of VL vectors become columns.
INLINE void transpose(vf * x) {
    vf a[16], b[16];
    _Pragma("GCC unroll 8") for (int i = 0; i < 16; i += 2) {
        a[i]     = _mm512_unpacklo_ps(x[i], x[i + 1]);
        a[i + 1] = _mm512_unpackhi_ps(x[i], x[i + 1]);
    }
    _Pragma("GCC unroll 4") for (int i = 0; i < 16; i += 4) {  // b[i + j]: value 4 m + j of the rows i .. i + 3, for each quarter m
        b[i]     = _mm512_shuffle_ps(a[i], a[i + 2], 0x44);
        b[i + 1] = _mm512_shuffle_ps(a[i], a[i + 2], 0xee);
        b[i + 2] = _mm512_shuffle_ps(a[i + 1], a[i + 3], 0x44);
        b[i + 3] = _mm512_shuffle_ps(a[i + 1], a[i + 3], 0xee);
    }
    _Pragma("GCC unroll 4") for (int j = 0; j < 4; j++) {
        const vf low = _mm512_shuffle_f32x4(b[j], b[4 + j], 0x88), odd = _mm512_shuffle_f32x4(b[j], b[4 + j], 0xdd);
        const vf high = _mm512_shuffle_f32x4(b[8 + j], b[12 + j], 0x88), odder = _mm512_shuffle_f32x4(b[8 + j], b[12 + j], 0xdd);
        x[j]      = _mm512_shuffle_f32x4(low, high, 0x88);
        x[8 + j]  = _mm512_shuffle_f32x4(low, high, 0xdd);
        x[4 + j]  = _mm512_shuffle_f32x4(odd, odder, 0x88);
        x[12 + j] = _mm512_shuffle_f32x4(odd, odder, 0xdd);
    }
}

// The largest of LANES values of four vectors, none of them NaN.
INLINE void largest_four(const vf * a, const vf * b, const vf * c, const vf * d, float * out) {
    const vf ab = _mm512_max_ps(_mm512_shuffle_f32x4(*a, *b, 0x44), _mm512_shuffle_f32x4(*a, *b, 0xee));
    const vf cd = _mm512_max_ps(_mm512_shuffle_f32x4(*c, *d, 0x44), _mm512_shuffle_f32x4(*c, *d, 0xee));
    vf       s  = _mm512_max_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
    s           = _mm512_max_ps(s, _mm512_permute_ps(s, 0x4e));
    s           = _mm512_max_ps(s, _mm512_permute_ps(s, 0xb1));
    const __m512i first = _mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
    _mm_storeu_ps(out, _mm512_castps512_ps128(_mm512_permutexvar_ps(first, s)));
}

// The first, second, third and fourth of VL times four values, `step` apart.
INLINE void turn_fours(const float * x, float * to, int step) {
    const __m512i halves = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29);
    const __m512i others = _mm512_setr_epi32(2, 6, 10, 14, 18, 22, 26, 30, 3, 7, 11, 15, 19, 23, 27, 31);
    const vf a = vf_load(x), b = vf_load(x + 16), c = vf_load(x + 32), d = vf_load(x + 48);
    const vf low = _mm512_permutex2var_ps(a, halves, b), high = _mm512_permutex2var_ps(c, halves, d);
    const vf low_of_others = _mm512_permutex2var_ps(a, others, b), high_of_others = _mm512_permutex2var_ps(c, others, d);
    vf_store(to, _mm512_shuffle_f32x4(low, high, 0x44));
    vf_store(to + step, _mm512_shuffle_f32x4(low, high, 0xee));
    vf_store(to + 2 * step, _mm512_shuffle_f32x4(low_of_others, high_of_others, 0x44));
    vf_store(to + 3 * step, _mm512_shuffle_f32x4(low_of_others, high_of_others, 0xee));
}
