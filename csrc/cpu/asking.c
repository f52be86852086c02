// Whether weights are asked for ahead of use: what a processor fetches by itself differs too much to be known beforehand. One row of Q4_K that lies in
// memory takes 0.68 of the time on a core of an EPYC 9004 if weights are asked for, and 1.35 times as long on one of a Xeon with AMX, which reads 17 GB/s
// when it is left alone and 12 when it is told what comes next; with other types, more rows, or weights in a cache, either may be ahead. So the first
// products of a kind are computed both ways and timed, by each thread for itself. Bits do not depend on it.
#include "kernels.h"
#include "ggml.h"

#include <stdlib.h>
#include <time.h>

#define SKIPPED 64  // products of a kind that are not timed: the first ones find caches and pages cold
#define TRIALS  32  // that are timed, of each way
#define KINDS   6   // numbers of rows
#define TYPES   9

typedef struct trial {
    int   seen;
    bool  asks;
    float took[2][TRIALS];  // nanoseconds per byte, without and with asking
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

pgs_asking pgs_asking_begin(int type, pgs_lies where, int64_t rows) {
    const int kind = rows <= 2 ? (int) rows - 1 : rows <= 4 ? 2 : rows <= 8 ? 3 : rows <= 16 ? 4 : 5;
    trial *   t    = &trials[index_of(type)][where][kind];
    if (t->seen == SKIPPED + 2 * TRIALS) {
        return (pgs_asking) { NULL, t->asks, 0 };
    }
    // one way of each pair, in an order without a period: graphs have one, and their matrices differ
    return (pgs_asking) { t, __builtin_parity((unsigned) t->seen) != 0, now() };
}

void pgs_asking_end(const pgs_asking * a, size_t bytes) {
    trial * t = a->trial;
    if (t == NULL || bytes == 0) {
        return;
    }
    const int i = t->seen++ - SKIPPED;
    if (i >= 0) {
        t->took[a->asks][i / 2] = (float) ((now() - a->began) / (double) bytes);
    }
    if (i == 2 * TRIALS - 1) {
        qsort(t->took[0], TRIALS, sizeof(float), by_size);
        qsort(t->took[1], TRIALS, sizeof(float), by_size);
        t->asks = t->took[1][TRIALS / 2] < t->took[0][TRIALS / 2];
    }
}
