// A step over several devices: graphs, one behind the other, each on a backend of its own, and what moves from one to the next.
//
// Everything is queued: where two devices copy to each other by themselves, the host is free until pgs_chain_wait, and a device waits for the
// rows that it needs, not for the host. Where they do not (one of them is the CPU), ggml waits and copies through the host.
#include "pgs.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct pgs_chain {
    int          n_parts, n_hops, n_ios;
    pgs_graph ** parts;
    pgs_io **    ios;  // the step buffers of the devices that take part, the last part's last
    pgs_hop *    hops;  // in the order of the parts behind which they are
};

void pgs_chain_free(pgs_chain * chain) {
    if (chain != NULL) {
        free(chain->parts);
        free(chain->ios);
        free(chain->hops);
        free(chain);
    }
}

pgs_chain * pgs_chain_new(pgs_graph ** parts, pgs_io ** ios, int n_parts, const pgs_hop * hops, int n_hops, char * err) {
    pgs_chain * chain = calloc(1, sizeof(*chain));
    if (chain != NULL) {
        chain->parts = malloc(sizeof(*parts) * (size_t) n_parts);
        chain->ios   = malloc(sizeof(*ios) * (size_t) n_parts);
        chain->hops  = malloc(sizeof(*hops) * (size_t) (n_hops > 0 ? n_hops : 1));
    }
    if (chain == NULL || chain->parts == NULL || chain->ios == NULL || chain->hops == NULL) {
        snprintf(err, PGS_ERR, "no memory for a step of %d parts", n_parts);
        pgs_chain_free(chain);
        return NULL;
    }
    for (int i = 0; i < n_hops; i++) {
        if (hops[i].after < 0 || hops[i].after >= hops[i].to || hops[i].to >= n_parts || (i > 0 && hops[i].after < hops[i - 1].after) ||
            ggml_nbytes(hops[i].src) != ggml_nbytes(hops[i].dst) || !ggml_is_contiguous(hops[i].src)) {
            snprintf(err, PGS_ERR, "a copy from part %d to part %d of a step of %d parts does not fit", hops[i].after, hops[i].to, n_parts);
            pgs_chain_free(chain);
            return NULL;
        }
    }
    chain->n_parts = n_parts;
    chain->n_hops  = n_hops;
    memcpy(chain->parts, parts, sizeof(*parts) * (size_t) n_parts);
    memcpy(chain->hops, hops, sizeof(*hops) * (size_t) n_hops);
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

static void settle(const pgs_chain * chain) {
    for (int i = chain->n_ios - 1; i >= 0; i--) {
        ggml_backend_synchronize(pgs_io_backend(chain->ios[i]));
    }
}

int pgs_chain_launch(pgs_chain * chain, size_t upload_bytes, size_t read_offset, size_t read_bytes, pgs_step_times * times, char * err) {
    const int64_t t0 = ggml_time_us();
    for (int i = 0; upload_bytes > 0 && i < chain->n_ios; i++) {
        pgs_io_upload(chain->ios[i], upload_bytes);
    }
    const int64_t t1 = ggml_time_us();
    for (int part = 0, hop = 0; part < chain->n_parts; part++) {
        if (pgs_graph_compute(chain->parts[part], err) != 0) {
            settle(chain);
            return 1;
        }
        for (; hop < chain->n_hops && chain->hops[hop].after == part; hop++) {
            const pgs_hop * h = &chain->hops[hop];
            ggml_backend_tensor_copy_async(pgs_graph_backend(chain->parts[part]), pgs_graph_backend(chain->parts[h->to]), h->src, h->dst);
        }
    }
    times->upload  = t1 - t0;
    times->compute = ggml_time_us() - t1;
    if (read_bytes > 0) {
        pgs_io_read(chain->ios[chain->n_ios - 1], read_offset, read_bytes);
    }
    return 0;
}

void pgs_chain_wait(pgs_chain * chain, pgs_step_times * times) {
    const int64_t t0 = ggml_time_us();
    settle(chain);
    times->read = ggml_time_us() - t0;
}
