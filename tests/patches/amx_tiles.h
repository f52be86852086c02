// AMX tiles in plain C, forced into ggml's AMX kernels so that they can be run on processors without tiles. What a processor faults on aborts.
#pragma once
#include <immintrin.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

struct tile_state {
    uint8_t config[64];
    int8_t data[8][16][64];
};

inline tile_state & tiles() {
    static thread_local tile_state state;
    return state;
}

inline int tile_rows(int t) {
    const int rows = tiles().config[48 + t];
    if (tiles().config[0] != 1 || rows < 1 || rows > 16) abort();
    return rows;
}

inline int tile_bytes(int t) {
    const int bytes = tiles().config[16 + 2 * t] | tiles().config[17 + 2 * t] << 8;
    if (bytes < 1 || bytes > 64) abort();
    return bytes;
}

inline void tile_configure(const void * config) {
    memcpy(tiles().config, config, sizeof(tiles().config));
    memset(tiles().data, 0, sizeof(tiles().data));
}

inline void tile_clear(int t) {
    tile_rows(t);
    memset(tiles().data[t], 0, sizeof(tiles().data[t]));
}

inline void tile_load(int t, const void * from, long stride) {
    tile_clear(t);
    for (int r = 0; r < tile_rows(t); r++) memcpy(tiles().data[t][r], (const char *) from + r * stride, tile_bytes(t));
}

inline void tile_store(int t, void * to, long stride) {
    for (int r = 0; r < tile_rows(t); r++) memcpy((char *) to + r * stride, tiles().data[t][r], tile_bytes(t));
}

template <typename A, typename B> inline void tile_dot(int c, int a, int b) {
    if (tile_bytes(a) / 4 != tile_rows(b) || tile_rows(a) != tile_rows(c) || tile_bytes(b) != tile_bytes(c)) abort();
    for (int m = 0; m < tile_rows(c); m++) {
        for (int n = 0; n < tile_bytes(c) / 4; n++) {
            int32_t sum;
            memcpy(&sum, &tiles().data[c][m][4 * n], 4);
            for (int k = 0; k < tile_bytes(a); k++) sum += int(A(tiles().data[a][m][k])) * int(B(tiles().data[b][k / 4][4 * n + k % 4]));
            memcpy(&tiles().data[c][m][4 * n], &sum, 4);
        }
    }
}

#undef _tile_loadconfig
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbssd
#undef _tile_dpbsud
#undef _tile_dpbusd
#undef _tile_dpbuud
#define _tile_loadconfig(config) tile_configure(config)
#define _tile_zero(t) tile_clear(t)
#define _tile_loadd(t, from, stride) tile_load(t, from, stride)
#define _tile_stored(t, to, stride) tile_store(t, to, stride)
#define _tile_dpbssd(c, a, b) tile_dot<int8_t, int8_t>(c, a, b)
#define _tile_dpbsud(c, a, b) tile_dot<int8_t, uint8_t>(c, a, b)
#define _tile_dpbusd(c, a, b) tile_dot<uint8_t, int8_t>(c, a, b)
#define _tile_dpbuud(c, a, b) tile_dot<uint8_t, uint8_t>(c, a, b)
