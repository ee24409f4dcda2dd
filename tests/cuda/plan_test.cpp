// The plan of the GPU kernels: pure functions, no GPU. What is compiled is checked by tessera-pack.
#include "cuda/plan/plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/attention_params.h"
#include "cuda/plan/pack.h"
#include "cuda/plan_problem.h"

namespace tessera::cuda {
namespace {

constexpr DeviceLimits ampere{80, 163 << 10}, ada{89, 99 << 10}, hopper{90, 227 << 10};
constexpr Terms every_term = Terms::softcap | Terms::alibi | Terms::bias | Terms::dropout | Terms::any_scale;

// Every head dim, equal or not, gets tiles that fit the device, and that its warps can share out.
TEST(Plan, EveryHeadDimFitsEveryDevice) {
  for (const DeviceLimits& limits : {ampere, ada, hopper}) {
    for (int head_dim = 1; head_dim <= 256; ++head_dim) {
      for (const int head_dim_v : {1, 33, 64, 65, 96, 97, 128, 129, 192, 193, 256}) {
        for (const Terms terms : {Terms::plain, Terms::alibi, Terms::bias, Terms::bias | Terms::wide_bias,
                                  every_term, every_term | Terms::wide_bias}) {
          SCOPED_TRACE(std::to_string(limits.arch) + ": " + std::to_string(head_dim) + " x " +
                       std::to_string(head_dim_v));
          const ForwardConfig f = forward_config(limits, Half::float16, head_dim, head_dim_v, terms, true);
          ASSERT_GE(f.head_dim, head_dim);
          ASSERT_GE(f.head_dim_v, head_dim_v);
          ASSERT_LE(shared_of(f), limits.shared_per_block);
          ASSERT_EQ(f.block_m % (16 * f.warps), 0);
          ASSERT_EQ(f.block_n % 32, 0);  // dropout's blocks of 8 keys, four lanes

          const BackwardConfig b = backward_config(limits, Half::float16, head_dim, head_dim_v, terms, true);
          ASSERT_GE(b.head_dim, head_dim);
          ASSERT_GE(b.head_dim_v, head_dim_v);
          ASSERT_LE(shared_of(b), limits.shared_per_block);
          ASSERT_EQ(b.block_m / b.split % 16, 0);
          ASSERT_EQ(b.block_m / b.dq_warps_m % 16, 0);
          ASSERT_EQ(b.head_dim / (b.warps() / b.dq_warps_m) % 16, 0);
          ASSERT_EQ(b.head_dim / b.dkv_split() % 16, 0);
          ASSERT_EQ(b.head_dim_v / b.dkv_split() % 16, 0);
          ASSERT_EQ(b.block_n / (b.warps() / b.dkv_split()) % 16, 0);

          ASSERT_LE(shared_of(dbias_config(limits, Half::float16, head_dim, head_dim_v, terms, true)),
                    limits.shared_per_block);

          for (const std::int64_t rows : {1, 16, 17, 1000}) {
            const DecodeConfig d = decode_config(limits, Half::float16, head_dim, head_dim_v, rows, true);
            ASSERT_GE(d.head_dim, head_dim);
            ASSERT_GE(d.head_dim_v, head_dim_v);
            ASSERT_LE(shared_of(d), limits.shared_per_block);
            ASSERT_TRUE(d.block_m == 16 || (d.block_m == 8 && rows <= 8) || (d.block_m == 32 && rows > 16));
            ASSERT_TRUE(d.keys == 16 || d.keys == 32);
            ASSERT_GE(d.stages, 2);
            for (const Stored stored : {Stored::float8, Stored::int8}) {
              const DecodeConfig bytes =
                  decode_config(limits, Half::float16, head_dim, head_dim_v, rows, true, stored);
              ASSERT_LE(shared_of(bytes), limits.shared_per_block);
              ASSERT_EQ(bytes.head_dim % 64, 0);
              ASSERT_EQ(bytes.head_dim_v % 64, 0);
            }
          }
        }
      }
    }
  }
}

// What the warpgroups take is what the block of threads was launched with: more never comes.
template <class Config>
void expect_registers(const Config& c) {
  const int launched = 65536 / c.threads() / 8 * 8 * c.threads();
  EXPECT_LE((c.producer_registers() + c.consumers() * c.consumer_registers()) * 128, launched);
}

// Hopper's own forward kernel: 64 rows a warpgroup, its products as wide as wgmma's.
TEST(Plan, EveryHeadDimFitsHoppersForward) {
  for (int head_dim = 8; head_dim <= 256; head_dim += 8) {
    for (int head_dim_v = 8; head_dim_v <= 256; head_dim_v += 8) {
      for (const Terms terms : {Terms::plain, Terms::softcap, Terms::alibi, Terms::dropout, Terms::bias,
                                Terms::bias | Terms::wide_bias, every_term, every_term | Terms::wide_bias}) {
        SCOPED_TRACE(std::to_string(head_dim) + " x " + std::to_string(head_dim_v));
        const Sm90ForwardConfig f = sm90_forward_config(Half::float16, head_dim, head_dim_v, terms);
        ASSERT_GE(f.head_dim, head_dim);
        ASSERT_GE(f.head_dim_v, head_dim_v);
        ASSERT_LE(shared_of(f), hopper.shared_per_block);
        ASSERT_EQ(f.block_m % 64, 0);
        ASSERT_TRUE(f.consumers() >= 2 && f.consumers() <= 4);
        expect_registers(f);
        ASSERT_EQ(f.block_n % 16, 0);
        ASSERT_LE(f.block_n, 256);
        if (has(terms, Terms::dropout)) {
          ASSERT_EQ(f.block_n % 32, 0);
          ASSERT_LE(f.block_n, 128);
        }
      }
    }
  }
}

// Hopper's own backward kernel: 64 keys a warpgroup, and each of them has its part of dq.
TEST(Plan, EveryHeadDimFitsHoppersBackward) {
  for (int head_dim = 8; head_dim <= 256; head_dim += 8) {
    for (int head_dim_v = 8; head_dim_v <= 256; head_dim_v += 8) {
      for (const Terms terms :
           {Terms::plain, Terms::softcap, Terms::alibi, Terms::dropout, Terms::bias, every_term}) {
        SCOPED_TRACE(std::to_string(head_dim) + " x " + std::to_string(head_dim_v));
        const Sm90BackwardConfig b = sm90_backward_config(Half::float16, head_dim, head_dim_v, terms);
        ASSERT_GE(b.head_dim, head_dim);
        ASSERT_GE(b.head_dim_v, head_dim_v);
        ASSERT_LE(shared_of(b), hopper.shared_per_block);
        ASSERT_TRUE(b.consumers() == 2 || b.consumers() == 3);
        expect_registers(b);
        ASSERT_EQ(b.block_m % 64, 0);
        ASSERT_EQ(b.block_m * b.dq_parts(), b.consumers() * 64);
        if (b.wide()) {
          ASSERT_TRUE(b.block_m == 64 && b.block_n == 64 && b.ds_in_registers);
          ASSERT_GT(b.dv_parts, 1);
        }
        ASSERT_GE(b.dq_cols() * b.dq_parts(), b.head_dim);
        ASSERT_LE(b.dq_cols(), b.head_dim);
        ASSERT_LE(b.dq_parts(), 2);  // those before the last do not overlap
        ASSERT_GE(b.q_stages, 2);    // of two steps at a time
        ASSERT_TRUE(b.dv_parts == 0 || b.block_m / 16 % b.dv_parts == 0);
      }
    }
  }
}

template <class Config>
void expect_different_names(const std::vector<Config>& configs) {
  std::set<std::string> names;
  for (const Config& config : configs) names.insert(kernel_name(config));
  EXPECT_EQ(names.size(), configs.size());
}

// The name is the key of the caches: whatever changes the program changes it.
TEST(Plan, NamesTellConfigsApart) {
  const ForwardConfig f = forward_config(hopper, Half::bfloat16, 128, 128, Terms::plain, true);
  std::vector<ForwardConfig> forwards(11, f);
  forwards[1].type = Half::float16;
  forwards[2].head_dim = 64;
  forwards[3].head_dim_v = 64;
  forwards[4].block_m = 64;
  forwards[5].block_n = 32;
  forwards[6].warps = 8;
  forwards[7].q_in_registers = !f.q_in_registers;
  forwards[8].aligned = false;
  forwards[9].terms = every_term;
  forwards[10].terms = every_term | Terms::wide_bias;
  expect_different_names(forwards);

  const Sm90ForwardConfig s = sm90_forward_config(Half::bfloat16, 128, 128, Terms::plain);
  std::vector<Sm90ForwardConfig> hoppers(11, s);
  hoppers[1].type = Half::float16;
  hoppers[2].head_dim = 64;
  hoppers[3].head_dim_v = 64;
  hoppers[4].block_m = s.block_m * 2;
  hoppers[5].block_n = 32;
  hoppers[6].stages = 3;
  hoppers[7].q_stages = 1;
  hoppers[8].turns = !s.turns;
  hoppers[9].terms = every_term;
  hoppers[10].grouped = true;
  expect_different_names(hoppers);

  const Sm90BackwardConfig r = sm90_backward_config(Half::bfloat16, 128, 128, Terms::plain);
  std::vector<Sm90BackwardConfig> rear(11, r);
  rear[1].type = Half::float16;
  rear[2].head_dim = 64;
  rear[3].head_dim_v = 64;
  rear[4].block_m = 192;
  rear[5].block_n = 192;
  rear[6].q_stages = 2;
  rear[7].dout_stages = 1;
  rear[8].dv_parts = 4;
  rear[9].ds_in_registers = !r.ds_in_registers;
  rear[10].terms = every_term;
  expect_different_names(rear);

  const BackwardConfig b = backward_config(hopper, Half::bfloat16, 128, 128, Terms::plain, true);
  std::vector<BackwardConfig> backwards(11, b);
  backwards[1].type = Half::float16;
  backwards[2].head_dim = 64;
  backwards[3].head_dim_v = 64;
  backwards[4].block_m = 32;
  backwards[5].block_n = 32;
  backwards[6].split = 2;
  backwards[7].stages = 1;
  backwards[8].dq_warps_m = 4;
  backwards[9].kv_in_registers = !b.kv_in_registers;
  backwards[10].terms = Terms::dropout;
  expect_different_names(backwards);

  const DecodeConfig d = decode_config(hopper, Half::bfloat16, 128, 128, 4, true);
  std::vector<DecodeConfig> decodes(12, d);
  decodes[1].type = Half::float16;
  decodes[2].head_dim = 64;
  decodes[3].head_dim_v = 64;
  decodes[4].block_m = 32;
  decodes[5].warps = 2;
  decodes[6].keys = 32;
  decodes[7].stages = 4;
  decodes[8].cluster = 8;
  decodes[9].aligned = false;
  decodes[10].stored = Stored::float8;
  decodes[11].stored = Stored::int8;
  expect_different_names(decodes);
}

TEST(Plan, NamesAreIdentifiersAndInTheirPrograms) {
  for (const char* arch : {"sm_80", "sm_86", "sm_89", "sm_90a"}) {
    std::set<std::string> names;
    for (const PackEntry& entry : pack_list(arch)) {
      EXPECT_EQ(entry.name.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789_"), std::string::npos)
          << entry.name;
      const auto is = [&](const char* start) { return entry.name.starts_with(start); };
      const bool decodes = is("tessera_decode") || is("tessera_append") || is("tessera_combine");
      const char* params = is("tessera_sm90_forward")    ? "Sm90ForwardParams"
                           : is("tessera_sm90_backward") ? "Sm90BackwardParams"
                           : decodes                     ? "DecodeParams"
                           : is("tessera_merge")         ? "MergeParams"
                                                         : "AttentionParams";
      EXPECT_NE(entry.text.find(entry.name + "(const __grid_constant__ " + params + " params)"),
                std::string::npos)
          << entry.text;
      EXPECT_TRUE(names.insert(entry.name).second) << entry.name;
    }
    EXPECT_GE(names.size(), 30u) << arch;
  }
}

// What is packed is among it, but for the kernels that are compiled for a type only.
TEST(Plan, EveryListHasWhatIsPackedAndMore) {
  for (const char* arch : {"sm_80", "sm_86", "sm_89", "sm_90a"}) {
    std::set<std::string> names;
    for (const PackEntry& entry : every_list(arch))
      EXPECT_TRUE(names.insert(entry.name).second) << entry.name;
    std::size_t packed = 0;
    for (const PackEntry& entry : pack_list(arch)) packed += names.count(entry.name);
    EXPECT_EQ(packed, pack_list(arch).size() - 11) << arch;
    EXPECT_GT(names.size(), 20 * packed) << arch;
  }
}

// A warp a row of a head.
TEST(Plan, MergeHasAWarpForEveryRow) {
  Problem p = problem_of(3, 5, 7, 64);
  p.direction = Direction::merge;
  const SmallConfig config{Small::merge, Half::bfloat16};
  EXPECT_EQ(blocks_of(config, p), (3 * 5 * 7 * 32 + threads_of(config) - 1) / threads_of(config));
  p.packed = true;
  EXPECT_EQ(blocks_of(config, p), (5 * 7 * 32 + threads_of(config) - 1) / threads_of(config));
  p.rows_q = 0;
  EXPECT_EQ(blocks_of(config, p), 0);
}

TEST(Plan, GridsCoverEveryRow) {
  const Problem p = problem_of(3, 1000, 5, 64);
  const ForwardConfig f = forward_config(hopper, p);
  EXPECT_EQ(blocks_of(f, p), 3 * ((1000 + f.block_m - 1) / f.block_m) * 5);
  const BackwardConfig b = backward_config(hopper, p);
  EXPECT_EQ(blocks_of(b, p), 3 * ((1000 + b.block_n - 1) / b.block_n) * 5);
  EXPECT_EQ(blocks_of(f, problem_of(0, 1000, 5, 64)), 0);
  EXPECT_EQ(blocks_of(f, problem_of(3, 0, 5, 64)), 0);
  EXPECT_EQ(blocks_of(b, problem_of(3, 0, 5, 64)), 0);
}

TEST(Plan, HoppersForwardFillsTheDeviceAndNoMore) {
  constexpr DeviceLimits limits{90, 227 << 10, 132};
  const Problem p = problem_of(3, 1000, 5, 64), small = problem_of(1, 1000, 1, 64);
  const Sm90ForwardConfig f = sm90_forward_config(limits, p);
  const int rows = tiles_of(1000, f.block_m);
  EXPECT_EQ(forward_tiles(f, p), 3 * rows * 5);
  EXPECT_EQ(blocks_of(f, p, limits), std::min(132, 3 * rows * 5));
  EXPECT_EQ(blocks_of(f, small, limits), rows);
  EXPECT_EQ(blocks_of(f, problem_of(3, 0, 5, 64), limits), 0);
  const TileOrder order = tile_order(f, p, limits);
  EXPECT_EQ(order.rows, static_cast<unsigned>(rows));
  EXPECT_EQ(order.heads, 15U);
  EXPECT_FALSE(order.paired);  // every tile sees every key
  Problem causal = p;
  causal.max_seqlen_q = causal.max_seqlen_k = 1000;
  causal.window_right = 0;
  EXPECT_FALSE(tile_order(f, causal, limits).paired);  // few tiles
  causal.batch = 30;
  const TileOrder pairs = tile_order(sm90_forward_config(limits, causal), causal, limits);
  EXPECT_TRUE(pairs.paired);
  EXPECT_EQ(pairs.units, ((pairs.rows - pairs.apart + 1) / 2 + pairs.apart) * 150);
}

// Blocks of threads take every tile once, and under a causal mask about as much work each.
TEST(Plan, HoppersForwardDealsOutEveryTile) {
  struct Window {
    std::int64_t left, right;
  };
  constexpr std::int64_t all = Mask::unbounded;
  constexpr Window windows[] = {{all, all}, {all, 0}, {300, 0}, {300, all}, {1000, 200}};
  for (const int multiprocessors : {1, 3, 7, 132}) {
    const DeviceLimits limits{90, 227 << 10, multiprocessors};
    for (const std::int64_t seqlen : {1, 128, 129, 640, 1000, 4096}) {
      for (const auto& [batch, heads] : {std::pair(1, 5), {3, 5}, {30, 5}, {1, 8}, {1, 11}, {2, 8}, {8, 1}}) {
        for (const Window window : windows) {
          for (const bool packed : {false, true}) {
            SCOPED_TRACE(std::to_string(multiprocessors) + " multiprocessors, " + std::to_string(batch) +
                         " x " + std::to_string(seqlen) + " x " + std::to_string(heads) + ", window " +
                         std::to_string(window.left) + ", " + std::to_string(window.right) +
                         (packed ? ", packed" : ""));
            Problem p = problem_of(batch, seqlen, heads, 128);
            p.max_seqlen_q = p.max_seqlen_k = seqlen;
            p.packed = packed;
            p.window_left = window.left;
            p.window_right = window.right;
            const Sm90ForwardConfig config = sm90_forward_config(limits, p);
            const TileOrder order = tile_order(config, p, limits);
            const auto blocks = static_cast<unsigned>(blocks_of(config, p, limits));
            ASSERT_GT(blocks, 0U);
            std::vector<int> taken(std::size_t(order.rows) * order.heads);
            std::vector<long long> work(blocks);
            for (unsigned block = 0; block < blocks; ++block) {
              for (TileOrder::Turn turn{0, block}; turn.unit() < order.units; order.next(turn, blocks)) {
                const TileOrder::Tile tile = order.tile(turn);
                ASSERT_LT(tile.row, order.rows);
                ASSERT_LT(tile.head, order.heads);
                if (!tile.there) continue;
                ++taken[tile.row * order.heads + tile.head];
                work[block] += tile.row + 1;
              }
            }
            EXPECT_EQ(std::set<int>(taken.begin(), taken.end()), std::set<int>{1});
            if (order.paired) {
              const auto [least, most] = std::minmax_element(work.begin(), work.end());
              EXPECT_LE(*most - *least, 2 * (order.rows + order.apart + 1));
            }
          }
        }
      }
    }
  }
}

// Of a few queries a tile has several heads, where that makes fewer turns.
TEST(Plan, HoppersForwardHasSeveralHeadsInATile) {
  constexpr DeviceLimits limits{90, 227 << 10, 132};
  const auto problem = [](int batch, std::int64_t seqlen, int heads, int group) {
    Problem p = problem_of(batch, seqlen, heads, 128);
    p.max_seqlen_q = p.max_seqlen_k = seqlen;
    p.num_heads_k = heads / group;
    p.group_size = group;
    return p;
  };
  for (const std::int64_t seqlen : {1, 16, 17, 64}) {
    const Problem p = problem(20, seqlen, 28, 7);
    const Sm90ForwardConfig config = sm90_forward_config(limits, p);
    EXPECT_TRUE(config.grouped) << seqlen;
    const TileOrder order = tile_order(config, p, limits);
    EXPECT_GE(order.head_rows, seqlen);
    EXPECT_LE(order.head_rows, 64);
    EXPECT_EQ(config.block_m % order.head_rows, 0);
    EXPECT_EQ(order.heads, 20U * 4);
    EXPECT_EQ(order.rows, static_cast<unsigned>((7 * order.head_rows + config.block_m - 1) / config.block_m));
    EXPECT_FALSE(order.paired);
    const std::int64_t blocks = blocks_of(config, p, limits);
    EXPECT_EQ(blocks, std::min<std::int64_t>(forward_tiles(config, p), 132));
    std::vector<int> taken(std::size_t(order.rows) * order.heads);
    for (unsigned block = 0; block < blocks; ++block) {
      for (TileOrder::Turn turn{0, block}; turn.unit() < order.units;
           order.next(turn, static_cast<unsigned>(blocks))) {
        const TileOrder::Tile tile = order.tile(turn);
        EXPECT_TRUE(tile.there);
        ++taken.at(tile.row * order.heads + tile.head);
      }
    }
    EXPECT_EQ(std::set<int>(taken.begin(), taken.end()), std::set<int>{1});
  }
  EXPECT_FALSE(sm90_forward_config(limits, problem(20, 65, 28, 7)).grouped);  // a tile of its own each
  EXPECT_FALSE(sm90_forward_config(limits, problem(1, 16, 28, 7)).grouped);   // few tiles
  EXPECT_FALSE(sm90_forward_config(limits, problem(20, 16, 28, 1)).grouped);  // no group
  Problem other = problem(20, 16, 28, 7);
  other.softcap = 30;
  EXPECT_FALSE(sm90_forward_config(limits, other).grouped);
  other = problem(20, 16, 28, 7);
  other.packed = true;
  EXPECT_FALSE(sm90_forward_config(limits, other).grouped);
}

// Tiles, or pairs of them, that do not fill their last turn leave multiprocessors without work: the rows that
// stay apart keep that small.
TEST(Plan, HoppersForwardFillsItsLastTurn) {
  constexpr DeviceLimits limits{90, 227 << 10, 132};
  for (const std::int64_t window : {std::int64_t{1024}, std::int64_t{Mask::unbounded}}) {
    for (const std::int64_t seqlen : {2048, 4096, 8192, 16384, 32768}) {
      SCOPED_TRACE(std::to_string(seqlen) + " keys, window " + std::to_string(window));
      Problem p = problem_of(static_cast<int>(std::max<std::int64_t>(16384 / seqlen, 1)), seqlen, 16, 128);
      p.max_seqlen_q = p.max_seqlen_k = seqlen;
      p.window_right = 0;
      p.window_left = window;
      const Sm90ForwardConfig config = sm90_forward_config(limits, p);
      const TileOrder order = tile_order(config, p, limits);
      ASSERT_EQ(order.paired, window > seqlen / 2 - config.block_m);
      ASSERT_NE(order.paired, order.to_and_fro);
      std::int64_t most = 0, all = 0;
      for (unsigned block = 0; block < 132; ++block) {
        std::int64_t keys = 0;
        for (TileOrder::Turn turn{0, block}; turn.unit() < order.units; order.next(turn, 132)) {
          const TileOrder::Tile tile = order.tile(turn);
          if (tile.there) keys += std::min((tile.row + 1) * std::int64_t{config.block_m}, window);
        }
        most = std::max(most, keys);
        all += keys;
      }
      EXPECT_GT(double(all) / 132 / double(most), order.paired ? 0.92 : 0.965);
    }
  }
}

// Under a window tiles of some heads, a part of all, are dealt out side by side; else a head's follow one
// another.
TEST(Plan, HoppersForwardDealsOutHeadsSideBySide) {
  constexpr DeviceLimits limits{90, 227 << 10, 132};
  const auto heads_of_a_turn = [&](int heads, std::int64_t window) {
    Problem p = problem_of(1, 16384, heads, 128);
    p.max_seqlen_q = p.max_seqlen_k = 16384;
    p.window_left = window;
    p.window_right = 0;
    const TileOrder order = tile_order(sm90_forward_config(limits, p), p, limits);
    std::vector<unsigned> found;
    for (unsigned unit = 0; unit < 16; ++unit) found.push_back(order.tile({0, unit}).head);
    return found;
  };
  using Heads = std::vector<unsigned>;
  EXPECT_EQ(heads_of_a_turn(16, 1024), (Heads{0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7}));
  EXPECT_EQ(heads_of_a_turn(9, 1024), (Heads{0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2, 0}));
  EXPECT_EQ(heads_of_a_turn(17, 1024), Heads(16, 0));
  EXPECT_EQ(heads_of_a_turn(16, Mask::unbounded), Heads(16, 0));
}

// Where rows become shorter towards the end, or longer all the way, they are not alike.
TEST(Plan, HoppersForwardPairsWhatIsNotAlike) {
  constexpr DeviceLimits limits{90, 227 << 10, 132};
  Problem p = problem_of(1, 16384, 16, 128);
  p.max_seqlen_q = p.max_seqlen_k = 16384;
  p.window_left = 300;
  EXPECT_TRUE(tile_order(sm90_forward_config(limits, p), p, limits).paired);
  p.window_right = 0;
  EXPECT_FALSE(tile_order(sm90_forward_config(limits, p), p, limits).paired);
  p.window_left = Mask::unbounded;
  p.max_seqlen_k = 4096;  // the first queries see no key
  EXPECT_TRUE(tile_order(sm90_forward_config(limits, p), p, limits).paired);
}

TEST(Divisor, DividesExactly) {
  for (const unsigned d : {1U, 2U, 3U, 5U, 7U, 12U, 127U, 128U, 129U, 1000U, 65535U, 65537U, 0x7FFFFFFFU}) {
    const Divisor divisor(d);
    for (const unsigned base : {0U, d, 2 * d, 1000U, 1U << 16, 1U << 30, 0x7FFFFFFFU}) {
      for (unsigned n = base < 2 ? 0 : base - 2; n < base + 3 && n <= 0x7FFFFFFFU; ++n) {
        EXPECT_EQ(divisor.quotient(n), n / d) << n << " / " << d;
        EXPECT_EQ(divisor.remainder(n), n % d) << n << " % " << d;
      }
    }
  }
}

// Every tile of every packed sequence has a number of its own below the count, and find_tile gives it back.
TEST(Tiles, PackedNumbersAreTheirSequencesOwn) {
  const std::vector<std::vector<int>> layouts = {
      {0}, {0, 0, 0}, {0, 128, 128, 129, 700, 701}, {0, 1, 2, 3, 4, 5}, {0, 1000}};
  for (const std::vector<int>& cu : layouts) {
    const int batch = static_cast<int>(cu.size()) - 1;
    for (const int tail : {0, 1, 300}) {
      const int rows = cu.back() + tail;
      for (const int tile : {16, 64, 128}) {
        const long long count = count_tiles(batch, rows, true, tile);
        std::set<long long> taken;
        for (int b = 0; b <= batch; ++b) {  // the rows behind the last sequence are one more
          const int length = (b == batch ? rows : cu[b + 1]) - cu[b];
          for (int i = 0; i < tiles_of(length, tile); ++i) {
            const int number = first_tile(cu.data(), b, rows, tile) + i;
            EXPECT_LT(number, count);
            EXPECT_TRUE(taken.insert(number).second);
            const TileIndex found = find_tile(cu.data(), batch, rows, tile, static_cast<unsigned>(number));
            EXPECT_EQ(found.b, b);
            EXPECT_EQ(found.tile, i);
          }
        }
      }
    }
  }
}

TEST(Tiles, DenseNumbersCountThrough) {
  for (unsigned number = 0; number < 12; ++number) {
    const TileIndex found = find_tile(nullptr, 4, 130, 64, number);
    EXPECT_EQ(found.b, static_cast<int>(number / 3));
    EXPECT_EQ(found.tile, static_cast<int>(number % 3));
  }
}

// Lengths that lie outside their tensors, which the host of a GPU cannot see, are cut to them.
TEST(Tiles, LengthsStayWithinTheTensors) {
  const int cu[] = {-5, 40, 30, 1000}, used[] = {900, -7, 3};
  AttentionParams params{};
  params.batch = 3;
  params.rows_q = params.rows_k = 100;
  params.cu_seqlens_q = params.cu_seqlens_k = cu;
  params.seqused_k = used;
  for (int b = 0; b <= 3; ++b) {
    const SequenceArg s = params.sequence(b);
    EXPECT_GE(s.q_begin, 0);
    EXPECT_GE(s.allocated_q, 0);
    EXPECT_LE(s.q_begin + s.allocated_q, 100);
    EXPECT_GE(s.seqlen_k, 0);
    EXPECT_LE(s.seqlen_k, s.allocated_k);
  }
}

}  // namespace
}  // namespace tessera::cuda
