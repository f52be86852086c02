// All inputs of a step in one device buffer with one upload; all outputs with one read.
//
// Inputs may not live in the graph allocator: it recycles their memory after the last reader, so a second run without an upload would read garbage.
#include "pgs.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct pgs_io {
    ggml_backend_t        backend;
    ggml_backend_buffer_t host_buffer;  // pinned where the device offers it, so that the copy is really asynchronous
    void *                host;
    bool                  shared;  // whether the mirror is another one's
    struct ggml_context * ctx;
    ggml_backend_buffer_t buffer;
    struct ggml_tensor *  home;  // I8 [capacity]: the whole buffer
};

void pgs_io_free(pgs_io * io) {
    if (io == NULL) {
        return;
    }
    if (io->host_buffer != NULL) {
        ggml_backend_buffer_free(io->host_buffer);
    } else if (!io->shared) {
        free(io->host);
    }
    ggml_backend_buffer_free(io->buffer);
    ggml_free(io->ctx);
    free(io);
}

// `mirror`: of the same step's fields on another device, whose mirror this one is uploaded from; NULL: it gets one of its own.
pgs_io * pgs_io_new(ggml_backend_t backend, size_t capacity, pgs_io * mirror, char * err) {
    pgs_io * io = calloc(1, sizeof(*io));
    if (io == NULL) {
        snprintf(err, PGS_ERR, "no memory for the step's inputs");
        return NULL;
    }
    const struct ggml_init_params params = { .mem_size = ggml_tensor_overhead() * 2, .mem_buffer = NULL, .no_alloc = true };
    io->backend = backend;
    io->ctx     = ggml_init(params);
    io->home    = ggml_new_tensor_1d(io->ctx, GGML_TYPE_I8, (int64_t) capacity);
    io->buffer  = ggml_backend_alloc_ctx_tensors(io->ctx, backend);
    const ggml_backend_buffer_type_t pinned = ggml_backend_dev_host_buffer_type(ggml_backend_get_device(backend));
    io->shared = mirror != NULL;
    if (pinned != NULL && !io->shared) {
        io->host_buffer = ggml_backend_buft_alloc_buffer(pinned, capacity);
    }
    io->host = io->shared ? mirror->host : io->host_buffer != NULL ? ggml_backend_buffer_get_base(io->host_buffer) : malloc(capacity);
    if (io->buffer == NULL || io->host == NULL) {
        snprintf(err, PGS_ERR, "no memory for a step's inputs of %zu bytes on %s", capacity, ggml_backend_name(backend));
        pgs_io_free(io);
        return NULL;
    }
    memset(io->host, 0, capacity);
    ggml_backend_buffer_clear(io->buffer, 0);
    return io;
}

void * pgs_io_host(pgs_io * io) {
    return io->host;
}

struct ggml_tensor * pgs_io_home(pgs_io * io) {
    return io->home;
}

ggml_backend_t pgs_io_backend(pgs_io * io) {
    return io->backend;
}

void pgs_io_upload(pgs_io * io, const void * from, size_t bytes) {
    ggml_backend_tensor_set_async(io->backend, io->home, from, 0, bytes);
}

void pgs_io_read(pgs_io * io, size_t offset, size_t bytes) {
    ggml_backend_tensor_get_async(io->backend, io->home, (char *) io->host + offset, offset, bytes);
}

// A tensor inside the buffer. With `after`, the tensor carries that node as its source although both have memory of their own: the
// graph then orders every reader after the node that fills this memory (drafted ids become the verifier's tokens without a copy).
struct ggml_tensor * pgs_io_tensor(pgs_io * io, struct ggml_context * ctx, enum ggml_type type, int64_t ne0, int64_t ne1, size_t offset,
                                   struct ggml_tensor * after, char * err) {
    struct ggml_tensor * t = ggml_new_tensor_2d(ctx, type, ne0, ne1);
    if (pgs_place(io->home, offset, t, err) != 0) {
        return NULL;
    }
    if (after != NULL) {
        t->op     = GGML_OP_VIEW;  // every backend skips it
        t->src[0] = after;
    }
    return t;
}

// Queues one step: upload, compute, read. On a device with a queue of its own this returns while the step runs, and the host is free
// until pgs_step_wait; on the CPU the step is over.
int pgs_step_launch(pgs_io * io, pgs_graph * graph, size_t upload_bytes, size_t read_offset, size_t read_bytes, pgs_step_times * times,
                    char * err) {
    const int64_t t0 = ggml_time_us();
    if (upload_bytes > 0) {
        pgs_io_upload(io, io->host, upload_bytes);
    }
    const int64_t t1 = ggml_time_us();
    if (pgs_graph_compute(graph, err) != 0) {
        ggml_backend_synchronize(io->backend);
        return 1;
    }
    times->upload  = t1 - t0;
    times->compute = ggml_time_us() - t1;
    if (read_bytes > 0) {
        pgs_io_read(io, read_offset, read_bytes);
    }
    return 0;
}

void pgs_step_wait(pgs_io * io, pgs_step_times * times) {
    const int64_t t0 = ggml_time_us();
    ggml_backend_synchronize(io->backend);
    times->read = ggml_time_us() - t0;
}
