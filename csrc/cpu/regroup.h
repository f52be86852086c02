// Converts rows in the file's format to records during a product, 16 rows at a time in the first-level cache, for weights that must stay as they are (pages
// of a file). The output equals that of pack.c.
//
// Quads of inputs of 16 rows become adjacent by four 4x4 transpositions of words; the rest is shifts and masks of vectors.
#pragma once

#include "kernels.h"

typedef uint32_t words __attribute__((vector_size(4 * LANES)));  // one of each of 16 rows

#define BYTES(b) (0x01010101u * (b))

// 16 bytes of each of 16 rows as four vectors of quads.
#if defined(__AVX512F__)
INLINE void four_quads(const char * from, size_t step, words * to) {
    __m512i of[4];  // rows i, i + 4, i + 8, i + 12
    _Pragma("GCC unroll 4") for (size_t i = 0; i < 4; i++) {
        const char * row = from + i * step;  // a masked load takes no place where shuffles are made
        of[i] = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *) row));
        of[i] = _mm512_mask_broadcast_i32x4(of[i], 0x00f0, _mm_loadu_si128((const __m128i *) (row + 4 * step)));
        of[i] = _mm512_mask_broadcast_i32x4(of[i], 0x0f00, _mm_loadu_si128((const __m128i *) (row + 8 * step)));
        of[i] = _mm512_mask_broadcast_i32x4(of[i], 0xf000, _mm_loadu_si128((const __m128i *) (row + 12 * step)));
    }
    const __m512i a = _mm512_unpacklo_epi32(of[0], of[1]), b = _mm512_unpackhi_epi32(of[0], of[1]);
    const __m512i c = _mm512_unpacklo_epi32(of[2], of[3]), d = _mm512_unpackhi_epi32(of[2], of[3]);
    to[0] = (words) _mm512_unpacklo_epi64(a, c);
    to[1] = (words) _mm512_unpackhi_epi64(a, c);
    to[2] = (words) _mm512_unpacklo_epi64(b, d);
    to[3] = (words) _mm512_unpackhi_epi64(b, d);
}
#elif defined(__AVX2__)
INLINE void four_quads(const char * from, size_t step, words * to) {
    _Pragma("GCC unroll 2") for (size_t half = 0; half < 2; half++) {
        __m256i of[4];  // rows i and i + 4
        _Pragma("GCC unroll 4") for (size_t i = 0; i < 4; i++) {
            of[i] = _mm256_castsi128_si256(_mm_loadu_si128((const __m128i *) (from + (8 * half + i) * step)));
            of[i] = _mm256_inserti128_si256(of[i], _mm_loadu_si128((const __m128i *) (from + (8 * half + i + 4) * step)), 1);
        }
        const __m256i a = _mm256_unpacklo_epi32(of[0], of[1]), b = _mm256_unpackhi_epi32(of[0], of[1]);
        const __m256i c = _mm256_unpacklo_epi32(of[2], of[3]), d = _mm256_unpackhi_epi32(of[2], of[3]);
        _mm256_storeu_si256((__m256i *) (to + 0) + half, _mm256_unpacklo_epi64(a, c));
        _mm256_storeu_si256((__m256i *) (to + 1) + half, _mm256_unpackhi_epi64(a, c));
        _mm256_storeu_si256((__m256i *) (to + 2) + half, _mm256_unpacklo_epi64(b, d));
        _mm256_storeu_si256((__m256i *) (to + 3) + half, _mm256_unpackhi_epi64(b, d));
    }
}
#else
INLINE void four_quads(const char * from, size_t step, words * to) {
    for (size_t i = 0; i < LANES; i++) {
        uint32_t quads[4];
        memcpy(quads, from + i * step, sizeof(quads));
        to[0][i] = quads[0], to[1][i] = quads[1], to[2][i] = quads[2], to[3][i] = quads[3];
    }
}
#endif

// Vectors are no arguments: calls with more than a level's registers hold are compiled in several ways.
#define PUT_AS(to, x, type)                                                 \
    do {                                                                    \
        const type part_ = __builtin_convertvector(x, type);                \
        memcpy(to, &part_, sizeof(part_));                                  \
    } while (0)
typedef uint8_t  bytes __attribute__((vector_size(LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));
#define put(to, x)        PUT_AS(to, x, words)
#define put_bytes(to, x)  PUT_AS(to, x, bytes)   // the lowest byte of each
#define put_halves(to, x) PUT_AS(to, x, halves)  // the lower half of each

INLINE void scales_of(const char * from, size_t step, uint16_t * to) {  // F16
    _Pragma("GCC unroll 16") for (size_t i = 0; i < LANES; i++) {
        memcpy(to + i, from + i * step, sizeof(*to));
    }
}

INLINE void quads_of(const char * from, size_t step, int count, uint8_t (*to)[4 * LANES], uint32_t flip) {
    for (int t = 0; t < count; t += 4) {
        words w[4];
        four_quads(from + 4 * t, step, w);
        _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++) {
            put(to[t + i], w[i] ^ flip);
        }
    }
}

INLINE void regroup_mxfp4(const char * from, size_t step, rec_mxfp4 * to) {
    quads_of(from + 1, step, 4, to->q, 0);
    _Pragma("GCC unroll 16") for (size_t i = 0; i < LANES; i++) {
        to->e[i] = (uint8_t) from[i * step];
    }
}

INLINE void regroup_q4_0(const char * from, size_t step, rec_q4_0 * to) {
    scales_of(from, step, to->d);
    quads_of(from + 2, step, 4, to->q, 0);
}

INLINE void regroup_q4_1(const char * from, size_t step, rec_q4_1 * to) {
    scales_of(from, step, to->d);
    scales_of(from + 2, step, to->m);
    quads_of(from + 4, step, 4, to->q, 0);
}

// The fifth bits of 32 inputs, one word of each row: bit t of byte i is bit 4 t + i of the word.
INLINE void fifth_of(const char * from, size_t step, uint8_t * to) {
    words w, out = { 0 };
    _Pragma("GCC unroll 16") for (size_t i = 0; i < LANES; i++) {
        uint32_t high;
        memcpy(&high, from + i * step, sizeof(high));
        w[i] = high;
    }
    _Pragma("GCC unroll 8") for (int t = 0; t < 8; t++) {
        const words four = w >> (4 * t);
        const words spread = (four & 1) | ((four & 2) << 7) | ((four & 4) << 14) | ((four & 8) << 21);
        out |= spread << t;
    }
    put(to, out);
}

INLINE void regroup_q5_0(const char * from, size_t step, rec_q5_0 * to) {
    scales_of(from, step, to->d);
    fifth_of(from + 2, step, to->high);
    quads_of(from + 6, step, 4, to->q, 0);
}

INLINE void regroup_q5_1(const char * from, size_t step, rec_q5_1 * to) {
    scales_of(from, step, to->d);
    scales_of(from + 2, step, to->m);
    fifth_of(from + 4, step, to->high);
    quads_of(from + 8, step, 4, to->q, 0);
}

INLINE void regroup_q8_0(const char * from, size_t step, rec_q8_0 * to) {
    scales_of(from, step, to->d);
    quads_of(from + 2, step, 8, to->q, BYTES(128));
}

// d and dmin, then eight scales and eight mins of 6 bits each in three words
INLINE void regroup_head(const char * from, size_t step, head_k * to) {
    words w[4];
    four_quads(from, step, w);
    put_halves(to->d, w[0]);
    put_halves(to->dmin, w[0] >> 16);
    const words scale[2] = { w[1] & BYTES(63), (w[3] & BYTES(15)) | ((w[1] >> 2) & BYTES(48)) };
    const words min[2]   = { w[2] & BYTES(63), ((w[3] >> 4) & BYTES(15)) | ((w[2] >> 2) & BYTES(48)) };
    for (int half = 0; half < 2; half++) {
        for (int j = 0; j < 4; j++) {
            put_bytes(to->scale[4 * half + j], scale[half] >> (8 * j));
        }
        put_halves(to->min[2 * half], min[half]);
        put_halves(to->min[2 * half + 1], min[half] >> 16);
    }
}

INLINE void regroup_q4_k(const char * from, size_t step, rec_q4_k * to) {
    regroup_head(from, step, &to->h);
    for (int i = 0; i < 4; i++) {
        quads_of(from + 16 + 32 * i, step, 8, to->q[i], 0);
    }
}

INLINE void regroup_q5_k(const char * from, size_t step, rec_q5_k * to) {
    regroup_head(from, step, &to->h);
    quads_of(from + 16, step, 8, to->high, 0);
    for (int i = 0; i < 4; i++) {
        quads_of(from + 48 + 32 * i, step, 8, to->q[i], 0);
    }
}

// Of each half of a block, 64 bytes of nibbles (low ones of its first 64 inputs) and 32 bytes of pairs of bits (lowest ones of its first 32)
INLINE void regroup_q6_k(const char * from, size_t step, rec_q6_k * to) {
    for (int half = 0; half < 2; half++) {
        words w[16], h[8];
        for (int t = 0; t < 16; t += 4) {
            four_quads(from + 64 * half + 4 * t, step, w + t);
        }
        for (int t = 0; t < 8; t += 4) {
            four_quads(from + 128 + 32 * half + 4 * t, step, h + t);
        }
        for (int t = 0; t < 4; t++) {
            for (int i = 0; i < 2; i++) {
                const words a = w[8 * i + t], b = w[8 * i + t + 4], c = h[t] >> (4 * i), d = h[t + 4] >> (4 * i);
                put(to->q[4 * half + i][t], (a & BYTES(15)) | ((b & BYTES(15)) << 4));
                put(to->q[4 * half + i + 2][t], ((a >> 4) & BYTES(15)) | (b & BYTES(240)));
                put(to->high[2 * half + i][t],
                    (c & BYTES(3)) | ((d & BYTES(3)) << 2) | (((c >> 2) & BYTES(3)) << 4) | (((d >> 2) & BYTES(3)) << 6));
            }
        }
    }
    words w[4];
    four_quads(from + 192, step, w);
    for (int j = 0; j < 16; j++) {
        put_bytes(to->scale[j], w[j / 4] >> (j % 4 * 8));
    }
    scales_of(from + 208, step, to->d);
}

// 32 bytes of pairs of bits (lowest ones of 32 inputs, then the next 32), of each half of a block
INLINE void two_bits_of(const char * from, size_t step, uint8_t (*to)[4][4 * LANES]) {
    for (int half = 0; half < 2; half++) {
        words w[8];
        four_quads(from + 32 * half, step, w);
        four_quads(from + 32 * half + 16, step, w + 4);
        for (int i = 0; i < 2; i++) {
            for (int t = 0; t < 4; t++) {
                const words a = w[t] >> (4 * i), b = w[t + 4] >> (4 * i);
                put(to[2 * half + i][t],
                    (a & BYTES(3)) | ((b & BYTES(3)) << 2) | (((a >> 2) & BYTES(3)) << 4) | (((b >> 2) & BYTES(3)) << 6));
            }
        }
    }
}

INLINE void regroup_q2_k(const char * from, size_t step, rec_q2_k * to) {
    words w[4];
    four_quads(from, step, w);
    for (int j = 0; j < 16; j++) {
        put_bytes(to->scale[j], w[j / 4] >> (j % 4 * 8));
    }
    two_bits_of(from + 16, step, to->q);
    scales_of(from + 80, step, to->d);
    scales_of(from + 82, step, to->dmin);
}

INLINE void regroup_q3_k(const char * from, size_t step, rec_q3_k * to) {
    words h[8], w[4];
    four_quads(from, step, h);
    four_quads(from + 16, step, h + 4);
    for (int i = 0; i < 2; i++) {
        for (int t = 0; t < 4; t++) {
            words out = h[t] & 0;
            for (int j = 0; j < 8; j++) {  // sub-block 8 i + j: bit 4 i + j / 2 of the bytes of its half of 32 inputs
                out |= ((h[t + j % 2 * 4] >> (4 * i + j / 2)) & BYTES(1)) << j;
            }
            put(to->high[i][t], out);
        }
    }
    two_bits_of(from + 32, step, to->q);
    four_quads(from + 94, step, w);  // two bytes before the scales, which end with the block's scale
    scales_of(from + 108, step, to->d);
    for (int j = 0; j < 16; j++) {
        const int low = 2 + j % 8, high = 10 + j % 4;
        const words six = ((w[low / 4] >> (low % 4 * 8 + j / 8 * 4)) & 15) | ((w[high / 4] >> (high % 4 * 8 + j / 4 * 2)) & 3) << 4;
        put_bytes(to->scale[j], six - 32);
    }
}

INLINE void regroup_iq4_xs(const char * from, size_t step, rec_iq4_xs * to) {
    scales_of(from, step, to->d);
    words w[4];
    four_quads(from, step, w);  // w[0] >> 16: two upper bits each, w[1]: four lower ones
    for (int j = 0; j < 8; j++) {
        put_bytes(to->scale[j], (((w[1] >> (4 * j)) & 15) | ((w[0] >> (16 + 2 * j)) & 3) << 4) - 32);
        quads_of(from + 8 + 16 * j, step, 4, to->q[j], 0);
    }
}

INLINE void regroup_f16(const char * from, size_t step, rec_f16 * to) {
    for (int i = 0; i < 32; i += 8) {
        words w[4];
        four_quads(from + 2 * i, step, w);
        for (int j = 0; j < 4; j++) {
            put_halves(to->w[i + 2 * j], w[j]);
            put_halves(to->w[i + 2 * j + 1], w[j] >> 16);
        }
    }
}

// Four words at a time, the last ones perhaps twice.
INLINE void regroup_turned(const char * from, size_t step, const size_t size, char * to) {
    const size_t words_ = size / 4, half = size % 4;
    for (size_t t = 0; t < words_; t += 4) {
        const size_t at = t + 4 < words_ ? t : words_ - 4;
        quads_of(from + half + 4 * at, step, 4, (uint8_t (*)[4 * LANES]) to + at, 0);
    }
    if (half != 0) {
        scales_of(from, step, (uint16_t *) (to + words_ * 4 * LANES));
    }
}

// Hardware prefetchers cannot follow so many streams: the next rows are prefetched in memory order.
#define EACH_BLOCK(rec, file, call)                                                                \
    for (int64_t b = 0; b < blocks; b++) {                                                         \
        pgs_prefetch(next + (size_t) b * LANES * (file), LANES * (file));                           \
        call(rows + (size_t) b * (file), step, (rec *) (records + (size_t) b * sizeof(rec)));      \
    }                                                                                              \
    break;

// `blocks` blocks of each of LANES rows, `step` bytes apart, as records; as many bytes from `next` on come nearer meanwhile.
static void regroup(int type, const char * rows, size_t step, int64_t blocks, char * records, const char * next) {
    switch (type) {
        case GGML_TYPE_MXFP4: EACH_BLOCK(rec_mxfp4, 17, regroup_mxfp4)
        case GGML_TYPE_IQ4_NL:
        case GGML_TYPE_Q4_0: EACH_BLOCK(rec_q4_0, 18, regroup_q4_0)
        case GGML_TYPE_Q4_1: EACH_BLOCK(rec_q4_1, 20, regroup_q4_1)
        case GGML_TYPE_Q5_0: EACH_BLOCK(rec_q5_0, 22, regroup_q5_0)
        case GGML_TYPE_Q5_1: EACH_BLOCK(rec_q5_1, 24, regroup_q5_1)
        case GGML_TYPE_Q2_K: EACH_BLOCK(rec_q2_k, 84, regroup_q2_k)
        case GGML_TYPE_Q3_K: EACH_BLOCK(rec_q3_k, 110, regroup_q3_k)
        case GGML_TYPE_IQ4_XS: EACH_BLOCK(rec_iq4_xs, 136, regroup_iq4_xs)
        case GGML_TYPE_Q8_0: EACH_BLOCK(rec_q8_0, 34, regroup_q8_0)
        case GGML_TYPE_Q4_K: EACH_BLOCK(rec_q4_k, 144, regroup_q4_k)
        case GGML_TYPE_Q5_K: EACH_BLOCK(rec_q5_k, 176, regroup_q5_k)
        case GGML_TYPE_Q6_K: EACH_BLOCK(rec_q6_k, 210, regroup_q6_k)
#define TURNED_BLOCKS(type, size)                                                                             \
        case GGML_TYPE_##type:                                                                               \
            for (int64_t b = 0; b < blocks; b++) {                                                           \
                pgs_prefetch(next + (size_t) b * LANES * (size), LANES * (size));                            \
                regroup_turned(rows + (size_t) b * (size), step, size, records + (size_t) b * LANES * (size)); \
            }                                                                                                \
            break;
        EACH_TURNED(TURNED_BLOCKS)
        case GGML_TYPE_F32:
            for (int64_t i = 0; i < 32 * blocks; i += 4) {
                pgs_prefetch(next + i * 4 * LANES, 16 * LANES);
                quads_of(rows + 4 * i, step, 4, (uint8_t (*)[4 * LANES]) (records + (size_t) i * 4 * LANES), 0);
            }
            break;
        default: EACH_BLOCK(rec_f16, 64, regroup_f16)  // F16 and BF16
    }
}
