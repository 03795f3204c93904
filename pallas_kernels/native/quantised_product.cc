// Products with kernels of 8 or 4 bits as a function that XLA's programs call; with FLOAT_CODES, of such floats.

#include "quantised_product.h"
#include "call.h"

namespace {

using namespace native;

// Returns a layer's scales or minima; none if the array is empty.
GroupNumbers OfLayer(const ffi::AnyBuffer& numbers, int64_t layer) {
  const bool is_half = numbers.element_type() == ffi::F16;
  if (numbers.element_count() == 0) return {nullptr, is_half};
  const int64_t layer_bytes = numbers.size_bytes() / numbers.dimensions()[0];
  return {static_cast<const char*>(numbers.untyped_data()) + layer * layer_bytes, is_half};
}

// x [rows, inputs], codes [layers, panels, words, 32], scales and minima [layers, panels, groups, 32], layer
// -> y [rows, columns]; minima may be empty.
ffi::Error QuantisedProduct(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Buffer<ffi::U32> codes, ffi::AnyBuffer scales,
                            ffi::AnyBuffer minima, ffi::Buffer<ffi::S32> layer, ffi::ResultBuffer<ffi::F32> y) {
  const int64_t number = layer.typed_data()[0], num_words = codes.dimensions()[2];
  const int64_t layer_bytes = codes.size_bytes() / codes.dimensions()[0];
  const char* of_layer = static_cast<const char*>(codes.untyped_data()) + number * layer_bytes;
  const auto multiply = [&](auto kind) {
    MultiplyQuantised<Numbers, decltype(kind)>(pool, x.untyped_data(), of_layer, OfLayer(scales, number),
                                               OfLayer(minima, number), y->typed_data(), num_words,
                                               scales.dimensions()[2], x.dimensions()[0], y->dimensions()[1]);
  };
  if (auto error = CheckType(x.element_type()); error.failure()) return error;
#ifdef FLOAT_CODES
  multiply(FLOAT_CODES{});
#else
  const int64_t bits = 32 * num_words / x.dimensions()[1];
  bits == 8 ? multiply(Int8Codes{}) : multiply(Int4Codes{});
#endif
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxpaged_quantised_product, QuantisedProduct,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::U32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
