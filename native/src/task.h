// Stores a task's result in its error word.
#pragma once

#include <stdint.h>

#include "hostward.h"

namespace hostward {

// Returns `code`, and leaves it in `error` unless that is null or holds an earlier one.
inline int report(int code, int32_t* error) {
  if (code != HOSTWARD_OK && error != nullptr) {
    int32_t none = HOSTWARD_OK;
    __atomic_compare_exchange_n(error, &none, code, false, __ATOMIC_RELEASE, __ATOMIC_RELAXED);
  }
  return code;
}

}  // namespace hostward
