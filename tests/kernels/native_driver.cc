// The kernels as a program of their own, for an emulator of another processor: sizes are arguments, arrays come from
// standard input, one after the other, and the result goes to standard output.

#include <cstdio>
#include <cstdlib>
#include <string>

#include "attention.h"
#include "product.h"

namespace {

using namespace native;

struct ThisThread {
  int64_t num_threads() const { return 1; }
  template <typename F>
  void Schedule(F) {}
};

template <typename Value>
std::vector<Value> Read(int64_t count) {
  std::vector<Value> values(count);
  if (fread(values.data(), sizeof(Value), count, stdin) != static_cast<size_t>(count)) exit(2);
  return values;
}

template <typename Value>
void Write(const std::vector<Value>& values) {
  fwrite(values.data(), sizeof(Value), values.size(), stdout);
}

// rows steps columns
template <typename T>
void RunProduct(const std::vector<int64_t>& sizes) {
  const ProductShape shape{sizes[0], sizes[1], sizes[2]};
  const auto x = Read<char>(shape.rows * shape.steps * 4), kernel = Read<char>(shape.num_panels() * shape.panel_bytes());
  std::vector<float> y(shape.rows * shape.columns);
  ThisThread pool;
  Multiply<T>(pool, x.data(), kernel.data(), y.data(), shape);
  Write(y);
}

// num_tiles tile_len num_q_heads head_dim num_kv_heads block_size max_blocks, bytes of a cache, window
template <typename T>
void RunAttention(const std::vector<int64_t>& sizes) {
  using Value = typename T::Value;
  const auto q = Read<Value>(sizes[0] * sizes[1] * sizes[2] * sizes[3]);
  const auto k = Read<char>(sizes[7]), v = Read<char>(sizes[7]);
  const auto tables = Read<int32_t>(sizes[0] * sizes[6]), starts = Read<int32_t>(sizes[0]), lens = Read<int32_t>(sizes[0]);
  const auto scale = Read<float>(1);
  std::vector<Value> out(q.size());
  ThisThread pool;
  AttendAll(pool, AttentionCall<T>{q.data(), k.data(), v.data(), tables.data(), starts.data(), lens.data(), out.data(),
                                   sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], sizes[6], scale[0],
                                   sizes[8]});
  Write(out);
}

}  // namespace

int main(int argc, char** argv) {
  const bool is_product = std::string(argv[1]) == "product", is_wide = std::string(argv[2]) == "float32";
  std::vector<int64_t> sizes;
  for (int i = 3; i < argc; ++i) sizes.push_back(atoll(argv[i]));
  const auto run = is_product ? (is_wide ? RunProduct<Float32> : RunProduct<BFloat16>)
                              : (is_wide ? RunAttention<Float32> : RunAttention<BFloat16>);
  run(sizes);
}
