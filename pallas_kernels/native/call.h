// What a function has that XLA's programs call.

#pragma once

#include "vector.h"
#include "xla/ffi/api/ffi.h"

namespace native {

namespace ffi = xla::ffi;

// f(Float32() or BFloat16()), or an error for another type.
template <typename F>
ffi::Error WithType(ffi::DataType type, F f) {
  if (type == ffi::F32) {
    f(Float32());
  } else if (type == ffi::BF16) {
    f(BFloat16());
  } else {
    return ffi::Error::InvalidArgument("numbers must be float32 or bfloat16");
  }
  return ffi::Error::Success();
}

}  // namespace native
