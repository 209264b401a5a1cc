// Asking for shared memory: apart from launch.h, since every kernel's source would be longer to compile with <mutex>.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>

namespace normswap {

// Bytes that a kernel was allowed, by device.
using AllowedShared = std::atomic<int>[64];

// Allows the kernel so many bytes of dynamic shared memory on the current device.
cudaError_t ask_for_shared(const void* kernel, int bytes, AllowedShared& allowed);

}  // namespace normswap
