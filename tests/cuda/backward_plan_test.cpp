// The plan of backward: its workspace, and on Hopper the order of its blocks of keys.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "core/attention_params.h"
#include "cuda/plan/plan.h"
#include "cuda/plan_problem.h"

namespace tessera::cuda {
namespace {

constexpr DeviceLimits hopper{90, 227 << 10, 132};

TEST(BackwardPlan, WorkspaceIsDqAndDeltaAndLittleMore) {
  for (const int head_dim : {64, 128, 256}) {
    for (const bool deterministic : {false, true}) {
      Problem p = problem_of(2, 8192, 2048 / head_dim, head_dim);
      p.deterministic = deterministic;
      const BackwardConfig config = backward_config(hopper, p);
      const std::int64_t rows = 2LL * 8192 * (2048 / head_dim);
      const std::int64_t bytes = backward_workspace(config, p).end;
      EXPECT_GE(bytes, rows * head_dim * 4 + rows * 4);
      EXPECT_LE(bytes, rows * head_dim * 4 + rows * 4 + (1 << 20));
    }
  }
}

TEST(BackwardPlan, HopperFillsTheDeviceAndNoMore) {
  const Problem p = problem_of(3, 1000, 5, 64), large = problem_of(3, 1000, 50, 64);
  const Sm90BackwardConfig b = sm90_backward_config(hopper, p);
  const int blocks = tiles_of(1000, b.block_n);
  EXPECT_EQ(backward_tiles(b, p), 3 * blocks * 5);
  EXPECT_EQ(blocks_of(b, p, hopper), std::min(132, 3 * blocks * 5));
  EXPECT_EQ(blocks_of(b, large, hopper), 132);
  EXPECT_EQ(blocks_of(b, problem_of(3, 0, 5, 64), hopper), 0);
}

// The counter that deals out blocks of keys lies behind the turns, and is cleared with them.
TEST(BackwardPlan, TicketIsClearedAndNobodyElses) {
  for (const bool deterministic : {false, true}) {
    Problem p = problem_of(2, 1000, 3, 128);
    p.deterministic = deterministic;
    const Sm90BackwardConfig config = sm90_backward_config(hopper, p);
    const BackwardWorkspace w = backward_workspace(config, p);
    const std::int64_t turns = deterministic ? 2LL * tiles_of(1000, config.block_m) * 3 : 0;
    EXPECT_EQ(w.ticket, w.turn + turns * 4);
    EXPECT_LE(w.ticket + 4, w.end);
    EXPECT_EQ(w.ordered, deterministic);
    EXPECT_EQ(w.clear, deterministic ? w.turn : w.dq_acc);
    EXPECT_EQ(w.clear % 16, 0);
    EXPECT_EQ(w.end % 16, 0);
  }
}

// What is asked for, and what is the faster one where nobody asks.
TEST(BackwardPlan, OrderedIfAskedForOrFaster) {
  const auto ordered = [](Problem p, bool causal) {
    if (causal) p.window_right = 0;
    return sm90_backward_config(hopper, p).ordered;
  };
  for (const bool causal : {false, true}) {
    EXPECT_TRUE(ordered(problem_of(32, 512, 32, 64), causal));
    EXPECT_TRUE(ordered(problem_of(4, 4096, 16, 128), causal));
    EXPECT_FALSE(ordered(problem_of(2, 8192, 16, 128), causal));  // long
    EXPECT_FALSE(ordered(problem_of(32, 512, 8, 256), causal));   // added from registers
    Problem p = problem_of(1, 8192, 1, 256);
    p.deterministic = true;
    EXPECT_TRUE(ordered(p, causal));
  }
  // Few blocks of keys: without a mask they would all wait for the first.
  const Problem few = problem_of(1, 2048, 16, 64);
  EXPECT_TRUE(ordered(few, true));
  EXPECT_FALSE(ordered(few, false));
  Problem new_queries = few;  // which see nearly all keys
  new_queries.rows_q = new_queries.max_seqlen_q = 128;
  EXPECT_FALSE(ordered(new_queries, true));
  Problem capped = problem_of(32, 512, 32, 64);
  capped.softcap = 30.0F;
  EXPECT_FALSE(ordered(capped, true));
  EXPECT_FALSE(ordered(problem_of(1, 512, 1, 64), true));  // fewer than multiprocessors
}

// Turns are there where nobody asked for an order, too, and dq's sums are not cleared.
TEST(BackwardPlan, WorkspaceFollowsTheKernel) {
  const Problem p = problem_of(32, 512, 32, 64);
  const Sm90BackwardConfig config = sm90_backward_config(hopper, p);
  const BackwardWorkspace w = backward_workspace(config, p);
  EXPECT_FALSE(p.deterministic);
  EXPECT_TRUE(w.ordered);
  EXPECT_EQ(w.clear, w.turn);
  EXPECT_EQ(w.ticket - w.turn, 32LL * tiles_of(512, config.block_m) * 32 * 4);
  EXPECT_FALSE(backward_workspace(backward_config(hopper, p), p).ordered);
}

// Where sums of dq have an order, numbers deal out every block of keys once, and those of a list in its
// order.
TEST(BackwardPlan, OrderedDealsOutEveryBlockOfKeys) {
  for (const unsigned length : {1U, 2U, 7U, 64U}) {
    for (const unsigned lists : {1U, 2U, 5U, 33U}) {
      for (unsigned beside = 1; beside <= lists; ++beside) {
        SCOPED_TRACE(std::to_string(lists) + " lists of " + std::to_string(length) + ", " +
                     std::to_string(beside) + " side by side");
        const KeyOrder order{length, lists, beside};
        std::vector<unsigned> next(lists);
        for (unsigned number = 0; number < length * lists; ++number) {
          const unsigned place = order.place(number);
          ASSERT_LT(place, length * lists);
          ASSERT_EQ(place % length, next[place / length]++);
        }
        for (unsigned past = length * lists; past < length * lists + 300; ++past)
          ASSERT_EQ(order.place(past), past);
      }
    }
  }
}

TEST(BackwardPlan, OrderedHasListsSideBySide) {
  const auto order = [](const Problem& p) { return key_order(sm90_backward_config(hopper, p), p, hopper); };
  const KeyOrder few = order(problem_of(32, 512, 16, 128));
  EXPECT_EQ(few.length, 4U);
  EXPECT_EQ(few.lists, 32U * 16);
  EXPECT_EQ(few.beside, 66U);
  EXPECT_EQ(order(problem_of(1, 16384, 16, 128)).beside, 2U);
  EXPECT_EQ(order(problem_of(1, 1 << 20, 16, 128)).beside, 1U);
  EXPECT_EQ(order(problem_of(1, 512, 3, 128)).beside, 3U);
  EXPECT_EQ(order(problem_of(3, 0, 5, 64)).place(0), 0U);
  // Of packed sequences a list has all: what counts is how long one is.
  Problem packed = problem_of(32, 512 * 32, 16, 128);
  packed.packed = true;
  const Sm90BackwardConfig config = sm90_backward_config(hopper, packed);
  EXPECT_EQ(order(packed).lists, 16U);
  EXPECT_EQ(order(packed).length * 16, backward_tiles(config, packed));
  EXPECT_EQ(order(packed).beside, 16U);
  packed.batch = 0;
  EXPECT_EQ(order(packed).beside, 2U);
}

// Hopper's ordered backward, its waits alone: some blocks of threads that draw numbers, each the next one
// when its block of keys has begun, and wait for their turn at every block of queries.
struct OrderedBackward {
  NarrowMask mask;
  int block_m, block_n;
  unsigned lists, beside;

  [[nodiscard]] int n_blocks() const { return tiles_of(mask.seqlen_k, block_n); }
  [[nodiscard]] int m_blocks() const { return tiles_of(mask.seqlen_q, block_m); }
  [[nodiscard]] int turn(int m_block, int n_block) const {
    const int first = m_block * block_m;
    return KeyOrder::turn(mask, first, std::min(first + block_m, mask.seqlen_q), n_block, block_n);
  }
  // Blocks of queries that see some of a block of keys.
  [[nodiscard]] NarrowMask::Range steps(int n_block) const {
    const NarrowMask::Range rows =
        mask.rows_of_any({n_block * block_n, std::min((n_block + 1) * block_n, mask.seqlen_k)});
    if (rows.empty()) return {0, 0};
    return {rows.begin / block_m, tiles_of(rows.end, block_m)};
  }

  // Each block of queries is added to by each block of keys once, from the last to the first.
  void expect_turns() const {
    for (int m_block = 0; m_block < m_blocks(); ++m_block) {
      int expected = 0;
      for (int n_block = n_blocks() - 1; n_block >= 0; --n_block) {
        const NarrowMask::Range range = steps(n_block);
        if (m_block < range.begin || m_block >= range.end) continue;
        ASSERT_EQ(turn(m_block, n_block), expected++) << "queries " << m_block << ", keys " << n_block;
      }
    }
  }

  // Any of the blocks of threads that can go on does so, chosen by `seed`. False: none can, and work is left.
  [[nodiscard]] bool ends(unsigned blocks, unsigned seed) const {
    const auto length = static_cast<unsigned>(n_blocks());
    const KeyOrder order{length, lists, beside};
    struct Block {
      std::vector<unsigned> works;  // this one, and the next
      int done = 0;
    };
    std::vector<Block> all(blocks);
    std::vector<int> turns(std::size_t(lists) * m_blocks());
    unsigned drawn = 0;
    while (true) {
      std::vector<unsigned> able;
      bool left = drawn < length * lists;
      for (unsigned i = 0; i < blocks; ++i) {
        Block& block = all[i];
        while (block.works.size() < 2 && drawn < length * lists) block.works.push_back(order.place(drawn++));
        if (block.works.empty()) continue;
        left = true;
        const int n_block = n_blocks() - 1 - static_cast<int>(block.works[0] % length);
        const NarrowMask::Range range = steps(n_block);
        const int m_block = range.begin + block.done;
        if (m_block >= range.end ||
            turns[block.works[0] / length * m_blocks() + m_block] == turn(m_block, n_block))
          able.push_back(i);
      }
      if (!left) return true;
      if (able.empty()) return false;
      seed = seed * 1664525 + 1013904223;
      Block& block = all[able[(seed >> 16) % able.size()]];
      const int n_block = n_blocks() - 1 - static_cast<int>(block.works[0] % length);
      const NarrowMask::Range range = steps(n_block);
      const int m_block = range.begin + block.done++;
      if (m_block < range.end) ++turns[block.works[0] / length * m_blocks() + m_block];
      if (m_block + 1 >= range.end) {
        block.works.erase(block.works.begin());
        block.done = 0;
      }
    }
  }
};

TEST(BackwardPlan, OrderedEndsOnAnyDevice) {
  constexpr int all = NarrowMask::unbounded;
  for (const auto& [left, right] : {std::pair{all, all}, {all, 0}, {300, 0}, {200, 100}, {0, all}}) {
    for (const auto& [seqlen_q, seqlen_k] : {std::pair{1, 1}, {640, 640}, {600, 1000}, {1000, 300}}) {
      for (const auto& [block_m, block_n] : {std::pair{128, 128}, {64, 128}, {64, 64}}) {
        for (const bool top_left : {false, true}) {
          const NarrowMask mask{seqlen_q, seqlen_k, left, right, top_left ? 0 : seqlen_k - seqlen_q};
          for (const unsigned beside : {1U, 3U}) {
            const OrderedBackward backward{mask, block_m, block_n, 4, beside};
            SCOPED_TRACE(std::to_string(seqlen_q) + " x " + std::to_string(seqlen_k) + " window " +
                         std::to_string(left) + ", " + std::to_string(right) + " tiles " +
                         std::to_string(block_m) + " x " + std::to_string(block_n));
            backward.expect_turns();
            for (const unsigned blocks : {1U, 2U, 3U, 7U, 132U})
              EXPECT_TRUE(backward.ends(blocks, blocks)) << blocks << " blocks of threads";
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace tessera::cuda
