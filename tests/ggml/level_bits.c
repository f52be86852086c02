// Every function of one level of instructions (-DLEVEL=pgs_level_...) on the same numbers: results go to standard output, NaN as one pattern.
// Ends with 1 if a row of a product has other bits beside others than alone.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cpu/kernels.h"
#include "cpu/layout.h"
#include "ggml.h"
#include "halves.h"

extern const struct pgs_level LEVEL;

static uint64_t state = 1;

static uint32_t bits(void) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (uint32_t) (state >> 32);
}

static float number(float most) { return most * ((float) (bits() >> 8) / 8388608.0f - 1.0f); }

static void fill(float * x, int64_t n, float most) {
    for (int64_t i = 0; i < n; i++) {
        x[i] = number(most);
    }
}

static void say(const float * x, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        uint32_t out = 0x7fc00000u;
        if (x[i] == x[i]) {
            memcpy(&out, x + i, sizeof(out));
        }
        fwrite(&out, sizeof(out), 1, stdout);
    }
}

static void half_floats(uint16_t * to, int n, int bf16) {
    for (int i = 0; i < n; i++) {
        const float x = number(0.1f);
        if (bf16) {
            uint32_t whole;
            memcpy(&whole, &x, sizeof(whole));
            to[i] = (uint16_t) (whole >> 16);
        } else {
            to[i] = ggml_fp32_to_fp16(x);
        }
    }
}

static void six_bits(int8_t * scales, int n) {  // signed
    for (int i = 0; i < n; i++) {
        scales[i] = (int8_t) ((scales[i] & 63) - 32);
    }
}

static void record(char * to, const pgs_kernel * k) {
    for (size_t i = 0; i < k->record; i++) {
        to[i] = (char) bits();
    }
    switch (k->type) {
        case GGML_TYPE_Q8_0: half_floats(((rec_q8_0 *) to)->d, LANES, 0); break;
        case GGML_TYPE_IQ4_NL:
        case GGML_TYPE_Q4_0: half_floats(((rec_q4_0 *) to)->d, LANES, 0); break;
        case GGML_TYPE_Q4_1:
            half_floats(((rec_q4_1 *) to)->d, LANES, 0);
            half_floats(((rec_q4_1 *) to)->m, LANES, 0);
            break;
        case GGML_TYPE_Q5_0: half_floats(((rec_q5_0 *) to)->d, LANES, 0); break;
        case GGML_TYPE_Q5_1:
            half_floats(((rec_q5_1 *) to)->d, LANES, 0);
            half_floats(((rec_q5_1 *) to)->m, LANES, 0);
            break;
        case GGML_TYPE_MXFP4:
            for (int j = 0; j < LANES; j++) {
                ((rec_mxfp4 *) to)->e[j] = (uint8_t) (j < 3 ? j : 110 + bits() % 16);
            }
            break;
        case GGML_TYPE_Q2_K:
            half_floats(((rec_q2_k *) to)->d, LANES, 0);
            half_floats(((rec_q2_k *) to)->dmin, LANES, 0);
            break;
        case GGML_TYPE_Q3_K:
            six_bits((int8_t *) ((rec_q3_k *) to)->scale, 16 * LANES);
            half_floats(((rec_q3_k *) to)->d, LANES, 0);
            break;
        case GGML_TYPE_IQ4_XS:
            six_bits((int8_t *) ((rec_iq4_xs *) to)->scale, 8 * LANES);
            half_floats(((rec_iq4_xs *) to)->d, LANES, 0);
            break;
        case GGML_TYPE_Q4_K:
        case GGML_TYPE_Q5_K:
            for (int j = 0; j < 8 * LANES; j++) {  // six bits each
                ((uint8_t *) ((head_k *) to)->scale)[j] &= 63;
                ((uint8_t *) ((head_k *) to)->min)[j] &= 63;
            }
            half_floats(((head_k *) to)->d, LANES, 0);
            half_floats(((head_k *) to)->dmin, LANES, 0);
            break;
        case GGML_TYPE_Q6_K: half_floats(((rec_q6_k *) to)->d, LANES, 0); break;
        case GGML_TYPE_NVFP4: break;
        case GGML_TYPE_IQ1_M:
            for (size_t j = 13 * LANES; j < 14 * LANES; j++) {  // the upper bits of a scale: 2^-7 to 2^-4
                ((uint32_t *) to)[j] = (((uint32_t *) to)[j] & 0x0fffffff) | 0x20000000;
            }
            break;
        case GGML_TYPE_IQ1_S:
        case GGML_TYPE_IQ2_XXS:
        case GGML_TYPE_IQ2_XS:
        case GGML_TYPE_IQ2_S:
        case GGML_TYPE_IQ3_XXS:
        case GGML_TYPE_IQ3_S: half_floats((uint16_t *) (to + k->record) - LANES, LANES, 0); break;
        case GGML_TYPE_F32: fill((float *) to, 32 * LANES, 0.1f); break;
        case GGML_TYPE_F16:
        case GGML_TYPE_BF16: half_floats((uint16_t *) to, 32 * LANES, k->type == GGML_TYPE_BF16); break;
        default: fprintf(stderr, "no record of type %d is made here\n", k->type), exit(2);
    }
}

struct pgs_grids pgs_grids;

static void grids(void) {
    for (size_t i = 0; i < sizeof(pgs_grids) / sizeof(uint32_t); i++) {
        ((uint32_t *) &pgs_grids)[i] = (uint32_t *) &pgs_grids + i < pgs_grids.iq3_xxs ? bits() & 0x0a0a0a0a : 0x80808080 | (bits() & 0x3f3f3f3f);
    }
}

// By a pair of groups, and by its first group alone.
static int products(const pgs_kernel * k, int blocks) {
    char *  records = malloc(2 * k->record * (size_t) blocks), * first = malloc(k->record * (size_t) blocks), * tile = calloc(k->act, (size_t) blocks);
    float * x = malloc(sizeof(float) * (size_t) (blocks * k->block));
    int     wrong = 0;
    for (int b = 0; b < 2 * blocks; b++) {
        record(records + (size_t) b * k->record, k);
        if (b % 2 == 0) {
            memcpy(first + (size_t) (b / 2) * k->record, records + (size_t) b * k->record, k->record);
        }
    }
    for (int row = 0; row < TILE; row++) {
        fill(x, (int64_t) blocks * k->block, row == 2 ? 1e-20f : row == 3 ? 1e4f : 1.0f);
        if (row == 4) {
            memset(x, 0, sizeof(float) * (size_t) k->block);
        }
        if (row >= 5 && row <= 6) {
            x[7] = row == 5 ? NAN : INFINITY;
        }
        if (row == 7) {  // the largest magnitude with both signs
            x[5]  = -2.0f;
            x[20] = 2.0f;
        }
        k->activations(x, (int64_t) blocks * k->block, tile, row);
    }
    float alone[TILE][2 * LANES], sums[TILE][SUMS_STEP], one[TILE][SUMS_STEP];
    for (int rows = 1; rows <= TILE; rows++) {
        memset(sums, 0, sizeof(sums));
        memset(one, 0, sizeof(one));
        k->product(records, 2, blocks, tile, 0, rows, sums[0], 0);
        k->product(first, 1, blocks, tile, 0, rows, one[0], 64);
        memcpy(alone[rows - 1], sums[rows - 1], sizeof(alone[0]));
        for (int row = 0; row < rows; row++) {
            say(sums[row], 2 * LANES);
            for (int j = 0; j < 2 * LANES; j++) {
                wrong |= memcmp(&alone[row][j], &sums[row][j], sizeof(float)) != 0 && alone[row][j] == alone[row][j];
                wrong |= j < LANES && memcmp(&one[row][j], &sums[row][j], sizeof(float)) != 0 && one[row][j] == one[row][j];
            }
        }
    }
    free(records), free(first), free(tile), free(x);
    return wrong;
}

// Records of rows as files store them, of any bytes.
static void regrouped(const pgs_kernel * k, int64_t blocks) {
    const size_t step = k->record / LANES * (size_t) blocks;  // no record is smaller than its LANES blocks of a file
    char *       rows = malloc(step * LANES), * records = malloc(k->record * (size_t) blocks);
    for (size_t i = 0; i < step * LANES; i++) {
        rows[i] = (char) bits();
    }
    LEVEL.regroup(k->type, rows, step, blocks, records, rows);
    fwrite(records, k->record, (size_t) blocks, stdout);
    free(rows), free(records);
}

static void attention(int size, int rows, int64_t span, int type) {
    static float    k[128 * 256], v[128 * 256], q[MOST_ROWS * 256], out[MOST_ROWS * 256];
    static uint16_t mask[MOST_ROWS][128];
    const size_t    step = (size_t) size * (type == GGML_TYPE_F32 ? 4 : 2);
    pgs_attention   a    = { .rows = rows, .span = span, .scale = 0.125f };
    if (type == GGML_TYPE_F32) {
        fill(k, span * size, 1.0f);
        fill(v, span * size, 1.0f);
    } else {
        half_floats((uint16_t *) k, (int) span * size, type == GGML_TYPE_BF16);
        half_floats((uint16_t *) v, (int) span * size, type == GGML_TYPE_BF16);
    }
    fill(q, (int64_t) rows * size, 4.0f);
    a.k = (pgs_cache) { .rows = (const char *) k, .step = step, .type = type, .size = size };
    a.v = (pgs_cache) { .rows = (const char *) v, .step = step, .type = type, .size = size };
    for (int r = 0; r < rows; r++) {
        for (int64_t j = 0; j < span; j++) {
            mask[r][j] = r == 1 || (j > 0 && bits() % 4 == 0) ? HIDDEN : 0;
        }
        a.q[r] = q + r * size, a.mask[r] = mask[r], a.out[r] = out + r * size;
    }
    LEVEL.attend(&a);
    say(out, (int64_t) rows * size);
}

static void rows_of_values(int64_t n) {
    float x[512], weight[512], by[512], out[512];
    fill(x, n, 3.0f);
    fill(weight, n, 1.0f);
    fill(by, n, 30.0f);
    for (int how = 0; how < 4; how++) {
        LEVEL.norm(x, how & 1 ? weight : NULL, how & 2 ? by : NULL, 1e-6f, n, out);
        say(out, n);
    }
    for (int silus = 0; silus < 2; silus++) {
        LEVEL.gate(x, by, n, silus, out);
        say(out, n);
    }
    const float sum = LEVEL.sum(x, n), at = (float) LEVEL.argmax(x, n);
    say(&sum, 1);
    say(&at, 1);
    x[n / 2] = NAN;
    const float most = (float) LEVEL.argmax(x, n);
    say(&most, 1);
}

static void delta(int64_t size, int64_t rows, bool keeps) {
    static float kept[256 * 256], q[4 * 256], k[4 * 256], v[4 * 256], out[4 * 256];
    float        decay[4], beta[4];
    fill(kept, size * size, 0.1f);
    fill(q, rows * size, 1.0f);
    fill(k, rows * size, 0.1f);
    fill(v, rows * size, 1.0f);
    fill(decay, rows, 1.0f);
    fill(beta, rows, 1.0f);
    const pgs_head h = { size, rows, q, k, v, (size_t) size, (size_t) size, decay, beta, 0.125f, kept, keeps, out, (size_t) size };
    LEVEL.delta(&h, 0, size);
    say(out, rows * size);
    say(kept, size * size);
}

int main(void) {
    int wrong = 0;
    grids();
    for (int i = 0; i < LEVEL.count; i++) {
        for (int blocks = 1; blocks <= 5; blocks += 2) {
            wrong |= products(&LEVEL.kernels[i], blocks);
            regrouped(&LEVEL.kernels[i], blocks);
        }
    }
    const int types[] = { GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16 };
    for (int i = 0; i < 9; i++) {
        const int rows[] = { 1, 2, 3, 7, 8, 9, 16, 31, 32 };
        attention(i % 2 ? 64 : 256, rows[i], i % 3 == 0 ? 1 : i % 3 == 1 ? 33 : 100, types[i / 3]);
    }
    const int64_t sizes[] = { 1, 5, 16, 17, 63, 64, 100, 256, 500 };
    for (int i = 0; i < 9; i++) {
        rows_of_values(sizes[i]);
    }
    static float x[9 * 48], taps[48 * 4], out[6 * 48];
    fill(x, 9 * 48, 2.0f);
    fill(taps, 48 * 4, 1.0f);
    LEVEL.convolve(x, 48, taps, 4, 6, 48, out, 48);
    say(out, 6 * 48);
    for (int64_t size = 16; size <= 256; size *= 2) {
        delta(size, 1, true);
        delta(size, 3, false);
    }
    return wrong;
}
