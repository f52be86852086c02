// Vectors of 8 outputs: AVX2, FMA and F16C; products of bytes by AVX-VNNI where DOT_BYTES says so.
#pragma once

#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define VL     8
#define ROWS   8  // that share a load of weights, at most

typedef __m256  vf;
typedef __m256i vi;
typedef __m256i vb;
typedef __m256i vx;  // a quad of a row, VL times
typedef uint32_t vw __attribute__((vector_size(4 * VL)));

INLINE vf vf_zero(void) { return _mm256_setzero_ps(); }
INLINE vf vf_set(float x) { return _mm256_set1_ps(x); }
INLINE vf vf_load(const float * p) { return _mm256_loadu_ps(p); }
INLINE void vf_store(float * p, vf x) { _mm256_storeu_ps(p, x); }
INLINE vf vf_add(vf a, vf b) { return _mm256_add_ps(a, b); }
INLINE vf vf_mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
INLINE vf vf_fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
INLINE vf vf_fnma(vf a, vf b, vf c) { return _mm256_fnmadd_ps(a, b, c); }
INLINE vf vf_half(const uint16_t * p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *) p)); }
INLINE vf vf_bf16(const uint16_t * p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *) p)), 16));
}
INLINE vf vf_u8(const uint8_t * p) { return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *) p))); }
INLINE vf vf_i8(const int8_t * p) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *) p))); }
INLINE vf vf_half_words(vw x) {  // the lower halves, of words below 2^16
    const __m128i low = _mm256_castsi256_si128((__m256i) x), high = _mm256_extracti128_si256((__m256i) x, 1);
    return _mm256_cvtph_ps(_mm_packus_epi32(low, high));
}
INLINE vw vw_bytes(const uint8_t * p) { return (vw) _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *) p)); }
INLINE vf vf_int(vi x) { return _mm256_cvtepi32_ps(x); }
INLINE vi vi_set(int32_t x) { return _mm256_set1_epi32(x); }

INLINE int32_t quad(const void * p) {
    int32_t x;
    memcpy(&x, p, sizeof(x));
    return x;
}

INLINE vb   vb_load(const uint8_t * p) { return _mm256_loadu_si256((const __m256i *) p); }
INLINE vb   vb_low(vb x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
INLINE vb   vb_high(vb x) { return _mm256_and_si256(_mm256_srli_epi16(x, 4), _mm256_set1_epi8(15)); }
// For every byte of 0 .. 15 that of `table`
INLINE vb vb_look(const uint8_t * table, vb x) {
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *) table)), x);
}
// Words of `table`
INLINE vb vb_grid(const uint32_t * table, vw index) { return _mm256_i32gather_epi32((const int *) table, (__m256i) index, 4); }
// 256 - x where bit i, of `high` ones bit 4 + i, of byte `at` of a word is set: i is the byte's place in its quad
INLINE vb vb_signed(vb x, vw signs, int at, int high) {
    const __m128i each = _mm_add_epi8(_mm_setr_epi32(0, 0x04040404, 0x08080808, 0x0c0c0c0c), _mm_set1_epi8((char) at));
    const __m256i bits = _mm256_set1_epi32(high ? (int) 0x80402010 : 0x08040201);
    const __m256i four = _mm256_shuffle_epi8((__m256i) signs, _mm256_broadcastsi128_si256(each));
    const __m256i less = _mm256_cmpeq_epi8(_mm256_and_si256(four, bits), bits);
    return _mm256_sub_epi8(_mm256_xor_si256(x, less), less);
}
INLINE vb vb_or(vb a, vb b) { return _mm256_or_si256(a, b); }
// `bits` of every byte, from bit `from` on, put at bit `to`
INLINE vb vb_place(vb x, int from, int bits, int to) {
    const __m256i moved = from < to ? _mm256_slli_epi16(x, to - from) : _mm256_srli_epi16(x, from - to);
    return _mm256_and_si256(moved, _mm256_set1_epi8((char) (((1 << bits) - 1) << to)));
}
// bit `j` of every byte, at bit 2
INLINE vb vb_third(vb x, int j) {
    return _mm256_and_si256(_mm256_slli_epi16(_mm256_srl_epi16(x, _mm_cvtsi32_si128(j)), 2), _mm256_set1_epi8(4));
}
// 2^(x - 128): half of what an exponent of MXFP4 stands for
INLINE vf   vf_e8m0(const uint8_t * p) {
    const __m256i x = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *) p));
    const __m256i normal = _mm256_slli_epi32(_mm256_sub_epi32(x, _mm256_set1_epi32(1)), 23);
    const __m256i small  = _mm256_sllv_epi32(_mm256_set1_epi32(0x00200000), x);
    return _mm256_castsi256_ps(_mm256_blendv_epi8(normal, small, _mm256_cmpgt_epi32(_mm256_set1_epi32(2), x)));
}
INLINE vb   vb_join(vb low, vb high, int from, int bits) {
    return _mm256_or_si256(low, vb_place(high, from, bits, 4));
}
// bit `j` of every byte of `high`, put at bit 4 of `low`
INLINE vb vb_fifth(vb low, vb high, int j) {
    const __m256i moved = _mm256_slli_epi16(_mm256_srl_epi16(high, _mm_cvtsi32_si128(j)), 4);
    return _mm256_or_si256(low, _mm256_and_si256(moved, _mm256_set1_epi8(16)));
}

INLINE vx vx_quad(const void * p) { return _mm256_set1_epi32(quad(p)); }

// Keeps a sum where it is computed. GCC 12 puts off additions of whole numbers until their sum is needed and keeps the summands in memory meanwhile.
#define HELD_HERE(x) __asm__("" : "+x"(x))

#ifdef DOT_BYTES

#define HELD 4  // vectors of sums that fit the registers

// Shapes of products (products.h): rows and vectors of outputs at once, the fastest measured for 16 and for 32 registers.
#ifdef __AVX512VL__
#define BYTES_SHAPE 8, 2, 2
#define Q4_K_SHAPE  8, 2, 2
#define Q5_K_SHAPE  8, 2, 2
#define Q6_K_SHAPE  8, 1, 1
#define GRID_SHAPE  8, 1, 1
#define FLOAT_SHAPE 4, 2, 2
#else
#define BYTES_SHAPE 4, 2, 2
#define Q4_K_SHAPE  4, 2, 2
#define Q5_K_SHAPE  4, 2, 2
#define Q6_K_SHAPE  4, 1, 1
#define GRID_SHAPE  4, 1, 1
#define FLOAT_SHAPE 4, 1, 1
#endif

typedef __m256i vbias;

INLINE vi vi_dot(vi s, vb w, vx x) { return DOT_BYTES(s, w, x); }

INLINE vbias bias_of(vb w) { return w; }  // w: weights + 128
INLINE vbias bias_load(const uint8_t * p, int second) {
    (void) second;
    return vb_load(p);
}
INLINE vi    bias_start(const int32_t * by_128) { return _mm256_set1_epi32(*by_128); }
INLINE vi    bias_dot(vi s, vbias w, vx x) { return DOT_BYTES(s, w, x); }

#else

#define HELD 2

#define BYTES_SHAPE 4, 2, 2
#define Q4_K_SHAPE  4, 2, 2
#define Q5_K_SHAPE  8, 1, 1
#define Q6_K_SHAPE  8, 1, 1
#define GRID_SHAPE  8, 1, 1
#define FLOAT_SHAPE 4, 1, 1

// The products of two pairs are added in 16 bits, which saturate: weights up to 63 fit twice (2 * 2 * 63 * 128 = 32,256), up to 31 four times, up to
// 15 eight times. Weights + 128 do not fit, so their absolute value is multiplied by the activation with the sign: 2 * 128 * 127 = 32,512.
typedef struct vbias {
    __m256i sign, abs;
} vbias;

INLINE vi wider(vi s, __m256i pairs) { return _mm256_add_epi32(s, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))); }

#define DOTS_OF(s, w, most, n, x, stride)                                                                                   \
    __m256i pairs[2][ROWS];                                                                                                 \
    _Pragma("GCC unroll 8") for (int t = 0; t < (n); t++) {                                                                 \
        vb quads[2];                                                                                                        \
        EACH_VEC quads[v] = w;                                                                                              \
        const int each = 127 / (most), first = t % each == 0, last = t % each == each - 1 || t == (n) - 1;                  \
        EACH_ROW {                                                                                                          \
            const vx a = vx_quad((x) + r * (stride) + 4 * t);                                                               \
            EACH_VEC {                                                                                                      \
                const __m256i two = _mm256_maddubs_epi16(quads[v], a);                                                      \
                pairs[v][r]       = first ? two : _mm256_add_epi16(pairs[v][r], two);                                       \
                HELD_HERE(pairs[v][r]);                                                                                     \
                if (last) {                                                                                                 \
                    (s)[v][r] = wider((s)[v][r], pairs[v][r]);                                                              \
                }                                                                                                           \
            }                                                                                                               \
        }                                                                                                                   \
    }

// whole[v][r] += scales times the sums of 8 quads of w, which is at most 15. Scales fit 16 bits, so widening sums of pairs to 32 bits multiplies by them, too.
#define SCALED_DOTS(whole, w, scales, x, stride)                                                                            \
    {                                                                                                                       \
        __m256i pairs[2][ROWS];                                                                                             \
        _Pragma("GCC unroll 8") for (int t = 0; t < 8; t++) {                                                               \
            vb quads[2];                                                                                                    \
            EACH_VEC quads[v] = w;                                                                                          \
            EACH_ROW {                                                                                                      \
                const vx a = vx_quad((x) + r * (stride) + 4 * t);                                                           \
                EACH_VEC {                                                                                                  \
                    const __m256i two = _mm256_maddubs_epi16(quads[v], a);                                                  \
                    pairs[v][r]       = t == 0 ? two : _mm256_add_epi16(pairs[v][r], two);                                  \
                    HELD_HERE(pairs[v][r]);                                                                                 \
                }                                                                                                           \
            }                                                                                                               \
        }                                                                                                                   \
        EACH_VEC {                                                                                                          \
            const __m256i one  = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *) (scales)));                         \
            const __m256i both = _mm256_or_si256(one, _mm256_slli_epi32(one, 16));                                          \
            EACH_ROW (whole)[v][r] = _mm256_add_epi32((whole)[v][r], _mm256_madd_epi16(pairs[v][r], both));                 \
        }                                                                                                                   \
    }

INLINE vbias bias_of(vb w) {  // w: weights + 128
    const __m256i own = _mm256_xor_si256(w, _mm256_set1_epi8((char) 128));
    return (vbias) { own, _mm256_abs_epi8(own) };
}
INLINE vbias bias_load(const uint8_t * p, int second) {
    (void) second;
    return bias_of(vb_load(p));
}
INLINE vi bias_start(const int32_t * by_128) {
    (void) by_128;  // the weights are signed here
    return _mm256_setzero_si256();
}
INLINE vi bias_dot(vi s, vbias w, vx x) {
    vi sum = wider(s, _mm256_maddubs_epi16(w.abs, _mm256_sign_epi8(x, w.sign)));
    HELD_HERE(sum);
    return sum;
}

#endif

INLINE vi vi_pairs(vi z, vw m, const int16_t * pair) {
    return _mm256_add_epi32(z, _mm256_madd_epi16((__m256i) m, _mm256_set1_epi32(quad(pair))));
}
INLINE vi vi_mins(vi z, const uint8_t * m, const int16_t * pair) {
    return vi_pairs(z, (vw) _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *) m)), pair);
}

INLINE void sum_four(const vf * a, const vf * b, const vf * c, const vf * d, float * out) {
    const vf a8 = _mm256_add_ps(a[0], a[1]), b8 = _mm256_add_ps(b[0], b[1]), c8 = _mm256_add_ps(c[0], c[1]), d8 = _mm256_add_ps(d[0], d[1]);
    vf       ab = _mm256_add_ps(_mm256_permute2f128_ps(a8, b8, 0x20), _mm256_permute2f128_ps(a8, b8, 0x31));
    vf       cd = _mm256_add_ps(_mm256_permute2f128_ps(c8, d8, 0x20), _mm256_permute2f128_ps(c8, d8, 0x31));
    ab          = _mm256_add_ps(ab, _mm256_permute_ps(ab, 0x4e));
    cd          = _mm256_add_ps(cd, _mm256_permute_ps(cd, 0x4e));
    ab          = _mm256_add_ps(ab, _mm256_permute_ps(ab, 0xb1));
    cd          = _mm256_add_ps(cd, _mm256_permute_ps(cd, 0xb1));
    const __m128 one = _mm_unpacklo_ps(_mm256_castps256_ps128(ab), _mm256_extractf128_ps(ab, 1));
    const __m128 two = _mm_unpacklo_ps(_mm256_castps256_ps128(cd), _mm256_extractf128_ps(cd, 1));
    _mm_storeu_ps(out, _mm_movelh_ps(one, two));
}
INLINE vf vf_sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
INLINE vf vf_div(vf a, vf b) { return _mm256_div_ps(a, b); }
INLINE vf vf_abs(vf x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }
INLINE vf vf_max(vf a, vf b) { return _mm256_max_ps(a, b); }
INLINE vf vf_exponent(vi n) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23)); }
INLINE vi vi_nearest(vf x) { return _mm256_cvtps_epi32(x); }
INLINE vf vf_below(vf x, float limit, vf then, vf otherwise) {
    return _mm256_blendv_ps(otherwise, then, _mm256_cmp_ps(x, _mm256_set1_ps(limit), _CMP_LT_OQ));
}
INLINE void prefetch(const void * p) { _mm_prefetch((const char *) p, _MM_HINT_T0); }

INLINE void transpose(vf * x) {
    vf a[8], b[8];
    _Pragma("GCC unroll 4") for (int i = 0; i < 8; i += 2) {
        a[i]     = _mm256_unpacklo_ps(x[i], x[i + 1]);
        a[i + 1] = _mm256_unpackhi_ps(x[i], x[i + 1]);
    }
    _Pragma("GCC unroll 2") for (int i = 0; i < 8; i += 4) {
        b[i]     = _mm256_shuffle_ps(a[i], a[i + 2], 0x44);
        b[i + 1] = _mm256_shuffle_ps(a[i], a[i + 2], 0xee);
        b[i + 2] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0x44);
        b[i + 3] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0xee);
    }
    _Pragma("GCC unroll 4") for (int j = 0; j < 4; j++) {
        x[j]     = _mm256_permute2f128_ps(b[j], b[4 + j], 0x20);
        x[4 + j] = _mm256_permute2f128_ps(b[j], b[4 + j], 0x31);
    }
}

// The largest of LANES values of four pairs of vectors, none of them NaN.
INLINE void largest_four(const vf * a, const vf * b, const vf * c, const vf * d, float * out) {
    const vf a8 = _mm256_max_ps(a[0], a[1]), b8 = _mm256_max_ps(b[0], b[1]), c8 = _mm256_max_ps(c[0], c[1]), d8 = _mm256_max_ps(d[0], d[1]);
    const vf ab = _mm256_max_ps(_mm256_unpacklo_ps(a8, b8), _mm256_unpackhi_ps(a8, b8));
    const vf cd = _mm256_max_ps(_mm256_unpacklo_ps(c8, d8), _mm256_unpackhi_ps(c8, d8));
    const vf s  = _mm256_max_ps(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));
    _mm_storeu_ps(out, _mm_max_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1)));
}

// The first, second, third and fourth of VL times four values, `step` apart.
INLINE void turn_fours(const float * x, float * to, int step) {
    const vf a = vf_load(x), b = vf_load(x + 8), c = vf_load(x + 16), d = vf_load(x + 24);
    const vf e = _mm256_permute2f128_ps(a, c, 0x20), f = _mm256_permute2f128_ps(a, c, 0x31);  // of values 0 and 4, 1 and 5
    const vf g = _mm256_permute2f128_ps(b, d, 0x20), h = _mm256_permute2f128_ps(b, d, 0x31);  // 2 and 6, 3 and 7
    const vf ef = _mm256_unpacklo_ps(e, f), fe = _mm256_unpackhi_ps(e, f), gh = _mm256_unpacklo_ps(g, h), hg = _mm256_unpackhi_ps(g, h);
    vf_store(to, _mm256_shuffle_ps(ef, gh, 0x44));
    vf_store(to + step, _mm256_shuffle_ps(ef, gh, 0xee));
    vf_store(to + 2 * step, _mm256_shuffle_ps(fe, hg, 0x44));
    vf_store(to + 3 * step, _mm256_shuffle_ps(fe, hg, 0xee));
}
