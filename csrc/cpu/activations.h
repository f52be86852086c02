// Rounding activations, in plain C that compilers turn into the vectors of the level whose file includes this. No step depends on them.
#pragma once

#include <math.h>
#include <string.h>

#include "ggml.h"
#include "layout.h"

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
