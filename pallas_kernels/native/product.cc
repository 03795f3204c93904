// Products as a function that XLA's programs call.

#include "product.h"
#include "call.h"

namespace {

using namespace native;

// x [rows, inputs], kernels [layers, panels, steps, 32, 1 or 2], layer -> y [rows, columns]. Or of each head one: x
// [heads, rows, inputs], kernels [layers * heads, ...] -> y [heads, rows, columns].
ffi::Error Product(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer kernels, ffi::Buffer<ffi::S32> layer,
                   ffi::ResultBuffer<ffi::F32> y) {
  const auto sizes = x.dimensions();
  const int64_t num_heads = sizes.size() == 3 ? sizes[0] : 1;
  const ProductShape shape{sizes[sizes.size() - 2], kernels.dimensions()[2], y->dimensions()[sizes.size() - 1]};
  if (auto error = CheckType(kernels.element_type()); error.failure()) return error;
  for (int64_t head = 0; head < num_heads; ++head) {
    const char* rows = static_cast<const char*>(x.untyped_data()) + head * shape.rows * shape.steps * 4;
    const int64_t number = layer.typed_data()[0] * num_heads + head;
    const char* kernel = static_cast<const char*>(kernels.untyped_data()) + number * shape.kernel_bytes();
    Multiply<Numbers>(pool, rows, kernel, y->typed_data() + head * shape.rows * shape.columns, shape);
  }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxpaged_product, Product,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
