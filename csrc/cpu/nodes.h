// What the nodes of native kernels share.
#pragma once

#include "ggml.h"

#include <string.h>

#define PARAMETERS_AT 32  // ggml keeps a node's function and its data in the first 24 bytes of its parameters; ours follow

static inline void * parameters_of(const struct ggml_tensor * node) {
    return (char *) node->op_params + PARAMETERS_AT;
}

// The function of a custom node; NULL for other nodes, and for views.
static inline ggml_custom_op_t function_of(const struct ggml_tensor * node) {
    ggml_custom_op_t function = NULL;
    if (node->op == GGML_OP_CUSTOM && node->view_src == NULL) {
        memcpy(&function, node->op_params, sizeof(function));
    }
    return function;
}

// What scripts/profile_cpu.py knows a node by.
static inline struct ggml_tensor * named(struct ggml_tensor * node, const char * name) {
    return ggml_set_name(node, name);
}

// Such a node with parameters.
static inline struct ggml_tensor * with_parameters(struct ggml_tensor * node, const void * parameters, size_t size, const char * name) {
    memcpy(parameters_of(node), parameters, size);
    return named(node, name);
}

static inline int64_t rows_of(const struct ggml_tensor * t) {
    return t->ne[1] * t->ne[2] * t->ne[3];
}

static inline const float * row_of(const struct ggml_tensor * t, int64_t row) {
    const int64_t i1 = row % t->ne[1], i2 = row / t->ne[1] % t->ne[2], i3 = row / t->ne[1] / t->ne[2];
    return (const float *) ((const char *) t->data + (size_t) i1 * t->nb[1] + (size_t) i2 * t->nb[2] + (size_t) i3 * t->nb[3]);
}

// Of pgs_norm and pgs_gate: products know by these what they may make for themselves.
void pgs_run_norm(struct ggml_tensor * dst, int ith, int nth, void * userdata);
void pgs_run_gate(struct ggml_tensor * dst, int ith, int nth, void * userdata);
