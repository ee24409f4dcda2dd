/* Tessera's C ABI. Tensors are DLPack's DLTensor; NULL means "not given".
 *
 * Every struct opens with struct_size, which the caller sets to sizeof(the struct): fields that a newer
 * library added behind it then take their defaults (all bits zero). Use the *_init functions, which set
 * it and every default. Functions return TESSERA_OK or a code; tessera_last_error() then has the text,
 * for this thread, until its next call. No exception crosses this boundary. A call that fails has written
 * nothing. All functions are thread-safe.
 */
#ifndef TESSERA_TESSERA_H
#define TESSERA_TESSERA_H

#include <dlpack/dlpack.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "tessera/export.h"

#ifdef __cplusplus
extern "C" {
#endif

#define TESSERA_ABI_VERSION 1

/* NOLINTBEGIN(modernize-use-using): this is C. */

typedef enum tessera_code {
  TESSERA_OK = 0,
  TESSERA_INVALID_ARGUMENT = 1,
  TESSERA_UNSUPPORTED = 2,
  TESSERA_INTERNAL = 3
} tessera_code;

#define TESSERA_UNBOUNDED INT64_C(-1) /* a window side without a bound */
#define TESSERA_ALIGN_BOTTOM_RIGHT 0
#define TESSERA_ALIGN_TOP_LEFT 1
/* The DLPack code of an 8-bit cache of that dtype: kDLFloat8_e4m3fn, which headers before 1.1 lack. */
#define TESSERA_DL_FLOAT8_E4M3FN 10

typedef struct tessera_options {
  size_t struct_size;
  double softmax_scale; /* used if has_softmax_scale, else 1 / sqrt(head_dim) */
  int32_t has_softmax_scale;
  int32_t causal;
  int64_t window_left;  /* TESSERA_UNBOUNDED or >= 0 */
  int64_t window_right; /* TESSERA_UNBOUNDED or >= 0 */
  int32_t alignment;    /* TESSERA_ALIGN_* */
  int32_t deterministic;
  double softcap;
  const DLTensor* alibi_slopes;
  const DLTensor* bias;
  const DLTensor* sinks;
  double dropout_p;
  uint64_t seed;
  uint64_t offset;
  const DLTensor* cu_seqlens_q;
  const DLTensor* cu_seqlens_k;
  const DLTensor* seqused_q;
  const DLTensor* seqused_k;
  int64_t max_seqlen_q; /* 0: the longest sequence; on a GPU the total */
  int64_t max_seqlen_k;
  const char* kernel; /* NULL: the first that fits */
  int32_t num_threads;
  int32_t reserved;
  void* stream; /* CUDA stream of the work; NULL: the default stream */
} tessera_options;

typedef struct tessera_forward_args {
  size_t struct_size;
  const DLTensor* q;
  const DLTensor* k;
  const DLTensor* v;
  const DLTensor* o;
  const DLTensor* lse;            /* may be NULL */
  const tessera_options* options; /* may be NULL: all defaults */
  void* workspace;
  size_t workspace_bytes;
} tessera_forward_args;

typedef struct tessera_backward_args {
  size_t struct_size;
  const DLTensor* q;
  const DLTensor* k;
  const DLTensor* v;
  const DLTensor* o;
  const DLTensor* lse;
  const DLTensor* dout;
  const DLTensor* dlse; /* may be NULL */
  const DLTensor* dq;
  const DLTensor* dk;
  const DLTensor* dv;
  const DLTensor* dbias;          /* may be NULL */
  const DLTensor* dsinks;         /* may be NULL */
  const tessera_options* options; /* may be NULL: all defaults */
  void* workspace;
  size_t workspace_bytes;
} tessera_backward_args;

typedef struct tessera_decode_args {
  size_t struct_size;
  const DLTensor* q;
  const DLTensor* k_cache;
  const DLTensor* v_cache;
  const DLTensor* cache_seqlens;
  const DLTensor* page_table;      /* may be NULL: the cache is contiguous */
  const DLTensor* cache_batch_idx; /* may be NULL */
  const DLTensor* leftpad_k;       /* may be NULL */
  const DLTensor* k_new;           /* may be NULL: nothing is appended */
  const DLTensor* v_new;
  const DLTensor* rotary_cos; /* may be NULL */
  const DLTensor* rotary_sin;
  const DLTensor* o;
  const DLTensor* lse; /* may be NULL */
  int32_t rotary_interleaved;
  int32_t reserved;
  int64_t num_splits;             /* 0: automatic */
  const tessera_options* options; /* may be NULL: all defaults */
  void* workspace;
  size_t workspace_bytes;
  const DLTensor* k_scale; /* may be NULL: 1; with an 8-bit cache only */
  const DLTensor* v_scale; /* likewise */
} tessera_decode_args;

typedef struct tessera_merge_states_args {
  size_t struct_size;
  const DLTensor* o_a;
  const DLTensor* lse_a;
  const DLTensor* o_b;
  const DLTensor* lse_b;
  const DLTensor* o;
  const DLTensor* lse;            /* may be NULL */
  const tessera_options* options; /* may be NULL; kernel, num_threads and stream count */
} tessera_merge_states_args;
/* NOLINTEND(modernize-use-using) */

/* In the header, so that struct_size is the caller's, whatever library it meets. */
static inline void tessera_options_init(tessera_options* options) {
  if (!options) return;
  memset(options, 0, sizeof(*options));
  options->struct_size = sizeof(*options);
  options->window_left = TESSERA_UNBOUNDED;
  options->window_right = TESSERA_UNBOUNDED;
}
static inline void tessera_forward_args_init(tessera_forward_args* args) {
  if (!args) return;
  memset(args, 0, sizeof(*args));
  args->struct_size = sizeof(*args);
}
static inline void tessera_backward_args_init(tessera_backward_args* args) {
  if (!args) return;
  memset(args, 0, sizeof(*args));
  args->struct_size = sizeof(*args);
}
static inline void tessera_decode_args_init(tessera_decode_args* args) {
  if (!args) return;
  memset(args, 0, sizeof(*args));
  args->struct_size = sizeof(*args);
}
static inline void tessera_merge_states_args_init(tessera_merge_states_args* args) {
  if (!args) return;
  memset(args, 0, sizeof(*args));
  args->struct_size = sizeof(*args);
}

TESSERA_EXPORT tessera_code tessera_forward(const tessera_forward_args* args);
TESSERA_EXPORT tessera_code tessera_backward(const tessera_backward_args* args);
TESSERA_EXPORT tessera_code tessera_decode(const tessera_decode_args* args);
TESSERA_EXPORT tessera_code tessera_merge_states(const tessera_merge_states_args* args);

/* As tessera::prepare(): compiles and loads what the call needs, and runs nothing. */
TESSERA_EXPORT tessera_code tessera_prepare_forward(const tessera_forward_args* args);
TESSERA_EXPORT tessera_code tessera_prepare_backward(const tessera_backward_args* args);
TESSERA_EXPORT tessera_code tessera_prepare_decode(const tessera_decode_args* args);
TESSERA_EXPORT tessera_code tessera_prepare_merge_states(const tessera_merge_states_args* args);

TESSERA_EXPORT tessera_code tessera_forward_workspace_size(const tessera_forward_args* args, size_t* bytes);
TESSERA_EXPORT tessera_code tessera_backward_workspace_size(const tessera_backward_args* args, size_t* bytes);
TESSERA_EXPORT tessera_code tessera_decode_workspace_size(const tessera_decode_args* args, size_t* bytes);

/* A JSON text. *size is the room in buffer on entry and the text's length with its final 0 on return; with
 * too little room (buffer may be NULL) nothing is written to buffer and the code is still TESSERA_OK. */
TESSERA_EXPORT tessera_code tessera_explain_forward(const tessera_forward_args* args, char* buffer,
                                                    size_t* size);
TESSERA_EXPORT tessera_code tessera_explain_backward(const tessera_backward_args* args, char* buffer,
                                                     size_t* size);
TESSERA_EXPORT tessera_code tessera_explain_decode(const tessera_decode_args* args, char* buffer,
                                                   size_t* size);

TESSERA_EXPORT const char* tessera_last_error(void);  /* "" after a success */
TESSERA_EXPORT const char* tessera_last_kernel(void); /* as tessera::last_kernel() */
TESSERA_EXPORT const char* tessera_version(void);
TESSERA_EXPORT int tessera_abi_version(void);

#ifdef __cplusplus
}
#endif

#endif
