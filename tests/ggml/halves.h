// ggml's conversions of F16, for programs that are linked without ggml.
#pragma once

#include <string.h>

#include "ggml.h"

float ggml_fp16_to_fp32(ggml_fp16_t x) {
    _Float16 h;
    memcpy(&h, &x, sizeof(h));
    return (float) h;
}

ggml_fp16_t ggml_fp32_to_fp16(float x) {
    const _Float16 h = (_Float16) x;
    ggml_fp16_t    out;
    memcpy(&out, &h, sizeof(out));
    return out;
}
