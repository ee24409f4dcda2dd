// How decode's work is cut for a GPU: pure functions, no GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <limits>
#include <set>
#include <vector>

#include "cuda/plan/decode.h"

namespace tessera::cuda {
namespace {

constexpr DeviceLimits hopper{90, 227 << 10, 132}, ada{89, 99 << 10, 128};

Problem problem_of(std::int64_t batch, std::int64_t heads_q, std::int64_t heads_k, std::int64_t seqlen_q,
                   std::int64_t room) {
  Problem p;
  p.direction = Direction::decode;
  p.dtype = DType::bfloat16;
  p.batch = batch;
  p.num_heads_q = heads_q;
  p.num_heads_k = heads_k;
  p.group_size = heads_q / heads_k;
  p.head_dim = p.head_dim_v = 128;
  p.rows_q = p.max_seqlen_q = seqlen_q;
  p.rows_k = p.max_seqlen_k = room;
  p.cache.blocks = batch;
  return p;
}

// The parts are those of core/split.h, worked out in 32 bits.
TEST(DecodePlan, SplitsAreThoseOfCore) {
  for (const std::int64_t given : {0, 1, 2, 7, 16, 100, 65536}) {
    for (const std::int64_t heads : {1, 8, 64}) {
      Problem p = problem_of(2, heads, heads, 1, 1 << 20);
      p.cache.num_splits = given;
      const DecodeConfig config = decode_config(hopper, p, false);
      const DecodeCut cut = decode_cut(config, p);
      const DecodeParams params = decode_params(hopper, config, p, {});
      for (const int keys : {0, 1, 63, 64, 255, 256, 257, 1000, 4096, 65535, 1 << 20}) {
        const Splits expected =
            Splits::of(keys, std::min<std::int64_t>(given, 128) * config.warps, cut.rule_of(1));
        const DecodeSplits splits = params.splits(1, keys);
        ASSERT_EQ(splits.keys, expected.keys) << keys << " keys, " << given;
        ASSERT_EQ(splits.count, expected.count) << keys << " keys, " << given;
        const DecodeBlocks blocks = params.blocks_of(splits);
        ASSERT_LE(blocks.count, cut.most_splits);
        ASSERT_LE(blocks.parts, 1 << config.levels);
        ASSERT_GE(blocks.count * blocks.parts * config.warps, splits.count);
      }
      const DecodeSplits whole = params.splits(static_cast<int>(cut.split_queries) + 1, 5000);
      EXPECT_EQ(params.blocks_of(whole).count, 1);
      EXPECT_EQ(whole.count, config.warps);
    }
  }
}

// Every (query, head) is in exactly one row of one tile.
TEST(DecodePlan, TilesHaveEveryRowOnce) {
  for (const std::int64_t group : {1, 2, 5, 8, 15, 16, 17, 24, 40, 71}) {
    for (const std::int64_t seqlen_q : {1, 2, 3, 16, 33}) {
      const Problem p = problem_of(1, 2 * group, 2, seqlen_q, 1000);
      const DecodeConfig config = decode_config(hopper, p, false);
      const DecodeCut cut = decode_cut(config, p);
      ASSERT_LE(cut.partial_rows(), config.block_m);
      std::set<std::pair<std::int64_t, std::int64_t>> rows;
      for (std::int64_t tile = 0; tile < cut.tiles; ++tile) {
        for (std::int64_t head_tile = 0; head_tile < cut.head_tiles; ++head_tile) {
          for (std::int64_t r = 0; r < cut.partial_rows(); ++r) {
            const std::int64_t query = tile * cut.queries + r / cut.heads,
                               head = head_tile * cut.heads + r % cut.heads;
            if (query < seqlen_q && head < group) {
              ASSERT_TRUE(rows.insert({query, head}).second);
            }
          }
        }
      }
      EXPECT_EQ(static_cast<std::int64_t>(rows.size()), seqlen_q * group);
    }
  }
}

TEST(DecodePlan, ALongSequenceAloneFillsAGpu) {
  for (const std::int64_t heads_k : {1, 2, 4, 8, 16, 32}) {
    const Problem p = problem_of(1, 32, heads_k, 1, 65536);
    EXPECT_GE(blocks_of(decode_config(hopper, p, false), p), heads_k == 1 ? 64 : 128) << heads_k;
  }
}

// How a sequence is cut does not depend on the batch; how many of its parts a block takes does.
TEST(DecodePlan, ALargeBatchHasFewBlocksOfASequence) {
  const auto params_of = [](std::int64_t batch) {
    const Problem p = problem_of(batch, 32, 8, 1, 8192);
    return decode_params(hopper, decode_config(hopper, p, false), p, {});
  };
  const DecodeParams alone = params_of(1), many = params_of(64);
  for (const int keys : {1, 1000, 8192}) {
    EXPECT_EQ(alone.splits(1, keys).keys, many.splits(1, keys).keys);
    EXPECT_EQ(alone.splits(1, keys).count, many.splits(1, keys).count);
  }
  EXPECT_EQ(alone.blocks_of(alone.splits(1, 8192)).count, 16);
  EXPECT_EQ(many.blocks_of(many.splits(1, 8192)).count, 1);
  // Of a few sequences each has several blocks. Short for what there is room for: all of them have some.
  const DecodeParams few = params_of(8);
  EXPECT_EQ(few.blocks_of(few.splits(1, 8192)).count, 4);
  EXPECT_EQ(few.blocks_of(few.splits(1, 1024)).count, 4);
  EXPECT_EQ(few.blocks_of(few.splits(1, 64)).count, 1);
}

// Nor on how many queries others of a packed batch have, though the tiles do.
void expect_cut_as_alone(const DeviceLimits& limits, bool clusters) {
  for (const auto& [head_dim, head_dim_v] :
       {std::pair(64, 64), {96, 96}, {128, 128}, {192, 192}, {256, 256}, {192, 64}, {64, 192}}) {
    for (const DType stored : {DType::bfloat16, DType::float8_e4m3fn}) {
      for (const std::int64_t group : {1, 3, 4, 8, 16, 20}) {
        for (const int queries : {1, 2, 8, 17, 100, 300}) {
          Problem p = problem_of(1, 8 * group, 8, queries, clusters ? 2048 : 8192);
          p.head_dim = head_dim;
          p.head_dim_v = head_dim_v;
          p.k.dtype = p.v.dtype = stored;
          const DecodeConfig config = decode_config(limits, p, clusters);
          const DecodeParams alone = decode_params(limits, config, p, {});
          p.packed = true;
          p.batch = 5;
          for (const std::int64_t longest : {0, 10, 1000}) {
            p.rows_q = p.batch * (queries + longest);
            p.max_seqlen_q = queries + longest;
            const DecodeConfig beside = decode_config(limits, p, clusters);
            const DecodeParams among = decode_params(limits, beside, p, {});
            ASSERT_EQ(beside.keys, config.keys) << head_dim << " group " << group << " of " << queries;
            for (const int keys : {1, 33, 64, 100, 1000, 2048, 5000, 8192}) {
              if (keys > p.max_seqlen_k) break;
              const DecodeSplits splits = among.splits(queries, keys);
              ASSERT_EQ(splits.keys, alone.splits(queries, keys).keys)
                  << head_dim << " group " << group << " of " << queries << " beside " << longest;
              ASSERT_EQ(splits.count, alone.splits(queries, keys).count);
              ASSERT_LE(among.blocks_of(splits).parts, 1 << beside.levels);
            }
          }
        }
      }
    }
  }
}

TEST(DecodePlan, ASequenceOfAPackedBatchIsCutAsAlone) {
  expect_cut_as_alone(hopper, false);
  expect_cut_as_alone(hopper, true);
  expect_cut_as_alone(ada, false);
}

// Whatever the lengths, the workspace has room for the rows of every split.
TEST(DecodePlan, TheWorkspaceHasRoomForEverySplit) {
  for (const bool packed : {false, true}) {
    for (const std::int64_t given : {0, 5}) {
      for (const std::int64_t seqlen_q : {1, 3, 100}) {
        Problem p = problem_of(3, 8, 2, seqlen_q, 10000);
        p.packed = packed;
        p.cache.num_splits = given;
        const DecodeConfig config = decode_config(hopper, p, false);
        const DecodeCut cut = decode_cut(config, p);
        const DecodeWorkspace w = decode_workspace(config, p);
        const std::int64_t tiles = std::min(3 * cut.split_tiles, cut.all_tiles) * cut.head_tiles_k;
        const std::int64_t rows = cut.most_splits == 1 ? 0 : tiles * cut.most_splits * cut.partial_rows();
        EXPECT_GE(w.state, rows * 128 * 4);
        EXPECT_GE(w.end - w.state, rows * 8);
        EXPECT_EQ(w.state % 256, 0);
        const std::int64_t combined = combine_blocks(config, p) * 4;
        EXPECT_GE(combined, rows / std::max<std::int64_t>(cut.most_splits, 1));
      }
    }
  }
}

// Every tile of a sequence that may be split has a place of its own there, and combine finds it by its place.
TEST(DecodePlan, TilesHaveTheirPlacesInTheWorkspace) {
  std::set<bool> ways;
  for (const bool packed : {false, true}) {
    for (const std::vector<int>& lengths : {std::vector<int>{1},
                                            {1, 1, 1, 1},
                                            {0, 0},
                                            {3, 0, 256, 1, 1, 64, 65, 0},
                                            {2000, 1, 1},
                                            {8, 8, 8, 8, 8}}) {
      for (const std::int64_t given : {0, 3}) {
        for (const std::int64_t behind : {0, 5}) {  // rows of no sequence
          std::vector<std::int32_t> cu = {0};
          for (const int length : lengths) cu.push_back(cu.back() + length);
          const auto batch = static_cast<std::int64_t>(lengths.size());
          const int longest = *std::max_element(lengths.begin(), lengths.end());
          Problem p = problem_of(batch, 10, 2, longest, 10000);
          p.cache.num_splits = given;
          p.packed = packed;
          if (packed) p.rows_q = cu.back() + behind;
          AttentionParams attention{};
          attention.batch = static_cast<int>(batch);
          attention.rows_q = static_cast<int>(p.rows_q);
          attention.cu_seqlens_q = packed ? cu.data() : nullptr;
          const DecodeConfig config = decode_config(hopper, p, false);
          const DecodeCut cut = decode_cut(config, p);
          const DecodeParams params = decode_params(hopper, config, p, attention);
          if (cut.most_splits == 1) continue;
          ways.insert(cut.partial_as_all);
          EXPECT_LE(cut.partial_tiles, cut.all_tiles);
          std::set<long long> places;
          std::int64_t expected = 0;
          for (unsigned number = 0; number < cut.all_tiles * cut.head_tiles_k; ++number) {
            const DecodeTileIndex tile = params.tile(number);
            if (tile.b == batch) continue;
            const int rows = packed ? lengths[static_cast<std::size_t>(tile.b)] : longest;
            if (rows > cut.split_queries || tile.index < 0 || tile.index * cut.queries >= rows) continue;
            const long long place = params.partial_number(tile, number);
            ASSERT_GE(place, 0);
            ASSERT_LT(place, cut.partial_places());
            ASSERT_TRUE(places.insert(place).second);
            const DecodeTileIndex found = params.partial_tile(static_cast<unsigned>(place));
            ASSERT_EQ(found.b, tile.b);
            ASSERT_EQ(found.index, tile.index);
            ASSERT_EQ(found.head_tile, tile.head_tile);
          }
          for (const int length : lengths) {
            const int rows = packed ? length : longest;
            if (rows <= cut.split_queries)
              expected += (rows + cut.queries - 1) / cut.queries * cut.head_tiles_k;
          }
          EXPECT_EQ(static_cast<std::int64_t>(places.size()), expected);
          // A warp of combine that has no place finds no sequence either.
          for (unsigned more = 0; more < 4 && cut.partial_places() > 0; ++more) {
            const auto place = static_cast<unsigned>(cut.partial_places()) + more;
            EXPECT_EQ(params.partial_tile(place).b, batch);
          }
        }
      }
    }
  }
  EXPECT_EQ(ways.size(), 2);
}

// Whatever the device's lengths say: no place is behind the end, and none is two tiles'.
TEST(DecodePlan, PlacesStayInTheWorkspaceWhateverTheLengths) {
  constexpr int rows = 60;
  constexpr std::int32_t most = std::numeric_limits<std::int32_t>::max();
  for (const std::vector<std::int32_t>& cu :
       {std::vector<std::int32_t>{5, -7, most, 3, 0}, {3, 0, 40, 46, 46}, {-most, 7, 0, most, most}}) {
    for (const int longest : {8, 256}) {
      Problem p = problem_of(4, 8, 2, longest, 10000);
      p.packed = true;
      p.rows_q = rows;
      AttentionParams attention{};
      attention.batch = 4;
      attention.rows_q = rows;
      attention.cu_seqlens_q = cu.data();
      const DecodeConfig config = decode_config(hopper, p, false);
      const DecodeCut cut = decode_cut(config, p);
      const DecodeParams params = decode_params(hopper, config, p, attention);
      EXPECT_EQ(cut.partial_as_all, longest == 256);
      std::set<long long> places;
      for (unsigned number = 0; number < cut.all_tiles * cut.head_tiles_k; ++number) {
        const DecodeTileIndex tile = params.tile(number);
        ASSERT_GE(tile.b, 0);
        ASSERT_LE(tile.b, 4);
        if (tile.b == 4 || tile.index < 0) continue;
        // What decides whether it writes there is the sequence's length.
        const int queries = AttentionParams::clamp(cu[static_cast<std::size_t>(tile.b) + 1], 0, rows) -
                            AttentionParams::clamp(cu[static_cast<std::size_t>(tile.b)], 0, rows);
        if (queries > cut.split_queries || tile.index * cut.queries >= queries) continue;
        const long long place = params.partial_number(tile, number);
        ASSERT_GE(place, 0);
        ASSERT_LT(place, cut.partial_places());
        ASSERT_TRUE(places.insert(place).second);
      }
      EXPECT_TRUE(longest == 8 || !places.empty());
    }
  }
}

// A prompt's tiles do not multiply the room of all that stand beside it.
TEST(DecodePlan, SingleTokensBesideAPromptNeedLittleWorkspace) {
  Problem p = problem_of(128, 32, 8, 1, 2048);
  p.packed = true;
  p.rows_q = 128;
  const auto bytes = [&] { return decode_workspace(decode_config(hopper, p, false), p).end; };
  const std::int64_t alone = bytes();
  p.max_seqlen_q = 256;
  p.rows_q = 127 + 256;
  EXPECT_LT(bytes(), 400 << 20) << alone;
}

TEST(DecodePlan, ClustersForAFewShortSequences) {
  const Problem p = problem_of(1, 32, 8, 1, 2048);
  const DecodeConfig config = decode_config(hopper, p, true);
  EXPECT_EQ(config.cluster, 8);
  EXPECT_EQ(decode_workspace(config, p).end, 0);
  EXPECT_EQ(combine_blocks(config, p), 0);
  EXPECT_EQ(blocks_of(config, p) % config.cluster, 0);
  const Problem long_one = problem_of(1, 32, 8, 1, 2049);
  EXPECT_EQ(decode_config(hopper, long_one, true).cluster, 1);
  const Problem many = problem_of(8, 32, 8, 1, 2048);  // more blocks than multiprocessors
  EXPECT_EQ(decode_config(hopper, many, true).cluster, 1);
  const Problem brief = problem_of(1, 32, 8, 1, 64);
  EXPECT_EQ(decode_config(hopper, brief, true).cluster, 1);
  EXPECT_EQ(decode_workspace(decode_config(hopper, brief, true), brief).end, 0);
}

// A block that has a multiprocessor to itself has twice the bytes under way, if there are so many for it.
TEST(DecodePlan, BlocksAloneHaveMoreStages) {
  const DecodeConfig two = decode_config(hopper, problem_of(64, 32, 8, 1, 1024), false);
  const DecodeConfig one = decode_config(hopper, problem_of(1, 32, 8, 1, 8192), false);
  EXPECT_EQ(two.per_sm, 2);
  EXPECT_EQ(one.per_sm, 1);
  EXPECT_EQ(one.stages, 2 * two.stages);
  EXPECT_LE(shared_of(one), hopper.shared_per_block);
  EXPECT_EQ(decode_config(hopper, problem_of(1, 32, 8, 1, 2048), false).stages, two.stages);
  constexpr DeviceLimits small{80, 163 << 10, 108};
  EXPECT_EQ(decode_config(small, problem_of(1, 8, 2, 1, 8192), false).stages,
            decode_config(small, problem_of(64, 8, 2, 1, 8192), false).stages);
}

// A tile of many keys is one block's of twice the warps, and its keys are cut as they would be.
TEST(DecodePlan, LongTilesHaveAMultiprocessorEach) {
  const DecodeConfig two = decode_config(hopper, problem_of(64, 32, 8, 1, 1024), false);
  const Problem longer = problem_of(64, 32, 8, 1, 2048);
  const DecodeConfig one = decode_config(hopper, longer, false);
  EXPECT_EQ(two.per_sm, 2);
  EXPECT_EQ(one.per_sm, 1);
  EXPECT_EQ(one.warps, 2 * two.warps);
  EXPECT_EQ(one.stages, two.stages);
  EXPECT_TRUE(one.asks_early());
  EXPECT_LE(shared_of(one), hopper.shared_per_block);
  EXPECT_EQ(blocks_of(one, longer), 64 * 8);
  DecodeConfig as_two = two;
  as_two.aligned = one.aligned;
  const DecodeParams a = decode_params(hopper, one, longer, {}),
                     b = decode_params(hopper, as_two, longer, {});
  EXPECT_EQ(a.parts.divisor, b.parts.divisor);
  EXPECT_EQ(a.most_splits.divisor, b.most_splits.divisor);
  EXPECT_EQ(decode_config(hopper, problem_of(40, 32, 8, 1, 3000), true).warps, one.warps);
  // Not where num_splits is given, which counts blocks, nor where it was not measured.
  Problem given = longer;
  given.cache.num_splits = 1;
  EXPECT_EQ(decode_config(hopper, given, false).warps, two.warps);
  constexpr DeviceLimits ampere{80, 163 << 10, 108};
  EXPECT_EQ(decode_config(ampere, longer, false).warps,
            decode_config(ampere, problem_of(64, 32, 8, 1, 1024), false).warps);
}

// Blocks that begin when others have ended have no wait to ask for keys in.
TEST(DecodePlan, BlocksThatAGpuHasRoomForAskEarly) {
  const auto at_once = [](const DeviceLimits& limits, const Problem& p) {
    return decode_params(limits, decode_config(limits, p, false), p, {}).at_once;
  };
  const Problem brief = problem_of(64, 32, 8, 1, 1024), longer = problem_of(32, 64, 8, 1, 4096);
  EXPECT_EQ(at_once(hopper, brief), 2 * 132);
  EXPECT_EQ(at_once(hopper, longer), 132);
  EXPECT_EQ(blocks_of(decode_config(hopper, longer, false), longer), 32 * 8);
}

// Nothing outside the tensors is touched, whatever the device's lengths and tables say.
TEST(DecodePlan, LengthsAndPagesAreHeldToTheTensors) {
  const std::vector<std::int32_t> lengths = {-5, 2000, 100}, idx = {-1, 7, 2}, pad = {3, 5000, -1};
  Problem p = problem_of(3, 8, 2, 1, 1000);
  p.cache.seqlens = lengths.data();
  p.cache.batch_idx = idx.data();
  p.cache.leftpad = pad.data();
  AttentionParams attention{};
  attention.batch = 3;
  attention.rows_q = 1;
  attention.rows_k = 1000;
  const DecodeParams params = decode_params(hopper, decode_config(hopper, p, false), p, attention);
  EXPECT_EQ(params.sequence(0).seqlen_k, 0);
  EXPECT_EQ(params.sequence(1).before, 1000);
  EXPECT_EQ(params.sequence(1).seqlen_k, 0);  // all of it is padding
  EXPECT_EQ(params.sequence(2).seqlen_k, 100);
  EXPECT_EQ(params.slot(0, 5).block, 0);
  EXPECT_EQ(params.slot(1, 5).block, 2);

  const std::vector<std::int32_t> table = {4, -7, 5, 1 << 30, 2, 3};  // of two pages each
  p.cache.page_table = table.data();
  p.cache.page_table_row = 2;
  p.cache.page_size = 16;
  p.cache.blocks = 5;
  const DecodeParams paged = decode_params(hopper, decode_config(hopper, p, false), p, attention);
  for (const auto& [b, s, block] : {std::array{0, 15, 4}, {0, 16, 0}, {1, 0, 4}, {1, 31, 4}, {2, 17, 3}}) {
    for (const bool early : {false, true}) {
      EXPECT_EQ(paged.slot(b, s, early).block, block) << b << ", " << s;
      EXPECT_EQ(paged.slot(b, s, early).slot, s % 16) << b << ", " << s;
    }
  }
}

// As many bytes under way; whole pieces are 16 numbers; no tile of bytes is 96 wide; q may lie anywhere.
TEST(DecodePlan, CachesOfBytes) {
  Problem p = problem_of(2, 8, 2, 1, 4096);
  const DecodeConfig wide = decode_config(hopper, p, false);
  for (const DType dtype : {DType::float8_e4m3fn, DType::int8}) {
    p.k.dtype = p.v.dtype = dtype;
    p.head_dim = p.head_dim_v = 128;
    const DecodeConfig config = decode_config(hopper, p, false);
    EXPECT_EQ(config.stored, dtype == DType::int8 ? Stored::int8 : Stored::float8);
    EXPECT_EQ(config.product(), Half::float16);
    EXPECT_EQ(config.keys, 2 * wide.keys);
    EXPECT_EQ(config.stages, wide.stages);
    EXPECT_EQ(shared_of(config), shared_of(wide));
    EXPECT_TRUE(config.aligned);
    p.q.data = reinterpret_cast<void*>(2);
    EXPECT_TRUE(decode_config(hopper, p, false).aligned);
    p.q.data = nullptr;
    p.head_dim = 72;
    EXPECT_FALSE(decode_config(hopper, p, false).aligned);
    p.head_dim = 96;
    EXPECT_EQ(decode_config(hopper, p, false).head_dim, 128);
    float scales[2] = {};
    p.cache.v_scale = {scales, 1};
    const DecodeParams params = decode_params(hopper, config, p, {});
    EXPECT_EQ(params.stored, config.stored);
    EXPECT_EQ(params.v_scale.data, scales);
    EXPECT_EQ(params.k_scale.of(1), 1.0f);
  }
}

}  // namespace
}  // namespace tessera::cuda
