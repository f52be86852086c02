// A step over several devices: graphs in order, each on its own backend, and the copies between them.
//
// Everything is queued: between devices that copy directly, the host is free until pgs_chain_wait. Otherwise ggml copies through the host.
//
// Several steps may overlap (chunks of a prompt). pgs_flow protects their data: inputs are uploaded from stages of the mirror, and rows are copied to a
// device only after its earlier work.
#include "pgs.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { STAGES = 8, MOST_DEVICES = 16 };

struct pgs_flow {
    int                   n_ios, next;
    pgs_io *              ios[MOST_DEVICES];
    ggml_backend_event_t  done[MOST_DEVICES];  // what a device computed last; NULL where a device has no events: it waits for itself
    bool                  busy[MOST_DEVICES];
    ggml_backend_buffer_t buffer;  // pinned, where the last device offers it
    char *                stages;
    size_t                capacity;
    ggml_backend_event_t  read[STAGES][MOST_DEVICES];  // a stage was uploaded to a device
    bool                  full[STAGES];
};

void pgs_flow_free(pgs_flow * flow) {
    if (flow == NULL) {
        return;
    }
    for (int i = 0; i < flow->n_ios; i++) {
        ggml_backend_event_free(flow->done[i]);
        for (int stage = 0; stage < STAGES; stage++) {
            ggml_backend_event_free(flow->read[stage][i]);
        }
    }
    if (flow->buffer != NULL) {
        ggml_backend_buffer_free(flow->buffer);
    } else {
        free(flow->stages);
    }
    free(flow);
}

pgs_flow * pgs_flow_new(pgs_io ** ios, int n_ios, size_t capacity, char * err) {
    if (n_ios > MOST_DEVICES) {
        snprintf(err, PGS_ERR, "a step goes over %d devices; %d are possible", n_ios, MOST_DEVICES);
        return NULL;
    }
    pgs_flow * flow = calloc(1, sizeof(*flow));
    if (flow != NULL) {
        const ggml_backend_buffer_type_t pinned = ggml_backend_dev_host_buffer_type(ggml_backend_get_device(pgs_io_backend(ios[n_ios - 1])));
        flow->buffer = pinned != NULL ? ggml_backend_buft_alloc_buffer(pinned, STAGES * capacity) : NULL;
        flow->stages = flow->buffer != NULL ? ggml_backend_buffer_get_base(flow->buffer) : malloc(STAGES * capacity);
    }
    if (flow == NULL || flow->stages == NULL) {
        snprintf(err, PGS_ERR, "no memory for the inputs of %d steps on %d devices", STAGES, n_ios);
        free(flow);
        return NULL;
    }
    flow->n_ios    = n_ios;
    flow->capacity = capacity;
    for (int i = 0; i < n_ios; i++) {
        const ggml_backend_dev_t dev = ggml_backend_get_device(pgs_io_backend(ios[i]));
        flow->ios[i]                 = ios[i];
        flow->done[i]                = ggml_backend_event_new(dev);
        for (int stage = 0; stage < STAGES; stage++) {
            flow->read[stage][i] = ggml_backend_event_new(dev);
        }
    }
    return flow;
}

// Its number in the flow.
static int number(const pgs_flow * flow, const pgs_io * io) {
    int i = 0;
    while (i < flow->n_ios - 1 && flow->ios[i] != io) {
        i++;
    }
    return i;
}

// A stage with the inputs of a step that is not waited for.
static char * staged(pgs_flow * flow, const char * host, size_t bytes) {
    const int stage = flow->next;
    for (int i = 0; flow->full[stage] && i < flow->n_ios; i++) {
        if (flow->read[stage][i] != NULL) {
            ggml_backend_event_synchronize(flow->read[stage][i]);
        } else {
            ggml_backend_synchronize(pgs_io_backend(flow->ios[i]));
        }
    }
    flow->full[stage] = true;
    char * at         = flow->stages + (size_t) stage * flow->capacity;
    memcpy(at, host, bytes);
    return at;
}

struct pgs_chain {
    int          n_parts, n_hops, n_ios;
    pgs_graph ** parts;
    pgs_io **    part_ios;  // the step buffer of each part's device
    pgs_io **    ios;       // of the devices that take part, the last part's last
    pgs_hop *    hops;  // in the order of the parts that they follow
    size_t *     landings;  // of each: where in the stage its bytes lie, NOWHERE where they go from device to device
    char *       stage;
};

#define NOWHERE ((size_t) -1)

static ggml_backend_reg_t kind_of(ggml_backend_t backend) {
    return ggml_backend_dev_backend_reg(ggml_backend_get_device(backend));
}

// Reads from a worker are queued without waiting, so that all outputs of a part take one round trip, and a part
// on another worker does not wait for it. ggml reads tensor by tensor, each a round trip.
static bool plan_landings(pgs_chain * chain) {
    size_t end = 0;
    for (int i = 0; i < chain->n_hops; i++) {
        const pgs_hop *          h    = &chain->hops[i];
        const ggml_backend_reg_t from = kind_of(pgs_graph_backend(chain->parts[h->after]));
        const bool lands   = strcmp(ggml_backend_reg_name(from), "RPC") == 0 && from != kind_of(pgs_graph_backend(chain->parts[h->to]));
        chain->landings[i] = lands ? end : NOWHERE;
        end += lands ? ggml_nbytes(h->src) : 0;
    }
    chain->stage = end > 0 ? malloc(end) : NULL;
    return end == 0 || chain->stage != NULL;
}

// Pending reads that this part needs.
static void land(const pgs_chain * chain, int part) {
    for (int i = 0; i < chain->n_hops; i++) {
        const pgs_hop * h = &chain->hops[i];
        if (h->to == part && chain->landings[i] != NOWHERE) {
            ggml_backend_synchronize(pgs_graph_backend(chain->parts[h->after]));
            ggml_backend_synchronize(pgs_graph_backend(chain->parts[part]));
            ggml_backend_tensor_set(h->dst, chain->stage + chain->landings[i], 0, ggml_nbytes(h->dst));
        }
    }
}

void pgs_chain_free(pgs_chain * chain) {
    if (chain != NULL) {
        free(chain->parts);
        free(chain->part_ios);
        free(chain->ios);
        free(chain->hops);
        free(chain->landings);
        free(chain->stage);
        free(chain);
    }
}

// ggml ends the process over copies between tensors of other strides, also of a dimension of 1, where any would do.
static bool fits(const struct ggml_tensor * src, const struct ggml_tensor * dst) {
    return src->type == dst->type && ggml_are_same_shape(src, dst) && ggml_are_same_stride(src, dst) && ggml_is_contiguous(src);
}

pgs_chain * pgs_chain_new(pgs_graph ** parts, pgs_io ** ios, int n_parts, const pgs_hop * hops, int n_hops, char * err) {
    pgs_chain * chain = calloc(1, sizeof(*chain));
    if (chain != NULL) {
        chain->parts    = malloc(sizeof(*parts) * (size_t) n_parts);
        chain->part_ios = malloc(sizeof(*ios) * (size_t) n_parts);
        chain->ios      = malloc(sizeof(*ios) * (size_t) n_parts);
        chain->hops     = malloc(sizeof(*hops) * (size_t) (n_hops > 0 ? n_hops : 1));
        chain->landings = malloc(sizeof(size_t) * (size_t) (n_hops > 0 ? n_hops : 1));
    }
    if (chain == NULL || chain->parts == NULL || chain->part_ios == NULL || chain->ios == NULL || chain->hops == NULL ||
        chain->landings == NULL) {
        snprintf(err, PGS_ERR, "no memory for a step of %d parts", n_parts);
        pgs_chain_free(chain);
        return NULL;
    }
    for (int i = 0; i < n_hops; i++) {
        if (hops[i].after < 0 || hops[i].after >= hops[i].to || hops[i].to >= n_parts || (i > 0 && hops[i].after < hops[i - 1].after) ||
            !fits(hops[i].src, hops[i].dst)) {
            snprintf(err, PGS_ERR, "a copy from part %d to part %d of a step of %d parts does not fit", hops[i].after, hops[i].to, n_parts);
            pgs_chain_free(chain);
            return NULL;
        }
    }
    chain->n_parts = n_parts;
    chain->n_hops  = n_hops;
    memcpy(chain->parts, parts, sizeof(*parts) * (size_t) n_parts);
    memcpy(chain->part_ios, ios, sizeof(*ios) * (size_t) n_parts);
    memcpy(chain->hops, hops, sizeof(*hops) * (size_t) n_hops);
    if (!plan_landings(chain)) {
        snprintf(err, PGS_ERR, "no memory for what goes between the %d parts of a step", n_parts);
        pgs_chain_free(chain);
        return NULL;
    }
    for (int i = 0; i < n_parts; i++) {  // each device once, in the order of its last part
        bool later = false;
        for (int j = i + 1; j < n_parts; j++) {
            later = later || ios[j] == ios[i];
        }
        if (!later) {
            chain->ios[chain->n_ios++] = ios[i];
        }
    }
    return chain;
}

int pgs_chain_parts(const pgs_chain * chain) {
    return chain->n_parts;
}

int pgs_chain_hops(const pgs_chain * chain) {
    return chain->n_hops;
}

pgs_graph * pgs_chain_graph(const pgs_chain * chain, int part) {
    return chain->parts[part];
}

pgs_io * pgs_chain_io(const pgs_chain * chain, int part) {
    return chain->part_ios[part];
}

const pgs_hop * pgs_chain_hop(const pgs_chain * chain, int hop) {
    return &chain->hops[hop];
}

void pgs_flow_settle(pgs_flow * flow) {
    for (int i = flow->n_ios - 1; i >= 0; i--) {
        ggml_backend_synchronize(pgs_io_backend(flow->ios[i]));
        flow->busy[i] = false;
    }
    memset(flow->full, 0, sizeof(flow->full));
}

static void upload(const pgs_chain * chain, pgs_flow * flow, size_t bytes, bool ahead) {
    const char * from = pgs_io_host(chain->ios[0]);
    if (ahead) {
        from = staged(flow, from, bytes);
    }
    for (int i = 0; i < chain->n_ios; i++) {
        pgs_io_upload(chain->ios[i], from, bytes);
        const int n = number(flow, chain->ios[i]);
        if (ahead && flow->read[flow->next][n] != NULL) {
            ggml_backend_event_record(flow->read[flow->next][n], pgs_io_backend(chain->ios[i]));
        }
    }
    if (ahead) {
        flow->next = (flow->next + 1) % STAGES;
    }
}

// `ahead`: the step is not waited for; the next one may be launched before it ends.
int pgs_chain_launch(pgs_chain * chain, pgs_flow * flow, size_t upload_bytes, size_t read_offset, size_t read_bytes, bool ahead,
                     pgs_step_times * times, char * err) {
    const int64_t t0 = ggml_time_us();
    if (upload_bytes > 0) {
        upload(chain, flow, upload_bytes, ahead);
    }
    const int64_t t1 = ggml_time_us();
    for (int part = 0, hop = 0; part < chain->n_parts; part++) {
        const ggml_backend_t from = pgs_graph_backend(chain->parts[part]);
        land(chain, part);
        if (pgs_graph_compute(chain->parts[part], err) != 0) {
            pgs_flow_settle(flow);
            return 1;
        }
        const int n = number(flow, chain->part_ios[part]);
        if (ahead && flow->done[n] != NULL) {
            ggml_backend_event_record(flow->done[n], from);
            flow->busy[n] = true;
        }
        for (; hop < chain->n_hops && chain->hops[hop].after == part; hop++) {
            const pgs_hop * h = &chain->hops[hop];
            const int       m = number(flow, chain->part_ios[h->to]);
            const ggml_backend_t to = pgs_graph_backend(chain->parts[h->to]);
            const bool alike = kind_of(from) == kind_of(to);
            // after that device's pending reads; events belong to one backend, and a copy between two waits for both
            if (flow->busy[m] && alike && n != m) {
                ggml_backend_event_wait(from, flow->done[m]);
            }
            if (chain->landings[hop] != NOWHERE) {
                ggml_backend_tensor_get_async(from, h->src, chain->stage + chain->landings[hop], 0, ggml_nbytes(h->src));
            } else {
                ggml_backend_tensor_copy_async(from, to, h->src, h->dst);
            }
        }
    }
    times->upload  = t1 - t0;
    times->compute = ggml_time_us() - t1;
    if (read_bytes > 0 && !ahead) {
        pgs_io_read(chain->ios[chain->n_ios - 1], read_offset, read_bytes);
    }
    return 0;
}
