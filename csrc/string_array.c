// String arrays of a GGUF: each string has its length before it, as 8 bytes. A vocabulary has a quarter of a million.
#include "pgs.h"

#include <stdlib.h>
#include <string.h>

static uint64_t length_at(const char * data, size_t at) {
    uint64_t n;
    memcpy(&n, data + at, sizeof(n));
    return n;
}

int64_t pgs_string_bounds(const char * data, size_t at, size_t end, int64_t count, int64_t * bounds) {
    for (int64_t i = 0; i < count; i++) {
        if (end - at < 8 || length_at(data, at) > end - at - 8) {
            return i;
        }
        bounds[i] = (int64_t) at;
        at += 8 + (size_t) length_at(data, at);
    }
    bounds[count] = (int64_t) at;
    return count;
}

// As C strings: what follows a zero is no part of them.
static size_t seen_length(const char * text, size_t n) {
    const char * zero = memchr(text, 0, n);
    return zero != NULL ? (size_t) (zero - text) : n;
}

static uint64_t hash_of(const char * text, size_t n) {
    uint64_t h = 0x9E3779B97F4A7C15ull ^ n;
    for (; n >= 8; n -= 8, text += 8) {
        h = (h ^ length_at(text, 0)) * 0x9FB21C651E98DF25ull;
        h ^= h >> 32;
    }
    for (; n > 0; n--, text++) {
        h = (h ^ (uint8_t) *text) * 0x100000001B3ull;
    }
    return h ^ h >> 29;
}

bool pgs_strings_differ(const char * data, const int64_t * bounds, int64_t count) {
    size_t places = 16;
    while (places < 2 * (size_t) count) {
        places *= 2;
    }
    int64_t * table = calloc(places, sizeof(*table));  // numbers of strings, from 1
    bool      differ = table != NULL;
    for (int64_t i = 0; differ && i < count; i++) {
        const char * text = data + bounds[i] + 8;
        const size_t n    = seen_length(text, (size_t) (bounds[i + 1] - bounds[i] - 8));
        differ            = n > 0;
        size_t place      = hash_of(text, n) & (places - 1);
        for (; differ && table[place] != 0; place = (place + 1) & (places - 1)) {
            const int64_t * other = bounds + table[place] - 1;
            const size_t    most  = (size_t) (other[1] - other[0] - 8);
            differ = most < n || memcmp(data + other[0] + 8, text, n) != 0 || seen_length(data + other[0] + 8, most) != n;
        }
        table[place] = i + 1;
    }
    free(table);
    return differ;
}
