// Vectors of 8 outputs, as pairs of registers: NEON with dot products of bytes. Weights of up to 6 bits, and those of 8 bits less 128, are signed
// bytes, so a signed dot product is exact; products of 2 x 8 bytes (i8mm) would need another layout of the weights.
#pragma once

#include <arm_neon.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define VL     8
#define ROWS   4
#define HELD   4

#define BYTES_SHAPE 4, 1, 1  // never timed
#define Q4_K_SHAPE  4, 1, 1
#define Q5_K_SHAPE  4, 1, 1
#define Q6_K_SHAPE  4, 1, 1
#define GRID_SHAPE  4, 1, 1
#define FLOAT_SHAPE 4, 1, 1

typedef struct vf { float32x4_t a, b; } vf;
typedef struct vi { int32x4_t a, b; } vi;
typedef struct vb { uint8x16_t a, b; } vb;
typedef struct vbias { int8x16_t a, b; } vbias;
typedef int32x4_t vx;  // a quad of a row, four times
typedef uint32_t vw __attribute__((vector_size(4 * VL)));

INLINE vf vf_set(float x) { return (vf) { vdupq_n_f32(x), vdupq_n_f32(x) }; }
INLINE vf vf_zero(void) { return vf_set(0.0f); }
INLINE vf vf_load(const float * p) { return (vf) { vld1q_f32(p), vld1q_f32(p + 4) }; }
INLINE void vf_store(float * p, vf x) {
    vst1q_f32(p, x.a);
    vst1q_f32(p + 4, x.b);
}
INLINE vf vf_add(vf a, vf b) { return (vf) { vaddq_f32(a.a, b.a), vaddq_f32(a.b, b.b) }; }
INLINE vf vf_sub(vf a, vf b) { return (vf) { vsubq_f32(a.a, b.a), vsubq_f32(a.b, b.b) }; }
INLINE vf vf_mul(vf a, vf b) { return (vf) { vmulq_f32(a.a, b.a), vmulq_f32(a.b, b.b) }; }
INLINE vf vf_div(vf a, vf b) { return (vf) { vdivq_f32(a.a, b.a), vdivq_f32(a.b, b.b) }; }
INLINE vf vf_fma(vf a, vf b, vf c) { return (vf) { vfmaq_f32(c.a, a.a, b.a), vfmaq_f32(c.b, a.b, b.b) }; }
INLINE vf vf_fnma(vf a, vf b, vf c) { return (vf) { vfmsq_f32(c.a, a.a, b.a), vfmsq_f32(c.b, a.b, b.b) }; }
INLINE vf vf_abs(vf x) { return (vf) { vabsq_f32(x.a), vabsq_f32(x.b) }; }
// b if one is NaN, as on x86; NEON's own maximum would be NaN
INLINE vf vf_max(vf a, vf b) { return (vf) { vbslq_f32(vcgtq_f32(a.a, b.a), a.a, b.a), vbslq_f32(vcgtq_f32(a.b, b.b), a.b, b.b) }; }
INLINE vf vf_below(vf x, float limit, vf then, vf otherwise) {
    const float32x4_t most = vdupq_n_f32(limit);
    return (vf) { vbslq_f32(vcltq_f32(x.a, most), then.a, otherwise.a), vbslq_f32(vcltq_f32(x.b, most), then.b, otherwise.b) };
}
INLINE vf vf_half(const uint16_t * p) {
    return (vf) { vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))), vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4))) };
}
INLINE vf vf_bf16(const uint16_t * p) {
    return (vf) { vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16)), vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4), 16)) };
}
INLINE vf vf_int(vi x) { return (vf) { vcvtq_f32_s32(x.a), vcvtq_f32_s32(x.b) }; }
INLINE vf vf_half_words(vw x) {  // the lower halves
    uint32x4_t of[2];
    memcpy(of, &x, sizeof(of));
    return (vf) { vcvt_f32_f16(vreinterpret_f16_u16(vmovn_u32(of[0]))), vcvt_f32_f16(vreinterpret_f16_u16(vmovn_u32(of[1]))) };
}
INLINE vw vw_bytes(const uint8_t * p) {
    const uint16x8_t half  = vmovl_u8(vld1_u8(p));
    const uint32x4_t of[2] = { vmovl_u16(vget_low_u16(half)), vmovl_high_u16(half) };
    vw               out;
    memcpy(&out, of, sizeof(out));
    return out;
}
INLINE vf vf_u8(const uint8_t * p) {
    const uint16x8_t w = vmovl_u8(vld1_u8(p));
    return (vf) { vcvtq_f32_u32(vmovl_u16(vget_low_u16(w))), vcvtq_f32_u32(vmovl_high_u16(w)) };
}
INLINE vf vf_i8(const int8_t * p) {
    const int16x8_t w = vmovl_s8(vld1_s8(p));
    return (vf) { vcvtq_f32_s32(vmovl_s16(vget_low_s16(w))), vcvtq_f32_s32(vmovl_high_s16(w)) };
}
INLINE int32x4_t exponent_bits(int32x4_t n) { return vshlq_n_s32(vaddq_s32(n, vdupq_n_s32(127)), 23); }
INLINE vf vf_exponent(vi n) { return (vf) { vreinterpretq_f32_s32(exponent_bits(n.a)), vreinterpretq_f32_s32(exponent_bits(n.b)) }; }
INLINE vi vi_set(int32_t x) { return (vi) { vdupq_n_s32(x), vdupq_n_s32(x) }; }
INLINE vi vi_nearest(vf x) { return (vi) { vcvtnq_s32_f32(x.a), vcvtnq_s32_f32(x.b) }; }

INLINE int32_t quad(const void * p) {
    int32_t x;
    memcpy(&x, p, sizeof(x));
    return x;
}

INLINE vb vb_load(const uint8_t * p) { return (vb) { vld1q_u8(p), vld1q_u8(p + 16) }; }
INLINE vb vb_low(vb x) { return (vb) { vandq_u8(x.a, vdupq_n_u8(15)), vandq_u8(x.b, vdupq_n_u8(15)) }; }
INLINE vb vb_high(vb x) { return (vb) { vshrq_n_u8(x.a, 4), vshrq_n_u8(x.b, 4) }; }
// For every byte of 0 .. 15 that of `table`
INLINE vb vb_look(const uint8_t * table, vb x) {
    const uint8x16_t of = vld1q_u8(table);
    return (vb) { vqtbl1q_u8(of, x.a), vqtbl1q_u8(of, x.b) };
}
// Words of `table`
INLINE vb vb_grid(const uint32_t * table, vw index) {
    uint32_t words[VL];
    for (int i = 0; i < VL; i++) {
        words[i] = table[index[i]];
    }
    return vb_load((const uint8_t *) words);
}
// 256 - x where bit i, of `high` ones bit 4 + i, of byte `at` of a word is set: i is the byte's place in its quad
INLINE vb vb_signed(vb x, vw signs, int at, int high) {
    static const uint8_t places[16] = { 0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12 };
    const uint8x16_t     each = vaddq_u8(vld1q_u8(places), vdupq_n_u8((uint8_t) at)), bits = vreinterpretq_u8_u32(vdupq_n_u32(high ? 0x80402010 : 0x08040201));
    uint8x16_t           of[2];
    memcpy(of, &signs, sizeof(of));
    const uint8x16_t a = vtstq_u8(vqtbl1q_u8(of[0], each), bits), b = vtstq_u8(vqtbl1q_u8(of[1], each), bits);
    return (vb) { vsubq_u8(veorq_u8(x.a, a), a), vsubq_u8(veorq_u8(x.b, b), b) };
}
INLINE vb vb_or(vb a, vb b) { return (vb) { vorrq_u8(a.a, b.a), vorrq_u8(a.b, b.b) }; }
// `bits` of every byte, from bit `from` on, put at bit `to`
INLINE vb vb_place(vb x, int from, int bits, int to) {
    const int8x16_t  by = vdupq_n_s8((int8_t) (to - from));
    const uint8x16_t of = vdupq_n_u8((uint8_t) (((1 << bits) - 1) << to));
    return (vb) { vandq_u8(vshlq_u8(x.a, by), of), vandq_u8(vshlq_u8(x.b, by), of) };
}
INLINE vb vb_third(vb x, int j) { return vb_place(x, j, 1, 2); }  // bit `j` of every byte, at bit 2
INLINE float32x4_t half_of_e8m0(uint16x4_t four) {
    const uint32x4_t x = vmovl_u16(four), normal = vshlq_n_u32(vsubq_u32(x, vdupq_n_u32(1)), 23);
    const uint32x4_t small = vshlq_u32(vdupq_n_u32(0x00200000), vreinterpretq_s32_u32(vminq_u32(x, vdupq_n_u32(2))));
    return vreinterpretq_f32_u32(vbslq_u32(vcltq_u32(x, vdupq_n_u32(2)), small, normal));
}
// 2^(x - 128): half of what an exponent of MXFP4 stands for
INLINE vf vf_e8m0(const uint8_t * p) {
    const uint16x8_t x = vmovl_u8(vld1_u8(p));
    return (vf) { half_of_e8m0(vget_low_u16(x)), half_of_e8m0(vget_high_u16(x)) };
}
// `bits` of every byte of `high`, from bit `from` on, put at bit 4 of `low`
INLINE vb vb_join(vb low, vb high, int from, int bits) {
    return vb_or(low, vb_place(high, from, bits, 4));
}
INLINE vb vb_fifth(vb low, vb high, int j) { return vb_join(low, high, j, 1); }

INLINE vx vx_quad(const void * p) { return vdupq_n_s32(quad(p)); }

INLINE vi vi_dot(vi s, vb w, vx x) {
    const int8x16_t by = vreinterpretq_s8_s32(x);
    return (vi) { vdotq_s32(s.a, vreinterpretq_s8_u8(w.a), by), vdotq_s32(s.b, vreinterpretq_s8_u8(w.b), by) };
}
INLINE vbias bias_of(vb w) {  // w: weights + 128
    const uint8x16_t high = vdupq_n_u8(128);
    return (vbias) { vreinterpretq_s8_u8(veorq_u8(w.a, high)), vreinterpretq_s8_u8(veorq_u8(w.b, high)) };
}
INLINE vbias bias_load(const uint8_t * p, int second) {
    (void) second;
    return bias_of(vb_load(p));
}
INLINE vi bias_start(const int32_t * by_128) {
    (void) by_128;  // the weights are signed here
    return vi_set(0);
}
INLINE vi bias_dot(vi s, vbias w, vx x) {
    const int8x16_t by = vreinterpretq_s8_s32(x);
    return (vi) { vdotq_s32(s.a, w.a, by), vdotq_s32(s.b, w.b, by) };
}
INLINE int32x4_t pairs_of(int16x8_t wide, int16x8_t pair) {
    return vpaddq_s32(vmull_s16(vget_low_s16(wide), vget_low_s16(pair)), vmull_high_s16(wide, pair));
}
INLINE vi vi_pairs(vi z, vw m, const int16_t * pair) {
    const int16x8_t by = vreinterpretq_s16_s32(vdupq_n_s32(quad(pair)));
    int16x8_t       of[2];
    memcpy(of, &m, sizeof(of));
    return (vi) { vaddq_s32(z.a, pairs_of(of[0], by)), vaddq_s32(z.b, pairs_of(of[1], by)) };
}
INLINE vi vi_mins(vi z, const uint8_t * m, const int16_t * pair) {
    const uint16x8_t wide[2] = { vmovl_u8(vld1_u8(m)), vmovl_u8(vld1_u8(m + 8)) };
    vw               words;
    memcpy(&words, wide, sizeof(words));
    return vi_pairs(z, words, pair);
}

INLINE float32x2_t half_sum(const vf * x) {  // i + (i + 8), i + (i + 4), i + (i + 2)
    const vf          eight = vf_add(x[0], x[1]);
    const float32x4_t four  = vaddq_f32(eight.a, eight.b);
    return vadd_f32(vget_low_f32(four), vget_high_f32(four));
}
INLINE void sum_four(const vf * a, const vf * b, const vf * c, const vf * d, float * out) {
    vst1_f32(out, vpadd_f32(half_sum(a), half_sum(b)));
    vst1_f32(out + 2, vpadd_f32(half_sum(c), half_sum(d)));
}

INLINE void prefetch(const void * p) { __builtin_prefetch(p); }

INLINE void turn_four(float32x4_t * x) {
    const float32x4_t ac = vzip1q_f32(x[0], x[2]), ca = vzip2q_f32(x[0], x[2]), bd = vzip1q_f32(x[1], x[3]), db = vzip2q_f32(x[1], x[3]);
    x[0] = vzip1q_f32(ac, bd);
    x[1] = vzip2q_f32(ac, bd);
    x[2] = vzip1q_f32(ca, db);
    x[3] = vzip2q_f32(ca, db);
}
INLINE void transpose(vf * x) {
    float32x4_t a[8], b[8];
    _Pragma("GCC unroll 8") for (int i = 0; i < 8; i++) {
        a[i] = x[i].a;
        b[i] = x[i].b;
    }
    turn_four(a);
    turn_four(a + 4);
    turn_four(b);
    turn_four(b + 4);
    _Pragma("GCC unroll 4") for (int i = 0; i < 4; i++) {
        x[i]     = (vf) { a[i], a[4 + i] };
        x[4 + i] = (vf) { b[i], b[4 + i] };
    }
}

// The largest of LANES values of four pairs of vectors, none of them NaN.
INLINE float32x4_t largest_lanes(const vf * x) {
    return vmaxq_f32(vmaxq_f32(x[0].a, x[0].b), vmaxq_f32(x[1].a, x[1].b));
}
INLINE void largest_four(const vf * a, const vf * b, const vf * c, const vf * d, float * out) {
    const float32x4_t ab = vpmaxq_f32(largest_lanes(a), largest_lanes(b)), cd = vpmaxq_f32(largest_lanes(c), largest_lanes(d));
    vst1q_f32(out, vpmaxq_f32(ab, cd));
}

// The first, second, third and fourth of VL times four values, `step` apart.
INLINE void turn_fours(const float * x, float * to, int step) {
    const float32x4x4_t a = vld4q_f32(x), b = vld4q_f32(x + 16);
    for (int k = 0; k < 4; k++) {
        vf_store(to + k * step, (vf) { a.val[k], b.val[k] });
    }
}
