// A call on host tensors, run by a GPU kernel: each tensor gets a copy in device memory (two that are one on
// the host share theirs), between guard bands and at the same place within 256 bytes; what the kernel changed
// comes back to the host tensors, also where it should have changed nothing. So every test and every case of
// the CPU is one of the GPU, too.
//
// Without GPU memory to copy to, the calls fail with the driver's reason.
#pragma once

#include <string_view>

#include "tessera/tessera.hpp"

namespace tessera::verify {

// Whether the kernel of that name (as in kernels()) takes tensors in GPU memory.
[[nodiscard]] bool on_gpu(std::string_view kernel);

// For calls that only plan (workspace_size, explain, prepare): the call as its forced kernel wants it. A GPU
// kernel gets tensors that claim to lie on device 0, at addresses that nobody may read.
[[nodiscard]] Forward as_planned(Forward call);
[[nodiscard]] Backward as_planned(Backward call);
[[nodiscard]] Decode as_planned(Decode call);

// Runs the call on device 0, on the default stream and on the thread's own by turns, with a workspace of
// exactly the size it asks for, poisoned and between guards. Waits for it.
[[nodiscard]] Status run_mirrored(const Forward& call, Status (*function)(const Forward&));
[[nodiscard]] Status run_mirrored(const Backward& call, Status (*function)(const Backward&));
[[nodiscard]] Status run_mirrored(const Decode& call, Status (*function)(const Decode&));
[[nodiscard]] Status run_mirrored(const MergeStates& call, Status (*function)(const MergeStates&));

}  // namespace tessera::verify
