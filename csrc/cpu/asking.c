// How far ahead of use weights are asked for: what a processor fetches by itself differs too much to be known beforehand. One row of Q4_K that lies in
// memory takes 0.68 of the time on a core of an EPYC 9004 if weights are asked for, and 1.35 times as long on one of a Xeon with AMX, which reads 17 GB/s
// when it is left alone and 12 when it is told what comes next. One of Q8_0 in memory on a core of an EPYC 9005 runs at 44 GMAC/s
// left alone, at 56 if it asks 4 KB ahead, and at 67 with 16 KB. So the first products of a kind are computed each way and timed, by each thread for itself. Bits do not depend on it.
#include "kernels.h"
#include "ggml.h"

#include <stdlib.h>
#include <time.h>

#define SKIPPED 63  // products of a kind that are not timed: the first ones find caches and pages cold
#define TRIALS  32  // that are timed, of each way
#define WAYS    3
#define KINDS   6   // numbers of rows
#define TYPES   16

static const size_t AHEAD[WAYS] = { 0, 4 << 10, 16 << 10 };

typedef struct trial {
    int   seen, best;
    float took[WAYS][TRIALS];  // nanoseconds per byte
} trial;

static _Thread_local trial trials[TYPES][PGS_PLACES][KINDS];

static int index_of(int type) {
    switch (type) {
        case GGML_TYPE_Q8_0: return 0;
        case GGML_TYPE_Q4_0: return 1;
        case GGML_TYPE_MXFP4: return 2;
        case GGML_TYPE_Q4_K: return 3;
        case GGML_TYPE_Q5_K: return 4;
        case GGML_TYPE_Q6_K: return 5;
        case GGML_TYPE_F16: return 6;
        case GGML_TYPE_BF16: return 7;
        case GGML_TYPE_Q4_1: return 9;
        case GGML_TYPE_Q5_0: return 10;
        case GGML_TYPE_Q5_1: return 11;
        case GGML_TYPE_IQ4_NL: return 12;
        case GGML_TYPE_Q2_K: return 13;
        case GGML_TYPE_Q3_K: return 14;
        case GGML_TYPE_IQ4_XS: return 15;
        default: return 8;
    }
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return 1e9 * (double) t.tv_sec + (double) t.tv_nsec;
}

static int by_size(const void * a, const void * b) {
    const float x = *(const float *) a, y = *(const float *) b;
    return (x > y) - (x < y);
}

// One way of each WAYS products, in an order without a period: graphs have one, and their matrices differ.
static int way_of(int seen) {
    int sum = 0;
    for (; seen > 0; seen /= WAYS) {
        sum += seen % WAYS;
    }
    return sum % WAYS;
}

pgs_asking pgs_asking_begin(int type, pgs_lies where, int64_t rows) {
    const int kind = rows <= 2 ? (int) rows - 1 : rows <= 4 ? 2 : rows <= 8 ? 3 : rows <= 16 ? 4 : 5;
    trial *   t    = &trials[index_of(type)][where][kind];
    if (t->seen == SKIPPED + WAYS * TRIALS) {
        return (pgs_asking) { NULL, t->best, AHEAD[t->best], 0 };
    }
    const int way = way_of(t->seen);
    return (pgs_asking) { t, way, AHEAD[way], now() };
}

void pgs_asking_end(const pgs_asking * a, size_t bytes) {
    trial * t = a->trial;
    if (t == NULL || bytes == 0) {
        return;
    }
    const int i = t->seen++ - SKIPPED;
    if (i >= 0) {
        t->took[a->way][i / WAYS] = (float) ((now() - a->began) / (double) bytes);
    }
    if (i == WAYS * TRIALS - 1) {
        for (int way = 0; way < WAYS; way++) {
            qsort(t->took[way], TRIALS, sizeof(float), by_size);
            t->best = t->took[way][TRIALS / 2] < t->took[t->best][TRIALS / 2] ? way : t->best;
        }
    }
}
