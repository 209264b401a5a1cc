// Launches of kernels whose blocks have much shared memory, are clusters, or must all run at once.
#pragma once

#include <cuda_runtime.h>

#include <atomic>

#include "row_plan.h"

namespace normswap {
namespace {

struct LaunchShape {
  int64_t grid;
  int threads, shared;  // dynamic shared memory, in bytes
  int cluster;          // blocks of a cluster; 1: no clusters
  bool overlap;         // blocks may start before the kernel before has ended (sm_90: programmatic dependent launch)
};

// A kernel must ask for more than 48 KB of shared memory once a device.
template <auto kernel>
cudaError_t allow_shared(int bytes) {
  constexpr int without_asking = 48 * 1024 - kStatisticsBytes;
  static std::atomic<int> allowed[64];  // of this kernel, by device
  if (bytes <= without_asking) return cudaSuccess;
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  std::atomic<int>& known = allowed[device % 64];
  if (known.load(std::memory_order_relaxed) >= bytes) return cudaSuccess;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error == cudaSuccess) known.store(bytes, std::memory_order_relaxed);
  return error;
}

// Where kernels follow one another, lets the blocks of the next start as this one's leave, and waits for the kernels
// before this one, whose memory must not be touched sooner. A kernel launched with `overlap` must begin so.
__device__ inline void follow() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

template <auto kernel, class Args>
cudaError_t launch_block(const Args& args, const LaunchShape& shape, cudaStream_t stream) {
  if (const cudaError_t error = allow_shared<kernel>(shape.shared); error != cudaSuccess) return error;
  cudaLaunchAttribute attributes[2]{};
  cudaLaunchConfig_t config{};
  if (shape.cluster > 1) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = shape.cluster;
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  }
  if (shape.overlap) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  config.gridDim = dim3(static_cast<unsigned>(shape.grid));
  config.blockDim = dim3(shape.threads);
  config.dynamicSmemBytes = shape.shared;
  config.stream = stream;
  config.attrs = attributes;
  return cudaLaunchKernelEx(&config, kernel, args);
}

// All blocks running at once, with `barrier_bytes` of zeros at `barriers`.
template <auto kernel, class Args>
cudaError_t launch_team(Args args, const LaunchShape& shape, void* barriers, int64_t barrier_bytes, cudaStream_t stream) {
  if (const cudaError_t error = allow_shared<kernel>(shape.shared); error != cudaSuccess) return error;
  const cudaError_t error = cudaMemsetAsync(barriers, 0, barrier_bytes, stream);
  if (error != cudaSuccess) return error;
  void* arguments[] = {&args};
  return cudaLaunchCooperativeKernel(reinterpret_cast<const void*>(kernel), dim3(static_cast<unsigned>(shape.grid)),
                                     dim3(shape.threads), arguments, shape.shared, stream);
}

}  // namespace
}  // namespace normswap
