// What a function has that XLA's programs call.

#pragma once

#include <type_traits>

#include "helpers.h"
#include "vector.h"
#include "xla/ffi/api/ffi.h"

namespace native {

namespace ffi = xla::ffi;

// A library has kernels for one type, Float32 or BFloat16, which -DNUMBERS tells: nobody waits for those of the other.
using Numbers = NUMBERS;

// An error unless an array is of that type.
inline ffi::Error CheckType(ffi::DataType type) {
  if (type == (std::is_same_v<Numbers, Float32> ? ffi::F32 : ffi::BF16)) return ffi::Error::Success();
  return ffi::Error::InvalidArgument("the library has kernels for numbers of another type");
}

}  // namespace native

// Lets threads wait where those of another library do, if there is one; returns where.
extern "C" void* jaxpaged_wait_at(void* others) {
  if (others) native::places = static_cast<native::Places*>(others);
  return native::places;
}
