// Continuous batching over a paged cache, on the CPU or a GPU: what the attention of a language model's
// server does.
//
//   example_serve --check                         a made-up model on the CPU
//   example_serve --device cuda --layers 32 --pages 40000 --requests 500 --batch 128
//
// Requests arrive, wait until the cache has room for them, have their prompts put into it, chunk by chunk,
// and then grow by a token a step. All sequences of a step, those in their prompts and those past them, are
// one decode call a layer: q is packed, 1 to --chunk rows a sequence, and the call appends the new keys and
// values to the pages itself. A request that is done gives its pages back.
//
// Attention is all there is; the rest of the model is made up (made_up_model.h). --check computes the last
// token's attention of every request anew, plainly and in double precision.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <deque>
#include <exception>
#include <initializer_list>
#include <memory>
#include <random>
#include <string>
#include <tessera/tessera.hpp>
#include <thread>
#include <utility>
#include <vector>

#include "device.h"
#include "made_up_model.h"

namespace {

using example::Buffer;
using example::Device;
using example::Model;

struct Flags : example::ModelShape {
  std::string device = "cpu", kernel;
  std::int64_t requests = 32, batch = 16, chunk = 256, prompt = 512, generate = 64;
  double arrivals = 0.5;
  int threads = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  bool check = false, quiet = false;

  [[nodiscard]] std::int64_t pages_of(std::int64_t tokens) const {
    return (tokens + page_size - 1) / page_size;
  }
};

// ---- Requests.

struct Request {
  std::int64_t id = 0;
  std::int64_t arrival = 0;               // the step from which on it is there
  std::int64_t prompt = 0, generate = 0;  // tokens
  std::int64_t cached = 0;                // tokens whose keys are in the cache
  std::vector<std::int32_t> pages;
  bool waited = false;                 // for pages
  std::vector<example::Place> places;  // for --check: of each of its tokens

  // The last token that is generated is never fed back.
  [[nodiscard]] std::int64_t tokens() const { return prompt + generate - 1; }
  [[nodiscard]] bool in_prompt() const { return cached < prompt; }
};

std::deque<Request> make_requests(const Flags& flags) {
  std::mt19937 engine(flags.seed);
  // Not a distribution of the standard library: those differ from one to the next.
  const auto up_to = [&](std::int64_t most) { return 1 + static_cast<std::int64_t>(engine() % most); };
  std::deque<Request> requests;
  double clock = 0;
  for (std::int64_t id = 0; id < flags.requests; ++id) {
    Request& request = requests.emplace_back();
    request.id = id;
    request.arrival = static_cast<std::int64_t>(clock);
    request.prompt = up_to(flags.prompt);
    request.generate = up_to(flags.generate);
    clock += 2.0 * static_cast<double>(engine()) / 4294967296.0 / flags.arrivals;
  }
  return requests;
}

// ---- Pages.

// A request is let in only if the pages that it and all others will have in the end are there, so that none
// gets stuck half-way; it takes them one by one.
class PagePool {
 public:
  explicit PagePool(std::int64_t count) {
    for (std::int64_t page = count; page > 0; --page) free_.push_back(static_cast<std::int32_t>(page - 1));
  }

  [[nodiscard]] bool promise(std::int64_t count) {
    if (static_cast<std::int64_t>(free_.size()) < promised_ + count) return false;
    promised_ += count;
    return true;
  }
  [[nodiscard]] std::int32_t take() {
    const std::int32_t page = free_.back();
    free_.pop_back();
    --promised_;
    return page;
  }
  void give_back(const std::vector<std::int32_t>& pages) {
    free_.insert(free_.end(), pages.begin(), pages.end());
  }
  [[nodiscard]] std::size_t free() const { return free_.size(); }

 private:
  std::vector<std::int32_t> free_;
  std::int64_t promised_ = 0;
};

// ---- A step's batch.

// The tokens that one request has in a step.
struct Part {
  Request* request;
  std::int64_t row, tokens;
  [[nodiscard]] bool is_last() const { return request->cached + tokens == request->tokens(); }
};

// The lengths and the page table: one array of int32, sent to the device at once.
class Lengths {
 public:
  Lengths(const Flags& flags, const Device& device)
      : device_(device),
        width_(flags.pages_of(flags.prompt + flags.generate - 1)),
        numbers_(device, static_cast<std::size_t>(2 * flags.batch + 1 + flags.batch * width_) * 4) {}

  void fill(tessera::Decode& call, const std::vector<Part>& parts) {
    const auto batch = static_cast<std::int64_t>(parts.size());
    host_.assign(static_cast<std::size_t>(2 * batch + 1 + batch * width_), 0);
    std::int32_t* cu_seqlens = host_.data();
    std::int32_t* cache_seqlens = cu_seqlens + batch + 1;
    std::int32_t* table = cache_seqlens + batch;
    std::int64_t longest = 0;
    for (std::int64_t b = 0; b < batch; ++b) {
      const Part& part = parts[static_cast<std::size_t>(b)];
      cu_seqlens[b + 1] = static_cast<std::int32_t>(part.row + part.tokens);
      cache_seqlens[b] = static_cast<std::int32_t>(part.request->cached);
      std::copy(part.request->pages.begin(), part.request->pages.end(), table + b * width_);
      longest = std::max(longest, part.tokens);
    }
    device_.upload(numbers_.data(), host_.data(), host_.size() * 4);
    call.options.cu_seqlens_q = call.options.cu_seqlens_k = tensor(cu_seqlens, {batch + 1});
    call.cache_seqlens = tensor(cache_seqlens, {batch});
    call.page_table = tensor(table, {batch, width_});
    call.options.max_seqlen_q = longest;  // a GPU's lengths are not the host's to read
  }

 private:
  [[nodiscard]] tessera::Tensor tensor(const std::int32_t* at,
                                       std::initializer_list<std::int64_t> shape) const {
    const auto offset = static_cast<std::size_t>(at - host_.data()) * 4;
    tessera::Tensor result(numbers_.at(offset), tessera::DType::int32, shape);
    result.device = device_.place();
    return result;
  }

  const Device& device_;
  std::int64_t width_;
  Buffer numbers_;
  std::vector<std::int32_t> host_;
};

// ---- The server.

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

template <class Work>
Seconds time(const Work& work) {
  const Clock::time_point begin = Clock::now();
  work();
  return Clock::now() - begin;
}

struct Totals {
  std::int64_t steps = 0, prompt_tokens = 0, generated = 0, waited = 0, checked = 0;
  double seconds = 0, bytes = 0;
  double seconds_of_decode = 0, bytes_of_decode = 0;  // steps without a prompt
  double worst = 0;
};

class Server {
 public:
  Server(const Flags& flags, const Device& device)
      : flags_(flags),
        device_(device),
        model_(flags, flags.chunk + flags.batch, device),
        lengths_(flags, device),
        pool_(flags.pages),
        arriving_(make_requests(flags)),
        workspace_(device, 0) {
    call_.options.causal = true;
    call_.options.kernel = flags.kernel;
    call_.options.num_threads = flags.threads;
    // What the workspace is sized by: constant, so that it goes by the batch and its prompts alone.
    call_.options.max_seqlen_k = flags.prompt + flags.generate - 1;
  }

  const Totals& run() {
    for (std::int64_t step = 0; !arriving_.empty() || !waiting_.empty() || !running_.empty(); ++step) {
      if (waiting_.empty() && running_.empty()) step = std::max(step, arriving_.front().arrival);  // idle
      admit(step);
      const std::vector<Part> parts = next_batch(step);
      attend(step, parts);
      if (!flags_.quiet && totals_.steps % 32 == 0) {
        std::printf(
            "step %5lld: %3zu sequences in the batch, %3zu wait, %5zu pages free, %lld tokens generated\n",
            static_cast<long long>(step), parts.size(), waiting_.size(), pool_.free(),
            static_cast<long long>(totals_.generated));
      }
      retire();
    }
    return totals_;
  }
  [[nodiscard]] const Model& model() const { return model_; }

 private:
  // First come, first served.
  void admit(std::int64_t step) {
    for (; !arriving_.empty() && arriving_.front().arrival <= step; arriving_.pop_front())
      waiting_.push_back(std::move(arriving_.front()));
    while (!waiting_.empty() && static_cast<std::int64_t>(running_.size()) < flags_.batch) {
      Request& next = waiting_.front();
      if (!pool_.promise(flags_.pages_of(next.tokens()))) {
        totals_.waited += next.waited ? 0 : 1;
        next.waited = true;
        return;
      }
      running_.push_back(std::make_unique<Request>(std::move(next)));
      waiting_.pop_front();
    }
  }

  // A token of every sequence that is past its prompt; of the prompts together `chunk`, the oldest first.
  std::vector<Part> next_batch(std::int64_t step) {
    std::vector<Part> parts;
    std::int64_t row = 0, room = flags_.chunk;
    for (const auto& request : running_) {
      std::int64_t tokens = 1;
      if (request->in_prompt()) {
        tokens = std::min(request->prompt - request->cached, room);
        room -= tokens;
      }
      if (tokens == 0) continue;
      parts.push_back({request.get(), row, tokens});
      for (std::int64_t i = 0; flags_.check && i < tokens; ++i) request->places.push_back({step, row + i});
      const std::int64_t pages = flags_.pages_of(request->cached + tokens);
      while (static_cast<std::int64_t>(request->pages.size()) < pages) request->pages.push_back(pool_.take());
      row += tokens;
    }
    return parts;
  }

  void attend(std::int64_t step, const std::vector<Part>& parts) {
    const std::int64_t rows = parts.back().row + parts.back().tokens;
    Seconds aside{};  // what a server would not do here: compile and check
    const Clock::time_point begin = Clock::now();
    lengths_.fill(call_, parts);
    for (std::int64_t layer = 0; layer < flags_.layers; ++layer) {
      model_.fill(call_, step, layer, rows);
      if (layer == 0) aside += time([&] { prepare(); });
      tessera::decode(call_).or_throw();
      if (flags_.check) aside += time([&] { check(parts, layer); });
    }
    device_.wait();
    count(parts, rows, Seconds(Clock::now() - begin - aside).count());
  }

  // All layers' calls are alike.
  void prepare() {
    tessera::prepare(call_).or_throw();
    const std::size_t bytes = tessera::workspace_size(call_).or_throw();
    if (bytes > workspace_.bytes()) workspace_ = Buffer(device_, bytes + bytes / 2);
    call_.workspace = {workspace_.data(), workspace_.bytes()};
  }

  // The requests whose last token this is.
  void check(const std::vector<Part>& parts, std::int64_t layer) {
    for (const Part& part : parts) {
      if (!part.is_last()) continue;
      totals_.worst = example::worse(totals_.worst,
                                     model_.error(part.request->places, layer, part.row + part.tokens - 1));
      ++totals_.checked;
    }
  }

  void count(const std::vector<Part>& parts, std::int64_t rows, double seconds) {
    double bytes = static_cast<double>(rows) * model_.bytes_of_row();
    bool prompts = false;
    for (const Part& part : parts) {
      Request& request = *part.request;
      prompts = prompts || request.in_prompt();
      totals_.prompt_tokens += request.in_prompt() ? part.tokens : 0;
      bytes += static_cast<double>(request.cached) * model_.bytes_of_key();
      request.cached += part.tokens;
      totals_.generated += request.in_prompt() ? 0 : 1;  // the prompt's last token has the first
    }
    ++totals_.steps;
    totals_.seconds += seconds;
    totals_.bytes += bytes;
    if (prompts) return;
    totals_.seconds_of_decode += seconds;
    totals_.bytes_of_decode += bytes;
  }

  void retire() {
    std::erase_if(running_, [&](const std::unique_ptr<Request>& request) {
      if (request->cached < request->tokens()) return false;
      pool_.give_back(request->pages);
      return true;
    });
  }

  const Flags& flags_;
  const Device& device_;
  Model model_;
  Lengths lengths_;
  PagePool pool_;
  std::deque<Request> arriving_, waiting_;
  std::vector<std::unique_ptr<Request>> running_;
  tessera::Decode call_;
  Buffer workspace_;
  Totals totals_;
};

// ---- What it comes to.

// Bytes a second that as many threads read of the caches themselves, in a plain loop: the best of a few
// times.
double read_bandwidth(const std::vector<Buffer>& buffers, int threads) {
  double bytes = 0, best = 0;
  for (const Buffer& buffer : buffers) bytes += static_cast<double>(buffer.bytes());
  const int passes = 1 + static_cast<int>(1e8 / bytes);  // enough work that starting threads is none
  std::vector<std::uint64_t> sums(static_cast<std::size_t>(threads));
  const auto read_share = [&](std::size_t thread) {
    std::uint64_t sum = 0;
    for (int pass = 0; pass < passes; ++pass) {
      for (const Buffer& buffer : buffers) {
        const auto* words = static_cast<const std::uint64_t*>(buffer.data());
        const std::size_t share = buffer.bytes() / 8 / sums.size();
        for (std::size_t i = thread * share; i < (thread + 1) * share; ++i) sum += words[i];
      }
    }
    sums[thread] = sum;
  };
  for (int repeat = 0; repeat < 4; ++repeat) {
    const Seconds taken = time([&] {
      std::vector<std::jthread> team;
      for (std::size_t t = 0; t < sums.size(); ++t) team.emplace_back(read_share, t);
    });
    best = std::max(best, passes * bytes / taken.count());
  }
  static std::atomic<std::uint64_t> sink;  // a sum that nobody wants would not be made
  for (const std::uint64_t sum : sums) sink += sum;
  return best;
}

void print_share(const char* what, double bytes, double seconds, double bandwidth) {
  if (seconds == 0) return;
  std::printf("%s: %.3g GB in %.3g s, %.1f GB/s", what, bytes / 1e9, seconds, bytes / seconds / 1e9);
  if (bandwidth > 0) std::printf(", %.0f %% of memory's bandwidth", 100 * bytes / seconds / bandwidth);
  std::printf("\n");
}

int report(const Flags& flags, const Device& device, const Server& server, const Totals& totals) {
  const auto tokens = static_cast<double>(totals.prompt_tokens + totals.generated);
  std::printf(
      "%lld prompt tokens and %lld generated in %lld steps of %lld layers, %s: %.0f tokens/s, %.0f "
      "generated/s\n",
      static_cast<long long>(totals.prompt_tokens), static_cast<long long>(totals.generated),
      static_cast<long long>(totals.steps), static_cast<long long>(flags.layers),
      tessera::last_kernel().c_str(), tokens / totals.seconds,
      static_cast<double>(totals.generated) / totals.seconds);
  const double bandwidth =
      device.gpu() ? device.memory_bandwidth() : read_bandwidth(server.model().caches(), flags.threads);
  std::printf("%s: memory's bandwidth %s (%s)\n", device.name().c_str(),
              bandwidth > 0 ? (std::to_string(std::llround(bandwidth / 1e9)) + " GB/s").c_str() : "not known",
              device.gpu() ? "by its clock and width" : "measured, reading the cache");
  print_share("all steps", totals.bytes, totals.seconds, bandwidth);
  print_share("steps without a prompt", totals.bytes_of_decode, totals.seconds_of_decode, bandwidth);
  std::printf("%lld requests served, %lld of them waited for pages", static_cast<long long>(flags.requests),
              static_cast<long long>(totals.waited));
  // p is rounded to q's dtype in some kernels.
  const double allowed = flags.dtype == "bf16" ? 4e-3 : 1e-5;
  const bool right = totals.worst <= allowed;
  if (flags.check) {
    std::printf(", %lld results %s %.1e of plain attention%s", static_cast<long long>(totals.checked),
                right ? "within" : "WRONG: up to", totals.worst, right ? "" : " away");
  }
  std::printf("\n");
  return right ? 0 : 1;
}

int serve(const Flags& flags) {
  if (flags.heads % flags.heads_k != 0)
    throw CLI::ValidationError(
        "--heads",
        std::to_string(flags.heads) + ", expected a multiple of --heads-k, " + std::to_string(flags.heads_k));
  const std::int64_t longest = flags.pages_of(flags.prompt + flags.generate - 1);
  if (flags.pages < longest)
    throw CLI::ValidationError(
        "--pages",
        std::to_string(flags.pages) + ", expected room for the longest request, " + std::to_string(longest));
  const Device device(flags.device);
  Server server(flags, device);
  return report(flags, device, server, server.run());
}

void add_flags(CLI::App& app, Flags& flags) {
  const auto number = [&](const char* name, std::int64_t& value, const char* what, std::int64_t most) {
    app.add_option(name, value, what)->check(CLI::Range(std::int64_t{1}, most))->capture_default_str();
  };
  constexpr std::int64_t many = 1 << 24;
  app.add_option("--device", flags.device, "cpu or cuda")
      ->check(CLI::IsMember({"cpu", "cuda"}))
      ->capture_default_str();
  app.add_option("--dtype", flags.dtype, "bf16 or fp32")
      ->check(CLI::IsMember({"bf16", "fp32"}))
      ->capture_default_str();
  number("--layers", flags.layers, "Layers", 1024);
  number("--heads", flags.heads, "Query heads", 1024);
  number("--heads-k", flags.heads_k, "Key heads, a divisor of --heads", 1024);
  number("--head-dim", flags.head_dim, "Dimension of a head", 256);
  number("--pages", flags.pages, "Pages of the cache, in each layer", many);
  number("--page-size", flags.page_size, "Tokens of a page", many);
  number("--requests", flags.requests, "Requests in all", many);
  number("--batch", flags.batch, "Sequences of a step, at most", 65536);
  number("--chunk", flags.chunk, "Tokens of prompts of a step, at most", 65536);
  number("--prompt", flags.prompt, "Tokens of the longest prompt", many);
  number("--generate", flags.generate, "Tokens generated for a request, at most", many);
  app.add_option("--arrivals", flags.arrivals, "Requests that arrive in a step, on average")
      ->check(CLI::Range(1e-3, 1e6))
      ->capture_default_str();
  app.add_option("--seed", flags.seed, "Of the requests and of all numbers")->capture_default_str();
  app.add_option("--threads", flags.threads, "Threads of the CPU")
      ->check(CLI::Range(1, 4096))
      ->capture_default_str();
  app.add_option("--kernel", flags.kernel, "Force a kernel by name");
  app.add_flag("--check", flags.check,
               "Compute each request's last result anew and compare; exit 1 if it differs");
  app.add_flag("--quiet", flags.quiet, "No progress");
}

}  // namespace

int main(int argc, char** argv) {
  try {
    CLI::App app("Continuous batching over a paged cache");
    Flags flags;
    add_flags(app, flags);
    try {
      app.parse(argc, argv);
      return serve(flags);
    } catch (const CLI::ParseError& error) {
      return app.exit(error);
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
