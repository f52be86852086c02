// Activations rounded as the file that is included rounds them, of rows with zeros, ties, both signs of the largest value, NaN and Inf, to standard output.
#include <stdio.h>

#include "cpu/activations.h"
#include "halves.h"

static uint32_t state = 1;

static float number(void) {
    state = 1664525u * state + 1013904223u;
    return (float) (state >> 8) / 8388608.0f - 1.0f;
}

// One of 32 values or all of a block: what rounds unlike others
static void spoil(float * x, int how) {
    const int at = (int) (15.5f + 15.5f * number());
    for (int i = 0; how < 3 && i < 32; i++) {
        x[i] = how == 0 ? 0.0f : how == 1 ? (float) (int) (254.0f * number()) / 2.0f : 1e-41f * x[i];
    }
    if (how == 1) {  // ties: the scale is 1
        x[at] = -127.0f;
        x[(at + 5) % 32] = 127.0f;
    } else if (how > 2) {
        x[at] = how == 3 ? NAN : how == 4 ? -INFINITY : 0.0f * -1.0f;
    }
}

#define SAY(of) fwrite(&(of), sizeof(of), 1, stdout)

int main(void) {
    static float   x[2048];
    static act_32  few[64];
    static act_256 many[8];
    for (int turn = 0; turn < 4000; turn++) {
        const int n = 256 * (1 + turn % 8), row = turn % (int) (sizeof(few->d) / sizeof(few->d[0])), of_256 = turn % (int) (sizeof(many->d) / sizeof(many->d[0]));
        for (int i = 0; i < n; i++) {
            x[i] = number() * (float) (1 + turn % 97);
        }
        for (int b = 0; b < n / 32; b++) {
            const int how = (int) (15.0f + 15.0f * number());
            if (how < 6) {
                spoil(x + 32 * b, how);
            }
        }
        const int short_of = 32 * (turn % 7);
        activations_32(x, n - short_of, (char *) few, row);
        activations_256(x, n, (char *) many, of_256);
        for (int b = 0; b < (n - short_of) / 32; b++) {  // the bytes of what is not finite are never read
            const int finite = few[b].d[row] == few[b].d[row];
            SAY(finite);
            if (finite) {
                SAY(few[b].q[row]);
                SAY(few[b].by_128[row]);
                SAY(few[b].by_8[row]);
                SAY(few[b].first[row]);
                SAY(few[b].d[row]);
            }
        }
        for (int b = 0; b < n / 256; b++) {
            const int finite = many[b].d[of_256] == many[b].d[of_256];
            SAY(finite);
            if (finite) {
                SAY(many[b].q[of_256]);
                SAY(many[b].by_32[of_256]);
                SAY(many[b].of_16[of_256]);
                SAY(many[b].sum[of_256]);
                SAY(many[b].d[of_256]);
            }
        }
    }
    return 0;
}
