#include "cuda/plan/pack.h"

#include "cuda/plan/plan.h"

namespace tessera::cuda {
namespace {

DeviceLimits limits_of(std::string_view arch) {
  const int number = std::stoi(std::string(arch.substr(3)));
  const bool small = number == 86 || number == 89 || number >= 120;
  return {number, number == 80 || number == 87 ? 163 << 10 : small ? 99 << 10 : 227 << 10};
}

template <class Config>
PackEntry entry(const Config& config) {
  return {kernel_name(config), program_text(config), shared_of(config)};
}

}  // namespace

std::vector<PackEntry> pack_list(std::string_view arch) {
  const DeviceLimits limits = limits_of(arch);
  std::vector<PackEntry> list;
  for (const Half type : {Half::bfloat16, Half::float16}) {
    for (const Small kernel : {Small::delta, Small::dsinks, Small::convert_dq})
      list.push_back(entry(SmallConfig{kernel, type}));
    for (const Terms terms : {Terms::plain, Terms::softcap, Terms::alibi, Terms::bias, Terms::dropout}) {
      for (const int head_dim : {64, 96, 128, 192, 256}) {
        if (terms != Terms::plain && head_dim != 64 && head_dim != 128)
          continue;  // rare: compiled when needed
        list.push_back(entry(forward_config(limits, type, head_dim, head_dim, terms, true)));
        list.push_back(entry(backward_config(limits, type, head_dim, head_dim, terms, true)));
      }
    }
    list.push_back(entry(forward_config(limits, type, 192, 128, Terms::plain, true)));
    list.push_back(entry(backward_config(limits, type, 192, 128, Terms::plain, true)));
    for (const int head_dim : {64, 128}) {
      list.push_back(
          entry(forward_config(limits, type, head_dim, head_dim, Terms::bias | Terms::wide_bias, true)));
      list.push_back(entry(dbias_config(limits, type, head_dim, head_dim, Terms::bias, true)));
    }
  }
  return list;
}

}  // namespace tessera::cuda
