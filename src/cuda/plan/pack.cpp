#include "cuda/plan/pack.h"

#include <set>

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

Sm90ForwardConfig grouped(Sm90ForwardConfig config) {
  config.grouped = true;
  return config;
}

void add_sm90_forward(std::vector<PackEntry>& list, Half type) {
  const auto add = [&](int head_dim, int head_dim_v, Terms terms) {
    const Sm90ForwardConfig config = sm90_forward_config(type, head_dim, head_dim_v, terms);
    list.push_back(entry(config));
    if (terms == Terms::plain) list.push_back(entry(grouped(config)));
  };
  for (const int head_dim : {64, 96, 128, 192, 256}) add(head_dim, head_dim, Terms::plain);
  add(192, 128, Terms::plain);
  for (const Terms terms :
       {Terms::softcap, Terms::alibi, Terms::dropout, Terms::bias, Terms::bias | Terms::wide_bias}) {
    for (const int head_dim : {64, 128}) add(head_dim, head_dim, terms);
  }
}

void add_sm90_backward(std::vector<PackEntry>& list, Half type) {
  for (const bool ordered : {false, true}) {
    for (const int head_dim : {64, 96, 128, 192, 256})
      list.push_back(entry(sm90_backward_config(type, head_dim, head_dim, Terms::plain, ordered)));
    list.push_back(entry(sm90_backward_config(type, 192, 128, Terms::plain, ordered)));
  }
  for (const Terms terms : {Terms::softcap, Terms::alibi, Terms::dropout, Terms::bias}) {
    list.push_back(entry(sm90_backward_config(type, 64, 64, terms)));
    // With dropout a few registers spill.
    if (terms != Terms::dropout) list.push_back(entry(sm90_backward_config(type, 128, 128, terms)));
  }
}

// Of one token, and of a few. Of 8-bit caches the commonest: float8_e4m3fn, one token, a head dim of 128.
void add_decode(std::vector<PackEntry>& list, const DeviceLimits& limits, Half type) {
  constexpr int few = 8, some = 16, more = 32;
  const auto add = [&](int head_dim, int rows, Stored stored) {
    DecodeConfig config = decode_config(limits, type, head_dim, head_dim, rows, true, stored);
    if (config.block_m != rows) return;
    list.push_back(entry(config));
    if (const DecodeConfig deep = alone(limits, config); rows == few && deep.stages != config.stages)
      list.push_back(entry(deep));
    if (const DecodeConfig one = merged(limits, config); one.warps != config.warps)
      list.push_back(entry(one));
    for (const int cluster : {4, 8}) {
      if (limits.arch != 90 || config.levels == 0) continue;
      config.cluster = cluster;
      list.push_back(entry(config));
    }
  };
  for (const int head_dim : {64, 128, 256}) {
    for (const int rows : {few, some, more}) add(head_dim, rows, Stored::half);
  }
  add(128, few, Stored::float8);
}

// Every kernel of a type and tiles of these widths.
template <class Add>
void visit_every(const DeviceLimits& limits, Half type, int head_dim, int head_dim_v, const Add& add) {
  constexpr int all_terms = 64;
  for (int bits = 0; bits < all_terms; ++bits) {
    const auto terms = static_cast<Terms>(bits);
    const bool wide = has(terms, Terms::wide_bias);
    if (wide && !has(terms, Terms::bias)) continue;
    if (limits.arch == 90) {
      const Sm90ForwardConfig config = sm90_forward_config(type, head_dim, head_dim_v, terms);
      add(config);
      if (terms == Terms::plain) add(grouped(config));
      for (const bool ordered : {false, true}) {
        if (!wide) add(sm90_backward_config(type, head_dim, head_dim_v, terms, ordered));
      }
    }
    for (const bool aligned : {true, false}) {
      add(forward_config(limits, type, head_dim, head_dim_v, terms, aligned));
      if (!wide) add(backward_config(limits, type, head_dim, head_dim_v, terms, aligned));
      if (!wide && has(terms, Terms::bias))
        add(dbias_config(limits, type, head_dim, head_dim_v, terms, aligned));
    }
  }
  for (const Stored stored : {Stored::half, Stored::float8, Stored::int8}) {
    for (const int rows : {8, 16, 32}) {
      for (const bool aligned : {true, false}) {
        DecodeConfig config = decode_config(limits, type, head_dim, head_dim_v, rows, aligned, stored);
        add(config);
        add(alone(limits, config));
        add(merged(limits, config));
        for (const int cluster : {2, 4, 8}) {
          if (limits.arch != 90 || config.levels == 0) continue;
          config.cluster = cluster;
          add(config);
        }
      }
    }
  }
}

}  // namespace

std::vector<PackEntry> pack_list(std::string_view arch) {
  const DeviceLimits limits = limits_of(arch);
  std::vector<PackEntry> list = {entry(SmallConfig{Small::merge, Half::bfloat16})};
  for (const Half type : {Half::bfloat16, Half::float16}) {
    if (arch == "sm_90a") {
      add_sm90_forward(list, type);
      add_sm90_backward(list, type);
    }
    for (const Small kernel : {Small::delta, Small::dsinks, Small::convert_dq, Small::append, Small::combine})
      list.push_back(entry(SmallConfig{kernel, type}));
    add_decode(list, limits, type);
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

std::vector<PackEntry> every_list(std::string_view arch) {
  std::vector<PackEntry> list;
  std::set<std::string> names;
  for (const Half type : {Half::bfloat16, Half::float16}) {
    for (const int head_dim : {64, 96, 128, 192, 256}) {
      for (const int head_dim_v : {64, 96, 128, 192, 256}) {
        visit_every(limits_of(arch), type, head_dim, head_dim_v, [&](const auto& config) {
          if (names.insert(kernel_name(config)).second) list.push_back(entry(config));
        });
      }
    }
  }
  return list;
}

}  // namespace tessera::cuda
