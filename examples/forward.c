/* A sliding window through the C ABI.
 *
 *   cc forward.c $(pkg-config --cflags --libs tessera) -lm -o forward && ./forward
 *
 * With a window of (0, 0) each query sees its own key only, so o must equal v. Then the same call with a bad
 * option, to show what an error looks like.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <tessera/tessera.h>

enum { BATCH = 1, SEQLEN = 256, HEADS = 4, DIM = 64, COUNT = BATCH * SEQLEN * HEADS * DIM };

static float q_data[COUNT], k_data[COUNT], v_data[COUNT], o_data[COUNT];

static DLTensor view(float* data, int64_t* shape) {
  DLTensor tensor = {0};
  tensor.data = data;
  tensor.device.device_type = kDLCPU;
  tensor.ndim = 4;
  tensor.dtype.code = kDLFloat;
  tensor.dtype.bits = 32;
  tensor.dtype.lanes = 1;
  tensor.shape = shape; /* strides NULL: compact */
  return tensor;
}

static int failed(const char* what) {
  fprintf(stderr, "%s: %s\n", what, tessera_last_error());
  return 1;
}

int main(void) {
  for (int i = 0; i < COUNT; ++i) {
    q_data[i] = sinf(0.1f * (float)i);
    k_data[i] = cosf(0.3f * (float)i);
    v_data[i] = sinf(0.7f * (float)i);
  }
  int64_t shape[4] = {BATCH, SEQLEN, HEADS, DIM};
  const DLTensor q = view(q_data, shape), k = view(k_data, shape);
  const DLTensor v = view(v_data, shape), o = view(o_data, shape);

  tessera_options options;
  tessera_options_init(&options);
  options.window_left = 0;
  options.window_right = 0;

  tessera_forward_args args;
  tessera_forward_args_init(&args);
  args.q = &q;
  args.k = &k;
  args.v = &v;
  args.o = &o;
  args.options = &options;

  size_t bytes = 0;
  if (tessera_forward_workspace_size(&args, &bytes) != TESSERA_OK) return failed("workspace_size");
  void* workspace = malloc(bytes);
  if (workspace == NULL) return 1;
  args.workspace = workspace;
  args.workspace_bytes = bytes;

  if (tessera_forward(&args) != TESSERA_OK) {
    free(workspace);
    return failed("forward");
  }
  float worst = 0.0f;
  for (int i = 0; i < COUNT; ++i) worst = fmaxf(worst, fabsf(o_data[i] - v_data[i]));
  printf("tessera %s ran %s: ", tessera_version(), tessera_last_kernel());
  printf("o - v is at most %.1e\n", (double)worst);

  options.window_left = -7;
  const tessera_code code = tessera_forward(&args);
  printf("window_left = -7 gives code %d: %s\n", (int)code, tessera_last_error());

  free(workspace);
  return worst < 1e-5f && code == TESSERA_INVALID_ARGUMENT ? 0 : 1;
}
