// The tensors of a problem for the copy engine of Hopper.
#pragma once

#include <string>

#include "core/attention_params.h"
#include "core/problem.h"
#include "cuda/plan/plan.h"

namespace tessera::cuda {

// Why q, k or v cannot be described to it; empty: they can.
[[nodiscard]] std::string why_no_maps(const Problem& problem);

// Why dout, which only backward has, cannot.
[[nodiscard]] std::string why_no_dout_map(const Problem& problem);

// Fills the maps of params, and o_by_tma.
[[nodiscard]] Status fill_maps(const Sm90ForwardConfig& config, const Problem& problem,
                               Sm90ForwardParams& params);
[[nodiscard]] Status fill_maps(const Sm90BackwardConfig& config, const Problem& problem,
                               Sm90BackwardParams& params);

}  // namespace tessera::cuda
