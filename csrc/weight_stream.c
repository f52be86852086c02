// Weight streaming: for a wide chunk of a prompt, layers in host memory are copied to the device while the previous layer is computed.
//
// Two buffers alternate by the parity of the layer's index. Copies use a queue of their own (a second backend on the same device). Events make the device
// wait for a layer's copy, and the queue for the buffer's last use; devices without events (CPUs) are synchronous.
//
// Whole layers are copied: selecting experts would mean waiting for the router, and wide chunks use nearly all of them.
#include "pgs.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct stream_copy {
    const void * from;  // host memory
    size_t       to, bytes;
} stream_copy;

typedef struct stream_layer {
    int           n;
    stream_copy * copies;
} stream_layer;

struct pgs_stream {
    ggml_backend_t       device, queue;
    struct ggml_tensor * home;  // both places, as bytes
    int                  n_layers;
    stream_layer *       layers;
    ggml_backend_event_t arrived[2], used[2];  // NULL where the device has no events
    int                  held[2];              // the layer whose weights are in a place, or on their way; -1 for none
    bool                 more;
    pgs_stream_counts    counts;
};

void pgs_stream_free(pgs_stream * s) {
    if (s == NULL) {
        return;
    }
    ggml_backend_synchronize(s->queue);
    for (int i = 0; i < 2; i++) {
        ggml_backend_event_free(s->arrived[i]);
        ggml_backend_event_free(s->used[i]);
    }
    for (int i = 0; s->layers != NULL && i < s->n_layers; i++) {
        free(s->layers[i].copies);
    }
    free(s->layers);
    free(s);
}

pgs_stream * pgs_stream_new(ggml_backend_t device, ggml_backend_t queue, struct ggml_tensor * home, int n_layers, char * err) {
    pgs_stream * s = calloc(1, sizeof(*s));
    if (s == NULL || (s->layers = calloc((size_t) (n_layers > 0 ? n_layers : 1), sizeof(*s->layers))) == NULL) {
        snprintf(err, PGS_ERR, "no memory for the copies of %d layers", n_layers);
        free(s);
        return NULL;
    }
    s->device   = device;
    s->queue    = queue;
    s->home     = home;
    s->n_layers = n_layers;
    for (int i = 0; i < 2; i++) {
        s->held[i]    = -1;
        s->arrived[i] = ggml_backend_event_new(ggml_backend_get_device(device));
        s->used[i]    = ggml_backend_event_new(ggml_backend_get_device(device));
    }
    return s;
}

int pgs_stream_add(pgs_stream * s, int layer, const void * from, size_t to, size_t bytes, char * err) {
    const size_t size = ggml_nbytes(s->home);
    if (layer < 0 || layer >= s->n_layers || to > size || bytes > size - to) {
        snprintf(err, PGS_ERR, "%zu bytes of layer %d do not fit at byte %zu of %zu for copies of %d layers", bytes, layer, to, size, s->n_layers);
        return 1;
    }
    stream_layer * l      = &s->layers[layer];
    stream_copy *  copies = realloc(l->copies, (size_t) (l->n + 1) * sizeof(*copies));
    if (copies == NULL) {
        snprintf(err, PGS_ERR, "no memory for the copies of %d layers", s->n_layers);
        return 1;
    }
    l->copies         = copies;
    l->copies[l->n++] = (stream_copy) { from, to, bytes };
    return 0;
}

static void copy(pgs_stream * s, int layer) {
    const stream_layer * l = &s->layers[layer];
    for (int i = 0; i < l->n; i++) {
        ggml_backend_tensor_set_async(s->queue, s->home, l->copies[i].from, l->copies[i].to, l->copies[i].bytes);
        s->counts.bytes += (int64_t) l->copies[i].bytes;
    }
    s->held[layer % 2] = layer;
    if (s->arrived[layer % 2] != NULL) {
        ggml_backend_event_record(s->arrived[layer % 2], s->queue);
    }
}

static void want(pgs_stream * s, int layer) {
    if (layer < s->n_layers && s->held[layer % 2] != layer) {
        copy(s, layer);
    }
}

void pgs_stream_more(pgs_stream * s, bool more) {
    s->more = more;
}

void pgs_stream_start(pgs_stream * s) {
    want(s, 0);
    want(s, 1);
    s->counts.chunks++;
}

void pgs_stream_wait(pgs_stream * s, int layer) {
    if (s->arrived[layer % 2] != NULL) {
        ggml_backend_event_wait(s->device, s->arrived[layer % 2]);
    } else {
        ggml_backend_synchronize(s->queue);
    }
}

// After the device has computed this layer: its buffer is free for the layer after the next, or of the next chunk.
void pgs_stream_leave(pgs_stream * s, int layer) {
    const int place = layer % 2;
    if (s->used[place] != NULL) {
        ggml_backend_event_record(s->used[place], s->device);
        ggml_backend_event_wait(s->queue, s->used[place]);
    } else {
        ggml_backend_synchronize(s->device);
    }
    if (layer + 2 < s->n_layers) {
        want(s, layer + 2);
    } else if (s->more) {
        want(s, place);
    }
}

// After an aborted step, pending nodes and the contents of the buffers are unknown.
void pgs_stream_reset(pgs_stream * s) {
    ggml_backend_synchronize(s->device);
    ggml_backend_synchronize(s->queue);
    s->held[0] = s->held[1] = -1;
}

void pgs_stream_counters(const pgs_stream * s, pgs_stream_counts * out) {
    *out = s->counts;
}
