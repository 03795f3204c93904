// Products as a function that XLA's programs call.

#include "product.h"
#include "call.h"

namespace {

using namespace native;

// x [rows, inputs], kernels [layers, panels, steps, 32, 1 or 2], layer -> y [rows, columns].
ffi::Error Product(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer kernels, ffi::Buffer<ffi::S32> layer,
                   ffi::ResultBuffer<ffi::F32> y) {
  const ProductShape shape{x.dimensions()[0], kernels.dimensions()[2], y->dimensions()[1]};
  const char* kernel = static_cast<const char*>(kernels.untyped_data()) + layer.typed_data()[0] * shape.kernel_bytes();
  if (auto error = CheckType(kernels.element_type()); error.failure()) return error;
  Multiply<Numbers>(pool, x.untyped_data(), kernel, y->typed_data(), shape);
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
