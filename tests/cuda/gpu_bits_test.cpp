// The same bits again and again, at sizes where many blocks of threads work at once.
#include "cuda/resident.h"

namespace tessera::verify {
namespace {

class GpuBits : public GpuTest {
 protected:
  static void expect_same_bits(const Case& c, int repeats) {
    Tensors tensors(c);
    const Resident device(tensors);
    Snapshot first;
    for (int i = 0; i < repeats; ++i) {
      device.fill_workspaces(static_cast<std::uint8_t>(5 * i), nullptr);  // its contents do not matter
      device.run();
      device.download(tensors, nullptr);
      if (i == 0) first = outputs_of(tensors);
      ASSERT_EQ(outputs_of(tensors), first) << "repeat " << i;
    }
  }
};
TESSERA_FOR_EACH_GPU_KERNEL(GpuBits);

TEST_P(GpuBits, FiftyRepeatsGiveTheSameBits) {
  Case c = forced(
      "batch=2 seqlen_q=1024 seqlen_k=1024 num_heads_q=8 num_heads_k=4 head_dim=128 head_dim_v=128 causal=1 "
      "deterministic=1 sinks=1 dsinks=1");
  for (const DType dtype : {DType::bfloat16, DType::float16}) {
    c.dtype = c.o_dtype = c.grad_dtype = dtype;
    expect_same_bits(c, 50);
  }
}

// Every kind of kernel, where a block of threads has several blocks of keys, of every number of steps; also
// of none: keys that nobody sees.
TEST_P(GpuBits, EveryHeadDimGivesTheSameBits) {
  const std::string sizes = "batch=5 seqlen_q=1080 seqlen_k=1080 num_heads_q=8 num_heads_k=8 causal=1 ";
  const std::string unseen =
      "batch=4 seqlen_q=700 seqlen_k=1500 num_heads_q=8 num_heads_k=8 causal=1 alignment=top_left packed=1 "
      "seqused_q=1 seqused_k=1 ";
  const std::vector<std::string> cases = {sizes + "head_dim=64 head_dim_v=64",
                                          sizes + "head_dim=64 head_dim_v=64 softcap=15",
                                          sizes + "head_dim=96 head_dim_v=96",
                                          sizes + "head_dim=128 head_dim_v=128",
                                          sizes + "head_dim=128 head_dim_v=128 alibi=1",
                                          sizes + "head_dim=192 head_dim_v=128",
                                          sizes + "head_dim=256 head_dim_v=256",
                                          unseen + "head_dim=64 head_dim_v=64",
                                          sizes + "head_dim=128 head_dim_v=128 window_left=100",
                                          sizes + "head_dim=128 head_dim_v=128 softcap=30",
                                          sizes + "head_dim=64 head_dim_v=64 softcap=50 window_left=300"};
  for (const std::string& text : cases) {
    SCOPED_TRACE(text);
    expect_same_bits(forced(text + " deterministic=1 dtype=bfloat16 o_dtype=bfloat16 grad_dtype=bfloat16"),
                     12);
  }
}

}  // namespace
}  // namespace tessera::verify
