// csrc/cpu/asking.c by a clock that says what products took: is the way that was faster the one that is kept, of each kind by itself?
#include "kernels.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { MEASURED = 128, LEFT_OUT = 64, BYTES = 1000 };

static _Thread_local int64_t passed;

static int clock_of_the_test(clockid_t clock, struct timespec * t) {
    (void) clock;
    *t = (struct timespec) { passed / 1000000000, passed % 1000000000 };
    return 0;
}

#define clock_gettime clock_of_the_test
#include "cpu/asking.c"

static void expect(bool fine, const char * what) {
    if (!fine) {
        puts(what);
        exit(1);
    }
}

// Whether weights were asked for. `took`: nanoseconds, without and with that.
static bool product(int type, pgs_lies where, int64_t rows, const int64_t took[2], size_t bytes) {
    const pgs_asking a = pgs_asking_begin(type, where, rows);
    passed += took[a.asks];
    pgs_asking_end(&a, bytes);
    return a.asks;
}

static const int64_t without[2] = { 1000, 1300 }, with[2] = { 1300, 1000 };  // which is faster

static bool decided(int type, pgs_lies where, int64_t rows, const int64_t took[2]) {
    for (int i = 0; i < MEASURED; i++) {
        product(type, where, rows, took, BYTES);
    }
    return product(type, where, rows, took, BYTES);
}

static void what_is_measured(void) {
    const int64_t misleads[2] = { 9000, 10 };
    for (int i = 0; i < MEASURED; i += 2) {
        const bool first = product(GGML_TYPE_Q8_0, PGS_FAR, 1, i < LEFT_OUT || i % 10 == 0 ? misleads : without, BYTES);
        product(GGML_TYPE_Q8_0, PGS_FAR, 1, misleads, 0);  // nothing of it is this thread's
        expect(product(GGML_TYPE_Q8_0, PGS_FAR, 1, i < LEFT_OUT ? misleads : without, BYTES) != first, "two products in a row were computed the same way");
    }
    for (int i = 0; i < 10; i++) {
        expect(!product(GGML_TYPE_Q8_0, PGS_FAR, 1, with, BYTES), "the first products, or a few others, decided");
    }
}

static void * another_thread(void * arg) {
    expect(decided(GGML_TYPE_Q8_0, PGS_FAR, 1, with), "a thread took another one's decision");
    return arg;
}

int main(void) {
    what_is_measured();
    const int64_t rows[] = { 1, 2, 3, 5, 9, 17 }, most[] = { 1, 2, 4, 8, 16, 32 };
    const int     types[] = { GGML_TYPE_Q8_0, GGML_TYPE_Q4_0,  GGML_TYPE_MXFP4, GGML_TYPE_Q4_K, GGML_TYPE_Q5_K,
                              GGML_TYPE_Q6_K, GGML_TYPE_F16, GGML_TYPE_BF16,  GGML_TYPE_F32 };
    for (int t = 0; t < 9; t++) {
        for (int where = 0; where < PGS_PLACES; where++) {
            for (int r = 0; r < 6; r++) {
                if (t + where + r > 0 && !(t == 0 && where == PGS_FAR && r == 0)) {
                    const bool asks = (t + where + r) % 2;
                    expect(decided(types[t], (pgs_lies) where, rows[r], asks ? with : without) == asks, "the slower way was kept");
                    expect(product(types[t], (pgs_lies) where, most[r], with, BYTES) == asks, "rows of one kind are two");
                }
            }
        }
    }
    expect(!product(GGML_TYPE_Q8_0, PGS_FAR, 1, with, BYTES), "a kind took another one's decision");
    pthread_t thread;
    expect(pthread_create(&thread, NULL, another_thread, NULL) == 0 && pthread_join(thread, NULL) == 0, "no thread");
    return 0;
}
