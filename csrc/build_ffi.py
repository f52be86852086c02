"""Writes the C source of the extension module ``pyggml_spec._native``: cffi in API mode, so the compiler checks every declaration here
against the headers that the pinned llama-cpp-python installs.

    python build_ffi.py OUT.c
"""

import re
import sys
from pathlib import Path

from cffi import FFI

HERE = Path(__file__).resolve().parent

GGML = """
enum ggml_type { GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_I8, GGML_TYPE_I32, GGML_TYPE_I64, GGML_TYPE_BF16, GGML_TYPE_COUNT, ... };
enum ggml_status { GGML_STATUS_SUCCESS, ... };
enum ggml_op_pool { GGML_OP_POOL_MAX, ... };
enum ggml_prec { GGML_PREC_DEFAULT, GGML_PREC_F32, ... };
enum ggml_op_hint { GGML_HINT_NONE, GGML_HINT_SRC0_IS_HADAMARD, ... };
enum ggml_log_level { GGML_LOG_LEVEL_NONE, GGML_LOG_LEVEL_ERROR, ... };
enum ggml_backend_dev_type { GGML_BACKEND_DEVICE_TYPE_CPU, GGML_BACKEND_DEVICE_TYPE_GPU, GGML_BACKEND_DEVICE_TYPE_IGPU,
                             GGML_BACKEND_DEVICE_TYPE_ACCEL, ... };
enum ggml_backend_buffer_usage { GGML_BACKEND_BUFFER_USAGE_ANY, GGML_BACKEND_BUFFER_USAGE_WEIGHTS, GGML_BACKEND_BUFFER_USAGE_COMPUTE };
#define GGML_ROPE_TYPE_NEOX ...
#define GGML_ROPE_TYPE_NORMAL ...
#define GGML_ROPE_TYPE_MROPE ...
#define GGML_ROPE_TYPE_IMROPE ...

struct ggml_context; struct ggml_cgraph;
typedef struct ggml_backend * ggml_backend_t;
typedef struct ggml_backend_buffer * ggml_backend_buffer_t;
typedef struct ggml_backend_buffer_type * ggml_backend_buffer_type_t;
typedef struct ggml_backend_device * ggml_backend_dev_t;
typedef struct ggml_backend_reg * ggml_backend_reg_t;
struct ggml_tensor { enum ggml_type type; int64_t ne[4]; size_t nb[4]; void * data; struct ggml_tensor * view_src; struct ggml_tensor * src[10];
                     struct ggml_backend_buffer * buffer; ...; };
struct ggml_init_params { size_t mem_size; void * mem_buffer; bool no_alloc; };

const char * ggml_version(void);
const char * ggml_commit(void);
const char * ggml_type_name(enum ggml_type type);
size_t ggml_type_size(enum ggml_type type);
int64_t ggml_blck_size(enum ggml_type type);
size_t ggml_row_size(enum ggml_type type, int64_t ne);
bool ggml_is_quantized(enum ggml_type type);
size_t ggml_tensor_overhead(void);
size_t ggml_nbytes(const struct ggml_tensor * tensor);
struct ggml_context * ggml_init(struct ggml_init_params params);
void ggml_free(struct ggml_context * ctx);
struct ggml_tensor * ggml_set_name(struct ggml_tensor * tensor, const char * name);
size_t ggml_quantize_chunk(enum ggml_type type, const float * src, void * dst, int64_t start, int64_t nrows, int64_t n_per_row,
                           const float * imatrix);
typedef void (*ggml_to_float_t)(const void * x, float * y, int64_t k);
struct ggml_type_traits { ggml_to_float_t to_float; ...; };
const struct ggml_type_traits * ggml_get_type_traits(enum ggml_type type);
void ggml_log_set(void (*log_callback)(enum ggml_log_level level, const char * text, void * user_data), void * user_data);

struct ggml_tensor * ggml_new_tensor(struct ggml_context * ctx, enum ggml_type type, int n_dims, const int64_t * ne);
struct ggml_tensor * ggml_view_1d(struct ggml_context *, struct ggml_tensor *, int64_t ne0, size_t offset);
struct ggml_tensor * ggml_view_2d(struct ggml_context *, struct ggml_tensor *, int64_t ne0, int64_t ne1, size_t nb1, size_t offset);
struct ggml_tensor * ggml_view_3d(struct ggml_context *, struct ggml_tensor *, int64_t ne0, int64_t ne1, int64_t ne2, size_t nb1,
                                  size_t nb2, size_t offset);
struct ggml_tensor * ggml_view_4d(struct ggml_context *, struct ggml_tensor *, int64_t ne0, int64_t ne1, int64_t ne2, int64_t ne3, size_t nb1,
                                  size_t nb2, size_t nb3, size_t offset);
struct ggml_tensor * ggml_reshape_1d(struct ggml_context *, struct ggml_tensor *, int64_t ne0);
struct ggml_tensor * ggml_reshape_2d(struct ggml_context *, struct ggml_tensor *, int64_t ne0, int64_t ne1);
struct ggml_tensor * ggml_reshape_3d(struct ggml_context *, struct ggml_tensor *, int64_t ne0, int64_t ne1, int64_t ne2);
struct ggml_tensor * ggml_reshape_4d(struct ggml_context *, struct ggml_tensor *, int64_t ne0, int64_t ne1, int64_t ne2, int64_t ne3);
struct ggml_tensor * ggml_fill(struct ggml_context *, struct ggml_tensor *, float);
struct ggml_tensor * ggml_repeat_4d(struct ggml_context *, struct ggml_tensor *, int64_t, int64_t, int64_t, int64_t);
bool ggml_is_contiguous(const struct ggml_tensor *);
struct ggml_tensor * ggml_cont(struct ggml_context *, struct ggml_tensor *);
struct ggml_tensor * ggml_cpy(struct ggml_context *, struct ggml_tensor *, struct ggml_tensor *);
struct ggml_tensor * ggml_permute(struct ggml_context *, struct ggml_tensor *, int axis0, int axis1, int axis2, int axis3);
struct ggml_tensor * ggml_cont_2d(struct ggml_context *, struct ggml_tensor *, int64_t ne0, int64_t ne1);
struct ggml_tensor * ggml_add(struct ggml_context *, struct ggml_tensor *, struct ggml_tensor *);
struct ggml_tensor * ggml_add_id(struct ggml_context *, struct ggml_tensor *, struct ggml_tensor * by_id, struct ggml_tensor * ids);
struct ggml_tensor * ggml_mul(struct ggml_context *, struct ggml_tensor *, struct ggml_tensor *);
struct ggml_tensor * ggml_div(struct ggml_context *, struct ggml_tensor *, struct ggml_tensor *);
struct ggml_tensor * ggml_mul_mat(struct ggml_context *, struct ggml_tensor *, struct ggml_tensor *);
struct ggml_tensor * ggml_mul_mat_id(struct ggml_context *, struct ggml_tensor * experts, struct ggml_tensor *, struct ggml_tensor * ids);
void ggml_mul_mat_set_hint(struct ggml_tensor *, enum ggml_op_hint);
struct ggml_tensor * ggml_concat(struct ggml_context *, struct ggml_tensor *, struct ggml_tensor *, int dim);
struct ggml_tensor * ggml_set_rows(struct ggml_context *, struct ggml_tensor * to, struct ggml_tensor * rows, struct ggml_tensor * index);
struct ggml_tensor * ggml_get_rows(struct ggml_context *, struct ggml_tensor *, struct ggml_tensor *);
struct ggml_tensor * ggml_norm(struct ggml_context *, struct ggml_tensor *, float eps);
struct ggml_tensor * ggml_rms_norm(struct ggml_context *, struct ggml_tensor *, float eps);
struct ggml_tensor * ggml_rope_multi(struct ggml_context *, struct ggml_tensor *, struct ggml_tensor *, struct ggml_tensor *, int n_dims, int sections[4],
                                     int mode, int n_ctx_orig, float freq_base, float freq_scale, float ext_factor, float attn_factor, float beta_fast,
                                     float beta_slow);
struct ggml_tensor * ggml_rope_ext(struct ggml_context *, struct ggml_tensor *, struct ggml_tensor *, struct ggml_tensor *, int n_dims,
                                   int mode, int n_ctx_orig, float freq_base, float freq_scale, float ext_factor, float attn_factor,
                                   float beta_fast, float beta_slow);
struct ggml_tensor * ggml_scale(struct ggml_context *, struct ggml_tensor *, float);
struct ggml_tensor * ggml_clamp(struct ggml_context *, struct ggml_tensor *, float min, float max);
struct ggml_tensor * ggml_sigmoid(struct ggml_context *, struct ggml_tensor *);
struct ggml_tensor * ggml_silu(struct ggml_context *, struct ggml_tensor *);
struct ggml_tensor * ggml_swiglu(struct ggml_context *, struct ggml_tensor *);
struct ggml_tensor * ggml_swiglu_split(struct ggml_context *, struct ggml_tensor *, struct ggml_tensor *);
struct ggml_tensor * ggml_swiglu_oai(struct ggml_context *, struct ggml_tensor *, struct ggml_tensor *, float alpha, float limit);
struct ggml_tensor * ggml_geglu(struct ggml_context *, struct ggml_tensor *);
struct ggml_tensor * ggml_geglu_split(struct ggml_context *, struct ggml_tensor *, struct ggml_tensor *);
struct ggml_tensor * ggml_gelu(struct ggml_context *, struct ggml_tensor *);
struct ggml_tensor * ggml_tanh(struct ggml_context *, struct ggml_tensor *);
struct ggml_tensor * ggml_softplus(struct ggml_context *, struct ggml_tensor *);
struct ggml_tensor * ggml_soft_max(struct ggml_context *, struct ggml_tensor *);
struct ggml_tensor * ggml_argsort_top_k(struct ggml_context *, struct ggml_tensor *, int k);
struct ggml_tensor * ggml_top_k(struct ggml_context *, struct ggml_tensor *, int k);
struct ggml_tensor * ggml_lightning_indexer(struct ggml_context *, struct ggml_tensor * q, struct ggml_tensor * k, struct ggml_tensor * weights,
                                            struct ggml_tensor * mask);
struct ggml_tensor * ggml_cast(struct ggml_context *, struct ggml_tensor *, enum ggml_type);
struct ggml_tensor * ggml_arange(struct ggml_context *, float start, float stop, float step);
struct ggml_tensor * ggml_step(struct ggml_context *, struct ggml_tensor *);
struct ggml_tensor * ggml_abs(struct ggml_context *, struct ggml_tensor *);
struct ggml_tensor * ggml_sgn(struct ggml_context *, struct ggml_tensor *);
struct ggml_tensor * ggml_sqrt(struct ggml_context *, struct ggml_tensor *);
struct ggml_tensor * ggml_sub(struct ggml_context *, struct ggml_tensor *, struct ggml_tensor *);
struct ggml_tensor * ggml_sqr(struct ggml_context *, struct ggml_tensor *);
struct ggml_tensor * ggml_mean(struct ggml_context *, struct ggml_tensor *);
struct ggml_tensor * ggml_scale_bias(struct ggml_context *, struct ggml_tensor *, float scale, float bias);
struct ggml_tensor * ggml_xielu(struct ggml_context *, struct ggml_tensor *, float alpha_n, float alpha_p, float beta, float eps);
struct ggml_tensor * ggml_pool_2d(struct ggml_context *, struct ggml_tensor *, enum ggml_op_pool, int k0, int k1, int s0, int s1, float p0,
                                  float p1);
struct ggml_tensor * ggml_dsv4_hc_pre_gated(struct ggml_context *, struct ggml_tensor * x, struct ggml_tensor * gate, float scale);
struct ggml_tensor * ggml_dsv4_hc_pre(struct ggml_context *, struct ggml_tensor * x, struct ggml_tensor * weights);
struct ggml_tensor * ggml_dsv4_hc_post(struct ggml_context *, struct ggml_tensor * x, struct ggml_tensor * residual, struct ggml_tensor * post,
                                       struct ggml_tensor * comb);
struct ggml_tensor * ggml_dsv4_hc_comb(struct ggml_context *, struct ggml_tensor * mixes, struct ggml_tensor * scale, struct ggml_tensor * base,
                                       float eps, int32_t iterations);
struct ggml_tensor * ggml_soft_max_ext(struct ggml_context *, struct ggml_tensor * x, struct ggml_tensor * mask, float scale, float max_bias);
struct ggml_tensor * ggml_swiglu_clamp(struct ggml_context *, struct ggml_tensor * gate, struct ggml_tensor * up, float limit);
struct ggml_tensor * ggml_sum_rows(struct ggml_context *, struct ggml_tensor *);
struct ggml_tensor * ggml_argmax(struct ggml_context *, struct ggml_tensor *);

void ggml_set_output(struct ggml_tensor *);
void ggml_build_forward_expand(struct ggml_cgraph *, struct ggml_tensor *);
int ggml_graph_n_nodes(struct ggml_cgraph *);
struct ggml_tensor * ggml_graph_node(struct ggml_cgraph *, int i);
const char * ggml_op_desc(const struct ggml_tensor *);
const char * ggml_get_name(const struct ggml_tensor *);

// sizes of compute buffers without the buffers (pyspec plan)
typedef struct ggml_gallocr * ggml_gallocr_t;
ggml_gallocr_t ggml_gallocr_new(ggml_backend_buffer_type_t);
void ggml_gallocr_free(ggml_gallocr_t);
void ggml_gallocr_reserve_n_size(ggml_gallocr_t, struct ggml_cgraph *, const int * node_buffer_ids, const int * leaf_buffer_ids,
                                 size_t * sizes);

size_t ggml_backend_dev_count(void);
size_t ggml_backend_reg_count(void);
void ggml_backend_load_all_from_path(const char *);
ggml_backend_dev_t ggml_backend_dev_get(size_t index);
const char * ggml_backend_dev_name(ggml_backend_dev_t);
const char * ggml_backend_dev_description(ggml_backend_dev_t);
void ggml_backend_dev_memory(ggml_backend_dev_t, size_t * free, size_t * total);
enum ggml_backend_dev_type ggml_backend_dev_type(ggml_backend_dev_t);
ggml_backend_t ggml_backend_dev_init(ggml_backend_dev_t, const char * params);
ggml_backend_buffer_type_t ggml_backend_dev_buffer_type(ggml_backend_dev_t);
ggml_backend_buffer_type_t ggml_backend_dev_host_buffer_type(ggml_backend_dev_t);
bool ggml_backend_dev_supports_op(ggml_backend_dev_t, const struct ggml_tensor *);
ggml_backend_reg_t ggml_backend_dev_backend_reg(ggml_backend_dev_t);
void * ggml_backend_reg_get_proc_address(ggml_backend_reg_t, const char * name);
size_t ggml_backend_reg_dev_count(ggml_backend_reg_t);
ggml_backend_dev_t ggml_backend_reg_dev_get(ggml_backend_reg_t, size_t index);
void ggml_backend_free(ggml_backend_t);
const char * ggml_backend_name(ggml_backend_t);
void ggml_backend_synchronize(ggml_backend_t);
ggml_backend_buffer_type_t ggml_backend_get_default_buffer_type(ggml_backend_t);
const char * ggml_backend_buft_name(ggml_backend_buffer_type_t);
bool ggml_backend_buft_is_host(ggml_backend_buffer_type_t);
size_t ggml_backend_buft_get_alignment(ggml_backend_buffer_type_t);
size_t ggml_backend_buft_get_alloc_size(ggml_backend_buffer_type_t, const struct ggml_tensor *);
ggml_backend_buffer_t ggml_backend_buft_alloc_buffer(ggml_backend_buffer_type_t, size_t);
ggml_backend_buffer_t ggml_backend_alloc_ctx_tensors_from_buft(struct ggml_context *, ggml_backend_buffer_type_t);
size_t ggml_backend_alloc_ctx_tensors_from_buft_size(struct ggml_context *, ggml_backend_buffer_type_t);
ggml_backend_buffer_t ggml_backend_cpu_buffer_from_ptr(void *, size_t);
ggml_backend_buffer_type_t ggml_backend_cpu_buffer_type(void);
void ggml_backend_buffer_free(ggml_backend_buffer_t);
size_t ggml_backend_buffer_get_size(ggml_backend_buffer_t);
ggml_backend_buffer_type_t ggml_backend_buffer_get_type(ggml_backend_buffer_t);
void ggml_backend_buffer_clear(ggml_backend_buffer_t, uint8_t);
void ggml_backend_buffer_set_usage(ggml_backend_buffer_t, enum ggml_backend_buffer_usage);
void ggml_backend_tensor_set(struct ggml_tensor *, const void * data, size_t offset, size_t size);
void ggml_backend_tensor_memset(struct ggml_tensor *, uint8_t value, size_t offset, size_t size);
void ggml_backend_tensor_get(const struct ggml_tensor *, void * data, size_t offset, size_t size);
void ggml_backend_tensor_copy_async(ggml_backend_t, ggml_backend_t, const struct ggml_tensor * src, struct ggml_tensor * dst);
enum ggml_status ggml_backend_view_init(struct ggml_tensor *);

// extra-buffer-type and thread entry points that a backend offers by name
typedef ggml_backend_buffer_type_t * (*ggml_backend_dev_get_extra_bufts_t)(ggml_backend_dev_t);
typedef void (*ggml_backend_set_n_threads_t)(ggml_backend_t, int);
typedef bool (*ggml_abort_callback)(void * data);
static ggml_backend_buffer_type_t * call_get_extra_bufts(void * fn, ggml_backend_dev_t dev);
static void init_extra_bufts(void);
static const char * device_feature(ggml_backend_dev_t dev, const char * name);
static void call_set_n_threads(void * fn, ggml_backend_t backend, int n);
static void quiet_log(void);
static void keep_errors(void);
static const char * kept_errors(void);
static void count_buffers(void);
static double counted_mib(void);
static const char * compiled_ggml_version(void);
"""

# What the tokenizer, the samplers and the comparison with llama.cpp call of libllama.
LLAMA = """
typedef int32_t llama_token;
typedef int32_t llama_pos;
typedef int32_t llama_seq_id;
enum llama_token_attr { LLAMA_TOKEN_ATTR_UNKNOWN, LLAMA_TOKEN_ATTR_CONTROL, ... };
enum llama_split_mode { LLAMA_SPLIT_MODE_NONE, ... };
enum llama_load_mode { LLAMA_LOAD_MODE_NONE, ... };
enum llama_flash_attn_type { LLAMA_FLASH_ATTN_TYPE_ENABLED, ... };
enum llama_rope_scaling_type { LLAMA_ROPE_SCALING_TYPE_NONE, ... };
enum llama_pooling_type { LLAMA_POOLING_TYPE_NONE, ... };
typedef struct llama_memory_i * llama_memory_t;
#define LLAMA_DEFAULT_SEED ...

struct llama_model; struct llama_context; struct llama_vocab; struct llama_sampler;
struct llama_model_tensor_buft_override { const char * pattern; ggml_backend_buffer_type_t buft; };
struct llama_model_params { ggml_backend_dev_t * devices; const struct llama_model_tensor_buft_override * tensor_buft_overrides; int32_t n_gpu_layers;
                            enum llama_split_mode split_mode; enum llama_load_mode load_mode; int32_t main_gpu; bool vocab_only; bool use_extra_bufts; bool no_alloc; ...; };
struct llama_context_params { uint32_t n_ctx; uint32_t n_batch; uint32_t n_ubatch; int32_t n_threads; int32_t n_threads_batch;
                              enum llama_rope_scaling_type rope_scaling_type; enum llama_flash_attn_type flash_attn_type;
                              enum llama_pooling_type pooling_type; uint32_t n_seq_max; bool embeddings; bool kv_unified;
                              float rope_freq_base; float rope_freq_scale; float yarn_ext_factor; float yarn_attn_factor;
                              float yarn_beta_fast; float yarn_beta_slow; uint32_t yarn_orig_ctx;
                              bool (*cb_eval)(struct ggml_tensor * tensor, bool ask, void * user_data); void * cb_eval_user_data;
                              enum ggml_type type_k; enum ggml_type type_v; ...; };
typedef struct llama_batch { int32_t n_tokens; llama_token * token; float * embd; llama_pos * pos; int32_t * n_seq_id; llama_seq_id ** seq_id;
                             int8_t * logits; } llama_batch;
typedef struct llama_token_data { llama_token id; float logit; float p; } llama_token_data;
typedef struct llama_token_data_array { llama_token_data * data; size_t size; int64_t selected; bool sorted; } llama_token_data_array;
typedef struct llama_logit_bias { llama_token token; float bias; } llama_logit_bias;
struct llama_sampler_chain_params { ...; };

void llama_backend_init(void);
struct llama_model_params llama_model_default_params(void);
struct llama_model * llama_model_load_from_file(const char * path, struct llama_model_params params);
void llama_model_free(struct llama_model *);

const struct llama_vocab * llama_model_get_vocab(const struct llama_model *);
int32_t llama_model_n_embd_inp(const struct llama_model *);
int32_t llama_vocab_n_tokens(const struct llama_vocab *);
const char * llama_vocab_get_text(const struct llama_vocab *, llama_token);
enum llama_token_attr llama_vocab_get_attr(const struct llama_vocab *, llama_token);
bool llama_vocab_is_eog(const struct llama_vocab *, llama_token);
llama_token llama_vocab_bos(const struct llama_vocab *);
llama_token llama_vocab_eos(const struct llama_vocab *);
llama_token llama_vocab_eot(const struct llama_vocab *);
llama_token llama_vocab_fim_pre(const struct llama_vocab *);
llama_token llama_vocab_fim_suf(const struct llama_vocab *);
llama_token llama_vocab_fim_mid(const struct llama_vocab *);
llama_token llama_vocab_fim_rep(const struct llama_vocab *);
llama_token llama_vocab_fim_sep(const struct llama_vocab *);
bool llama_vocab_get_add_bos(const struct llama_vocab *);
bool llama_vocab_get_add_eos(const struct llama_vocab *);
int32_t llama_tokenize(const struct llama_vocab *, const char * text, int32_t text_len, llama_token * tokens, int32_t n_tokens_max,
                       bool add_special, bool parse_special);
int32_t llama_token_to_piece(const struct llama_vocab *, llama_token, char * buf, int32_t length, int32_t lstrip, bool special);
#define IS_END ...
#define IS_CONTROL ...
static int scan_vocabulary(const struct llama_vocab * vocab, int n, uint8_t * kinds);

struct llama_context_params llama_context_default_params(void);
struct llama_context * llama_init_from_model(struct llama_model *, struct llama_context_params params);
void llama_free(struct llama_context *);
struct llama_batch llama_batch_init(int32_t n_tokens, int32_t embd, int32_t n_seq_max);
void llama_batch_free(struct llama_batch batch);
int32_t llama_decode(struct llama_context *, struct llama_batch batch);
float * llama_get_logits_ith(struct llama_context *, int32_t i);
float * llama_get_embeddings_ith(struct llama_context *, int32_t i);
float * llama_get_embeddings_seq(struct llama_context *, llama_seq_id seq_id);
enum llama_pooling_type llama_pooling_type(const struct llama_context *);
llama_memory_t llama_get_memory(const struct llama_context *);
void llama_memory_clear(llama_memory_t, bool data);
int32_t llama_model_n_ctx_train(const struct llama_model *);
int32_t llama_model_n_embd_out(const struct llama_model *);
uint32_t llama_model_n_cls_out(const struct llama_model *);
bool llama_model_has_encoder(const struct llama_model *);
bool llama_model_has_decoder(const struct llama_model *);
const char * llama_model_chat_template(const struct llama_model *, const char * name);
llama_token llama_vocab_sep(const struct llama_vocab *);
bool llama_vocab_get_add_sep(const struct llama_vocab *);

struct llama_sampler_chain_params llama_sampler_chain_default_params(void);
struct llama_sampler * llama_sampler_chain_init(struct llama_sampler_chain_params params);
void llama_sampler_chain_add(struct llama_sampler * chain, struct llama_sampler *);
void llama_sampler_accept(struct llama_sampler *, llama_token);
void llama_sampler_apply(struct llama_sampler *, llama_token_data_array *);
void llama_sampler_free(struct llama_sampler *);
struct llama_sampler * llama_sampler_init_penalties(int32_t n_vocab, int32_t penalty_last_n, float penalty_repeat, float penalty_freq,
                                                    float penalty_present);
struct llama_sampler * llama_sampler_init_top_k(int32_t k);
struct llama_sampler * llama_sampler_init_typical(float p, size_t min_keep);
struct llama_sampler * llama_sampler_init_top_p(float p, size_t min_keep);
struct llama_sampler * llama_sampler_init_min_p(float p, size_t min_keep);
struct llama_sampler * llama_sampler_init_temp_ext(float t, float delta, float exponent);
struct llama_sampler * llama_sampler_init_top_n_sigma(float n);
struct llama_sampler * llama_sampler_init_xtc(float p, float t, size_t min_keep, uint32_t seed);
struct llama_sampler * llama_sampler_init_dry(const struct llama_vocab * vocab, float multiplier, float base, int32_t allowed_length, int32_t penalty_last_n,
                                              const char ** seq_breakers, size_t num_breakers);
struct llama_sampler * llama_sampler_init_mirostat(int32_t n_vocab, uint32_t seed, float tau, float eta, int32_t m);
struct llama_sampler * llama_sampler_init_mirostat_v2(uint32_t seed, float tau, float eta);
struct llama_sampler * llama_sampler_init_adaptive_p(float target, float decay, uint32_t seed);
struct llama_sampler * llama_sampler_init_logit_bias(int32_t n_vocab, int32_t n_logit_bias, const llama_logit_bias * logit_bias);
struct llama_sampler * llama_sampler_init_infill(const struct llama_vocab * vocab);
struct llama_sampler * llama_sampler_init_dist(uint32_t seed);
"""

HELPERS = """
#include "pgs.h"
#include "llama.h"
#include <stdio.h>
#include <string.h>

static ggml_backend_buffer_type_t * call_get_extra_bufts(void * fn, ggml_backend_dev_t dev) {
    return ((ggml_backend_dev_get_extra_bufts_t) fn)(dev);
}
// ggml lists these types once, and then says past its log that the kernel refuses AMX, on the stderr of a command that was told to be quiet. Here
// C's stderr (not the descriptor, which is everybody's) is another stream for that moment; what else was written to it is passed on. That stream
// stays open: a thread may have taken it for stderr.
static void ask_all_devices(void) {
    for (size_t i = 0; i < ggml_backend_dev_count(); i++) {
        ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(ggml_backend_dev_get(i));
        void * fn = ggml_backend_reg_get_proc_address(reg, "ggml_backend_dev_get_extra_bufts");
        if (fn != NULL) {
            call_get_extra_bufts(fn, ggml_backend_dev_get(i));
        }
    }
}
static void init_extra_bufts(void) {
#ifdef __GLIBC__
    static char * said;
    static size_t size;
    FILE * real = stderr, * kept = open_memstream(&said, &size);
    if (kept != NULL) {
        stderr = kept;
        ask_all_devices();
        stderr = real;
        fflush(kept);
        const char refused[] = "AMX is not ready to be used!\\n";
        const char * at = strstr(said, refused);
        fwrite(said, 1, at != NULL ? (size_t) (at - said) : size, real);
        if (at != NULL) {
            fputs(at + sizeof(refused) - 1, real);
        }
        return;
    }
#endif
    ask_all_devices();
}
// What the device's backend says of itself by this name; NULL if it says nothing.
static const char * device_feature(ggml_backend_dev_t dev, const char * name) {
    ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(dev);
    ggml_backend_get_features_t features = (ggml_backend_get_features_t) ggml_backend_reg_get_proc_address(reg, "ggml_backend_get_features");
    for (struct ggml_backend_feature * f = features != NULL ? features(reg) : NULL; f != NULL && f->name != NULL; f++) {
        if (strcmp(f->name, name) == 0) {
            return f->value;
        }
    }
    return NULL;
}
static void call_set_n_threads(void * fn, ggml_backend_t backend, int n) {
    ((ggml_backend_set_n_threads_t) fn)(backend, n);
}
static void log_errors(enum ggml_log_level level, const char * text, void * user_data) {
    (void) user_data;
    if (level == GGML_LOG_LEVEL_ERROR) {
        fputs(text, stderr);
    }
}
static void quiet_log(void) { ggml_log_set(log_errors, NULL); }
// Errors are kept for the sentence that they become part of, and said when ggml ends the process: ggml-cuda logs the reason and aborts
// with "CUDA error". A log callback in Python would lose Ctrl-C: the interpreter raises it there, and ctypes drops what a callback raises.
static char errors[4 * PGS_ERR];
static void keep_error(enum ggml_log_level level, const char * text, void * user_data) {
    (void) user_data;
    if (level == GGML_LOG_LEVEL_ERROR) {
        const size_t used = strlen(errors), start = used + strlen(text) < sizeof(errors) ? used : 0;
        snprintf(errors + start, sizeof(errors) - start, "%s", text);
    }
}
static void say_errors(const char * message) { fprintf(stderr, "%s%s\\n", errors, message); }
// From now on, and none of before. libllama hands its callback on to ggml.
static void keep_errors(void) {
    errors[0] = 0;
    ggml_set_abort_callback(say_errors);
    llama_log_set(keep_error, NULL);
}
static const char * kept_errors(void) { return errors; }
// What each of the tokens is; returns the bytes of the longest piece. A quarter of a million calls from Python take half a second.
enum { IS_END = 1, IS_CONTROL = 2 };
static int scan_vocabulary(const struct llama_vocab * vocab, int n, uint8_t * kinds) {
    int longest = 0;
    for (int i = 0; i < n; i++) {
        char      piece[256];
        const int bytes = llama_token_to_piece(vocab, i, piece, sizeof(piece), 0, true);  // negative: what it would take
        longest         = bytes > longest ? bytes : -bytes > longest ? -bytes : longest;
        const bool control = (llama_vocab_get_attr(vocab, i) & (LLAMA_TOKEN_ATTR_CONTROL | LLAMA_TOKEN_ATTR_UNKNOWN)) != 0;
        kinds[i]           = (llama_vocab_is_eog(vocab, i) ? IS_END : 0) | (control ? IS_CONTROL : 0);
    }
    return longest;
}
// What libllama would allocate for a model without allocations, from the lines that it logs: its own function returns a C++ map.
static double mib;
static void add_buffer(enum ggml_log_level level, const char * text, void * user_data) {
    static const char * const before[] = { "buffer size = ", "kv_cache: size = " };
    for (int i = 0; i < 2; i++) {
        const char * at = strstr(text, before[i]);
        mib += at != NULL ? atof(at + strlen(before[i])) : 0;
    }
    keep_error(level, text, user_data);
}
static void count_buffers(void) {
    mib = 0;
    keep_errors();
    llama_log_set(add_buffer, NULL);
}
// Of all buffers since then; it counts no more.
static double counted_mib(void) {
    llama_log_set(keep_error, NULL);
    return mib;
}
static const char * compiled_ggml_version(void) { return PGS_GGML_VERSION; }
"""


def declarations() -> str:
    """The engine's own header, reduced to what cffi parses."""
    text = (HERE / "pgs.h").read_text()
    text = re.sub(r"^#.*$", "", text, flags=re.MULTILINE)
    return "#define PGS_ERR ...\n" + text


def main(out: str) -> None:
    ffi = FFI()
    ffi.cdef(GGML + LLAMA + declarations())
    ffi.set_source("pyggml_spec._native", HELPERS, py_limited_api=True)
    ffi.emit_c_code(out)


if __name__ == "__main__":
    main(sys.argv[1])
