// Causal attention with grouped heads, forward and backward, through the C++ API.
//
//   c++ -std=c++20 forward.cpp $(pkg-config --cflags --libs tessera) -o forward && ./forward
//
// Prints which kernel would run and why, then checks two things that hold for any input: the first query
// sees one key, so its output is that key's value; and with dout = 1 the entries of dv sum to those of dout.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <numeric>
#include <random>
#include <tessera/tessera.hpp>
#include <vector>

namespace {

constexpr std::int64_t batch = 2, seqlen = 384, heads_q = 8, heads_k = 2, dim = 64;

// The workspace is the caller's.
template <class Call>
std::vector<std::byte> make_workspace(Call& call) {
  std::vector<std::byte> workspace(tessera::workspace_size(call).or_throw());
  call.workspace = {workspace.data(), workspace.size()};
  return workspace;
}

std::vector<float> random_values(std::int64_t count, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<std::size_t>(count));
  for (float& value : values) value = normal(generator);
  return values;
}

tessera::Tensor tensor(std::vector<float>& values, std::int64_t heads) {
  return {values.data(), tessera::DType::float32, {batch, seqlen, heads, dim}};
}

double sum(const std::vector<float>& values) { return std::accumulate(values.begin(), values.end(), 0.0); }

int run() {
  constexpr std::int64_t q_size = batch * seqlen * heads_q * dim, k_size = batch * seqlen * heads_k * dim;
  std::vector<float> q = random_values(q_size, 1), k = random_values(k_size, 2), v = random_values(k_size, 3);
  std::vector<float> o(q.size()), lse(static_cast<std::size_t>(batch * heads_q * seqlen));

  tessera::Forward forward;
  forward.q = tensor(q, heads_q);
  forward.k = tensor(k, heads_k);
  forward.v = tensor(v, heads_k);
  forward.o = tensor(o, heads_q);
  forward.lse = tessera::Tensor(lse.data(), tessera::DType::float32, {batch, heads_q, seqlen});
  forward.options.causal = true;
  const std::vector<std::byte> forward_workspace = make_workspace(forward);

  std::printf("%s\n", tessera::explain(forward).or_throw().to_string().c_str());
  tessera::forward(forward).or_throw();

  std::vector<float> dout(o.size(), 1.0f), dq(q.size()), dk(k.size()), dv(v.size());
  tessera::Backward backward;
  backward.q = forward.q;
  backward.k = forward.k;
  backward.v = forward.v;
  backward.o = forward.o;
  backward.lse = forward.lse;
  backward.dout = tensor(dout, heads_q);
  backward.dq = tensor(dq, heads_q);
  backward.dk = tensor(dk, heads_k);
  backward.dv = tensor(dv, heads_k);
  backward.options = forward.options;
  const std::vector<std::byte> backward_workspace = make_workspace(backward);
  tessera::backward(backward).or_throw();

  double worst = 0;
  for (std::size_t c = 0; c < dim; ++c) worst = std::fmax(worst, std::fabs(o[c] - v[c]));
  const double drift = std::fabs(sum(dv) - sum(dout)) / sum(dout);
  std::printf("ran %s\n", tessera::last_kernel().c_str());
  std::printf("first query: o - v is at most %.1e\n", worst);
  std::printf("sum of dv: %.1e from the sum of dout, relative\n", drift);
  return worst < 1e-5 && drift < 1e-4 ? 0 : 1;
}

}  // namespace

int main() {
  try {
    return run();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
