// libFuzzer on the C ABI: calls that are nearly valid, each with a few faults.
//
// The bytes choose a small valid problem and then spoil some of its tensors, options and struct sizes. Every
// tensor gets a heap block of exactly the bytes that its (spoilt) shape and strides span, so that the address
// sanitizer sees any step outside; one that spans too much gets no memory at all, and must be refused. Two
// properties are checked besides "does not crash": a call that fails has a text and has written nothing.
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <vector>

#include "tessera/tessera.h"

namespace {

constexpr std::size_t max_block = 1 << 16;
constexpr int max_ndim = 6;

// The fuzzer's bytes as a stream of choices; zeros after its end.
class Choices {
 public:
  Choices(const std::uint8_t* data, std::size_t size) : data_(data), size_(size) {}

  std::uint8_t byte() { return next_ < size_ ? data_[next_++] : std::uint8_t{0}; }
  int below(int bound) { return byte() % bound; }
  bool rarely() { return byte() >= 248; }
  template <class T, std::size_t N>
  T one_of(const T (&list)[N]) {
    return list[byte() % N];
  }

 private:
  const std::uint8_t* data_;
  std::size_t size_, next_ = 0;
};

// No number from 300 to 2^31 - 1: the larger is refused, the smaller is quick.
std::int64_t wild_number(Choices& choices) {
  static constexpr std::int64_t list[] = {
      -1, 0, 1, 2, 3, 5, 9, 17, 257, -7, INT64_C(1) << 31, INT64_C(1) << 62, INT64_MAX, INT64_MIN};
  return choices.one_of(list);
}

struct Block {
  std::unique_ptr<std::uint8_t[]> bytes;
  std::vector<std::uint8_t> before;  // of an output
  std::size_t size = 0;
};

// A DLTensor with its own shape, strides and memory, all on the heap and all of exact size.
struct Owned {
  DLTensor tensor{};
  std::unique_ptr<std::int64_t[]> shape, strides;
  Block block;
};

class Call {
 public:
  explicit Call(Choices& choices) : choices_(choices) {}

  DLTensor* floats(std::vector<std::int64_t> shape, DLDataType type, bool output) {
    return make(std::move(shape), type, output, {});
  }
  DLTensor* ints(const std::vector<std::int32_t>& values) {
    return make({static_cast<std::int64_t>(values.size())}, {kDLInt, 32, 1}, false, values);
  }
  void snapshot() {
    for (Owned& owned : tensors_)
      owned.block.before.assign(owned.block.bytes.get(), owned.block.bytes.get() + owned.block.size);
  }
  [[nodiscard]] bool untouched() const {
    for (const Owned& owned : tensors_) {
      if (owned.block.size != 0 &&
          std::memcmp(owned.block.bytes.get(), owned.block.before.data(), owned.block.size) != 0)
        return false;
    }
    return true;
  }

 private:
  DLTensor* make(std::vector<std::int64_t> shape, DLDataType type, bool output,
                 const std::vector<std::int32_t>& values);
  void spoil(DLTensor& tensor, std::vector<std::int64_t>& shape, std::vector<std::int64_t>& strides);

  Choices& choices_;
  std::deque<Owned> tensors_;
};

// Bytes that the tensor spans; 0 without elements, all ones where they do not fit the largest block.
std::size_t span_of(const DLTensor& tensor, const std::vector<std::int64_t>& shape,
                    const std::vector<std::int64_t>& strides) {
  __int128 reach = 1;
  for (std::size_t i = 0; i < shape.size(); ++i) {
    if (shape[i] <= 0) return 0;
    if (shape[i] > 1 && strides[i] > 0) reach += static_cast<__int128>(shape[i] - 1) * strides[i];
    if (reach > static_cast<__int128>(max_block)) return ~std::size_t{0};
  }
  return static_cast<std::size_t>(reach) * ((tensor.dtype.bits * tensor.dtype.lanes + 7U) / 8U);
}

void Call::spoil(DLTensor& tensor, std::vector<std::int64_t>& shape, std::vector<std::int64_t>& strides) {
  const auto axis = [&] { return static_cast<std::size_t>(choices_.below(static_cast<int>(shape.size()))); };
  switch (choices_.below(8)) {
    case 0:
      shape[axis()] = wild_number(choices_);
      break;
    case 1:
      strides[axis()] = wild_number(choices_);
      break;
    case 2:
      tensor.dtype = {choices_.byte(), choices_.byte(), static_cast<std::uint16_t>(choices_.below(3))};
      break;
    case 3:
      tensor.device.device_type = static_cast<DLDeviceType>(choices_.below(12));
      break;
    case 4:
      shape.resize(static_cast<std::size_t>(choices_.below(max_ndim)), 1);
      strides.resize(shape.size(), 1);
      break;
    case 5:
      strides[axis()] = 0;
      break;
    case 6:
      shape[axis()] += 1;
      break;
    default:
      break;  // its pointer: see make()
  }
}

DLTensor* Call::make(std::vector<std::int64_t> shape, DLDataType type, bool output,
                     const std::vector<std::int32_t>& values) {
  Owned& owned = tensors_.emplace_back();
  DLTensor& tensor = owned.tensor;
  tensor.device = {kDLCPU, 0};
  tensor.dtype = type;
  std::vector<std::int64_t> strides(shape.size());
  const std::int64_t padding = choices_.byte() % 4 == 0 ? 3 : 0;
  std::int64_t stride = 1;
  for (std::size_t i = shape.size(); i-- > 0; stride = stride * (shape[i] > 0 ? shape[i] : 1) + padding)
    strides[i] = stride;
  bool compact = padding == 0;
  const bool bad = choices_.rarely();
  if (bad) {
    spoil(tensor, shape, strides);
    compact = false;
  }
  const bool expanded = !output && !bad && values.empty() && choices_.byte() % 8 == 0;
  if (expanded) strides[0] = 0;
  compact = compact && !expanded && choices_.byte() % 2 == 0;

  tensor.ndim = static_cast<std::int32_t>(shape.size());
  owned.shape = std::make_unique<std::int64_t[]>(shape.size());
  std::copy(shape.begin(), shape.end(), owned.shape.get());
  tensor.shape = owned.shape.get();
  if (compact) {
    tensor.strides = nullptr;
  } else {
    owned.strides = std::make_unique<std::int64_t[]>(strides.size());
    std::copy(strides.begin(), strides.end(), owned.strides.get());
    tensor.strides = owned.strides.get();
  }
  if (bad && choices_.rarely()) tensor.shape = nullptr;

  const std::size_t span = span_of(tensor, shape, strides);
  if (span > max_block || (bad && choices_.rarely())) return &tensor;  // without memory
  tensor.byte_offset = choices_.byte() % 4 == 0 ? 4 : 0;
  if (bad) tensor.byte_offset = static_cast<std::uint64_t>(choices_.below(9));
  owned.block.size = span + tensor.byte_offset;
  owned.block.bytes.reset(new std::uint8_t[owned.block.size]);
  for (std::size_t i = 0; i < owned.block.size; ++i)
    owned.block.bytes[i] = static_cast<std::uint8_t>(37 * i + span);
  const std::size_t wanted = values.size() * sizeof(std::int32_t);
  if (!values.empty() && span >= wanted)
    std::memcpy(owned.block.bytes.get() + tensor.byte_offset, values.data(), wanted);
  tensor.data = owned.block.bytes.get();
  return &tensor;
}

// A copy of a struct in a heap block of just struct_size bytes, or of 8 where nobody may look further.
template <class Struct>
std::unique_ptr<std::uint8_t[]> exact(Choices& choices, const Struct& value) {
  std::size_t size = sizeof(Struct);
  if (choices.rarely()) {
    static constexpr std::size_t list[] = {
        0, 1, 8, 16, 20, 24, 64, 96, 160, 4096, 5000, ~std::size_t{0}, ~std::size_t{7}};
    size = choices.one_of(list);
  }
  const std::size_t room = size < 8 || size > 4096 ? 8 : size;
  std::unique_ptr<std::uint8_t[]> block(new std::uint8_t[room]());
  std::memcpy(block.get(), &value, room < sizeof(Struct) ? room : sizeof(Struct));
  std::memcpy(block.get(), &size, sizeof size);
  if (size > sizeof(Struct) && choices.rarely()) block[room - 1] = 1;
  return block;
}

double wild_double(Choices& choices) {
  static const double list[] = {
      0.0, 0.5, 1.0, -1.0, 30.0, 1e-300, 1e300, -0.0, HUGE_VAL, -HUGE_VAL, __builtin_nan("")};
  return choices.one_of(list);
}

struct Lengths {
  std::vector<std::int32_t> cumulative, used;
  std::int64_t total = 0;
};

Lengths lengths_of(Choices& choices, std::int64_t batch, std::int64_t dense_rows, bool packed) {
  Lengths lengths;
  lengths.cumulative.push_back(0);
  for (std::int64_t b = 0; b < batch; ++b) {
    const int length = packed ? choices.below(12) : static_cast<int>(dense_rows);
    lengths.used.push_back(choices.below(length + 1));
    lengths.cumulative.push_back(lengths.cumulative.back() + length);
  }
  lengths.total = lengths.cumulative.back() + (packed ? choices.below(3) : 0);
  for (std::vector<std::int32_t>* list : {&lengths.cumulative, &lengths.used}) {
    if (!list->empty() && choices.rarely()) list->back() = choices.byte() - 100;
  }
  return lengths;
}

void require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "%s; last error: %s\n", what, tessera_last_error());
  std::abort();
}

void judge(Call& call, tessera_code code) {
  const bool has_text = std::strlen(tessera_last_error()) != 0;
  require(has_text == (code != TESSERA_OK), "a text if and only if there is an error");
  require(code != TESSERA_INTERNAL, "no internal error");
  require(code == TESSERA_OK || call.untouched(), "a failing call writes nothing");
}

struct AlignedBlock {
  void* data = nullptr;
  explicit AlignedBlock(std::size_t bytes) : data(std::aligned_alloc(64, (bytes + 63) / 64 * 64)) {}
  ~AlignedBlock() { std::free(data); }
  AlignedBlock(const AlignedBlock&) = delete;
  AlignedBlock& operator=(const AlignedBlock&) = delete;
};

// Asks for the size of the workspace, explains, runs.
template <class Args>
void exercise(Call& call, Choices& choices, Args args, tessera_code (*size_of)(const Args*, std::size_t*),
              tessera_code (*explain)(const Args*, char*, std::size_t*), tessera_code (*run)(const Args*)) {
  call.snapshot();
  const auto first = exact(choices, args);
  const auto* given = reinterpret_cast<const Args*>(first.get());
  std::size_t bytes = 0;
  tessera_code code = size_of(given, &bytes);
  judge(call, code);
  if (code != TESSERA_OK || bytes > (std::size_t{1} << 26)) bytes = 0;

  std::vector<char> text(static_cast<std::size_t>(choices.byte()) * 4);
  std::size_t room = text.size();
  judge(call, explain(given, text.data(), &room));

  if (bytes != 0 && choices.rarely()) bytes -= 1;
  const AlignedBlock workspace(bytes + 64);
  args.workspace = choices.rarely() ? static_cast<char*>(workspace.data) + 8 : workspace.data;
  args.workspace_bytes = bytes;
  const auto second = exact(choices, args);
  judge(call, run(reinterpret_cast<const Args*>(second.get())));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Choices choices(data, size);
  Call call(choices);
  static constexpr DLDataType types[] = {{kDLFloat, 32, 1}, {kDLFloat, 16, 1}, {kDLBfloat, 16, 1}};
  static constexpr DLDataType f32{kDLFloat, 32, 1};
  static constexpr std::int64_t dims[] = {1, 3, 8, 17, 40};

  const bool packed = choices.below(2) == 1;
  const std::int64_t batch = choices.below(4), heads_k = 1 + choices.below(3),
                     heads = heads_k * (1 + choices.below(3));
  const std::int64_t dim = choices.one_of(dims), dim_v = choices.one_of(dims);
  const Lengths of_q = lengths_of(choices, batch, choices.below(12), packed);
  const Lengths of_k = lengths_of(choices, batch, choices.below(12), packed);
  const std::int64_t dense_q = batch == 0 ? 3 : of_q.total / batch,
                     dense_k = batch == 0 ? 3 : of_k.total / batch;
  const std::int64_t rows_q = packed ? of_q.total : (dense_q < 0 ? 0 : dense_q),
                     rows_k = packed ? of_k.total : (dense_k < 0 ? 0 : dense_k);
  const DLDataType type = choices.one_of(types);
  const DLDataType type_o = choices.below(2) == 0 ? type : f32;
  const auto tokens = [&](std::int64_t rows, std::int64_t h, std::int64_t d) {
    return packed ? std::vector<std::int64_t>{rows, h, d} : std::vector<std::int64_t>{batch, rows, h, d};
  };
  const auto per_row = [&] {
    return packed ? std::vector<std::int64_t>{heads, rows_q}
                  : std::vector<std::int64_t>{batch, heads, rows_q};
  };

  tessera_options options;
  tessera_options_init(&options);
  const unsigned flags = choices.byte(), more = choices.byte();
  if ((flags & 1U) != 0) options.causal = 1;
  if ((flags & 2U) != 0) options.window_left = choices.below(6);
  if ((flags & 4U) != 0) options.window_right = choices.below(6);
  if ((flags & 8U) != 0) options.softcap = 2.5;
  if ((flags & 16U) != 0) options.alibi_slopes = call.floats({heads}, f32, false);
  if ((flags & 32U) != 0) {
    const std::int64_t wide_q = packed ? 12 : rows_q, wide_k = packed ? 12 : rows_k;
    options.max_seqlen_q = options.max_seqlen_k = packed ? 12 : 0;
    options.bias = call.floats(
        {choices.below(2) == 0 ? 1 : batch, heads, choices.below(2) == 0 ? 1 : wide_q, wide_k}, f32, false);
  }
  if ((flags & 64U) != 0) options.sinks = call.floats({heads}, f32, false);
  if ((flags & 128U) != 0) options.dropout_p = 0.25;
  if (packed) {
    options.cu_seqlens_q = call.ints(of_q.cumulative);
    options.cu_seqlens_k = call.ints(of_k.cumulative);
  }
  if ((more & 1U) != 0 && batch > 0) options.seqused_q = call.ints(of_q.used);
  if ((more & 2U) != 0 && batch > 0) options.seqused_k = call.ints(of_k.used);
  options.num_threads = choices.rarely() ? -1 : choices.below(3);
  options.alignment = choices.rarely() ? 9 : choices.below(2);
  if (choices.rarely()) options.dropout_p = wild_double(choices);
  if (choices.rarely()) options.softcap = wild_double(choices);
  if (choices.rarely()) options.window_left = wild_number(choices);
  if (choices.rarely()) options.offset = static_cast<std::uint64_t>(wild_number(choices));
  if (choices.rarely()) options.max_seqlen_k = choices.byte();
  if (choices.rarely()) options.kernel = "nonesuch";
  if (choices.rarely()) options.reserved = 1;
  if (choices.below(4) == 0) {
    options.has_softmax_scale = 1;
    options.softmax_scale = wild_double(choices);
  }
  const auto given_options = exact(choices, options);
  const auto* options_pointer = reinterpret_cast<const tessera_options*>(given_options.get());

  tessera_forward_args forward;
  tessera_forward_args_init(&forward);
  forward.q = call.floats(tokens(rows_q, heads, dim), type, false);
  forward.k = call.floats(tokens(rows_k, heads_k, dim), type, false);
  forward.v = call.floats(tokens(rows_k, heads_k, dim_v), type, false);
  forward.o = call.floats(tokens(rows_q, heads, dim_v), type_o, true);
  forward.lse = (more & 4U) != 0 ? nullptr : call.floats(per_row(), f32, true);
  forward.options = options_pointer;
  if (choices.rarely()) forward.q = nullptr;
  exercise(call, choices, forward, tessera_forward_workspace_size, tessera_explain_forward, tessera_forward);

  if ((more & 8U) != 0) {
    tessera_backward_args backward;
    tessera_backward_args_init(&backward);
    backward.q = forward.q;
    backward.k = forward.k;
    backward.v = forward.v;
    backward.o = forward.o;
    backward.lse = forward.lse != nullptr ? forward.lse : call.floats(per_row(), f32, false);
    backward.dout = call.floats(tokens(rows_q, heads, dim_v), type_o, false);
    if ((more & 16U) != 0) backward.dlse = call.floats(per_row(), f32, false);
    backward.dq = call.floats(tokens(rows_q, heads, dim), type_o, true);
    backward.dk = call.floats(tokens(rows_k, heads_k, dim), type_o, true);
    backward.dv = call.floats(tokens(rows_k, heads_k, dim_v), type, true);
    if ((more & 32U) != 0 && options.bias != nullptr) {
      // bias may be spoilt: a dbias of its shape is made only where that is small.
      const DLTensor& bias = *options.bias;
      std::vector<std::int64_t> shape;
      for (int i = 0; bias.shape != nullptr && i < bias.ndim; ++i) {
        if (bias.shape[i] >= 0 && bias.shape[i] < 300) shape.push_back(bias.shape[i]);
      }
      if (!shape.empty()) backward.dbias = call.floats(shape, f32, true);
    }
    if ((more & 64U) != 0) backward.dsinks = call.floats({heads}, f32, true);
    backward.options = options_pointer;
    exercise(call, choices, backward, tessera_backward_workspace_size, tessera_explain_backward,
             tessera_backward);
  }
  return 0;
}
