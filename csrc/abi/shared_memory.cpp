#include "abi/shared_memory.h"

#include <mutex>

cudaError_t normswap::ask_for_shared(const void* kernel, int bytes, AllowedShared& allowed) {
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  std::atomic<int>& known = allowed[device % 64];
  if (known.load(std::memory_order_relaxed) >= bytes) return cudaSuccess;
  static std::mutex mutex;
  const std::lock_guard<std::mutex> guard(mutex);
  if (known.load(std::memory_order_relaxed) >= bytes) return cudaSuccess;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error == cudaSuccess) known.store(bytes, std::memory_order_relaxed);
  return error;
}
