#include "cli/decode_bench.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <random>

#include "cli/buffer.h"
#include "cli/machine.h"
#include "cli/read_peak.h"
#include "cli/table.h"

namespace tessera::cli {
namespace {

constexpr std::int64_t cache_heads = 8, cache_dim = 128, page_size = 16;
constexpr std::int64_t large_batch = 8;  // from which on the share has a goal
constexpr double wanted_percent = 80;

// One cache for all rows of a dtype: a batch is a way to cut it, and so are pages.
struct Cache {
  Store store{Store::Kind::huge};
  DType dtype;
  std::int64_t keys;
  Tensor k, v, pages;  // (keys, cache_heads, cache_dim); a table of all pages, in random order

  Cache(DType type, std::int64_t count)
      : dtype(type),
        keys(count),
        k(store.normal(type, {count, cache_heads, cache_dim})),
        v(store.normal(type, {count, cache_heads, cache_dim})) {
    std::vector<std::int32_t> order(static_cast<std::size_t>(count / page_size));
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), std::mt19937(1));  // NOLINT: the same in every run
    pages = store.integers(order);
  }
  [[nodiscard]] std::size_t bytes_of_tensor() const {
    return static_cast<std::size_t>(keys * cache_heads * cache_dim * size_of(dtype));
  }
  [[nodiscard]] std::vector<Span> spans() const {
    return {{k.data, bytes_of_tensor()}, {v.data, bytes_of_tensor()}};
  }
  // The same memory page by page, in the order of the table.
  [[nodiscard]] std::vector<Span> spans_of_pages() const {
    const std::size_t bytes = bytes_of_tensor() / static_cast<std::size_t>(keys / page_size);
    const auto* order = static_cast<const std::int32_t*>(pages.data);
    std::vector<Span> spans;
    for (std::int64_t i = 0; i < keys / page_size; ++i) {
      for (const Tensor& tensor : {k, v}) {
        const auto* from = static_cast<const std::byte*>(tensor.data);
        spans.push_back({from + static_cast<std::size_t>(order[i]) * bytes, bytes});
      }
    }
    return spans;
  }
};

// As many keys as are four times what the CPU's last level holds, if a quarter of the memory has room for
// them: a smaller cache is read from there in part, at whatever speed that has.
std::int64_t keys_beyond_last_level(DType dtype) {
  const std::int64_t key_bytes = 2 * cache_heads * cache_dim * size_of(dtype);
  const std::int64_t wanted = 4 * last_level_cache(), room = available_memory() / 4;
  std::int64_t keys = 65536;
  while (keys * key_bytes < wanted && 2 * keys * key_bytes <= room) keys *= 2;
  return keys;
}

struct Row {
  std::int64_t batch, group;
  bool paged;
};

// The call's own tensors are part of the store.
Decode make_call(const Cache& cache, const Row& row, const DecodeBenchFlags& flags, Store& store) {
  const std::int64_t seqlen = cache.keys / row.batch, heads_q = cache_heads * row.group;
  const auto cut = [&](const Tensor& tensor) {
    return row.paged
               ? Tensor(tensor.data, cache.dtype, {cache.keys / page_size, page_size, cache_heads, cache_dim})
               : Tensor(tensor.data, cache.dtype, {row.batch, seqlen, cache_heads, cache_dim});
  };
  Decode call;
  call.q = store.normal(cache.dtype, {row.batch, 1, heads_q, cache_dim});
  call.o = store.zeros(cache.dtype, {row.batch, 1, heads_q, cache_dim});
  call.k_cache = cut(cache.k);
  call.v_cache = cut(cache.v);
  call.cache_seqlens = store.integers(
      std::vector<std::int32_t>(static_cast<std::size_t>(row.batch), static_cast<std::int32_t>(seqlen)));
  if (row.paged) call.page_table = Tensor(cache.pages.data, DType::int32, {row.batch, seqlen / page_size});
  call.options.kernel = flags.kernel;
  call.options.num_threads = flags.threads;
  return call;
}

nlohmann::json measure_row(const Cache& cache, const Row& row, const DecodeBenchFlags& flags) {
  Store store(Store::Kind::real);
  Decode call = make_call(cache, row, flags, store);
  const std::size_t bytes = workspace_size(call).or_throw();
  const Memory workspace = allocate(bytes);
  call.workspace = {workspace.get(), bytes};
  const int threads = resolve_threads(flags.threads);
  const std::vector<Span> pages = row.paged ? cache.spans_of_pages() : std::vector<Span>();
  std::vector<double> read_rates, page_rates;
  const TimingPolicy policy = {
      .min_seconds = flags.quick ? 0.0 : flags.min_time, .min_repeats = flags.quick ? 3 : 7, .before = [&] {
        read_rates.push_back(measure_read_rate(threads, cache.spans()));
        if (row.paged) page_rates.push_back(measure_read_rate(threads, pages));
      }};
  const Timing timing = time_repeated(policy, [&](int) { decode(call).or_throw(); });
  const double rate = 2.0 * static_cast<double>(cache.bytes_of_tensor()) / timing.median;
  const double read_rate = median_of(read_rates);
  nlohmann::json result = {{"dtype", short_name(cache.dtype)},
                           {"batch", row.batch},
                           {"group", row.group},
                           {"heads_k", cache_heads},
                           {"head_dim", cache_dim},
                           {"seqlen", cache.keys / row.batch},
                           {"page_size", row.paged ? page_size : 0},
                           {"seconds", timing.median},
                           {"seconds_p10", timing.p10},
                           {"seconds_p90", timing.p90},
                           {"repeats", timing.repeats},
                           {"gbytes_per_second", rate / 1e9},
                           {"read_gbytes_per_second", read_rate / 1e9},
                           {"percent_of_read", 100 * rate / read_rate},
                           {"kernel", last_kernel()}};
  if (row.paged) result["page_read_gbytes_per_second"] = median_of(page_rates) / 1e9;
  return result;
}

const Table& row_table() {
  static const Table table({"dtype", "batch", "group", "seqlen", "cache      ", "   time", " GB/s",
                            "plain read", "page read", "% of plain", "kernel    "});
  return table;
}

void print_row(const nlohmann::json& row) {
  const auto integer = [&](const char* key) { return std::to_string(row[key].get<std::int64_t>()); };
  row_table().print_row({row["dtype"], integer("batch"), integer("group"), integer("seqlen"),
                         row["page_size"] == 0 ? "contiguous" : "pages of " + integer("page_size"),
                         seconds_text(row["seconds"]), fixed(row["gbytes_per_second"], 1),
                         fixed(row["read_gbytes_per_second"], 1),
                         row["page_size"] == 0 ? "" : fixed(row["page_read_gbytes_per_second"], 1),
                         fixed(row["percent_of_read"], 1), row["kernel"]});
}

}  // namespace

nlohmann::json measure_decode(const DecodeBenchFlags& flags) {
  nlohmann::json rows = nlohmann::json::array();
  if (flags.print) row_table().print_header();
  for (const DType dtype : flags.dtypes) {
    const Cache cache(dtype, flags.quick ? 4096 : keys_beyond_last_level(dtype));  // quick: a smoke test
    for (const std::int64_t batch : {1, 8, 32}) {
      for (const std::int64_t group : {1, 4, 8}) {
        for (const bool paged : {false, true}) {
          rows.push_back(measure_row(cache, {batch, group, paged}, flags));
          if (flags.print) print_row(rows.back());
        }
      }
    }
  }
  return rows;
}

std::vector<Figure> decode_figures(const nlohmann::json& rows) {
  std::map<std::int64_t, double> least;
  for (const nlohmann::json& row : rows) {
    if (row["batch"].get<std::int64_t>() < large_batch) continue;
    const double share = row["percent_of_read"];
    const auto [found, is_new] = least.try_emplace(row["group"].get<std::int64_t>(), share);
    if (!is_new) found->second = std::min(found->second, share);
  }
  std::vector<Figure> figures;
  figures.reserve(least.size());
  for (const auto& [group, share] : least) {
    figures.push_back({"decode, batch of " + std::to_string(large_batch) + " and more, group " +
                           std::to_string(group) + ", of a plain read, least",
                       share, true, wanted_percent, "%"});
  }
  return figures;
}

}  // namespace tessera::cli
