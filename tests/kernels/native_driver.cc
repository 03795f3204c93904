// The kernels as a program of their own, without XLA: for any target, and under an emulator if needed. Sizes are
// arguments, arrays come from standard input, one after the other, and the result goes to standard output.

#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>

#include "attention.h"
#include "bytes.h"
#include "low_rank.h"
#include "nibbles.h"
#include "product.h"
#include "quantised_product.h"

namespace {

using namespace native;

struct ThisThread {
  int64_t num_threads() const { return 1; }
  template <typename F>
  void Schedule(F) {}
};

// An array with inaccessible memory behind it: touching it ends the program.
template <typename Value>
struct Array {
  explicit Array(int64_t count) : bytes(count * sizeof(Value)) {
    const int64_t page = sysconf(_SC_PAGESIZE), whole = (bytes + page - 1) / page * page;
    void* pages = mmap(nullptr, whole + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON, -1, 0);
    char* end = static_cast<char*>(pages) + whole;
    mprotect(end, page, PROT_NONE);
    data = reinterpret_cast<Value*>(end - bytes);
  }
  int64_t bytes;
  Value* data;
};

template <typename Value>
Value* Read(int64_t count) {
  const Array<Value> array(count);
  if (fread(array.data, 1, array.bytes, stdin) != static_cast<size_t>(array.bytes)) exit(2);
  return array.data;
}

// Reads an array that may be absent, which has no numbers.
const float* ReadSome(int64_t count) { return count ? Read<float>(count) : nullptr; }

template <typename Value>
void Write(const Array<Value>& array) {
  fwrite(array.data, 1, array.bytes, stdout);
}

// rows steps columns
template <typename T>
void RunProduct(const std::vector<int64_t>& sizes) {
  const ProductShape shape{sizes[0], sizes[1], sizes[2]};
  const auto* x = Read<char>(shape.rows * shape.steps * 4);
  const auto* kernel = Read<char>(shape.kernel_bytes());
  const Array<float> y(shape.rows * shape.columns);
  ThisThread pool;
  Multiply<T>(pool, x, kernel, y.data, shape);
  Write(y);
}

// rows words groups columns, bits of a code, whether there are minima, and whether codes are floats
template <typename T>
void RunQuantisedProduct(const std::vector<int64_t>& sizes, bool is_half) {
  const int64_t rows = sizes[0], words = sizes[1], groups = sizes[2], columns = sizes[3], bits = sizes[4];
  const int64_t panels = (columns + kPanelColumns - 1) / kPanelColumns;
  const auto* x = Read<char>(rows * words * (32 / bits) * sizeof(typename T::Value));
  const auto* codes = Read<char>(panels * words * kStepBytes);
  const int64_t number_bytes = panels * groups * kPanelColumns * (is_half ? 2 : 4);
  const auto* scales = Read<char>(number_bytes);
  const auto* minima = sizes[5] ? Read<char>(number_bytes) : nullptr;
  const Array<float> y(rows * columns);
  ThisThread pool;
  const auto multiply = [&](auto kind) {
    MultiplyQuantised<T, decltype(kind)>(pool, x, codes, {scales, is_half}, {minima, is_half}, y.data, words, groups,
                                         rows, columns);
  };
  if (sizes[6]) return (bits == 8 ? multiply(Float8Codes{}) : multiply(Float4Codes{})), Write(y);
  bits == 8 ? multiply(Int8Codes{}) : multiply(Int4Codes{});
  Write(y);
}

// rows inputs rank columns choices, widths
template <typename N>
void RunLowRank(const std::vector<int64_t>& sizes) {
  using Value = typename N::Type::Value;
  const int64_t rows = sizes[0], inputs = sizes[1], columns = sizes[3], choices = sizes[4];
  const LowRankShape shape{rows, inputs, sizes[2], columns, sizes.data() + 5, static_cast<int64_t>(sizes.size()) - 5};
  auto* y = Read<float>(rows * columns);
  const auto* x = reinterpret_cast<const char*>(Read<Value>(rows * inputs));
  const auto* a = reinterpret_cast<const char*>(Read<Value>(choices * shape.a_numbers()));
  const auto* b = reinterpret_cast<const char*>(Read<Value>(choices * shape.b_numbers()));
  const auto* chosen = Read<int32_t>(rows);
  ThisThread pool;
  AddLowRanks<N>(pool, x, a, b, chosen, choices, y, shape);
  fwrite(y, sizeof(float), rows * columns, stdout);
}

// num_tiles tile_len num_q_heads head_dim num_kv_heads block_size max_blocks, bytes of a cache, window, then of K and V
// the first number of V and the strides of blocks, tokens and heads, and of scales their number and these strides; chunk,
// numbers of slopes and of sinks
template <typename T, typename C>
void RunAttention(const std::vector<int64_t>& sizes) {
  using Value = typename T::Value;
  const int64_t num_queries = sizes[0] * sizes[1] * sizes[2] * sizes[3], bytes = sizeof(typename C::Value);
  const auto* q = Read<Value>(num_queries);
  const auto* k = Read<char>(sizes[7]);
  const auto* v = sizes[9] ? k + sizes[9] * bytes : Read<char>(sizes[7]);
  const auto *k_scales = ReadSome(sizes[13]), *v_scales = ReadSome(sizes[13]);
  const auto* tables = Read<int32_t>(sizes[0] * sizes[6]);
  const auto *starts = Read<int32_t>(sizes[0]), *lens = Read<int32_t>(sizes[0]);
  const auto *scale = Read<float>(1), *soft_cap = Read<float>(1);
  const auto *slopes = ReadSome(sizes[18]), *sinks = ReadSome(sizes[19]);
  const Array<Value> out(num_queries);
  ThisThread pool;
  AttendAll(pool, AttentionCall<T, C>{q, k, v, tables, starts, lens, k_scales, v_scales, out.data, sizes[0], sizes[1],
                                      sizes[2], sizes[3], sizes[4], sizes[5], sizes[6],
                                      {sizes[10] * bytes, sizes[11] * bytes, sizes[12] * bytes},
                                      {sizes[14], sizes[15], sizes[16]}, *scale, sizes[8], sizes[17], {}, 0, 1, nullptr,
                                      *soft_cap, slopes, sinks});
  Write(out);
}

// num_tiles tile_len num_q_heads head_dim num_kv_heads block_size max_blocks window num_blocks, then the strides of blocks,
// tokens and heads of codes, of K's scales, of k_new and of V's scales; chunk, numbers of slopes and of sinks
template <typename T>
void RunPackedAttention(const std::vector<int64_t>& sizes) {
  using Value = typename T::Value;
  const auto strides = [&](int i) { return Strides{sizes[i], sizes[i + 1], sizes[i + 2]}; };
  const int64_t num_queries = sizes[0] * sizes[1] * sizes[2] * sizes[3], blocks = sizes[8];
  const auto* q = Read<Value>(num_queries);
  const auto* k = Read<char>(blocks * sizes[9]);
  const auto *k_scale = Read<uint16_t>(blocks * sizes[12]), *k_zero = Read<uint16_t>(blocks * sizes[12]);
  const auto* k_new = Read<Value>(blocks * sizes[15]);
  const auto* new_group = Read<int32_t>(blocks);
  const auto* v = Read<char>(blocks * sizes[9]);
  const auto *v_scale = Read<uint16_t>(blocks * sizes[18]), *v_zero = Read<uint16_t>(blocks * sizes[18]);
  const auto* tables = Read<int32_t>(sizes[0] * sizes[6]);
  const auto *starts = Read<int32_t>(sizes[0]), *lens = Read<int32_t>(sizes[0]);
  const auto *scale = Read<float>(1), *soft_cap = Read<float>(1);
  const auto *slopes = ReadSome(sizes[22]), *sinks = ReadSome(sizes[23]);
  const Array<Value> out(num_queries);
  ThisThread pool;
  const Packing<Nibbles<T>> packing{k_scale,   k_zero,   v_scale,     v_zero,      k_new,
                                    new_group, sizes[5], strides(12), strides(18), strides(15)};
  AttendAll(pool, AttentionCall<T, Nibbles<T>>{q, k, v, tables, starts, lens, nullptr, nullptr, out.data, sizes[0],
                                               sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], sizes[6], strides(9),
                                               {sizes[5], 1, 0}, *scale, sizes[7], sizes[21], packing, 0, 1, nullptr,
                                               *soft_cap, slopes, sinks});
  Write(out);
}

template <typename T>
void RunAttention(const std::vector<int64_t>& sizes, const std::string& cache) {
  if (cache == "uint8") return RunPackedAttention<T>(sizes);
  if (cache == "int8") return RunAttention<T, Int8>(sizes);
  if (cache == "float8_e4m3fn") return RunAttention<T, Float8<4>>(sizes);
  if (cache == "float8_e5m2") return RunAttention<T, Float8<5>>(sizes);
  RunAttention<T, T>(sizes);
}

}  // namespace

// The function, the type of x or q, that of the cache or the scales, sizes
int main(int argc, char** argv) {
  const std::string function = argv[1];
  const bool is_wide = std::string(argv[2]) == "float32", is_half = std::string(argv[3]) == "float16";
  std::vector<int64_t> sizes;
  for (int i = 4; i < argc; ++i) sizes.push_back(atoll(argv[i]));
  if (function == "product") {
    is_wide ? RunProduct<Float32>(sizes) : RunProduct<BFloat16>(sizes);
  } else if (function == "quantised_product") {
    is_wide ? RunQuantisedProduct<Float32>(sizes, is_half) : RunQuantisedProduct<BFloat16>(sizes, is_half);
  } else if (function == "low_rank") {
    is_wide ? RunLowRank<NarrowFloat32>(sizes) : RunLowRank<NarrowBFloat16>(sizes);
  } else {
    is_wide ? RunAttention<Float32>(sizes, argv[3]) : RunAttention<BFloat16>(sizes, argv[3]);
  }
}
