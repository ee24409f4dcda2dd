/* A program outside the tree. One query of zeros sees three keys alike: o is the mean of v, lse is log 3. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <tessera/tessera.h>

static DLTensor tensor(float* data, int ndim, int64_t* shape) {
  const DLTensor t = {data, {kDLCPU, 0}, ndim, {kDLFloat, 32, 1}, shape, NULL, 0};
  return t;
}

int main(void) {
  float q[4] = {0}, k[12] = {0}, v[6] = {1, 2, 3, 4, 5, 6}, o[2], lse[1];
  int64_t q_shape[4] = {1, 1, 1, 4}, k_shape[4] = {1, 3, 1, 4}, v_shape[4] = {1, 3, 1, 2};
  int64_t o_shape[4] = {1, 1, 1, 2}, lse_shape[3] = {1, 1, 1};
  const DLTensor t_q = tensor(q, 4, q_shape), t_k = tensor(k, 4, k_shape), t_v = tensor(v, 4, v_shape);
  const DLTensor t_o = tensor(o, 4, o_shape), t_lse = tensor(lse, 3, lse_shape);

  tessera_forward_args args;
  tessera_forward_args_init(&args);
  args.q = &t_q;
  args.k = &t_k;
  args.v = &t_v;
  args.o = &t_o;
  args.lse = &t_lse;
  tessera_code code = tessera_forward_workspace_size(&args, &args.workspace_bytes);
  args.workspace = aligned_alloc(64, (args.workspace_bytes + 64) / 64 * 64);
  if (code == TESSERA_OK) code = tessera_forward(&args);
  free(args.workspace);
  if (code != TESSERA_OK) {
    fprintf(stderr, "%s\n", tessera_last_error());
    return 1;
  }
  printf("%s ran: o = (%g, %g), lse = %g\n", tessera_last_kernel(), o[0], o[1], lse[0]);
  return fabs(o[0] - 3) < 1e-5 && fabs(o[1] - 4) < 1e-5 && fabs(lse[0] - log(3)) < 1e-5 ? 0 : 1;
}
