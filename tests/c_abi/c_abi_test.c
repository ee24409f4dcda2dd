/* The C ABI from C: results, struct versions, error texts, NULLs, the explain protocol. */
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tessera/tessera.h"

static int failures = 0;

static void check(int condition, const char* text, int line) {
  if (condition) return;
  ++failures;
  fprintf(stderr, "line %d: %s\n  last error: %s\n", line, text, tessera_last_error());
}
#define CHECK(condition) check((condition) != 0, #condition, __LINE__)

static void check_error(tessera_code code, tessera_code expected, const char* text, int line) {
  if (code == expected && strcmp(tessera_last_error(), text) == 0) return;
  ++failures;
  fprintf(stderr, "line %d: code %d, \"%s\"\n  expected %d, \"%s\"\n", line, (int)code, tessera_last_error(),
          (int)expected, text);
}
#define CHECK_INVALID(call, text) check_error((call), TESSERA_INVALID_ARGUMENT, (text), __LINE__)

enum { BATCH = 1, ROWS = 2, KEYS = 4, HEADS = 2, DIM = 3 };

/* Memory and tensors of one small call. Queries are 0, so that every visible key weighs the same. */
typedef struct {
  float q[BATCH * ROWS * HEADS * DIM], k[BATCH * KEYS * HEADS * DIM], v[BATCH * KEYS * HEADS * DIM];
  float o[BATCH * ROWS * HEADS * DIM], lse[BATCH * HEADS * ROWS];
  float dout[BATCH * ROWS * HEADS * DIM];
  float dq[BATCH * ROWS * HEADS * DIM], dk[BATCH * KEYS * HEADS * DIM], dv[BATCH * KEYS * HEADS * DIM];
  int64_t rows_shape[4], keys_shape[4], lse_shape[3];
  DLTensor t_q, t_k, t_v, t_o, t_lse, t_dout, t_dq, t_dk, t_dv;
  tessera_options options;
  tessera_forward_args forward;
  tessera_backward_args backward;
  void* workspace;
} Call;

static DLTensor tensor(float* data, int ndim, int64_t* shape) {
  DLTensor t;
  memset(&t, 0, sizeof t);
  t.data = data;
  t.device.device_type = kDLCPU;
  t.ndim = ndim;
  t.dtype.code = kDLFloat;
  t.dtype.bits = 32;
  t.dtype.lanes = 1;
  t.shape = shape;
  return t;
}

static void set_up(Call* c) {
  const int64_t rows_shape[4] = {BATCH, ROWS, HEADS, DIM}, keys_shape[4] = {BATCH, KEYS, HEADS, DIM};
  const int64_t lse_shape[3] = {BATCH, HEADS, ROWS};
  memset(c, 0, sizeof *c);
  memcpy(c->rows_shape, rows_shape, sizeof rows_shape);
  memcpy(c->keys_shape, keys_shape, sizeof keys_shape);
  memcpy(c->lse_shape, lse_shape, sizeof lse_shape);
  for (int j = 0; j < KEYS; ++j) {
    for (int i = 0; i < HEADS * DIM; ++i) {
      c->v[j * HEADS * DIM + i] = (float)(j + 1);
    }
  }
  for (size_t i = 0; i < sizeof c->dout / sizeof *c->dout; ++i) c->dout[i] = 1.0f;
  c->t_q = tensor(c->q, 4, c->rows_shape);
  c->t_k = tensor(c->k, 4, c->keys_shape);
  c->t_v = tensor(c->v, 4, c->keys_shape);
  c->t_o = tensor(c->o, 4, c->rows_shape);
  c->t_lse = tensor(c->lse, 3, c->lse_shape);
  c->t_dout = tensor(c->dout, 4, c->rows_shape);
  c->t_dq = tensor(c->dq, 4, c->rows_shape);
  c->t_dk = tensor(c->dk, 4, c->keys_shape);
  c->t_dv = tensor(c->dv, 4, c->keys_shape);

  tessera_options_init(&c->options);
  tessera_forward_args_init(&c->forward);
  tessera_backward_args_init(&c->backward);
  c->forward.q = c->backward.q = &c->t_q;
  c->forward.k = c->backward.k = &c->t_k;
  c->forward.v = c->backward.v = &c->t_v;
  c->forward.o = c->backward.o = &c->t_o;
  c->forward.lse = c->backward.lse = &c->t_lse;
  c->backward.dout = &c->t_dout;
  c->backward.dq = &c->t_dq;
  c->backward.dk = &c->t_dk;
  c->backward.dv = &c->t_dv;
  c->forward.options = c->backward.options = &c->options;

  c->forward.workspace_bytes = c->backward.workspace_bytes = 1 << 20;
  c->workspace = aligned_alloc(256, c->forward.workspace_bytes);
  c->forward.workspace = c->backward.workspace = c->workspace;
}

static void tear_down(Call* c) { free(c->workspace); }

static int close_to(float a, double b) { return fabs((double)a - b) < 1e-5; }

static void test_defaults(void) {
  tessera_options options;
  memset(&options, 0xFF, sizeof options);
  tessera_options_init(&options);
  CHECK(options.struct_size == sizeof options);
  CHECK(options.window_left == TESSERA_UNBOUNDED && options.window_right == TESSERA_UNBOUNDED);
  CHECK(options.kernel == NULL && options.causal == 0 && options.dropout_p == 0);
  tessera_options_init(NULL);
  tessera_forward_args_init(NULL);
  tessera_backward_args_init(NULL);
  CHECK(tessera_abi_version() == TESSERA_ABI_VERSION);
  CHECK(strlen(tessera_version()) >= 5);
}

static void test_forward(void) {
  Call c;
  set_up(&c);
  size_t bytes = (size_t)-1;
  CHECK(tessera_forward_workspace_size(&c.forward, &bytes) == TESSERA_OK &&
        bytes <= c.forward.workspace_bytes);
  CHECK(tessera_forward(&c.forward) == TESSERA_OK);
  CHECK(strcmp(tessera_last_error(), "") == 0 && strlen(tessera_last_kernel()) > 0);
  for (int i = 0; i < ROWS * HEADS * DIM; ++i) CHECK(close_to(c.o[i], 2.5)); /* the mean of 1 .. 4 */
  for (int i = 0; i < ROWS * HEADS; ++i) CHECK(close_to(c.lse[i], log(4.0)));

  c.options.causal = 1; /* bottom right: row 0 sees 3 keys, row 1 all 4 */
  CHECK(tessera_forward(&c.forward) == TESSERA_OK);
  CHECK(close_to(c.o[0], 2.0) && close_to(c.o[HEADS * DIM], 2.5));
  CHECK(close_to(c.lse[0], log(3.0)) && close_to(c.lse[1], log(4.0)));

  c.options.alignment = TESSERA_ALIGN_TOP_LEFT; /* row 0 sees 1 key, row 1 sees 2 */
  c.forward.lse = NULL;
  CHECK(tessera_forward(&c.forward) == TESSERA_OK);
  CHECK(close_to(c.o[0], 1.0) && close_to(c.o[HEADS * DIM], 1.5));

  c.forward.options = NULL; /* all defaults */
  CHECK(tessera_forward(&c.forward) == TESSERA_OK && close_to(c.o[0], 2.5));
  tear_down(&c);
}

static void test_backward(void) {
  Call c;
  set_up(&c);
  CHECK(tessera_forward(&c.forward) == TESSERA_OK);
  size_t bytes = (size_t)-1;
  CHECK(tessera_backward_workspace_size(&c.backward, &bytes) == TESSERA_OK &&
        bytes <= c.backward.workspace_bytes);
  CHECK(tessera_backward(&c.backward) == TESSERA_OK);
  /* Each of 2 rows gives a quarter of dout = 1 to each value. */
  for (int i = 0; i < KEYS * HEADS * DIM; ++i) CHECK(close_to(c.dv[i], 0.5));
  for (int i = 0; i < KEYS * HEADS * DIM; ++i) CHECK(close_to(c.dk[i], 0.0)); /* q is 0 */
  tear_down(&c);
}

static void test_struct_sizes(void) {
  Call c;
  set_up(&c);
  const size_t known = c.options.struct_size;

  /* An older caller: its options end before alignment, and what lies behind is not its own. */
  c.options.causal = 1;
  c.options.struct_size = offsetof(tessera_options, alignment);
  c.options.alignment = 77;
  c.options.dropout_p = 99;
  CHECK(tessera_forward(&c.forward) == TESSERA_OK && close_to(c.o[0], 2.0));
  c.options.struct_size = offsetof(tessera_options, stream); /* before GPUs: a stream is not its own either */
  c.options.alignment = 0;
  c.options.dropout_p = 0;
  c.options.stream = &c;
  CHECK(tessera_forward(&c.forward) == TESSERA_OK && close_to(c.o[0], 2.0));
  c.options.struct_size = sizeof(size_t); /* nothing but the size: all defaults, no window included */
  c.options.window_left = -5;
  CHECK(tessera_forward(&c.forward) == TESSERA_OK && close_to(c.o[0], 2.5));
  tessera_options_init(&c.options);

  /* Older arguments, without options and workspace. */
  c.forward.struct_size = offsetof(tessera_forward_args, options);
  size_t bytes = 1;
  CHECK(tessera_forward_workspace_size(&c.forward, &bytes) == TESSERA_OK);
  c.forward.struct_size = offsetof(tessera_forward_args, o);
  CHECK_INVALID(tessera_forward(&c.forward), "o: not given");
  c.forward.struct_size = sizeof c.forward;

  /* A newer caller: fine while it leaves zeros in what this library does not know. */
  struct {
    tessera_options options;
    uint64_t more[3];
  } newer;
  memset(&newer, 0, sizeof newer);
  tessera_options_init(&newer.options);
  newer.options.struct_size = sizeof newer;
  c.forward.options = &newer.options;
  CHECK(tessera_forward(&c.forward) == TESSERA_OK);
  newer.more[2] = 1;
  char text[256];
  snprintf(text, sizeof text,
           "tessera_options.struct_size: %zu, expected zeros behind the %zu bytes that this library knows",
           sizeof newer, known);
  CHECK_INVALID(tessera_forward(&c.forward), text);

  const size_t bad[] = {0, 4, 12, known - 1, known + 4, (size_t)1 << 40, (size_t)-8};
  c.forward.options = &c.options;
  for (size_t i = 0; i < sizeof bad / sizeof *bad; ++i) {
    c.options.struct_size = bad[i];
    snprintf(text, sizeof text,
             "tessera_options.struct_size: %zu, expected sizeof(tessera_options), here %zu", bad[i], known);
    CHECK_INVALID(tessera_forward(&c.forward), text);
  }
  c.backward.struct_size = 0;
  snprintf(text, sizeof text,
           "tessera_backward_args.struct_size: 0, expected sizeof(tessera_backward_args), here %zu",
           sizeof c.backward);
  CHECK_INVALID(tessera_backward(&c.backward), text);
  tear_down(&c);
}

static void test_bad_arguments(void) {
  Call c;
  set_up(&c);
  size_t size = 0;
  CHECK_INVALID(tessera_forward(NULL), "args: null, expected a tessera_forward_args");
  CHECK_INVALID(tessera_backward(NULL), "args: null, expected a tessera_backward_args");
  CHECK_INVALID(tessera_forward_workspace_size(NULL, &size), "args: null, expected a tessera_forward_args");
  CHECK_INVALID(tessera_forward_workspace_size(&c.forward, NULL),
                "bytes: null, expected a place for the size");
  CHECK_INVALID(tessera_backward_workspace_size(&c.backward, NULL),
                "bytes: null, expected a place for the size");
  CHECK_INVALID(tessera_explain_forward(&c.forward, NULL, NULL), "size: null, expected a place for the size");
  CHECK_INVALID(tessera_explain_backward(NULL, NULL, &size), "args: null, expected a tessera_backward_args");

  c.forward.q = NULL;
  CHECK_INVALID(tessera_forward(&c.forward), "q: not given");
  c.forward.q = &c.t_q;
  c.t_q.shape = NULL;
  CHECK_INVALID(tessera_forward(&c.forward), "q.shape: null, expected 4 sizes");
  c.t_q.shape = c.rows_shape;
  c.t_q.ndim = 0;
  CHECK_INVALID(tessera_forward(&c.forward), "q: rank 0, expected 4");
  c.t_q.ndim = 7; /* more than there is: must not be followed */
  CHECK_INVALID(tessera_forward(&c.forward), "q: rank 7, expected 4");
  c.t_q.ndim = 4;
  c.t_q.byte_offset = 2;
  CHECK_INVALID(tessera_forward(&c.forward),
                "q.data: an address 2 past a multiple of 4, expected a multiple of 4");
  c.t_q.byte_offset = 0;

  int64_t none[1] = {0};
  DLTensor scalar = tensor(c.q, 0, none);
  c.options.bias = &scalar;
  CHECK_INVALID(tessera_forward(&c.forward), "bias: rank 0, expected 1 to 4");
  c.options.bias = NULL;
  c.options.alignment = 2;
  CHECK_INVALID(tessera_forward(&c.forward),
                "alignment: 2, expected TESSERA_ALIGN_BOTTOM_RIGHT (0) or TESSERA_ALIGN_TOP_LEFT (1)");
  c.options.alignment = 0;
  c.options.reserved = 1;
  CHECK_INVALID(tessera_forward(&c.forward), "reserved: 1, expected 0");
  c.options.reserved = 0;
  c.options.window_right = -2;
  CHECK_INVALID(tessera_forward(&c.forward), "window_right: -2, expected at least 0, or none for no bound");
  c.options.window_right = TESSERA_UNBOUNDED;
  c.options.has_softmax_scale = 1;
  c.options.softmax_scale = NAN;
  CHECK_INVALID(tessera_forward(&c.forward), "softmax_scale: nan, expected a finite float32 number");
  c.options.has_softmax_scale = 0;
  c.options.kernel = "nonesuch";
  CHECK(tessera_forward(&c.forward) == TESSERA_INVALID_ARGUMENT);
  CHECK(strncmp(tessera_last_error(), "kernel: nonesuch, expected one of ", 34) == 0);
  c.options.kernel = NULL;
  /* A GPU that no machine has. */
  DLTensor* const all[] = {&c.t_q, &c.t_k, &c.t_v, &c.t_o, &c.t_lse};
  for (size_t i = 0; i < sizeof all / sizeof *all; ++i) {
    all[i]->device.device_type = kDLCUDA;
    all[i]->device.device_id = 99;
  }
  CHECK(tessera_forward(&c.forward) == TESSERA_UNSUPPORTED);
  CHECK(strncmp(tessera_last_error(), "no kernel takes this call: ", 27) == 0);
  CHECK(tessera_prepare_forward(&c.forward) == TESSERA_UNSUPPORTED);
  tear_down(&c);
}

static void test_prepare(void) {
  Call c;
  set_up(&c);
  CHECK(tessera_prepare_forward(&c.forward) == TESSERA_OK &&
        tessera_prepare_backward(&c.backward) == TESSERA_OK);
  for (int i = 0; i < ROWS * HEADS * DIM; ++i) CHECK(c.o[i] == 0 && c.dq[i] == 0); /* nothing ran */
  c.forward.workspace = NULL;                                                      /* nor is it needed */
  CHECK(tessera_prepare_forward(&c.forward) == TESSERA_OK);
  c.t_q.ndim = 3;
  CHECK_INVALID(tessera_prepare_backward(&c.backward), "q: rank 3, expected 4");
  CHECK_INVALID(tessera_prepare_forward(NULL), "args: null, expected a tessera_forward_args");
  tear_down(&c);
}

static void test_explain(void) {
  Call c;
  set_up(&c);
  size_t need = 0;
  CHECK(tessera_explain_forward(&c.forward, NULL, &need) == TESSERA_OK && need > 2);

  char* buffer = malloc(need + 1);
  memset(buffer, 'x', need + 1);
  size_t size = need - 1; /* one too few: nothing is written, the size is told */
  CHECK(tessera_explain_forward(&c.forward, buffer, &size) == TESSERA_OK && size == need && buffer[0] == 'x');
  CHECK(tessera_explain_forward(&c.forward, buffer, &size) == TESSERA_OK && size == need);
  CHECK(buffer[0] == '{' && buffer[need - 2] == '}' && buffer[need - 1] == 0 && buffer[need] == 'x');
  free(buffer);

  CHECK(tessera_explain_backward(&c.backward, NULL, &need) == TESSERA_OK && need > 2);
  c.t_k.ndim = 3;
  need = 5;
  CHECK_INVALID(tessera_explain_forward(&c.forward, NULL, &need), "k: rank 3, expected 4");
  CHECK(need == 5);
  tear_down(&c);
}

/* The cache holds 2 keys, the call appends 2 more: their values are 1, 2, 3, 4. */
static void test_decode(void) {
  Call c;
  set_up(&c);
  float k_new[2 * HEADS * DIM] = {0}, v_new[2 * HEADS * DIM];
  int64_t new_shape[4] = {BATCH, 2, HEADS, DIM}, length_shape[1] = {BATCH};
  int32_t length[1] = {2};
  memcpy(v_new, c.v + 2 * HEADS * DIM, sizeof v_new);
  memset(c.v + 2 * HEADS * DIM, 0, sizeof v_new);
  DLTensor t_k_new = tensor(k_new, 4, new_shape), t_v_new = tensor(v_new, 4, new_shape);
  DLTensor t_length = tensor((float*)length, 1, length_shape);
  t_length.dtype.code = kDLInt;

  tessera_decode_args args;
  tessera_decode_args_init(&args);
  args.q = &c.t_q;
  args.k_cache = &c.t_k;
  args.v_cache = &c.t_v;
  args.cache_seqlens = &t_length;
  args.k_new = &t_k_new;
  args.v_new = &t_v_new;
  args.o = &c.t_o;
  args.lse = &c.t_lse;
  args.options = &c.options;
  c.options.causal = 1;
  size_t bytes = 0;
  CHECK(tessera_decode_workspace_size(&args, &bytes) == TESSERA_OK);
  CHECK(tessera_prepare_decode(&args) == TESSERA_OK);
  size_t text = 0;
  CHECK(tessera_explain_decode(&args, NULL, &text) == TESSERA_OK && text > 2);
  args.workspace = malloc(bytes);
  args.workspace_bytes = bytes;
  CHECK(tessera_decode(&args) == TESSERA_OK);
  CHECK(fabsf(c.o[0] - 2.0f) < 1e-6f && fabsf(c.o[HEADS * DIM] - 2.5f) < 1e-6f); /* rows of 3 and 4 keys */
  CHECK(fabsf(c.lse[0] - logf(3.0f)) < 1e-6f && fabsf(c.lse[1] - logf(4.0f)) < 1e-6f);
  CHECK(c.v[2 * HEADS * DIM] == 3.0f && c.v[3 * HEADS * DIM] == 4.0f);

  length[0] = 3;
  CHECK_INVALID(tessera_decode(&args), "cache_seqlens[0]: 3, expected 0 to 2 with the 2 of k_new");
  length[0] = 2;
  args.reserved = 1;
  CHECK_INVALID(tessera_decode(&args), "reserved: 1, expected 0");
  args.reserved = 0;
  args.struct_size = 12;
  CHECK(tessera_decode(&args) == TESSERA_INVALID_ARGUMENT);
  CHECK_INVALID(tessera_decode(NULL), "args: null, expected a tessera_decode_args");
  free(args.workspace);
  tear_down(&c);
}

/* The values 2, 2 of the cache are stored as 4 times 0.5; a struct without the scales' fields has scales
 * of 1. */
static void test_decode_int8(void) {
  Call c;
  set_up(&c);
  signed char k[BATCH * KEYS * HEADS * DIM] = {0}, v[BATCH * KEYS * HEADS * DIM];
  int64_t length_shape[1] = {BATCH}, scale_shape[1] = {HEADS};
  int32_t length[1] = {2};
  float scale[HEADS];
  for (int h = 0; h < HEADS; ++h) scale[h] = 0.5f;
  memset(v, 4, sizeof v);
  DLTensor t_k = c.t_k, t_v = c.t_v, t_length = tensor((float*)length, 1, length_shape);
  DLTensor t_scale = tensor(scale, 1, scale_shape);
  t_length.dtype.code = kDLInt;
  t_k.data = k;
  t_v.data = v;
  t_k.dtype.code = t_v.dtype.code = kDLInt;
  t_k.dtype.bits = t_v.dtype.bits = 8;

  tessera_decode_args args;
  tessera_decode_args_init(&args);
  args.q = &c.t_q;
  args.k_cache = &t_k;
  args.v_cache = &t_v;
  args.cache_seqlens = &t_length;
  args.o = &c.t_o;
  args.options = &c.options;
  args.k_scale = args.v_scale = &t_scale;
  size_t bytes = 0;
  CHECK(tessera_decode_workspace_size(&args, &bytes) == TESSERA_OK);
  args.workspace = malloc(bytes);
  args.workspace_bytes = bytes;
  CHECK(tessera_decode(&args) == TESSERA_OK);
  CHECK(c.o[0] == 2.0f);
  args.struct_size = offsetof(tessera_decode_args, k_scale);
  CHECK(tessera_decode(&args) == TESSERA_OK);
  CHECK(c.o[0] == 4.0f);
  args.struct_size = sizeof args;
  t_k.dtype.code = t_v.dtype.code = TESSERA_DL_FLOAT8_E4M3FN;
  free(args.workspace);
  CHECK(tessera_decode_workspace_size(&args, &bytes) == TESSERA_OK);
  args.workspace = malloc(bytes);
  args.workspace_bytes = bytes;
  CHECK(tessera_decode(&args) == TESSERA_OK);
  CHECK(c.o[0] == 0.00390625f); /* 0x04 is 2^-7 */
  t_k.dtype.code = kDLInt;
  CHECK_INVALID(tessera_decode(&args), "v_cache.dtype: float8_e4m3fn, expected k_cache's int8");
  free(args.workspace);
  tear_down(&c);
}

static void test_merge_states(void) {
  Call c;
  set_up(&c);
  float o_b[BATCH * ROWS * HEADS * DIM], lse_b[BATCH * HEADS * ROWS];
  for (size_t i = 0; i < sizeof c.o / sizeof *c.o; ++i) {
    c.o[i] = 1.0f;
    o_b[i] = 4.0f;
  }
  for (size_t i = 0; i < sizeof c.lse / sizeof *c.lse; ++i) {
    c.lse[i] = logf(2.0f);
    lse_b[i] = 0.0f;
  }
  DLTensor t_o_b = tensor(o_b, 4, c.rows_shape), t_lse_b = tensor(lse_b, 3, c.lse_shape);
  tessera_merge_states_args args;
  tessera_merge_states_args_init(&args);
  args.o_a = args.o = &c.t_o; /* in place */
  args.lse_a = args.lse = &c.t_lse;
  args.o_b = &t_o_b;
  args.lse_b = &t_lse_b;
  CHECK(tessera_prepare_merge_states(&args) == TESSERA_OK);
  CHECK(tessera_merge_states(&args) == TESSERA_OK);
  CHECK(fabsf(c.o[0] - 2.0f) < 1e-6f && fabsf(c.lse[0] - logf(3.0f)) < 1e-6f);
  args.lse_b = NULL;
  CHECK_INVALID(tessera_merge_states(&args), "lse_b: not given");
  CHECK_INVALID(tessera_merge_states(NULL), "args: null, expected a tessera_merge_states_args");
  tear_down(&c);
}

static void* fail_elsewhere(void* unused) {
  (void)unused;
  CHECK(strcmp(tessera_last_error(), "") == 0); /* another thread's error is not ours */
  CHECK(strcmp(tessera_last_kernel(), "") == 0);
  CHECK_INVALID(tessera_backward(NULL), "args: null, expected a tessera_backward_args");
  return NULL;
}

static void test_errors_per_thread(void) {
  CHECK_INVALID(tessera_forward(NULL), "args: null, expected a tessera_forward_args");
  pthread_t thread;
  CHECK(pthread_create(&thread, NULL, fail_elsewhere, NULL) == 0);
  pthread_join(thread, NULL);
  CHECK(strcmp(tessera_last_error(), "args: null, expected a tessera_forward_args") == 0);
  Call c;
  set_up(&c);
  CHECK(tessera_forward(&c.forward) == TESSERA_OK);
  CHECK(strcmp(tessera_last_error(), "") == 0);
  tear_down(&c);
}

int main(void) {
  test_defaults();
  test_forward();
  test_backward();
  test_struct_sizes();
  test_bad_arguments();
  test_prepare();
  test_explain();
  test_decode();
  test_decode_int8();
  test_merge_states();
  test_errors_per_thread();
  if (failures != 0) fprintf(stderr, "%d checks failed\n", failures);
  return failures == 0 ? 0 : 1;
}
