// Draws by Gumbel noise from a counter: the same (seed, index, token) has the same noise for target and drafter, so that drafts at temperature agree
// with the target's draw (Daliri, Musco, Suresh 2024: drafter-invariant speculative decoding). Philox4x32-10 of Salmon et al. 2011.

#include "pgs.h"
#include "cpu/kernels.h"

#include <math.h>
#include <string.h>

#define MOST_NOISE 22.9f   // -log(-log(1 - 2^-33))
#define DRAFT_CANDIDATES 64

static void philox(uint32_t seed, uint32_t index, uint32_t redraw, uint32_t block, uint32_t out[4]) {
    uint32_t c0 = index, c1 = redraw, c2 = block, c3 = 0, k0 = seed, k1 = 0;
    for (int round = 0; round < 10; round++) {
        const uint64_t a = (uint64_t) 0xD2511F53u * c0, b = (uint64_t) 0xCD9E8D57u * c2;
        c0 = (uint32_t) (b >> 32) ^ c1 ^ k0;
        c1 = (uint32_t) b;
        c2 = (uint32_t) (a >> 32) ^ c3 ^ k1;
        c3 = (uint32_t) a;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    out[0] = c0, out[1] = c1, out[2] = c2, out[3] = c3;
}

typedef struct {
    uint32_t seed, index, redraw, block, lanes[4];
    bool     known;
} noise_source;

// Of one token; consecutive ids share a block of four.
static double noise_of(noise_source * source, int32_t token) {
    const uint32_t block = (uint32_t) token / 4;
    if (!source->known || source->block != block) {
        philox(source->seed, source->index, source->redraw, block, source->lanes);
        source->block = block;
        source->known = true;
    }
    return -log(-log((source->lanes[token % 4] + 0.5) / 4294967296.0));
}

int64_t pgs_draw(const pgs_candidate * candidates, int64_t count, uint32_t seed, uint32_t index, uint32_t redraw) {
    noise_source source = { .seed = seed, .index = index, .redraw = redraw };
    int64_t      first = -1, best = -1;
    for (int64_t i = 0; i < count; i++) {
        if (candidates[i].logit > -INFINITY && (first < 0 || candidates[i].logit > candidates[first].logit)) {
            first = i;
        }
    }
    double most = -INFINITY;
    for (int64_t at = -1; first >= 0 && at < count; at++) {  // the likeliest first: most others cannot reach it
        const int64_t i = at < 0 ? first : at;
        if ((double) candidates[i].logit + MOST_NOISE < most || !(candidates[i].logit > -INFINITY)) {
            continue;
        }
        const double value = candidates[i].logit + noise_of(&source, candidates[i].id);
        if (value > most || (value == most && candidates[i].id < candidates[best].id)) {
            most = value;
            best = i;
        }
    }
    return best;
}

// The `most` largest logits, largest first; how many there are. NaN is none.
static int largest(const float * logits, int64_t n, int most, pgs_candidate * out) {
    int count = 0;
    for (int64_t i = 0; i < n; i++) {
        if (!(logits[i] > (count == most ? out[most - 1].logit : -INFINITY))) {
            continue;
        }
        int at = count < most ? count++ : most - 1;
        for (; at > 0 && out[at - 1].logit < logits[i]; at--) {
            out[at] = out[at - 1];
        }
        out[at] = (pgs_candidate) { .id = (int32_t) i, .logit = logits[i] };
    }
    return count;
}

// `candidates` in falling order, cut to those that hold `top_p` of their probability and `min_p` of the largest one.
static int truncate(const pgs_candidate * candidates, int count, float top_p, float min_p) {
    double total = 0, sum = 0;
    for (int i = 0; i < count; i++) {
        total += exp((double) candidates[i].logit - candidates[0].logit);
    }
    for (int i = 0; i < count; i++) {
        const double p = exp((double) candidates[i].logit - candidates[0].logit);
        if (i > 0 && (p < min_p || sum >= top_p * total)) {
            return i;
        }
        sum += p;
    }
    return count;
}

static int64_t argmax_of(const pgs_level * level, const float * logits, int64_t n) {
    pgs_candidate best;
    return level != NULL ? level->argmax(logits, n) : largest(logits, n, 1, &best) > 0 ? best.id : 0;
}

static int32_t token_of(const struct ggml_tensor * map, int64_t row, int32_t id) {
    if (map == NULL) {
        return id;
    }
    const char * tokens = (const char *) map->data + (map->ne[1] > 1 ? row * map->nb[1] : 0);
    return map->type == GGML_TYPE_I64 ? (int32_t) ((const int64_t *) tokens)[id] : ((const int32_t *) tokens)[id];
}

// The index of one row's draft: drawn by the chain of its sequence, from 64 candidates and without penalties.
static int64_t draft_of(const pgs_draw_options * how, const struct ggml_tensor * map, int64_t row, const float * logits, int64_t n) {
    pgs_candidate best[DRAFT_CANDIDATES];
    int32_t       indices[DRAFT_CANDIDATES];
    int           count = largest(logits, n, how->top_k > 0 && how->top_k < DRAFT_CANDIDATES ? how->top_k : DRAFT_CANDIDATES, best);
    const float   before = how->temperature_first ? how->temperature : 1, after = how->temperature_first ? 1 : how->temperature;
    for (int i = 0; i < count; i++) {
        indices[i] = best[i].id;
        best[i]    = (pgs_candidate) { .id = token_of(map, row, best[i].id), .logit = best[i].logit / before };
    }
    count = truncate(best, count, how->top_p, how->min_p);
    for (int i = 0; i < count; i++) {
        best[i].logit /= after;
    }
    const int64_t chosen = pgs_draw(best, count, how->seed, how->index, 0);
    return chosen < 0 ? 0 : indices[chosen];
}

static void run_draw(struct ggml_tensor * dst, int ith, int nth, void * userdata) {
    const struct ggml_tensor * logits = dst->src[0], * draws = dst->src[1];
    for (int64_t row = ith; row < dst->ne[0]; row += nth) {
        const float *      x = (const float *) ((const char *) logits->data + row * logits->nb[1]);
        pgs_draw_options how;
        memcpy(&how, (const char *) draws->data + row * draws->nb[1], sizeof(how));
        const int64_t id = how.temperature > 0 ? draft_of(&how, dst->src[2], row, x, logits->ne[0]) : argmax_of(userdata, x, logits->ne[0]);
        ((int32_t *) dst->data)[row] = (int32_t) id;
    }
}

struct ggml_tensor * pgs_draw_node(struct ggml_context * ctx, const pgs_level * level, struct ggml_tensor * logits, struct ggml_tensor * draws,
                                   struct ggml_tensor * map) {
    struct ggml_tensor * src[] = { logits, draws, map };
    return ggml_custom_4d(ctx, GGML_TYPE_I32, logits->ne[1], 1, 1, 1, src, map != NULL ? 3 : 2, run_draw, GGML_N_TASKS_MAX, (void *) level);
}

struct ggml_tensor * pgs_device_draw(struct ggml_context * ctx, struct ggml_tensor * logits, struct ggml_tensor * draws, struct ggml_tensor * map) {
    struct ggml_tensor * drawn = ggml_argmax(ctx, logits);  // ggml_draw of the patch, which other builds lack
    drawn->src[1] = draws;
    drawn->src[2] = map;
    return drawn;
}
