// A program outside the tree. One query of zeros sees three keys alike: o is the mean of v, lse is log 3.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <tessera/tessera.hpp>
#include <vector>

int main() {
  const std::vector<float> q(4, 0.0f), k(12, 1.0f), v = {1, 2, 3, 4, 5, 6};
  std::vector<float> o(2), lse(1);

  tessera::Forward call;
  call.q = tessera::Tensor(q.data(), tessera::DType::float32, {1, 1, 1, 4});
  call.k = tessera::Tensor(k.data(), tessera::DType::float32, {1, 3, 1, 4});
  call.v = tessera::Tensor(v.data(), tessera::DType::float32, {1, 3, 1, 2});
  call.o = tessera::Tensor(o.data(), tessera::DType::float32, {1, 1, 1, 2});
  call.lse = tessera::Tensor(lse.data(), tessera::DType::float32, {1, 1, 1});

  const std::size_t bytes = tessera::workspace_size(call).or_throw();
  const std::unique_ptr<void, decltype(&std::free)> workspace(std::aligned_alloc(64, (bytes + 64) / 64 * 64),
                                                              &std::free);
  call.workspace = {workspace.get(), bytes};
  tessera::forward(call).or_throw();

  std::printf("%s ran: o = (%g, %g), lse = %g\n", tessera::last_kernel().c_str(), o[0], o[1], lse[0]);
  const auto near = [](float a, double b) { return std::fabs(a - b) < 1e-5; };
  return near(o[0], 3.0) && near(o[1], 4.0) && near(lse[0], std::log(3.0)) ? 0 : 1;
}
